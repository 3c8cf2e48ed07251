"""Sinkhorn's iteration in Triton against its definition in float64; without a GPU it is interpreted."""

import itertools
from functools import partial

import pytest
import torch

from residua.ops import sinkhorn
from support.kernel_cases import DEVICE, assert_as_good, normal, results
from support.lanes import some

triton = pytest.importorskip("triton")

from residua.ops.kernels import sinkhorn as kernels  # noqa: E402

kernel = partial(sinkhorn, implementation="triton")


def assert_matrices_as_good(logits, iterations):
    options = {"iterations": iterations}
    assert_as_good(partial(kernel, **options), partial(sinkhorn, **options), [logits])


SHAPES = [(7, 1, 1), (2, 3, 2, 2), (1, 5, 3, 3), (17, 4, 4), (5, 8, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FEW = {*((shape, torch.float32, 20) for shape in SHAPES), *((SHAPES[2], dtype, 1) for dtype in DTYPES)}


@pytest.mark.parametrize(
    ("shape", "dtype", "iterations"), some(itertools.product(SHAPES, DTYPES, (1, 20)), FEW.__contains__)
)
def test_the_kernel_is_as_accurate_as_the_plain_definition(shape, dtype, iterations):
    assert_matrices_as_good(normal(*shape, dtype=dtype), iterations)


def test_the_largest_matrices_are_supported():
    assert_matrices_as_good(normal(2, 16, 16), 3)
    assert_matrices_as_good(normal(9, 9), 3)


@pytest.mark.parametrize(
    ("n", "iterations"), some(itertools.product((2, 3, 4), (1, 20)), {(2, 1), (3, 20)}.__contains__)
)
def test_large_logits_stay_finite_and_right(n, iterations):
    logits = 100 * normal(16, n, n)
    logits[0] = 200 * torch.eye(n, device=DEVICE)
    logits[1] = -200
    logits[2, 0] = 200
    logits[2, 1:] = -200
    logits = logits.clamp(-200, 200)
    assert logits.max() == 200
    assert logits.min() == -200
    assert_matrices_as_good(logits, iterations)
    for size in (1e4, 1e30):
        matrices, gradient = results(partial(kernel, iterations=iterations), [size / 100 * logits])
        torch.testing.assert_close(matrices.sum(-2), torch.ones(16, n, device=DEVICE))
        assert gradient.isfinite().all()


def test_an_entry_that_must_be_zero_stays_zero():
    logits = normal(3, 4, 4)
    logits[:, 0, 1] = -torch.inf
    assert_matrices_as_good(logits, 20)
    assert not kernel(logits)[:, 0, 1].any()


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's
def test_a_nan_does_not_spread_to_other_matrices():
    logits = normal(3, 4, 4)
    logits[1, 2, 0] = torch.nan
    matrices = kernel(logits)
    assert matrices[1].isnan().all()
    assert matrices[[0, 2]].isfinite().all()


def test_logits_and_gradients_may_have_any_strides():
    logits = normal(4, 4, 6).permute(2, 1, 0).requires_grad_()
    expected = kernel(logits.detach().contiguous(), 3)
    assert torch.equal(kernel(logits, 3), expected)
    (ours,) = torch.autograd.grad((kernel(logits, 3) ** 2).mT.sum(0).trace(), logits)
    (plain,) = torch.autograd.grad((sinkhorn(logits, 3) ** 2).mT.sum(0).trace(), logits)
    torch.testing.assert_close(ours, plain)


def test_an_empty_batch_is_supported():
    for made in results(kernel, [normal(0, 4, 4)]):
        assert made.shape == (0, 4, 4)


def test_only_the_logits_are_kept_for_the_backward_pass():
    kept = []
    logits = normal(5, 4, 4, dtype=torch.bfloat16).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernel(logits)
    assert [x.data_ptr() for x in kept] == [logits.data_ptr()]


def test_the_operator_is_registered_as_torch_demands():
    torch.library.opcheck(kernels.sinkhorn, (normal(2, 3, 3).requires_grad_(), 2))
    torch.library.opcheck(kernels.sinkhorn_backward, (normal(2, 3, 3), normal(2, 3, 3, seed=1), 2))
