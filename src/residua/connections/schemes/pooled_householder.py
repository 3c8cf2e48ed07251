"""The pooled Householder shortcut, which the comparison of arXiv 2605.06729 calls "DDL".

    x~ = x - beta k (k^T x),   x <- x~ + F(norm(x~)),   beta = 2 sigmoid(z) in (0, 2)

This is not Deep Delta Learning (arXiv 2601.00417), which is `deep_delta.py`: nothing is written along k, and k comes
from a separate net, not from the sublayer's output. In the published form all tokens of a sequence share one k and one
beta, computed from the mean of the whole sequence. The scheme is included so that the published rows can be reproduced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Norm, Scheme, State, Stream
from residua.connections.families.pooled import K_EPS, Context, PooledConnection, gelu_parts
from residua.connections.parts.delta_maps import Gate
from residua.connections.parts.ends import Same
from residua.connections.parts.facts import GateFacts, RankOne
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Beta
from residua.connections.parts.projection import WideProjection
from residua.ops import at_least_float32, householder, unit
from residua.ops.derived import derive


class PooledHouseholderCoefficients(NamedTuple):
    """beta: (batch, seq), unit vector k: (batch, seq, dim); seq is 1 if the context is the sequence."""

    beta: Tensor
    k: Tensor


@dataclass(frozen=True)
class PooledHouseholder(Scheme):
    """The "DDL" of the comparison in arXiv 2605.06729. It is not Deep Delta Learning, which writes beta k v^T.

    The state is erased along a direction k that is computed from a pooled context. The sublayer's output is added, not
    written along k. Deep Delta Learning is `ddl`.

    context     input of k and beta: the "cumulative" mean of the tokens so far, the "token", or the mean of the
                "sequence" (as published; every token then depends on later ones)
    beta_init   beta of every token at the start, in [0, 2]; 0 and 2 are shifted inwards by 2e-6. 1, as published, is a
                projection, which erases the component along k
    """

    title = "Pooled Householder"
    equation = "x~ + F(norm(x~)), x~ = x - beta k (k^T x)"
    users = 'The comparison in arXiv 2605.06729, under the name "DDL". It is not Deep Delta Learning.'
    paper = "arXiv 2605.06729"
    residual_start = "beta in (0, 2) erases the state along k, and nothing is written there"

    context: Context = "cumulative"
    beta_init: Beta = 1.0

    @property
    def causal(self) -> bool:
        return self.context != "sequence"

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        return {"beta": GateFacts((0.0, 2.0), self.beta_init)}

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [PooledHouseholderConnection(self, dim, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Same(), connections, Same())


class PooledHouseholderConnection(PooledConnection):
    """One pooled Householder shortcut around one sublayer, state: (batch, seq, dim)."""

    def __init__(self, scheme: PooledHouseholder, dim: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme.context, norm, norm_eps=norm_eps)
        hidden = max(1, dim // 4)
        # The first layers of both nets are one product.
        self.up = WideProjection(dim, 2 * hidden, bias=0.0)
        self.k = WideProjection(hidden, dim, bias=0.0)
        self.beta = Gate(hidden, beta_init=scheme.beta_init)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        context = self.pooled(state, memory)
        for_k, for_beta = gelu_parts(self.up(context), 2)
        k = derive(partial(unit, eps=K_EPS), self.k(for_k))
        beta = self.beta(for_beta)
        x = derive(_reflected, state, k, beta)
        return self.norm(x), Carry(x, PooledHouseholderCoefficients(beta, k))

    def write(self, y: Tensor, carry: Carry) -> State:
        return (carry.residual + y).to(carry.residual.dtype)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> RankOne:
        beta, k = (at_least_float32(coefficient) for coefficient in carry.coefficients)
        return RankOne(beta, k, (at_least_float32(state) * k).sum(-1, keepdim=True))


def _reflected(state: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    return householder(state.unsqueeze(-1), k, beta).squeeze(-1)
