"""Attention over depth: a sublayer reads a weighted mean of what earlier sublayers wrote (arXiv 2603.15031).

The backward pass keeps the sources. What was read from them need not be kept: it is read once more (`ops.recompute`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from residua.ops.precision import at_least_float32, new_symbol, promote, without_autocast
from residua.ops.recompute import closed, link, opened
from residua.ops.shapes import expand_leading, expect_shape
from residua.ops.transforms import Function, applied


def depth_read(sources: Sequence[Tensor], query: Tensor, *, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """x = sum_i a_i V_i, a = softmax_i(u . V_i / sqrt(mean(V_i^2) + eps)): attention over the sources V_i.

    sources: n >= 1 tensors (..., dim) of one shape; query u: (dim,), in AttnRes the query times the gain of the norm of
    the keys. Returns x: (..., dim) in the dtype of the sources, and the weights a: (..., n) in float32 at least, which
    take no gradient. Computed in float32 at least. The backward pass keeps the sources as they are, and n + n numbers
    for each token: never a stack of them. Raises ValueError for other shapes. arXiv 2603.15031.
    """
    _expect(sources, query)
    return applied(_DepthRead, query, new_symbol(eps), *sources)


def _logits(query: Tensor, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """l_i = u . V_i r_i and r_i = 1 / sqrt(mean(V_i^2) + eps), (..., n) each."""
    logits, scales = [], []
    with without_autocast(query.device):
        for source in sources:
            wide, u = promote(source, query)
            scales.append(torch.rsqrt(wide.square().mean(-1) + eps))
            logits.append((wide @ u) * scales[-1])
    return torch.stack(logits, -1), torch.stack(scales, -1)


class _DepthRead(Function):
    """With l_i and r_i as in `_logits`, g the gradient of x and m_i = a_i (<g, V_i> - <g, x>):

    dV_i = a_i g + m_i r_i (u - l_i r_i V_i / dim),   du = sum over tokens and i of m_i r_i V_i
    """

    @staticmethod
    def plain(query: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        weights = _logits(query, eps, sources)[0].softmax(-1)
        return _weighed(weights, sources).to(sources[0].dtype), weights.detach()

    @staticmethod
    def forward(ctx, query: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        logits, scales = _logits(query, eps, sources)
        weights = logits.softmax(-1)
        ctx.eps = eps
        ctx.save_for_backward(query, logits, scales, *sources)
        ctx.mark_non_differentiable(weights)
        link(ctx, 0, _read_again)
        return _weighed(weights, sources).to(sources[0].dtype), weights

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        query, logits, scales, *sources = closed(ctx)
        if torch.is_grad_enabled():  # the gradient is to be differentiated, and what was saved has no history
            logits, scales = _logits(query, ctx.eps, sources)
        grad, u, logits, scales = promote(grad, query, logits, scales)
        weights, dim = logits.softmax(-1), query.shape[0]
        products = torch.stack([torch.linalg.vecdot(grad, source.to(grad.dtype)) for source in sources], -1)
        steps = weights * (products - (weights * products).sum(-1, keepdim=True)) * scales
        pulls = steps * logits * scales / dim
        grad_query = torch.zeros_like(u)
        grads = []
        for i, source in enumerate(sources):
            wide = source.to(grad.dtype)
            grad_query = grad_query + (steps[..., i : i + 1] * wide).reshape(-1, dim).sum(0)
            found = torch.addcmul(weights[..., i : i + 1] * grad, steps[..., i : i + 1], u)
            grads.append(torch.addcmul(found, pulls[..., i : i + 1], wide, value=-1).to(source.dtype))
        return grad_query.to(query.dtype), None, *grads


def _read_again(node: Any) -> Tensor:
    query, logits, _, *sources = opened(node)
    if torch.is_grad_enabled():
        logits, _ = _logits(query, node.eps, sources)
    return _weighed(logits.softmax(-1), sources).to(sources[0].dtype)


def normalised_depth_read(sources: Sequence[Tensor], query: Tensor, *, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """x = sum_i a_i N_i, a = softmax_i(w . N_i / sqrt(dim)), N_i = V_i / sqrt(mean(V_i^2) + eps), for keys and values.

    The form of Inkling-2 (`inkling2` in transformers). sources: n >= 1 tensors (..., dim) of one shape; query w:
    (dim,). Returns x: (..., dim) and the weights a: (..., n), which take no gradient, both in float32 at least. The
    backward pass keeps the sources as they are, and n + n numbers for each token. Raises ValueError for other shapes.
    """
    _expect(sources, query)
    return applied(_NormalisedDepthRead, query, new_symbol(eps), *sources)


class _NormalisedDepthRead(Function):
    """With r_i = 1 / sqrt(mean(V_i^2) + eps), l_i the logits, u = w / sqrt(dim), g the gradient of x, p_i = <g, N_i>
    and m_i = a_i (p_i - <a, p>):

    dN_i = a_i g + m_i u,   dV_i = r_i (dN_i - (a_i p_i + m_i l_i) / dim N_i),   du = sum over tokens and i of m_i N_i
    """

    @staticmethod
    def plain(query: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        logits, scales = _logits(_scaled(query), eps, sources)
        weights = logits.softmax(-1)
        return _weighed(weights * scales, sources), weights.detach()

    @staticmethod
    def forward(ctx, query: Tensor, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        logits, scales = _logits(_scaled(query), eps, sources)
        weights = logits.softmax(-1)
        ctx.eps = eps
        ctx.save_for_backward(query, logits, scales, *sources)
        ctx.mark_non_differentiable(weights)
        link(ctx, 0, _normalised_again)
        return _weighed(weights * scales, sources), weights

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        query, logits, scales, *sources = closed(ctx)
        dim = query.shape[0]
        u = _scaled(query)
        if torch.is_grad_enabled():  # the gradient is to be differentiated, and what was saved has no history
            logits, scales = _logits(u, ctx.eps, sources)
        grad, u, logits, scales = promote(grad, u, logits, scales)
        weights = logits.softmax(-1)
        products = torch.stack([torch.linalg.vecdot(grad, source.to(grad.dtype)) for source in sources], -1) * scales
        steps = weights * (products - (weights * products).sum(-1, keepdim=True))
        pulls = (weights * products + steps * logits) * scales.square() / dim
        grad_u = torch.zeros_like(u)
        grads = []
        for i, source in enumerate(sources):
            wide, at = source.to(grad.dtype), slice(i, i + 1)
            grad_u = grad_u + ((steps * scales)[..., at] * wide).reshape(-1, dim).sum(0)
            found = (weights[..., at] * grad + steps[..., at] * u) * scales[..., at]
            grads.append(torch.addcmul(found, pulls[..., at], wide, value=-1).to(source.dtype))
        return (grad_u * dim**-0.5).to(query.dtype), None, *grads


def _scaled(query: Tensor) -> Tensor:
    """u = w / sqrt(dim), in at least float32."""
    return at_least_float32(query) * query.shape[0] ** -0.5


def _normalised_again(node: Any) -> Tensor:
    query, logits, scales, *sources = opened(node)
    if torch.is_grad_enabled():
        logits, scales = _logits(_scaled(query), node.eps, sources)
    return _weighed(logits.softmax(-1) * scales, sources)


def depth_mix(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """x = sum_i w_i V_i: a weighted sum of the sources V_i, the depth-weighted average of arXiv 2402.02622.

    sources: n >= 1 tensors (..., dim) of one shape; weights: (..., n), whose leading axes broadcast against the axes of
    the sources. Returns (..., dim) in the dtype of the sources; computed in float32 at least. The backward pass keeps
    the sources as they are and the weights: never a stack of the sources. Raises ValueError for other shapes.
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
        ctx.save_for_backward(weights, *sources)
        link(ctx, 0, _mixed_again)
        return _DepthMix.plain(weights, *sources)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weights, *sources = closed(ctx)
        dtype = torch.promote_types(torch.promote_types(torch.float32, weights.dtype), grad.dtype)
        wide, wide_weights = grad.to(dtype), weights.to(dtype)
        grad_weights = None
        if ctx.needs_input_grad[0]:
            products = [torch.linalg.vecdot(wide, source.to(dtype)) for source in sources]
            grad_weights = torch.stack(products, -1).to(weights.dtype)
        grads = [
            (wide_weights[..., i : i + 1] * wide).to(source.dtype) if ctx.needs_input_grad[1 + i] else None
            for i, source in enumerate(sources)
        ]
        return grad_weights, *grads


