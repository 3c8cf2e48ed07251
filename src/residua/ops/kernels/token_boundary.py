"""The boundary between two sublayers with a read that looks back over tokens, in Triton.

A program walks along a chunk of one sequence. Forward it carries kernel - 1 rows, the partial sums of the
next reads. It starts kernel - 1 tokens early, so that its first read is whole; nothing else is read twice. Backward it
also runs kernel - 1 tokens late, because the gradient of a state needs the gradients of the reads that follow: a token
is finished kernel - 1 tokens after its read, when its state comes from the nearest cache. A state that was not kept is
replayed both times.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.channel_boundary import allocated, channel_boundary, differentiable
from residua.ops.kernels.launch import (
    chunk_length,
    empty,
    launch,
    num_warps,
    operator,
    packed,
    runs,
    token_rows,
    whole_row,
)
from residua.ops.kernels.replay import since_kept
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


@triton.jit
def _forward(
    state,
    k,
    v,
    beta,
    taps,
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
    seq,
    chunk,
    state_stride,
    channel_stride,
    k_stride,
    eps,
    norm_eps,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KERNEL: tl.constexpr,
    K_NORM: tl.constexpr,
    FROM_CONTEXT: tl.constexpr,
):
    channel = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    sequence = tl.program_id(1).to(tl.int64) * seq
    start = tl.program_id(0) * chunk
    ahead = ()  # partial sums of the reads 1, 2, ... tokens on
    for _ in tl.static_range(KERNEL - 1):
        ahead = ahead + (tl.zeros([BLOCK], tl.float32),)

    for index in range(tl.maximum(start - (KERNEL - 1), 0), tl.minimum(start + chunk, seq)):
        token = sequence + index
        x = load_tile(state + token * state_stride, channel, column, channel_stride, CHANNELS, DIM)
        raw = load_row(k + token * k_stride, column, DIM)
        inverse = inverse_norm(tl.sum(raw * raw, 0), eps, DIM, K_NORM)
        rest = load_channels(v + token * CHANNELS, channel, CHANNELS) - inverse * tl.sum(x * raw[None, :], 1)
        after = stepped(x, tl.load(beta + token).to(tl.float32) * rest, inverse * raw)

        read = ahead[0] + tl.sum(load_tile(taps, channel, column, DIM, CHANNELS, DIM) * after, 0)
        later = ()
        for s in tl.static_range(1, KERNEL):
            tap = load_tile(taps + s * CHANNELS * DIM, channel, column, DIM, CHANNELS, DIM)
            part = tl.sum(tap * after, 0)
            if s < KERNEL - 1:
                part += ahead[s]
            later = later + (part,)
        ahead = later

        # Tokens before the chunk belong to the previous program, which stores their results.
        width = tl.where(index >= start, DIM, 0)
        count = tl.where(index >= start, CHANNELS, 0)
        inverse_root = 1.0 / tl.sqrt(tl.sum(read * read, 0) / DIM + norm_eps)
        context_row = load_row(gain, column, DIM) * (inverse_root * read)
        gate_product = tl.sum(load_row(gate_weight, column, DIM) * context_row, 0)
        value_map = load_tile(value_weight, channel, column, DIM, CHANNELS, DIM)
        value_product = tl.sum(value_map * (context_row if FROM_CONTEXT else read)[None, :], 1)
        store_tile(written + token * CHANNELS * DIM, after, channel, column, DIM, CHANNELS, width)
        store_row(context + token * DIM, context_row, column, width)
        store_channels(value + token * CHANNELS, value_product, channel, count)
        store_channels(error + token * CHANNELS, rest, channel, count)
        tl.store(gate + token, gate_product, mask=index >= start)
        tl.store(scale + token, inverse, mask=index >= start)
        tl.store(root + token, inverse_root, mask=index >= start)


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
    taps,
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
    seq,
    chunk,
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
    KERNEL: tl.constexpr,
    K_NORM: tl.constexpr,
    FROM_CONTEXT: tl.constexpr,
):
    channel = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    REPLAYED: tl.constexpr = len(since[0]) > 0
    sequence = tl.program_id(1).to(tl.int64) * seq
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, seq)
    ahead = ()
    on_reads = ()  # the gradients of the last reads, the oldest first
    grad_taps = ()
    for _ in tl.static_range(KERNEL - 1):
        ahead = ahead + (tl.zeros([BLOCK], tl.float32),)
        on_reads = on_reads + (tl.zeros([BLOCK], tl.float32),)
    for _ in tl.static_range(KERNEL):
        grad_taps = grad_taps + (tl.zeros([ROWS, BLOCK], tl.float32),)
    grad_value_weight = tl.zeros([ROWS, BLOCK], tl.float32)
    grad_gain = tl.zeros([BLOCK], tl.float32)
    grad_gate_weight = tl.zeros([BLOCK], tl.float32)

    for step_index in range(tl.maximum(start - (KERNEL - 1), 0), end + (KERNEL - 1)):
        # Recompute the read of this token, then its gradient. After the end of the sequence everything is zero.
        index = tl.cast(step_index, tl.int64)
        token = sequence + index
        within = index < seq
        width = tl.where(within, DIM, 0)
        count = tl.where(within, CHANNELS, 0)
        direction = tl.load(scale + token, mask=within, other=0.0) * load_row(k + token * k_stride, column, width)
        rest = load_channels(error + token * CHANNELS, channel, count)
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, width, count)
        if REPLAYED:
            # Store the state for its second use, where its gradient will be written later.
            chunk_width = tl.where((index >= start) & (index < end), DIM, 0)
            store_tile(grad_state + token * CHANNELS * DIM, x, channel, column, DIM, CHANNELS, chunk_width)
        step = tl.load(beta + token, mask=within, other=0.0).to(tl.float32) * rest
        after = stepped(x, step, direction)
        read = ahead[0] + tl.sum(load_tile(taps, channel, column, DIM, CHANNELS, DIM) * after, 0)
        later = ()
        for s in tl.static_range(1, KERNEL):
            tap = load_tile(taps + s * CHANNELS * DIM, channel, column, DIM, CHANNELS, DIM)
            part = tl.sum(tap * after, 0)
            if s < KERNEL - 1:
                part += ahead[s]
            later = later + (part,)
        ahead = later

        inverse_root = tl.load(root + token, mask=within, other=0.0)
        normed = inverse_root * read
        gains = load_row(gain, column, DIM)
        on_gate = tl.load(grad_gate + token, mask=within, other=0.0).to(tl.float32)
        on_value = load_channels(grad_value + token * CHANNELS, channel, count)
        on_context = load_row(grad_context + token * context_stride, column, width)
        on_context += on_gate * load_row(gate_weight, column, DIM)
        value_map = load_tile(value_weight, channel, column, DIM, CHANNELS, DIM)
        on_value_input = tl.sum(on_value[:, None] * value_map, 0)
        if FROM_CONTEXT:
            on_context += on_value_input
        on_read = through_norm(on_context, normed, gains, inverse_root, DIM)
        if not FROM_CONTEXT:
            on_read += on_value_input
        # Tokens outside the chunk are summed by the programs they belong to.
        in_chunk = tl.where(index >= start, 1.0, 0.0) * tl.where(index < end, 1.0, 0.0)
        value_input = gains * normed if FROM_CONTEXT else read
        grad_value_weight += (in_chunk * on_value)[:, None] * value_input[None, :]
        grad_gain += in_chunk * (on_context * normed)
        grad_gate_weight += (in_chunk * on_gate) * (gains * normed)

        # Now every read of the token KERNEL - 1 steps back has its gradient.
        index -= KERNEL - 1
        token -= KERNEL - 1
        complete = index >= start
        width = tl.where(complete, DIM, 0)
        count = tl.where(complete, CHANNELS, 0)
        inverse = tl.load(scale + token, mask=complete, other=1.0)
        gate = tl.load(beta + token, mask=complete, other=0.0).to(tl.float32)
        direction = inverse * load_row(k + token * k_stride, column, width)
        rest = load_channels(error + token * CHANNELS, channel, count)
        target = load_channels(v + token * CHANNELS, channel, count)
        # Wait until all threads have written the state. The barrier also keeps the compiler from loading the
        # tiles below early: without it, about a hundred registers spill to memory for every token.
        tl.debug_barrier()
        if REPLAYED:
            x = load_tile(grad_state + token * CHANNELS * DIM, channel, column, DIM, CHANNELS, width)
        else:
            x = load_tile(state + token * state_stride, channel, column, channel_stride, CHANNELS, width)
        g = load_tile(grad_written + token * grad_stride, channel, column, grad_channel_stride, CHANNELS, width)
        after = stepped(x, gate * rest, direction)
        remaining = ()
        next_grad_taps = ()
        for s in tl.static_range(KERNEL):
            on_later = on_reads[s] if s < KERNEL - 1 else on_read
            g += load_tile(taps + s * CHANNELS * DIM, channel, column, DIM, CHANNELS, DIM) * on_later[None, :]
            next_grad_taps = next_grad_taps + (grad_taps[s] + on_later[None, :] * after,)
            if s > 0:
                remaining = remaining + (on_later,)
        on_reads = remaining
        grad_taps = next_grad_taps
        out, back, erased, on_beta = through_write(g, x, direction, gate, rest, target, inverse, eps, K_NORM)
        store_row(grad_k + token * DIM, back, column, width)
        store_tile(grad_state + token * CHANNELS * DIM, out, channel, column, DIM, CHANNELS, width)
        store_channels(grad_v + token * CHANNELS, erased, channel, count)
        tl.store(grad_beta + token, on_beta.to(grad_beta.dtype.element_ty), mask=complete)

    # (programs, (kernel + 1) channels + 2, dim): taps, value_weight, gain, gate_weight
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    sums = partial + program * ((KERNEL + 1) * CHANNELS + 2) * DIM
    for s in tl.static_range(KERNEL):
        store_tile(sums + s * CHANNELS * DIM, grad_taps[s], channel, column, DIM, CHANNELS, DIM)
    store_tile(sums + KERNEL * CHANNELS * DIM, grad_value_weight, channel, column, DIM, CHANNELS, DIM)
    store_row(sums + (KERNEL + 1) * CHANNELS * DIM, grad_gain, column, DIM)
    store_row(sums + ((KERNEL + 1) * CHANNELS + 1) * DIM, grad_gate_weight, column, DIM)


@operator("token_boundary")
def token_op(
    state: Tensor,
    write: Sequence[Tensor],
    reader: Sequence[Tensor],
    k_norm: str,
    eps: float,
    norm_eps: float,
    from_context: bool,
) -> list[Tensor]:
    """As `channel_boundary.channel_op`; the first tensor of `reader` is the taps."""
    results = allocated(state)
    if runs(state):
        k, v, beta = write
        seq, channels, dim = state.shape[-3:]
        x, raw, tile = token_rows(state, 2), token_rows(k, 1), whole_row(channels, dim)
        chunk = chunk_length(state, x.shape[0], 3)
        sizes = (eps, norm_eps, dim, channels, tile.rows, tile.block, reader[0].shape[0])
        arguments = (x, raw, *packed(v, beta, *reader), *results, seq, chunk, *x.stride()[:2], raw.stride(0), *sizes)
        grid = (triton.cdiv(seq, chunk), x.shape[0] // seq)
        launch(_forward, grid, *arguments, k_norm, from_context, num_warps=num_warps(tile, 40))
    return results


@operator("token_boundary_backward")
def token_backward_op(
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
    seq, channels, dim = state.shape[-3:]
    kernel = reader[0].shape[0]
    gradients = [empty(x) for x in (state, *write)]
    g, x = token_rows(grad_written, 2), token_rows(state, 2)
    raw, on_context = token_rows(k, 1), token_rows(grad_context, 1)
    tile = whole_row(channels, dim)
    chunk = chunk_length(state, x.shape[0], 1)
    grid = (triton.cdiv(seq, chunk), x.shape[0] // seq)
    partial = empty(state, (grid[0] * grid[1], (kernel + 1) * channels + 2, dim), torch.float32)
    beside = packed(v, beta, *reader, *saved)
    inputs = (g, on_context, *packed(grad_gate, grad_value), x, since_kept(since), raw, *beside)
    strides = (*g.stride()[:2], *x.stride()[:2], raw.stride(0), on_context.stride(0))
    arguments = (*inputs, *gradients, partial, seq, chunk, *strides, eps, dim, channels, tile.rows, tile.block, kernel)
    launch(_backward, grid, *arguments, k_norm, from_context, num_warps=num_warps(tile, 20))
    sums = partial.sum(0)
    small = (sums[: kernel * channels].view(kernel, channels, dim), sums[-2], sums[-1], sums[kernel * channels : -2])
    # Copies: the results of an operator share no memory.
    return gradients + [s.to(x.dtype, copy=True) for s, x in zip(small, reader)]


_several_taps = differentiable(token_op, token_backward_op, "taps")


def token_boundary(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, taps: Tensor, *others) -> tuple[Tensor, ...]:
    """Compute `ops.write_read.token_boundary`; arguments and results as in `differentiable`."""
    if taps.shape[0] == 1:
        return channel_boundary(state, k, v, beta, taps[0], *others)
    return _several_taps(state, k, v, beta, taps, *others)
