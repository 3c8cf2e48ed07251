"""The example of docs/production.md, from a pretrained model to a folder that is served."""

import runpy
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

import residua

SCRIPT = Path(__file__).parents[1] / "examples/production.py"


@pytest.mark.slow
def test_only_the_connections_are_trained(tmp_path, capsys):
    example, out = runpy.run_path(str(SCRIPT)), tmp_path / "out"
    base = example["tiny_base"](tmp_path / "base")
    example["main"](base, SCRIPT, out)
    printed = capsys.readouterr().out
    start, end = (line.split("plain ")[1].split(", ") for line in printed.splitlines() if line.startswith("held-out"))
    assert start[0] == start[1].removeprefix("converted ")
    assert float(end[1].removeprefix("trained ")) < float(end[0])
    trained, plain = residua.load(out).state_dict(), AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert all(torch.equal(trained[name], value) for name, value in plain.items())
    assert trained.keys() - plain.keys() == {name for name in trained if ".stream." in name}
    card = ModelCard.load(out / "README.md").data
    assert (card.base_model, card.datasets) == ("base", ["production"])
    assert str(tmp_path) not in (out / "README.md").read_text(encoding="utf-8")
