"""The delta write in Triton: forward and backward each read the state once and write one of its size.

Where the state before a write was not kept (`ops.rebuild`), the backward kernel reads the one that was, and replays in
registers the writes that followed: for each of them a direction, a state / value_channels, is read once more.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.delta import KNorm
from residua.ops.kernels.tiling import expect_kernel_write, num_warps, on_device_of, tiling, token_rows
from residua.ops.precision import fresh
from residua.ops.rebuild import joined, nearest, opened

# One program is one token: its tiles stay in registers between the sums along k and the write, and nothing is shared.


@triton.jit
def inverse_norm(square, eps, DIM: tl.constexpr, K_NORM: tl.constexpr):
    """1 / m for the norm m that divides a raw direction with |k~|^2 = square."""
    if K_NORM == "rms":
        scale = 1.0 / tl.sqrt(square + eps * eps)
    elif K_NORM == "rms_d":
        scale = 1.0 / tl.sqrt(square + DIM * eps * eps)
    elif K_NORM == "add":
        scale = 1.0 / (tl.sqrt(square) + eps)
    elif K_NORM == "clamp":
        scale = 1.0 / tl.maximum(tl.sqrt(square), eps)
    else:
        scale = square * 0.0 + 1.0
    return scale


@triton.jit
def norm_ratio(scale, eps, K_NORM: tl.constexpr):
    """(m / n) dm/dn, from 1 / m, for the derivative of k~ / m."""
    if K_NORM == "add":
        norm = 1.0 / scale - eps
        ratio = tl.where(norm > 0.0, 1.0 / (scale * tl.where(norm > 0.0, norm, 1.0)), 0.0)
    elif K_NORM == "clamp":
        # A little below 1 / eps, so that rounding cannot take a norm held at eps for a longer one.
        ratio = tl.where(scale < 0.999999 / eps, 1.0, 0.0)
    elif K_NORM == "none":
        ratio = scale * 0.0
    else:
        ratio = scale * 0.0 + 1.0
    return ratio


@triton.jit
def load_tile(start, channel, column, stride, CHANNELS: tl.constexpr, width):
    """The (rows, block) tile of one token in float32, with zeros outside of (CHANNELS, width)."""
    inside = (channel < CHANNELS)[:, None] & (column < width)[None, :]
    return tl.load(start + channel[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(start, tile, channel, column, stride, CHANNELS: tl.constexpr, width):
    inside = (channel < CHANNELS)[:, None] & (column < width)[None, :]
    tl.store(start + channel[:, None] * stride + column[None, :], tile.to(start.dtype.element_ty), mask=inside)


@triton.jit
def load_row(start, column, width):
    return tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)


@triton.jit
def store_row(start, row, column, width):
    tl.store(start + column, row.to(start.dtype.element_ty), mask=column < width)


@triton.jit
def load_channels(start, channel, count):
    return tl.load(start + channel, mask=channel < count, other=0.0).to(tl.float32)


@triton.jit
def store_channels(start, numbers, channel, count):
    tl.store(start + channel, numbers.to(start.dtype.element_ty), mask=channel < count)


@triton.jit
def stepped(x, step, direction):
    """X' = X + k step^T: one expression for every kernel that makes a state, so that all make the same bits.

    Fused by name: a compiler that may choose could fuse product and sum in one kernel and not in another.
    """
    return tl.fma(step[:, None], direction[None, :], x)


@triton.jit
def load_state(start, since, token, stride, channel_stride, channel, column, CHANNELS: tl.constexpr, width, count):
    """The tile of a state of which an earlier one was kept, at `start`: the writes `since` then (`since_kept`) are
    replayed, and each state is rounded as the one that was not kept. (width, count): the masks, (DIM, CHANNELS) or 0.
    """
    ks, scales, betas, errors, k_strides = since
    x = load_tile(start + token * stride, channel, column, channel_stride, CHANNELS, width)
    for i in tl.static_range(len(ks)):
        direction = load_row(ks[i] + token * k_strides[i], column, width)
        direction = tl.load(scales[i] + token, mask=count > 0, other=0.0) * direction
        rest = load_channels(errors[i] + token * CHANNELS, channel, count)
        step = tl.load(betas[i] + token, mask=count > 0, other=0.0).to(tl.float32) * rest
        x = stepped(x, step, direction).to(start.dtype.element_ty).to(tl.float32)
    return x


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
    wanted = load_channels(v + token * CHANNELS, channel, CHANNELS)
    rest = wanted - inverse * tl.sum(products, 1)
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
    wanted = load_channels(v + token * CHANNELS, channel, CHANNELS)
    gate = tl.load(beta + token).to(tl.float32)
    erased = gate * readout
    step = gate * rest
    # k . dk, without the vector dk: k^T X is v - r.
    along = tl.sum(readout * step - erased * (wanted - rest), 0)
    ratio = norm_ratio(inverse, eps, K_NORM)
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        back = tl.sum(gs[i] * step[:, None] - xs[i] * erased[:, None], 0)
        store_row(grad_k + token * DIM, inverse * (back - ratio * along * ks[i]), column, DIM)
        out = gs[i] - erased[:, None] * ks[i][None, :]
        store_tile(grad_state + token * CHANNELS * DIM, out, channel, column, DIM, CHANNELS, DIM)
    store_channels(grad_v + token * CHANNELS, erased, channel, CHANNELS)
    tl.store(grad_beta + token, tl.sum(readout * rest, 0).to(grad_beta.dtype.element_ty))


@triton.jit
def _replay(
    state,
    since,
    written,
    state_stride,
    channel_stride,
    DIM: tl.constexpr,
    CHANNELS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, ROWS)
    for i in tl.static_range(BLOCKS):
        column = i * BLOCK + tl.arange(0, BLOCK)
        x = load_state(state, since, token, state_stride, channel_stride, channel, column, CHANNELS, DIM, CHANNELS)
        store_tile(written + token * CHANNELS * DIM, x, channel, column, DIM, CHANNELS, DIM)


def since_kept(since: Sequence[Tensor]) -> tuple:
    """Writes that follow a state that was kept, k, 1 / m, beta and r of each in turn, as `load_state` takes them."""
    ks = tuple(token_rows(k, 1) for k in since[::4])
    numbers = (tuple(x.contiguous() for x in since[i::4]) for i in (1, 2, 3))
    return ks, *numbers, tuple(k.stride(0) for k in ks)


@torch.library.custom_op("residua::delta_write", mutates_args=())
def write_op(
    state: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_norm: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The written state, the error v - k^T X: (..., value_channels) and the scale 1 / m of k: (...,), in float32."""
    *leading, channels, dim = state.shape
    written = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    error = torch.empty(*leading, channels, dtype=torch.float32, device=state.device)
    scale = torch.empty(leading, dtype=torch.float32, device=state.device)
    x, raw = token_rows(state, 2), token_rows(k, 1)
    tile = tiling(channels, dim)
    if written.numel():
        with on_device_of(state):
            _forward[(x.shape[0],)](
                x,
                raw,
                v.contiguous(),
                beta.contiguous(),
                written,
                error,
                scale,
                x.stride(0),
                x.stride(1),
                raw.stride(0),
                eps,
                dim,
                channels,
                *tile,
                k_norm,
                num_warps=num_warps(tile, 120),
            )
    return written, error, scale


