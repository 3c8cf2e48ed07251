import json
import math
from dataclasses import replace

import pytest

from residua.lab.geometry import published as quoted
from residua.lab.geometry.models import MODELS
from residua.lab.geometry.references import references
from residua.lab.geometry.report import DASH, TITLES, groups, is_causal, summary, table, write_tables
from residua.lab.geometry.tasks import TASKS, task

PNG = b"\x89PNG\r\n\x1a\n"
SOURCES = {"published", "ours", "reference"}


def run(model="residual", seed=42, name="gyroscope", loss=4e-3, **changes):
    steps = range(0, 101, 20)
    record = {
        "kind": "run",
        "task": name,
        "model": model,
        "label": f"label of {model}",
        "seed": seed,
        "parameters": 1234,
        "causal": True,
        "causality_change": 0.0,
        "loss": loss,
        "best_loss": loss,
        "online_loss": loss,
        "position0_loss": 1.2e-2,
        "by_position": [1.2e-2, 2 * loss, loss, loss],
        "online_by_position": [[0, 1.3e-2, 1.2e-2], [3, loss, loss]],
        "norm_deviation": 0.25,
        "stream_norms": [1.0, 1.1, 1.3],
        "curve": [[step, loss * (1 + math.exp(-step / 20))] for step in steps],
        "gates": {"gamma": [[step, 0.5] for step in steps], "beta": [[step, 1.0] for step in steps]},
        "seconds": 10.0,
        "settings": {"steps": 100, "dim": 64},
    }
    return record | changes


def reflection(model="hybrid", seed=42, **changes):
    record = run(model, seed, "reflection", 0.09)
    for key in ("online_loss", "position0_loss", "by_position", "online_by_position", "norm_deviation", "stream_norms"):
        del record[key]
    return record | {"causal": None, "cosine": 0.956, "beta": None, "gamma": 0.055} | changes


@pytest.fixture
def records():
    found = []
    for name in ("gyroscope", "near-pi"):
        small = replace(task(name), dim=8, length=4, num_train=2, num_val=20)
        found += references(small)
        for seed, factor in ((42, 0.9), (123, 1.0), (456, 1.1)):
            found.append(run("residual", seed, name, 4e-3 * factor))
            leaky = {"causal": False, "causality_change": 0.3, "position0_leak": name == "gyroscope"}
            found.append(run("edelta-sequence", seed, name, 2e-3 * factor, online_loss=5e-3 * factor, **leaky))
    found += references(task("reflection"))
    found += [reflection(seed=seed) for seed in (1, 2)]
    return found


def cells(records, name):
    header, rows = table(records, name)
    assert all(len(row) == len(header) for row in rows)
    return [dict(zip(header, row)) for row in rows]


@pytest.mark.parametrize("name", ["gyroscope", "near-pi", "reflection"])
def test_every_row_says_whose_it_is_and_none_mixes(records, name):
    header, rows = table(records, name)
    assert header[0] == "source"
    assert {row[0] for row in rows} <= SOURCES
    ours = {group.name for group in groups(records, name)}
    theirs = {row["label"] for row in quoted.published(name)}
    assert ours.isdisjoint(theirs)
    for row in rows:
        assert (row[1] in ours) == (row[0] == "ours")
        assert (row[1] in theirs) == (row[0] == "published")
    assert {row[0] for row in rows} == SOURCES


def test_the_numbers_of_a_published_row_are_the_published_ones_whatever_was_measured(records):
    def theirs(given, name):
        return [row for row in summary(given, name) if row["source"] == "published"]

    for name in TASKS:
        assert theirs(records, name) == theirs([], name)
        assert all("citation" in row for row in theirs(records, name))
    changed = [record | {"loss": 1.0, "online_loss": 2.0, "cosine": 0.1} for record in records]
    assert theirs(changed, "gyroscope") == theirs(records, "gyroscope")
    assert not any("citation" in row for row in summary(records, "gyroscope") if row["source"] == "ours")


