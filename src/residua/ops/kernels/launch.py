"""Register, prepare and launch kernels: operators, tile sizes, memory, and the check of their arguments."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor

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
    """Choose the widest of at most 8 blocks of at least 128 numbers that waste at most an eighth of the lanes.

    If no block does, the one that wastes least: 768 is 3 x 256 and 1024 one block, but 200 is 256.
    """
    whole = triton.next_power_of_2(dim)
    candidates = [whole]
    while candidates[-1] > 128 and triton.cdiv(dim, candidates[-1] // 2) <= 8:
        candidates.append(candidates[-1] // 2)
    waste = {block: triton.cdiv(dim, block) * block - dim for block in candidates}
    block = next((block for block in candidates if 8 * waste[block] <= dim), min(candidates, key=waste.__getitem__))
    return Tiling(triton.next_power_of_2(channels), block, triton.cdiv(dim, block))


def whole_row(channels: int, dim: int) -> Tiling:
    """Take the whole row as one block, whatever it wastes."""
    return Tiling(triton.next_power_of_2(channels), triton.next_power_of_2(dim), 1)


def num_warps(tile: Tiling, numbers: int) -> int:
    """Return as many warps as leave each thread at most about `numbers` numbers of the tile and of one more row.

    The callers' limits come from compiling for compute capability 9.0 at widths of 768 to 2048 and up to 8 channels:
    the registers suffice or nearly do, and many bytes are under way at once.
    """
    threads = (tile.rows + 1) * tile.block * tile.blocks / numbers
    return min(16, triton.next_power_of_2(max(1, math.ceil(threads / 32))))


def programs(x: Tensor, tokens: int, per_processor: int) -> int:
    """Return how many programs share the tokens: `per_processor` per multiprocessor, at most one per token.

    Without a GPU, two, so that tests have programs of several tokens.
    """
    if not x.is_cuda:
        return min(tokens, 2)
    return min(tokens, per_processor * torch.cuda.get_device_properties(x.device).multi_processor_count)


def chunk_length(x: Tensor, tokens: int, per_processor: int) -> int:
    """Return how many consecutive tokens one program takes if `programs` programs share all tokens."""
    if not x.is_cuda:
        return 4
    return max(16, triton.cdiv(tokens, programs(x, tokens, per_processor)))


def token_rows(x: Tensor, width: int) -> Tensor:
    """Reshape x: (..., *row), with `width` axes in a row, to (tokens, *row) with the last axis contiguous.

    A view where possible: repeated streams (stride 0) are read from the one copy that exists.
    """
    rows = x.reshape(-1, *x.shape[x.dim() - width :])
    # Within a token, kernels compute offsets in 32 bits.
    near = all(stride * size < 2**31 for stride, size in zip(rows.stride()[1:], rows.shape[1:]))
    return rows if rows.stride(-1) == 1 and near else rows.contiguous()


def packed(*tensors: Tensor) -> list[Tensor]:
    """Return contiguous tensors, which kernels need except for `token_rows`."""
    return [x.contiguous() for x in tensors]


def empty(like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate contiguous memory on the device of `like`, by default in its shape and dtype."""
    return torch.empty(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)


def operator(name: str) -> Callable[[Callable], Any]:
    """Register a function as the custom operator residua::name, which torch.compile calls without looking inside.

    The compiler runs the same function on fake tensors for the shapes of the results: if `runs` is False it must
    return them, and launch nothing.
    """

    def register(function: Callable) -> Any:
        op = torch.library.custom_op(f"residua::{name}", function, mutates_args=())
        op.register_fake(function)
        return op

    return register


def runs(x: Tensor) -> bool:
    """Return whether there are numbers to compute: x is neither empty nor fake."""
    return not isinstance(x, FakeTensor) and not x.is_meta and x.numel() > 0


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int) -> None:
    """Run a kernel on the device of its first argument, whatever the current device is."""
    x = arguments[0]
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, num_warps=num_warps)


def expect_taken(rows: str, count: int, **tensors: Tensor | None) -> None:
    """Raise ValueError unless the kernels take `count` rows, TypeError unless they take the dtype of every tensor."""
    if not 1 <= count <= MAX_CHANNELS:
        name = next(iter(tensors))
        raise ValueError(
            f"{name}: the Triton kernels take 1 to {MAX_CHANNELS} {rows}, got {count}: use implementation='reference'"
        )
    for name, x in tensors.items():
        if x is not None and x.dtype not in DTYPES:
            raise TypeError(
                f"{name}: the Triton kernels take float32, bfloat16 and float16, got {x.dtype}: "
                "use implementation='reference'"
            )
