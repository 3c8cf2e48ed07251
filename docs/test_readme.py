"""What the README says of its schemes and of the paper; tests/test_docs.py runs its code."""

import re
from pathlib import Path

import torch
from safetensors.torch import load_file

import residua
from residua.connections import PRESETS, SCHEMES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TEXT = README.replace("\n", " ").replace("   ", " ")


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


def test_the_claim_about_the_authors_numbers_matches_the_tolerance_of_their_test():
    conformance = (ROOT / "tests/models/test_conformance.py").read_text(encoding="utf-8")
    assert re.search(r'logits - tensors\["logits.f64"\]\)\.abs\(\)\.max\(\) <= 1e-9', conformance)
    assert 'compare_gradients(model, state, tensors, "f64", 1e-7)' in conformance
    assert (
        "logits agree with both of their codes to 1e-9 and all gradients to 1e-7 when the authors' code runs "
        "entirely in float64" in TEXT
    )
    vectors = map(load_file, (ROOT / "tests/models/authors").rglob("*.safetensors"))
    moved = max((each["logits_rope32.f64"] - each["logits.f64"]).abs().max().item() for each in vectors)
    assert f"rotary tables are in float32, which moves those logits by up to {moved:.1e}".replace("e-0", "e-") in TEXT


def test_the_models_that_convert_are_those_of_the_generated_page():
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8").replace("\n", " ")
    models = re.search(r"(\d+ of \d+) compute what", page)[1]
    encoders = re.search(r"encoder-decoders: (\d+ of \d+)", page)[1]
    assert f"{models} causal language models and {encoders} encoders" in TEXT.replace(" of the ", " of ")
