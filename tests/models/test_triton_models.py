"""Language models whose connections are run by kernels compute what the reference computes."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from support.interpreter import prepared_once  # noqa: F401
from support.lanes import some
from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close
from support.variants import KERNELS

pytest.importorskip("triton", reason='triton is not installed: pip install ".[kernels]"')

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels are interpreted


class Step(NamedTuple):
    numbers: list[Tensor]  # the loss, and the gradients of all parameters
    calls: dict[str, int]  # of each operation in the forward pass


class Calls(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step_of(model, ids: Tensor) -> Step:
    with Calls() as calls:
        loss = model(ids, labels=ids).loss
    loss.backward()
    numbers = [loss.detach(), *(parameter.grad for parameter in model.parameters())]
    return Step(numbers, calls.counts)


@cache
def step(scheme) -> Step:
    model = tiny_model(scheme, torch.float32, scale=0.1).to(DEVICE).train()
    return step_of(model, prompt(1, 5).to(DEVICE))


# Of the four sublayers of two layers.
CALLS = {
    "hc": {"hyper_read": 4},
    "hc-static": {"hyper_write": 4},
    # Not in the first sublayer, whose streams are equal; Sinkhorn's iteration neither in the first nor in the last.
    "mhc": {"hyper_read": 3, "sinkhorn": 2},
    "jpmhc": {"hyper_write": 4},
}


@pytest.mark.parametrize("name", some(KERNELS, CALLS.get))
def test_kernels_run_and_give_the_losses_and_gradients_of_the_reference(name):
    ours, theirs = step(KERNELS[name]), step(replace(KERNELS[name], implementation="reference"))
    for a, b in zip(ours.numbers, theirs.numbers, strict=True):
        assert_close(a, b, factor=2)  # two orders of summation, through two layers
    for op, calls in CALLS.get(name, {}).items():
        assert ours.calls[f"residua::{op}"] == calls


@pytest.mark.parametrize("name", ["hc", "mhc"])
def test_recomputing_states_changes_no_bit(name):
    scheme = KERNELS[name]
    assert (scheme.recompute, scheme.recompute_every) == ("replay", 4)
    for a, b in zip(step(scheme).numbers, step(replace(scheme, recompute="none")).numbers, strict=True):
        assert torch.equal(a, b)
