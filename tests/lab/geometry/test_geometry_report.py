import json
import math
from dataclasses import replace

import pytest

from residua.lab.geometry import published as quoted
from residua.lab.geometry.models import MODELS
from residua.lab.geometry.references import references
from residua.lab.geometry.report import TITLES, summary, table, write_tables
from residua.lab.geometry.tasks import TASKS, task

PNG = b"\x89PNG\r\n\x1a\n"
SOURCES = {"published", "ours", "reference"}


def run(model="residual", seed=42, name="gyroscope", loss=4e-3, **changes):
    steps = range(0, 101, 20)
    record = {
        "kind": "run",
        "task": name,
        "model": model,
        "label": f"our {model}",
        "seed": seed,
        "parameters": 1234,
        "causal": True,
        "causality_change": 0.0,
        "loss": loss,
        "best_loss": loss,
        "online_loss": loss,
        "position0_loss": 2**-6,
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


GYROSCOPE = """\
source; model; seeds; parameters; causal; MSE, full sequence; MSE, online; MSE, position 0; norm deviation
reference; expected floor of position 0, causal; —; —; causal; 1.08e-02; —; 4.31e-02; —
ours; our residual; 3; 1,234; causal; 4.00e-03 ± 4.0e-04; 4.00e-03 ± 4.0e-04; 1.56e-02 ± 0.0e+00; 0.25 ± 0
ours; our leaky; 2; 1,234; not causal; 2.00e-03 ± 2.8e-04; 5.00e-03 ± 7.1e-04; 1.56e-02 ± 0.0e+00 (leak); 0.25 ± 0
ours; our lost; 2 (1 diverged); 1,234; causal; 4.00e-03; 4.00e-03; 1.56e-02 ± 0.0e+00; 0.25 ± 0
ours; our longer; 1; 1,234; causal; 1.00e-03; 1.00e-03; 1.56e-02; 0.25
ours; our longer; 1; 1,234; causal; nan; nan; 1.56e-02; 0.25
ours; our bare; 1; 1,234; —; 4.00e-03; 4.00e-03; —; —
published; plain residual (“GPT”, 9 layers); 3; 1,780,000; causal; 3.78e-03 ± 4.0e-05; —; —; —
published; pooled Householder, sequence (“DDL”, 8 layers); 3; 1,784,000; not causal; 3.36e-03 ± 1.3e-04; —; —; —
published; mHC, split (“mHC”, 9 layers); 3; 1,838,000; causal; 4.02e-03 ± 3.0e-05; —; —; —
published; JPmHC (“JPmHC”, 7 layers, width 512); 3; 1,771,000; causal; 3.08e-04 ± 2.0e-06; —; —; —
published; EDelta, sequence (“EΔ-MHC-Geo”, 6 layers); 3; 1,788,000; not causal; 1.02e-03 ± 2.6e-04; —; —; —
"""
REFLECTION = """\
source; model; seeds; parameters; cosine with −x; β; γ; MSE
ours; our hybrid; 2; 1,234; 0.956 ± 0.000; —; 0.055 ± 0.000; 9.00e-02 ± 0.0e+00
published; pooled Householder, sequence (“DDL”); 3; —; 0.96; 1.995 ± 0.001; —; —
published; JPmHC (“JPmHC”); 3; —; -0.3; —; —; —
published; EDelta, sequence (“EΔ-MHC-Geo”); 3; —; 0.96; —; 0.051 ± 0.005; —
"""


def lines(records, name):
    header, rows = table(records, name)
    return "".join(f"{'; '.join(row)}\n" for row in (header, *rows))


def test_the_tables_hold_runs_references_and_published_numbers():
    """A row for each group of equal settings, of the last record of every seed; only what finished is in a mean."""
    sizes = replace(task("gyroscope"), dim=8, length=4, num_train=2, num_val=20)
    given = [record for record in references(sizes) if record["model"] == "causal-floor"]
    given += [run("residual", seed, loss=4e-3 * factor) for seed, factor in ((42, 0.9), (123, 1.0), (456, 1.1))]
    given += [run("leaky", 1, loss=1.8e-3, online_loss=4.5e-3)]
    given += [run("leaky", 2, loss=2.2e-3, online_loss=5.5e-3, causal=False, position0_leak=True)]
    given += [
        run("lost", 1, loss=9.0),
        run("lost", 1),
        run("lost", 2, diverged=True) | {"loss": None, "online_loss": None},
    ]
    given += [run("longer", settings={"steps": steps}, loss=loss) for steps, loss in ((1, 1e-3), (2, math.nan))]
    given += [run("bare", causal=None, norm_deviation=None, position0_loss=None)]
    assert lines(given, "gyroscope") == GYROSCOPE
    assert lines([reflection(seed=seed) for seed in (1, 2)], "reflection") == REFLECTION


def test_the_numbers_of_a_published_row_are_the_published_ones_whatever_was_measured(records):
    def theirs(given, name):
        return [row for row in summary(given, name) if row["source"] == "published"]

    for name in TASKS:
        assert theirs(records, name) == theirs([], name)
        assert all("citation" in row for row in theirs(records, name))
    changed = [record | {"loss": 1.0, "online_loss": 2.0, "cosine": 0.1} for record in records]
    assert theirs(changed, "gyroscope") == theirs(records, "gyroscope")
    assert not any("citation" in row for row in summary(records, "gyroscope") if row["source"] == "ours")


def test_the_report_writes_its_tables(records, tmp_path):
    not_finite = run("lost", loss=math.nan)
    markdown, numbers = write_tables([*records, not_finite], tmp_path / "new" / "folder")
    text = markdown.read_text(encoding="utf-8")
    for name in ("gyroscope", "near-pi", "reflection"):
        assert TITLES[name] in text
    assert TITLES["stability"] not in text
    assert "Ours, all rows: steps 100, dim 64." in text
    assert quoted.README in text
    assert "NaN" not in numbers.read_text(encoding="utf-8")
    values = json.loads(numbers.read_text(encoding="utf-8"))
    assert list(values["tasks"]) == ["gyroscope", "near-pi", "reflection"]
    for rows in values["tasks"].values():
        assert {row["source"] for row in rows} == SOURCES
    ours = next(row for row in values["tasks"]["gyroscope"] if row["source"] == "ours")
    assert ours["loss"]["mean"] == pytest.approx(4e-3)
    assert ours["loss"]["std"] == pytest.approx(4e-4)


@pytest.mark.nightly
def test_the_report_draws_its_pictures(records, tmp_path):
    pytest.importorskip("matplotlib")
    from residua.lab.geometry.pictures import draw

    paths = draw(records, tmp_path / "new")
    assert [path.name for path in paths] == ["loss.png", "gates.png", "norms.png", "positions.png", "reflection.png"]
    for path in paths:
        assert path.read_bytes().startswith(PNG)


def test_records_without_points_give_no_picture(tmp_path):
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


def test_the_published_numbers_are_quoted_correctly():
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
