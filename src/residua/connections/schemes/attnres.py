"""Attention Residuals, AttnRes (arXiv 2603.15031): every sublayer attends over the outputs of earlier sublayers.

    x = sum_i a_i V_i,   a = softmax_i(w . RMSNorm(V_i)),   V_0 = embedding,   V_l = F(norm(x)) of sublayer l

The state grows with depth: it is the tuple of the sources V_i. With `block_size` S, sublayers 1 to S are summed into
one source, S + 1 to 2 S into the next, and so on: Block AttnRes.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.depth import DepthRead, SourcesConnection, SourcesScheme
from residua.connections.parts.ends import Copies
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Divisor


class DepthCoefficients(NamedTuple):
    """weights: (batch, seq, sources), the attention over depth, in at least float32; None for one source.

    With several heads (batch, seq, heads, sources).
    """

    weights: Tensor | None


@dataclass(frozen=True)
class AttentionResiduals(SourcesScheme):
    """AttnRes. Starts as the pre-norm residual, up to the eps of its norms: a zero query reads the mean of the sources.

    block_size   S, the number of outputs that are summed into one source; 1 keeps every output (Full AttnRes), 12 is
                 the paper's block of six layers
    reduction    "mean": sum_i a_i V_i (the paper); "sum": n times that for n sources. With equal weights this is the
                 sum of the sources, the plain residual, whatever the norms are. If a norm that removes the scale
                 follows, both give the same result
    heads        the number of groups of features, each with its own softmax: many-headed AttnRes, MHAR (arXiv
                 2607.27230); more heads add no parameters
    """

    title = "Attention residuals"
    equation = "V_l = F(norm(sum_i a_i V_i)), a = softmax_i(w . norm(V_i))"
    users = "Kimi K3 (blocks of layers) and, in a form of its own, Inkling-2: `attnres_inkling`."
    paper = "arXiv 2603.15031"
    residual_start = {"reduction": "sum"}  # exactly the plain residual; the mean equals it only up to scale

    reduction: Literal["mean", "sum"] = "mean"
    heads: Divisor = 1

    @property
    def source(self) -> str:
        return self.paper if self.heads == 1 else "arXiv 2607.27230"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [DepthConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        last = DepthRead(dim, eps=norm_eps, reduction=self.reduction, heads=self.heads) if num_sublayers else None
        return Stream(Copies(1), connections, DepthCollapse(last))


class DepthCollapse(nn.Module):
    """The readout: attention over all sources, as in a connection. Returns (batch, seq, dim)."""

    def __init__(self, attend: DepthRead | None):
        super().__init__()
        self.attend = attend

    def forward(self, sources: tuple[Tensor, ...], memory: Memory | None = None) -> Tensor:
        return sources[0] if self.attend is None else self.attend(sources)[0]


class DepthConnection(SourcesConnection):
    """One connection of AttnRes. The first sublayer has only one source, and therefore no query."""

    def __init__(self, scheme: AttentionResiduals, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, index)
        self.attend = DepthRead(dim, eps=norm_eps, reduction=scheme.reduction, heads=scheme.heads) if index else None
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, weights = (state[0], None) if self.attend is None else self.attend(state)
        return self.norm(x), Carry(state, DepthCoefficients(weights))
