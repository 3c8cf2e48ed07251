"""Schemes with a state of several rows: the states that the backward pass keeps, and the first state."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Scheme
from residua.connections.parts.ends import Repeat
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import SeveralRows
from residua.connections.parts.sharded import SelfStarting
from residua.connections.parts.spec import TensorSpec
from residua.errors import Range
from residua.ops import causal_expand
from residua.ops.derived import derive


@dataclass(frozen=True, kw_only=True)
class RecomputingScheme(Scheme):
    """A scheme whose write is linear in a state of several rows. The options change memory and speed, never numbers.

    recompute        "replay" keeps every `recompute_every`-th state and recomputes the others in the backward pass,
                     equal to the last bit on a CPU, within rounding on a GPU; "none" keeps all states. Second
                     derivatives need "none". A compiled model and the Triton kernels always keep all
    recompute_every  keep one state in this many, 1 to 64
    """

    recompute: Literal["none", "replay"] = "replay"
    # Recomputing recurses once for each state that was not kept; 64 is well below Python's recursion limit.
    recompute_every: Annotated[int, Range("1 to 64", lambda count: 1 <= count <= 64)] = 4

    @property
    def keeps_every(self) -> int:
        """The number m for keeping one state in m."""
        return self.recompute_every if self.recompute == "replay" else 1

    def derive(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs) of a state, recomputed in the backward pass like the states."""
        return derive(function, *inputs) if self.recompute == "replay" else function(*inputs)


@dataclass(frozen=True)
class ExpandingScheme(RecomputingScheme):
    """A scheme whose state is n streams, (batch, seq, n, dim), which start from copies of the embedding.

    num_streams  n, at least 2
    expand       "repeat" the embedding; "lss": each times its own learned gains for each feature, from 0.6 and
                 Xavier's noise, so that streams differ from the start (learned symmetry breaking, arXiv 2606.03483);
                 "gains": the same from 1, which keeps the start of the scheme
    """

    num_streams: SeveralRows = 4
    _: KW_ONLY
    expand: Literal["repeat", "lss", "gains"] = "repeat"

    def state_spec(self, boundary: int, dim: int) -> TensorSpec:
        return TensorSpec((self.num_streams, dim))

    @property
    def streams_differ(self) -> bool:
        """Whether the streams can differ before the first write."""
        return self.expand != "repeat"

    def preserving(self) -> Any:
        """Return the start of the base class, with gains, if there are any, that start at 1."""
        scheme: Any = super().preserving()
        return replace(scheme, expand="gains" if self.streams_differ else "repeat")

    def expander(self, dim: int) -> nn.Module:
        """Build the first part of the stream, (batch, seq, dim) -> (batch, seq, num_streams, dim)."""
        if not self.streams_differ:
            return Repeat(self.num_streams)
        return StreamGains(dim, self.num_streams, noise=self.expand == "lss")


class StreamGains(SelfStarting):
    """X[j] = lambda_j x with learned gains lambda_j: (dim,) for each stream, an embedding convolution of one tap.

    The gains start at 1; with `noise` at 0.6 and uniform noise of Xavier's size. (batch, seq, dim) -> (batch, seq,
    streams, dim). arXiv 2606.03483.
    """

    def __init__(self, dim: int, num_streams: int, *, noise: bool):
        super().__init__()
        self.noise = noise
        self.taps = nn.Parameter(torch.empty(1, num_streams, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = math.sqrt(6 / sum(self.taps.shape[1:]))
        if self.noise:
            nn.init.uniform_(self.taps, 0.6 - bound, 0.6 + bound)
        else:
            nn.init.ones_(self.taps)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        return causal_expand(x, self.taps)
