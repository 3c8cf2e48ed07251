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


def test_nothing_finished_and_one_seed_are_no_errors(tmp_path):
    assert "Not finished" in markdown(read_results(folder(tmp_path / "none", [], [])))
    first = [row for row in records() if row["seed"] < 2]
    assert "(one seed)" in markdown(read_results(folder(tmp_path / "one", first)))
