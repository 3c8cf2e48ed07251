"""Doubly stochastic matrices: what they do to the streams, how near Sinkhorn comes, and the exact mixture."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import (
    guarded_sinkhorn,
    hyper_mix,
    kronecker_mixture,
    permutation_mixture,
    permutations,
    sinkhorn,
)
from support.delta_cases import generator, normal
from support.tolerances import assert_close

seeds = st.integers(0, 2**31)
sizes = st.integers(1, 6)


def row_error(matrix):
    return (matrix.sum(-1) - 1).abs().amax().item()


def column_error(matrix):
    return (matrix.sum(-2) - 1).abs().amax().item()


def assert_doubly_stochastic(matrix, tolerance):
    assert (matrix >= 0).all()
    assert row_error(matrix) <= tolerance
    assert column_error(matrix) <= tolerance


@given(sizes, seeds, st.integers(1, 8), st.floats(0.0, 5.0))
def test_sinkhorn_divides_by_row_sums_then_by_column_sums(n, seed, iterations, scale):
    logits = scale * normal(generator(seed), 3, n, n)
    expected = logits.exp()
    for _ in range(iterations):
        expected = expected / expected.sum(-1, keepdim=True)
        expected = expected / expected.sum(-2, keepdim=True)
    assert_close(sinkhorn(logits, iterations), expected)


@given(sizes, seeds, st.integers(1, 8))
def test_columns_first_is_the_order_of_the_paper(n, seed, iterations):
    """Equation 9: columns, then rows, which sum to 1 at the end, as the columns do in the other order."""
    logits = normal(generator(seed), 3, n, n)
    expected = logits.exp()
    for _ in range(iterations):
        expected = expected / expected.sum(-2, keepdim=True)
        expected = expected / expected.sum(-1, keepdim=True)
    assert_close(sinkhorn(logits, iterations, order="columns"), expected)
    assert row_error(expected) < 1e-12
    assert column_error(sinkhorn(logits, iterations)) < 1e-12


def test_an_order_that_is_neither_is_refused():
    with pytest.raises(ValueError, match="order must be 'rows' or 'columns', got 'row'"):
        sinkhorn(torch.ones(2, 2), order="row")


@given(sizes, seeds)
def test_twenty_iterations_are_doubly_stochastic_for_moderate_logits(n, seed):
    logits = normal(generator(seed), 5, n, n).clamp(-0.8, 0.8)
    for dtype in (torch.float64, torch.float32):
        assert_doubly_stochastic(sinkhorn(logits.to(dtype)), 1e-5)


@given(sizes, seeds, st.floats(0.1, 30.0))
def test_error_decreases_with_the_iterations(n, seed, scale):
    """Columns are exact from the first iteration on; the largest error of a row never grows."""
    logits = scale * normal(generator(seed), n, n)
    results = [sinkhorn(logits, iterations) for iterations in (1, 2, 4, 8, 16, 32, 64)]
    assert all(column_error(matrix) < 1e-12 for matrix in results)
    errors = [row_error(matrix) for matrix in results]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(errors))


@pytest.mark.slow
@given(sizes, seeds, st.sampled_from([0.3, 1.0, 2.0]))
def test_doubly_stochastic_mixing_never_grows_a_state_and_keeps_the_mean(n, seed, scale):
    g = generator(seed)
    matrix, x = sinkhorn((scale * normal(g, n, n)).clamp(-2, 2), 400), normal(g, n, 3)
    assert_doubly_stochastic(matrix, 1e-12)
    assert torch.linalg.matrix_norm(matrix, 2) <= 1 + 1e-12
    ones = torch.ones(n, dtype=torch.float64)
    assert_close(matrix @ ones, ones)  # the eigenvalue 1
    assert_close(ones @ matrix, ones)
    assert torch.linalg.eigvals(matrix).abs().max() <= 1 + 1e-12
    mixed = hyper_mix(x, matrix)
    assert_close(mixed.mean(-2), x.mean(-2))
    assert mixed.norm() <= x.norm() * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1e3, 1e4, 1e30])
def test_huge_logits_stay_finite(dtype, size):
    logits = (size * normal(generator(0), 20, 4, 4)).to(dtype).requires_grad_()
    matrix = sinkhorn(logits)
    assert matrix.isfinite().all()
    assert column_error(matrix.double()) < 4 * torch.finfo(dtype).eps
    (grad,) = torch.autograd.grad((matrix * normal(generator(1), 20, 4, 4).to(dtype)).sum(), logits)
    assert grad.isfinite().all()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=[pytest.mark.compiler, pytest.mark.nightly])])
@pytest.mark.parametrize("form", [sinkhorn, guarded_sinkhorn])
def test_large_gradients_of_large_logits_are_exact(form, compiled):
    """In float32, for gradients of every size and logits that no iteration brings to convergence: nothing overflows."""
    function = torch.compile(form, fullgraph=True, dynamic=False) if compiled else form
    for scale in (0.1, 6.0, 100.0):
        for size in (1.0, 1e4, 1e20):
            logits, weights = scale * normal(generator(0), 20, 4, 4), size * normal(generator(1), 20, 4, 4)
            found = [
                torch.autograd.grad(call(leaf), leaf, weights.to(leaf.dtype))[0].double() / size
                for call, leaf in ((function, logits.float().requires_grad_()), (form, logits.requires_grad_()))
            ]
            assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm(), (scale, size)


@pytest.mark.parametrize("n", range(1, 6))
def test_each_permutation_occurs_once_and_the_identity_is_first(n):
    matrices = permutations(n)
    assert matrices.shape == (math.factorial(n), n, n)
    assert matrices.dtype == torch.float32
    assert torch.equal(matrices[0], torch.eye(n))
    assert ((matrices == 0) | (matrices == 1)).all()
    assert (matrices.sum(-1) == 1).all()
    assert (matrices.sum(-2) == 1).all()
    assert len(torch.unique(matrices.flatten(1), dim=0)) == math.factorial(n)


@given(st.integers(1, 5), seeds, st.floats(0.0, 50.0))
def test_a_mixture_of_permutations_is_doubly_stochastic_exactly(n, seed, scale):
    """There is no iteration and no error of convergence: only the weights are rounded, for logits of every size."""
    logits = scale * normal(generator(seed), 2, 3, math.factorial(n))
    weights = logits.softmax(-1)
    matrix = permutation_mixture(weights)
    assert_doubly_stochastic(matrix, 1e-13)
    assert_doubly_stochastic(permutation_mixture(logits.float().softmax(-1)), 1e-5)
    assert torch.linalg.matrix_norm(matrix, 2).max() <= 1 + 1e-12
    expected = sum(weights[..., m, None, None] * permutations(n)[m].double() for m in range(math.factorial(n)))
    assert_close(matrix, expected)


@pytest.mark.slow
@given(st.integers(2, 4), seeds)
def test_a_mixture_reaches_every_doubly_stochastic_matrix(n, seed):
    """Birkhoff: take off the permutation whose smallest entry is largest, until nothing is left."""
    target = sinkhorn(normal(generator(seed), n, n), 500)
    matrices = permutations(n).double()
    weights, rest = torch.zeros(len(matrices), dtype=torch.float64), target.clone()
    for _ in range(n * n):
        smallest = torch.where(matrices == 1, rest, math.inf).flatten(1).amin(-1)
        m = int(smallest.argmax())
        weights[m] += smallest[m]
        rest = rest - smallest[m] * matrices[m]
    assert (weights >= -1e-12).all()
    assert_close(permutation_mixture(weights), target)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r"^logits must be \(\.\.\., n, n\) = \(2, 3, 3\), got \(2, 3, 4\)"):
        sinkhorn(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match=r"^weights must be \(\.\.\., n!\), .*, got \(5,\)"):
        permutation_mixture(torch.ones(5))
    for iterations in (0, -1):
        with pytest.raises(ValueError, match=f"^iterations must be 1 or more, got {iterations}"):
            sinkhorn(torch.ones(3, 3), iterations)
        with pytest.raises(ValueError, match=f"^iterations must be 1 or more, got {iterations}"):
            guarded_sinkhorn(torch.ones(3, 3), iterations)


@given(sizes, seeds, st.integers(1, 8), st.sampled_from([0.0, 1e-6, 1e-2]))
def test_guarded_sinkhorn_divides_by_columns_first_and_keeps_its_guards(n, seed, iterations, eps):
    """Values and gradients of the divisions written out."""
    logits = (2 * normal(generator(seed), 3, n, n)).requires_grad_()
    expected = logits.softmax(-1) + eps
    expected = expected / (expected.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        expected = expected / (expected.sum(-1, keepdim=True) + eps)
        expected = expected / (expected.sum(-2, keepdim=True) + eps)
    found, weights = guarded_sinkhorn(logits, iterations, eps=eps), normal(generator(seed + 1), 3, n, n)
    assert_close(found, expected)
    (ours,), (theirs,) = (torch.autograd.grad((x * weights).sum(), logits) for x in (found, expected))
    assert (ours - theirs).abs().max() <= 1e-11, "absolute: with one stream there is nothing to learn but rounding"


def test_guarded_sinkhorn_keeps_only_the_logits():
    logits, kept = normal(generator(0), 5, 4, 4).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        guarded_sinkhorn(logits, 20)
    assert kept == [5 * 16]


@given(sizes, seeds, st.integers(1, 8))
def test_guarded_sinkhorn_without_a_guard_is_sinkhorn(n, seed, iterations):
    """Its softmax is the first division by row sums."""
    logits = 2 * normal(generator(seed), 3, n, n)
    assert_close(guarded_sinkhorn(logits, iterations, eps=0.0), sinkhorn(logits, iterations))


@given(seeds, st.integers(1, 4))
def test_a_kronecker_mixture_is_the_product_of_its_factors(seed, factors):
    weights = normal(generator(seed), 2, factors).sigmoid()
    for row, found in zip(weights, kronecker_mixture(weights)):
        expected = torch.ones(1, 1, dtype=torch.float64)
        for p in row:
            expected = torch.kron(expected, torch.stack([torch.stack([p, 1 - p]), torch.stack([1 - p, p])]))
        assert_close(found, expected)
        assert_doubly_stochastic(found, 1e-12)


def test_a_kronecker_mixture_of_ones_is_the_identity():
    assert torch.equal(kronecker_mixture(torch.ones(3, 2)), torch.eye(4).expand(3, 4, 4))
