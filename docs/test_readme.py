"""What the README says of its code, its schemes and its numbers; tests/test_docs.py runs its code."""

import re
from pathlib import Path

import pytest
import torch

import residua
from residua.connections import PRESETS, SCHEMES
from residua.connections.explained import added, state
from residua.lab.study.definition import load_study
from residua.lab.study.results import results
from support.pages import RESBENCH, records

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = README.replace("\n", " ").replace("   ", " ")


@pytest.fixture(scope="module")
def rows():
    """ResBench at 0.3 million parameters, by scheme."""
    study = results(
        load_study("resbench"),
        records("main/records.jsonl", RESBENCH / "records"),
        records("main/costs.jsonl", RESBENCH / "records"),
    )
    return {row.scheme: row for row in study.rows if row.size == "0.3M" and row.whole}


def test_the_first_sentence_counts_schemes_and_presets():
    assert f"{len(SCHEMES)} residual schemes for PyTorch in {len(PRESETS)} ready-made presets" in TEXT


def test_every_preset_but_two_named_ones_takes_sublayers_with_one_input():
    several = []
    for name in PRESETS:
        try:
            residua.build(name, dim=16, num_sublayers=12)(torch.randn(2, 3, 16), [torch.tanh] * 12)
        except TypeError:
            several.append(name)
    names = " and ".join(f"`{name}`" for name in sorted(several, reverse=True))
    assert f"Two of the {len(PRESETS)} presets, {names}" in TEXT


@pytest.mark.parametrize("page", ["README.md", "docs/which.md"])
def test_the_parameters_of_the_table_are_those_of_the_command(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]* \| `([\w+-]+)` \| ([\d,]+) \|", text, flags=re.MULTILINE)
    assert len(rows) >= 6
    for name, count in rows:
        assert f"{added(residua.resolve(name))['small']:,}" == count, name


def test_the_step_times_of_a_page_are_those_of_resbench(rows):
    times = {name: f"{row.cost.ratio.median:.2f}" for name, row in rows.items()}
    which, answers = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("which.md", "faq.md"))
    listed = re.findall(r"^\| [^|]* \| `([\w+-]+)` \| [\d,]+ \| [^|]* \| (\d\.\d\d) \|$", which, flags=re.MULTILINE)
    assert len(listed) == 6
    assert all(times[name] == ratio for name, ratio in listed)
    text = f"`ddl-tc` takes {times['ddl-tc']} times as long .* and `lambdas\\+tc` {times['lambdas+tc']} times"
    assert re.search(text, answers.replace("\n", " "))


def test_the_states_of_a_page_are_those_of_the_command():
    which = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]* \| `([\w+-]+)` \| [\d,]+ \| ([^|]*) \|", which, flags=re.MULTILINE)
    assert len(rows) > 6
    for name, size in rows:
        assert state(residua.resolve(name)) == size, name


def test_the_claim_about_the_authors_numbers_matches_the_tolerance_of_their_test():
    conformance = (ROOT / "tests/models/test_conformance.py").read_text(encoding="utf-8")
    assert re.search(r'logits - tensors\["logits.f64"\]\)\.abs\(\)\.max\(\) <= 1e-9', conformance)
    assert 'compare_gradients(model, state, tensors, "f64", 1e-7)' in conformance
    assert (
        "logits agree with both of their codes to 1e-9 and all gradients to 1e-7 when the authors' code runs "
        "entirely in float64" in TEXT
    )


def test_the_models_that_convert_are_those_of_the_generated_page():
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8").replace("\n", " ")
    models = re.search(r"(\d+ of \d+) compute what", page)[1]
    encoders = re.search(r"encoder-decoders: (\d+ of \d+)", page)[1]
    assert f"{models} causal language models and {encoders} encoders" in TEXT.replace(" of the ", " of ")
