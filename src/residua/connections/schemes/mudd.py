"""MUDD, multiway dynamic dense connections (arXiv 2502.12170): averages over depth per token, for q, k, v and r.

    X_q, X_k, X_v, X_r = sum_j w_c[j] X_j,   w = W_2 gelu(W_1 rms(X_i)) + a
    z = attention(...) + X_r,   X_{i+1} = z + MLP(norm(z))

Block i of attention and MLP reads X_0 (the embedding) to X_i, the outputs of all blocks so far. Attention takes its
queries, keys and values from three averages, and its output is added to the fourth, the residual r. The trimmed form
in modded-nanogpt has averages only near the end of the stack, over a few outputs, and gates the residual and the
sublayer's output.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.depth import BlockCollapse, BlockConnection, BlocksScheme, outputs_of
from residua.connections.parts.ends import Copies
from residua.connections.parts.facts import DepthWeights
from residua.connections.parts.gates import Scale
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.options import only_with, require_option
from residua.connections.parts.projection import WideProjection
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count
from residua.ops import at_least_float32, depth_mix
from residua.ops.derived import derive
from residua.ops.norm import mean_square


class MultiwayCoefficients(NamedTuple):
    """weights: (batch, seq, ways, sources), the averages that begin a block. gates: (batch, seq, 2), of the residual
    and of the sublayer's output. Both are in at least float32; None if the connection has no averages or no gates.
    """

    weights: Tensor | None
    gates: Tensor | None = None


@dataclass(frozen=True)
class MultiwayDynamicDense(BlocksScheme):
    """MUDD. Starts as the pre-norm residual: W_2 starts at 0, and a at 1 for the last output and at 0 for the others.

    The attention sublayers 2, 4, 6, ... get three inputs (queries, keys, values), unless ways="r".

    ways             "qkvr": one average each for queries, keys, values and the residual; "vr": one each for values and
                     the residual, while queries and keys read the last output; "r": one average for all
    layers           None: there are averages before every block but the first, and in the readout; a number k: only
                     at the last k of these places
    sources          None: averages take all outputs; a list: only these (0 is the embedding, j the output of block j,
                     which a shallower stack does not have) and the last output
    write_gate      whether both sublayers of a block that begins with averages write g_1 x + g_2 y, with gates for
                     each token that start at 1. The map of the averages also computes the gates of attention; the MLP
                     has its own map for its gates
    prepost_norm     sources are normalised (a gain each) before they are averaged, the average for the residual is
                     normalised again (a gain that starts at 0.001), and the last output is added to every average; the
                     paper needs this for deep and narrow models
    hidden_multiple  the hidden width is the smallest multiple of this number above ways times sources; with 1, it is
                     ways times sources
    readout_multiple  factor on the weights of the readout, which has one way, before its hidden width is rounded up
    """

    title = "MUDD connections"
    equation = "block(sum_j w_c[j] X_j for c in q, k, v, r), w = W_2 gelu(W_1 rms(X_i)) + a"
    users = (
        "MUDDFormer-2.8B and MUDDPythia (1.4B and 2.8B), released by the authors (`Caiyun-AI/MUDDFormer`). "
        "modded-nanogpt has a trimmed form in its last two layers."
    )
    paper = "arXiv 2502.12170"
    residual_start = {}

    ways: Literal["qkvr", "vr", "r"] = "qkvr"
    layers: Annotated[Count | None, only_with(prepost_norm=False)] = None
    sources: Annotated[tuple[int, ...] | None, only_with(prepost_norm=False)] = None
    write_gate: Annotated[bool, only_with(prepost_norm=False)] = False
    prepost_norm: bool = False
    hidden_multiple: Count = 64
    readout_multiple: Count = 4

    def __post_init__(self):
        super().__post_init__()
        named = self.sources or ()
        distinct = min(named, default=0) >= 0 and len(set(named)) == len(named)
        require_option(self, "sources", distinct, "numbers of outputs from 0, each once, or null")

    def averages_after(self, block: int, blocks: int) -> bool:
        """Return whether there are averages after the first `block` blocks, in a stack of `blocks` blocks."""
        return block > 0 and (self.layers is None or block > blocks - self.layers)

    def taken(self, block: int) -> list[int]:
        """Return the indices of the outputs in the averages after `block` blocks; the last output comes last."""
        return [j for j in range(block) if self.sources is None or j in self.sources] + [block]

    def hidden(self, weights: int) -> int:
        """Return the hidden width of a map that computes `weights` numbers."""
        multiple = self.hidden_multiple
        return weights if multiple == 1 else (weights // multiple + 1) * multiple

    def averages(
        self, dim: int, ways: int, block: int, *, eps: float, expand: int = 1, gated: bool = False
    ) -> "MultiwayAverage":
        taken = self.taken(block)
        hidden = self.hidden(ways * len(taken) * expand)
        return MultiwayAverage(dim, ways, taken, hidden, eps=eps, normalised=self.prepost_norm, gated=gated)

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        blocks = -(-num_sublayers // 2)
        connections = [MultiwayConnection(self, dim, i, blocks, norm, norm_eps=norm_eps) for i in range(num_sublayers)]
        last = self.averages(dim, 1, blocks, eps=norm_eps, expand=self.readout_multiple) if blocks else None
        return Stream(Copies(1), connections, BlockCollapse(last, blocks))


class DynamicWeights(SelfStarting):
    """W_2 gelu(W_1 rms(x)), 0 at the start: (batch, seq, dim) -> (batch, seq, count) in at least float32."""

    def __init__(self, dim: int, hidden: int, count: int, *, eps: float):
        super().__init__()
        self.eps = eps
        self.up = WideProjection(dim, hidden, std=dim**-0.5)
        self.down = WideProjection(hidden, count, std=0.0)

    def dynamic(self, x: Tensor) -> Tensor:
        # Dividing after the product avoids a normalised copy of x.
        return self.down(derive(_activated, self.up(x), torch.rsqrt(mean_square(x) + self.eps)))


class WriteGates(DynamicWeights):
    """The gates g_1 of the residual and g_2 of the output, 1 at the start: (batch, seq, dim) -> (batch, seq, 2).

    They are computed from x, in at least float32.
    """

    def __init__(self, dim: int, hidden: int, *, eps: float):
        super().__init__(dim, hidden, 2, eps=eps)
        self.static = Scale(1.0, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dynamic(x) + self.static()


class MultiwayAverage(DynamicWeights):
    """`ways` averages over the outputs `taken`, with weights computed from the last output.

    A tuple of n tensors (batch, seq, dim) -> `ways` tensors (batch, seq, dim), the residual's last; the outputs with
    which the state continues (normalised if `normalised` is set); the weights (batch, seq, ways, taken) in at least
    float32; and the gates (batch, seq, 2), or None unless `gated`.
    """

    def __init__(
        self, dim: int, ways: int, taken: list[int], hidden: int, *, eps: float, normalised: bool, gated: bool
    ):
        super().__init__(dim, hidden, ways * len(taken) + 2 * gated, eps=eps)
        self.taken, self.normalised = taken, normalised
        self.static = nn.Parameter(torch.empty(ways, len(taken)))
        self.gates = Scale(1.0, 2) if gated else None
        self.before = RMSNorm(dim, eps=eps) if normalised else None
        self.after = RMSNorm(dim, eps=eps, start=1e-3) if normalised else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.static)
        if not self.normalised:
            nn.init.ones_(self.static[:, -1])

    def weights(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the weights of the averages and the gates."""
        products, gates = self.dynamic(x), None
        if self.gates is not None:
            products, gates = products.split([self.static.numel(), 2], -1)
            gates = gates + self.gates()
        return products.unflatten(-1, self.static.shape) + at_least_float32(self.static), gates

    def forward(self, outputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        *earlier, x = outputs
        weights, gates = self.weights(x)
        if self.before is None or self.after is None:
            taken = [outputs[j] for j in self.taken]
            return *(depth_mix(taken, way) for way in weights.unbind(-2)), outputs, weights, gates
        sources = (*earlier, self.before(x))
        *reads, residual = (depth_mix(sources, way) for way in weights.unbind(-2))
        return *(derive(torch.add, x, read) for read in [*reads, self.after(residual)]), sources, weights, gates


def _activated(x: Tensor, scale: Tensor) -> Tensor:
    return F.gelu(x * scale)


class MultiwayConnection(BlockConnection):
    """One connection of MUDD around sublayer `index`; the first sublayer of a block reads its averages, if any."""

    single_input = 'ways="r"'

    def __init__(self, scheme: MultiwayDynamicDense, dim: int, index: int, blocks: int, norm: Norm, *, norm_eps: float):
        block, begins = divmod(index, 2)[0], index % 2 == 0
        after = scheme.averages_after(block, blocks)
        averages = begins and after
        norms = [norm(index) for _ in range({"qkvr": 3, "vr": 2, "r": 1}[scheme.ways] if averages else 1)]
        super().__init__(index, norms[0])
        # A norm that was passed in, such as that of a pretrained model, normalises all three inputs.
        self.others = nn.ModuleList(norms[1:]) if len(norms) > 1 and norms[1] is not norms[0] else None
        self.inputs = len(norms)
        self.ways, self.sources = scheme.ways, outputs_of(scheme.taken(block))
        self.average = self.gates = None
        if averages:
            self.average = scheme.averages(dim, len(scheme.ways), block, eps=norm_eps, gated=scheme.write_gate)
        elif after and scheme.write_gate:
            self.gates = WriteGates(dim, scheme.hidden(2), eps=norm_eps)
        self.embedding_norm = RMSNorm(dim, eps=norm_eps) if scheme.prepost_norm and index == 0 else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor | tuple[Tensor, ...], Carry]:
        if self.average is None:
            sources = state if self.embedding_norm is None else (self.embedding_norm(state[0]),)
            residual = (*sources, state[-1]) if self.begins else state
            gates = None if self.gates is None else self.gates(state[-1])
            return self.norm(state[-1]), Carry(residual, MultiwayCoefficients(None, gates))
        *reads, sources, weights, gates = self.average(state)
        carry = Carry((*sources, reads[-1]), MultiwayCoefficients(weights, gates))
        if self.inputs == 1:
            return self.norm(reads[-1]), carry
        norms = (self.norm, *(self.others or (self.norm, self.norm)))
        if self.inputs == 2:  # queries and keys read the last output
            x = self.norm(state[-1])
            return (x, x, norms[1](reads[0])), carry
        return tuple(norm(read) for norm, read in zip(norms, reads)), carry

    def write(self, y: Tensor, carry: Carry) -> State:
        gates = carry.coefficients.gates
        if gates is None:
            return super().write(y, carry)
        *outputs, residual = carry.residual
        return (*outputs, depth_mix([residual, y.to(residual.dtype)], gates))

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        weights = carry.coefficients.weights
        reads = tuple(self.ways) if len(self.ways) > 1 else ()
        return None if weights is None else DepthWeights(weights, self.sources, reads)
