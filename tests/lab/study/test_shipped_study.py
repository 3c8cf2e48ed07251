"""The study in resbench/records/main: anybody can plan it, and every record in it is one of its runs."""

import json
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from residua.commands.cli import main
from residua.errors import InputError
from residua.lab.data import PreparedData
from residua.lab.study import verify
from residua.lab.study.definition import read_folder
from residua.lab.study.plan import Plan
from support.pages import RESBENCH, records

SHIPPED = RESBENCH / "records" / "main"
ODD = {"model.num_hidden_layers": 2, "model.hidden_size": 38, "model.num_attention_heads": 1, "model.head_dim": 38}
"""A width that four heads do not divide."""


@pytest.fixture
def stub(monkeypatch):
    """In place of the data, which no test can make: what a plan asks of them."""
    facts = dict(records("main/records.jsonl", RESBENCH / "records")[0]["facts"]["data"])
    fingerprint = json.loads((SHIPPED / "settings.json").read_text())["data"]
    assert facts["fingerprint"] == fingerprint
    train, validation = range(facts["train_tokens"]), range(facts["validation_tokens"])
    data = PreparedData(SHIPPED, facts["vocab_size"], 0, fingerprint, facts, train, validation, 1)
    monkeypatch.setattr(PreparedData, "open", lambda folder: data)
    return "data"


@pytest.fixture
def finished():
    return {row["key"]: row for row in records("main/records.jsonl", RESBENCH / "records")}


def test_a_scheme_whose_heads_do_not_divide_a_width_is_left_out_at_that_size(stub):
    plan = Plan(read_folder(SHIPPED).only(["mhar"], ["0.1M-wide"]), stub)
    assert plan.misfits.keys() == {("0.1M-wide", "mhar")}
    assert "heads" in str(plan.misfits["0.1M-wide", "mhar"])
    assert "mhar" in plan.schemes_at("0.1M")
    assert plan.schemes_at("0.1M-wide") == ["residual", "lambdas"]
    tuned = {key: {"val_loss": 4.0} for key in (run.key for run in plan.search("0.1M", "mhar", {})[0])}
    assert {run.size for run in plan.runs(tuned) if run.scheme == "mhar"} == {"0.1M"}


def test_a_scheme_that_fits_no_size_is_refused(stub):
    study = read_folder(SHIPPED).only(["mhar"], ["0.1M"])
    with pytest.raises(InputError, match="heads"):
        Plan(replace(study, sizes={"odd": replace(study.sizes["0.1M"], name="odd", keys=ODD)}), stub)


@pytest.mark.slow
def test_every_record_is_a_run_of_the_study_with_the_same_key(stub, finished):
    plan = Plan(read_folder(SHIPPED), stub)
    planned = {run.key: run for run in plan.runs(finished)}
    assert len(finished) == 992
    assert [plan.recorded(row).key for row in finished.values()] == list(finished)
    # When more seeds compared the finalists, the study chose anew for some schemes.
    others = finished.keys() - planned.keys()
    assert Counter((finished[key]["size"], finished[key]["kind"]) for key in others) == {("0.1M", "report"): 60}
    for key in finished.keys() & planned.keys():
        told = tuple(finished[key][name] for name in ("kind", "size", "scheme", "point"))
        assert planned[key][:4] == told


@pytest.mark.slow
def test_verify_repeats_every_record_of_the_shipped_folder(stub, finished, tmp_path, monkeypatch, capsys):
    """The runs are not trained here: tests/lab/study/test_study_command.py repeats real ones, of a small text."""
    repeated = []

    def untrained(run, recorded, *_):
        repeated.append(run.key)
        return verify.Verified(run.key, recorded, finished[run.key])

    monkeypatch.setattr(verify, "repeat", untrained)
    folder = shutil.copytree(SHIPPED, tmp_path / "resbench")
    assert main(["study", "verify", str(folder), "--data", stub, "--share", "1"]) == 0
    assert sorted(repeated) == sorted(finished)
    assert "992 of 992 runs are equal to the last bit" in capsys.readouterr().out
