"""The boundary between two sublayers in Triton: forward and backward read the state once and write one of its size.

Forward, one program is one token. Backward, a few programs for each multiprocessor walk over the tokens and sum the
gradients of the small parameters in registers, one partial sum for each program; the partial sums are added afterwards:
the same order, hence the same bits, every time. The small parameters come from the nearest cache again for every token.
A state that was not kept is replayed in registers, as in the backward pass of the delta write.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.delta import KNorm
from residua.ops.kernels.delta import (
    inverse_norm,
    keep,
    kept,
    load_channels,
    load_row,
    load_state,
    load_tile,
    norm_ratio,
    since_kept,
    stepped,
    store_channels,
    store_row,
    store_tile,
)
from residua.ops.kernels.tiling import (
    expect_dtypes,
    expect_kernel_write,
    num_warps,
    on_device_of,
    programs,
    tiling,
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
        seen = scaled if FROM_CONTEXT else read
        valued += load_tile(value_weight, channel, column, DIM, CHANNELS, DIM) * seen[None, :]
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
def through_norm(on_context, normed, gains, inverse_root, DIM: tl.constexpr):
    """The gradient of x_in from that of c = gain n, n = x_in / rms."""
    on_normed = gains * on_context
    return inverse_root * (on_normed - normed * (tl.sum(on_normed * normed, 0) / DIM))


@triton.jit
def through_write(g, x, direction, gate, rest, wanted, inverse, eps, K_NORM: tl.constexpr):
    """The gradients of X, k~, v and beta from that of X', for one token in one block."""
    readout = tl.sum(g * direction[None, :], 1)
    erased = gate * readout
    step = gate * rest
    # k . dk, without the vector dk: k^T X is v - r.
    along = tl.sum(readout * step - erased * (wanted - rest), 0)
    back = tl.sum(g * step[:, None] - x * erased[:, None], 0)
    back = inverse * (back - norm_ratio(inverse, eps, K_NORM) * along * direction)
    return g - erased[:, None] * direction[None, :], back, erased, tl.sum(readout * rest, 0)


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
        wanted = load_channels(v + token * CHANNELS, channel, CHANNELS)
        step = gate * rest
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, DIM, CHANNELS)
        g = load_tile(grad_written + token * grad_stride, channel, column, grad_channel_stride, CHANNELS, DIM)
        direction = inverse * load_row(k + token * k_stride, column, DIM)

        # The read once more, and back through the products and the norm: n = x_in / rms, c = gain n.
        mixing = load_tile(weights, channel, column, DIM, CHANNELS, DIM)
        after = stepped(x, step, direction)
        read = tl.sum(mixing * after, 0)
        normed = inverse_root * read
        gains = load_row(gain, column, DIM)
        on_context = load_row(grad_context + token * context_stride, column, DIM)
        on_context += on_gate * load_row(gate_weight, column, DIM)
        value_map = load_tile(value_weight, channel, column, DIM, CHANNELS, DIM)
        on_seen = tl.sum(on_value[:, None] * value_map, 0)
        if FROM_CONTEXT:
            on_context += on_seen
        on_read = through_norm(on_context, normed, gains, inverse_root, DIM)
        if not FROM_CONTEXT:
            on_read += on_seen
        seen = gains * normed if FROM_CONTEXT else read
        grad_weights += on_read[None, :] * after
        grad_value_weight += on_value[:, None] * seen[None, :]
        grad_gain += on_context * normed
        grad_gate_weight += on_gate * (gains * normed)

        # Back through the write, as in the delta write alone.
        g += mixing * on_read[None, :]
        out, back, erased, on_beta = through_write(g, x, direction, gate, rest, wanted, inverse, eps, K_NORM)
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


