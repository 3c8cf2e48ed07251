"""Every example is short, runs on a CPU in seconds, and prints what its page promises."""

import re
import runpy
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_says_how_to_run_it(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 80
    assert f"python {path.relative_to(EXAMPLES.parent)}" in source


def printed(name: str, capsys: pytest.CaptureFixture) -> str:
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_a_llama_keeps_its_logits_and_trains(capsys):
    out = printed("llama.py", capsys)
    assert "largest difference of the logits 0\n" in out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < 0.9 * losses[0]


def test_a_vision_transformer_learns_with_every_scheme(capsys):
    out = printed("vision_transformer.py", capsys)
    accuracies = [float(share) for share in re.findall(r"accuracy ([\d.]+)%", out)]
    assert len(accuracies) == 3
    assert min(accuracies) > 50  # a guess is right in one of three


def test_a_graph_network_learns_with_every_scheme(capsys):
    out = printed("graph.py", capsys)
    found = [float(share) for share in re.findall(r"([\d.]+)% of the hidden labels", out)]
    assert len(found) == 3
    assert min(found) > 50


def test_a_scheme_of_ones_own_starts_as_the_plain_residual(capsys):
    assert "largest difference 0\n" in printed("custom_scheme/momentum_residual.py", capsys)
