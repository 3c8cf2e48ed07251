"""The context from which a scheme computes its coefficients: a token, the tokens so far, or the whole sequence."""

from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.base import Connection
from residua.connections.parts.memory import Memory, documents_in, expect_tokens, firsts_in, masked
from residua.ops import at_least_float32, rms_norm
from residua.ops.derived import derive
from residua.ops.shapes import expect_shape

# The eps in the norm of k. With it, the reflection H = I - 2 k k^T has |H^T H - I| = 4 eps^2 / |k~|^2, which is 4e-16
# for |k~| = 1: the rounding error of float64. At k~ = 0 the derivative 1 / eps is far inside the range of float32.
K_EPS = 1e-8

Context = Literal["token", "cumulative", "sequence"]


def running_mean(x: Tensor, memory: Memory | None = None) -> Tensor:
    """Return the running mean over the tokens, in at least float32: x_t -> (1/t) sum_{s <= t} x_s.

    x: (batch, seq, dim). Padding is not counted. A memory keeps one sum and one count, so that tokens of earlier calls
    are included.
    """
    x = at_least_float32(x)
    counted = torch.cat([x, x.new_ones(*x.shape[:-1], 1)], -1)
    counted = counted if memory is None else masked(counted, memory.padding)
    documents = documents_in(memory, x)
    sums = counted.cumsum(1) if documents is None else _sums_within(documents, counted)
    if memory is not None and memory.keeps:
        earlier = memory.recall(counted)
        sums = sums if earlier is None else sums + earlier
        memory.keep(sums)
    return sums[..., :-1] / sums[..., -1:].clamp_min(1)


def _sums_within(documents: Tensor, x: Tensor) -> Tensor:
    """Return the running sum of x, (batch, seq, features), within each document; documents: (batch, seq) integers."""
    expect_shape("documents", documents, x.shape[:2], "(batch, seq)")
    firsts = firsts_in(documents).unsqueeze(-1).expand_as(x)

    def within(rows: Tensor) -> Tensor:
        sums = rows.cumsum(1)
        return sums - (sums - rows).gather(1, firsts)

    # The sum over a document is a difference of sums over the row. It loses digits, and after a NaN or an infinity in
    # the row it loses all.
    finite = x.isfinite()
    sums = within(torch.where(finite, x, 0).to(torch.float64)).to(x.dtype)
    return torch.where(within((~finite).long()) > 0, torch.nan, sums)


class PooledConnection(Connection):
    """A connection that computes its coefficients from a pooled context."""

    separates_documents = True

    def __init__(self, context: Context, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        self.context = context
        self.norm = norm
        self.norm_eps = norm_eps
        self.window = int(context == "cumulative")

    def pooled(self, x: Tensor, memory: Memory | None) -> Tensor:
        """Return the context of the coefficients, in at least float32.

        x: (batch, seq, dim). "token": each token, divided by its root mean square; "cumulative": the running
        mean; "sequence": the mean over the whole sequence, later tokens included, as (batch, 1, dim).
        """
        if self.context == "token":
            wide = x if x.dtype.itemsize >= 4 else derive(at_least_float32, x)
            return rms_norm(wide, eps=self.norm_eps, recompute=True)
        expect_tokens(x, 1, axes="(batch, seq, dim)")
        if self.context == "sequence":
            return at_least_float32(x).mean(1, keepdim=True)
        if memory is not None and memory.keeps:
            return running_mean(x, memory)
        return derive(lambda tokens: running_mean(tokens, memory), x)


def gelu_parts(x: Tensor, count: int) -> list[Tensor]:
    """Return GELU of each of `count` equal parts of the last axis of x; the backward pass keeps only x."""
    return [derive(partial(_gelu_part, i, count), x) for i in range(count)]


def _gelu_part(i: int, count: int, x: Tensor) -> Tensor:
    part = x.chunk(count, -1)[i].contiguous()  # strided rows would be vectorised differently and change the last bits
    return F.gelu(part)
