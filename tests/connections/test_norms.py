"""The norm before a sublayer may be any module: a model's own."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from residua import DeepDelta
from residua.connections import PRESETS, RMSNorm, deep_delta
from support.variants import bare_sublayers, normal

DIM = 8


@pytest.mark.parametrize("name", PRESETS)
def test_a_norm_given_as_the_default_changes_no_bit(name):
    torch.manual_seed(0)
    expected = PRESETS[name].build(DIM, 4, norm_eps=1e-3)
    torch.manual_seed(0)
    own = [deepcopy(connection.norm) for connection in expected.connections]
    assert all(type(norm) is RMSNorm and norm.eps == 1e-3 for norm in own)
    given = PRESETS[name].build(DIM, 4, norm_eps=1e-3, norm=lambda i: deepcopy(own[i]))
    x, sublayers = normal(2, 5, DIM, dtype=torch.float32), bare_sublayers(DIM, 4)
    assert expected.state_dict().keys() == given.state_dict().keys()
    assert torch.equal(given(x, sublayers), expected(x, sublayers))


@pytest.mark.parametrize(("norm", "asked"), [(None, 1), (lambda _: nn.LayerNorm(DIM), 0)])
def test_kernels_step_aside_for_a_norm_that_they_do_not_know(norm, asked, monkeypatch):
    """The implementation is chosen only where a kernel for write and read exists."""
    chosen = []
    monkeypatch.setattr(deep_delta, "choose_boundary", lambda *inputs: chosen.append(inputs) or "reference")
    stream = DeepDelta(value_channels=4, compress="channel", implementation="auto").build(DIM, 2, norm=norm)
    first, second = stream.connections
    x, carry = first.read(stream.expand(normal(2, 5, DIM, dtype=torch.float32)))
    first.write_read(x, carry, second)
    assert len(chosen) == asked
