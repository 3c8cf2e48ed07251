"""Replay the writes since the nearest kept state, in registers or into memory (`ops.recompute`), to the last bit."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from residua.ops.kernels.launch import empty, launch, num_warps, operator, packed, runs, tiling, token_rows
from residua.ops.kernels.tiles import load_state, store_tile
from residua.ops.recompute import PASSES_THROUGH, nearest, read_once, save_state

REACH = 7  # writes that a kernel replays; in a longer chain of states that were not kept, one of them is made first


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
    """Order k, 1 / m, beta and r of each write since a kept state, in turn, as `tiles.load_state` takes them."""
    ks = tuple(token_rows(k, 1) for k in since[::4])
    return ks, *(tuple(packed(*since[i::4])) for i in (1, 2, 3)), tuple(k.stride(0) for k in ks)


@operator("delta_replay")
def replay_op(state: Tensor, since: Sequence[Tensor]) -> Tensor:
    """Return a state after the writes of `since_kept`, to the last bit."""
    written = empty(state)
    if runs(state):
        channels, dim = state.shape[-2:]
        x, tile = token_rows(state, 2), tiling(channels, dim)
        arguments = (x, since_kept(since), written, *x.stride()[:2], dim, channels, *tile)
        launch(_replay, (x.shape[0],), *arguments, num_warps=num_warps(tile, 120))
    return written


def keep(ctx: Any, state: Tensor, recompute_every: int, *others: Tensor) -> None:
    """Save for the backward pass of a write: X unless it can be replayed, then k, 1 / m, beta, r, and anything else."""
    save_state(ctx, state, *others, replay=_again, every=recompute_every, through=PASSES_THROUGH)


def kept(ctx: Any) -> tuple[Tensor, list[Tensor], tuple[Tensor, ...]]:
    """Return the nearest kept state, the writes since as in `since_kept`, and the other tensors that `keep` saved.

    Raises RuntimeError if the gradient itself is differentiated: the kernels have no second derivatives.
    """
    if torch.is_grad_enabled():
        raise RuntimeError("kernels have first derivatives only: use implementation='reference' to differentiate twice")
    ctx.recomputed = None  # every reader of the state that this write made has had it
    state, between = nearest(ctx, _again, REACH)
    _, *others = read_once(ctx)
    ctx.opened = None
    return state, _steps(between), tuple(others)


def _steps(nodes: list[Any]) -> list[Tensor]:
    return [x for node in nodes for x in read_once(node)[1:5]]


def _again(node: Any) -> Tensor:
    """Replay a write: return the state that it made."""
    state, between = nearest(node, _again, REACH)
    return replay_op(state, _steps([*between, node]))
