"""Gated residual: n residual streams, read through a gate for each stream and feature, and never mixed.

    Z_i = (1 + w_i) norm(X_i),   x = mean_i G_i Z_i,   X_i <- X_i + p_i F(x)

This is Qwen3.8-Flash-Next, arXiv 2608.30320, and `qwen4_exp` in transformers. The read normalises every stream; the
sublayer has no other norm.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.mixing import MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams
from residua.connections.parts.facts import Mixing
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.options import only_with
from residua.connections.parts.projection import Projection, WideProjection, is_plain
from residua.connections.parts.sharded import SelfStarting
from residua.errors import Count, NotNegative
from residua.ops.derived import derive
from residua.ops.precision import linear, promote


@dataclass(frozen=True)
class GatedResidual(ExpandingScheme, MixingScheme):
    """The gated residual. Starts near the pre-norm residual: gates near 1/2 halve the normalised input.

    With Z_i = (1 + w_i) norm(X_i) for the n streams X_i, the gates are G = sigmoid(U silu(D vec(Z) / n)), and the write
    weights are p = 2 sigmoid(B vec(Z) / n).

    gate_rank       rank of the gates, the number of rows of D; None: dim / 8, as published
    weight_std      standard deviation of the initial D, U and B, with start="published"
    head            the readout: "gated", a normalised gated read of its own (Qwen4-Exp), or "mean" of the streams
    start           "published": w = 0, and D, U, B are drawn (Qwen4-Exp); "residual": U and B are 0, and 1 + w is 2 on
                    average, which compensates the gates of 1/2, so that the stream computes exactly the plain residual
                    if the head is "mean". Each sublayer then prefers one stream, because streams that start equal and
                    are read equally stay equal
    """

    title = "Gated residual"
    equation = "X + p F(mean_i G_i norm(X_i))"
    users = "Qwen3.8-Flash-Next (`qwen4_exp` in transformers). `residua.models.dialects` loads its parameters."
    paper = "arXiv 2608.30320"
    # The gated readout is normalised, the readout of the plain residual is not.
    residual_start = {"start": "residual", "head": "mean", "weight_std": 0.02}

    gate_rank: Count | None = None
    weight_std: Annotated[NotNegative, only_with(start="published")] = 0.02
    head: Literal["gated", "mean"] = "gated"
    start: Literal["published", "residual"] = "published"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [GatedConnection(self, dim, i, norm(i)) for i in range(num_sublayers)]
        if self.head == "mean":
            return Stream(self.expander(dim), connections, MeanStreams())
        head = GatedRead(self, dim, num_sublayers, self.default_norm(dim, norm_eps, num_sublayers))
        return Stream(self.expander(dim), connections, GatedCollapse(head))

    def default_norm(self, dim: int, eps: float, index: int) -> nn.Module:
        """Return an RMSNorm without gain. A norm is applied to every stream, before the gains 1 + w."""
        return RMSNorm(dim, eps=eps, gain=False, recompute=self.recompute == "replay")


class GatedRead(SelfStarting):
    """x = mean_i G_i Z_i, with Z_i = (1 + w_i) norm(X_i) and G = sigmoid(U silu(D vec(Z) / n)).

    (batch, seq, n, dim) -> x: (batch, seq, dim) and Z: (batch, seq, n, dim). Sigmoid and mean are computed in at least
    float32, D and U in the dtype of the sublayers.
    """

    def __init__(self, scheme: GatedResidual, dim: int, index: int, norm: nn.Module):
        super().__init__()
        self.scheme = scheme
        n, published = scheme.num_streams, scheme.start == "published"
        self.preferred = None if published else index % n
        self.norm = norm
        self.weight = nn.Parameter(torch.empty(n, dim))
        # If U is 0, D must not be 0 too: their gradients would both be 0.
        rank = scheme.gate_rank or max(1, dim // 8)
        self.down = Projection(n * dim, rank, std=scheme.weight_std)
        self.up = Projection(rank, n * dim, std=scheme.weight_std if published else 0.0)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.preferred is not None:
            # One gain is then n + 1, and the other n - 1 gains are 1: exactly 2 on average.
            nn.init.constant_(self.weight[self.preferred], self.weight.shape[0])

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        n = self.weight.shape[0]
        z = self.scheme.derive(_gained, self.normalised(streams), self.weight)
        hidden = self.down(z.flatten(-2)) / n
        if is_plain(self.up, Projection):
            return self.scheme.derive(_gated_mean, z, hidden, self.up.weight), z
        # `up` is an adapter, which may draw random numbers, or its weights are sharded or offloaded until it is called.
        return _gated(z, self.up(F.silu(hidden))), z

    def normalised(self, streams: Tensor) -> Tensor:
        if isinstance(self.norm, RMSNorm):
            return self.norm(streams)
        # The norm of another library sums gradients in its own order, so `norm` itself must compute the result here.
        names = [name for name, _ in self.norm.named_parameters()]

        def normed(x: Tensor, *weights: Tensor) -> Tensor:
            return functional_call(self.norm, dict(zip(names, weights)), (x,))

        return derive(normed, streams, *self.norm.parameters())


def _gained(normed: Tensor, weight: Tensor) -> Tensor:
    wide, weight = promote(normed, weight)
    return (wide * (1 + weight)).to(normed.dtype)


def _gated_mean(z: Tensor, hidden: Tensor, up: Tensor) -> Tensor:
    return _gated(z, linear(F.silu(hidden), up))


def _gated(z: Tensor, logits: Tensor) -> Tensor:
    """Return mean_i sigmoid(logits)_i z_i. z: (batch, seq, n, dim), logits: (batch, seq, n dim)."""
    wide_z, wide_logits = promote(z, logits.unflatten(-1, z.shape[-2:]))
    return (torch.sigmoid(wide_logits) * wide_z).mean(-2).to(z.dtype)


class GatedCollapse(nn.Module):
    """The readout by a gated read: (batch, seq, n, dim) -> (batch, seq, dim), normalised."""

    def __init__(self, read: GatedRead):
        super().__init__()
        self.read = read

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return self.read(streams)[0]


class GatedConnection(MixingConnection):
    """One gated residual; the state is (batch, seq, n, dim), and p = 2 sigmoid(B vec(Z) / n)."""

    def __init__(self, scheme: GatedResidual, dim: int, index: int, norm: nn.Module):
        super().__init__()
        n = scheme.num_streams
        self.scheme = scheme
        self.gated = GatedRead(scheme, dim, index, norm)
        self.inject = WideProjection(n * dim, n, std=scheme.weight_std if scheme.start == "published" else 0.0)

    @property
    def norm(self) -> nn.Module:  # type: ignore[override]
        return self.gated.norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, z = self.gated(state)
        return x, Carry(state, self.coefficients(z))

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        """Return p as h_post, for the normalised streams Z."""
        h_post = 2 * torch.sigmoid(self.inject(streams.flatten(-2)) / streams.shape[-2])
        return MixingCoefficients(None, None, h_post)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return the identity, without h_pre, because a gate for each feature reads the streams."""
        return super().shortcut(state, carry, y)._replace(h_pre=None, left_out=("h_res",))
