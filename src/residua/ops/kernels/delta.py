"""The delta write in Triton: forward and backward each read the state once and write one tensor of its size.

If the state before a write was not kept, the backward kernel loads the nearest kept one and replays the writes since
in registers: each reads one more direction, 1 / value_channels of a state.
"""

from collections.abc import Sequence
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
    runs,
    tiling,
    token_rows,
)
from residua.ops.kernels.replay import keep, kept, since_kept
from residua.ops.kernels.tiles import (
    inverse_norm,
    load_channels,
    load_row,
    load_state,
    load_tile,
    norm_ratio,
    stepped,
    store_channels,
    store_row,
    store_tile,
)
from residua.ops.precision import new_symbol

# One program is one token: its tiles stay in registers between the sums along k and the write, and nothing is shared.


@triton.jit
def _forward(
    state,
    k,
    v,
    beta,
    written,
    error,
    scale,
    state_stride,
    channel_stride,
    k_stride,
    eps,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    K_NORM: tl.constexpr,
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
    target = load_channels(v + token * CHANNELS, channel, CHANNELS)
    rest = target - inverse * tl.sum(products, 1)
    step = tl.load(beta + token).to(tl.float32) * rest
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        after = stepped(xs[i], step, inverse * ks[i])
        store_tile(written + token * CHANNELS * DIM, after, channel, column, DIM, CHANNELS, DIM)
    store_channels(error + token * CHANNELS, rest, channel, CHANNELS)
    tl.store(scale + token, inverse)


@triton.jit
def _backward(
    grad,
    state,
    since,
    k,
    v,
    beta,
    error,
    scale,
    grad_state,
    grad_k,
    grad_v,
    grad_beta,
    grad_stride,
    grad_channel_stride,
    state_stride,
    channel_stride,
    k_stride,
    eps,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    K_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, ROWS)
    inverse = tl.load(scale + token)
    products = tl.zeros([ROWS, BLOCK], tl.float32)
    gs = ()
    xs = ()
    ks = ()
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, DIM, CHANNELS)
        g = load_tile(grad + token * grad_stride, channel, column, grad_channel_stride, CHANNELS, DIM)
        direction = inverse * load_row(k + token * k_stride, column, DIM)
        products += g * direction[None, :]
        gs = gs + (g,)
        xs = xs + (x,)
        ks = ks + (direction,)
    readout = tl.sum(products, 1)
    rest = load_channels(error + token * CHANNELS, channel, CHANNELS)
    target = load_channels(v + token * CHANNELS, channel, CHANNELS)
    gate = tl.load(beta + token).to(tl.float32)
    erased = gate * readout
    step = gate * rest
    # k . dk, without the vector dk: k^T X is v - r.
    along = tl.sum(readout * step - erased * (target - rest), 0)
    ratio = norm_ratio(inverse, eps, K_NORM)
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        back = tl.sum(gs[i] * step[:, None] - xs[i] * erased[:, None], 0)
        store_row(grad_k + token * DIM, inverse * (back - ratio * along * ks[i]), column, DIM)
        out = gs[i] - erased[:, None] * ks[i][None, :]
        store_tile(grad_state + token * CHANNELS * DIM, out, channel, column, DIM, CHANNELS, DIM)
    store_channels(grad_v + token * CHANNELS, erased, channel, CHANNELS)
    tl.store(grad_beta + token, tl.sum(readout * rest, 0).to(grad_beta.dtype.element_ty))


@operator("delta_write")
def write_op(
    state: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_norm: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the written state, and in float32 r = v - k^T X: (..., value_channels) and 1 / m, k's scale: (...,)."""
    *leading, channels, dim = state.shape
    written = empty(state)
    error, scale = empty(state, (*leading, channels), torch.float32), empty(state, leading, torch.float32)
    if runs(state):
        x, raw, tile = token_rows(state, 2), token_rows(k, 1), tiling(channels, dim)
        strides = (*x.stride()[:2], raw.stride(0))
        arguments = (x, raw, *packed(v, beta), written, error, scale, *strides, eps, dim, channels, *tile, k_norm)
        launch(_forward, (x.shape[0],), *arguments, num_warps=num_warps(tile, 120))
    return written, error, scale


@operator("delta_write_backward")
def write_backward_op(
    grad: Tensor,
    state: Tensor,
    since: Sequence[Tensor],
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    error: Tensor,
    scale: Tensor,
    k_norm: str,
    eps: float,
) -> list[Tensor]:
    """Return the gradients of state, k, v and beta."""
    grads = [empty(x) for x in (state, k, v, beta)]
    if runs(state):
        channels, dim = state.shape[-2:]
        g, x, raw, tile = token_rows(grad, 2), token_rows(state, 2), token_rows(k, 1), tiling(channels, dim)
        inputs = (g, x, since_kept(since), raw, *packed(v, beta, error, scale))
        strides = (*g.stride()[:2], *x.stride()[:2], raw.stride(0))
        arguments = (*inputs, *grads, *strides, eps, dim, channels, *tile, k_norm)
        launch(_backward, (x.shape[0],), *arguments, num_warps=num_warps(tile, 120))
    return grads


class _DeltaWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, state, k, v, beta, k_norm, eps, recompute_every):
        written, error, scale = write_op(state, k, v, beta, k_norm, eps)
        keep(ctx, state, recompute_every, k, scale, beta, error, v)
        ctx.options = k_norm, eps
        return written

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        state, since, (k, scale, beta, error, v) = kept(ctx)
        grads = write_backward_op(grad, state, since, k, v, beta, error, scale, *ctx.options)
        return *grads, None, None, None


def delta_write(
    state: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_norm: str | None, eps: float, recompute_every: int
) -> Tensor:
    """Compute `ops.delta_write`, with one derivative, for 1 to 16 value channels.

    Every tensor is in float32, bfloat16 or float16, and has a gradient in its own dtype. Kept for the backward pass:
    the inputs, one state in `recompute_every` along a chain of writes, and value_channels + 1 float32 numbers per
    token. Raises ValueError for other numbers of channels, TypeError for other dtypes.
    """
    expect_taken("value channels", state.shape[-2], state=state, k=k, v=v, beta=beta)
    if not torch.is_grad_enabled():
        return write_op(state, k, v, beta, k_norm or "none", eps)[0]
    return _DeltaWrite.apply(state, k, v, beta, k_norm or "none", new_symbol(eps), recompute_every)
