"""The pooled Householder shortcut against its equation in plain dense algebra."""

import pytest
import torch
from torch import Tensor

from residua import PooledHouseholder, Stream
from support.references import assert_computes, gelu, rms_norm
from support.variants import normal, perturbed

DIM, EPS = 12, 1e-5
every_context = pytest.mark.parametrize("context", ["token", "cumulative", "sequence"])


def build(context: str, sublayers: int = 2, dtype: torch.dtype = torch.float64) -> Stream:
    torch.manual_seed(0)
    return perturbed(PooledHouseholder(context=context).build(DIM, sublayers, norm_eps=EPS)).to(dtype)


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
def test_beta_starts_at_the_requested_value(context, asked, got):
    stream = PooledHouseholder(context=context, beta_init=asked).build(DIM, 2).double()
    for connection in stream.connections:
        beta = connection.read(normal(2, 5, DIM))[1].coefficients.beta
        assert (beta == beta[0, 0]).all()
        assert beta[0, 0].item() == pytest.approx(got, rel=1e-6)
    assert (PooledHouseholder().build(DIM, 1).connections[0].read(normal(2, 5, DIM))[1].coefficients.beta == 1).all()
