"""How a kernel cuts up rows of width dim, and how tensors are handed to it."""

import contextlib
import math
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from residua.ops.delta import expect_write

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_CHANNELS = 16


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)  # triton was imported with TRITON_INTERPRET=1


class Tiling(NamedTuple):
    """`blocks` tiles of `rows` x `block` numbers cover (channels, dim); `block` and `rows` are powers of two."""

    rows: int
    block: int
    blocks: int


def tiling(channels: int, dim: int) -> Tiling:
    """The widest block, of at least 128 numbers, that wastes at most an eighth of the lanes, with at most 8 blocks.

    Where no block does, the one that wastes least: 768 is 3 x 256 and 1024 one block, but 200 is 256.
    """
    whole = triton.next_power_of_2(dim)
    candidates = [whole]
    while candidates[-1] > 128 and triton.cdiv(dim, candidates[-1] // 2) <= 8:
        candidates.append(candidates[-1] // 2)
    waste = {block: triton.cdiv(dim, block) * block - dim for block in candidates}
    block = next((block for block in candidates if 8 * waste[block] <= dim), min(candidates, key=waste.__getitem__))
    return Tiling(triton.next_power_of_2(channels), block, triton.cdiv(dim, block))


def whole_row(channels: int, dim: int) -> Tiling:
    """One block, whatever it wastes."""
    return Tiling(triton.next_power_of_2(channels), triton.next_power_of_2(dim), 1)


def num_warps(tile: Tiling, numbers: int) -> int:
    """As many warps as leave every thread at most about `numbers` numbers of the tile and of one row more.

    The callers' limits come from compiling for compute capability 9.0 at widths of 768 to 2048 and up to 8 channels:
    the registers suffice or nearly do, and many bytes are under way at once.
    """
    threads = (tile.rows + 1) * tile.block * tile.blocks / numbers
    return min(16, triton.next_power_of_2(max(1, math.ceil(threads / 32))))


def programs(x: Tensor, tokens: int, per_processor: int) -> int:
    """How many programs share the tokens: `per_processor` for every multiprocessor, at most one for every token.

    Where there is no GPU, as many as let every program take several tokens.
    """
    if not x.is_cuda:
        return min(tokens, 2)
    return min(tokens, per_processor * torch.cuda.get_device_properties(x.device).multi_processor_count)


def chunk_length(x: Tensor, tokens: int, per_processor: int) -> int:
    """How many tokens in a row one program takes where it needs its neighbours: `programs` of them share all tokens."""
    if not x.is_cuda:
        return 4
    return max(16, triton.cdiv(tokens, programs(x, tokens, per_processor)))


def token_rows(x: Tensor, width: int) -> Tensor:
    """x: (..., *row) with `width` axes in a row as (tokens, *row), each row's last axis contiguous.

    A view where that is possible: repeated streams (stride 0) are read from the one copy that exists.
    """
    rows = x.reshape(-1, *x.shape[x.dim() - width :])
    # A kernel counts in 32 bits within a token.
    near = all(stride * size < 2**31 for stride, size in zip(rows.stride()[1:], rows.shape[1:]))
    return rows if rows.stride(-1) == 1 and near else rows.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Kernels are launched on the current device: make it the one that x is on."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def expect_kernel_write(state: Tensor, k: Tensor, v: Tensor, beta: Tensor, k_norm: str | None) -> None:
    """Raise ValueError or TypeError for arguments of a delta write that no kernel takes."""
    expect_write(state, k, v, beta, k_norm)
    channels = state.shape[-2]
    if channels > MAX_CHANNELS:
        raise ValueError(
            f"state: the Triton kernels take at most {MAX_CHANNELS} value channels, got {channels}: use 'reference'"
        )
    expect_dtypes(state=state, k=k, v=v, beta=beta)


def expect_dtypes(**tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: the Triton kernels take float32, bfloat16 and float16, got {x.dtype}: use 'reference'"
            )
