"""Manifold-constrained hyper-connections: the equations, the constraints, the start, and the layout that is not mHC."""

import math
from itertools import chain, permutations

import pytest
import torch

from residua import ManifoldHyperConnections
from residua.connections.mhc import Mappings
from support.stream_cases import (
    DIM,
    SUBLAYERS,
    built,
    output_beside_residual,
    states,
)
from support.tolerances import assert_close
from support.variants import ALL, bare_sublayers, normal

OURS = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, ManifoldHyperConnections)}
VARIANTS = {name: scheme for name, scheme in OURS.items() if scheme.expand == "copies"}
COPIES = {name: scheme for name, scheme in VARIANTS.items() if scheme.layout == "copies"}
every_copy = pytest.mark.parametrize("scheme", COPIES.values(), ids=COPIES)
SPLIT = ManifoldHyperConnections(layout="split")


def rms_norm(x: list[float], gain: list[float], eps: float = 1e-5) -> list[float]:
    size = math.sqrt(sum(a * a for a in x) / len(x) + eps)
    return [a / size * g for a, g in zip(x, gain)]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def doubly_stochastic(scheme: ManifoldHyperConnections, z: list[float]) -> list[list[float]]:
    """By exponentials divided by sums of rows, then columns; or as a weighted sum of all orders of the streams."""
    n = scheme.num_streams
    h = [[0.0] * n for _ in range(n)]
    if scheme.mixing == "permutations":
        weights = [math.exp(value) for value in z]
        for weight, order in zip(weights, permutations(range(n)), strict=True):
            for o, i in enumerate(order):
                h[o][i] += weight / sum(weights)
        return h
    h = [[math.exp(z[o * n + i]) for i in range(n)] for o in range(n)]
    for _ in range(scheme.iterations):
        h = [[value / sum(row) for value in row] for row in h]
        columns = [sum(h[o][i] for o in range(n)) for i in range(n)]
        h = [[h[o][i] / columns[i] for i in range(n)] for o in range(n)]
    return h


def mappings(m: Mappings, flat: list[float], gain: list[float]) -> tuple[list[float] | None, list | None, list[float]]:
    """Equations 7 and 8 for one token."""
    scheme, n = m.scheme, m.scheme.num_streams
    r, phi, b, alphas = rms_norm(flat, gain), m.phi.weight.tolist(), m.bias.tolist(), m.alpha.tolist()
    logits, row = [], 0
    for size in m.sizes:
        group = []
        for k in range(row, row + size):
            alpha = alphas[sum(s > 0 for s in m.sizes[: len(logits)])]
            group.append(alpha * sum(a * c for a, c in zip(r, phi[k])) + b[k])
        logits.append(group)
        row += size
    pre, post, res = logits
    assert len(post) == n
    h_res = doubly_stochastic(scheme, res) if res else None
    return [sigmoid(z) for z in pre] or None, h_res, [2 * sigmoid(z) for z in post]


def written(rows: list[list[float]], h_res: list | None, h_post: list[float], y: list[list[float]]) -> list:
    """Row o of the next streams: the mixture of the rows, and h_post[o] times y[o]."""
    n, d = len(rows), len(rows[0])
    h = h_res or [[float(o == i) for i in range(n)] for o in range(n)]
    return [[sum(h[o][i] * rows[i][f] for i in range(n)) + h_post[o] * y[o][f] for f in range(d)] for o in range(n)]


@every_copy
def test_the_equations(scheme):
    stream, n = built(scheme, noise=0.3), scheme.num_streams
    (sublayer,) = bare_sublayers(DIM, 1)
    for connection, state in states(stream):
        if connection is None:
            break
        x, carry = connection.read(state)
        after = connection.write(sublayer(x), carry)
        for place in [(0, 0), (1, 2)]:
            rows = state[place].tolist()
            h_pre, h_res, h_post = mappings(connection.mappings, list(chain(*rows)), [1.0] * n * DIM)
            mixture = rows[0]
            if h_pre is not None:
                mixture = [sum(h_pre[i] * rows[i][f] for i in range(n)) for f in range(DIM)]
            expected = torch.tensor(rms_norm(mixture, connection.norm.weight.tolist()), dtype=torch.float64)
            assert_close(x[place], expected)
            y = sublayer(expected).tolist()
            assert_close(after[place], torch.tensor(written(rows, h_res, h_post, [y] * n), dtype=torch.float64))


