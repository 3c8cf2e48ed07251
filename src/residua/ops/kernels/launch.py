"""Register operators, allocate memory, and launch kernels."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_STREAMS = 16


@triton.jit
def _probe():
    pass


INTERPRETED = not isinstance(_probe, triton.JITFunction)  # triton was imported with TRITON_INTERPRET=1


def token_rows(x: Tensor, width: int) -> Tensor:
    """Reshape x: (..., *row), with `width` axes in a row, to (tokens, *row) with the last axis contiguous.

    The result is a view if possible, so that repeated streams (stride 0) are read from a single copy.
    """
    rows = x.reshape(-1, *x.shape[x.dim() - width :])
    # Kernels compute the offsets within a token in 32 bits.
    near = all(stride * size < 2**31 for stride, size in zip(rows.stride()[1:], rows.shape[1:]))
    return rows if rows.stride(-1) == 1 and near else rows.contiguous()


def empty(like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate contiguous memory on the device of `like`, by default in its shape and dtype."""
    return torch.empty(like.shape if shape is None else shape, dtype=dtype or like.dtype, device=like.device)


def operator(name: str) -> Callable[[Callable], Any]:
    """Register a function as the custom operator residua::name, which torch.compile calls without looking inside.

    The compiler calls the same function with fake tensors to get the shapes of the results. For tensors for which
    `runs` is False, the function must return tensors of these shapes without launching a kernel.
    """

    def register(function: Callable) -> Any:
        op = torch.library.custom_op(f"residua::{name}", function, mutates_args=())
        op.register_fake(function)
        return op

    return register


def runs(x: Tensor) -> bool:
    """Return whether x has numbers to compute with: it is neither empty nor fake."""
    return not isinstance(x, FakeTensor) and not x.is_meta and x.numel() > 0


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int) -> None:
    """Run a kernel on the device of its first argument, not on the current device."""
    x = arguments[0]
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        kernel[grid](*arguments, num_warps=num_warps)
