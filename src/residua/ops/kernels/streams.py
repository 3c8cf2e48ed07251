"""Read, mix and write n streams in Triton, with coefficients per token or shared by several tokens.

The numbers moved for one token of n streams of d numbers, in the forward and in the backward pass, are as follows. The
coefficients add at most n^2 + n numbers per token in each pass.

    a read                    n d + d      2 n d + d
    a mix                   2 n d          3 n d
    a write                 2 n d + d      3 n d + 2 d
    a write without mixing  2 n d + d        n d + 2 d

These operators have only first derivatives, and a gradient has the dtype of its tensor. The inputs are kept for the
backward pass, but a write keeps the streams only if there is an h_res.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.launch import empty, launch, operator, runs, token_rows

# One program, of one warp, handles one token. It loops over the columns with the rows of all streams in registers. A
# product of matrices this small is a few sums of scaled rows, for which threads need not communicate. Only the
# gradients of coefficients are sums over the columns; each thread keeps partial sums until the last column. Compiled
# for compute capability 9.0, these fit into registers for up to 8 streams; with more, the backward write spills some.


@triton.jit
def load_row(start, column, width):
    return tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def store_row(start, row, column, width):
    tl.store(start + column, row.to(start.dtype.element_ty), mask=column < width)


@triton.jit
def load_number(start, index):
    return tl.load(start + index).to(tl.float32)


@triton.jit
def row_of(numbers, every, count, SIZE: tl.constexpr):
    """Return the pointer to the SIZE coefficients of this program's token (see `_Shared`)."""
    return numbers + ((tl.program_id(0) // every) % count).to(tl.int64) * SIZE


@triton.jit
def partial_sums(row, GROUP: tl.constexpr):
    """Sum every GROUP neighbouring numbers of a row: (BLOCK,) -> (BLOCK // GROUP,).

    One thread loads GROUP numbers at once, so threads need not communicate.
    """
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
            later = ()  # one column of the matrix after another
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
    """Rows of coefficients that tokens share: token t uses row (t // every) % count of the contiguous `numbers`."""

    numbers: Tensor | None
    every: int
    count: int


def _shared(x: Tensor | None, leading: Sequence[int], axes: int) -> _Shared:
    """Arrange coefficients x as rows that tokens share.

    x: (*leading, *row), where `row` has `axes` axes, and leading axes may be missing or of size 1. An axis of size 1
    is expanded, by a copy, only if it lies between leading axes along which the coefficients differ.
    """
    if x is None:
        return _Shared(None, 1, 1)
    row = x.shape[x.dim() - axes :]
    sizes = (1,) * (len(leading) + axes - x.dim()) + tuple(x.shape[: x.dim() - axes])
    differing = [i for i, size in enumerate(sizes) if size > 1]
    if not differing:
        return _Shared(x.contiguous(), 1, 1)
    first, end = differing[0], differing[-1] + 1
    numbers = x.reshape(*sizes[first:end], *row).expand(*leading[first:end], *row)
    return _Shared(numbers.contiguous(), math.prod(leading[end:]), math.prod(leading[first:end]))


def _of_tokens(x: Tensor | None, leading: Sequence[int], axes: int) -> Tensor | None:
    """Allocate the gradient of every token's coefficients, in float32 if the gradients of tokens will be summed."""
    if x is None:
        return None
    shape = (*leading, *x.shape[x.dim() - axes :])
    return empty(x, shape, x.dtype if x.numel() == math.prod(shape) else torch.float32)


def _added(sums: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x from the sums of every token."""
    return sums.sum_to_size(x.shape).to(x.dtype)


def _rows(x: Tensor | None, width: int) -> tuple[Tensor | None, Sequence[int]]:
    """Return the `token_rows` of x and their strides; zeros in place of the strides if x is None."""
    rows = None if x is None else token_rows(x, width)
    return rows, (0,) * width if rows is None else rows.stride()[:width]


class Columns(NamedTuple):
    """The number of columns that a warp handles at a time, and the number per thread."""

    block: int
    group: int


def columns(x: Tensor) -> Columns:
    """Return the `Columns` for rows of x: 16 bytes for each thread, and for a warp no more than a row needs."""
    group = 16 // x.element_size()
    return Columns(min(max(triton.next_power_of_2(x.shape[-1]), 32), 32 * group), group)


@operator("hyper_read")
def hyper_read(streams: Tensor, h_pre: Tensor) -> Tensor:
    *leading, n, dim = streams.shape
    x = empty(streams, (*leading, dim))
    if runs(streams):
        (rows, strides), pre = _rows(streams, 2), _shared(h_pre, leading, 1)
        arguments = (rows, pre.numbers, x, *strides, pre.every, pre.count, dim, n, columns(streams).block)
        launch(_read, (rows.shape[0],), *arguments, num_warps=1)
    return x


@operator("hyper_read_backward")
def hyper_read_backward(grad: Tensor, streams: Tensor, h_pre: Tensor) -> tuple[Tensor, Tensor]:
    if not runs(streams):
        return streams.new_zeros(streams.shape), h_pre.new_zeros(h_pre.shape)
    *leading, n, dim = streams.shape
    grad_streams, grad_pre = empty(streams), _of_tokens(h_pre, leading, 1)
    (g, (stride,)), (rows, strides), pre = _rows(grad, 1), _rows(streams, 2), _shared(h_pre, leading, 1)
    inputs = (g, rows, pre.numbers, grad_streams, grad_pre, stride, *strides, pre.every, pre.count)
    launch(_read_backward, (rows.shape[0],), *inputs, dim, n, *columns(streams), num_warps=1)
    return grad_streams, _added(grad_pre, h_pre)


def _save_read(ctx: Any, inputs, output):
    ctx.save_for_backward(*inputs)


def _read_gradients(ctx: Any, grad):
    return hyper_read_backward(grad, *ctx.saved_tensors)


hyper_read.register_autograd(_read_gradients, setup_context=_save_read)


@operator("hyper_write")
def hyper_write(streams: Tensor, y: Tensor | None, h_res: Tensor | None, h_post: Tensor | None) -> Tensor:
    """Compute `ops.hyper_write`, or `ops.hyper_mix` with None for y and h_post."""
    *leading, n, dim = streams.shape
    written = empty(streams)
    if runs(streams):
        (rows, strides), (ys, y_stride) = _rows(streams, 2), _rows(y, 1)
        res, post = _shared(h_res, leading, 2), _shared(h_post, leading, 1)
        inputs = (rows, ys, res.numbers, post.numbers, written, *strides, *y_stride, *res[1:], *post[1:], dim, n)
        options = (columns(streams).block, h_res is not None, y is not None)
        launch(_write, (rows.shape[0],), *inputs, *options, num_warps=1)
    return written


@operator("hyper_write_backward")
def hyper_write_backward(
    grad: Tensor, streams: Tensor | None, y: Tensor | None, h_res: Tensor | None, h_post: Tensor | None
) -> list[Tensor]:
    """Return the gradients of the inputs that are not None. Without h_res `streams` is None; its gradient is `grad`."""
    inputs = (streams, y, h_res, h_post)
    if not runs(grad):
        return [x.new_zeros(x.shape) for x in inputs if x is not None]
    *leading, n, dim = grad.shape
    grads = [
        None if streams is None else empty(streams),
        None if y is None else empty(y),
        _of_tokens(h_res, leading, 2),
        _of_tokens(h_post, leading, 1),
    ]
    (g, g_strides), (rows, strides), (ys, y_stride) = _rows(grad, 2), _rows(streams, 2), _rows(y, 1)
    res, post = _shared(h_res, leading, 2), _shared(h_post, leading, 1)
    arguments = (g, rows, ys, res.numbers, post.numbers, *grads, *g_strides, *strides, *y_stride, *res[1:], *post[1:])
    options = (dim, n, *columns(grad), h_res is not None, y is not None)
    launch(_write_backward, (g.shape[0],), *arguments, *options, num_warps=1)
    return [_added(sums, x) for sums, x in zip(grads, inputs) if x is not None]


def _save_write(ctx: Any, inputs, output):
    streams, y, h_res, h_post = inputs
    ctx.save_for_backward(None if h_res is None else streams, y, h_res, h_post)


def _write_gradients(ctx: Any, grad):
    grads = iter(hyper_write_backward(grad, *ctx.saved_tensors))
    streams, *others = (None if x is None else next(grads) for x in ctx.saved_tensors)
    return grad if streams is None else streams, *others


hyper_write.register_autograd(_write_gradients, setup_context=_save_write)
