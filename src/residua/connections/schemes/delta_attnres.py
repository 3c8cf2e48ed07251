"""Delta attention residuals (arXiv 2605.18855): a plain residual stream, and attention over the sublayers' outputs.

    x = h + g sum_i a_i D_i,   a = softmax_i(w . RMSNorm(D_i)),   h <- h + F(norm(x))

D_0 is the embedding. D_l is the output of sublayer l or, with `block_size` S, the sum of the outputs of a completed
block of S sublayers. The stream h itself is never replaced. The state is a tuple: the sources, the sum of the current
block if it is incomplete, and h.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.depth import DepthRead, SourcesConnection, SourcesScheme, summed
from residua.connections.parts.ends import Copies, LastOf
from residua.connections.parts.facts import DepthWeights
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Divisor
from residua.connections.parts.spec import TensorSpec
from residua.ops import at_least_float32
from residua.ops.derived import derive


class DeltaDepthCoefficients(NamedTuple):
    """weights: (batch, seq, sources), or (batch, seq, heads, sources) with several heads; gate: (), the factor g.

    Both are in at least float32. weights is None for a single source, which has weight 1; gate is None without a gate.
    """

    weights: Tensor | None
    gate: Tensor | None


@dataclass(frozen=True)
class DeltaAttentionResiduals(SourcesScheme):
    """Delta AttnRes. Starts as the pre-norm residual only with read_gate="scalar": a zero query adds a mean of sources.

    block_size    S, the number of outputs that are summed into one source; 1 keeps every output
    read_gate     "none": g = 1, for training from scratch; "scalar": one learned number per sublayer, which starts at
                  0; "sigmoid": the sigmoid of such a number, which starts at -2
    null_source   whether there is an additional learned source, which starts at 0, so that attention may add nothing
    heads         the number of groups of features, each with its own attention, as in MHAR (arXiv 2607.27230)
    """

    title = "Delta attention residuals"
    equation = "h + F(norm(h + g sum_i a_i D_i)), a = softmax_i(w . norm(D_i))"
    users = "The authors' experiments (`wdlctc/delta-attention-residuals-code`). No released model is known."
    paper = "arXiv 2605.18855"
    residual_start = {"read_gate": "scalar"}

    read_gate: Literal["none", "scalar", "sigmoid"] = "none"
    null_source: bool = False
    heads: Divisor = 1

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, ...]:
        return (*super().state_spec(boundary, dim), TensorSpec((dim,)))

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [DeltaDepthConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Copies(2), connections, LastOf())


class DeltaDepthConnection(SourcesConnection):
    """One connection of Delta AttnRes around sublayer `index`.

    The first sublayer reads h, which is its only source. A single source has weight 1, so there is no query.
    """

    def __init__(self, scheme: DeltaAttentionResiduals, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, index)
        self.scheme = scheme
        self.completed = index // scheme.block_size  # complete blocks; the embedding is another source
        self.reads = index > 0
        learned = self.reads and scheme.null_source
        self.sources = (*[None] * learned, *summed(self.completed * scheme.block_size, scheme.block_size))
        self.null = nn.Parameter(torch.empty(dim)) if learned else None
        self.attend = DepthRead(dim, eps=norm_eps, heads=scheme.heads) if self.completed or learned else None
        gated = self.reads and scheme.read_gate != "none"
        self.gate = nn.Parameter(torch.empty(1)) if gated else None  # FSDP2 shards no scalars
        self.norm = norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.null is not None:
            nn.init.zeros_(self.null)
        if self.gate is not None:
            nn.init.constant_(self.gate, 0.0 if self.scheme.read_gate == "scalar" else -2.0)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        stream = state[-1]
        if not self.reads:
            return self.norm(stream), Carry(state, DeltaDepthCoefficients(None, None))
        sources = state[: 1 + self.completed]
        if self.null is not None:
            sources = (self.null.to(stream.dtype).expand_as(stream), *sources)
        added, weights = (sources[0], None) if self.attend is None else self.attend(sources)
        gate = None if self.gate is None else at_least_float32(self.gate)[0]
        if gate is not None and self.scheme.read_gate == "sigmoid":
            gate = gate.sigmoid()
        x = derive(_beside, stream, added, *(() if gate is None else (gate,)))
        return self.norm(x), Carry(state, DeltaDepthCoefficients(weights, gate))

    def write(self, y: Tensor, carry: Carry) -> State:
        *sources, stream = carry.residual
        y = y.to(stream.dtype)
        return (*super().write(y, Carry(sources, carry.coefficients)), stream + y)

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        """Return the weights a_i, without the gate; None for the first sublayer, which reads only the stream."""
        return super().depth_weights(carry) if self.reads else None


def _beside(stream: Tensor, added: Tensor, gate: Tensor | None = None) -> Tensor:
    return (stream + (added if gate is None else gate * added)).to(stream.dtype)
