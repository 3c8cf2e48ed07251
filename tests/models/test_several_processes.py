"""Tensor parallelism on two processes computes what one process does."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import residua.conversion.configuration  # noqa: F401  # AutoModel opens converted models in the other processes too
from support.converted_models import IDS, converted
from support.processes import together
from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close


def gradients(model, ids):
    """Logits, and the gradients by name, whole."""
    model.train()
    out = model(ids, labels=ids)
    out.loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return out.logits.detach(), {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in found.items()}


def cut_into_heads(rank, cases):
    """On each rank: logits and gradients of every saved model under its own plan."""
    found = {}
    for path, ids in cases.items():
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float64)
        spread = {type(m.weight).__name__ for m in model.modules() if type(m) is nn.Linear}
        alone = {type(p).__name__ for n, p in model.named_parameters() if ".stream." in n}
        found[path] = spread, alone, *gradients(model, ids)
    return found


@pytest.mark.filterwarnings("ignore")
def test_the_plan_for_tensor_parallelism_gives_the_same_gradients(start, tmp_path):
    """Each of two ranks computes some heads and rows, and has all connections: same logits, same gradients."""
    models = {
        "ours": (tiny_model("ddl-tc", num_hidden_layers=1, attention_output_gate=True), prompt(2, 7)),
        "converted": (converted("hc"), IDS),
    }
    for name, (model, _) in models.items():
        model.save_pretrained(tmp_path / name)
    cases = {str(tmp_path / name): ids for name, (_, ids) in models.items()}
    (tmp_path / "out").mkdir()
    for found in together(start, tmp_path / "out", 2, cut_into_heads, cases):
        for (model, ids), (spread, alone, logits, grads) in zip(models.values(), found.values(), strict=True):
            assert (spread, alone) == ({"DTensor"}, {"Parameter"})
            model.zero_grad()
            expected, wanted = gradients(model, ids)
            assert_close(logits, expected)
            assert grads.keys() == wanted.keys()
            for name in grads:
                assert_close(grads[name], wanted[name])
