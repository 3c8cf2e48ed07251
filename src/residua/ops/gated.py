"""The delta write with separate gates for erasing and for writing, our variant."""

from typing import Any

import torch
from torch import Tensor

from residua.ops.norm import mean_square
from residua.ops.precision import dot, new_symbol, promote
from residua.ops.recompute import release, save_state
from residua.ops.shapes import expand_leading, expect_groups, expect_shape
from residua.ops.transforms import Function, applied


def gated_delta(
    state: Tensor,
    y: Tensor,
    erase: Tensor | None,
    write: Tensor | None = None,
    *,
    eps: float = 1e-5,
    recompute_every: int = 1,
) -> Tensor:
    """X' = X + w h - e k k^T X, k = h / sqrt(|h|^2 + eps^2): write h, and erase the share e of X along it.

    A delta write (arXiv 2601.00417) along the direction of the update, with separate gates for erasing and for
    writing; k is the `rms` form of `unit`. e = 0 and w = 1 add h to every channel, to the last bit. e acts on the
    component of a channel along h: e = 1 replaces it, e = 2 reflects it, e < 0 enlarges it.
    state X: (..., value_channels, dim), y = h: (..., dim); erase e and write w: (..., value_channels, groups), whose
    leading axes may be 1 or missing, and value_channels 1 if all channels share a gate. The features are cut into
    `groups` equal groups, each with its own k and gates. For a state (..., dim) the gates are (..., groups). write=None
    means w = 1, and erase=None means e = 0. Computed in at least float32; returns the shape and dtype of the state. The
    backward pass keeps every `recompute_every`-th X, as in `delta_write`, and h. Raises ValueError for other shapes.
    """
    single = state.dim() == y.dim()
    *leading, channels, dim = (*state.shape[:-1], 1, state.shape[-1]) if single else state.shape
    expect_shape("y", y, (*leading, dim), "the shape of the state" if single else "(..., dim)")
    if erase is not None:
        erase = _per_channel("erase", erase, leading, channels, dim, single=single)
    if write is not None:
        write = _per_channel("write", write, leading, channels, dim, single=single)
        if erase is not None:
            expect_shape("write", write[..., 0, :], erase[..., 0, :].shape, "(..., groups) of erase")
    return applied(_GatedDelta, state, y, erase, write, new_symbol(eps), recompute_every)


def _per_channel(name: str, gate: Tensor, leading: list[int], channels: int, dim: int, *, single: bool) -> Tensor:
    """Return the gate of a state with `leading` axes as (..., channels or 1, groups)."""
    axes = "(..., groups)" if single else f"(..., {channels} or 1, groups)"
    expect_groups(name, gate, dim, axes)
    gate = gate.unsqueeze(-2) if single else gate
    sizes = gate.shape[-2:]
    if len(sizes) < 2 or sizes[0] not in (1, channels):
        raise ValueError(f"{name} must be {axes}, got {tuple(gate.shape)}")
    return expand_leading(name, gate, leading, sizes, "(..., groups)" if single else "(..., channels, groups)")


def inverse_length(y: Tensor, groups: int, *, eps: float = 1e-5) -> Tensor:
    """1 / sqrt(|h|^2 + eps^2) for each group of features: the factor k / h of `gated_delta`.

    y = h: (..., dim). Returns (..., groups) in at least float32.
    """
    parts = y.unflatten(-1, (groups, -1))
    return torch.rsqrt(parts.shape[-1] * mean_square(parts).squeeze(-1) + eps**2)


