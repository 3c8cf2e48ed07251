"""EDelta-MHC-Geo (arXiv 2605.06729): a gate between an exact Cayley rotation and a Householder reflection.

    g = (gamma Q + (1 - gamma) H) X,   Q = (I + M)^-1 (I - M),   M = beta / 2 (u v^T - v u^T),   H = I - 2 k k^T

Q and H are n x n and mix the n rows of the state; the features of a row stay where they are. gamma, beta, k, u and v
are computed from the state. The sublayer sees g and its output is added to g.

Except at gamma = 0 and 1 the shortcut is not an isometry: it shrinks some direction of R^n by |2 gamma - 1| and is
singular at gamma = 1/2. The penalty 4 gamma (1 - gamma) equals this defect, |G^T G - I|. On R^(n d) the reflection has
determinant (-1)^d, so it changes the orientation only for odd d.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, Scheme, State, Stream
from residua.connections.families.pooled import K_EPS, Context, PooledConnection, gelu_parts
from residua.connections.families.stream_logits import Router
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams, Same
from residua.connections.parts.facts import GateFacts, Mixing
from residua.connections.parts.gates import logit
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import LayerNorm
from residua.connections.parts.options import DIVIDES_WIDTH, Fraction, SeveralRows, require_option
from residua.connections.parts.projection import Projection, WideProjection, project
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count, NotNegative, Positive
from residua.ops import cayley_angle, gate_penalty, hybrid, hyper_read, hyper_write, unit
from residua.ops.derived import derive, flattened


class EDeltaCoefficients(NamedTuple):
    """gamma, beta: (batch, seq), k, u, v: (batch, seq, num_streams); seq is 1 if the context is the sequence.

    The variant with streams also has h_pre and h_post: (batch, seq, num_streams), the weights that read and write the
    rows, reduced to vectors as in `JacobianConnection`. h_post is None in the last sublayer, see
    `EDeltaStreamConnection`.
    """

    gamma: Tensor
    beta: Tensor
    k: Tensor
    u: Tensor
    v: Tensor
    h_pre: Tensor | None = None
    h_post: Tensor | None = None


@dataclass(frozen=True)
class _Hybrid(Scheme):
    """The options of both variants.

    num_streams   rows of the state, at least 2; `edelta` cuts the width into this many rows
    context       input of the coefficients: the "token", the "cumulative" mean of the tokens so far, or the mean of the
                  "sequence" (published)
    hidden        hidden width of the nets of u, v, k and beta, or of the one net of `edelta-stream`; None: dim / 4
    gamma_init    gamma of every token at the start, in (0, 1); 1 rotates, 0 reflects; published: 0.5
    cayley_init   beta at the start, which is nearly the rotation angle because u and v start orthonormal here;
                  published: 0.693, with u and v nearly 0
    penalty       weight of the mean of 4 gamma (1 - gamma) in the loss; 0 for none
    """

    paper = "arXiv 2605.06729"

    num_streams: SeveralRows = 4
    context: Context = "token"
    hidden: Count | None = None
    gamma_init: Fraction = 0.82
    cayley_init: Positive = 0.1
    penalty: NotNegative = 0.1

    @property
    def causal(self) -> bool:
        return self.context != "sequence"

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        return {"gamma": GateFacts((0.0, 1.0), self.gamma_init)}


@dataclass(frozen=True)
class EDelta(_Hybrid):
    """The hybrid: only for Q and H, the state (batch, seq, dim) is cut into num_streams rows of dim / num_streams.

        x <- g + H_post F(H_pre norm(g)),   g = (gamma Q + (1 - gamma) H) x

    The published version differs. Its coefficients come from the mean of the sequence, which is not causal. Its gamma
    starts at 0.5, where the shortcut is singular and training is slow. Its Cayley angle starts at about 1e-9, where the
    gradient vanishes too. Its H_pre and H_post are meant to start as the identity, but are overwritten with
    N(0, 0.02^2).

    projections   whether the sublayer has the dense dim x dim maps H_pre and H_post, which start as the identity
    """

    title = "EDelta-MHC-Geo"
    equation = "g + H_post F(H_pre norm(g)), g = (gamma Q + (1 - gamma) (I - 2 k k^T)) x"
    users = "The authors' experiments. No released model is known."
    residual_start = (
        "the shortcut reflects with a share 1 - gamma > 0, which changes every state; edelta-stream has such a start"
    )

    num_streams: Annotated[SeveralRows, DIVIDES_WIDTH] = 4
    projections: bool = True

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [EDeltaConnection(self, dim, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Same(), connections, Same())


@dataclass(frozen=True)
class EDeltaStream(ExpandingScheme, _Hybrid):
    """The variant with num_streams rows of full width and a router: the state is (batch, seq, num_streams, dim).

        X <- g + H_post (1 y^T),   y = F(norm(mean_i (H_pre g)_i)),   g = (gamma Q + (1 - gamma) H) X

    One net computes all coefficients from the normalised context of the whole state. The router is the one in JPmHC
    (arXiv 2602.18308): H_pre = softmax(P, -1) and H_post = softmax(R, -2), for each token from its own g.

    The published version has `context="sequence"`, `gamma_init=0.5` and `penalty=0.0`, because its training loop never
    adds the penalty for this variant. There, linear maps of width num_streams * dim make and read out the state. Here
    the embedding is repeated and the rows are averaged, so the last H_post could not change anything and is omitted.

    start         "published": u, v and k are drawn; "residual": they start orthogonal to the mean of at least 3 rows,
                  the same for all tokens, so that Q and H keep the mean, which is then exactly the plain residual
    """

    title = "EDelta-MHC-Geo with streams"
    equation = "g + H_post (1 F(norm(mean(H_pre g)))^T), g = (gamma Q + (1 - gamma) (I - 2 k k^T)) X"
    users = "The authors' experiments. No released model is known."

    hidden: Count = 48
    start: Literal["published", "residual"] = "published"

    def __post_init__(self):
        super().__post_init__()
        if self.start == "residual":
            require_option(self, "num_streams", self.num_streams >= 3, "at least 3 with start='residual'")

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        if self.num_streams >= 3:
            return {"start": "residual"}  # Q and H keep the mean of the rows, and every write adds y to it
        return "the only plane that num_streams=2 can rotate in contains the mean of the streams; use at least 3"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        places = range(num_sublayers)
        connections = [EDeltaStreamConnection(self, dim, i, num_sublayers, norm(i), norm_eps=norm_eps) for i in places]
        return Stream(self.expander(dim), connections, MeanStreams())


class Frame(SelfStarting):
    """Random start of u, v and k, the rows of a (3, n) matrix: u and v are orthonormal, k is a unit vector.

    With u = v there would be no rotation: u v^T - v u^T would vanish, and every gradient with it. With `centred`, the
    entries of each row sum to exactly 0 in every dtype: a row has two or three entries other than 0, at random places.
    """

    def __init__(self, n: int, *, centred: bool):
        super().__init__()
        self.centred = centred
        self.rows = nn.Parameter(torch.empty(3, n))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.centred:
            self._contrasts()
            return
        # orthogonal_ supports only float32 and float64.
        dtype = torch.promote_types(self.rows.dtype, torch.float32)
        plane, mirror = (self.rows.new_empty(count, self.rows.shape[1], dtype=dtype) for count in (2, 1))
        nn.init.orthogonal_(plane)
        nn.init.orthogonal_(mirror)
        with torch.no_grad():
            self.rows.copy_(torch.cat([plane, mirror]))

    @torch.no_grad()
    def _contrasts(self) -> None:
        n, dtype = self.rows.shape[1], self.rows.dtype
        rows = torch.zeros(3, n, dtype=dtype, device="cpu")
        plane, mirror = (torch.randperm(n, device="cpu").tolist() for _ in range(2))
        for row, places, contrast in zip(rows, (plane, plane, mirror), ((1, -1), (1, 1, -2), (1, -1))):
            smallest = torch.tensor(1 / math.sqrt(sum(entry**2 for entry in contrast)), dtype=dtype, device="cpu")
            for place, entry in zip(places, contrast):
                row[place] = entry * smallest  # exact multiples of one rounded number, so that the sum is exact
        self.rows.copy_(rows)

    def forward(self) -> Tensor:
        return self.rows


class Heads(nn.Module):
    """u, v, the unit vector k and beta = softplus(w . h + b) from hidden features: (..., hidden) each.

    The weights start small next to the biases, so that all tokens start with nearly the same operator; with `centred`
    they start at 0, see `Frame`. The weights of beta start at 0, so beta = beta_init for every token.
    """

    def __init__(self, hidden: int, n: int, *, beta_init: float, centred: bool = False):
        super().__init__()
        self.u, self.v, self.k = (WideProjection(hidden, n, std=0.0 if centred else 0.02) for _ in range(3))
        self.frame = Frame(n, centred=centred)
        # b + log(1 - e^-b) is the inverse of softplus.
        self.beta = WideProjection(hidden, 1, std=0.0, bias=beta_init + math.log(-math.expm1(-beta_init)))

    def forward(self, u: Tensor, v: Tensor, k: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        start_u, start_v, start_k = self.frame().unbind()
        return (
            project(self.u, u, bias=start_u),
            project(self.v, v, bias=start_v),
            unit(project(self.k, k, bias=start_k), eps=K_EPS),
            F.softplus(self.beta(beta)).squeeze(-1),
        )


class BlendGate(nn.Module):
    """gamma = sigmoid(w . x + b) in (0, 1), at the start gamma_init for every x. (..., features) -> (...)."""

    def __init__(self, features: int, *, gamma_init: float):
        super().__init__()
        self.out = WideProjection(features, 1, std=0.0, bias=logit(gamma_init))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.out(x).squeeze(-1))


class _HybridConnection(PooledConnection):
    """The penalty and the shortcut of both variants."""

    def __init__(self, scheme: _Hybrid, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme.context, norm, norm_eps=norm_eps)
        self.scheme = scheme

    def penalty(self, coefficients: EDeltaCoefficients) -> Tensor | None:
        if not self.scheme.penalty:
            return None
        return self.scheme.penalty * gate_penalty(coefficients.gamma)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return gamma Q + (1 - gamma) H as the matrix h_res, with the router's weights if there is one."""
        gamma, beta, k, u, v, h_pre, h_post = carry.coefficients
        n = k.shape[-1]
        identity = torch.eye(n, dtype=gamma.dtype, device=gamma.device).expand(*gamma.shape, n, n)
        gates = {"gamma": gamma, "cayley_beta": beta, "angle": cayley_angle(u, v, beta)}
        h_res = hybrid(identity, u, v, beta, k, gamma)
        if h_pre is None:
            return Mixing(h_res, gates=gates)
        if h_post is None:
            return Mixing(h_res, h_pre, gamma.new_ones(n), gates, left_out=("h_post",))
        return Mixing(h_res, h_pre, h_post, gates)


