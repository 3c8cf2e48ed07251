"""JPmHC: the equations, the constraints, the start in the mean of streams that differ, the saddle that it avoids."""

import torch
from torch import Tensor, nn

from residua import JacobianHyperConnections
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import (
    DIM,
    SUBLAYERS,
    built,
    gradients,
    output_beside_residual,
    spread_over_streams,
    states,
    step,
)
from support.tolerances import assert_close
from support.variants import every, normal


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
        for _ in range(scheme.steps if scheme.cayley == "iterative" else 200):
            h_res = identity + scheme.alpha / 2 * w @ (identity + h_res)
        y = sublayer(rms_norm((h_pre @ rows).mean(0), connection.norm.weight))
        rows = h_res @ rows + h_post @ y.expand(n, -1)
    return rows.mean(0)


@every(JacobianHyperConnections)
def test_values_and_gradients_are_those_of_the_equations(scheme):
    assert_computes(built(scheme, noise=0.1, count=4), published, scheme, tokens=(1, 2))


@every(JacobianHyperConnections, expand="copies")
def test_the_constraints(scheme):
    """Rows of H_pre and columns of H_post sum to 1; the vectors that are left of them sum to 1 and n; the exact Cayley
    transform is a rotation, the iterated one nearly."""
    n = scheme.num_streams
    for connection, state in states(built(scheme, noise=0.3)):
        if connection is None:
            break
        pre, res, post = connection.matrices(state)
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        ones = torch.ones(2, 5, n, dtype=torch.float64)
        if pre is not None:
            assert (pre > 0).all()
            assert_close(pre.sum(-1), ones)
            assert_close(h_pre.sum(-1), ones[..., 0])
        if post is not None:
            assert (post > 0).all()
            assert_close(post.sum(-2), ones)
        assert_close(h_post.sum(-1), n * ones[..., 0])
        assert torch.equal(h_res, res)
        defect = torch.linalg.matrix_norm(res.mT @ res - torch.eye(n), 2).max()
        if scheme.cayley == "exact":
            assert defect < 1e-12
            assert_close(torch.linalg.det(res), ones[..., 0])
        else:
            assert 1e-12 < defect < 0.5


def test_the_defect_of_the_iteration():
    """|lambda|^2 = 1 - t^4/4 + t^6/16 after two steps from I + alpha W, t = alpha times the size of the eigenvalue."""
    connection = built(JacobianHyperConnections(num_streams=2)).connections[1]
    with torch.no_grad():
        connection.router.bias[2, 0, 1] = 5
    t = 0.1 * 5
    res = connection.matrices(normal(1, 1, 2, DIM)).res[0, 0]
    assert_close(res.mT @ res, (1 - t**4 / 4 + t**6 / 16) * torch.eye(2).double())


@every(JacobianHyperConnections, expand="copies")
def test_starts_as_the_residual_with_streams_that_differ(scheme):
    """The mean over the streams of what is written is y, whatever was drawn; nothing else has a say yet."""
    ours, residual = output_beside_residual(scheme)
    assert_close(ours, residual)
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


def drawn_at_zero(scheme: JacobianHyperConnections):
    """The stream as it would start without the draw."""
    stream = built(scheme)
    for connection in stream.connections:
        torch.nn.init.zeros_(connection.router.bias)
    return stream


def test_all_zero_would_be_a_saddle():
    """Equal streams: no gradient reaches the router, so no step ever moves it. With the draw, all but H_post have one
    at once, because what is written counts the same in each stream until the reads differ."""
    stream = drawn_at_zero(JacobianHyperConnections())
    for _ in range(2):
        found = gradients(stream)
        assert all(grad.abs().max() < 1e-12 for name, grad in found.items() if "router" in name)
        assert all(spread_over_streams(state) < 1e-12 for _, state in states(stream))
        step(stream, lr=0.3)
    start = gradients(built(JacobianHyperConnections()))
    for index in range(SUBLAYERS):
        bias = start[f"connections.{index}.router.bias"].abs().amax((1, 2)).tolist()
        pre = bias.pop(0) if index > 0 else None
        post = bias.pop(0) if index < SUBLAYERS - 1 else None
        (res,) = bias
        # The first streams are still equal: turning them matters by their sum alone, which W = 0 does not change.
        assert res < 1e-12 if index == 0 else res > 1e-3
        assert pre is None or pre > 1e-4
        assert post is None or post < 1e-12