@torch.library.custom_op("residua::channel_boundary", mutates_args=())
def channel_op(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
    gain: Tensor,
    gate_weight: Tensor,
    value_weight: Tensor,
    k_norm: str,
    eps: float,
    norm_eps: float,
    from_context: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = made(state)
    x, raw = token_rows(state, 2), token_rows(k, 1)
    tile = tiling(*state.shape[-2:])
    if state.numel():
        with on_device_of(state):
            _forward[(x.shape[0],)](
                x,
                raw,
                *(t.contiguous() for t in (v, beta, weights, gain, gate_weight, value_weight)),
                *outputs,
                *x.stride()[:2],
                raw.stride(0),
                eps,
                norm_eps,
                state.shape[-1],
                state.shape[-2],
                *tile,
                k_norm,
                from_context,
                num_warps=num_warps(tile, 120),
            )
    return outputs


def made(state: Tensor) -> tuple[Tensor, ...]:
    """Room for the written state, context, gate and value, and for what the backward pass needs: r, 1 / m, 1 / rms."""
    *leading, channels, dim = state.shape
    narrow, wide = {"dtype": state.dtype, "device": state.device}, {"dtype": torch.float32, "device": state.device}
    return (
        torch.empty(state.shape, **narrow),
        torch.empty(*leading, dim, **narrow),
        torch.empty(leading, **wide),
        torch.empty(*leading, channels, **wide),
        torch.empty(*leading, channels, **wide),
        torch.empty(leading, **wide),
        torch.empty(leading, **wide),
    )


@channel_op.register_fake
def _(state, k, v, beta, weights, gain, gate_weight, value_weight, k_norm, eps, norm_eps, from_context):
    return made(state)


@torch.library.custom_op("residua::channel_boundary_backward", mutates_args=())
def channel_backward_op(
    grad_written: Tensor,
    grad_context: Tensor,
    grad_gate: Tensor,
    grad_value: Tensor,
    state: Tensor,
    since: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
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
    channels, dim = state.shape[-2:]
    grads = tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (state, k, v, beta))
    g, x = token_rows(grad_written, 2), token_rows(state, 2)
    raw, on_context = token_rows(k, 1), token_rows(grad_context, 1)
    # In one block a thread holds every channel of its columns, and the sums over channels need no other thread.
    tile = whole_row(channels, dim)
    warps = num_warps(tile, 40)
    grid = programs(state, x.shape[0], max(1, 8 // warps)) if state.numel() else 0
    partial = torch.empty(grid, 2 * channels + 2, dim, dtype=torch.float32, device=state.device)
    if grid:
        with on_device_of(state):
            _backward[(grid,)](
                g,
                on_context,
                *(t.contiguous() for t in (grad_gate, grad_value)),
                x,
                since_kept(since),
                raw,
                *(t.contiguous() for t in (v, beta, weights, gain, gate_weight, value_weight, error, scale, root)),
                *grads,
                partial,
                x.shape[0],
                *g.stride()[:2],
                *x.stride()[:2],
                raw.stride(0),
                on_context.stride(0),
                eps,
                dim,
                channels,
                tile.rows,
                tile.block,
                k_norm,
                from_context,
                num_warps=warps,
            )
    sums = partial.sum(0)
    small = (sums[:channels], sums[-2], sums[-1], sums[channels:-2])
    # Copies: the results of an operator share no memory.
    return *grads, *(s.to(t.dtype, copy=True) for s, t in zip(small, (weights, gain, gate_weight, value_weight)))


@channel_backward_op.register_fake
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
    weights,
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
    inputs = (state, k, v, beta, weights, gain, gate_weight, value_weight)
    return tuple(torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in inputs)


def differentiable(op: Callable, backward_op: Callable) -> Callable[..., Boundary]:
    """A boundary with a gradient from its two operators: takes the arguments of `op`, then rebuild_every."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            state, k, v, beta, *parameters, k_norm, eps, _, from_context, rebuild_every = inputs
            *results, error, scale, root = op(*inputs[:-1])
            keep(ctx, state, rebuild_every, k, scale, beta, error, v, root, *parameters)
            ctx.options = k_norm, eps, from_context
            return tuple(results)

        @staticmethod
        def backward(ctx, *grads: Tensor):
            state, since, (k, scale, beta, error, v, root, *parameters) = kept(ctx)
            grads = backward_op(*grads, state, since, k, v, beta, *parameters, error, scale, root, *ctx.options)
            return *grads, None, None, None, None, None

    def boundary(*inputs: Any) -> Boundary:
        if not torch.is_grad_enabled():
            return Boundary(*op(*inputs[:-1])[:4])
        return Boundary(*Function.apply(*inputs))

    return boundary


_boundary = differentiable(channel_op, channel_backward_op)


def channel_boundary(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
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
    """The write and the read as `residua.ops.write_read.channel_boundary` computes them, with up to 16 value channels.

    Arguments as there, each in float32, bfloat16 or float16. What is read is the state before it is rounded to its
    dtype. Gradients have the dtypes of the inputs, and can be taken once. Kept for the backward pass: the inputs, of
    the states one of `rebuild_every` along a chain of writes, and value_channels + 2 float32 numbers for every token,
    not x_in.

    Other shapes and other options raise ValueError, other dtypes TypeError.
    """
    expect_kernel_write(state, k, v, beta, k_norm)
    expect_shape("weights", weights, state.shape[-2:], "(value_channels, dim)")
    expect_following(state, gain, gate_weight, value_weight, value_input)
    expect_dtypes(weights=weights, gain=gain, gate_weight=gate_weight, value_weight=value_weight)
    return _boundary(
        state,
        k,
        v,
        beta,
        weights,
        gain,
        gate_weight,
        value_weight,
        k_norm or "none",
        fresh(eps),
        fresh(norm_eps),
        value_input == "context",
        rebuild_every,
    )
