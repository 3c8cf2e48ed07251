"""The gated delta: the sublayer's output is the direction of a delta write that starts as the plain residual.

    X <- X + k (w^T - e k^T X),   k = h / |h|,   h = F(c),   e = 2 tanh(w_e . c + b_e),   c = norm(x_in)

The gate e sets the share of X along k that is erased, separately from the write. In Deep Delta Learning (arXiv
2601.00417) one gate beta does both, w = beta v and e = beta, so that nothing can be written without erasing. Here
w = |h|, which writes h, or |h| (1 + tanh(W c + b)) with a gate for each value channel. The maps of the gates start at
0, so the connection starts as exactly x + h.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.channels import ChannelConnection, ChannelScheme, Compressor
from residua.connections.parts.delta_maps import Gate, Value
from residua.connections.parts.facts import GateFacts, RankOne
from residua.connections.parts.gates import TokenGate
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Divisor, OnlyIf, only_with, require_option
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count, Positive, Range
from residua.ops import at_least_float32, gated_delta, inverse_length, scaled_sum, unit

ON_CHANNELS = OnlyIf(
    "something is erased from several value channels",
    lambda scheme: scheme.erase != "none" and scheme.value_channels > 1,
)
ON_DIRECTION = OnlyIf(
    "something is erased or write is 'value'", lambda scheme: scheme.erase != "none" or scheme.write == "value"
)
GATED = OnlyIf("there is a gate", lambda scheme: ON_DIRECTION.holds(scheme) or scheme.write_gate)


class GatedDeltaCoefficients(NamedTuple):
    """The gates of erasing and writing of each direction, (batch, seq, directions), in at least float32.

    The axis of directions is (rank, value_channels, heads), flattened; erase has one value channel if all channels
    share a gate. erase: e, or None if nothing is erased. write: w / |h|, or beta v with `write="value"`; None for
    w = |h|. v: the value with `write="value"`, otherwise None.
    """

    erase: Tensor | None
    write: Tensor | None
    v: Tensor | None


@dataclass(frozen=True)
class GatedDelta(ChannelScheme):
    """Our variant of DDL: a delta write along the sublayer's output that starts as exactly the plain residual.

    With several value channels, the compressor of each block starts by reading a single channel, a different one from
    block to block, because channels that are read alike would stay equal. DDL itself is `erase="coupled",
    write="value"`. Its write-only control X + beta k v^T is `erase="none", write="value"`. The compressors of these two
    start as the average, as in `ddl`.

    erase         e for each token, from the normalised context c: "signed", scale tanh(w . c + b), where e < 0 enlarges
                  the component of X along k; "positive", max(0, scale tanh(w . c + b)); "none", e = 0, which without a
                  write gate is the plain residual; "coupled", e = beta, with `write="value"`
    scale         range of e: (-scale, scale), or [0, scale) if positive; at most 2, where e reflects
    channel_gates  whether each value channel has its own gate e, in place of one for all
    write         the weight w: "output", |h|, so that h is written; "value", beta v with gate and value of `ddl`
    write_gate    with `write="output"`: whether w has a factor 1 + tanh(W c + b) in (0, 2) for each value channel
    v_activation  with `write="value"`: "scaled_sigmoid", v = 4 sigmoid(W x_in + b), or "linear"
    rank          number of directions of a write, k_r = a_r h / |a_r h|, written one after the other; at the start each
                  of the learned a_r selects one of every `rank` neighbouring features
    heads         number of groups of features, each with its own direction and gates
    k_eps         guard of |h|: k = h / sqrt(|h|^2 + k_eps^2), as in `ddl`
    """

    title = "Gated delta"
    equation = "X + w h - e k k^T X, h = F(c), k = h / |h|, e = 2 tanh(w_e . c + b_e), c = norm(x_in)"
    users = "Nobody yet: it is a form of our own, Deep Delta Learning with a gate for each of its two halves."
    paper = "arXiv 2601.00417"

    erase: Literal["signed", "positive", "none", "coupled"] = "signed"
    scale: Annotated[
        float, Range("a number above 0, at most 2", lambda x: 0 < x <= 2), only_with(erase=("signed", "positive"))
    ] = 2.0
    channel_gates: Annotated[bool, ON_CHANNELS] = False
    write: Literal["output", "value"] = "output"
    write_gate: Annotated[bool, only_with(write="output")] = False
    v_activation: Annotated[Literal["scaled_sigmoid", "linear"], only_with(write="value")] = "scaled_sigmoid"
    rank: Count = 1
    heads: Annotated[Divisor, GATED] = 1
    k_eps: Annotated[Positive, ON_DIRECTION] = 1e-5

    def __post_init__(self):
        super().__post_init__()
        uncoupled = self.erase != "coupled" or self.write == "value"
        require_option(self, "erase", uncoupled, "another choice unless write is 'value'")
        parts = self.write == "value" or self.write_gate or self.channel_gates or self.expand == "conv"
        require_option(
            self,
            "value_channels",
            self.value_channels == 1 or parts,
            "1 unless write_gate, channel_gates, write='value' or expand='conv' lets the channels differ",
        )

    @property
    def source(self) -> str:
        coupled = self.erase == "coupled" and self.write == "value"
        return self.paper if coupled else f"ours, after {self.paper}"

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        if self.erase == "coupled":
            return {"beta": GateFacts((0.0, 2.0))}
        low = 0.0 if self.erase == "positive" else -self.scale
        return {"beta": GateFacts((low, self.scale))}

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        if self.write == "output":
            return {}
        return "beta v does not depend on the size of the update, which a plain residual writes; use write='output'"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        head_dim = dim // self.heads
        require_option(self, "rank", self.rank <= head_dim, f"at most the {head_dim} features of a head")

        def compressor(j: int) -> Compressor:
            return self.build_compress(dim, "average" if self.write == "value" else j % self.value_channels)

        def connection(i: int, compress: nn.Module) -> GatedDeltaConnection:
            return GatedDeltaConnection(self, dim, norm(i), compress)

        return self.stream(dim, num_sublayers, compressor, connection)


class Parts(SelfStarting):
    """`rank` products a_r y with learned a_r: (dim,). At the start each takes different features, and they sum to y.

    (..., dim) -> a list of `rank` such tensors, in the dtype of y.
    """

    def __init__(self, dim: int, rank: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rank, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        rank, dim = self.weight.shape
        for r in range(rank):
            nn.init.ones_(self.weight[r, r:dim:rank])

    def forward(self, y: Tensor) -> list[Tensor]:
        return [scaled_sum((y,), (row,)) for row in self.weight.unbind()]


class GatedDeltaConnection(ChannelConnection):
    """One gated delta around one sublayer."""

    def __init__(self, scheme: GatedDelta, dim: int, norm: nn.Module, compress: nn.Module):
        super().__init__(scheme, compress)
        self.scheme = scheme
        self.norm = norm
        count = scheme.rank * scheme.heads
        erases, writes = count * (scheme.value_channels if scheme.channel_gates else 1), count * scheme.value_channels
        gated = scheme.erase in ("signed", "positive")
        self.erase = TokenGate(dim, erases, scale=scheme.scale) if gated else None
        self.write_gate = TokenGate(dim, writes, scale=1.0) if scheme.write_gate else None
        self.beta = self.value = None
        if scheme.write == "value":
            self.beta = Gate(dim, beta_init=1.0, outputs=erases)
            self.value = Value(dim, writes, activation=scheme.v_activation)
        self.parts = Parts(dim, scheme.rank) if scheme.rank > 1 else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x_in = self.compress(state, memory) if self.has_stream_axis else state
        context = self.norm(x_in)
        erase = write = v = None
        if self.erase is not None:
            erase = self.erase(context)
            if self.scheme.erase == "positive":
                erase = erase.clamp_min(0)  # gates start at 0, where clamp_min has derivative 1, and relu 0
        if self.write_gate is not None:
            write = 1 + self.write_gate(context)
        if self.beta is not None and self.value is not None:
            beta, v = self.beta(context), self.value(x_in)
            axes = (self.scheme.rank, -1, self.scheme.heads)
            write = (beta.unflatten(-1, axes) * v.unflatten(-1, axes)).flatten(-3)
            erase = beta if self.scheme.erase == "coupled" else erase
        return context, Carry(state, GatedDeltaCoefficients(erase, write, v))

    def write(self, y: Tensor, carry: Carry) -> State:
        scheme, state = self.scheme, carry.residual
        erase, write, _ = carry.coefficients
        every = scheme.keeps_every if self.has_stream_axis else 1  # the norm keeps a state of one channel anyway
        for r, h in enumerate([y] if self.parts is None else self.parts(y)):
            e, w = (None if gates is None else self._of_direction(r, gates) for gates in (erase, write))
            if w is not None and scheme.write == "value":
                length = inverse_length(h, scheme.heads, eps=scheme.k_eps)
                w = w * (length.unsqueeze(-2) if self.has_stream_axis else length)
            state = gated_delta(state, h, e, w, eps=scheme.k_eps, recompute_every=every)
        return state

    def _of_direction(self, r: int, gates: Tensor) -> Tensor:
        """Select the gates of direction r from `gates`, (..., directions), in the shape that `gated_delta` takes."""
        size = gates.shape[-1] // self.scheme.rank
        part = gates if self.scheme.rank == 1 else gates.narrow(-1, r * size, size)
        return part.unflatten(-1, (-1, self.scheme.heads)) if self.has_stream_axis else part

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> RankOne | None:
        """Return I - e k k^T, with v only if the gate e also gates the write.

        None if nothing is erased, or if several directions or a gate per channel make the map one of higher rank.
        """
        scheme, (erase, _, v) = self.scheme, carry.coefficients
        if scheme.heads > 1 or scheme.rank > 1 or scheme.channel_gates or erase is None:
            return None
        streams, k = at_least_float32(self.streams(state)), unit(at_least_float32(y), eps=scheme.k_eps)
        readout = (streams * k.unsqueeze(-2)).sum(-1)
        return RankOne(erase[..., 0], k, readout, v if scheme.erase == "coupled" else None, self.compressor.shares())
