"""Schemes whose state is a tuple that grows with depth: outputs of sublayers (AttnRes) or of blocks (DenseFormer)."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Scheme, State
from residua.connections.parts.facts import EMBEDDING, DepthWeights
from residua.connections.parts.memory import Memory
from residua.connections.parts.sharded import SelfStarting
from residua.connections.parts.spec import TensorSpec
from residua.errors import Count
from residua.ops import at_least_float32, depth_read
from residua.ops.derived import derive


@dataclass(frozen=True)
class SourcesScheme(Scheme):
    """A scheme whose state is the tuple of sources: the embedding, then one sum for every `block_size` outputs."""

    block_size: Count = 1

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec((dim,)),) * (1 + -(-boundary // self.block_size))


class DepthRead(SelfStarting):
    """Attention over the sources by a learned query, with RMSNorm of the keys and a gain. Starts as the mean.

    A tuple of n tensors (batch, seq, dim) -> (batch, seq, dim) and the weights (batch, seq, n), or with several heads
    (batch, seq, heads, n). reduction="sum" multiplies the result by n, so that the read starts as the sum of the
    sources. heads: a divisor of dim.
    """

    def __init__(self, dim: int, *, eps: float, reduction: Literal["mean", "sum"] = "mean", heads: int = 1):
        super().__init__()
        self.eps, self.heads = eps, heads
        self.reduction = reduction
        self.query = nn.Parameter(torch.empty(dim))
        self.gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def forward(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query = at_least_float32(self.query) * at_least_float32(self.gain)
        x, weights = depth_read(sources, query, heads=self.heads, eps=self.eps)
        return x if self.reduction == "mean" else derive(partial(torch.mul, other=len(sources)), x), weights


class SourcesConnection(Connection):
    """A connection around sublayer `index`. If `block_size` divides `index`, the output begins a new source.

    Otherwise the output is added to the last source. `sources`: the outputs that the connection attends over.
    """

    def __init__(self, scheme: SourcesScheme, index: int):
        super().__init__()
        self.opens = index % scheme.block_size == 0
        self.sources: tuple[range | None, ...] = summed(index, scheme.block_size)

    def write(self, y: Tensor, carry: Carry) -> State:
        sources = carry.residual
        if self.opens:
            return (*sources, y.to(sources[0].dtype))
        *closed, partial = sources
        return (*closed, (partial + y).to(partial.dtype))

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        """Return the weights of the attention, one read per head; a single source has weight 1."""
        weights = carry.coefficients.weights
        if weights is None:
            return DepthWeights(torch.ones(1, 1), self.sources)
        if weights.dim() == 3:
            return DepthWeights(weights.unsqueeze(-2), self.sources)
        return DepthWeights(weights, self.sources, tuple(f"head {i + 1}" for i in range(weights.shape[-2])))


def summed(index: int, block_size: int) -> tuple[range, ...]:
    """Return the sublayers behind each source before sublayer `index`: the embedding, then blocks of `block_size`."""
    return (EMBEDDING, *(range(i, min(i + block_size, index)) for i in range(0, index, block_size)))


@dataclass(frozen=True)
class BlocksScheme(Scheme):
    """A scheme whose state is the embedding and one output per block of two sublayers, the last perhaps incomplete."""

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec((dim,)),) * (1 + -(-boundary // 2))


def outputs_of(taken: Iterable[int]) -> tuple[range, ...]:
    """Return the sublayers that wrote each of the outputs `taken`: 0 is the embedding, j >= 1 the output of block j."""
    return tuple(range(2 * j - 2, 2 * j) if j else EMBEDDING for j in taken)


class BlockConnection(Connection):
    """A connection whose state is the tuple of all blocks' outputs. It writes to the last one."""

    def __init__(self, index: int, norm: nn.Module):
        super().__init__()
        self.begins = index % 2 == 0
        self.norm = norm

    def write(self, y: Tensor, carry: Carry) -> State:
        *outputs, residual = carry.residual
        return (*outputs, (residual + y).to(residual.dtype))


class BlockCollapse(nn.Module):
    """The readout: the average after the last block. A tuple of tensors (batch, seq, dim) -> (batch, seq, dim).

    average: a module whose first result is the average; None to read only the last output. If the state does not have
    the full depth, only its last output is read, because the average has weights for the full depth.
    """

    def __init__(self, average: nn.Module | None, blocks: int):
        super().__init__()
        self.sources, self.average = blocks + 1, average

    def forward(self, outputs: tuple[Tensor, ...], memory: Memory | None = None) -> Tensor:
        return outputs[-1] if self.average is None or len(outputs) != self.sources else self.average(outputs)[0]
