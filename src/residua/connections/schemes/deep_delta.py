"""Deep Delta Learning (arXiv 2601.00417): the residual addition becomes a rank-1 delta write.

    X <- X + beta k (v^T - k^T X),   beta = 2 sigmoid(z) in (0, 2)

k-Map: the normalised sublayer output is the direction k; v is 4 sigmoid(W x_in + b) of the compressed
state x_in, or linear.
v-Map: the sublayer's output gives the value v; k is a map phi_k of the context c = RMSNorm(x_in) or of the state.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.channels import ChannelConnection, ChannelScheme, Compressor
from residua.connections.parts.delta_maps import ChannelPool, Direction, Gate, Value
from residua.connections.parts.facts import GateFacts, RankOne
from residua.connections.parts.memory import Memory, current, remembered
from residua.connections.parts.options import Beta, only_with, require_option
from residua.connections.parts.projection import Projection
from residua.errors import Count, Finite, Positive
from residua.ops import KNorm, at_least_float32, delta_write, delta_write_v1, rms_norm, unit

MAPPED = ("scaled_sigmoid", "linear")  # activations after a learned map to v
NETS = ("mlp", "pool_mlp", "flatten_mlp", "attention")  # forms of phi_k with a hidden width


class DeltaCoefficients(NamedTuple):
    """beta: (batch, seq), v: (batch, seq, value_channels), raw direction k: (batch, seq, dim).

    None: computed later, from the sublayer's output: k in the k-Map, v in the v-Map, beta with "sublayer_out".
    """

    beta: Tensor | None
    v: Tensor | None
    k: Tensor | None


@dataclass(frozen=True)
class DeepDelta(ChannelScheme):
    """Deep Delta Learning with the variants of the paper's versions and of the authors' two codes.

    k: the normalised direction along which a connection erases and writes. v: the values that it writes there, one
    for each value channel. beta: the gate from 0 (keeps) over 1 (replaces) to 2 (reflects). The defaults follow the
    authors' code, except for `start`. docs/deviations.md lists every choice.

    map              "k": the sublayer gives the direction. With operator="unit" the scale of its output then has no
                     effect, so LayerScale, DropPath's factor 1/keep and depth-scaled initialisation have none either;
                     an output of zero leaves the state unchanged. "v": the sublayer gives the value
    k_norm           the length m by which the direction k~ is divided: "rms", sqrt(|k~|^2 + k_eps^2); "add",
                     |k~| + k_eps; "clamp", max(|k~|, k_eps); "rms_d", sqrt(|k~|^2 + dim k_eps^2)
    k_eps            the eps in m, which keeps the normalised direction finite if k~ is zero
    k_proj           k-Map: whether k~ is a linear map of the sublayer's output, in place of the output itself
    operator         "unit": I - beta k k^T with unit k; "v1_eps": as in the first version, with raw k
    beta_init        beta of every token at the start, in [0, 2]; 0 and 2 are shifted inwards by 2e-6
    beta_head        "linear", or "mlp": two layers with tanh
    beta_hidden      units of the "mlp"
    beta_input       input of the gate: "context" (RMSNorm of x_in), the state through "pool_mean", "flatten" or
                     "conv", or "sublayer_out", the normalised sublayer output
    v_activation     "scaled_sigmoid" (v_scale * sigmoid), "linear" or "constant" (v_constant)
    v_scale          factor of the "scaled_sigmoid"
    v_constant       the value of "constant"
    v_bias           whether the value map has a bias
    v_input          k-Map: input of the value, "x_in" without a norm or the "context"
    phi_k            v-Map: the map that gives the direction: "linear" and "mlp" of phi_k_input, "pool_mlp" of the mean
                     of the channels, "flatten_mlp" of all of them, or "attention" over them
    phi_k_input      v-Map: input of "linear" and "mlp", the "context" or "x_in" without a norm
    phi_k_hidden     v-Map: hidden width; None: dim / 4 for "mlp" and "attention", dim for "pool_mlp" and "flatten_mlp"
    start            "average": compressors average the channels, and gates start at beta_init; "authors": initialised
                     as in the authors' first code; "rewrite": as in their current code, whose models also have
                     `output_init="depth"`
    """

    # An option that is set without effect raises ValueError. `ChannelScheme` has the options of the state.
    title = "Deep Delta Learning"
    equation = "X + beta k (v^T - k^T X)"
    users = (
        "The authors' public code. No released checkpoint of another group is known. In their repository (July "
        "2026) the authors do not claim that their gains, from single runs, are statistically resolved."
    )
    paper = "arXiv 2601.00417"
    residual_start = "one gate both erases and writes; use gated-delta, which has a gate for each and starts as x + h"
    activations = ("k",)  # the raw direction of a v-Map

    map: Literal["k", "v"] = "k"
    k_norm: Annotated[KNorm, only_with(operator="unit")] = "rms"
    k_eps: Positive = 1e-5
    k_proj: Annotated[bool, only_with(map="k")] = False
    operator: Literal["unit", "v1_eps"] = "unit"
    beta_init: Beta = 1.0
    beta_head: Literal["linear", "mlp"] = "linear"
    beta_hidden: Annotated[Count, only_with(beta_head="mlp")] = 128
    beta_input: Literal["context", "pool_mean", "flatten", "conv", "sublayer_out"] = "context"
    v_activation: Literal["scaled_sigmoid", "linear", "constant"] = "scaled_sigmoid"
    v_scale: Annotated[Finite, only_with(v_activation="scaled_sigmoid")] = 4.0
    v_bias: Annotated[bool, only_with(v_activation=MAPPED)] = True
    v_constant: Annotated[Finite, only_with(v_activation="constant")] = 2.0
    v_input: Annotated[Literal["x_in", "context"], only_with(map="k", v_activation=MAPPED)] = "x_in"
    phi_k: Annotated[Literal["linear", "mlp", "pool_mlp", "flatten_mlp", "attention"], only_with(map="v")] = "mlp"
    phi_k_input: Annotated[Literal["context", "x_in"], only_with(map="v", phi_k=("linear", "mlp"))] = "context"
    phi_k_hidden: Annotated[Count | None, only_with(map="v", phi_k=NETS)] = None
    start: Literal["average", "authors", "rewrite"] = "average"

    def __post_init__(self):
        super().__post_init__()
        valued = self.map == "k" or self.v_activation != "constant"
        require_option(self, "v_activation", valued, "'scaled_sigmoid' or 'linear' with the v-Map")

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        return {"beta": GateFacts((0.0, 2.0), self.beta_init if self.start == "average" else None)}

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        def compressor(_: int) -> Compressor:
            return self.build_compress(dim, self.start)

        def connection(i: int, compress: nn.Module) -> DeltaConnection:
            return DeltaConnection(self, dim, norm(i), compress, norm_eps=norm_eps)

        return self.stream(dim, num_sublayers, compressor, connection)


class DeltaConnection(ChannelConnection):
    """One delta write around one sublayer."""

    def __init__(self, scheme: DeepDelta, dim: int, norm: nn.Module, compress: nn.Module, *, norm_eps: float):
        super().__init__(scheme, compress)
        self.scheme = scheme
        m = scheme.value_channels
        self.norm = norm
        self.norm_eps = norm_eps

        pooling = {"pool_mean": "mean", "flatten": "flatten", "conv": "conv"}.get(scheme.beta_input)
        self.pool = ChannelPool(pooling, dim, m) if pooling else None
        self.beta = Gate(
            self.pool.out_features if self.pool else dim,
            beta_init=scheme.beta_init,
            head=scheme.beta_head,
            hidden=scheme.beta_hidden,
            start=scheme.start,
        )
        self.value = Value(
            dim,
            m,
            activation=scheme.v_activation,
            scale=scheme.v_scale,
            bias=scheme.v_bias,
            constant=scheme.v_constant,
            start=scheme.start,
        )
        self.direction = None
        if scheme.map == "v":
            rank = scheme.phi_k_hidden or (dim if scheme.phi_k in ("pool_mlp", "flatten_mlp") else max(1, dim // 4))
            self.direction = Direction(scheme.phi_k, dim, m, rank, source=scheme.phi_k_input, norm_eps=norm_eps)
        self.k_proj = Projection(dim, dim) if scheme.k_proj else None
        self.window = max(self.window, self.pool.window if self.pool else 0)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        scheme = self.scheme
        streams = self.streams(state)
        if self.pool is None:
            x_in, pooled = self.compress(streams, memory), None
        elif not self.pool.window or memory is None or not memory.keeps:
            x_in, pooled = self.compress(streams, memory), self.pool(streams, memory)
        else:  # compressor and gate need the same earlier tokens
            extended = remembered(streams, memory, self.window)
            x_in, pooled = (current(part(extended), streams, extended) for part in (self.compress, self.pool))
        context = self.norm(x_in)

        beta = v = k = None
        if scheme.beta_input != "sublayer_out":
            beta = self.beta(context if pooled is None else pooled)
        if self.direction is None:
            v = self.value(x_in if scheme.v_input == "x_in" else context)
        else:
            k = self.direction(x_in, context, streams)
        return context, Carry(state, DeltaCoefficients(beta, v, k))

    def completed(self, y: Tensor, coefficients: DeltaCoefficients) -> tuple[Tensor, Tensor, Tensor]:
        """Return beta, v and k, including those that depend on the sublayer's output y: (batch, seq, dim)."""
        beta, v, k = coefficients
        if beta is None:
            beta = self.beta(rms_norm(y, eps=self.norm_eps))
        if v is None:
            v = self.value(y)
        if k is None:
            k = y if self.k_proj is None else self.k_proj(y)
        return beta, v, k

    def write(self, y: Tensor, carry: Carry) -> State:
        scheme, state = self.scheme, carry.residual
        beta, v, k = self.completed(y, carry.coefficients)
        streams = self.streams(state)
        if scheme.operator == "unit":
            streams = delta_write(
                streams, k, v, beta, k_norm=scheme.k_norm, eps=scheme.k_eps, recompute_every=scheme.keeps_every
            )
        else:
            streams = delta_write_v1(streams, k, v, beta, eps=scheme.k_eps)
        return streams if scheme.has_stream_axis else streams.squeeze(-2)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> RankOne:
        """Return every form of the write as X + beta k (v^T - k^T X), with |k| = 1 up to eps.

        The first version's I - beta k k^T / (k^T k + eps) and beta k v^T have this form with k / sqrt(k^T k + eps) and
        sqrt(k^T k + eps) v.
        """
        scheme = self.scheme
        beta, v, k = (at_least_float32(x) for x in self.completed(y, carry.coefficients))
        if scheme.operator == "unit":
            k = unit(k, k_norm=scheme.k_norm, eps=scheme.k_eps)
        else:
            length = (k.square().sum(-1, keepdim=True) + scheme.k_eps).sqrt()
            k, v = k / length, length * v
        streams = at_least_float32(self.streams(state))
        return RankOne(beta, k, (streams * k.unsqueeze(-2)).sum(-1), v, self.compressor.shares())
