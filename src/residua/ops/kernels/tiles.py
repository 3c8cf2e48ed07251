"""Load, store and compute tiles of one token, for several kernels. All arithmetic is in float32."""

import triton
import triton.language as tl


@triton.jit
def load_tile(start, channel, column, stride, CHANNELS: tl.constexpr, width):
    """Load the (rows, block) tile of one token in float32, with zeros outside (CHANNELS, width)."""
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
def inverse_norm(square, eps, DIM: tl.constexpr, K_NORM: tl.constexpr):
    """Return 1 / m for the norm m of a raw direction with |k~|^2 = square, see `ops.unit`."""
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
    """Return (m / n) dm/dn, from 1 / m, for the derivative of k~ / m."""
    if K_NORM == "add":
        norm = 1.0 / scale - eps
        ratio = tl.where(norm > 0.0, 1.0 / (scale * tl.where(norm > 0.0, norm, 1.0)), 0.0)
    elif K_NORM == "clamp":
        # A little below 1 / eps, so that rounding cannot mistake a norm clamped to eps for a longer one.
        ratio = tl.where(scale < 0.999999 / eps, 1.0, 0.0)
    elif K_NORM == "none":
        ratio = scale * 0.0
    else:
        ratio = scale * 0.0 + 1.0
    return ratio


@triton.jit
def stepped(x, step, direction):
    """Return X' = X + k step^T. Every kernel that makes a state calls this, so that all make the same bits.

    The fused multiply-add is explicit: left to the compiler, one kernel could fuse and another not.
    """
    return tl.fma(step[:, None], direction[None, :], x)


@triton.jit
def load_state(start, since, token, stride, channel_stride, channel, column, CHANNELS: tl.constexpr, width, count):
    """Load the nearest kept state, at `start`, and replay the writes `since` then (`replay.since_kept`).

    Each state on the way is rounded to its dtype, as it was when it was written. width and count are DIM and CHANNELS,
    or 0 to load nothing.
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
def through_norm(on_context, normed, gains, inverse_root, DIM: tl.constexpr):
    """Return the gradient of x_in from the gradient of c = gain n, n = x_in / rms."""
    on_normed = gains * on_context
    return inverse_root * (on_normed - normed * (tl.sum(on_normed * normed, 0) / DIM))


@triton.jit
def through_write(g, x, direction, gate, rest, target, inverse, eps, K_NORM: tl.constexpr):
    """Return the gradients of X, k~, v and beta from the gradient of X', for one token in one block."""
    readout = tl.sum(g * direction[None, :], 1)
    erased = gate * readout
    step = gate * rest
    # k . dk, without the vector dk: k^T X is v - r.
    along = tl.sum(readout * step - erased * (target - rest), 0)
    back = tl.sum(g * step[:, None] - x * erased[:, None], 0)
    back = inverse * (back - norm_ratio(inverse, eps, K_NORM) * along * direction)
    return g - erased[:, None] * direction[None, :], back, erased, tl.sum(readout * rest, 0)
