"""ResBench's files agree with each other, and each number of claims.md stands on a page."""

import csv
import itertools
import re

import pytest

from residua.connections import resolve
from residua.lab.records.folder import read_object
from residua.lab.study.report import table
from residua.lab.study.results import read_results
from support.pages import RESBENCH, TOOLS, records, script


@pytest.fixture(scope="module")
def study():
    return read_results(RESBENCH / "records" / "main")


@pytest.fixture(scope="module")
def picture():
    """The module that draws the leads."""
    return script("picture", RESBENCH)


def test_every_record_has_the_hashes_of_both_texts():
    first, second = (read_object(RESBENCH / f"{name}.json")["documents_sha256"] for name in ("corpus", "further"))
    for folder in ("main", "fresh", "1M", "10M"):
        for row in records(f"{folder}/records.jsonl", RESBENCH / "records"):
            data = row["facts"]["data"]
            assert data["sha256"] == first
            assert data.get("further_validation", {"sha256": second})["sha256"] == second


def test_the_csv_file_is_the_output_of_the_report(study):
    """To nine digits: the quantiles of Student's t in SciPy 1.15 and 1.17 differ by 2e-11."""
    shipped = (RESBENCH / "records" / "main" / "results.csv").read_text(encoding="utf-8")
    for ours, theirs in itertools.zip_longest(csv.reader(table(study).splitlines()), csv.reader(shipped.splitlines())):
        for cell, other in zip(ours, theirs, strict=True):
            same = cell == other or float(cell) == pytest.approx(float(other), rel=1e-9)
            assert same, (ours, theirs)


def test_the_picture_splits_a_lead_into_repeated_and_other_labels(picture, study):
    """Their sum is the lead."""

    def gain(size, name):
        return -study.row(size, name).difference("residual", "tokens").estimate.mean

    parts = picture.splits(study)
    assert parts.keys() == picture.SCHEMES.keys() - {"ddl"}
    for name, part in parts.items():
        assert sum(part) == pytest.approx(gain("0.3M", name), abs=2e-3), name  # some on another processor
    for size in ("0.1M", "0.3M"):
        for name, lead in picture.leads(study, size).items():
            assert lead.mean == gain(size, name)


def test_each_name_in_the_picture_is_a_connection_that_can_be_built(picture, study):
    """It is what was trained; for `residual+tc` as a gated delta without its erase term."""
    for name in picture.SCHEMES.keys() - {"residual+tc"}:
        assert resolve(name) == resolve(study.study.schemes[name].connection), name
    assert resolve("residual+tc") == resolve("residual:compress=token")


def test_the_runs_of_the_repeats_picture_are_the_reported_ones(study):
    """To the last bit, but for one on another processor; 15 % of the labels repeat, as both pictures say."""
    for run in records("main/repeats.jsonl", RESBENCH / "records"):
        last, plain = run["points"][-1], run["scheme"] == "residual"
        loss = last["share"] * last["repeated"] + (1 - last["share"]) * last["other"]
        assert round(last["share"], 2) == 0.15
        assert run["equal"] == (not plain)
        reported = study.row("0.3M", run["scheme"]).losses[1]
        assert loss == pytest.approx(reported, abs=2e-3 if plain else 1e-6)


def test_each_number_of_the_claims_has_a_sentence():
    templates = script("blocks", TOOLS).templates(RESBENCH / "claims.md")
    names = {name for text in templates.values() for name in re.findall(r"\{(\w+)\}", text)}
    assert names == script("claims", RESBENCH).numbers().keys()