@write_op.register_fake
def _(state, k, v, beta, k_norm, eps):
    *leading, channels, _ = state.shape
    return (
        torch.empty(state.shape, dtype=state.dtype, device=state.device),
        torch.empty(*leading, channels, dtype=torch.float32, device=state.device),
        torch.empty(leading, dtype=torch.float32, device=state.device),
    )


@torch.library.custom_op("residua::delta_write_backward", mutates_args=())
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
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *_, channels, dim = state.shape
    outputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (state, k, v, beta))
    g, x, raw = token_rows(grad, 2), token_rows(state, 2), token_rows(k, 1)
    tile = tiling(channels, dim)
    if state.numel():
        with on_device_of(state):
            _backward[(x.shape[0],)](
                g,
                x,
                since_kept(since),
                raw,
                v.contiguous(),
                beta.contiguous(),
                error.contiguous(),
                scale.contiguous(),
                *outputs,
                g.stride(0),
                g.stride(1),
                x.stride(0),
                x.stride(1),
                raw.stride(0),
                eps,
                dim,
                channels,
                *tile,
                k_norm,
                num_warps=num_warps(tile, 120),
            )
    return outputs


@write_backward_op.register_fake
def _(grad, state, since, k, v, beta, error, scale, k_norm, eps):
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (state, k, v, beta))


