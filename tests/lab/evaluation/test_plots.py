import json

import pytest

from residua.commands.cli import main
from residua.lab.evaluation.compare import compare, published_beside, published_losses
from residua.lab.evaluation.plots import (
    RESIDUAL_COLOUR,
    _difference_figure,
    _loss_figure,
    _repeat_figure,
    _styles,
    draw,
    draw_published,
)
from residua.lab.evaluation.published import models
from residua.lab.records.figures import COLOURS

PNG = b"\x89PNG\r\n\x1a\n"


def assert_pictures(paths, names):
    assert [path.name for path in paths] == names
    for path in paths:
        assert path.read_bytes().startswith(PNG)


def test_a_comparison_with_seeds_gives_both_pictures(make_run, tmp_path):
    runs = [make_run(f"a{s}", seed=s) for s in (0, 1)]
    runs += [make_run(f"b{s}", connection="ddl", seed=s, offset=-0.1, steps=50) for s in (0, 1)]
    assert_pictures(draw(compare(runs), tmp_path / "new" / "folder"), ["loss.png", "difference.png"])


def test_repeated_and_other_target_tokens_get_separate_panels(make_run, tmp_path):
    runs = [make_run("a"), make_run("b", connection="ddl", offset=-0.1)]
    for run in runs:
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in (row for row in rows if "val_loss" in row):
            row |= {"repeated_loss": row["val_loss"] - 1, "other_loss": row["val_loss"] + 1}
        (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    comparison = compare(runs)
    assert_pictures(draw(comparison, tmp_path / "out"), ["loss.png", "difference.png", "repeats.png"])
    for panel, sign in zip(_repeat_figure(comparison).axes, (-1, 1), strict=True):
        assert [line.get_label() for line in panel.lines] == ["residual", "ddl"]
        for line, run in zip(panel.lines, comparison.runs, strict=True):
            assert line.get_xdata().tolist() == [point.step for point in run.validation]
            assert line.get_ydata().tolist() == pytest.approx([point.loss + sign for point in run.validation])


@pytest.mark.parametrize("evaluate", [True, False])
def test_a_single_run_gives_only_its_loss(make_run, tmp_path, evaluate):
    assert_pictures(draw(compare([make_run("a", evaluate=evaluate)]), tmp_path), ["loss.png"])


def test_runs_without_a_single_finite_point_are_still_drawn(make_run, tmp_path):
    a, b = make_run("a"), make_run("b", connection="ddl")
    (a / "metrics.jsonl").write_text("")
    (b / "metrics.jsonl").write_text('{"step": 1, "tokens": 2, "seconds": 0.1, "loss": NaN, "val_loss": NaN}\n')
    assert_pictures(draw(compare([a, b]), tmp_path), ["loss.png"])


def test_a_run_with_one_validation_also_shows_its_training_losses(make_run):
    run = make_run("a")
    *rows, last = (run / "metrics.jsonl").read_text().splitlines()
    (run / "metrics.jsonl").write_text("\n".join([*(row for row in rows if "val_loss" not in row), last]) + "\n")
    low, high = _loss_figure(compare([run])).axes[0].get_ylim()
    assert low < 4 + 3 / 100 < 4 + 3 / 50 < high


def test_no_two_groups_look_alike(make_run):
    runs = [make_run("baseline"), *(make_run(f"r{i}", connection=f"scheme-{i}") for i in range(2 * len(COLOURS)))]
    looks = [tuple(sorted(style.items())) for _, style in _styles(compare(runs))]
    assert len(set(looks)) == len(runs)


def test_a_group_looks_the_same_in_every_panel_of_every_picture(make_run):
    runs = [make_run("a"), make_run("b", connection="ddl"), make_run("c", connection="mhc")]
    for baseline in (None, "mhc"):
        comparison = compare(runs, baseline=baseline)
        shown = {
            (line.get_label().removesuffix(" (baseline)"), line.get_color())
            for figure in (_loss_figure(comparison), _difference_figure(comparison))
            for panel in figure.axes
            for line in panel.lines
            if not line.get_label().startswith("_")
        }
        assert shown == {("residual", RESIDUAL_COLOUR), ("ddl", COLOURS[0]), ("mhc", COLOURS[1])}


def test_rows_without_overlap_are_named_below_a_panel_or_in_place_of_it(make_run):
    """At 6 seconds a step, a run begins after the others have ended."""
    runs = [make_run("a"), make_run("slow", connection="ddl", seconds_per_step=6.0), make_run("c", connection="mhc")]
    steps, seconds = _difference_figure(compare(runs)).axes
    assert steps.get_xlabel() == "Training step"
    assert seconds.get_xlabel().splitlines() == [
        "Wall-clock time of the training steps (seconds)",
        "A slower run is seen earlier in its learning-rate schedule",
        "No common seconds with residual: ddl",
    ]
    assert not seconds.texts
    assert len(seconds.get_xticks()) > 0
    steps, seconds = _difference_figure(compare(runs[:2])).axes
    assert not steps.texts
    assert [text.get_text() for text in seconds.texts] == ["No common seconds with residual"]
    assert len(seconds.get_xticks()) == 0
    assert "ddl" in {line.get_label() for line in steps.lines}


@pytest.mark.parametrize(("pace", "said"), [(0.5, False), (0.52, False), (0.6, True), (0.3, False)])
def test_a_note_says_that_a_slower_run_is_earlier_in_its_schedule_at_equal_seconds(make_run, pace, said):
    steps, seconds = _difference_figure(
        compare([make_run("a"), make_run("b", connection="ddl", seconds_per_step=pace)])
    ).axes
    assert ("earlier in its learning-rate schedule" in seconds.get_xlabel()) is said
    assert steps.get_xlabel() == "Training step"


def test_incomparable_rows_are_marked_in_both_pictures(make_run):
    runs = [make_run("a", sequence_length=8), make_run("b", connection="ddl", sequence_length=8)]
    comparison = compare([*runs, make_run("c", connection="mhc", sequence_length=16)])
    steps, _ = _difference_figure(comparison).axes
    assert steps.get_xlabel().splitlines()[1] == "Cannot be compared with residual: mhc"
    assert "mhc (cannot be compared)" in {line.get_label() for line in _loss_figure(comparison).axes[0].lines}


def test_a_picture_begins_at_the_first_step_of_the_runs(make_run):
    runs = [make_run("a", steps=20), make_run("b", connection="ddl", steps=20)]
    assert {panel.get_xlim()[0] for panel in _difference_figure(compare(runs)).axes} == {0}


@pytest.mark.parametrize(("early", "said"), [(9.0, True), (None, False)])
def test_early_points_outside_the_axis_are_noted(early, said, make_run):
    runs = [make_run("a", steps=100), make_run("b", connection="ddl", steps=100)]
    if early is not None:
        rows = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
        next(row for row in rows if "val_loss" in row)["val_loss"] = early
        (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, seconds = _difference_figure(compare(runs)).axes
    assert ("Early points are cut off." in seconds.get_title(loc="right")) is said


def test_the_baseline_is_within_the_frame_however_far_the_others_are(make_run):
    for panel in _difference_figure(compare([make_run("a"), make_run("b", connection="ddl", offset=-0.5)])).axes:
        low, high = panel.get_ylim()
        assert low < -0.5 < 0 < high


def planted_small(make_run, name, connection, ends_at):
    """A run with the published depth and width, whose losses are the published ones, 0.01 higher."""
    folder = make_run(name, connection=connection)
    settings = json.loads((folder / "config.yaml").read_text())
    settings["model"] |= {"num_hidden_layers": 12, "hidden_size": 768}
    (folder / "config.yaml").write_text(json.dumps(settings))
    rows = [
        {"step": i, "tokens": int(at * 1e9), "seconds": i, "val_loss": loss + 0.01}
        for i, (at, loss) in enumerate(models()["small", connection].curve, 1)
        if at <= ends_at
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_published_curves_are_drawn_with_runs_of_their_scheme_and_size(make_run, tmp_path):
    folders = [planted_small(make_run, name, name, ends_at=5.5) for name in ("residual", "ddl-tc")]
    comparison = compare([*folders, make_run("other", connection="mhc")])
    (picture,) = draw_published(comparison, tmp_path)
    assert picture.stat().st_size > 10_000
    assert [model.preset for model in published_beside(comparison)] == ["residual", "ddl-tc"]
    rows = {row["run"]: row for row in published_losses(comparison)}
    for name in ("residual", "ddl-tc"):
        assert rows[name]["val_loss"] - rows[name]["published_loss"] == pytest.approx(0.01, abs=1e-6)
        assert rows[name]["same_size"]
    assert rows["other"]["published"] is rows["other"]["published_loss"] is None
    assert not rows["other"]["same_size"]


def test_the_command_prints_the_published_losses(make_run, capsys):
    folder = str(planted_small(make_run, "run", "ddl-ec", ends_at=5.5))
    assert main(["compare", folder, "--published"]) == 0
    assert "ddl-ec (DDL-TC), published at 124M" in capsys.readouterr().out
    assert main(["compare", folder, "--published", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"][0]["published_loss"] == pytest.approx(3.13, abs=0.05)
    assert main(["compare", folder, "--json"]) == 0
    assert "published" not in json.loads(capsys.readouterr().out)
