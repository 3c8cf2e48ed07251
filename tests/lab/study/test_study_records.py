"""What somebody sent as records of a study is refused with one line, unless it is what a study writes."""

import pytest

from residua.errors import InputError
from residua.lab.study.report import markdown
from residua.lab.study.results import read_results
from support.planted_study import costs, folder, records


def changed(**changes):
    return [{**row, **changes} for row in records()]


def with_facts(**changes):
    return [{**row, "facts": {**row["facts"], **changes}} for row in records()]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (changed(val_loss="low"), "val_loss must be a number that is not negative, or null, got 'low'"),
        (changed(val_loss=True), "val_loss must be a number that is not negative, or null"),
        (changed(val_loss=1e999), "val_loss must be a number that is not negative, or null, got 'inf'"),
        (changed(kind="best"), "kind must be one of tune, final, report, longer, got 'best'"),
        (changed(val_loss=-3.0), "val_loss must be a number that is not negative, or null, got '-3.0'"),
        (changed(steps=0), "steps must be at least 1"),
        (changed(point=None), "point must be a mapping"),
        (changed(seed="1"), "seed must be a whole number"),
        (changed(curve=[["a", 1.0]]), "curve must be pairs of a step and a loss"),
        (changed(curve={}), "curve must be pairs of a step and a loss"),
        (changed(scheme=["ddl"]), "scheme must be text"),
        (changed(tokens="many"), "tokens must be a whole number"),
        (changed(seconds=[]), "seconds must be a number"),
        (changed(diverged=["x"]), "diverged must be text"),
        (with_facts(torch=[2]), "facts.torch must be text"),
        (with_facts(data={"fingerprint": "e" * 64}), "facts.data must be the data ffff"),
        (with_facts(commit={}), "facts.commit must be text"),
        (with_facts(parameters="many"), "facts.parameters must be a whole number"),
        (with_facts(data=[1]), "facts.data must be a mapping"),
        ([{}], "key must be text"),
    ],
)
def test_a_run_that_no_study_wrote_is_refused(tmp_path, runs, said):
    with pytest.raises(InputError) as refusal:
        read_results(folder(tmp_path / "study", runs))
    assert said in str(refusal.value)
    assert "records.jsonl: the run" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"time_ratio": {"lower": 1, "median": 0, "upper": 1}}, "time_ratio must be positive"),
        ({"time_ratio": {"median": "1"}}, "time_ratio must be positive"),
        ({"time_ratio": {"lower": 2, "median": 1, "upper": 3}}, "upper, in this order"),
        ({"flops_per_token": {"a": 1e308, "b": 1e308}}, "flops_per_token must be positive numbers"),
        ({"flops_per_token": {}}, "flops_per_token must be positive numbers"),
        ({"flops_per_token": {"products": -1.0}}, "flops_per_token must be positive numbers"),
        ({"peak_bytes": -5}, "peak_bytes must be a positive number or null"),
        ({"seconds": []}, "seconds must be positive numbers, one of each round"),
        ({"seconds": [0.0]}, "seconds must be positive numbers"),
        ({"device": None}, "device must be text"),
        ({"compiled": "yes"}, "compiled must be true or false"),
    ],
)
def test_a_cost_that_no_study_wrote_is_refused(tmp_path, change, said):
    with pytest.raises(InputError) as refusal:
        read_results(folder(tmp_path / "study", known=[{**row, **change} for row in costs()]))
    assert said in str(refusal.value)


AUDIT = {
    "key": records()[-3]["key"],
    "rung": "small",
    "scheme": "ddl",
    "equal": True,
    "points": [{"step": 5, "sublayers": [{"sublayer": "1 attention", "beta": 0.5, "beta_q50": 0.4}]}],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"equal": "yes"}, "equal must be true or false"),
        ({"points": []}, "points must be a step and the numbers"),
        ({"points": [{"step": 5, "sublayers": [{"sublayer": "1", "beta": "x"}]}]}, "points must be a step"),
        ({"points": [*AUDIT["points"], {"step": 6, "sublayers": AUDIT["points"][0]["sublayers"] * 2}]}, "the same"),
    ],
)
def test_an_audit_that_no_study_wrote_is_refused(tmp_path, change, said):
    with pytest.raises(InputError) as refusal:
        read_results(folder(tmp_path / "study", audits=[{**AUDIT, **change}]))
    assert said in str(refusal.value)


def test_an_audit_of_no_run_behind_a_row_is_left_out(tmp_path):
    mine = [row["key"] for row in records() if (row["scheme"], row["kind"]) == ("ddl", "report")]
    audits = [{**AUDIT, "key": key} for key in (mine[0], "another")]
    found = read_results(folder(tmp_path / "study", audits=audits))
    assert [one["key"] for one in found.audits] == mine[:1]
    assert "| small | `ddl` | 5 | 0.5 |" in markdown(found)


def test_nothing_finished_and_one_seed_are_no_errors(tmp_path):
    assert "Not finished" in markdown(read_results(folder(tmp_path / "none", [], [])))
    first = [row for row in records() if row["seed"] < 2]
    assert "(one seed)" in markdown(read_results(folder(tmp_path / "one", first)))
