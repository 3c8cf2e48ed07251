"""Attention residuals as Inkling-2 runs them (`inkling2` in transformers): values are normalised as the keys are.

    x = sum_i a_i N_i,   a = softmax_i(w . N_i / sqrt(dim)),   N_i = V_i / sqrt(mean(V_i^2) + eps)

The sources V_i are those of Block AttnRes (`attnres-block`). In every sixth layer, queries, keys and values of the
attention each have their own read and norm.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.depth import SourcesConnection, SourcesScheme
from residua.connections.parts.ends import Copies
from residua.connections.parts.facts import DepthWeights
from residua.connections.parts.memory import Memory
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count, Natural
from residua.ops import at_least_float32, depth_read


class InklingCoefficients(NamedTuple):
    """weights, key_weights, value_weights: (batch, seq, sources), attention over depth, in at least float32.

    weights: of the only read, or of the read for queries. None for a read that does not exist.
    """

    weights: Tensor | None
    key_weights: Tensor | None
    value_weights: Tensor | None


@dataclass(frozen=True)
class InklingAttentionResiduals(SourcesScheme):
    """Inkling-2's AttnRes. Does not start as the plain residual: the mean of normalised sources loses their sizes.

    The sublayers 0, 2, 4, ... must be attention, as in every model here.

    block_size      the number of outputs that are summed into one source; 12 is Inkling-2's block of six layers
    separate_every  k: in every k-th layer, attention reads queries, keys and values separately; with 0, in no layer
    """

    title = "Attention residuals of Inkling-2"
    equation = "V_l = F(norm(sum_i a_i norm(V_i))), a = softmax_i(w . norm(V_i) / sqrt(d))"
    users = "Inkling-2 (`inkling2` in transformers). `residua.models.dialects` loads its parameters."
    paper = "transformers, models/inkling2"
    residual_start = "the sources are normalised before they are summed, which loses their sizes; use attnres"

    block_size: Count = 12
    separate_every: Natural = 6

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        """Build the stream. Where queries, keys and values are read separately, each gets a copy of the given norm."""
        connections = [InklingConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        last = InklingRead(dim, eps=norm_eps) if num_sublayers else None
        return Stream(Copies(1), connections, InklingCollapse(last))


class InklingRead(SelfStarting):
    """One attention over the sources for each of `reads` queries. At the start it reads the mean of normalised sources.

    The queries start at 0. A tuple of n tensors (batch, seq, dim) -> `reads` pairs of x: (batch, seq, dim) and the
    weights: (batch, seq, n), in at least float32.
    """

    def __init__(self, dim: int, *, reads: int = 1, eps: float):
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(reads, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)

    def forward(self, sources: tuple[Tensor, ...]) -> list[tuple[Tensor, Tensor]]:
        queries = at_least_float32(self.query) * self.query.shape[-1] ** -0.5
        return [depth_read(sources, query, normalise_values=True, eps=self.eps) for query in queries.unbind()]


class InklingCollapse(nn.Module):
    """The readout: attention over all sources, as in a connection. Returns (batch, seq, dim)."""

    def __init__(self, attend: InklingRead | None):
        super().__init__()
        self.attend = attend

    def forward(self, sources: tuple[Tensor, ...], memory: Memory | None = None) -> Tensor:
        return sources[0] if self.attend is None else self.attend(sources)[0][0].to(sources[0].dtype)


class InklingConnection(SourcesConnection):
    """One connection. The first sublayer reads the embedding as it is, without a query."""

    single_input = "separate_every=0"

    def __init__(self, scheme: InklingAttentionResiduals, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, index)
        layer, mlp = divmod(index, 2)
        separate = not mlp and scheme.separate_every > 0 and (layer + 1) % scheme.separate_every == 0
        self.inputs = 3 if separate else 1
        self.attend = InklingRead(dim, reads=3 if separate else 1, eps=norm_eps) if index else None
        self.norm = norm
        self.key_norm = deepcopy(norm) if separate else None
        self.value_norm = deepcopy(norm) if separate else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor | tuple[Tensor, ...], Carry]:
        reads = [(state[0], None)] if self.attend is None else self.attend(state)
        used = [norm for norm in (self.norm, self.key_norm, self.value_norm) if norm is not None]
        sources = reads if len(reads) == len(used) else reads * len(used)
        inputs = tuple(norm(x).to(state[0].dtype) for norm, (x, _) in zip(used, sources))
        weights = [weight for _, weight in reads] + [None] * (3 - len(reads))
        return inputs if len(inputs) > 1 else inputs[0], Carry(state, InklingCoefficients(*weights))

    def depth_weights(self, carry: Carry) -> DepthWeights | None:
        query, *others = carry.coefficients
        if others[0] is None:
            return super().depth_weights(carry)
        return DepthWeights(torch.stack([query, *others], -2), self.sources, ("q", "k", "v"))
