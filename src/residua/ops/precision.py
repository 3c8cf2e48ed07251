"""Compute gates and mappings in at least float32, whatever the model's dtype."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.ops.recompute import is_kept, release, save_state
from residua.ops.transforms import Function, applied


def at_least_float32(x: Tensor) -> Tensor:
    """Return `x` in float32 if its dtype is narrower (bfloat16, float16), unchanged otherwise (float32, float64)."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def promote(*tensors: Tensor) -> list[Tensor]:
    """Return all tensors in the widest of their dtypes, at least float32."""
    dtype = tensors[0].dtype
    if dtype in (torch.float32, torch.float64) and all(x.dtype == dtype for x in tensors):
        return list(tensors)  # a shortcut, because promote_types takes as long as an operation on one token
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return [x.to(dtype) for x in tensors]


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over the features, (..., d) -> (...), as a sum of products that a compiler can fuse."""
    return (a * b).sum(-1)


def new_symbol(x: float) -> float:
    """Return x as a new symbol for torch.compile.

    Dynamo makes a number symbolic once it has seen two values of it. In torch 2.13 it cannot pass one symbol to several
    autograd functions.
    """
    return x * 1.0 if torch.compiler.is_compiling() else x


def under_autocast(device: torch.device) -> bool:
    """Return whether autocast chooses the dtype of matrix products on this device."""
    # The meta device has no autocast.
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Return a context in which matrix products have the dtype of their arguments, even if autocast is on."""
    return torch.autocast(device.type, enabled=False) if under_autocast(device) else _AS_IT_IS


_AS_IT_IS = nullcontext()


def vecdot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over the features, (..., d) -> (...), in the dtype of a and b, even under autocast."""
    with without_autocast(a.device):
        return torch.linalg.vecdot(a, b)


FEW = 8  # up to this many outputs of a linear map, compiled sums of products cost less than a matrix product
FEW_TOKENS = 8  # up to this many tokens, in eager mode, the number of operations matters more than the bytes moved


def linear_at_least_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` with inputs AND weights in at least float32, also inside autocast.

    x: (..., in_features); weight: (out_features, in_features); bias: (out_features,) or None.
    Returns (..., out_features) in float32, or float64 if x or weight is float64.
    """
    if torch.compiler.is_compiling() and weight.shape[0] <= FEW and torch.is_grad_enabled():
        # A compiler fuses sums into neighbouring loops; for a matrix product it would write a widened copy of x. (For a
        # single token in generation, a matrix product is faster.)
        wide_x, wide_weight = promote(x, weight)
        y = torch.stack([(wide_x * wide_weight[i]).sum(-1) for i in range(weight.shape[0])], -1)
        return y if bias is None else y + bias.to(y.dtype)
    wide = weight.dtype in (torch.float32, torch.float64) and x.dtype == weight.dtype
    if wide and (bias is None or bias.dtype == x.dtype) and not under_autocast(x.device) and is_kept(x):
        return F.linear(x, weight, bias)
    return applied(_WideLinear, x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` as PyTorch does, in the dtype of autocast or of weight.

    The backward pass recomputes x, instead of keeping it, if that is possible.

    x: (..., in_features); weight: (out_features, in_features); bias: (out_features,) or None. Returns
    (..., out_features).
    """
    if not under_autocast(x.device):
        x = x.to(weight.dtype)
    return F.linear(x, weight, bias) if is_kept(x) else applied(_Linear, x, weight, bias)


class _Linear(Function):
    """Keep x and weight in their own dtype for the backward pass, or recompute x (`ops.recompute`)."""

    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @classmethod
    def forward(cls, ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        save_state(ctx, x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return cls.plain(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = release(ctx)
        wide_x, wide_weight = x.to(grad.dtype), weight.to(grad.dtype)  # the dtype in which the result was computed
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        with without_autocast(x.device):
            if ctx.needs_input_grad[0]:
                grad_x = (grad @ wide_weight).to(x.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = (rows.mT @ wide_x.reshape(-1, x.shape[-1])).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


class _WideLinear(_Linear):
    """Compute in at least float32, without keeping a widened copy of x, which would take twice the memory."""

    @staticmethod
    def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide_x, wide_weight, *wide_bias = promote(x, weight, *([] if bias is None else [bias]))
        with without_autocast(x.device):
            return F.linear(wide_x, wide_weight, *wide_bias)
