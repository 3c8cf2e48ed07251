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
    """Against the singular values of dense products; `operators`: (S, P, d, d)."""
    product = torch.eye(operators.shape[-1], dtype=torch.float64)
    for i, operator in enumerate(operators):
        product = operator @ product
        values = torch.linalg.svdvals(product)
        assert_close(products.determinant[i], torch.linalg.det(product))
        assert_close(products.singular_max[i], values[:, 0])
        assert_close(products.singular_min[i], values[:, -1])
        assert_close(products.defect[i], (values.square() - 1).abs().amax(-1))
    return values


@pytest.mark.parametrize(("sublayers", "dim"), [(1, 1), (1, 5), (3, 8), (8, 8), (9, 4), (2, 1)])
@pytest.mark.parametrize("length", [1.0, 0.7])
def test_products_of_delta_writes_are_those_of_dense_operators(sublayers, dim, length):
    """Fewer and more sublayers than dimensions; also for a k that the guard has left shorter than 1."""
    k, beta = length * directions(sublayers, 3, dim), gates(sublayers, 3)
    products = rank_one_products(k, beta)
    values = check(products, delta_operator(k, beta))
    r = min(sublayers, dim)
    assert products.singular_values.shape == (3, r)
    ones = torch.ones(3, dim - r, dtype=torch.float64)
    assert_close(torch.cat([products.singular_values, ones], -1).sort(-1).values, values.sort(-1).values)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0, 2.0])
def test_products_along_one_direction(beta):
    """Six shortcuts along one k: the singular value |1 - beta|^6, and 1 elsewhere."""
    k = directions(1, 2, 8).expand(6, 2, 8)
    products = rank_one_products(k, torch.full((6, 2), beta, dtype=torch.float64))
    powers = (1 - torch.tensor(beta, dtype=torch.float64)) ** torch.arange(1, 7, dtype=torch.float64)
    assert_close(products.determinant, powers.unsqueeze(-1).expand(6, 2))
    assert_close(products.singular_min, powers.abs().unsqueeze(-1).expand(6, 2))
    assert_close(products.singular_max, torch.ones(6, 2, dtype=torch.float64))


def test_products_along_orthogonal_directions():
    """Each shortcut has a singular value of its own."""
    k = torch.eye(8, dtype=torch.float64)[:3].unsqueeze(1)
    beta = torch.tensor([0.25, 1.5, 2.0], dtype=torch.float64).unsqueeze(1)
    products = rank_one_products(k, beta)
    assert_close(products.singular_values.sort().values, torch.tensor([[0.5, 0.75, 1.0]], dtype=torch.float64))
    assert_close(products.determinant[:, 0], torch.tensor([0.75, -0.375, 0.375], dtype=torch.float64))


def test_reflections_are_isometries_of_alternating_orientation():
    products = rank_one_products(directions(5, 4, 6), torch.full((5, 4), 2.0))
    assert products.defect.max() < 1e-12
    signs = torch.tensor([-1.0, 1, -1, 1, -1], dtype=torch.float64)
    assert_close(products.determinant, signs.unsqueeze(-1).expand(5, 4))


def test_products_of_matrices_are_dense_products():
    m = normal(5, 3, 4, 4)
    products = matrix_products(m)
    assert_close(products.singular_values, check(products, m))


def test_rotations_have_no_defect():
    q = torch.linalg.qr(normal(6, 3, 4, 4)).Q
    products = matrix_products(q)
    assert products.defect.max() < 1e-12
    assert orthogonality_error(q).max() < 1e-12
    assert_close(orthogonality_error(2 * q), torch.full((6, 3), 3.0, dtype=torch.float64))


def test_what_is_not_finite_is_not_a_number_from_its_sublayer_on():
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
    assert_close(alignment(same), torch.ones(4, 4, dtype=torch.float64))
    assert_close(effective_rank(same), torch.ones(5, dtype=torch.float64))
    apart = torch.eye(16, dtype=torch.float64)[:4].unsqueeze(1).expand(4, 5, 16)
    assert_close(alignment(apart), torch.eye(4, dtype=torch.float64))
    assert_close(effective_rank(apart), torch.full((5,), 4.0, dtype=torch.float64))
    pairs = apart[[0, 0, 1, 1]]
    assert_close(effective_rank(pairs), torch.full((5,), 2.0, dtype=torch.float64))


def test_alignment_averages_over_tokens_without_regard_to_sign():
    """At 60 degrees, to either side."""
    k = torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[0.5, 0.75**0.5], [-0.5, 0.75**0.5]]], dtype=torch.float64)
    assert_close(alignment(k), torch.tensor([[1.0, 0.5], [0.5, 1.0]], dtype=torch.float64))


def test_a_direction_of_zero_is_aligned_with_nothing():
    k = torch.stack([torch.zeros(2, 4, dtype=torch.float64), directions(2, 4)])
    assert_close(alignment(k), torch.diag(torch.tensor([0.0, 1.0], dtype=torch.float64)))


def test_the_effective_rank_counts_directions_that_are_not_zero():
    """Tokens with none, one and two of them, and a token that is not finite."""
    k = torch.zeros(3, 4, 5, dtype=torch.float64)
    k[0, 1, 2] = -3.0
    k[[0, 1], 2, [0, 4]] = 0.5
    k[1, 3, 0] = torch.nan
    found = effective_rank(k)
    assert found[3].isnan()
    assert_close(found[:3], torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
