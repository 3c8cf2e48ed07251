"""The compliance page is made from the records, and a row never says more than its record."""

import json
from dataclasses import replace

import pytest

from benchmarks import compliance
from benchmarks.compliance import IMPLEMENTATIONS, in_words, page, read, verdict


def test_the_page_is_made_from_the_records():
    records = read()
    assert list(records) == [one.name for one in IMPLEMENTATIONS]
    assert compliance.PAGE.read_text(encoding="utf-8") == page(list(records.values()))


def test_a_limit_under_autocast_is_what_the_record_says():
    for record in read().values():
        assert "under autocast" in record.get("failed", {}).get("float32_mappings", "under autocast")


def record(**changes):
    right = {
        "failed": {},
        "not_checked": {},
        "instead": [],
        "start": "",
        "largest_difference_of_results": 1e-7,
        "largest_difference_of_inputs": 0.0,
        "largest_difference_with_large_parameters": 0.0,
    }
    return right | changes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "right"),
        ({"failed": {"large_logits": "not finite"}}, "right, with a limit"),
        ({"failed": {"gradients": "2 times ours"}}, "differs"),
        ({"failed": {"forward": "the mixer differs"}, "instead": ["no tokens"]}, "another scheme"),
        ({"not_run": "importing it fails"}, "not checked"),
    ],
)
def test_a_verdict_follows_from_the_checks(changes, expected):
    assert verdict(record(**changes)) == expected


def test_words_hold_what_the_kit_says_and_the_largest_difference():
    words = in_words(record(failed={"forward": "the mixer is transposed"}, largest_difference_of_results=0.25))
    assert words == "the kit says: the mixer is transposed; largest difference 0.2 of the largest entry."


@pytest.mark.parametrize(
    ("scheme", "first"),
    [("ManifoldHyperConnections()", "rows"), ("ManifoldHyperConnections(order='columns')", "columns")],
)
def test_a_right_mhc_is_said_to_follow_its_order(scheme, first):
    assert in_words(record(scheme=scheme)).startswith(f"Sinkhorn divides by {first} first")
    assert "Sinkhorn" not in in_words(record(scheme=scheme, failed={"forward": "the mixer is transposed"}))


def test_what_is_said_of_an_implementation_must_hold():
    class Adapter(compliance.adapters.DeepSeekV4):
        def statements(self):
            return {"it mixes nothing": False}

    pytest.importorskip("transformers.models.deepseek_v4")
    deepseek = next(one for one in IMPLEMENTATIONS if one.name == "deepseek-v4")
    with pytest.raises(AssertionError, match="deepseek-v4: not true: it mixes nothing"):
        compliance.checked(replace(deepseek, adapter=Adapter))


def test_records_are_json_lines_with_versions():
    for line in compliance.RECORDS.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        assert {"version", "torch", "python", "specification", "attribute"} <= row.keys()
