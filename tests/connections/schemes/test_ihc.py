"""Independent hyper-connections (Hy4) against a plain form for one token, their start, and what training does."""

import pytest
import torch
from torch import Tensor

from residua import IndependentHyperConnections
from residua.connections.families.stream_logits import reading_biases
from support.references import assert_computes, by_token, logits_of_token, rms_norm
from support.stream_cases import built, states
from support.tolerances import assert_close
from support.variants import every


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: IndependentHyperConnections) -> Tensor:
    """Token by token and stream by stream."""
    n, eps = scheme.num_streams, scheme.gate_eps
    rows = token.expand(n, -1)
    for connection, sublayer in zip(stream.connections, sublayers):
        z = logits_of_token(connection.logits, rows)
        read = sum((1 / (1 + torch.exp(-z[i])) + eps) * rows[i] for i in range(n))
        y = sublayer(rms_norm(read, connection.norm.weight))
        written = [rows[i] + (scheme.magnitude / (1 + torch.exp(-z[n + i])) + eps) * y for i in range(n)]
        rows = torch.stack(written)
    weights = torch.full((n,), 1 / n, dtype=token.dtype)
    if scheme.head == "sigmoid":
        weights = torch.sigmoid(logits_of_token(stream.collapse.logits, rows)) + eps
    return weights @ rows


@every(IndependentHyperConnections)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3), published, scheme, tokens=(2, 2))


def test_the_start_is_the_published_one():
    """Every stream is read with 1/n and written with 1, up to the draw of W."""
    for connection, state in states(built(IndependentHyperConnections(weight_std=0.0))):
        if connection is not None:
            h_pre, _, h_post = connection.read(state)[1].coefficients
            assert_close(h_pre, torch.full_like(h_pre, 0.25 + 1e-6), dtype=torch.float32)
            assert_close(h_post, torch.full_like(h_post, 1 + 1e-6), dtype=torch.float32)
    weights = [c.logits.project.weight for c in IndependentHyperConnections().build(64, 2).connections]
    assert torch.cat(weights).std().item() == pytest.approx(0.006, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("total", [1.0, 1 + 2.4e-5])
def test_reading_biases_sum_to_the_total(dtype, total):
    for n in (2, 3, 4, 8):
        biases = torch.tensor(reading_biases(n, n - 1, eps=1e-6, total=total), dtype=dtype).double()
        read = torch.sigmoid(biases) + 1e-6
        assert abs(read.sum().item() - total) < 1e-12
        assert read[-1].item() == pytest.approx(0.5 if n > 2 else 0.77, abs=1e-4 if n > 2 else 0.05)
