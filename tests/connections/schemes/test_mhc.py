"""Manifold-constrained hyper-connections: the equations, the start, and the layout that is not mHC."""

import math
from itertools import permutations

import pytest
import torch
from torch import Tensor

from residua import ManifoldHyperConnections
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import (
    SUBLAYERS,
    built,
    output_beside_residual,
    states,
)
from support.tolerances import assert_close
from support.variants import every

SPLIT = ManifoldHyperConnections(layout="split")


def doubly_stochastic(scheme: ManifoldHyperConnections, z: Tensor) -> Tensor:
    """By exponentials divided by sums of rows and columns in turn, or as a weighted sum of all orders of streams."""
    n = scheme.num_streams
    if scheme.mixing == "permutations":
        orders = [torch.eye(n, dtype=z.dtype)[list(order)] for order in permutations(range(n))]
        return sum(weight * order for weight, order in zip(z.exp() / z.exp().sum(), orders, strict=True))
    h = z.view(n, n).exp()
    for axis in ((0, 1) if scheme.order == "columns" else (1, 0)) * scheme.iterations:
        h = h / h.sum(axis, keepdim=True)
    return h


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: ManifoldHyperConnections) -> Tensor:
    """Equations 7 and 8 of the paper, token by token. With layout="split", as in the code of a comparison, streams are
    pieces of the token, one mixture of them is tiled to the full width, and the output is cut into pieces again."""
    n, split = scheme.num_streams, scheme.layout == "split"
    rows = token.view(n, -1) if split else stream.expand(token[None, None])[0, 0]
    for connection, sublayer in zip(stream.connections, sublayers):
        m = connection.mappings
        flat = rms_norm(rows.flatten(), connection.state_norm.weight if split else 1.0)
        alpha = torch.cat([a.expand(size) for a, size in zip(m.alpha, m.sizes, strict=True)])
        *pre, post, res = [*(alpha * (m.phi.weight @ flat) + m.bias).split(m.sizes), *[()] * (not connection.mixes)]
        pre = pre[0] if pre else ()
        mixture = sum(1 / (1 + (-z).exp()) * row for z, row in zip(pre, rows)) if len(pre) else rows[0]
        y = sublayer(rms_norm(mixture.repeat(n if split else 1), connection.norm.weight)).view(n if split else 1, -1)
        mixed = doubly_stochastic(scheme, res) @ rows if len(res) else rows
        rows = mixed + 2 / (1 + (-post).exp())[:, None] * y.view(n if split else 1, -1)
    return rows.flatten() if split else rows.mean(0)


@every(ManifoldHyperConnections)
def test_values_and_gradients_are_those_of_the_equations(scheme):
    assert_computes(built(scheme, noise=0.3, count=4), published, scheme, tokens=(1, 2))


@every(ManifoldHyperConnections, expand="repeat", layout="copies")
def test_the_scheme_starts_as_the_plain_residual(scheme):
    """Up to the eps of the norms, which see a multiple of the residual."""
    ours, residual = output_beside_residual(scheme)
    assert (ours - residual).abs().max() < 1e-5 * residual.abs().max()


@every(ManifoldHyperConnections, expand="repeat", layout="copies")
def test_the_start_is_as_documented(scheme):
    """h_post = 1; each sublayer prefers to read another stream; either mixing keeps 1 - (n - 1) e^-6 of a stream.
    Nothing depends on the tokens yet."""
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
        assert (connection.mappings.alpha == torch.tensor(scheme.scale_init)).all()
        assert not connection.mappings.phi.weight.any()


def test_the_start_of_the_comparison_code_can_be_chosen():
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