@pytest.mark.parametrize("scheme", [scheme for scheme in VARIANTS.values() if scheme.layout == "split"])
def test_the_equations_of_the_comparison_code(scheme):
    """One mixture of the pieces, tiled to the full width; the output cut into pieces again."""
    stream, n = built(scheme, noise=0.3), scheme.num_streams
    (sublayer,) = bare_sublayers(DIM, 1)
    state, d = normal(2, 3, DIM), DIM // n
    for connection in stream.connections:
        x, carry = connection.read(state)
        after = connection.write(sublayer(x), carry)
        for place in [(0, 0), (1, 2)]:
            flat = state[place].tolist()
            rows = [flat[i * d : (i + 1) * d] for i in range(n)]
            h_pre, h_res, h_post = mappings(connection.mappings, flat, connection.state_norm.weight.tolist())
            mixture = [sum(h_pre[i] * rows[i][f] for i in range(n)) for f in range(d)]
            expected = torch.tensor(rms_norm(mixture * n, connection.norm.weight.tolist()), dtype=torch.float64)
            assert_close(x[place], expected)
            y = sublayer(expected).tolist()
            pieces = [y[i * d : (i + 1) * d] for i in range(n)]
            expected = list(chain(*written(rows, h_res, h_post, pieces)))
            assert_close(after[place], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize(
    ("scheme", "rows"),
    [(scheme, 1e-12) for scheme in VARIANTS.values() if scheme.mixing == "permutations"]
    + [(ManifoldHyperConnections(), 0.05), (ManifoldHyperConnections(iterations=500), 1e-5), (SPLIT, 1e-5)],
)
def test_the_constraints(scheme, rows):
    """20 iterations bring the row sums near 1 slowly where h_res is near the identity, and fast elsewhere; a mixture of
    permutations has them."""
    for connection, state in states(built(scheme, noise=0.3)):
        if connection is None:
            break
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        assert h_pre is None or ((h_pre > 0) & (h_pre < 1)).all()
        assert ((h_post > 0) & (h_post < 2)).all()
        if h_res is None:
            continue
        assert (h_res >= 0).all()
        assert_close(h_res.sum(-2), torch.ones_like(h_post))
        assert (h_res.sum(-1) - 1).abs().max() < rows
        assert torch.linalg.matrix_norm(h_res, 2).max() < 1 + rows


@every_copy
def test_starts_as_the_residual(scheme):
    """Up to the eps of the norms, which see a multiple of the residual."""
    ours, residual = output_beside_residual(scheme)
    assert (ours - residual).abs().max() < 1e-5 * residual.abs().max()


@every_copy
def test_the_start(scheme):
    """h_post = 1; the read prefers one stream after the other; the mixing keeps 1 - (n - 1) e^-6 of a stream, with
    either mixing. No token has a say yet."""
    n = scheme.num_streams
    for index, (connection, state) in enumerate(states(built(scheme))):
        if connection is None:
            break
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        assert_close(h_post, torch.ones_like(h_post))
        assert (h_pre is None) == (index == 0)
        assert (h_res is None) == (index in (0, SUBLAYERS - 1))
        if h_pre is not None:
            favourite = torch.arange(n) == index % n
            if scheme.start == "residual":
                assert (h_pre.argmax(-1) == index % n).all()
                assert_close(h_pre.sum(-1), torch.ones_like(h_pre[..., 0]))
            else:
                assert_close(h_pre, torch.sigmoid(4 * favourite.double() - 2).expand_as(h_pre))
        if h_res is not None:
            beside = math.exp(-6)
            expected = torch.full((n, n), beside, dtype=torch.float64).fill_diagonal_(1)
            assert_close(h_res, (expected / (1 + (n - 1) * beside)).expand_as(h_res), dtype=torch.float32)
        assert (connection.mappings.alpha == torch.tensor(scheme.alpha_init)).all()
        assert not connection.mappings.phi.weight.any()


def test_the_start_of_the_comparison_code():
    """b_res = 2 I keeps 0.711 of a piece, the eigenvalues of H_res are 1 and three times 0.615, and phi is drawn."""
    torch.manual_seed(0)
    stream = SPLIT.build(512, 2)
    mappings = stream.connections[0].mappings
    assert_close(mappings.bias, torch.cat([torch.zeros(8), 2 * torch.eye(4).flatten()]))
    assert (mappings.alpha == 0.01).all()
    assert mappings.phi.weight.std().item() == pytest.approx(0.02, rel=0.05)
    # Without a share of the token.
    torch.nn.init.zeros_(mappings.alpha)
    h_pre, h_res, h_post = stream.connections[0].read(torch.randn(1, 2, 512))[1].coefficients
    assert (h_pre == 0.5).all()
    assert (h_post == 1).all()
    assert h_res.diagonal(0, -2, -1).flatten().tolist() == pytest.approx([0.711] * 8, abs=5e-4)
    assert h_res[0, 0, 0, 1].item() == pytest.approx(0.096, abs=5e-4)
    assert sorted(torch.linalg.eigvals(h_res[0, 0]).real.tolist()) == pytest.approx([0.615] * 3 + [1], abs=5e-4)
