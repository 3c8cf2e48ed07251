"""What the README says of its code, its schemes and its numbers; test_docs runs its code and checks its links."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from residua.connections import PRESETS, SCHEMES, resolve
from support.pages import blocks

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FIRST = blocks(README, "python")[0]


def numbers(printed: str) -> tuple[float, float]:
    """The loss and the largest gate that the first block prints."""
    loss, gate = re.fullmatch(r"loss ([\d.]+), largest gate ([\d.]+)\n", printed).groups()
    return float(loss), float(gate)


@pytest.mark.processes
def test_the_first_block_learns_what_the_text_says():
    """As a reader pastes it, in a fresh process."""
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}  # as all tests: more than the machine has are very slow
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, env=one_thread)
    assert done.returncode == 0, done.stderr
    loss, gate = numbers(done.stdout)
    assert loss < 0.25
    assert 1.9 < gate < 2


@pytest.mark.slow
def test_the_first_block_learns_it_with_every_seed_that_the_text_names(capsys):
    assert "With the seeds 0 to 19 the loss falls from 4 to below 0.25, and the largest gate ends above 1.9." in README
    for seed in range(20):
        exec(FIRST.replace("manual_seed(0)", f"manual_seed({seed})"), {})
        loss, gate = numbers(capsys.readouterr().out)
        assert loss < 0.25, seed
        assert 1.9 < gate < 2, seed


def test_the_block_after_takes_every_preset_but_the_two_that_the_text_names():
    namespace, several = {}, []
    exec(blocks(README, "python")[2], namespace)
    for name, scheme in PRESETS.items():
        stream = scheme.build(dim=16, num_sublayers=12)
        state = stream.expand(torch.randn(2, 3, 16))
        try:
            for connection in stream.connections:
                state = namespace["block"](state, torch.tanh, connection)
        except TypeError:
            several.append(name)
        else:
            assert stream.collapse(state).shape == (2, 3, 16), name
    assert sorted(several) == ["attnres-inkling", "mudd"]
    for name in ("attnres-inkling:separate_every=0", "mudd:ways=r"):
        assert name in README
        stream = resolve(name).build(dim=16, num_sublayers=12)
        assert stream(torch.randn(2, 3, 16), [torch.tanh] * 12).shape == (2, 3, 16), name


def test_every_preset_is_listed_once_with_its_state():
    rows = re.findall(r"^\| (`.*?`) \| .* \| (d|\d+d|grows) \|$", README, flags=re.MULTILINE)
    listed = [(name, state) for names, state in rows for name in re.findall(r"`([a-z-]+)`", names)]
    assert len(listed) == len(PRESETS)
    for name, state in listed:
        first, last = (PRESETS[name].state_size(boundary, 1) for boundary in (0, 24))
        assert state == ("grows" if last > first else "d" if first == 1 else f"{first}d"), name


def test_every_preset_has_the_source_that_the_command_prints():
    for names, source in re.findall(r"^\| (`.*?`) \| .* \| ([^|]*) \| [^|]* \|$", README, flags=re.MULTILINE):
        for name in re.findall(r"`([a-z-]+)`", names):
            kind, _, place = PRESETS[name].source.rpartition(" ")  # "ours, after arXiv", "2505.11881"
            assert ("transformers" if kind == "transformers," else place) in source, name
            assert "ours" in source or not kind.startswith("ours"), name


def test_the_counts_of_its_first_sentence():
    assert f"{len(SCHEMES)} residual schemes for PyTorch in {len(PRESETS)} ready-made presets" in README


def test_what_it_says_of_the_authors_numbers_is_what_their_test_allows():
    told = (Path(__file__).parent / "models" / "test_conformance.py").read_text(encoding="utf-8")
    assert re.search(r'logits - tensors\["logits.f64"\]\)\.abs\(\)\.max\(\) <= 1e-9', told)
    assert 'compare_gradients(model, state, tensors, "f64", 1e-7)' in told
    assert "float64 logits agree with the authors' code to 1e-9 and all gradients to 1e-7" in README.replace("\n", " ")


def test_the_models_that_convert_are_those_of_the_generated_page():
    page = (Path(__file__).parents[1] / "docs/families.md").read_text(encoding="utf-8").replace("\n", " ")
    models, encoders = (
        re.search(r"(\d+ of \d+) compute what", page)[1],
        re.search(r"encoder-decoders: (\d+ of \d+)", page)[1],
    )
    told = README.replace("\n", " ").replace(" of the ", " of ")
    assert f"{models} causal language models and {encoders} encoders" in told
