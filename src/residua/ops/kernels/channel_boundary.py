"""The boundary between two sublayers in Triton: forward and backward read the state once and write one of its size.

Forward, one program is one token. Backward, a few programs per multiprocessor walk over the tokens and sum the
gradients of the small parameters in registers, one partial sum per program; the partial sums are added afterwards, in
the same order and hence to the same bits every time. The small parameters come from the nearest cache again for every
token. A state that was not kept is replayed in registers, as in the backward pass of the delta write.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.launch import (
    empty,
    expect_taken,
    launch,
    num_warps,
    operator,
    packed,
    programs,
    runs,
    tiling,
    token_rows,
    whole_row,
)
from residua.ops.kernels.replay import keep, kept, since_kept
from residua.ops.kernels.tiles import (
    inverse_norm,
    load_channels,
    load_row,
    load_state,
    load_tile,
    stepped,
    store_channels,
    store_row,
    store_tile,
    through_norm,
    through_write,
)
from residua.ops.precision import new_symbol


@triton.jit
def _forward(
    state,
    k,
    v,
    beta,
    weights,
    gain,
    gate_weight,
    value_weight,
    written,
    context,
    gate,
    value,
    error,
    scale,
    root,
    state_stride,
    channel_stride,
    k_stride,
    eps,
    norm_eps,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    K_NORM: tl.constexpr,
    FROM_CONTEXT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, ROWS)
    square = tl.zeros([BLOCK], tl.float32)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    xs = ()
    ks = ()
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        x = load_tile(state + token * state_stride, channel, column, channel_stride, CHANNELS, DIM)
        raw = load_row(k + token * k_stride, column, DIM)
        square += raw * raw
        products += x * raw[None, :]
        xs = xs + (x,)
        ks = ks + (raw,)
    inverse = inverse_norm(tl.sum(square, 0), eps, DIM, K_NORM)
    rest = load_channels(v + token * CHANNELS, channel, CHANNELS) - inverse * tl.sum(products, 1)
    step = tl.load(beta + token).to(tl.float32) * rest

    read_square = tl.zeros([BLOCK], tl.float32)
    gated = tl.zeros([BLOCK], tl.float32)
    valued = tl.zeros([ROWS, BLOCK], tl.float32)
    reads = ()
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        x = stepped(xs[i], step, inverse * ks[i])
        store_tile(written + token * CHANNELS * DIM, x, channel, column, DIM, CHANNELS, DIM)
        gains = load_row(gain, column, DIM)
        read = tl.sum(load_tile(weights, channel, column, DIM, CHANNELS, DIM) * x, 0)
        scaled = gains * read
        read_square += read * read
        gated += load_row(gate_weight, column, DIM) * scaled
        value_input = scaled if FROM_CONTEXT else read
        valued += load_tile(value_weight, channel, column, DIM, CHANNELS, DIM) * value_input[None, :]
        reads = reads + (scaled,)
    inverse_root = 1.0 / tl.sqrt(tl.sum(read_square, 0) / DIM + norm_eps)
    value_product = tl.sum(valued, 1)
    if FROM_CONTEXT:
        value_product = inverse_root * value_product
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        store_row(context + token * DIM, inverse_root * reads[i], column, DIM)
    tl.store(gate + token, inverse_root * tl.sum(gated, 0))
    store_channels(value + token * CHANNELS, value_product, channel, CHANNELS)
    store_channels(error + token * CHANNELS, rest, channel, CHANNELS)
    tl.store(scale + token, inverse)
    tl.store(root + token, inverse_root)


@triton.jit
def _backward(
    grad_written,
    grad_context,
    grad_gate,
    grad_value,
    state,
    since,
    k,
    v,
    beta,
    weights,
    gain,
    gate_weight,
    value_weight,
    error,
    scale,
    root,
    grad_state,
    grad_k,
    grad_v,
    grad_beta,
    partial,
    tokens,
    grad_stride,
    grad_channel_stride,
    state_stride,
    channel_stride,
    k_stride,
    context_stride,
    eps,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    K_NORM: tl.constexpr,
    FROM_CONTEXT: tl.constexpr,
):
    channel = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    grad_weights = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_value_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_gain = tl.zeros([BLOCK], tl.float32)
    grad_gate_weight = tl.zeros([BLOCK], tl.float32)

    for index in range(tl.program_id(0), tokens, tl.num_programs(0)):
        token = tl.cast(index, tl.int64)
        inverse = tl.load(scale + token)
        inverse_root = tl.load(root + token)
        gate = tl.load(beta + token).to(tl.float32)
        on_gate = tl.load(grad_gate + token).to(tl.float32)
        on_value = load_channels(grad_value + token * CHANNELS, channel, CHANNELS)
        rest = load_channels(error + token * CHANNELS, channel, CHANNELS)
        target = load_channels(v + token * CHANNELS, channel, CHANNELS)
        step = gate * rest
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, DIM, CHANNELS)
        g = load_tile(grad_written + token * grad_stride, channel, column, grad_channel_stride, CHANNELS, DIM)
        direction = inverse * load_row(k + token * k_stride, column, DIM)

        # Recompute the read, then go back through the products and the norm: n = x_in / rms, c = gain n.
        mixing = load_tile(weights, channel, column, DIM, CHANNELS, DIM)
        after = stepped(x, step, direction)
        read = tl.sum(mixing * after, 0)
        normed = inverse_root * read
        gains = load_row(gain, column, DIM)
        on_context = load_row(grad_context + token * context_stride, column, DIM)
        on_context += on_gate * load_row(gate_weight, column, DIM)
        value_map = load_tile(value_weight, channel, column, DIM, CHANNELS, DIM)
        on_value_input = tl.sum(on_value[:, None] * value_map, 0)
        if FROM_CONTEXT:
            on_context += on_value_input
        on_read = through_norm(on_context, normed, gains, inverse_root, DIM)
        if not FROM_CONTEXT:
            on_read += on_value_input
        value_input = gains * normed if FROM_CONTEXT else read
        grad_weights += on_read[None, :] * after
        grad_value_weight += on_value[:, None] * value_input[None, :]
        grad_gain += on_context * normed
        grad_gate_weight += on_gate * (gains * normed)

        # Back through the write, as in the delta write.
        g += mixing * on_read[None, :]
        out, back, erased, on_beta = through_write(g, x, direction, gate, rest, target, inverse, eps, K_NORM)
        store_row(grad_k + token * DIM, back, column, DIM)
        store_tile(grad_state + token * CHANNELS * DIM, out, channel, column, DIM, CHANNELS, DIM)
        store_channels(grad_v + token * CHANNELS, erased, channel, CHANNELS)
        tl.store(grad_beta + token, on_beta.to(grad_beta.dtype.element_ty))

    # (programs, 2 channels + 2, dim): weights, value_weight, gain, gate_weight
    sums = partial + tl.program_id(0).to(tl.int64) * (2 * CHANNELS + 2) * DIM
    store_tile(sums, grad_weights, channel, column, DIM, CHANNELS, DIM)
    store_tile(sums + CHANNELS * DIM, grad_value_weight, channel, column, DIM, CHANNELS, DIM)
    store_row(sums + 2 * CHANNELS * DIM, grad_gain, column, DIM)
    store_row(sums + (2 * CHANNELS + 1) * DIM, grad_gate_weight, column, DIM)


# The operators of a boundary take the tensors in groups: write is (k, v, beta); reader is (weights or taps, gain,
# gate_weight, value_weight); saved for the backward pass are (r, 1 / m, 1 / rms).


@operator("channel_boundary")
def channel_op(
    state: Tensor,
    write: Sequence[Tensor],
    reader: Sequence[Tensor],
    k_norm: str,
    eps: float,
    norm_eps: float,
    from_context: bool,
) -> list[Tensor]:
    """Return the results of the boundary, then the tensors to save."""
    results = allocated(state)
    if runs(state):
        k, v, beta = write
        channels, dim = state.shape[-2:]
        x, raw, tile = token_rows(state, 2), token_rows(k, 1), tiling(channels, dim)
        strides = (*x.stride()[:2], raw.stride(0))
        arguments = (x, raw, *packed(v, beta, *reader), *results, *strides, eps, norm_eps, dim, channels, *tile)
        launch(_forward, (x.shape[0],), *arguments, k_norm, from_context, num_warps=num_warps(tile, 120))
    return results


def allocated(state: Tensor) -> list[Tensor]:
    """Allocate the written state, context, gate and value, and for the backward pass r, 1 / m, 1 / rms."""
    *leading, channels, dim = state.shape
    shapes = [leading, (*leading, channels), (*leading, channels), leading, leading]
    return [empty(state), empty(state, (*leading, dim)), *(empty(state, shape, torch.float32) for shape in shapes)]


@operator("channel_boundary_backward")
def channel_backward_op(
    grads: Sequence[Tensor],
    state: Tensor,
    since: Sequence[Tensor],
    write: Sequence[Tensor],
    reader: Sequence[Tensor],
    saved: Sequence[Tensor],
    k_norm: str,
    eps: float,
    from_context: bool,
) -> list[Tensor]:
    """Return the gradients of state, write and reader."""
    if not runs(state):
        return [x.new_zeros(x.shape) for x in (state, *write, *reader)]
    k, v, beta = write
    grad_written, grad_context, grad_gate, grad_value = grads
    channels, dim = state.shape[-2:]
    gradients = [empty(x) for x in (state, *write)]
    g, x = token_rows(grad_written, 2), token_rows(state, 2)
    raw, on_context = token_rows(k, 1), token_rows(grad_context, 1)
    # In one block a thread holds every channel of its columns, and sums over channels need no other thread.
    tile = whole_row(channels, dim)
    warps = num_warps(tile, 40)
    grid = programs(state, x.shape[0], max(1, 8 // warps))
    partial = empty(state, (grid, 2 * channels + 2, dim), torch.float32)
    beside = packed(v, beta, *reader, *saved)
    inputs = (g, on_context, *packed(grad_gate, grad_value), x, since_kept(since), raw, *beside)
    strides = (*g.stride()[:2], *x.stride()[:2], raw.stride(0), on_context.stride(0))
    arguments = (*inputs, *gradients, partial, x.shape[0], *strides, eps, dim, channels, tile.rows, tile.block)
    launch(_backward, (grid,), *arguments, k_norm, from_context, num_warps=warps)
    sums = partial.sum(0)
    small = (sums[:channels], sums[-2], sums[-1], sums[channels:-2])
    # Copies: the results of an operator share no memory.
    return gradients + [s.to(x.dtype, copy=True) for s, x in zip(small, reader)]


def differentiable(op: Callable, backward_op: Callable, mixing: str) -> Callable[..., tuple[Tensor, ...]]:
    """Make a differentiable boundary of its two operators: the function that `ops.write_read` calls.

    It takes state, k, v, beta, the reader's four tensors (errors call the first `mixing`), k_norm, eps, norm_eps,
    value_input and recompute_every, and returns the results of `ops.write_read.Boundary`, with one derivative, for 1 to
    16 value channels. The read sees the state before it is rounded to its dtype. Every tensor is in float32, bfloat16
    or float16, and has a gradient in its own dtype. Kept for the backward pass: the inputs, one state in
    `recompute_every` along a chain of writes, and value_channels + 2 float32 numbers per token, not x_in. Raises
    ValueError for other numbers of channels, TypeError for other dtypes.
    """

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, state, k, v, beta, *others):
            *reader, k_norm, eps, norm_eps, from_context, recompute_every = others
            *results, error, scale, root = op(state, [k, v, beta], reader, k_norm, eps, norm_eps, from_context)
            keep(ctx, state, recompute_every, k, scale, beta, error, v, root, *reader)
            ctx.options = k_norm, eps, from_context
            return tuple(results)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor):
            state, since, (k, scale, beta, error, v, root, *reader) = kept(ctx)
            write, saved = [k, v, beta], [error, scale, root]
            return *backward_op(grads, state, since, write, reader, saved, *ctx.options), None, None, None, None, None

    def boundary(state, k, v, beta, *others):
        *reader, k_norm, eps, norm_eps, value_input, recompute_every = others
        names = (mixing, "gain", "gate_weight", "value_weight")
        expect_taken("value channels", state.shape[-2], state=state, k=k, v=v, beta=beta, **dict(zip(names, reader)))
        options = (k_norm or "none", new_symbol(eps), new_symbol(norm_eps), value_input == "context")
        if not torch.is_grad_enabled():
            return tuple(op(state, [k, v, beta], reader, *options)[:4])
        return Function.apply(state, k, v, beta, *reader, *options, recompute_every)

    return boundary


channel_boundary = differentiable(channel_op, channel_backward_op, "weights")
