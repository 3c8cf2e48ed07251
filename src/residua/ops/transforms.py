"""Autograd functions with explicit gradients, and their replacement by plain operations inside transforms.

An explicit gradient saves memory and time in training. `torch.func` (vmap, grad, jacrev, jvp, hessian) and forward mode
need operations that they can differentiate themselves, so inside them the plain operations run instead.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map


class Function(torch.autograd.Function):
    """An autograd function with a method `plain`: the same map in operations that `torch.func` can transform."""

    @staticmethod
    def plain(*args: Any) -> Any:
        raise NotImplementedError

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        """Return autograd's own key, and unpack the saved tensors of a node that may be replayed (`ops.recompute`).

        Compiled autograd asks for the key when it records the backward pass of an eager forward pass. It frees saved
        tensors before the recorded graph runs. In an activation checkpoint they can be unpacked only once.
        """
        if getattr(ctx, "replay", None) is not None and ctx.checkpoint is None and ctx.opened is None:
            ctx.opened = ctx.saved_tensors
        return torch.autograd.Function._compiled_autograd_key(ctx)

    if torch.__version__.startswith("2.11."):
        # pytorch/pytorch#180642: if the result of a compiled forward pass is also another variable, it silently gets no
        # gradient. `x.to(dtype)` returns x itself if x already has this dtype; a view of it is a separate tensor.
        def __init_subclass__(cls, **options: Any) -> None:
            super().__init_subclass__(**options)
            if "forward" in vars(cls):
                method = vars(cls)["forward"]

                def viewed(first: Any, *args: Any) -> Any:  # `first`: the context, or the class
                    result = method.__func__(first, *args)
                    return tree_map(lambda x: x[...], result) if torch.compiler.is_compiling() else result

                cls.forward = type(method)(viewed)  # type: ignore[method-assign]


class Unrecorded:
    """A stand-in for the context of a function that runs without gradients; it keeps nothing."""

    needs_input_grad: tuple[bool, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        pass

    mark_non_differentiable = save_for_backward


def applied(function: type[Function], *args: Any) -> Any:
    """Apply `function`: in its `plain` form inside a transform, and without autograd if gradients are disabled.

    In generation, `Function.apply` takes longer than several operations on one token.
    """
    if transformed():
        return function.plain(*args)
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return function.apply(*args)
    return function.forward(Unrecorded(), *args)


def transformed() -> bool:
    """Return whether this code runs inside a transform of `torch.func` or forward-mode differentiation."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def batched(x: Tensor) -> bool:
    """Return whether x is inside a transform, or in a batch of gradients (`grad(..., is_grads_batched=True)`)."""
    if torch.compiler.is_compiling():
        return False
    return transformed() or torch._C._functorch.is_legacy_batchedtensor(x)
