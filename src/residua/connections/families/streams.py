"""Options of schemes with a state of several rows: recomputation in the backward pass, and the first state."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Scheme
from residua.connections.parts.ends import Repeat
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import SeveralRows, only_with
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
                     derivatives need "none". A compiled model and the Triton kernels always keep all states
    recompute_every  keep one state in this many, 1 to 64
    """

    recompute: Literal["none", "replay"] = "replay"
    # Recomputing recurses once for each state that was not kept; 64 is well below Python's recursion limit.
    recompute_every: Annotated[int, Range("1 to 64", lambda count: 1 <= count <= 64), only_with(recompute="replay")] = 4

    @property
    def keeps_every(self) -> int:
        """The number m if one state in m is kept for the backward pass."""
        return self.recompute_every if self.recompute == "replay" else 1

    def derive(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs); if states are recomputed in the backward pass, so is this result."""
        return derive(function, *inputs) if self.recompute == "replay" else function(*inputs)


@dataclass(frozen=True)
class ExpandingScheme(RecomputingScheme):
    """A scheme whose state is n streams, (batch, seq, n, dim), which start from copies of the embedding.

    num_streams  n, at least 2
    expand       "repeat" the embedding; "lss": multiply each copy by its own learned gains, which start at 0.6 plus
                 Xavier's noise, so that the streams differ from the start (learned symmetry breaking, arXiv
                 2606.03483); "gains": the same with gains that start at 1, which leaves the scheme's start unchanged
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
        """Return the `preserving` scheme of the base class, with gains that start at 1 if there are gains."""
        scheme: Any = super().preserving()
        return replace(scheme, expand="gains" if self.streams_differ else "repeat")

    def expander(self, dim: int) -> nn.Module:
        """Build the first part of the stream, (batch, seq, dim) -> (batch, seq, num_streams, dim)."""
        if not self.streams_differ:
            return Repeat(self.num_streams)
        return StreamGains(dim, self.num_streams, noise=self.expand == "lss")


class StreamGains(SelfStarting):
    """X[j] = lambda_j x with learned gains lambda_j: (dim,) for each stream, an embedding convolution of one tap.

    The gains start at 1, or with `noise` at 0.6 plus uniform noise of Xavier's range.
    (batch, seq, dim) -> (batch, seq, streams, dim). arXiv 2606.03483.
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