def test_means_and_sample_deviations_over_seeds(records):
    rows = {row["model"]: row for row in cells_by_model(records, "gyroscope")}
    ours = rows["residual"]
    assert ours["seeds"] == 3
    assert ours["loss"] == pytest.approx((4e-3, 4e-4, 3))
    text = next(row for row in cells(records, "gyroscope") if row["model"] == "label of residual")
    assert text["MSE, full sequence"] == "4.00e-03 ± 4.0e-04"
    assert text["seeds"] == "3"
    assert text["parameters"] == "1,234"
    assert text["norm deviation"] == "0.25 ± 0"


def cells_by_model(records, name):
    return [row for row in summary(records, name) if row["source"] == "ours"]


def test_full_online_position_0_and_the_badge_stand_beside_each_other(records):
    rows = {row["model"]: row for row in cells(records, "gyroscope") if row["source"] == "ours"}
    causal, leaky = rows["label of residual"], rows["label of edelta-sequence"]
    assert causal["causal"] == "causal"
    assert causal["MSE, full sequence"] == causal["MSE, online"]
    assert leaky["causal"] == "not causal"
    assert leaky["MSE, full sequence"] == "2.00e-03 ± 2.0e-04"
    assert leaky["MSE, online"] == "5.00e-03 ± 5.0e-04"
    assert leaky["MSE, position 0"].endswith("(leak)")
    assert "leak" not in causal["MSE, position 0"]


def test_one_seed_that_saw_the_future_takes_the_badge_from_all():
    records = [run(seed=1), run(seed=2, causal=False), run(seed=3, causal=None)]
    assert is_causal(groups(records, "gyroscope")[0]) is False
    assert is_causal(groups([run(causal=None)], "gyroscope")[0]) is None


def test_runs_of_different_settings_are_never_averaged():
    records = [run(seed=seed, settings={"steps": steps, "dim": 64}) for seed in (1, 2) for steps in (100, 200)]
    assert [len(group.runs) for group in groups(records, "gyroscope")] == [2, 2]


def test_a_seed_counts_once_by_its_last_record():
    rows = cells_by_model([run(seed=1, loss=1.0), run(seed=2, loss=3.0), run(seed=1, loss=5.0)], "gyroscope")
    assert rows[0]["loss"] == pytest.approx((4.0, math.sqrt(2), 2))


def test_a_single_seed_has_no_deviation_and_what_is_missing_is_a_dash():
    record = run()
    del record["norm_deviation"], record["position0_loss"]
    row = next(row for row in cells([record, run("b", norm_deviation=0.1)], "gyroscope") if row["source"] == "ours")
    assert row["MSE, full sequence"] == "4.00e-03"
    assert row["norm deviation"] == DASH
    assert row["MSE, position 0"] == DASH


def test_a_run_that_diverged_is_seen(tmp_path):
    lost = run(seed=2, loss=1.0, diverged=True) | {"loss": None, "best_loss": None, "online_loss": None}
    lost["curve"] = [[0, 1.0], [20, None]]
    rows = cells([run(seed=1), lost, run("b", seed=1, loss=float("nan"))], "gyroscope")
    row = next(row for row in rows if row["model"] == "label of residual")
    assert row["seeds"] == "2 (1 diverged)"
    assert row["MSE, full sequence"] == "4.00e-03"
    assert next(row for row in rows if row["model"] == "label of b")["MSE, full sequence"] == "nan"
    write_tables([run(seed=1), lost, run("b", seed=1, loss=float("nan"))], tmp_path)
    assert "NaN" not in (tmp_path / "tables.json").read_text(encoding="utf-8")


