"""MUDD, multiway dynamic dense connections (arXiv 2502.12170): DenseFormer's average by token, one each for q, k, v, r.

    X_q, X_k, X_v, X_r = sum_j w_c[j] X_j,   w = W_2 gelu(W_1 rms(X_i)) + a,   X_{i+1} = MLP(attention(...) + X_r)

Block i of attention and MLP reads the outputs X_0 (the embedding) to X_i of all blocks so far: attention takes its
queries, keys and values from three of the averages, and adds to the fourth.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, Scheme, State, Stream
from residua.connections.denseformer import BlockCollapse, BlockConnection, block_outputs, outputs_of
from residua.connections.ends import Copies
from residua.connections.facts import DepthWeights
from residua.connections.memory import Memory
from residua.connections.norm import RMSNorm
from residua.connections.projection import WideProjection
from residua.connections.sharded import on_whole_tensors
from residua.connections.spec import TensorSpec
from residua.errors import Count
from residua.ops import at_least_float32, depth_mix
from residua.ops.derived import derive
from residua.ops.norm import mean_square


class MultiwayCoefficients(NamedTuple):
    """weights: (batch, seq, ways, sources), the averages that begin a block, in at least float32; None without them."""

    weights: Tensor | None


@dataclass(frozen=True)
class MultiwayDynamicDense(Scheme):
    """MUDD. Starts as the pre-norm residual: W_2 is 0 and a takes the last output.

    A sublayer with an even number, attention, gets three inputs from the second block on, unless ways="r".

    ways             "qkvr": one average each for queries, keys, values and the residual; "r": one for all
    prepost_norm     sources are normalised (a gain each) before they are averaged, the average for the residual is
                     normalised again (a gain that starts at 0.001), and the last output is added to every average; the
                     publication needs it for deep and narrow models
    hidden_multiple  the hidden width, ways times sources, is rounded up to the next multiple; 1 leaves it
    expand_last      factor on the hidden width of the readout, which has one way
    """

    title: ClassVar[str] = "MUDD connections"
    equation: ClassVar[str] = "block(sum_j w_c[j] X_j for c in q, k, v, r), w = W_2 gelu(W_1 rms(X_i)) + a"
    users: ClassVar[str] = (
        "MUDDFormer-2.8B and MUDDPythia (1.4B and 2.8B), released by the authors (`Caiyun-AI/MUDDFormer`)."
    )
    paper: ClassVar[str] = "arXiv 2502.12170"

    ways: Literal["qkvr", "r"] = "qkvr"
    prepost_norm: bool = False
    hidden_multiple: Count = 64
    expand_last: Count = 4

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, ...]:
        return block_outputs(boundary, dim)

    def preserving(self) -> "MultiwayDynamicDense":
        return self

    def averages(self, dim: int, ways: int, sources: int, *, eps: float, expand: int = 1) -> "MultiwayAverage":
        hidden, multiple = ways * sources * expand, self.hidden_multiple
        hidden = hidden if multiple == 1 else (hidden // multiple + 1) * multiple
        return MultiwayAverage(dim, ways, sources, hidden, eps=eps, normalised=self.prepost_norm)

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [MultiwayConnection(self, dim, i, norm, norm_eps=norm_eps) for i in range(num_sublayers)]
        blocks = -(-num_sublayers // 2)
        last = self.averages(dim, 1, blocks + 1, eps=norm_eps, expand=self.expand_last) if blocks else None
        return Stream(Copies(1), connections, BlockCollapse(last, blocks))


class MultiwayAverage(nn.Module):
    """The averages over n outputs, `ways` of them, by weights from the last output.

    A tuple of n tensors (batch, seq, dim) -> `ways` tensors (batch, seq, dim), the residual's last; the
    outputs to go on with (normalised if asked); and the weights (batch, seq, ways, n) in at least float32.
    """

    def __init__(self, dim: int, ways: int, sources: int, hidden: int, *, eps: float, normalised: bool):
        super().__init__()
        self.eps, self.normalised = eps, normalised
        self.up = WideProjection(dim, hidden, std=dim**-0.5)
        self.down = WideProjection(hidden, ways * sources, std=0.0)
        self.static = nn.Parameter(torch.empty(ways, sources))
        self.before = RMSNorm(dim, eps=eps) if normalised else None
        self.after = RMSNorm(dim, eps=eps, start=1e-3) if normalised else None
        self.reset_parameters()

    @on_whole_tensors
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.static)
        if not self.normalised:
            nn.init.ones_(self.static[:, -1])

    def weights(self, x: Tensor) -> Tensor:
        # Dividing after the product avoids a normalised copy of x.
        hidden = derive(_activated, self.up(x), torch.rsqrt(mean_square(x) + self.eps))
        return self.down(hidden).unflatten(-1, self.static.shape) + at_least_float32(self.static)

    def forward(self, outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        *earlier, x = outputs
        weights = self.weights(x)
        if self.before is None or self.after is None:
            return *(depth_mix(outputs, way) for way in weights.unbind(-2)), outputs, weights
        sources = (*earlier, self.before(x))
        *reads, residual = (depth_mix(sources, way) for way in weights.unbind(-2))
        return *(derive(torch.add, x, read) for read in [*reads, self.after(residual)]), sources, weights


def _activated(x: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x * scale)


class MultiwayConnection(BlockConnection):
    """One connection of MUDD around sublayer `index`; the first of every block but the first reads the averages."""

    def __init__(self, scheme: MultiwayDynamicDense, dim: int, index: int, norm: Norm, *, norm_eps: float):
        block, begins = divmod(index, 2)[0], index % 2 == 0
        averages = begins and block > 0
        norms = [norm(index) for _ in range(3 if averages and scheme.ways == "qkvr" else 1)]
        super().__init__(index, norms[0])
        # A norm that is somebody else's, such as a pretrained model's, normalises all three inputs.
        self.others = nn.ModuleList(norms[1:]) if len(norms) > 1 and norms[1] is not norms[0] else None
        self.inputs = len(norms)
        self.ways, self.sources = scheme.ways, outputs_of(range(block + 1))
        self.average = scheme.averages(dim, len(scheme.ways), block + 1, eps=norm_eps) if averages else None
        self.embedding_norm = RMSNorm(dim, eps=norm_eps) if scheme.prepost_norm and index == 0 else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor | tuple[Tensor, ...], Carry]:
        if self.average is None:
            sources = state if self.embedding_norm is None else (self.embedding_norm(state[0]),)
            residual = (*sources, state[-1]) if self.begins else state
            return self.norm(state[-1]), Carry(residual, MultiwayCoefficients(None))
        *reads, sources, weights = self.average(state)
        carry = Carry((*sources, reads[-1]), MultiwayCoefficients(weights))
        if self.inputs == 1:
            return self.norm(reads[-1]), carry
        norms = (self.norm, *(self.others or (self.norm, self.norm)))
        return tuple(norm(read) for norm, read in zip(norms, reads)), carry

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        weights = carry.coefficients.weights
        reads = tuple(self.ways) if len(self.ways) > 1 else ()
        return None if weights is None else DepthWeights(weights, self.sources, reads)
