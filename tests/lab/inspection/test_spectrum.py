import pytest
import torch

from residua.lab.inspection.spectrum import (
    alignment,
    effective_rank,
    matrix_products,
    orthogonality_error,
    rank_one_products,
)
from residua.ops import delta_operator
from support.tolerances import assert_close
from support.variants import normal


def directions(*shape, seed=0):
    k = normal(*shape, seed=seed)
    return k / k.norm(dim=-1, keepdim=True)


def gates(*shape, seed=1):
    return 2 * torch.sigmoid(normal(*shape, seed=seed))


def check(products, operators):
    """Against the singular values of dense products, which are returned; `operators`: (S, P, d, d)."""
    product = torch.eye(operators.shape[-1], dtype=torch.float64)
    for i, operator in enumerate(operators):
        product = operator @ product
        values = torch.linalg.svdvals(product)
        assert_close(products.determinant[i], torch.linalg.det(product))
        assert_close(products.singular_max[i], values[:, 0])
        assert_close(products.singular_min[i], values[:, -1])
        assert_close(products.defect[i], (values.square() - 1).abs().amax(-1))
    return values


# Directions of S sublayers at 3 tokens, (S, 3, d): fewer and more than dimensions, all the same, all orthogonal, and
# shorter than 1, as the guard leaves them.
DIRECTIONS = {
    **{f"{s} in {d}": directions(s, 3, d) for s, d in [(1, 1), (1, 5), (3, 8), (8, 8), (9, 4), (2, 1)]},
    "same": directions(1, 3, 8).expand(6, 3, 8),
    "orthogonal": torch.eye(8, dtype=torch.float64)[:3, None].expand(3, 3, 8),
    "short": 0.7 * directions(3, 3, 8),
}


@pytest.mark.parametrize("beta", [None, 0.0, 0.3, 1.0, 2.0])
@pytest.mark.parametrize("k", DIRECTIONS.values(), ids=DIRECTIONS)
def test_products_of_delta_writes_are_those_of_dense_operators(k, beta):
    sublayers, tokens, dim = k.shape
    gate = gates(sublayers, tokens) if beta is None else torch.full((sublayers, tokens), beta, dtype=torch.float64)
    products = rank_one_products(k, gate)
    values = check(products, delta_operator(k, gate))
    rank = min(sublayers, dim)
    assert products.singular_values.shape == (tokens, rank)
    ones = torch.ones(tokens, dim - rank, dtype=torch.float64)
    assert_close(torch.cat([products.singular_values, ones], -1).sort(-1).values, values.sort(-1).values)


def test_products_of_matrices_are_dense_products():
    m = normal(5, 3, 4, 4)
    products = matrix_products(m)
    assert_close(products.singular_values, check(products, m))


def test_rotations_have_no_defect():
    q = torch.linalg.qr(normal(6, 3, 4, 4)).Q
    assert matrix_products(q).defect.max() < 1e-12
    assert orthogonality_error(q).max() < 1e-12
    assert_close(orthogonality_error(2 * q), torch.full((6, 3), 3.0, dtype=torch.float64))


def test_results_are_nan_from_the_first_sublayer_that_is_not_finite():
    k, beta, m = directions(4, 3, 6), gates(4, 3), normal(4, 3, 4, 4)
    clean, clean_m = rank_one_products(k, beta), matrix_products(m)
    k[2, 1, 0], m[2, 1, 0, 0] = torch.nan, torch.inf
    for products, expected in ((rank_one_products(k, beta), clean), (matrix_products(m), clean_m)):
        for name in ("determinant", "singular_max", "singular_min", "defect"):
            value, without = getattr(products, name), getattr(expected, name)
            assert value[2:, 1].isnan().all()
            assert_close(value[:2], without[:2])
            assert_close(value[:, [0, 2]], without[:, [0, 2]])
        assert products.singular_values[1].isnan().all()
        assert products.singular_values[0].isfinite().all()
    assert orthogonality_error(m)[2].isnan().tolist() == [False, True, False]
    assert effective_rank(k).isnan().tolist() == [False, True, False]


def test_alignment_and_effective_rank_of_planted_directions():
    same = directions(1, 5, 16).expand(4, 5, 16) * torch.tensor([1.0, -2.0, 3.0, 0.5]).view(4, 1, 1)
    apart = torch.eye(16, dtype=torch.float64)[:4].unsqueeze(1).expand(4, 5, 16)
    assert_close(alignment(same), torch.ones(4, 4, dtype=torch.float64))
    assert_close(alignment(apart), torch.eye(4, dtype=torch.float64))
    for k, rank in ((same, 1.0), (apart, 4.0), (apart[[0, 0, 1, 1]], 2.0)):
        assert_close(effective_rank(k), torch.full((5,), rank, dtype=torch.float64))


def test_alignment_averages_over_tokens_without_regard_to_sign():
    """At 60 degrees, to either side; a direction of zero is aligned with nothing."""
    k = torch.tensor([[[1.0, 0.0]] * 2, [[0.5, 0.75**0.5], [-0.5, 0.75**0.5]], [[0.0, 0.0]] * 2], dtype=torch.float64)
    assert_close(alignment(k), torch.tensor([[1.0, 0.5, 0], [0.5, 1.0, 0], [0, 0, 0]], dtype=torch.float64))


def test_the_effective_rank_counts_directions_that_are_not_zero():
    """Tokens with none, one and two of them, and a token that is not finite."""
    k = torch.zeros(3, 4, 5, dtype=torch.float64)
    k[0, 1, 2] = -3.0
    k[[0, 1], 2, [0, 4]] = 0.5
    k[1, 3, 0] = torch.nan
    ranks = effective_rank(k)
    assert ranks[3].isnan()
    assert_close(ranks[:3], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))


def test_a_product_that_overflows_is_nan():
    """Every factor is finite."""
    g = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(14, 2, 6, generator=g, dtype=torch.float64), dim=-1)
    beta = torch.ones(14, 2, dtype=torch.float64)
    beta[:, 1] = 1e25
    matrices = torch.eye(6).double() - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)
    for products in (rank_one_products(k, beta), matrix_products(matrices)):
        assert products.singular_max[:, 0].isfinite().all()
        assert products.singular_max[-1, 1].isnan()
