"""Random arguments of operations, the comparison with a reference, and the dense product form of a delta write."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from support.tolerances import assert_close

betas = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 2.0))
invertible_betas = betas.filter(lambda beta: abs(1 - beta) > 0.05)  # the inverse loses digits as 1 / (1 - beta)
dims = st.integers(1, 7)
channels = st.integers(1, 4)
length_one = st.just(1.0)


class Case(NamedTuple):
    """Arguments of a delta write in float64, in its order."""

    state: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=g, dtype=torch.float64)


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_equals_with_gradients(op: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Check that an operation has the value of a reference, and its gradients for a random gradient."""
    ours, theirs = leaves(*inputs), leaves(*inputs)
    actual, expected = op(*ours), reference(*theirs)
    assert_close(actual, expected)
    grad = normal(generator(7), *expected.shape)
    for a, b in zip(torch.autograd.grad(actual, ours, grad), torch.autograd.grad(expected, theirs, grad)):
        assert_close(a, b)


def direction(g: torch.Generator, *shape: int) -> Tensor:
    """Vectors of length 1 along the last axis."""
    raw = normal(g, *shape)
    return raw / raw.norm(dim=-1, keepdim=True)


@st.composite
def cases(draw, *, norms=length_one, gates=betas, value_channels=channels) -> Case:
    """k has a length drawn from `norms`; every token has a gate of its own."""
    leading = draw(st.sampled_from([(), (3,), (2, 1), (2, 3)]))
    m, d = draw(value_channels), draw(dims)
    g = generator(draw(st.integers(0, 2**31)))
    k = draw(norms) * direction(g, *leading, d)
    beta = [draw(gates) for _ in range(math.prod(leading))]
    beta = torch.tensor(beta, dtype=torch.float64).reshape(leading)
    return Case(normal(g, *leading, m, d), k, normal(g, *leading, m), beta)


def outer(k: Tensor, v: Tensor) -> Tensor:
    """k v^T in the paper's layout (..., dim, value_channels)."""
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def product_form(state: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> Tensor:
    """A X + beta k v^T with the dense A = I - beta k k^T, in the paper's layout inside and in the library's outside."""
    identity = torch.eye(k.shape[-1], dtype=k.dtype)
    gate = beta[..., None, None]
    operator = identity - gate * outer(k, k)
    return (operator @ state.mT + gate * outer(k, v)).mT
