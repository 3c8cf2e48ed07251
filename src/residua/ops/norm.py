"""The norm before a sublayer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.ops.precision import at_least_float32, new_symbol, promote, without_autocast


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Return w x / sqrt(mean(x^2) + eps) over the last axis (arXiv 1910.07467).

    x: (..., dim), weight: (dim,) or None for 1; gains keep their precision where x is narrower. Computed in at least
    float32; returns the shape and dtype of `x`.
    """
    if x.dtype == at_least_float32(x).dtype:
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    return _NarrowRMSNorm.apply(x, x.new_ones(x.shape[-1]) if weight is None else weight, new_symbol(eps))


def mean_square(x: Tensor) -> Tensor:
    """Return mean(x^2) over the last axis in at least float32: (..., dim) -> (..., 1)."""
    return _MeanSquare.apply(x)


class _MeanSquare(torch.autograd.Function):
    """Keep x in its own dtype for the backward pass, as `_NarrowRMSNorm` does."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        wide = at_least_float32(x)
        with without_autocast(x.device):
            return torch.linalg.vecdot(wide, wide).unsqueeze(-1) / x.shape[-1]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        return (2 / x.shape[-1] * grad * at_least_float32(x)).to(x.dtype)


class _NarrowRMSNorm(torch.autograd.Function):
    """Keep x in its own dtype for the backward pass: a widened copy would take twice the memory.

    With n = x / r, r the root: dw = sum(g n), dx = (g w - n mean(g w n)) / r.
    """

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
        if torch.is_grad_enabled():  # for a second derivative the scale must be a function of x
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