class _GatedDelta(Function):
    """For each channel x and group, with q = |h|^2 + eps^2, s = <h, x>, a = w - e s / q and g the gradient of x + a h:

    dx = g - (e <g, h> / q) h,   dh = a g - (e <g, h> / q) (x - (2 s / q) h),   de = -s <g, h> / q,   dw = <g, h>

    where dh is summed over the channels. Keeps only the first of every `recompute_every` states (`ops.recompute`).
    """

    @staticmethod
    def plain(state, y, erase, write, eps, recompute_every):
        return _step(state, y, erase, write, *_products(state, y, erase, eps))

    @staticmethod
    def forward(ctx: Any, state, y, erase, write, eps, recompute_every):
        along, squared = _products(state, y, erase, eps)
        ctx.eps, ctx.erases = eps, erase is not None
        # If nothing is erased, only a replay needs the state.
        before = state if ctx.erases or recompute_every > 1 else None
        save_state(ctx, before, y, erase, write, along, squared, replay=_step, every=recompute_every)
        return _step(state, y, erase, write, along, squared)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        state, y, erase, write, along, squared = release(ctx, [ctx.erases])
        grad_x, grad_erase = grad, None
        g, h = _wide_parts(grad, y, erase, write)
        received = dot(g, h)
        scale = None if write is None else write.to(h.dtype)
        if erase is not None:
            if torch.is_grad_enabled():  # second derivatives need these as functions of the state and y
                along, squared = _products(state, y, erase, ctx.eps)
            x, e = _wide_parts(state, y, erase, write)[0], erase.to(h.dtype)
            ratio = along / squared
            pull, scale = e * received / squared, (1 if scale is None else scale) - e * ratio
            grad_x = torch.addcmul(g, pull.unsqueeze(-1), h, value=-1).reshape(grad.shape).to(grad.dtype)
            grad_erase = _like(erase, -ratio * received)

        def through(j: int) -> Tensor:
            term = g[..., j, :, :] if scale is None else _of(scale, j) * g[..., j, :, :]
            if erase is None:
                return term
            return term - _of(pull, j) * (x[..., j, :, :] - 2 * _of(ratio, j) * h[..., 0, :, :])

        grad_h = through(0)
        for j in range(1, g.shape[-3]):
            # One channel at a time: a sum over channels would write all its products to memory first.
            grad_h = grad_h + through(j)
        return (
            grad_x,
            grad_h.reshape(y.shape).to(y.dtype),
            grad_erase,
            None if write is None else _like(write, received),
            None,
            None,
        )


def _wide_parts(state: Tensor, y: Tensor, *gates: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return X as (..., channels, groups, dim / groups) and h as (..., 1, groups, dim / groups), at least float32."""
    present = [gate for gate in gates if gate is not None]
    groups = present[0].shape[-1] if present else 1
    x, h, *_ = promote(state, y, *present)
    # `unflatten` cannot be used here: it has no batching rule for vmap over gradients.
    channels = 1 if state.dim() == y.dim() else state.shape[-2]
    size = (groups, y.shape[-1] // groups)
    return x.reshape(*y.shape[:-1], channels, *size), h.reshape(*y.shape[:-1], 1, *size)


def _products(state: Tensor, y: Tensor, erase: Tensor | None, eps: float) -> tuple[Tensor | None, Tensor | None]:
    """Return s = <h, x> and q = |h|^2 + eps^2 of each channel and group; None if nothing is erased."""
    if erase is None:
        return None, None
    x, h = _wide_parts(state, y, erase)
    return dot(h, x), dot(h, h) + eps**2


def _step(state, y, erase, write, along, squared) -> Tensor:
    """Return X', in the forward pass and in every replay."""
    x, h = _wide_parts(state, y, erase, write)
    written = x + (h if write is None else write.to(h.dtype).unsqueeze(-1) * h)
    if erase is not None:
        written = torch.addcmul(written, (erase.to(h.dtype) * along / squared).unsqueeze(-1), h, value=-1)
    return written.reshape(state.shape).to(state.dtype)


def _of(x: Tensor, channel: int) -> Tensor:
    """Return the gate of one channel, (..., groups, 1), from (..., channels or 1, groups)."""
    return x[..., channel if x.shape[-2] > 1 else 0, :].unsqueeze(-1)


def _like(gate: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a gate, summed over the channels if they share it."""
    shared = gate.shape[-2] < grad.shape[-2]
    return (grad.sum(-2, keepdim=True) if shared else grad).to(gate.dtype)
