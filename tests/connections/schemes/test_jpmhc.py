"""JPmHC: the equations, and the start in the mean of streams that differ."""

import torch
from torch import Tensor, nn

from residua import JacobianHyperConnections
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import (
    SUBLAYERS,
    built,
    spread_over_streams,
    states,
)
from support.tolerances import assert_close
from support.variants import every


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: JacobianHyperConnections) -> Tensor:
    """Token by token with the full matrices: the mean of the rows of H_pre X, and y for all columns of H_post.

    Y <- I + alpha/2 W (I + Y) from I + alpha W; 200 times for the exact transform, which converges for small W.
    """
    n = scheme.num_streams
    identity = torch.eye(n, dtype=token.dtype)
    rows = stream.expand(token[None, None])[0, 0]
    for connection, sublayer in zip(stream.connections, sublayers):
        router = connection.router
        flat = nn.functional.layer_norm(rows.flatten(), (rows.numel(),), router.norm.weight, router.norm.bias, 1e-5)
        logits = list((router.project.weight @ flat).view(-1, n, n) + router.bias)
        h_pre = logits.pop(0).softmax(1) if connection.selects else identity
        h_post = logits.pop(0).softmax(0) if connection.distributes else identity
        (s,) = logits
        w = s - s.T
        h_res = identity + scheme.alpha * w
        for _ in range(scheme.iterations if scheme.cayley == "iterative" else 200):
            h_res = identity + scheme.alpha / 2 * w @ (identity + h_res)
        y = sublayer(rms_norm((h_pre @ rows).mean(0), connection.norm.weight))
        rows = h_res @ rows + h_post @ y.expand(n, -1)
    return rows.mean(0)


@every(JacobianHyperConnections)
def test_values_and_gradients_are_those_of_the_equations(scheme):
    assert_computes(built(scheme, noise=0.1, count=4), published, scheme, tokens=(1, 2))


@every(JacobianHyperConnections, expand="repeat")
def test_streams_differ_after_the_first_write(scheme):
    """Whatever was drawn, the mean over the streams of the written vectors is y; the mappings start as constants."""
    n = scheme.num_streams
    for index, (connection, state) in enumerate(states(built(scheme))):
        assert (spread_over_streams(state) > 0.01) == (index > 0)
        if connection is None:
            break
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        assert_close(h_res, torch.eye(n).double().expand_as(h_res))
        assert (h_pre is None) == (index == 0)
        if h_pre is not None:
            assert_close(h_pre, torch.full_like(h_pre, 1 / n))
        assert torch.equal(h_post, torch.ones_like(h_post)) == (index == SUBLAYERS - 1)
