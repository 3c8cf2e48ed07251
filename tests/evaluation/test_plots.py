import pytest

from residua.evaluation.compare import compare
from residua.evaluation.plots import COLOURS, _styles, draw

PNG = b"\x89PNG\r\n\x1a\n"


def assert_pictures(paths, names):
    assert [path.name for path in paths] == names
    for path in paths:
        assert path.read_bytes().startswith(PNG)


def test_a_comparison_with_seeds_gives_both_pictures(make_run, tmp_path):
    runs = [make_run(f"a{s}", seed=s) for s in (0, 1)]
    runs += [make_run(f"b{s}", connection="ddl", seed=s, offset=-0.1, steps=50) for s in (0, 1)]
    assert_pictures(draw(compare(runs), tmp_path / "new" / "folder"), ["loss.png", "difference.png"])


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_single_run_gives_its_loss_alone(make_run, tmp_path, evaluate):
    assert_pictures(draw(compare([make_run("a", evaluate=evaluate)]), tmp_path), ["loss.png"])


def test_runs_without_a_single_finite_point_are_still_drawn(make_run, tmp_path):
    a, b = make_run("a"), make_run("b", connection="ddl")
    (a / "metrics.jsonl").write_text("")
    (b / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "seconds": 0.1, "loss": NaN, "val_loss": NaN}\n')
    assert_pictures(draw(compare([a, b]), tmp_path), ["loss.png"])


def test_no_two_groups_look_alike(make_run):
    runs = [make_run("baseline"), *(make_run(f"r{i}", connection=f"scheme-{i}") for i in range(2 * len(COLOURS)))]
    looks = [tuple(sorted(style.items())) for _, style in _styles(compare(runs))]
    assert len(set(looks)) == len(runs)
