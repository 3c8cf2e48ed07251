"""Attention over depth: a sublayer reads a weighted mean of the outputs of earlier sublayers (arXiv 2603.15031).

The backward pass keeps the sources and recomputes the reads (`ops.recompute`).
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from residua.ops.precision import new_symbol, promote, vecdot, without_autocast
from residua.ops.recompute import release, save_state
from residua.ops.shapes import expand_leading, expect_shape
from residua.ops.transforms import Function, applied


def depth_read(
    sources: Sequence[Tensor], query: Tensor, *, heads: int = 1, normalise_values: bool = False, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """x = sum_i a_i V_i, a = softmax_i(u . V_i / sqrt(mean(V_i^2) + eps)): attention over the sources V_i.

    sources: n >= 1 tensors (..., dim) of one shape; query u: (dim,), in AttnRes the query times the gain of the norm of
    the keys. Returns x: (..., dim) in the dtype of the sources, and the weights a: (..., n) in at least float32, which
    are detached. Computed in at least float32. The backward pass keeps the sources, never a stack of them, and 2 n
    numbers for each token. Raises ValueError for other shapes. arXiv 2603.15031.

    heads             above 1: a softmax for each group of dim / heads features, and weights (..., heads, n), so that
                      n heads + n numbers are kept per token. The mean is over all features. arXiv 2607.27230
    normalise_values  the values are normalised as the keys are, x = sum_i a_i V_i / sqrt(mean(V_i^2) + eps), and x is
                      in at least float32: the form of Inkling-2 (`inkling2` in transformers)
    """
    _expect(sources, query)
    if heads < 1 or query.shape[0] % heads:
        raise ValueError(f"heads must be a positive number that divides the {query.shape[0]} features, got {heads}")
    return applied(_DepthRead, query, heads, normalise_values, new_symbol(eps), *sources)


def _logits(query: Tensor, heads: int, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """l_i = u . V_i r_i: (..., n), for each head (..., heads, n), and r_i = 1 / sqrt(mean(V_i^2) + eps): (..., n)."""
    logits, scales = [], []
    with without_autocast(query.device):
        for source in sources:
            wide, u = promote(source, query)
            scales.append(torch.rsqrt(wide.square().mean(-1) + eps))
            products = wide @ u if heads == 1 else _split(wide * u, heads).sum(-1)
            logits.append(products * _for_heads(scales[-1], heads, axis=-1))
    return torch.stack(logits, -1), torch.stack(scales, -1)


def _split(x: Tensor, heads: int) -> Tensor:
    """(..., dim) -> (..., heads, dim / heads). With `reshape`, because torch.func cannot map over `unflatten`."""
    return x if heads == 1 else x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _for_heads(x: Tensor, heads: int, *, axis: int) -> Tensor:
    """Return x with an axis for the heads at `axis` if there are several heads."""
    return x if heads == 1 else x.unsqueeze(axis)


def _read(logits: Tensor, scales: Tensor, heads: int, normalise_values: bool, sources: Sequence[Tensor]) -> Tensor:
    weights = logits.softmax(-1)
    if normalise_values:
        weights = weights * _for_heads(scales, heads, axis=-2)
    x = _weighed(weights, [_split(source, heads) for source in sources]).reshape(sources[0].shape)
    return x if normalise_values else x.to(sources[0].dtype)


class _DepthRead(Function):
    """For each head, with l_i and r_i as in `_logits`, g the gradient of x, p_i = <g, V_i>, m_i = a_i (p_i - <a, p>):

    dV_i = a_i g + m_i r_i u - r_i^2 V_i / dim sum over heads of m_i l_i,   du = sum over tokens and i of m_i r_i V_i

    With normalised values p_i = r_i <g, V_i>, which also changes m_i, and

    dV_i = r_i (a_i g + m_i u) - r_i^2 V_i / dim sum over heads of (a_i p_i + m_i l_i)
    """

    @staticmethod
    def plain(query: Tensor, heads: int, normalise_values: bool, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        logits, scales = _logits(query, heads, eps, sources)
        return _read(logits, scales, heads, normalise_values, sources), logits.softmax(-1).detach()

    @staticmethod
    def forward(
        ctx, query: Tensor, heads: int, normalise_values: bool, eps: float, *sources: Tensor
    ) -> tuple[Tensor, Tensor]:
        logits, scales = _logits(query, heads, eps, sources)
        weights = logits.softmax(-1)
        ctx.heads, ctx.normalise_values, ctx.eps = heads, normalise_values, eps
        ctx.mark_non_differentiable(weights)
        again = partial(_read_again, heads, normalise_values, eps)
        save_state(ctx, query, logits, scales, *sources, inputs=0, replay=again)
        return _read(logits, scales, heads, normalise_values, sources), weights

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        query, logits, scales, *sources = release(ctx)
        heads, normalise_values = ctx.heads, ctx.normalise_values
        if torch.is_grad_enabled():  # for second derivatives; saved tensors have no history
            logits, scales = _logits(query, heads, ctx.eps, sources)
        grad, u, logits, scales = promote(grad, query, logits, scales)
        dim = query.shape[0]
        grad, u, values = _split(grad, heads), _split(u, heads), [_split(source, heads) for source in sources]
        weights, scales = logits.softmax(-1), _for_heads(scales, heads, axis=-2)
        products = torch.stack([vecdot(grad, value.to(grad.dtype)) for value in values], -1)
        if normalise_values:
            products = products * scales
        steps = weights * (products - (weights * products).sum(-1, keepdim=True))
        turns = steps * scales
        if heads == 1 and not normalise_values:
            pulls = turns * logits * scales / dim
        else:
            pulls = weights * products + steps * logits if normalise_values else steps * logits
            pulls = (pulls if heads == 1 else pulls.sum(-2, keepdim=True)) * scales.square() / dim
        grad_query = torch.zeros_like(u)
        grads = []
        for i, value in enumerate(values):
            wide = value.to(grad.dtype)
            # The older vmap of torch cannot slice a whole axis, which is that of one source.
            weight, step, turn, pull = (each.narrow(-1, i, 1) for each in (weights, steps, turns, pulls))
            grad_query = grad_query + (turn * wide).reshape(-1, *u.shape).sum(0)
            if normalise_values:
                grad_value = (weight * grad + step * u) * scales.narrow(-1, i, 1)
            else:
                grad_value = torch.addcmul(weight * grad, turn, u)
            grad_value = torch.addcmul(grad_value, pull, wide, value=-1)
            grads.append(grad_value.reshape(sources[i].shape).to(sources[i].dtype))
        return grad_query.reshape(query.shape).to(query.dtype), None, None, None, *grads


def _read_again(
    heads: int, normalise_values: bool, eps: float, query: Tensor, logits: Tensor, scales: Tensor, *sources: Tensor
) -> Tensor:
    if torch.is_grad_enabled():
        logits, scales = _logits(query, heads, eps, sources)
    return _read(logits, scales, heads, normalise_values, sources)


def depth_mix(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """x = sum_i w_i V_i: a weighted sum of the sources V_i, the depth-weighted average of arXiv 2402.02622.

    sources: n >= 1 tensors (..., dim) of one shape; weights: (..., n), whose leading axes broadcast against the axes of
    the sources. Returns (..., dim) in the dtype of the sources; computed in at least float32. The backward pass keeps
    the weights and the sources, never a stack of them. Raises ValueError for other shapes.
    """
    _expect(sources)
    weights = expand_leading("weights", weights, sources[0].shape[:-1], (len(sources),), "(..., sources)")
    return applied(_DepthMix, weights, *sources)


class _DepthMix(Function):
    """With g the gradient of x: dV_i = w_i g, dw_i = <g, V_i>."""

    @staticmethod
    def plain(weights: Tensor, *sources: Tensor) -> Tensor:
        return _weighed(promote(weights)[0], sources).to(sources[0].dtype)

    @staticmethod
    def forward(ctx, weights: Tensor, *sources: Tensor) -> Tensor:
        save_state(ctx, weights, *sources, inputs=0, replay=_DepthMix.plain)
        return _DepthMix.plain(weights, *sources)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weights, *sources = release(ctx)
        dtype = torch.promote_types(torch.promote_types(torch.float32, weights.dtype), grad.dtype)
        wide, wide_weights = grad.to(dtype), weights.to(dtype)
        grad_weights = None
        if ctx.needs_input_grad[0]:
            products = [vecdot(wide, source.to(dtype)) for source in sources]
            grad_weights = torch.stack(products, -1).to(weights.dtype)
        grads = [
            (wide_weights[..., i : i + 1] * wide).to(source.dtype) if ctx.needs_input_grad[1 + i] else None
            for i, source in enumerate(sources)
        ]
        return grad_weights, *grads


def _expect(sources: Sequence[Tensor], query: Tensor | None = None) -> None:
    """Raise ValueError unless there are sources, all of one shape (..., dim), and the query is (dim,)."""
    if not sources:
        raise ValueError("sources must be at least one tensor, got none")
    for source in sources:
        expect_shape("sources", source, sources[0].shape, "the shape of the first")
    if query is not None:
        expect_shape("query", query, sources[0].shape[-1:], "(dim,)")


def _weighed(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_i a_i V_i, in at least float32."""
    x = weights[..., :1] * sources[0]
    for i in range(1, len(sources)):
        x = torch.addcmul(x, weights[..., i : i + 1], sources[i].to(x.dtype))
    return x
