"""The wide residual (NVIDIA) against a plain form for one token, and its preserving start in streams that differ."""

import pytest
import torch
from torch import Tensor

from residua import HyperConnections, IndependentHyperConnections, WideResidual
from residua.connections.families.stream_logits import even_biases
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import built, output_beside_residual, spread_over_streams, states
from support.tolerances import assert_close
from support.variants import every


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: WideResidual) -> Tensor:
    """Token by token and stream by stream."""
    n = scheme.num_streams
    gains = stream.expand.taps[0] if scheme.expand == "gains" else torch.ones(n, token.shape[0], dtype=token.dtype)
    rows = [gains[i] * token for i in range(n)]
    for connection, sublayer in zip(stream.connections, sublayers):
        read = sum(sigmoid(connection.weights.logits[i]) * rows[i] for i in range(n))
        y = sublayer(rms_norm(read, connection.norm.weight))
        r = connection.retention_logits
        kept = [1.0] * n if r is None else [1 - scheme.max_forget * sigmoid(-r[i]) for i in range(n)]
        rows = [kept[i] * rows[i] + 2 * sigmoid(connection.write_logits[i]) * y for i in range(n)]
    return sum(sigmoid(stream.collapse.weights.logits[i]) * rows[i] for i in range(n))


@every(WideResidual)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3), published, scheme, tokens=(2, 2))


def test_the_start_with_retention_is_near_the_plain_residual():
    ours, plain = output_beside_residual(WideResidual(retention=0.999))
    assert 1e-4 < (ours - plain).norm() / plain.norm() < 0.02
    for connection in built(WideResidual(retention=0.999)).connections:
        assert_close(connection.coefficients(torch.empty(0)).h_res, 0.999 * torch.eye(4).double(), factor=1e3)


@pytest.mark.parametrize("num_streams", [2, 3, 4, 7, 64])
def test_reads_start_even_and_symmetric_with_sum_one(num_streams):
    biases = torch.tensor(even_biases(num_streams))  # in float32, as a parameter holds them
    weights = sigmoid(biases.double())
    assert abs(weights.sum().item() - 1) < 1e-11
    assert (weights - 1 / num_streams).abs().max() < 1e-3
    assert torch.equal(biases, biases.flip(0))


def test_the_preserving_form_has_full_retention():
    assert WideResidual(retention=0.99).preserving() == WideResidual()


MIRRORED = {"hc": HyperConnections, "ihc": IndependentHyperConnections, "wide": WideResidual}


@pytest.mark.parametrize("num_streams", [2, 3, 4, 6, 7])
@pytest.mark.parametrize("name", MIRRORED)
def test_mirrored_starts_are_the_plain_residual_in_streams_that_differ(name, num_streams):
    """What makes it so: reads and writes are symmetric, and the writes lie in pairs around 1."""
    options = {} if name == "wide" else {"start": "mirrored"}
    scheme = MIRRORED[name](num_streams=num_streams, **options).preserving()
    ours, plain = output_beside_residual(scheme)
    assert (ours - plain).abs().max() < 1e-9 * plain.abs().max()
    for index, (_, state) in enumerate(states(built(scheme))):
        assert index == 0 or spread_over_streams(state) > 1e-4
    for connection, state in list(states(built(scheme)))[:-1]:
        h_pre, h_post = (getattr(connection.coefficients(state), key).expand(2, 5, -1) for key in ("h_pre", "h_post"))
        assert torch.equal(h_pre, h_pre.flip(-1))
        assert (h_post + h_post.flip(-1) - 2).abs().max() < 2e-9
        assert ((h_post - 1).abs().amax(-1) - 0.005).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["hc", "ihc"])
def test_a_preserving_start_stays_mirrored_if_outputs_require_it(name):
    assert MIRRORED[name](start="mirrored").preserving().start == "mirrored"
