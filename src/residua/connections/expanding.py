"""Schemes with a state of several streams, which start as copies of the embedding, or as copies times learned gains."""

import math
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal

from torch import nn

from residua.connections.ends import Repeat, TokenConv
from residua.connections.options import SeveralRows
from residua.connections.recomputing import RecomputingScheme
from residua.connections.sharded import on_whole_tensors
from residua.connections.spec import TensorSpec


@dataclass(frozen=True)
class ExpandingScheme(RecomputingScheme):
    """A scheme whose state is n streams, (batch, seq, n, dim), which start from copies of the embedding.

    num_streams  n, at least 2
    expand       "copies" of the embedding; "lss": each times its own learned gains for each feature, from 0.6 and
                 Xavier's noise, so that streams differ from the start (learned symmetry breaking, arXiv 2606.03483);
                 "gains": the same from 1, which keeps the start of the scheme
    """

    num_streams: SeveralRows = 4
    _: KW_ONLY
    expand: Literal["copies", "lss", "gains"] = "copies"

    def state_spec(self, boundary: int, dim: int) -> TensorSpec:
        return TensorSpec((self.num_streams, dim))

    @property
    def streams_differ(self) -> bool:
        """Whether the streams can differ before the first write."""
        return self.expand != "copies"

    def preserving(self) -> Any:
        """As the base class says, with gains that start at 1, if there are any."""
        scheme: Any = super().preserving()
        return replace(scheme, expand="gains" if self.streams_differ else "copies")

    def expander(self, dim: int) -> nn.Module:
        """Build the first part of the stream, (batch, seq, dim) -> (batch, seq, num_streams, dim)."""
        if not self.streams_differ:
            return Repeat(self.num_streams)
        return StreamGains(dim, self.num_streams, noise=self.expand == "lss")


class StreamGains(TokenConv):
    """X[j] = lambda_j x with learned gains lambda_j: (dim,) for each stream, an embedding convolution of one tap.

    The gains start at 1; with `noise` at 0.6 and uniform noise of Xavier's size. (batch, seq, dim) -> (batch, seq,
    streams, dim). arXiv 2606.03483.
    """

    def __init__(self, dim: int, num_streams: int, *, noise: bool):
        self.noise = noise
        super().__init__(dim, 1, num_streams)

    @on_whole_tensors
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.noise:
            bound = math.sqrt(6 / sum(self.taps.shape[1:]))
            nn.init.uniform_(self.taps, 0.6 - bound, 0.6 + bound)
