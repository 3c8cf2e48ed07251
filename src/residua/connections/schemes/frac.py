"""Frac-Connections (arXiv 2503.14125): hyper-connections among the fractions of one state, which is not widened.

The state is m fractions H[i] of dim / m features, which a sublayer reads and writes side by side:

    x[o] = sum_i h_pre[o, i] H[i],   H[o] <- sum_i h_res[o, i] H[i] + h_post[o] F(norm(x))[o]

h_pre, h_res and h_post are Y^T, A^T and B of the paper: constants (static) or dependent on the token (dynamic).
"""

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.mixing import CutConnection, MixingCoefficients, WeightedConnection, WeightedScheme
from residua.connections.parts.ends import Same
from residua.connections.parts.facts import Mixing
from residua.connections.parts.options import DIVIDES_WIDTH, Rows
from residua.ops import hyper_mix


@dataclass(frozen=True)
class FracConnections(WeightedScheme):
    """Frac-Connections. Starts as exactly the plain residual, and keeps a state of the model's width.

    The paper calls the weights DFC with `dynamic`, SFC without. One fraction is a hyper-connection of one stream.

    num_fractions   m, the frac-rate
    """

    title = "Frac-Connections"
    equation = "h_res H + h_post F(norm(h_pre H)), H the fractions of x"
    users = "The authors' experiments, up to 7B parameters. No released model is known."
    paper = "arXiv 2503.14125"
    residual_start = {}

    num_fractions: Annotated[Rows, DIVIDES_WIDTH] = 4

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [FracConnection(self, dim, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Same(), connections, Same())


class FracConnection(CutConnection, WeightedConnection):
    """One frac-connection; the state is (batch, seq, dim). It reads as many mixtures as there are fractions."""

    def __init__(self, scheme: FracConnections, dim: int, norm: nn.Module, *, norm_eps: float):
        m = scheme.num_fractions
        super().__init__(scheme, m, dim // m, norm, reads=m, first=0, norm_eps=norm_eps)
        self.pieces = m

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        alpha, beta = self.weights(streams)
        h_pre, h_res = (columns.mT.contiguous() for columns in alpha.split(self.reads, -1))
        return MixingCoefficients(h_pre, h_res, beta)

    def gather(self, rows: Tensor, h_pre: Tensor) -> Tensor:
        return hyper_mix(rows, h_pre, implementation=self.scheme.implementation)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return the mixing of the fractions, without h_pre, because a sublayer reads m mixtures instead of one."""
        _, h_res, h_post = carry.coefficients
        return Mixing(h_res, h_post=h_post)