@torch.library.custom_op("residua::delta_replay", mutates_args=())
def replay_op(state: Tensor, since: Sequence[Tensor]) -> Tensor:
    """What writes made of a state, to the last bit, from the directions, scales, betas and errors of `since_kept`."""
    channels, dim = state.shape[-2:]
    written = torch.empty(state.shape, dtype=state.dtype, device=state.device)
    x = token_rows(state, 2)
    tile = tiling(channels, dim)
    if written.numel():
        with on_device_of(state):
            _replay[(x.shape[0],)](
                x,
                since_kept(since),
                written,
                *x.stride()[:2],
                dim,
                channels,
                *tile,
                num_warps=num_warps(tile, 120),
            )
    return written


@replay_op.register_fake
def _(state, since):
    return torch.empty(state.shape, dtype=state.dtype, device=state.device)


# How many writes a kernel replays in a row. Chains of states that are not kept may be longer: then one of them is made.
REACH = 7


def keep(ctx: Any, state: Tensor, rebuild_every: int, *others: Tensor) -> None:
    """Save what the backward pass of a kernel that writes needs: X, unless it can be made again, k, 1 / m, beta, r, and
    what else it wants.
    """
    ctx.save_for_backward(joined(ctx, state, rebuild_every, _again), *others)


def kept(ctx: Any) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
    """For its backward pass: the nearest state, the writes that followed as in `since_kept`, what else was saved.

    Raises RuntimeError where the gradient is to be differentiated itself: the kernels have no second derivatives.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("kernels have first derivatives only: use implementation='reference' to differentiate twice")
    ctx.rebuilt = None  # all who wanted what this write made have had it
    state, between = nearest(ctx, _again, REACH)
    _, *others = opened(ctx)
    ctx.opened = None
    return state, _steps(between), tuple(others)


def _steps(nodes: list[Any]) -> list[Tensor]:
    return [x for node in nodes for x in opened(node)[1:5]]


def _again(node: Any) -> Tensor:
    """What a write made, once more."""
    state, between = nearest(node, _again, REACH)
    return replay_op(state, _steps([*between, node]))


class _DeltaWrite(torch.autograd.Function):
    @staticmethod
    def forward(ctx, state, k, v, beta, k_norm, eps, rebuild_every):
        written, error, scale = write_op(state, k, v, beta, k_norm, eps)
        keep(ctx, state, rebuild_every, k, scale, beta, error, v)
        ctx.k_norm, ctx.eps = k_norm, eps
        return written

    @staticmethod
    def backward(ctx, grad: Tensor):
        state, since, (k, scale, beta, error, v) = kept(ctx)
        grads = write_backward_op(grad, state, since, k, v, beta, error, scale, ctx.k_norm, ctx.eps)
        return *grads, None, None, None


def delta_write(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    *,
    k_norm: KNorm | None = None,
    eps: float = 1e-5,
    rebuild_every: int = 1,
) -> Tensor:
    """X' = X + beta k (v^T - k^T X) as `residua.ops.delta_write` computes it, with up to 16 value channels.

    state: (..., value_channels, dim), k: (..., dim), v: (..., value_channels), beta: (...,), each in float32, bfloat16
    or float16. `k_norm` is the norm of `unit` that divides the raw direction k, None takes k as it is. Returns the
    dtype of `state`; gradients have the dtypes of the inputs, and can be taken once. Kept for the backward pass: the
    inputs, of the states one of `rebuild_every` along a chain of writes, and value_channels + 1 float32 numbers for
    every token.

    Other shapes and other norms raise ValueError, other dtypes TypeError.
    """
    expect_kernel_write(state, k, v, beta, k_norm)
    if not torch.is_grad_enabled():
        return write_op(state, k, v, beta, k_norm or "none", eps)[0]
    return _DeltaWrite.apply(state, k, v, beta, k_norm or "none", fresh(eps), rebuild_every)
