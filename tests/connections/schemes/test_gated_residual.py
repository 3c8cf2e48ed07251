"""The gated residual of Qwen3.8-Flash-Next: its values for one token, its start, and the norms of a model in it."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from residua import GatedResidual, Residual
from support.references import assert_computes, by_token
from support.stream_cases import DIM, SUBLAYERS, built
from support.tolerances import assert_close
from support.variants import bare_sublayers, every, normal


def read_of_token(part, rows: Tensor) -> tuple[Tensor, Tensor]:
    """x and vec(Z) of one token: rows (n, dim)."""
    n = rows.shape[0]
    z = torch.cat([(1 + w) * row / (row.square().mean() + 1e-5).sqrt() for row, w in zip(rows, part.weight)])
    hidden = part.down.weight @ z / n
    gates = 1 / (1 + torch.exp(-(part.up.weight @ (hidden / (1 + torch.exp(-hidden))))))
    return (gates * z).view(n, -1).sum(0) / n, z


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: GatedResidual) -> Tensor:
    n = scheme.num_streams
    rows = [token] * n
    for connection, sublayer in zip(stream.connections, sublayers):
        read, z = read_of_token(connection.gated, torch.stack(rows))
        y, p = sublayer(read), 2 / (1 + torch.exp(-(connection.inject.weight @ z) / n))
        rows = [row + p[i] * y for i, row in enumerate(rows)]
    last = torch.stack(rows)
    return last.sum(0) / n if scheme.head == "mean" else read_of_token(stream.collapse.read, last)[0]


@every(GatedResidual)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3), published, scheme, tokens=(2, 2))


def test_the_start_is_the_published_one():
    """Gains of one, and three matrices that are drawn: gates of rank dim / 8 around 1/2, write weights around 1."""
    torch.manual_seed(0)
    stream = GatedResidual().build(64, 2)
    for connection in stream.connections:
        assert not connection.gated.weight.any()
        assert len(connection.gated.down.weight) == 8
        for matrix in (connection.gated.down, connection.gated.up, connection.inject):
            assert matrix.weight.std().item() == pytest.approx(0.02, rel=0.1)
        _, carry = connection.read(stream.expand(normal(2, 5, 64, dtype=torch.float32)))
        assert_close(carry.coefficients.h_post, torch.ones(2, 5, 4), dtype=torch.bfloat16, factor=20)


def test_the_connection_has_no_gains_of_a_norm_besides_its_own():
    """The parameters are the gains of the streams, D, U and B; no norm adds a gain."""
    connection = GatedResidual(gate_rank=3).build(DIM, 2).connections[0]
    assert {name for name, _ in connection.named_parameters()} == {
        "gated.weight",
        "gated.down.weight",
        "gated.up.weight",
        "inject.weight",
    }


def test_the_normalised_gated_head_preserves_the_residual_only_up_to_a_norm():
    """With head="gated" and start="residual" the result is the residual, divided by its root mean square."""
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    ours = built(GatedResidual(start="residual"))(x, sublayers)
    plain = built(Residual())(x, sublayers)
    assert_close(ours, plain / (plain.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    assert (ours - plain).abs().max() > 0.1


def test_gates_are_the_same_if_the_weight_is_recomputed_at_each_call():
    """Adapters, offloading and sharding recompute weights."""
    plain, wrapped = built(GatedResidual(gate_rank=3)), built(GatedResidual(gate_rank=3))
    for connection in wrapped.connections:
        parametrize.register_parametrization(connection.gated.up, "weight", nn.Identity())
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    assert_close(wrapped(x, sublayers), plain(x, sublayers))
