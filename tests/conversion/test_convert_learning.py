"""What a converted model learns from the start that preserves: by the loss of a language model, from the first step."""

import re

import pytest
import torch

import residua
from residua.lab.inspection.subject import Subject
from support.converted_models import IDS, PRESERVING, llama
from support.tolerances import assert_close

PROJECTION = "they scale or feed a projection that starts at 0, so that the start is the same for every token"
QUERY = "they scale the keys of a query that starts at 0, so that all sources weigh the same"
MEAN = "u, v and k start orthogonal to the mean of the streams, and the loss sees the mean alone until their nets move"

# The parameters without a gradient at the start, why, and after how many steps of the optimizer all have one.
WAITING = {
    "hc": ({"scales", "stream_norm.weight"}, PROJECTION, 1),
    "frac": ({"scales", "stream_norm.weight"}, PROJECTION, 1),
    "mhc": ({"mappings.alpha"}, PROJECTION, 1),
    "mhc-deepseek": ({"logits.scale", "collapse.logits.scale"}, PROJECTION, 1),
    "ihc": ({"logits.scale", "collapse.logits.scale"}, PROJECTION, 1),
    "krom": ({"logits.scale", "logits.gain.weight"}, PROJECTION, 1),
    "gated-residual": ({"gated.down.weight"}, PROJECTION, 1),
    "jpmhc": ({"router.norm.weight", "router.norm.bias"}, PROJECTION, 1),
    "edelta-stream": (
        {f"{module}.{name}" for name in ("weight", "bias") for module in ("router.norm", "context_norm", "up")}
        | {f"{module}.{name}" for name in ("weight", "bias") for module in ("gamma.out", "heads.beta")},
        f"{PROJECTION}; {MEAN}",
        1,
    ),
    "attnres": ({"attend.gain", "collapse.attend.gain"}, QUERY, 1),
    "attnres-block": ({"attend.gain", "collapse.attend.gain"}, QUERY, 1),
    "mhar": ({"attend.gain", "collapse.attend.gain"}, QUERY, 1),
    "delta-attnres": ({"attend.gain", "attend.query"}, f"{QUERY}; and what is read enters by a gate of 0", 2),
}


def added_gradients(model):
    """The largest gradient of each parameter of the connections, by its name in one, over all of them."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".stream." in name:
            own = re.sub(r".*\.stream\.(connections\.\d+\.)?", "", name)
            found[own] = max(found.get(own, 0.0), parameter.grad.abs().max().item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("connection", PRESERVING)
def test_every_parameter_gets_a_gradient_within_the_expected_number_of_steps(connection):
    """The model's own weights keep their gradients, and streams become different: several equal streams compute the
    same as one."""
    torch.manual_seed(1)
    model = residua.convert(llama(), connection).train()
    unconverted = llama()
    unconverted(IDS, labels=IDS).loss.backward()
    plain = {name: p.grad for name, p in unconverted.named_parameters()}
    expected, _, steps = WAITING.get(connection, (set(), "", 0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        found = added_gradients(model)
        zero = {name for name, size in found.items() if size <= 1e-9 * max(found.values())}
        if step == 0:
            assert zero == expected
            own = {name: p.grad for name, p in model.named_parameters() if ".stream." not in name}
            assert own.keys() == plain.keys()
            for name, gradient in plain.items():
                assert_close(own[name], gradient, dtype=torch.float32)  # in which the norms of Llama compute
        optimizer.step()
    assert zero == set()
    records = []
    Subject.of(model).run(IDS, records.append)
    state = records[-1].before
    if isinstance(state, torch.Tensor) and state.dim() == 4:
        assert (state - state.mean(-2, keepdim=True)).abs().max() > 1e-3 * state.abs().max()
