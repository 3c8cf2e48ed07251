"""The pooled Householder shortcut against its equation in plain dense algebra, and what tells it from a delta write."""

import math

import pytest
import torch
from torch import Tensor, nn

from residua import DeepDelta, PooledHouseholder, Stream
from support.references import assert_computes, gelu, rms_norm
from support.tolerances import assert_close
from support.variants import normal, perturbed

DIM, EPS = 12, 1e-5
every_context = pytest.mark.parametrize("context", ["token", "cumulative", "sequence"])


def build(context: str, sublayers: int = 2, dtype: torch.dtype = torch.float64) -> Stream:
    torch.manual_seed(0)
    return perturbed(PooledHouseholder(context=context).build(DIM, sublayers, norm_eps=EPS)).to(dtype)


def with_beta(connection: nn.Module, beta: float) -> nn.Module:
    with torch.no_grad():
        connection.beta.out.weight.zero_()
        connection.beta.out.bias.fill_(math.log(beta / (2 - beta)) if 0 < beta < 2 else 800.0 * (beta - 1))
    return connection


def published(stream: Stream, x: Tensor, sublayers: list, context: str) -> Tensor:
    """One token after another with a dense I - beta k k^T."""
    sequences = []
    for state in x:
        for connection, sublayer in zip(stream.connections, sublayers):
            p, after = dict(connection.named_parameters()), []
            for t, row in enumerate(state):
                means = {"token": rms_norm(row), "cumulative": state[: t + 1].mean(0), "sequence": state.mean(0)}
                for_k, for_beta = gelu(p["up.weight"] @ means[context] + p["up.bias"]).chunk(2)
                raw = p["k.weight"] @ for_k + p["k.bias"]
                beta = 2 / (1 + (-(p["beta.out.weight"] @ for_beta + p["beta.out.bias"])).exp())
                k = raw / raw.norm()
                kept = (torch.eye(DIM, dtype=x.dtype) - beta * torch.outer(k, k)) @ row
                after.append(kept + sublayer(rms_norm(kept, p["norm.weight"])))
            state = torch.stack(after)
        sequences.append(state)
    return torch.stack(sequences)


@every_context
def test_values_and_gradients_are_those_of_dense_algebra(context):
    assert_computes(build(context), published, context, dim=DIM)


@every_context
@pytest.mark.parametrize(("asked", "got"), [(1.0, 1.0), (0.3, 0.3), (1.9, 1.9), (0, 2e-6), (2, 2 - 2e-6)])
@torch.no_grad()
def test_beta_starts_as_asked(context, asked, got):
    stream = PooledHouseholder(context=context, beta_init=asked).build(DIM, 2).double()
    for connection in stream.connections:
        beta = connection.read(normal(2, 5, DIM))[1].coefficients.beta
        assert (beta == beta[0, 0]).all()
        assert beta[0, 0].item() == pytest.approx(got, rel=1e-6)
    assert (PooledHouseholder().build(DIM, 1).connections[0].read(normal(2, 5, DIM))[1].coefficients.beta == 1).all()


@every_context
@torch.no_grad()
def test_erasing_keeping_and_reflecting(context):
    """|x~|^2 = |x|^2 + (beta^2 - 2 beta) (k^T x)^2: an isometry for beta 0 and 2 alone, a projection for 1."""
    connection, x = build(context).connections[0], normal(2, 5, DIM)
    for beta in (0.0, 0.5, 1.0, 1.5, 2.0):
        _, (kept, (_, k)) = with_beta(connection, beta).read(x)
        along = (k * x).sum(-1)
        assert_close(kept.square().sum(-1), x.square().sum(-1) + (beta**2 - 2 * beta) * along.square())
        assert_close((k * kept).sum(-1), (1 - beta) * along)


@torch.no_grad()
def test_it_writes_nothing_along_k():
    """With a sublayer that is silent only the erasure is left, where a delta write would still write beta k v^T; and
    the sublayer's output is added as it is, where the k-Map of Deep Delta Learning takes it for the direction."""
    connection, x = with_beta(build("token").connections[0], 1.0), normal(2, 5, DIM)
    _, carry = connection.read(x)
    k, y = carry.coefficients.k, normal(2, 5, DIM, seed=4)
    silent = connection.write(torch.zeros_like(x), carry)
    assert (k * silent).sum(-1).abs().max() < 1e-9
    assert_close(connection.write(y, carry) - silent, y)
    assert not isinstance(PooledHouseholder(), DeepDelta)
    assert "not Deep Delta Learning" in PooledHouseholder.__doc__
