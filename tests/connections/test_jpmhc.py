"""JPmHC: the equations, the constraints, the start in the mean of streams that differ, the saddle that it avoids."""

import math

import pytest
import torch
from torch import Tensor

from residua import JacobianHyperConnections
from residua.connections.jpmhc import JacobianConnection
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
from support.variants import ALL, bare_sublayers, normal

OURS = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, JacobianHyperConnections)}
VARIANTS = {name: scheme for name, scheme in OURS.items() if scheme.expand == "copies"}
every_variant = pytest.mark.parametrize("scheme", VARIANTS.values(), ids=VARIANTS)


def softmax(z: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in z)
    return [math.exp(value) / total for value in z]


def product(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]


def cayley(scheme: JacobianHyperConnections, s: list[list[float]]) -> list[list[float]]:
    """Y <- I + alpha/2 W (I + Y) from I + alpha W; 200 times for the exact transform, which converges for small W."""
    n = len(s)
    w = [[s[i][j] - s[j][i] for j in range(n)] for i in range(n)]
    y = [[(i == j) + scheme.alpha * w[i][j] for j in range(n)] for i in range(n)]
    for _ in range(scheme.steps if scheme.cayley == "iterative" else 200):
        moved = product(w, [[(i == j) + y[i][j] for j in range(n)] for i in range(n)])
        y = [[(i == j) + scheme.alpha / 2 * moved[i][j] for j in range(n)] for i in range(n)]
    return y


def reference(connection: JacobianConnection, streams: Tensor, sublayer) -> tuple[Tensor, Tensor]:
    """One token in loops over numbers, with the full matrices: the mean of the rows of H_pre X, and y for all columns
    of H_post. streams: (n, dim). Returns what the sublayer sees, and the next streams."""
    rows, n, router = streams.tolist(), len(streams), connection.router
    flat = [value for row in rows for value in row]
    mean = sum(flat) / len(flat)
    size = math.sqrt(sum((value - mean) ** 2 for value in flat) / len(flat) + 1e-5)
    gain, shift = router.norm.weight.tolist(), router.norm.bias.tolist()
    m = [(value - mean) / size * g + b for value, g, b in zip(flat, gain, shift)]
    weight, bias = router.project.weight.tolist(), router.bias.flatten().tolist()
    logits = [sum(a * c for a, c in zip(m, row)) + b for row, b in zip(weight, bias)]
    square = [[logits[k + i * n : k + (i + 1) * n] for i in range(n)] for k in range(0, len(logits), n * n)]

    identity = [[float(i == j) for j in range(n)] for i in range(n)]
    h_pre = [softmax(row) for row in square.pop(0)] if connection.selects else identity
    h_post = identity
    if connection.distributes:
        h_post = [list(row) for row in zip(*(softmax(list(column)) for column in zip(*square.pop(0))))]
    h_res = cayley(connection.scheme, square.pop(0))
    assert not square

    read = product(h_pre, rows)
    mixture = [sum(column) / n for column in zip(*read)]
    scale = math.sqrt(sum(value * value for value in mixture) / len(mixture) + 1e-5)
    x = [value / scale * g for value, g in zip(mixture, connection.norm.weight.tolist())]
    y = sublayer(torch.tensor(x, dtype=torch.float64)).tolist()
    write, mixed = product(h_post, [y] * n), product(h_res, rows)
    after = [[a + b for a, b in zip(*pair)] for pair in zip(mixed, write)]
    return torch.tensor(x, dtype=torch.float64), torch.tensor(after, dtype=torch.float64)


@every_variant
def test_the_equations(scheme):
    stream = built(scheme, noise=0.1)
    (sublayer,) = bare_sublayers(DIM, 1)
    for connection, state in states(stream):
        if connection is None:
            break
        x, carry = connection.read(state)
        after = connection.write(sublayer(x), carry)
        for place in [(0, 0), (1, 2)]:
            expected_x, expected_after = reference(connection, state[place], sublayer)
            assert_close(x[place], expected_x)
            assert_close(after[place], expected_after)


@every_variant
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


@every_variant
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
