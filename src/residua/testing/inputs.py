"""Inputs of checks: random numbers, perturbed parameters, plain sublayers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return standard normal numbers that depend only on the arguments."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def perturbed(module: nn.Module, *, scale: float = 0.3, seed: int = 1) -> nn.Module:
    """Add noise to every parameter of `module` and return it.

    Zero weights of gates, identity filters and unit gains would hide mistakes in the terms that they multiply.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((scale * noise).to(parameter))
    return module


def bare_sublayers(dim: int, count: int) -> list[Callable[..., Tensor]]:
    """Return `count` sublayers without trainable parameters, pointwise in the tokens: x -> tanh(x W).

    A sublayer with several inputs returns the sum of tanh(x_i W_i).
    """
    return [_Bare(normal(dim, dim, seed=5 + i) / dim**0.5) for i in range(count)]


class _Bare:
    def __init__(self, weight: Tensor):
        self.weight = weight

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        y = torch.tanh(x @ self.weight.to(x.dtype))
        for i, other in enumerate(others, start=1):
            y = y + torch.tanh(other @ self.weight.roll(i, 0).to(x.dtype))
        return y.clone()  # autograd keeps the result of tanh, and a module may add to its sublayer's output in place


def recorded(sublayer: Any) -> tuple[Any, list[tuple[Tensor, ...]]]:
    """Return the sublayer or sublayers wrapped to record their inputs, and the list that receives copies of these."""
    calls: list[tuple[Tensor, ...]] = []

    def record(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*inputs: Tensor) -> Tensor:
            calls.append(tuple(x.clone() for x in inputs))
            return function(*inputs)

        return call

    return ([record(function) for function in sublayer] if isinstance(sublayer, list) else record(sublayer)), calls
