"""DenseFormer (arXiv 2402.02622): after every block, a learned average over the outputs of all blocks so far.

    Y_i = sum_{j <= i} a_ij X_j,   X_0 = embedding,   X_{i+1} = block(Y_i) with its residuals inside

A block is two sublayers, 2i and 2i + 1. The state is the tuple X_0, ..., X_i. Inside a block its
last entry is the output of the block so far.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.depth import BlockCollapse, BlockConnection, BlocksScheme, outputs_of
from residua.connections.parts.ends import Copies
from residua.connections.parts.facts import DepthWeights
from residua.connections.parts.memory import Memory
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count
from residua.ops import at_least_float32, depth_mix


class DenseCoefficients(NamedTuple):
    """weights: (sources,), of the average that begins a block, in at least float32; None without an average."""

    weights: Tensor | None


@dataclass(frozen=True)
class DenseFormer(BlocksScheme):
    """DenseFormer. Starts as the pre-norm residual: the last output has weight 1, all others 0.

    dilation   k: the average after block i is over the outputs j with i - j divisible by k
    period     p: there is an average only after every p-th block
    """

    title = "DenseFormer"
    equation = "block(sum_{j <= i} a_ij X_j)"
    users = "The authors' experiments (`epfml/DenseFormer`). No released model is known."
    paper = "arXiv 2402.02622"
    residual_start = {}

    dilation: Count = 1
    period: Count = 1

    def taken(self, block: int) -> range:
        """Return the indices of the outputs in the average after `block` blocks; empty if there is no average."""
        averages = block > 0 and block % self.period == 0
        return range(block % self.dilation, block + 1, self.dilation) if averages else range(0)

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [DenseConnection(self, i, norm(i)) for i in range(num_sublayers)]
        blocks = -(-num_sublayers // 2)
        taken = self.taken(blocks)
        return Stream(Copies(1), connections, BlockCollapse(DepthAverage(taken) if taken else None, blocks))


class DepthAverage(SelfStarting):
    """sum_j a_j X_j over the outputs `taken`. Starts as the last output.

    A tuple of tensors (batch, seq, dim) -> (batch, seq, dim) and the weights (sources,).
    """

    def __init__(self, taken: range):
        super().__init__()
        self.taken = taken
        self.weights = nn.Parameter(torch.empty(len(taken)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weights)
        nn.init.ones_(self.weights[-1:])

    def forward(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        weights = at_least_float32(self.weights)
        return depth_mix([sources[j] for j in self.taken], weights), weights


class DenseConnection(BlockConnection):
    """One connection of DenseFormer around sublayer `index`; the first of a block reads the average."""

    def __init__(self, scheme: DenseFormer, index: int, norm: nn.Module):
        super().__init__(index, norm)
        taken = scheme.taken(index // 2) if self.begins else range(0)
        self.average = DepthAverage(taken) if taken else None
        self.sources = outputs_of(taken)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, weights = (state[-1], None) if self.average is None else self.average(state)
        residual = (*state, x) if self.begins else state
        return self.norm(x), Carry(residual, DenseCoefficients(weights))

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        weights = carry.coefficients.weights
        return None if weights is None else DepthWeights(weights.unsqueeze(0), self.sources)
