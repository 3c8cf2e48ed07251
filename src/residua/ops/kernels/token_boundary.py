"""The boundary between two sublayers with a read that looks back over tokens, in Triton.

A program walks along a chunk of one sequence. Forward it keeps kernel - 1 rows: what the tokens so far will add to the
next reads. It starts kernel - 1 tokens early, so that its first read is whole; that is all that is read twice. Backward
it also runs kernel - 1 tokens late, because the gradient of a state needs those of the reads that follow: a token is
finished kernel - 1 tokens after its read was, when its state comes from the nearest cache. A state that was not kept is
replayed both times.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.delta import KNorm
from residua.ops.kernels.boundary import (
    channel_boundary,
    differentiable,
    made,
    through_norm,
    through_write,
)
from residua.ops.kernels.delta import (
    inverse_norm,
    load_channels,
    load_row,
    load_state,
    load_tile,
    since_kept,
    stepped,
    store_channels,
    store_row,
    store_tile,
)
from residua.ops.kernels.tiling import (
    chunk_length,
    expect_dtypes,
    expect_kernel_write,
    num_warps,
    on_device_of,
    token_rows,
    whole_row,
)
from residua.ops.precision import fresh
from residua.ops.shapes import expect_shape
from residua.ops.write_read import Boundary, ValueInput, expect_following


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
    ahead = ()  # what the tokens so far add to the reads 1, 2, ... tokens on
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

        # Tokens before the chunk belong to the program before.
        width = tl.where(index >= start, DIM, 0)
        count = tl.where(index >= start, CHANNELS, 0)
        inverse_root = 1.0 / tl.sqrt(tl.sum(read * read, 0) / DIM + norm_eps)
        seen = load_row(gain, column, DIM) * (inverse_root * read)
        gate_product = tl.sum(load_row(gate_weight, column, DIM) * seen, 0)
        value_map = load_tile(value_weight, channel, column, DIM, CHANNELS, DIM)
        value_product = tl.sum(value_map * (seen if FROM_CONTEXT else read)[None, :], 1)
        store_tile(written + token * CHANNELS * DIM, after, channel, column, DIM, CHANNELS, width)
        store_row(context + token * DIM, seen, column, width)
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
        # The read of this token once more, and its gradient. Behind the sequence all is zero.
        index = tl.cast(step_index, tl.int64)
        token = sequence + index
        within = index < seq
        width = tl.where(within, DIM, 0)
        count = tl.where(within, CHANNELS, 0)
        direction = tl.load(scale + token, mask=within, other=0.0) * load_row(k + token * k_stride, column, width)
        rest = load_channels(error + token * CHANNELS, channel, count)
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, width, count)
        if REPLAYED:
            # For the second time: until the gradient of this state is known, there is room in its place.
            own_width = tl.where((index >= start) & (index < end), DIM, 0)
            store_tile(grad_state + token * CHANNELS * DIM, x, channel, column, DIM, CHANNELS, own_width)
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
        on_seen = tl.sum(on_value[:, None] * value_map, 0)
        if FROM_CONTEXT:
            on_context += on_seen
        on_read = through_norm(on_context, normed, gains, inverse_root, DIM)
        if not FROM_CONTEXT:
            on_read += on_seen
        # The tokens around the chunk are summed by the programs that they belong to.
        own = tl.where(index >= start, 1.0, 0.0) * tl.where(index < end, 1.0, 0.0)
        seen = gains * normed if FROM_CONTEXT else read
        grad_value_weight += (own * on_value)[:, None] * seen[None, :]
        grad_gain += own * (on_context * normed)
        grad_gate_weight += (own * on_gate) * (gains * normed)

        # All reads of the token KERNEL - 1 steps back have their gradients now.
        index -= KERNEL - 1
        token -= KERNEL - 1
        done = index >= start
        width = tl.where(done, DIM, 0)
        count = tl.where(done, CHANNELS, 0)
        inverse = tl.load(scale + token, mask=done, other=1.0)
        gate = tl.load(beta + token, mask=done, other=0.0).to(tl.float32)
        direction = inverse * load_row(k + token * k_stride, column, width)
        rest = load_channels(error + token * CHANNELS, channel, count)
        wanted = load_channels(v + token * CHANNELS, channel, count)
        # All threads have written what is read here. It also keeps a compiler from loading the tiles below early, for
        # which there are no registers: without it, about a hundred of them go to memory and back for every token.
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
        out, back, erased, on_beta = through_write(g, x, direction, gate, rest, wanted, inverse, eps, K_NORM)
        store_row(grad_k + token * DIM, back, column, width)
        store_tile(grad_state + token * CHANNELS * DIM, out, channel, column, DIM, CHANNELS, width)
        store_channels(grad_v + token * CHANNELS, erased, channel, count)
        tl.store(grad_beta + token, on_beta.to(grad_beta.dtype.element_ty), mask=done)

    # (programs, (kernel + 1) channels + 2, dim): taps, value_weight, gain, gate_weight
    program = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    sums = partial + program * ((KERNEL + 1) * CHANNELS + 2) * DIM
    for s in tl.static_range(KERNEL):
        store_tile(sums + s * CHANNELS * DIM, grad_taps[s], channel, column, DIM, CHANNELS, DIM)
    store_tile(sums + KERNEL * CHANNELS * DIM, grad_value_weight, channel, column, DIM, CHANNELS, DIM)
    store_row(sums + (KERNEL + 1) * CHANNELS * DIM, grad_gain, column, DIM)
    store_row(sums + ((KERNEL + 1) * CHANNELS + 1) * DIM, grad_gate_weight, column, DIM)


@torch.library.custom_op("residua::token_boundary", mutates_args=())
def token_op(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    taps: Tensor,
    gain: Tensor,
    gate_weight: Tensor,
    value_weight: Tensor,
    k_norm: str,
    eps: float,
    norm_eps: float,
    from_context: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = made(state)
    seq, channels, dim = state.shape[-3:]
    x, raw = token_rows(state, 2), token_rows(k, 1)
    if state.numel():
        tile = whole_row(channels, dim)
        chunk = chunk_length(state, x.shape[0], 3)
        with on_device_of(state):
            _forward[(triton.cdiv(seq, chunk), x.shape[0] // seq)](
                x,
                raw,
                *(t.contiguous() for t in (v, beta, taps, gain, gate_weight, value_weight)),
                *outputs,
                seq,
                chunk,
                *x.stride()[:2],
                raw.stride(0),
                eps,
                norm_eps,
                dim,
                channels,
                tile.rows,
                tile.block,
                taps.shape[0],
                k_norm,
                from_context,
                num_warps=num_warps(tile, 40),
            )
    return outputs


@token_op.register_fake
def _(state, k, v, beta, taps, gain, gate_weight, value_weight, k_norm, eps, norm_eps, from_context):
    return made(state)


@torch.library.custom_op("residua::token_boundary_backward", mutates_args=())
def token_backward_op(
    grad_written: Tensor,
    grad_context: Tensor,
    grad_gate: Tensor,
    grad_value: Tensor,
    state: Tensor,
    since: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    taps: Tensor,
    gain: Tensor,
    gate_weight: Tensor,
    value_weight: Tensor,
    error: Tensor,
    scale: Tensor,
    root: Tensor,
    k_norm: str,
    eps: float,
    from_context: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    seq, channels, dim = state.shape[-3:]
    kernel = taps.shape[0]
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (state, k, v, beta))
    g, x = token_rows(grad_written, 2), token_rows(state, 2)
    raw, on_context = token_rows(k, 1), token_rows(grad_context, 1)
    tile = whole_row(channels, dim)
    chunk = chunk_length(state, max(1, x.shape[0]), 1)
    grid = (triton.cdiv(seq, chunk), x.shape[0] // seq) if state.numel() else (0, 0)
    partial = torch.empty(grid[0] * grid[1], (kernel + 1) * channels + 2, dim, dtype=torch.float32, device=state.device)
    if state.numel():
        with on_device_of(state):
            _backward[grid](
                g,
                on_context,
                *(t.contiguous() for t in (grad_gate, grad_value)),
                x,
                since_kept(since),
                raw,
                *(t.contiguous() for t in (v, beta, taps, gain, gate_weight, value_weight, error, scale, root)),
                *grads,
                partial,
                seq,
                chunk,
                *g.stride()[:2],
                *x.stride()[:2],
                raw.stride(0),
                on_context.stride(0),
                eps,
                dim,
                channels,
                tile.rows,
                tile.block,
                kernel,
                k_norm,
                from_context,
                num_warps=num_warps(tile, 20),
            )
    sums = partial.sum(0)
    small = (sums[: kernel * channels].view(kernel, channels, dim), sums[-2], sums[-1], sums[kernel * channels : -2])
    # Copies: the results of an operator share no memory.
    return *grads, *(s.to(t.dtype, copy=True) for s, t in zip(small, (taps, gain, gate_weight, value_weight)))


@token_backward_op.register_fake
def _(
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
    k_norm,
    eps,
    from_context,
):
    inputs = (state, k, v, beta, taps, gain, gate_weight, value_weight)
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)


_boundary = differentiable(token_op, token_backward_op)


def token_boundary(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    taps: Tensor,
    gain: Tensor,
    gate_weight: Tensor,
    value_weight: Tensor,
    *,
    k_norm: KNorm | None = "rms",
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
    value_input: ValueInput = "stream",
    rebuild_every: int = 1,
) -> Boundary:
    """The write and the read as `residua.ops.write_read.token_boundary` computes them, with up to 16 value channels.

    Arguments as there, each in float32, bfloat16 or float16. What is read is the state before it is rounded to its
    dtype. Gradients have the dtypes of the inputs, and can be taken once. Kept for the backward pass: the inputs, of
    the states one of `rebuild_every` along a chain of writes, and value_channels + 2 float32 numbers for every token,
    not x_in.

    Other shapes and other options raise ValueError, other dtypes TypeError.
    """
    if state.dim() < 3:
        raise ValueError(f"state: expected (..., seq, value_channels, dim), got {tuple(state.shape)}")
    expect_kernel_write(state, k, v, beta, k_norm)
    expect_shape("taps", taps, (taps.shape[0], *state.shape[-2:]), "(kernel, value_channels, dim)")
    expect_following(state, gain, gate_weight, value_weight, value_input)
    expect_dtypes(taps=taps, gain=gain, gate_weight=gate_weight, value_weight=value_weight)
    if taps.shape[0] == 1:
        return channel_boundary(
            state,
            k,
            v,
            beta,
            taps[0],
            gain,
            gate_weight,
            value_weight,
            k_norm=k_norm,
            eps=eps,
            norm_eps=norm_eps,
            value_input=value_input,
            rebuild_every=rebuild_every,
        )
    return _boundary(
        state,
        k,
        v,
        beta,
        taps,
        gain,
        gate_weight,
        value_weight,
        k_norm or "none",
        fresh(eps),
        fresh(norm_eps),
        value_input == "context",
        rebuild_every,
    )