def _mixed_again(node: Any) -> Tensor:
    return _DepthMix.plain(*opened(node))


def _expect(sources: Sequence[Tensor], query: Tensor | None = None) -> None:
    """Raise ValueError unless there are sources, of one shape (..., dim), and the query is (dim,)."""
    if not sources:
        raise ValueError("sources: expected at least one tensor, got none")
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


def headed_depth_read(
    sources: Sequence[Tensor], query: Tensor, heads: int, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """x_h = sum_i a_ih V_ih, a_h = softmax_i(u_h . V_ih / sqrt(mean(V_i^2) + eps)): a softmax for each head.

    V_ih: the features of head h of V_i, which are dim / heads in a row; the mean is over all features. One head is
    `depth_read`. sources, query u, eps, precision and what the backward pass keeps: as there. Returns x: (..., dim) and
    the weights a: (..., heads, n), which take no gradient. Raises ValueError for other shapes, or if heads does not
    divide dim. arXiv 2607.27230.
    """
    _expect(sources, query)
    if heads < 1 or query.shape[0] % heads:
        raise ValueError(f"heads: expected a divisor of dim = {query.shape[0]}, got {heads}")
    return applied(_HeadedDepthRead, query, heads, new_symbol(eps), *sources)


def _headed_logits(query: Tensor, heads: int, eps: float, sources: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """l_ih = u_h . V_ih r_i: (..., heads, n), and r_i = 1 / sqrt(mean(V_i^2) + eps): (..., n)."""
    logits, scales = [], []
    with without_autocast(query.device):
        for source in sources:
            wide, u = promote(source, query)
            scales.append(torch.rsqrt(wide.square().mean(-1) + eps))
            logits.append(_split(wide * u, heads).sum(-1) * scales[-1].unsqueeze(-1))
    return torch.stack(logits, -1), torch.stack(scales, -1)


def _split(x: Tensor, heads: int) -> Tensor:
    """(..., dim) -> (..., heads, dim / heads). With `reshape`, because torch.func cannot map over `unflatten`."""
    return x.reshape(*x.shape[:-1], heads, -1)


class _HeadedDepthRead(Function):
    """`_DepthRead` for each head, with p_ih = <g_h, V_ih> and m_ih = a_ih (p_ih - sum_j a_jh p_jh):

    dV_ih = a_ih g_h + m_ih r_i u_h - (sum_k m_ik l_ik) r_i^2 V_ih / dim
    du_h = sum over tokens and i of m_ih r_i V_ih
    """

    @staticmethod
    def plain(query: Tensor, heads: int, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        weights = _headed_logits(query, heads, eps, sources)[0].softmax(-1)
        return _headed_weighed(weights, sources), weights.detach()

    @staticmethod
    def forward(ctx, query: Tensor, heads: int, eps: float, *sources: Tensor) -> tuple[Tensor, Tensor]:
        logits, scales = _headed_logits(query, heads, eps, sources)
        weights = logits.softmax(-1)
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(query, logits, scales, *sources)
        ctx.mark_non_differentiable(weights)
        link(ctx, 0, _headed_again)
        return _headed_weighed(weights, sources), weights

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):
        query, logits, scales, *sources = closed(ctx)
        if torch.is_grad_enabled():  # the gradient is to be differentiated, and what was saved has no history
            logits, scales = _headed_logits(query, ctx.heads, ctx.eps, sources)
        grad, u, logits, scales = promote(grad, query, logits, scales)
        dim = query.shape[0]
        grad, u = _split(grad, ctx.heads), _split(u, ctx.heads)
        weights = logits.softmax(-1)
        wide = [_split(source, ctx.heads) for source in sources]
        products = torch.stack([torch.linalg.vecdot(grad, one.to(grad.dtype)) for one in wide], -1)
        steps = weights * (products - (weights * products).sum(-1, keepdim=True))
        pulls = (steps * logits).sum(-2) * scales.square() / dim
        steps = steps * scales.unsqueeze(-2)
        grad_query = torch.zeros_like(u)
        grads = []
        for i, source in enumerate(sources):
            at, one = slice(i, i + 1), wide[i].to(grad.dtype)
            grad_query = grad_query + (steps[..., at] * one).reshape(-1, *u.shape).sum(0)
            found = torch.addcmul(weights[..., at] * grad, steps[..., at], u)
            found = torch.addcmul(found, pulls[..., at].unsqueeze(-1), one, value=-1)
            grads.append(found.reshape(source.shape).to(source.dtype))
        return grad_query.reshape(query.shape).to(query.dtype), None, None, *grads


def _headed_again(node: Any) -> Tensor:
    query, logits, _, *sources = opened(node)
    if torch.is_grad_enabled():
        logits, _ = _headed_logits(query, node.heads, node.eps, sources)
    return _headed_weighed(logits.softmax(-1), sources)


def _headed_weighed(weights: Tensor, sources: Sequence[Tensor]) -> Tensor:
    """sum_i a_ih V_ih for each head: (..., dim) in the dtype of the sources."""
    split = [_split(source, weights.shape[-2]) for source in sources]
    return _weighed(weights, split).reshape(sources[0].shape).to(sources[0].dtype)