class EDeltaConnection(_HybridConnection):
    """One hybrid shortcut around one sublayer, state: (batch, seq, dim)."""

    def __init__(self, scheme: EDelta, dim: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, norm, norm_eps=norm_eps)
        hidden = scheme.hidden or max(1, dim // 4)
        # The first layers of the four nets are one product.
        self.up = WideProjection(dim, 4 * hidden, bias=0.0)
        self.heads = Heads(hidden, scheme.num_streams, beta_init=scheme.cayley_init)
        self.gamma = BlendGate(dim, gamma_init=scheme.gamma_init)
        self.h_pre = Projection(dim, dim, std="identity") if scheme.projections else nn.Identity()
        self.h_post = Projection(dim, dim, std="identity") if scheme.projections else nn.Identity()

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        context = self.pooled(state, memory)
        u, v, k, beta = self.heads(*gelu_parts(self.up(context), 4))
        gamma = self.gamma(context)
        g = derive(partial(_turned, self.scheme.num_streams), state, u, v, beta, k, gamma)
        return self.h_pre(self.norm(g)), Carry(g, EDeltaCoefficients(gamma, beta, k, u, v))

    def write(self, y: Tensor, carry: Carry) -> State:
        return (carry.residual + self.h_post(y)).to(carry.residual.dtype)


def _turned(num_streams: int, state: Tensor, *coefficients: Tensor) -> Tensor:
    """Return `hybrid` applied to a state (batch, seq, dim), whose features are cut into rows."""
    return hybrid(state.unflatten(-1, (num_streams, -1)), *coefficients).flatten(-2)


class EDeltaStreamConnection(_HybridConnection):
    """One hybrid shortcut and one router around one sublayer, state: (batch, seq, num_streams, dim).

    The last of `count` sublayers has no H_post, because the mean of the rows grows by y for any H_post. The first has
    an H_pre: the rows of its g are multiples c_i x of one vector, and c = G 1 has negative entries once the gate
    reflects, so H_pre decides whether the sublayer sees x or -x.
    """

    def __init__(self, scheme: EDeltaStream, dim: int, index: int, count: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, norm, norm_eps=norm_eps)
        self.scheme: EDeltaStream = scheme
        n = scheme.num_streams
        self.distributes = index < count - 1
        self.context_norm = LayerNorm(n * dim, eps=norm_eps)
        self.up = WideProjection(n * dim, scheme.hidden, bias=0.0)
        self.heads = Heads(scheme.hidden, n, beta_init=scheme.cayley_init, centred=scheme.start == "residual")
        self.gamma = BlendGate(scheme.hidden, gamma_init=scheme.gamma_init)
        self.router = Router(dim, n, ["pre", *["post"] * self.distributes], norm_eps=norm_eps)

    def routing(self, g: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute h_pre and h_post for the rows of g."""
        pre, *post = self.router(g).unbind(-3)
        return pre.softmax(-1).mean(-2), post[0].softmax(-2).sum(-1) if post else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        context = self.context_norm(self.pooled(flattened(state), memory))
        hidden = self.scheme.derive(F.gelu, self.up(context))
        u, v, k, beta = self.heads(hidden, hidden, hidden, hidden)
        gamma = self.gamma(hidden)
        g = self.scheme.derive(hybrid, state, u, v, beta, k, gamma)
        h_pre, h_post = self.routing(g)
        return self.norm(hyper_read(g, h_pre)), Carry(g, EDeltaCoefficients(gamma, beta, k, u, v, h_pre, h_post))

    def write(self, y: Tensor, carry: Carry) -> State:
        g, h_post = carry.residual, carry.coefficients.h_post
        if h_post is None:
            return (g + y.unsqueeze(-2)).to(g.dtype)
        return hyper_write(g, y, None, h_post, recompute_every=self.scheme.keeps_every)
