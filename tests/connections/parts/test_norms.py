"""The norm before a sublayer may be any module: a model's own."""

from copy import deepcopy

import pytest
import torch

from residua.connections import PRESETS, RMSNorm
from support.variants import bare_sublayers, normal

DIM = 8


@pytest.mark.parametrize("name", PRESETS)
def test_passing_the_default_norm_changes_no_bit(name):
    torch.manual_seed(0)
    expected = PRESETS[name].build(DIM, 4, norm_eps=1e-3)
    torch.manual_seed(0)
    own = [deepcopy(connection.norm) for connection in expected.connections]
    assert all(type(norm) is RMSNorm and norm.eps == 1e-3 for norm in own)
    given = PRESETS[name].build(DIM, 4, norm_eps=1e-3, norm=lambda i: deepcopy(own[i]))
    x, sublayers = normal(2, 5, DIM, dtype=torch.float32), bare_sublayers(DIM, 4)
    assert expected.state_dict().keys() == given.state_dict().keys()
    assert torch.equal(given(x, sublayers), expected(x, sublayers))
