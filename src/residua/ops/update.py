"""Updates of a single stream: a sum with learned scales, and a sum without a gated share of the update."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops.precision import dot, new_symbol, promote
from residua.ops.shapes import expand_leading, expect_groups, expect_shape
from residua.ops.transforms import Function, applied


def scaled_sum(terms: Sequence[Tensor], scales: Sequence[Tensor | None]) -> Tensor:
    """s_1 x_1 + s_2 x_2 + ...: a residual with scales on the state, the output and the embedding.

    terms: n >= 1 tensors (..., dim) of one shape; scales: one for each term, () or (dim,), or None for 1. Computed in
    at least float32; returns (..., dim) in the dtype of the first term. The backward pass keeps the terms as they are.
    Raises ValueError for other shapes. The form of arXiv 2003.04887 (ReZero) with a scale on every term.
    """
    for term, scale in zip(terms, scales, strict=True):
        expect_shape("terms", term, terms[0].shape, "the shape of the first")
        if scale is not None and scale.dim():
            expect_shape("scales", scale, terms[0].shape[-1:], "() or (dim,)")
    if torch.compiler.is_compiling():  # a compiler fuses the sum, and fails if one tensor is passed twice
        return _ScaledSum.plain(*terms, *scales)
    return applied(_ScaledSum, *terms, *scales)


class _ScaledSum(Function):
    """With g the gradient of the sum: dx_i = s_i g, ds_i = sum over tokens of g x_i."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> Tensor:
        count = len(inputs) // 2
        terms, scales = [x for x in inputs[:count] if x is not None], inputs[count:]
        # The gradient of a scale needs its term; nothing else does.
        ctx.save_for_backward(*(x if n else None for x, n in zip(terms, ctx.needs_input_grad[count:])), *scales)
        ctx.dtypes = [x.dtype for x in terms]
        return _ScaledSum.plain(*inputs)

    @staticmethod
    def plain(*inputs: Tensor | None) -> Tensor:
        count = len(inputs) // 2
        terms, scales = [x for x in inputs[:count] if x is not None], inputs[count:]
        total = None
        for term, scale in zip(terms, scales):
            wide, factor = promote(term, term if scale is None else scale)
            scaled = wide if scale is None else factor * wide
            total = scaled if total is None else total + scaled
        assert total is not None
        return total.to(terms[0].dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        count = len(ctx.dtypes)
        saved = ctx.saved_tensors  # activation checkpointing unpacks saved tensors only once
        terms, scales = saved[:count], saved[count:]
        grad_terms: list[Tensor | None] = []
        grad_scales: list[Tensor | None] = []
        for term, scale, dtype in zip(terms, scales, ctx.dtypes):
            wide = grad.to(torch.promote_types(grad.dtype, dtype))
            if scale is None:
                grad_terms.append(wide.to(dtype))
                grad_scales.append(None)
                continue
            wide, factor = promote(wide, scale)
            grad_terms.append((factor * wide).to(dtype))
            if term is None:
                grad_scales.append(None)
                continue
            product = wide * term.to(wide.dtype)
            summed = product.reshape(-1, product.shape[-1]).sum(0) if scale.dim() else product.sum()
            grad_scales.append(summed.to(scale.dtype))
        return *grad_terms, *grad_scales


def orthogonal_update(state: Tensor, y: Tensor, gate: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x' = x + h - e (<h, x> / (|x|^2 + eps)) x: the sum x + h without the share e of h's component along x.

    e = 1 is the orthogonal update (arXiv 2505.11881), e = 0 the plain sum to the last bit; e = -1 doubles the
    component. state x and y = h: (..., dim); gate e: (..., groups), whose leading axes may be 1 or missing. The
    features are cut into `groups` equal groups, each with its own projection and gate. Computed in at least float32;
    returns (..., dim) in the dtype of the state. The backward pass keeps x and h in their own dtype, and two numbers
    for each group of a token. Raises ValueError for other shapes.
    """
    expect_shape("y", y, state.shape, "the shape of the state")
    expect_groups("gate", gate, state.shape[-1])
    gate = expand_leading("gate", gate, state.shape[:-1], gate.shape[-1:], "(..., groups)")
    return applied(_OrthogonalUpdate, state, y, gate, new_symbol(eps))


def residual_scale(state: Tensor, y: Tensor, gate: Tensor, *, eps: float = 1e-6) -> Tensor:
    """1 - e <h, x> / (|x|^2 + eps): the scale of x in the `orthogonal_update`, (..., groups), in at least float32.

    The arguments are those of `orthogonal_update`: x is `state`, h is `y` and e is `gate`.
    """
    expect_groups("gate", gate, state.shape[-1])
    x, h, e = _of_groups(state, y, gate)
    along, squared = _products(x, h, eps)
    return 1 - e * along / squared


class _OrthogonalUpdate(Function):
    """For each group, with q = |x|^2 + eps, s = <h, x>, c = e s / q and g the gradient of x':

    dx = (1 - c) g - (e <g, x> / q) (h - (2 s / q) x),   dh = g - (e <g, x> / q) x,   de = -s <g, x> / q
    """

    @staticmethod
    def forward(ctx: Any, state: Tensor, y: Tensor, gate: Tensor, eps: float) -> Tensor:
        updated, along, squared = _updated(state, y, gate, eps)
        ctx.save_for_backward(state, y, gate, along, squared)
        ctx.eps = eps
        return updated

    @staticmethod
    def plain(state: Tensor, y: Tensor, gate: Tensor, eps: float) -> Tensor:
        return _updated(state, y, gate, eps)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        state, y, gate, along, squared = ctx.saved_tensors
        grad, x, h, e = _of_groups(grad, state, y, gate)
        if torch.is_grad_enabled():  # for a second derivative these must be functions of the state and y
            along, squared = _products(x, h, ctx.eps)
        slope = dot(grad, x) / squared
        pull, ratio = (e * slope).unsqueeze(-1), (along / squared).unsqueeze(-1)
        grad_x = (1 - e.unsqueeze(-1) * ratio) * grad - pull * (h - 2 * ratio * x)
        grad_h = torch.addcmul(grad, pull, x, value=-1)
        return (
            grad_x.reshape(state.shape).to(state.dtype),
            grad_h.reshape(state.shape).to(y.dtype),
            (-along * slope).to(gate.dtype),
            None,
        )


def _of_groups(*tensors: Tensor) -> list[Tensor]:
    """Return tensors (..., dim) as (..., groups, dim / groups), and the gate unchanged, all in at least float32."""
    *parts, gate = promote(*tensors)
    # `unflatten` cannot be used here: it has no batching rule for vmap over gradients.
    groups = gate.shape[-1]
    return [*(part.reshape(*part.shape[:-1], groups, part.shape[-1] // groups) for part in parts), gate]


def _products(x: Tensor, h: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return s = <h, x> and q = |x|^2 + eps of each group."""
    return dot(h, x), dot(x, x) + eps


def _updated(state: Tensor, y: Tensor, gate: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return x', s and q."""
    x, h, e = _of_groups(state, y, gate)
    along, squared = _products(x, h, eps)
    updated = torch.addcmul(x + h, (e * along / squared).unsqueeze(-1), x, value=-1)
    return updated.flatten(-2).to(state.dtype), along, squared
