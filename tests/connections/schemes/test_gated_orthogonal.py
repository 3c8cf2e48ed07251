"""The gated orthogonal update against its formula, the plain residual and the published orthogonal update."""

import pytest
import torch
from torch import Tensor

from residua import GatedOrthogonal
from support.references import assert_computes, by_token
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
OPTIONS = {
    "token": {},
    "heads": {"heads": 4, "scale": 2.0},
    "static": {"gate": "static", "heads": 2, "scale": 0.5},
    "attention": {"sublayers": "attention"},
    "mlp": {"sublayers": "mlp", "eps": 0.1},
    "one": {"gate": "one", "heads": 2},
}


def built(options: dict, *, start: bool = False):
    stream = GatedOrthogonal(**options).build(DIM, SUBLAYERS)
    return (stream if start else perturbed(stream)).double()


@by_token
def token_by_token(stream, row: Tensor, sublayers: list, scheme: GatedOrthogonal) -> Tensor:
    """Every token and every group of features by itself, with projections as matrices x x^T / (|x|^2 + eps)."""
    for i, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
        context = row / (row.square().mean() + 1e-5).sqrt() * connection.norm.weight
        h = sublayer(context)
        parameters = {} if connection.gate is None else dict(connection.gate.named_parameters())
        if scheme.sublayers == ("mlp", "attention")[i % 2]:
            gates = torch.zeros(scheme.heads).double()
        elif scheme.gate == "one":
            gates = torch.ones(scheme.heads).double()
        elif scheme.gate == "static":
            gates = scheme.scale * parameters["bias"].tanh()
        else:
            gates = scheme.scale * (parameters["out.weight"] @ context + parameters["out.bias"]).tanh()
        groups = []
        for e, part, written in zip(gates, row.chunk(scheme.heads), h.chunk(scheme.heads)):
            projection = torch.outer(part, part) / (part @ part + scheme.eps)
            groups.append(part + (torch.eye(len(part)).double() - e * projection) @ written)
        row = torch.cat(groups)
    return row


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_values_and_gradients_are_those_of_projection_matrices(options):
    assert_computes(built(options), token_by_token, GatedOrthogonal(**options))


def test_the_published_update_never_shrinks_the_state():
    """h without its part along x makes |x'|^2 = |x|^2 + |h|^2 - <h, x>^2 / |x|^2, up to eps."""
    stream, x = GatedOrthogonal(gate="one", eps=1e-12).build(DIM, 6).double(), normal(2, 5, DIM)
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, 6)):
        h, before = sublayer(connection.norm(x)), x
        x = connection(x, sublayer)
        grown = h.square().sum(-1) - (h * before).sum(-1).square() / before.square().sum(-1)
        assert_close(x.square().sum(-1) - before.square().sum(-1), grown, factor=10)


def test_the_shortcut_is_the_residual_scale_of_each_head():
    stream, x = built(OPTIONS["heads"]), normal(2, 3, DIM)
    connection = stream.connections[1]
    context, carry = connection.read(x)
    y = torch.tanh(context)
    found = connection.shortcut(x, carry, y)
    rebuilt = found.h_res @ x.unflatten(-1, (4, 2)) + found.h_post.unsqueeze(-1) * y.unflatten(-1, (4, 2))
    assert_close(rebuilt.flatten(-2), connection.write(y, carry))
    assert list(found.gates) == ["gate_0", "gate_1", "gate_2", "gate_3"]
