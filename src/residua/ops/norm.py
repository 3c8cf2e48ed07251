"""Norms: before a sublayer, and of a state before the mappings that depend on it."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.ops.derived import derive
from residua.ops.precision import at_least_float32, new_symbol, promote, vecdot
from residua.ops.recompute import is_kept, release, save_state
from residua.ops.transforms import Function, applied, transformed


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5, *, recompute: bool = False) -> Tensor:
    """Return w x / sqrt(mean(x^2) + eps) over the last axis (arXiv 1910.07467).

    x: (..., dim), weight: (dim,) or None for 1; gains keep their precision if x is narrower. Computed in at least
    float32; returns the shape and dtype of `x`. With `recompute` the backward pass recomputes the result instead of
    keeping it, and x too if possible. Without `recompute`, only an x that was not kept is recomputed. No bit changes
    in either case.
    """
    compiling = torch.compiler.is_compiling()
    if (recompute or not is_kept(x)) and torch.is_grad_enabled() and not compiling and not transformed():
        return _rms_norm_again(x, weight, eps)
    if x.dtype == at_least_float32(x).dtype:
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    return applied(_NarrowRMSNorm, x, x.new_ones(x.shape[-1]) if weight is None else weight, new_symbol(eps))


def _rms_norm_again(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    weights = [] if weight is None else [weight]
    if x.dtype != at_least_float32(x).dtype:
        return derive(partial(rms_norm, eps=eps), x, *weights)
    # In the same two steps as in PyTorch, so that the gradient of x is summed in the same order.
    scale = derive(lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps), x)
    return derive(_scaled, x, scale, *weights)


def _scaled(x: Tensor, scale: Tensor, weight: Tensor | None = None) -> Tensor:
    return scale * x if weight is None else scale * x * weight.to(x.dtype)


def mean_square(x: Tensor) -> Tensor:
    """Return mean(x^2) over the last axis in at least float32: (..., dim) -> (..., 1)."""
    return applied(_MeanSquare, x)


class _MeanSquare(Function):
    """Keep x in its own dtype for the backward pass, as `_NarrowRMSNorm` does, or recompute it (`ops.recompute`)."""

    @staticmethod
    def plain(x: Tensor) -> Tensor:
        wide = at_least_float32(x)
        return vecdot(wide, wide).unsqueeze(-1) / x.shape[-1]

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        save_state(ctx, x)
        return _MeanSquare.plain(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = release(ctx)
        return (2 / x.shape[-1] * grad * at_least_float32(x)).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Return w (x - mean) / sqrt(variance + eps) + b over the last axis, in at least float32 (arXiv 1607.06450).

    x: (..., dim), weight and bias: (dim,). Returns (..., dim) in the widest dtype, at least float32. The backward pass
    keeps x, in its own dtype, but not the result (a linear map that follows may keep the result).
    """
    return applied(_LayerNorm, x, weight, bias, new_symbol(eps))


class _LayerNorm(Function):
    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        # PyTorch's own layer norm (2.13) has a wrong second derivative in forward mode.
        x, weight, bias = promote(x, weight, bias)
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight + bias

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        result, mean, scale = torch.native_layer_norm(*_layer_norm_arguments(x, weight, bias), eps)
        save_state(ctx, x, weight, bias, mean, scale, replay=partial(_layer_normed, eps))
        ctx.eps = eps
        return result

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, bias, mean, scale = release(ctx)
        wide_x, shape, wide_weight, wide_bias = _layer_norm_arguments(x, weight, bias)
        grads = torch.ops.aten.native_layer_norm_backward(
            grad, wide_x, shape, mean, scale, wide_weight, wide_bias, list(ctx.needs_input_grad[:3])
        )
        triples = zip(grads, (x, weight, bias), ctx.needs_input_grad)
        return *(g.to(like.dtype) if needs_grad else None for g, like, needs_grad in triples), None


def _layer_norm_arguments(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, list[int], Tensor, Tensor]:
    x, weight, bias = promote(x, weight, bias)
    return x, [x.shape[-1]], weight, bias


def _layer_normed(eps: float, x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    return torch.native_layer_norm(*_layer_norm_arguments(x, weight, bias), eps)[0]


class _NarrowRMSNorm(Function):
    """Keep x in its own dtype for the backward pass: a widened copy would take twice the memory.

    With g the gradient of the result, r = sqrt(mean(x^2) + eps) and n = x / r:

    dw = sum(g n),   dx = (g w - n mean(g w n)) / r
    """

    @staticmethod
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide_x, wide_weight = promote(x, weight)
        return (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps) * wide_weight).to(x.dtype)

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide_x, wide_weight = promote(x, weight)
        scale = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.eps = eps
        return (wide_x * scale * wide_weight).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives need the scale as a function of x
            scale = torch.rsqrt(at_least_float32(x).square().mean(-1, keepdim=True) + ctx.eps)
        grad, wide_x, wide_weight = promote(grad, x, weight)
        normed, through = wide_x * scale, grad * wide_weight
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            along = (through * normed).mean(-1, keepdim=True)
            grad_x = (scale * torch.addcmul(through, normed, along, value=-1)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None
