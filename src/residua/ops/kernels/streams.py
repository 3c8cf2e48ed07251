"""Reading, mixing and writing n streams in Triton, with coefficients that each token has or that tokens share.

For one token of n streams of d numbers, a read moves n d + d of them forward and 2 n d + d backward, a mix 2 n d and
3 n d, a write 2 n d + d and 3 n d + 2 d, or, where nothing is mixed, 2 n d + d and n d + 2 d; beside these there are
only the coefficients, at most n^2 + n numbers for a token each way.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.delta import load_row, store_row
from residua.ops.kernels.tiling import MAX_CHANNELS, expect_dtypes, on_device_of, token_rows
from residua.ops.shapes import expand_leading, expect_shape

# One program is one token and one warp. It goes along the columns with the rows of all streams in registers: a product
# of matrices this small is sums of rows times numbers, which need no other thread. Only sums along the columns do, for
# the gradients of coefficients; each thread keeps its part of them until the last column. They fit into registers for
# up to 8 streams, by compiling for compute capability 9.0; more streams work, but spill some in the backward write.


@triton.jit
def load_number(start, index):
    return tl.load(start + index).to(tl.float32)


@triton.jit
def row_of(numbers, every, count, SIZE: tl.constexpr):
    """Where the SIZE coefficients of this program's token begin, see `_Shared`."""
    return numbers + ((tl.program_id(0) // every) % count).to(tl.int64) * SIZE


@triton.jit
def partial_sums(row, GROUP: tl.constexpr):
    """Sums of neighbours, GROUP of them: as many as one thread loads at once, so that no thread needs another."""
    return tl.sum(tl.reshape(row, [row.shape[0] // GROUP, GROUP]), 1)


@triton.jit
def no_sums(COUNT: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([BLOCK // GROUP], tl.float32),)
    return sums


@triton.jit
def store_sums(start, sums, COUNT: tl.constexpr):
    for i in tl.static_range(COUNT):
        tl.store(start + i, tl.sum(sums[i], 0).to(start.dtype.element_ty))


@triton.jit
def _read(
    streams,
    h_pre,
    x,
    token_stride,
    stream_stride,
    pre_every,
    pre_count,
    DIM: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    weights = row_of(h_pre, pre_every, pre_count, STREAMS)
    for first in range(0, DIM, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mixture = tl.zeros([BLOCK], tl.float32)
        for i in tl.static_range(STREAMS):
            row = load_row(streams + token * token_stride + i * stream_stride, column, DIM)
            mixture += load_number(weights, i) * row
        store_row(x + token * DIM, mixture, column, DIM)


@triton.jit
def _read_backward(
    grad,
    streams,
    h_pre,
    grad_streams,
    grad_pre,
    grad_stride,
    token_stride,
    stream_stride,
    pre_every,
    pre_count,
    DIM: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    weights = row_of(h_pre, pre_every, pre_count, STREAMS)
    sums = no_sums(STREAMS, BLOCK, GROUP)
    for first in range(0, DIM, BLOCK):
        column = first + tl.arange(0, BLOCK)
        g = load_row(grad + token * grad_stride, column, DIM)
        later = ()
        for i in tl.static_range(STREAMS):
            row = load_row(streams + token * token_stride + i * stream_stride, column, DIM)
            store_row(grad_streams + (token * STREAMS + i) * DIM, load_number(weights, i) * g, column, DIM)
            later = later + (sums[i] + partial_sums(g * row, GROUP),)
        sums = later
    store_sums(grad_pre + token * STREAMS, sums, STREAMS)


@triton.jit
def _write(
    streams,
    y,
    h_res,
    h_post,
    written,
    token_stride,
    stream_stride,
    y_stride,
    res_every,
    res_count,
    post_every,
    post_count,
    DIM: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    MIXES: tl.constexpr,
    WRITES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if MIXES:
        matrix = row_of(h_res, res_every, res_count, STREAMS * STREAMS)
    if WRITES:
        weights = row_of(h_post, post_every, post_count, STREAMS)
    for first in range(0, DIM, BLOCK):
        column = first + tl.arange(0, BLOCK)
        xs = ()
        for i in tl.static_range(STREAMS):
            xs = xs + (load_row(streams + token * token_stride + i * stream_stride, column, DIM),)
        if WRITES:
            row = load_row(y + token * y_stride, column, DIM)
        for o in tl.static_range(STREAMS):
            if MIXES:
                after = tl.zeros([BLOCK], tl.float32)
                for i in tl.static_range(STREAMS):
                    after += load_number(matrix, o * STREAMS + i) * xs[i]
            else:
                after = xs[o]
            if WRITES:
                after += load_number(weights, o) * row
            store_row(written + (token * STREAMS + o) * DIM, after, column, DIM)


@triton.jit
def _write_backward(
    grad,
    streams,
    y,
    h_res,
    h_post,
    grad_streams,
    grad_y,
    grad_res,
    grad_post,
    grad_token_stride,
    grad_stream_stride,
    token_stride,
    stream_stride,
    y_stride,
    res_every,
    res_count,
    post_every,
    post_count,
    DIM: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    MIXES: tl.constexpr,
    WRITES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    if MIXES:
        matrix = row_of(h_res, res_every, res_count, STREAMS * STREAMS)
        matrix_sums = no_sums(STREAMS * STREAMS, BLOCK, GROUP)
    if WRITES:
        weights = row_of(h_post, post_every, post_count, STREAMS)
        weight_sums = no_sums(STREAMS, BLOCK, GROUP)
    for first in range(0, DIM, BLOCK):
        column = first + tl.arange(0, BLOCK)
        gs = ()
        for o in tl.static_range(STREAMS):
            gs = gs + (load_row(grad + token * grad_token_stride + o * grad_stream_stride, column, DIM),)
        if WRITES:
            row = load_row(y + token * y_stride, column, DIM)
            back = tl.zeros([BLOCK], tl.float32)
            later = ()
            for o in tl.static_range(STREAMS):
                back += load_number(weights, o) * gs[o]
                later = later + (weight_sums[o] + partial_sums(gs[o] * row, GROUP),)
            weight_sums = later
            store_row(grad_y + token * DIM, back, column, DIM)
        if MIXES:
            later = ()  # a column of the matrix after the other
            for i in tl.static_range(STREAMS):
                x = load_row(streams + token * token_stride + i * stream_stride, column, DIM)
                back = tl.zeros([BLOCK], tl.float32)
                for o in tl.static_range(STREAMS):
                    back += load_number(matrix, o * STREAMS + i) * gs[o]
                    later = later + (matrix_sums[i * STREAMS + o] + partial_sums(gs[o] * x, GROUP),)
                store_row(grad_streams + (token * STREAMS + i) * DIM, back, column, DIM)
            matrix_sums = later
    if WRITES:
        store_sums(grad_post + token * STREAMS, weight_sums, STREAMS)
    if MIXES:
        for i in tl.static_range(STREAMS):
            for o in tl.static_range(STREAMS):
                total = tl.sum(matrix_sums[i * STREAMS + o], 0).to(grad_res.dtype.element_ty)
                tl.store(grad_res + (token * STREAMS + o) * STREAMS + i, total)


class _Shared(NamedTuple):
    """Coefficients as rows that tokens share: token t has row (t // every) % count of the contiguous `numbers`."""

    numbers: Tensor | None
    every: int
    count: int


def _shared(x: Tensor | None, leading: Sequence[int], axes: int) -> _Shared:
    """The rows of coefficients (*some leading, *own), with `axes` axes of their own, for tokens of shape `leading`.

    The leading axes along which they differ lie side by side; those between two such axes are copied out.
    """
    if x is None:
        return _Shared(None, 1, 1)
    own = x.shape[x.dim() - axes :]
    sizes = (1,) * (len(leading) + axes - x.dim()) + tuple(x.shape[: x.dim() - axes])
    differing = [i for i, size in enumerate(sizes) if size > 1]
    if not differing:
        return _Shared(x.contiguous(), 1, 1)
    first, end = differing[0], differing[-1] + 1
    numbers = x.reshape(*sizes[first:end], *own).expand(*leading[first:end], *own)
    return _Shared(numbers.contiguous(), math.prod(leading[end:]), math.prod(leading[first:end]))


def _empty(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _of_tokens(x: Tensor | None, leading: Sequence[int], axes: int) -> Tensor | None:
    """Room for the gradient of every token's coefficients, in float32 where those of several tokens will be added."""
    if x is None:
        return None
    shape = (*leading, *x.shape[x.dim() - axes :])
    dtype = x.dtype if x.numel() == math.prod(shape) else torch.float32
    return torch.empty(shape, dtype=dtype, device=x.device)


def _added(sums: Tensor, x: Tensor) -> Tensor:
    """The gradient of x from the sums of every token."""
    return sums.sum_to_size(x.shape).to(x.dtype)


class Columns(NamedTuple):
    """Columns that a warp takes at a time, and those of them that one of its threads takes."""

    block: int
    group: int


def columns(x: Tensor) -> Columns:
    """16 bytes in every thread, in rows like those of x."""
    group = 16 // x.element_size()
    return Columns(min(max(triton.next_power_of_2(x.shape[-1]), 32), 32 * group), group)


@torch.library.custom_op("residua::hyper_read", mutates_args=())
def read_op(streams: Tensor, h_pre: Tensor) -> Tensor:
    *leading, n, dim = streams.shape
    x = torch.empty(*leading, dim, dtype=streams.dtype, device=streams.device)
    if streams.numel():
        rows, pre = token_rows(streams, 2), _shared(h_pre, leading, 1)
        cut = columns(streams)
        with on_device_of(streams):
            _read[(rows.shape[0],)](
                rows,
                pre.numbers,
                x,
                *rows.stride()[:2],
                pre.every,
                pre.count,
                dim,
                n,
                cut.block,
                num_warps=1,
            )
    return x


@read_op.register_fake
def _(streams, h_pre):
    *leading, _, dim = streams.shape
    return torch.empty(*leading, dim, dtype=streams.dtype, device=streams.device)


@torch.library.custom_op("residua::hyper_read_backward", mutates_args=())
def read_backward_op(grad: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    if not streams.numel():
        return torch.zeros_like(streams), torch.zeros_like(h_pre)
    *leading, n, dim = streams.shape
    grad_streams, grad_pre = _empty(streams), _of_tokens(h_pre, leading, 1)
    g, rows, pre = token_rows(grad, 1), token_rows(streams, 2), _shared(h_pre, leading, 1)
    cut = columns(streams)
    with on_device_of(streams):
        _read_backward[(rows.shape[0],)](
            g,
            rows,
            pre.numbers,
            grad_streams,
            grad_pre,
            g.stride(0),
            *rows.stride()[:2],
            pre.every,
            pre.count,
            dim,
            n,
            *cut,
            num_warps=1,
        )
    return grad_streams, _added(grad_pre, h_pre)


@read_backward_op.register_fake
def _(grad, streams, h_pre):
    return _empty(streams), _empty(h_pre)


def _save_read(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _read_gradients(ctx, grad):
    return read_backward_op(grad, *ctx.saved_tensors)


read_op.register_autograd(_read_gradients, setup_context=_save_read)


@torch.library.custom_op("residua::hyper_write", mutates_args=())
def write_op(streams: Tensor, y: Tensor | None, h_res: Tensor | None, h_post: Tensor | None) -> Tensor:
    """The written streams; None for h_res is the identity, None for y and h_post writes nothing (`hyper_mix`)."""
    *leading, n, dim = streams.shape
    written = _empty(streams)
    if streams.numel():
        rows, ys = token_rows(streams, 2), None if y is None else token_rows(y, 1)
        res, post = _shared(h_res, leading, 2), _shared(h_post, leading, 1)
        cut = columns(streams)
        with on_device_of(streams):
            _write[(rows.shape[0],)](
                rows,
                ys,
                res.numbers,
                post.numbers,
                written,
                *rows.stride()[:2],
                0 if ys is None else ys.stride(0),
                res.every,
                res.count,
                post.every,
                post.count,
                dim,
                n,
                cut.block,
                h_res is not None,
                y is not None,
                num_warps=1,
            )
    return written


@write_op.register_fake
def _(streams, y, h_res, h_post):
    return _empty(streams)


@torch.library.custom_op("residua::hyper_write_backward", mutates_args=())
def write_backward_op(
    grad: Tensor, streams: Tensor | None, y: Tensor | None, h_res: Tensor | None, h_post: Tensor | None
) -> list[Tensor]:
    """The gradients of those inputs that are given; `streams` without h_res is not: its gradient is `grad`."""
    inputs = (streams, y, h_res, h_post)
    if not grad.numel():
        return [torch.zeros_like(x) for x in inputs if x is not None]
    *leading, n, dim = grad.shape
    made = [
        None if streams is None else _empty(streams),
        None if y is None else _empty(y),
        _of_tokens(h_res, leading, 2),
        _of_tokens(h_post, leading, 1),
    ]
    g, ys = token_rows(grad, 2), None if y is None else token_rows(y, 1)
    rows = None if streams is None else token_rows(streams, 2)
    res, post = _shared(h_res, leading, 2), _shared(h_post, leading, 1)
    cut = columns(grad)
    with on_device_of(grad):
        _write_backward[(g.shape[0],)](
            g,
            rows,
            ys,
            res.numbers,
            post.numbers,
            *made,
            *g.stride()[:2],
            *((0, 0) if rows is None else rows.stride()[:2]),
            0 if ys is None else ys.stride(0),
            res.every,
            res.count,
            post.every,
            post.count,
            dim,
            n,
            *cut,
            h_res is not None,
            y is not None,
            num_warps=1,
        )
    return [_added(ours, x) for ours, x in zip(made, inputs) if x is not None]


@write_backward_op.register_fake
def _(grad, streams, y, h_res, h_post):
    return [_empty(x) for x in (streams, y, h_res, h_post) if x is not None]


def _save_write(ctx, inputs, output):
    streams, y, h_res, h_post = inputs
    ctx.save_for_backward(None if h_res is None else streams, y, h_res, h_post)


def _write_gradients(ctx, grad):
    made = iter(write_backward_op(grad, *ctx.saved_tensors))
    streams, *others = (None if x is None else next(made) for x in ctx.saved_tensors)
    return grad if streams is None else streams, *others


write_op.register_autograd(_write_gradients, setup_context=_save_write)


def hyper_read(streams: Tensor, h_pre: Tensor) -> Tensor:
    """x = sum_i h_pre[i] X[i] as `residua.ops.hyper_read` computes it, with up to 16 streams.

    streams: (..., n, d), h_pre: (..., n), whose leading axes broadcast against those of the streams, each in float32,
    bfloat16 or float16. Returns (..., d) in the dtype of `streams`; gradients have the dtypes of the inputs, and can be
    taken once. Kept for the backward pass: the inputs. Other shapes raise ValueError, other dtypes TypeError.
    """
    _expect_coefficients(streams, h_pre=h_pre)
    return read_op(streams, h_pre)


def hyper_mix(streams: Tensor, h_res: Tensor) -> Tensor:
    """X'[o] = sum_i h_res[o, i] X[i] as `residua.ops.hyper_mix` computes it, with up to 16 streams.

    streams: (..., n, d), h_res: (..., n, n); all else as for `hyper_read`. Returns (..., n, d).
    """
    _expect_coefficients(streams, h_res=h_res)
    return write_op(streams, None, h_res, None)


def hyper_write(streams: Tensor, y: Tensor, h_res: Tensor | None, h_post: Tensor) -> Tensor:
    """X'[o] = sum_i h_res[o, i] X[i] + h_post[o] y as `residua.ops.hyper_write` computes it, with up to 16 streams.

    streams: (..., n, d), y: (..., d), h_res: (..., n, n) or None, which is the identity, h_post: (..., n); all else as
    for `hyper_read`. Returns (..., n, d). Without h_res the streams are not kept for the backward pass.
    """
    *leading, _, dim = streams.shape
    expect_shape("y", y, (*leading, dim), "(..., d)")
    _expect_coefficients(streams, h_post=h_post, h_res=h_res)
    expect_dtypes(y=y)
    return write_op(streams, y, h_res, h_post)


def _expect_coefficients(streams: Tensor, **coefficients: Tensor | None) -> None:
    """Raise ValueError or TypeError for streams and coefficients, h_res or vectors, that no kernel takes."""
    *leading, n, _ = streams.shape
    if not 1 <= n <= MAX_CHANNELS:
        raise ValueError(f"streams: the Triton kernels take 1 to {MAX_CHANNELS} streams, got {n}: use 'reference'")
    given = {name: x for name, x in coefficients.items() if x is not None}
    for name, x in given.items():
        own, meaning = ((n, n), "(..., n, n)") if name == "h_res" else ((n,), "(..., n)")
        expand_leading(name, x, leading, own, meaning)
    expect_dtypes(streams=streams, **given)
