"""The pooled Householder shortcut against its equation in plain dense algebra, and what tells it from a delta write."""

import math

import pytest
import torch
from torch import Tensor, nn

from residua import DeepDelta, PooledHouseholder, Stream, StreamMemory
from residua.connections.memory import window_of
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, EPS = 12, 1e-5
every_context = pytest.mark.parametrize("context", ["token", "cumulative", "sequence"])


def build(context: str, sublayers: int = 2, dtype: torch.dtype = torch.float64) -> Stream:
    torch.manual_seed(0)
    return perturbed(PooledHouseholder(context=context).build(DIM, sublayers, norm_eps=EPS)).to(dtype)


def outputs(stream: Stream, x: Tensor) -> Tensor:
    memory = StreamMemory() if x.shape[1] == 1 and any(map(window_of, stream.parts)) else None
    return stream(x, bare_sublayers(DIM, len(stream.connections)), memory=memory)


def with_beta(connection: nn.Module, beta: float) -> nn.Module:
    with torch.no_grad():
        connection.beta.out.weight.zero_()
        connection.beta.out.bias.fill_(math.log(beta / (2 - beta)) if 0 < beta < 2 else 800.0 * (beta - 1))
    return connection


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def reference(connection: nn.Module, context: str, x: Tensor, sublayer) -> Tensor:
    """One token after another with a dense I - beta k k^T. x: (seq, dim)."""
    p = dict(connection.named_parameters())
    out = []
    for t in range(len(x)):
        if context == "token":
            c = x[t] / (x[t].square().mean() + EPS).sqrt()
        else:
            c = x[: t + 1].mean(0) if context == "cumulative" else x.mean(0)
        for_k, for_beta = gelu(p["up.weight"] @ c + p["up.bias"]).chunk(2)
        raw = p["k.weight"] @ for_k + p["k.bias"]
        k = raw / raw.norm()
        beta = 2 / (1 + (-(p["beta.out.weight"] @ for_beta + p["beta.out.bias"])).exp())
        kept = (torch.eye(DIM, dtype=x.dtype) - beta * torch.outer(k, k)) @ x[t]
        out.append(kept + sublayer(kept / (kept.square().mean() + EPS).sqrt() * p["norm.weight"]))
    return torch.stack(out)


@every_context
def test_a_connection_computes_its_equation(context):
    connection, x = build(context).connections[0], normal(2, 5, DIM)
    (sublayer,) = bare_sublayers(DIM, 1)
    expected = torch.stack([reference(connection, context, row, sublayer) for row in x])
    assert_close(connection(x, sublayer), expected)


def test_causality_is_a_matter_of_the_context():
    x = normal(2, 6, DIM)
    other = x.clone()
    other[:, 3] += 1.0
    expected = {
        "token": [False, False, False, True, False, False],
        "cumulative": [False, False, False, True, True, True],
        "sequence": [True] * 6,
    }
    for context, changes in expected.items():
        stream = build(context)
        assert (outputs(stream, x) != outputs(stream, other)).any(-1).any(0).tolist() == changes
        assert PooledHouseholder(context=context).causal == (context != "sequence")
    assert PooledHouseholder().context == "cumulative", "causal unless asked for otherwise"
    moved = build("sequence")
    assert (outputs(moved, x) - outputs(moved, other))[:, 0].abs().max() > 1e-3


def test_only_the_running_mean_needs_a_memory():
    for context, needed in (("token", 0), ("cumulative", 1), ("sequence", 0)):
        scheme = PooledHouseholder(context=context)
        assert {connection.window for connection in scheme.build(DIM, 6).connections} == {needed}


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
def test_no_net_is_dead_at_the_start(context):
    """Only the first layer of beta, whose last weights are 0, waits for one step; it shares a matrix with that of k."""
    torch.manual_seed(0)
    stream = PooledHouseholder(context=context).build(16, 4).double()
    x, weights = normal(2, 6, 16), normal(2, 6, 16, seed=3)
    (stream(x, bare_sublayers(16, 4)) * weights).sum().backward()
    for name, parameter in stream.named_parameters():
        assert parameter.grad.abs().max() > 1e-5, name


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
