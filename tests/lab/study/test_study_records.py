"""What a report takes from the records of a study, and which it refuses."""

import pytest

from residua.errors import InputError
from residua.lab.study.report import markdown
from residua.lab.study.results import read_results
from support.planted_study import folder, records


def test_a_run_on_other_data_is_refused(tmp_path):
    runs = [{**row, "facts": {**row["facts"], "data": {"fingerprint": "e" * 64}}} for row in records()]
    with pytest.raises(InputError, match=r"must be of the data ffff.*, got 'eeee"):
        read_results(folder(tmp_path / "study", runs))


AUDIT = {
    "key": records()[-3]["key"],
    "rung": "small",
    "scheme": "ddl",
    "equal": True,
    "points": [{"step": 5, "sublayers": [{"sublayer": "1 attention", "beta": 0.5, "beta_q50": 0.4}]}],
}


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
