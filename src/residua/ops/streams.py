"""Read a sublayer's input from several streams of the residual state, mix the streams, and write to them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from residua.ops.dispatch import Implementation, choose
from residua.ops.precision import FEW_TOKENS, at_least_float32, promote, vecdot, without_autocast
from residua.ops.recompute import release, save_state
from residua.ops.shapes import expand_leading, expect_shape
from residua.ops.transforms import Function, applied, transformed


def stream_read(streams: Tensor, weights: Tensor) -> Tensor:
    """x = sum_j weights[j] X[j], one weight for each stream and feature: DDL's channel compression (CC).

    streams: (..., streams, dim), weights: (streams, dim). Returns (..., dim) in the dtype of `streams`; computed in
    at least float32. Raises ValueError if the two shapes do not match. arXiv 2601.00417v2, coefficients c_{i,j}.
    """
    expect_shape("weights", weights, streams.shape[-2:], "(streams, dim)")
    return applied(_StreamRead, streams, weights)


def _read(streams: Tensor, weights: Tensor) -> Tensor:
    wide_streams, wide_weights = promote(streams, weights)
    few = not torch.compiler.is_compiling() and streams.shape[:-2].numel() <= FEW_TOKENS
    if few or transformed():  # transforms do not support sums in place
        return (wide_streams * wide_weights).sum(-2).to(streams.dtype)
    x = wide_streams[..., 0, :] * wide_weights[0]
    for j in range(1, weights.shape[0]):
        # One stream at a time: a sum over streams would write all products to memory first. No `unbind`: a compiler
        # keeps the results of `unbind` for the backward pass. They share memory with the streams, which inductor (torch
        # 2.13) may overwrite before the backward pass.
        x.addcmul_(wide_streams[..., j, :], wide_weights[j])
    return x.to(streams.dtype)


class _StreamRead(Function):
    @staticmethod
    def plain(streams: Tensor, weights: Tensor) -> Tensor:
        return _read(streams, weights)

    @staticmethod
    def forward(ctx, streams: Tensor, weights: Tensor) -> Tensor:
        save_state(ctx, streams, weights)
        return _read(streams, weights)

    @staticmethod
    def backward(ctx, grad: Tensor):
        streams, weights = release(ctx)
        grad, wide_streams, wide_weights = promote(grad, streams, weights)
        grad_streams = grad_weights = None
        if ctx.needs_input_grad[0]:
            grad_streams = (grad.unsqueeze(-2) * wide_weights).to(streams.dtype)
        if ctx.needs_input_grad[1]:
            products = (grad * wide_streams[..., j, :] for j in range(streams.shape[-2]))
            grad_weights = torch.stack([product.reshape(-1, product.shape[-1]).sum(0) for product in products]).to(
                weights.dtype
            )
        return grad_streams, grad_weights


def channel_taps(conv: Tensor, read: Tensor, *, causal: bool = False) -> Tensor:
    """Fold a zero-padded convolution over the streams, followed by a read vector, into one weight c[j] per stream.

    y[a] = sum_i conv[i] X[a + i - p], x = sum_a read[a] y[a], so c[j] = sum_a read[a] conv[j - a + p], where
    p = (kernel - 1) // 2 centres the kernel. With `causal`, p = kernel - 1, so that y[a] sees only streams up to a.

    conv: (kernel, dim), read: (streams,). Returns (streams, dim) in the wider of the two dtypes, at least float32.
    Raises ValueError if the kernel is longer than the number of streams.
    """
    kernel, num_streams = conv.shape[0], read.shape[0]
    if kernel > num_streams:
        raise ValueError(f"conv must be a kernel of at most {num_streams} taps, one for each stream, got {kernel}")
    conv, read = promote(conv, read)
    shift = kernel - 1 if causal else (kernel - 1) // 2
    # Row j of the windows holds read[j - i + shift] for every tap i, last tap first. This is a matrix product because a
    # compiler would fuse a sum, and recompute it for every token.
    windows = F.pad(read, (kernel - 1 - shift, shift)).unfold(0, kernel, 1)
    return _product(windows, conv.flip(0))


def hyper_read(streams: Tensor, h_pre: Tensor, *, implementation: Implementation = "reference") -> Tensor:
    """x = sum_i h_pre[i] X[i]: the sublayer's input as one mixture of the streams (arXiv 2409.19606, 2512.24880).

    streams: (..., n, d), h_pre: (..., n), whose leading axes broadcast against the axes of the streams. Returns
    (..., d) in the dtype of `streams`; computed in at least float32. Raises ValueError for other shapes.
    `implementation`: see `ops.dispatch.choose`.
    """
    *leading, n, _ = streams.shape
    weights = expand_leading("h_pre", h_pre, leading, (n,), "(..., n)")
    if choose(implementation, streams, h_pre) == "triton":
        from residua.ops.kernels.streams import hyper_read as kernel

        return kernel(streams, h_pre)
    return applied(_Mix, streams, weights.unsqueeze(-2)).squeeze(-2)


def hyper_mix(streams: Tensor, h_res: Tensor, *, implementation: Implementation = "reference") -> Tensor:
    """X'[o] = sum_i h_res[o, i] X[i]: the streams mixed among themselves.

    streams: (..., n, d), h_res: (..., n, n), whose leading axes broadcast against the axes of the streams. Returns
    (..., n, d) in the dtype of `streams`; computed in at least float32. Raises ValueError for other shapes.
    `implementation`: see `ops.dispatch.choose`.
    """
    *leading, n, _ = streams.shape
    matrix = expand_leading("h_res", h_res, leading, (n, n), "(..., n, n)")
    if choose(implementation, streams, h_res) == "triton":
        from residua.ops.kernels.streams import hyper_write as kernel

        return kernel(streams, None, h_res, None)
    return applied(_Mix, streams, matrix)


def hyper_write(
    streams: Tensor,
    y: Tensor,
    h_res: Tensor | None,
    h_post: Tensor,
    *,
    recompute_every: int = 1,
    implementation: Implementation = "reference",
) -> Tensor:
    """X'[o] = sum_i h_res[o, i] X[i] + h_post[o] y, with the identity for h_res = None.

    streams: (..., n, d). y: (..., d), or (..., n, d) with a row y[o] for each stream (arXiv 2503.14125). h_res:
    (..., n, n) or None. h_post: (..., n). The leading axes of both coefficients broadcast against the axes of the
    streams. Returns (..., n, d) in the dtype of `streams`; computed in at least float32. Raises ValueError for other
    shapes. arXiv 2409.19606, 2512.24880.

    `recompute_every` = m, as in `delta_write`: only every m-th state along a chain of writes is kept for the backward
    pass; y is not kept if it can be recomputed. The Triton kernel keeps every state. `implementation`: see
    `ops.dispatch.choose`.
    """
    *leading, n, d = streams.shape
    rows = y.dim() == streams.dim()
    expect_shape("y", y, (*leading, n, d) if rows else (*leading, d), "(..., n, d)" if rows else "(..., d)")
    weights = expand_leading("h_post", h_post, leading, (n,), "(..., n)")
    matrix = None if h_res is None else expand_leading("h_res", h_res, leading, (n, n), "(..., n, n)")
    if choose(implementation, streams, y, h_res, h_post) == "triton":
        from residua.ops.kernels.streams import hyper_write as kernel

        if not rows:
            return kernel(streams, y, h_res, h_post)
        mixed = streams if h_res is None else kernel(at_least_float32(streams), None, h_res, None)
        return hyper_write(mixed, y, None, h_post).to(streams.dtype)
    return applied(_HyperWrite, streams, y, matrix, weights, recompute_every)


# Gradients are explicit so that large tensors are saved in their own dtype: widened copies of bfloat16 streams would
# take three times the memory. Matrices with fewer axes than the streams are expanded, because PyTorch would otherwise
# copy the streams into another layout for one large product, which is slower.


class _Mix(Function):
    @staticmethod
    def plain(streams: Tensor, matrix: Tensor) -> Tensor:
        wide_streams, wide_matrix = promote(streams, matrix)
        return _product(wide_matrix, wide_streams).to(streams.dtype)

    @staticmethod
    def forward(ctx, streams: Tensor, matrix: Tensor) -> Tensor:
        save_state(ctx, streams, matrix)
        return _Mix.plain(streams, matrix)

    @staticmethod
    def backward(ctx, grad: Tensor):
        dtype = grad.dtype  # the dtype of the streams
        needs_streams, needs_matrix = ctx.needs_input_grad
        streams, matrix = release(ctx, [needs_matrix])
        grad, wide_matrix, *wide_streams = promote(grad, matrix, *([streams] if needs_matrix else []))
        grad_streams = grad_matrix = None
        if needs_streams:
            grad_streams = _product(wide_matrix.mT, grad).to(dtype)
        if needs_matrix:
            grad_matrix = _product(grad, wide_streams[0].mT).to(matrix.dtype)
        return grad_streams, grad_matrix


class _HyperWrite(Function):
    """Keep only the first of every `recompute_every` states in a chain (`ops.recompute`)."""

    @staticmethod
    def plain(streams: Tensor, y: Tensor, h_res: Tensor | None, h_post: Tensor, recompute_every: int) -> Tensor:
        return _hyper_written(streams, y, h_res, h_post)

    @staticmethod
    def forward(ctx, streams: Tensor, y: Tensor, h_res: Tensor | None, h_post: Tensor, recompute_every: int) -> Tensor:
        # Without h_res only a replay needs the streams.
        before = None if h_res is None and recompute_every == 1 else streams
        save_state(ctx, before, y, h_res, h_post, inputs=2, replay=_hyper_written, every=recompute_every)
        return _hyper_written(streams, y, h_res, h_post)

    @staticmethod
    def backward(ctx, grad: Tensor):
        dtype = grad.dtype  # the dtype of the streams
        needs_streams, needs_y, needs_res, needs_post, _ = ctx.needs_input_grad
        streams, y, h_res, h_post = release(ctx, [needs_res, True])
        grad, wide_y, wide_post, *mixing = promote(grad, y, h_post, *([] if h_res is None else [h_res]))
        grad_streams = grad_y = grad_res = grad_post = None
        if needs_streams:
            grad_streams = (_product(mixing[0].mT, grad) if mixing else grad).to(dtype)
        rows = y.dim() == grad.dim()
        if needs_y and rows:
            grad_y = (wide_post.unsqueeze(-1) * grad).to(y.dtype)
        elif needs_y:
            grad_y = _product(wide_post.unsqueeze(-2), grad).squeeze(-2).to(y.dtype)
        if needs_res:
            grad_res = _product(grad, streams.to(grad.dtype).mT).to(h_res.dtype)
        if needs_post and rows:
            grad_post = vecdot(grad, wide_y).to(h_post.dtype)
        elif needs_post:
            grad_post = _product(grad, wide_y.unsqueeze(-1)).squeeze(-1).to(h_post.dtype)
        return grad_streams, grad_y, grad_res, grad_post, None


def _hyper_written(streams: Tensor, y: Tensor, h_res: Tensor | None, h_post: Tensor) -> Tensor:
    """Return X', in the forward pass and in every replay."""
    mixed, y, h_post, *matrix = promote(streams, y, h_post, *([] if h_res is None else [h_res]))
    if matrix:
        mixed = _product(matrix[0], mixed)
    rows = y if y.dim() == mixed.dim() else y.unsqueeze(-2)
    return torch.addcmul(mixed, h_post.unsqueeze(-1), rows).to(streams.dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    with without_autocast(b.device):
        return a @ b
