"""The gated orthogonal update: a gate for each token decides how much of the update along the state is written.

    x <- x + h - e (<h, x> / |x|^2) x,   h = F(c),   c = norm(x),   e = tanh(w . c + b)

w and b start at 0, so the connection starts as exactly x + h. e = 1 removes the component of h along x (the
orthogonal update of arXiv 2505.11881), e = -1 doubles it. The scheme applies a delta along the state's own direction to
the update. Equivalently, it scales the residual by 1 - e <h, x> / |x|^2, which depends on the token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.convolved import CompressingConnection, SingleStreamScheme
from residua.connections.parts.facts import GateFacts, Mixing
from residua.connections.parts.gates import GateCoefficients, StaticGate, TokenGate
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Divisor, only_with
from residua.errors import Positive
from residua.ops import at_least_float32, orthogonal_update, residual_scale


@dataclass(frozen=True)
class GatedOrthogonal(SingleStreamScheme):
    """The gated orthogonal update, our variant. It starts as exactly the plain residual, unless `gate="one"`.

    With `gate="one"` it is the orthogonal update of arXiv 2505.11881, the preset `orthogonal`.

    gate            "token": e = scale tanh(w . c + b) from the normalised context c, which the sublayer sees;
                    "static": e = scale tanh(b), the same for all tokens; "one": e = 1, the orthogonal update
    scale           range of e: (-scale, scale)
    heads           number of groups of features, each with its own projection and gate
    sublayers       which sublayers have a gate: "all", or only the first ("attention") or the second ("mlp") of each
                    pair; the others have the plain residual
    eps             added to |x|^2; 1e-6 as in the code of arXiv 2505.11881
    """

    title = "Gated orthogonal update"
    equation = "x + h - e (<h, x> / |x|^2) x, h = F(c), e = tanh(w . c + b), c = norm(x)"
    users = 'Nobody yet: it is a form of our own. With `gate="one"`, the authors\' experiments, mostly on images.'
    paper = "arXiv 2505.11881"

    gate: Literal["token", "static", "one"] = "token"
    scale: Annotated[Positive, only_with(gate=("token", "static"))] = 1.0
    heads: Divisor = 1
    sublayers: Literal["all", "attention", "mlp"] = "all"
    eps: Positive = 1e-6

    @property
    def source(self) -> str:
        return self.paper if self.gate == "one" else f"ours, after {self.paper}"

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        if self.gate == "one":
            return {}
        return dict.fromkeys(_names(self.heads), GateFacts((-self.scale, self.scale), 0.0))

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        if self.gate != "one":
            return {}
        return "gate='one' removes the update along the state; use gate='token' or 'static', which start at 0"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        gated = {"all": (0, 1), "attention": (0,), "mlp": (1,)}[self.sublayers]

        def connection(i: int, compress: nn.Module) -> OrthogonalConnection:
            return OrthogonalConnection(self, dim, norm(i), compress, gated=i % 2 in gated)

        return self.stream(dim, num_sublayers, connection)


class OrthogonalConnection(CompressingConnection):
    """One gated orthogonal update around one sublayer, state: (batch, seq, dim). Without `gated`, e = 0."""

    def __init__(self, scheme: GatedOrthogonal, dim: int, norm: nn.Module, compress: nn.Module, *, gated: bool):
        super().__init__(compress)
        self.gated = gated
        self.eps, self.heads = scheme.eps, scheme.heads
        self.norm = norm
        self.gate: nn.Module | None = None
        if gated and scheme.gate == "token":
            self.gate = TokenGate(dim, scheme.heads, scale=scheme.scale)
        elif gated and scheme.gate == "static":
            self.gate = StaticGate(scheme.heads, scale=scheme.scale)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        context = self.norm(self.compress(state, memory))
        if self.gate is None:
            fixed = at_least_float32(context).new_full((self.heads,), float(self.gated))
            return context, Carry(state, GateCoefficients(fixed))
        return context, Carry(state, GateCoefficients(self.gate(context)))

    def write(self, y: Tensor, carry: Carry) -> State:
        return orthogonal_update(carry.residual, y, carry.coefficients.gate, eps=self.eps)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return a diagonal h_res with the scale of the residual in each head, 1 - e <h, x> / |x|^2.

        Its rows are the heads, (heads, dim / heads). <h, x> and |x|^2 are treated as constants.
        """
        (gate,) = carry.coefficients
        scale = residual_scale(state, y, gate, eps=self.eps)
        heads, values = gate.shape[-1], gate.expand(scale.shape)
        gates = dict(zip(_names(heads), values.unbind(-1)))
        omitted = () if self.gated else tuple(gates)
        return Mixing(torch.diag_embed(scale), h_post=torch.ones_like(scale[0, 0]), gates=gates, left_out=omitted)


def _names(heads: int) -> list[str]:
    """Return the names of the heads' gates."""
    return ["gate"] if heads == 1 else [f"gate_{head}" for head in range(heads)]
