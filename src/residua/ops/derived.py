"""Recompute results in the backward pass from tensors that are kept anyway.

A tensor computed from a state of several streams, such as the normalised state, can be as large as the state. With
`derive` the backward pass computes it again, in the same operations, from a state that may be recomputed itself
(`ops.recompute`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from residua.ops.recompute import release, save_state
from residua.ops.transforms import Function, applied


def derive(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Return function(*inputs), which is recomputed for the backward pass instead of kept.

    The function must be deterministic, and must take every tensor that needs a gradient as an argument. Inputs that can
    be recomputed are not kept either. The gradient is differentiable, unless it needs the replay of a write.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # a compiler decides which tensors to keep
        return function(*inputs)
    return applied(_Derived, function, *inputs)


class _Derived(Function):
    """Run autograd's own backward pass of the function, so that gradients equal its gradients to the last bit."""

    @staticmethod
    def plain(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return function(*inputs)

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        ctx.function, ctx.precision = function, _precision(inputs[0].device)
        save_state(ctx, *inputs, inputs=len(inputs), replay=partial(_under, ctx.precision, function))
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        twice, needs = torch.is_grad_enabled(), ctx.needs_input_grad[1:]
        inputs = release(ctx)
        with torch.enable_grad(), ctx.precision():
            # Detached views: one input may have been computed from another, and no gradient may flow between them here.
            inputs = [x.view_as(x) if twice else x.detach().requires_grad_(need) for x, need in zip(inputs, needs)]
            result = ctx.function(*inputs)
        leaves = [x for x, need in zip(inputs, needs) if need]
        gradients = iter(torch.autograd.grad(result, leaves, grad, create_graph=twice))
        return None, *(next(gradients) if need else None for need in needs)


def _under(precision: Callable[[], AbstractContextManager], function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    with precision():
        return function(*inputs)


def _precision(device: torch.device) -> Callable[[], AbstractContextManager]:
    """Return a function that makes a context with the current autocast state, because backward does not inherit it."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):  # the meta device has none
        return nullcontext
    dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return partial(torch.autocast, kind, dtype=dtype, enabled=enabled)


def flattened(streams: Tensor) -> Tensor:
    """Return (..., n, d) as (..., n d). The backward pass keeps an expanded vector once, not n copies of it."""
    return derive(lambda x: x.flatten(-2), streams) if streams.stride(-2) == 0 else streams.flatten(-2)
