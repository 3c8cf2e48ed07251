"""The four norms of the unit direction: values and derivatives, also at and near k = 0."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import K_NORMS, unit
from support.delta_cases import dims, direction, generator
from support.tolerances import assert_close

EPS = 1e-5
# Lengths of the raw direction in units of eps, from nothing through eps itself to an ordinary vector.
LENGTHS = [0.0, 1e-3, 0.5, 2.0, 1e3, 1e5]


def expected_norm(k_norm: str, n: float, dim: int, eps: float) -> float:
    """The divisor, as the sources write it."""
    return {
        "rms": math.sqrt(n**2 + eps**2),
        "add": n + eps,
        "clamp": max(n, eps),
        "rms_d": math.sqrt(n**2 + dim * eps**2),
    }[k_norm]


def expected_jacobian(k_norm: str, raw: torch.Tensor, eps: float) -> torch.Tensor:
    n, dim = raw.norm().item(), raw.numel()
    identity = torch.eye(dim, dtype=raw.dtype)
    divisor = expected_norm(k_norm, n, dim, eps)
    if n == 0 or (k_norm == "clamp" and n < eps):
        return identity / divisor
    radial = torch.outer(raw, raw) / n**2
    growth = n / divisor if k_norm in ("rms", "rms_d") else 1.0  # d divisor / d n
    return identity / divisor - radial * growth * n / divisor**2


@pytest.mark.parametrize("k_norm", K_NORMS)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dim", [1, 6])
def test_value_and_jacobian(k_norm, length, dim):
    raw = length * EPS * direction(generator(dim), dim)
    assert_close(unit(raw, k_norm=k_norm, eps=EPS), raw / expected_norm(k_norm, length * EPS, dim, EPS))
    jacobian = torch.autograd.functional.jacobian(lambda k: unit(k, k_norm=k_norm, eps=EPS), raw)
    scale = expected_norm(k_norm, length * EPS, dim, EPS)  # the jacobian is of the order of 1 / scale, up to 1e5
    assert_close(jacobian * scale, expected_jacobian(k_norm, raw, EPS) * scale)


@pytest.mark.parametrize("k_norm", K_NORMS)
def test_zero_direction_is_zero_with_a_finite_gradient(k_norm):
    raw = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    k = unit(raw, k_norm=k_norm)
    k.sum().backward()
    assert torch.equal(k, torch.zeros_like(k))
    # 1 / eps = 1e5: the reason why an output projection that feeds k must not start at zero.
    assert_close(raw.grad, torch.full_like(raw, 1e5 / (math.sqrt(5) if k_norm == "rms_d" else 1)))


@given(dims, st.floats(1e-6, 10.0), st.floats(1e-6, 1.0), st.integers(0, 2**31))
def test_rms_is_rms_norm_over_sqrt_dim(dim, length, eps, seed):
    raw = length * direction(generator(seed), 3, dim)
    k = unit(raw, k_norm="rms", eps=eps)
    assert_close(k, F.rms_norm(raw, (dim,), eps=eps**2 / dim) / math.sqrt(dim))
    assert_close(k.square().sum(-1), torch.full((3,), length**2 / (length**2 + eps**2), dtype=torch.float64))


@pytest.mark.parametrize("k_norm", K_NORMS)
def test_float32_underflow_is_harmless(k_norm):
    raw = torch.tensor([[1e-30, 0.0], [1e-23, 1e-23]], requires_grad=True)  # squares underflow, or are denormal
    k = unit(raw, k_norm=k_norm)
    k.sum().backward()
    assert k.isfinite().all()
    assert raw.grad.isfinite().all()


def test_an_unknown_k_norm_is_an_error_that_lists_them():
    with pytest.raises(ValueError, match="rms, add, clamp, rms_d, got 'l2'"):
        unit(torch.ones(3), k_norm="l2")
