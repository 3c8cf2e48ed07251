"""Attention Residuals, AttnRes (arXiv 2603.15031): every sublayer attends over the outputs of earlier sublayers.

    x = sum_i a_i V_i,   a = softmax_i(w . RMSNorm(V_i)),   V_0 = embedding,   V_l = F(norm(x)) of sublayer l

The state grows with depth: it is the tuple of the sources V_i. With `block_size` S, sublayers 1 to S are summed into
one source, S + 1 to 2 S into the next, and so on: Block AttnRes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Norm, Scheme, State, Stream
from residua.connections.ends import Copies
from residua.connections.facts import EMBEDDING, DepthWeights
from residua.connections.memory import Memory
from residua.connections.sharded import SelfStarting, on_whole_tensors
from residua.connections.spec import TensorSpec
from residua.errors import Count
from residua.ops import at_least_float32, depth_read
from residua.ops.derived import derive


class DepthCoefficients(NamedTuple):
    """weights: (batch, seq, sources), the attention over depth, in at least float32; None for one source.

    With several heads (batch, seq, heads, sources).
    """

    weights: Tensor | None


@dataclass(frozen=True)
class SourcesScheme(Scheme):
    """A scheme whose state is the tuple of the sources: the embedding, then the sum of every `block_size` outputs."""

    block_size: Count = 1

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, ...]:
        return (TensorSpec((dim,)),) * (1 + -(-boundary // self.block_size))


@dataclass(frozen=True)
class AttentionResiduals(SourcesScheme):
    """AttnRes. Starts as the pre-norm residual, up to the eps of its norms: a zero query reads the mean of the sources.

    block_size   S, how many outputs are summed into one source; 1 keeps every output (Full AttnRes), 12 is the
                 paper's block of six layers
    scale        "mean": sum_i a_i V_i (the paper); "sum": n times that for n sources, which with equal weights is their
                 sum, the plain residual, whatever the norms are; norms that forget the scale see no difference
    heads        a separate softmax for each of this many groups of features: many-headed AttnRes, MHAR (arXiv
                 2607.27230); it adds no parameters
    """

    title = "Attention residuals"
    equation = "V_l = F(norm(sum_i a_i V_i)), a = softmax_i(w . norm(V_i))"
    users = "Kimi K3 (blocks of layers) and, in a form of its own, Inkling-2: `attnres_inkling`."
    paper = "arXiv 2603.15031"
    residual_start = {"scale": "sum"}  # the plain residual, and not only up to a norm
    divisors = ("heads",)

    scale: Literal["mean", "sum"] = "mean"
    heads: Count = 1

    @property
    def source(self) -> str:
        return self.paper if self.heads == 1 else "arXiv 2607.27230"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [DepthConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        last = DepthRead(dim, eps=norm_eps, scale=self.scale, heads=self.heads) if num_sublayers else None
        return Stream(Copies(1), connections, DepthCollapse(last))


class DepthRead(SelfStarting):
    """Attention over the sources by a learned query, with RMSNorm of the keys and a gain. Starts as their mean.

    A tuple of n tensors (batch, seq, dim) -> (batch, seq, dim) and the weights (batch, seq, n), or with several heads
    (batch, seq, heads, n). With scale="sum", n times that: it starts as their sum. heads is a divisor of dim.
    """

    def __init__(self, dim: int, *, eps: float, scale: Literal["mean", "sum"] = "mean", heads: int = 1):
        super().__init__()
        self.eps, self.heads = eps, heads
        self.scale = scale
        self.query = nn.Parameter(torch.empty(dim))
        self.gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    @on_whole_tensors
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.ones_(self.gain)

    def forward(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        query = at_least_float32(self.query) * at_least_float32(self.gain)
        x, weights = depth_read(sources, query, heads=self.heads, eps=self.eps)
        return x if self.scale == "mean" else derive(partial(torch.mul, other=len(sources)), x), weights


class DepthCollapse(nn.Module):
    """The readout: the same attention over all sources, (batch, seq, dim)."""

    def __init__(self, attend: DepthRead | None):
        super().__init__()
        self.attend = attend

    def forward(self, sources: tuple[Tensor, ...], memory: Memory | None = None) -> Tensor:
        return sources[0] if self.attend is None else self.attend(sources)[0]


class SourcesConnection(Connection):
    """A connection around sublayer `index`, whose output opens a source if `block_size` divides the index.

    Otherwise it is added to the last source. `sources`: what the connection attends over.
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
        """Return the weights of a `DepthRead`, with a read for each head; a single source is read whole."""
        weights = carry.coefficients.weights
        if weights is None:
            return DepthWeights(torch.ones(1, 1), self.sources)
        if weights.dim() == 3:
            return DepthWeights(weights.unsqueeze(-2), self.sources)
        return DepthWeights(weights, self.sources, tuple(f"head {i + 1}" for i in range(weights.shape[-2])))


class DepthConnection(SourcesConnection):
    """One connection of AttnRes. The first sublayer has one source to read and so no query."""

    def __init__(self, scheme: AttentionResiduals, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, index)
        self.attend = DepthRead(dim, eps=norm_eps, scale=scheme.scale, heads=scheme.heads) if index else None
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, weights = (state[0], None) if self.attend is None else self.attend(state)
        return self.norm(x), Carry(state, DepthCoefficients(weights))


def summed(index: int, block_size: int) -> tuple[range, ...]:
    """Return the sources before sublayer `index`: the embedding, and sums of the outputs of `block_size` sublayers."""
    return (EMBEDDING, *(range(i, min(i + block_size, index)) for i in range(0, index, block_size)))