def test_the_reflection_table_puts_ours_beside_the_published(records):
    rows = cells(records, "reflection")
    published = [row for row in rows if row["source"] == "published"]
    assert [(row["cosine with −x"], row["β"], row["γ"]) for row in published] == [
        ("0.96", "1.995 ± 0.001", DASH),
        ("-0.3", DASH, DASH),
        ("0.96", DASH, "0.051 ± 0.005"),
    ]
    (ours,) = (row for row in rows if row["source"] == "ours")
    assert ours["γ"] == "0.055 ± 0.000"


def test_the_files(records, tmp_path):
    markdown, numbers = write_tables(records, tmp_path / "new" / "folder")
    text = markdown.read_text(encoding="utf-8")
    for name in ("gyroscope", "near-pi", "reflection"):
        assert TITLES[name] in text
    assert TITLES["stability"] not in text
    assert "Ours, all rows: steps 100, dim 64." in text
    assert quoted.README in text
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert list(values["tasks"]) == ["gyroscope", "near-pi", "reflection"]
    for rows in values["tasks"].values():
        assert {row["source"] for row in rows} == SOURCES
    ours = next(row for row in values["tasks"]["gyroscope"] if row["source"] == "ours")
    assert ours["loss"]["mean"] == pytest.approx(4e-3)
    assert ours["loss"]["std"] == pytest.approx(4e-4)


@pytest.mark.slow
def test_the_pictures(records, tmp_path):
    pytest.importorskip("matplotlib")
    from residua.lab.geometry.pictures import draw

    paths = draw(records, tmp_path / "new")
    assert [path.name for path in paths] == ["loss.png", "gates.png", "norms.png", "positions.png", "reflection.png"]
    for path in paths:
        assert path.read_bytes().startswith(PNG)


def test_pictures_of_next_to_nothing(tmp_path):
    pytest.importorskip("matplotlib")
    from residua.lab.geometry.pictures import draw

    assert draw([], tmp_path) == []
    bare = {key: value for key, value in run().items() if key in ("kind", "task", "model", "label", "seed", "loss")}
    assert draw([bare], tmp_path) == []
    lost = run(curve=[[0, None], [20, float("nan")]], gates={}, stream_norms=[1.0], by_position=[None, None])
    assert draw([lost | {"online_by_position": None, "causal": False}], tmp_path) == []
    assert draw([reflection(gates={}, curve=[[0, None]])], tmp_path) == []
    assert draw([reflection(gates={}, curve=[[0, 1.0]])], tmp_path) == []
    points = [[0, 1.0], [20, 0.5]]
    assert [path.name for path in draw([reflection(gates={}, curve=points)], tmp_path)] == ["reflection.png"]


def test_no_two_models_look_alike():
    pytest.importorskip("matplotlib")
    from residua.lab.geometry.pictures import _styles

    models = [*MODELS, *(f"scheme{i}" for i in range(20))]
    styles = _styles(models)
    assert len({repr(sorted(style.items(), key=str)) for style in styles.values()}) == len(models)


def test_the_published_numbers():
    assert {name: len(quoted.published(name)) for name in TASKS} == {
        "gyroscope": 5,
        "stability": 5,
        "near-pi": 5,
        "near-pi-multi": 5,
        "reflection": 3,
    }
    # The ratios that the publication claims, from the numbers it gives.
    residual, _, _, jpmhc, edelta = (value.mean for value in quoted.LOSSES["stability"])
    assert residual / edelta == pytest.approx(3.8, abs=0.05)
    assert jpmhc / edelta == pytest.approx(1.9, abs=0.05)
    _, _, _, jpmhc, edelta = (value.mean for value in quoted.LOSSES["near-pi"])
    assert jpmhc / edelta == pytest.approx(4.5, abs=0.05)
    assert quoted.NORM_DEVIATIONS[0] / quoted.NORM_DEVIATIONS[-1] == pytest.approx(474)
    for row in quoted.published("reflection") + quoted.published("gyroscope"):
        assert "2605.06729" in row["source"]
        assert "783e727" in row["source"]
    assert [row["causal"] for row in quoted.published("gyroscope")] == [True, False, True, True, False]
