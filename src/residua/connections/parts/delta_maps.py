"""The learned maps of Deep Delta Learning: the gate beta, the value v and the direction k (arXiv 2601.00417 section 2).

`streams` is the state (batch, seq, streams, dim), `context` is RMSNorm(x_in).
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.parts.gates import logit
from residua.connections.parts.memory import Memory, documents_in, expect_tokens, padding_in
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.projection import Projection, WideProjection, spectral_std
from residua.connections.parts.sharded import SelfStarting
from residua.ops import at_least_float32, causal_read


class Gate(nn.Module):
    """beta = 2 sigmoid(z) in (0, 2), z in at least float32 from a linear map (`head="linear"`) or from
    w2 . tanh(W1 x) + b2 with a bias-free W1 of `hidden` rows (`head="mlp"`). (..., in_features) -> (...,), or
    (..., outputs) for several gates.

    The bias starts at logit(beta_init / 2) and the last weights at 0, so beta = beta_init for every token;
    `start="authors"` draws the last weights from N(0, (0.5/sqrt(in_features))^2), `start="rewrite"` draws all weights
    with the standard deviation `spectral_std`. arXiv 2601.00417v2 appendix B.2.
    """

    def __init__(
        self,
        in_features: int,
        *,
        beta_init: float,
        head: str = "linear",
        hidden: int = 128,
        start: str = "average",
        outputs: int | None = None,
    ):
        super().__init__()
        self.single = outputs is None
        # The authors' clamp: beta_init = 0 gives beta = 2e-6, because a gate of exactly 0 would get no gradient.
        p = min(max(beta_init / 2, 1e-6), 1 - 1e-6)
        rewritten = start == "rewrite"
        spectral = spectral_std(in_features, hidden) if rewritten else None
        self.hidden = WideProjection(in_features, hidden, std=spectral) if head == "mlp" else None
        last = in_features if self.hidden is None else hidden
        std = 0.5 / math.sqrt(in_features) if start == "authors" else 0.0
        std = spectral_std(last, outputs or 1) if rewritten else std
        self.out = WideProjection(last, outputs or 1, std=std, bias=logit(p))

    def forward(self, x: Tensor) -> Tensor:
        if self.hidden is not None:
            x = torch.tanh(self.hidden(x))
        logits = self.out(x)
        return 2 * torch.sigmoid(logits.squeeze(-1) if self.single else logits)


class Value(nn.Module):
    """v from a linear map in at least float32, (..., dim) -> (..., value_channels).

    `activation="scaled_sigmoid"`: scale * sigmoid(W x + b); `"linear"`: W x + b; `"constant"`: the number `constant`
    everywhere, without parameters. `bias=False` omits b. By default W is drawn from N(0, (0.5/sqrt(dim))^2) and b
    starts at 0. `start="authors"` draws b from PyTorch's uniform distribution, as the authors' first code does.
    `start="rewrite"` does so too, and draws W with the standard deviation `spectral_std`, as their current code does.
    """

    def __init__(
        self,
        dim: int,
        value_channels: int,
        *,
        activation: str = "scaled_sigmoid",
        scale: float = 4.0,
        bias: bool = True,
        constant: float = 2.0,
        start: str = "average",
    ):
        super().__init__()
        self.value_channels = value_channels
        self.activation = activation
        self.scale = scale
        self.constant = constant
        first: float | Literal["uniform"] | None = None if not bias else 0.0 if start == "average" else "uniform"
        std = spectral_std(dim, value_channels) if start == "rewrite" else None
        self.project = None if activation == "constant" else WideProjection(dim, value_channels, std=std, bias=first)

    def forward(self, x: Tensor) -> Tensor:
        if self.project is None:
            return at_least_float32(x).new_full((*x.shape[:-1], self.value_channels), self.constant)
        v = self.project(x)
        return self.scale * torch.sigmoid(v) if self.activation == "scaled_sigmoid" else v


class TwoLayers(nn.Module):
    """Linear, SiLU, Linear without biases: (..., in_features) -> (..., dim)."""

    def __init__(self, in_features: int, hidden: int, dim: int):
        super().__init__()
        self.up = Projection(in_features, hidden)
        self.down = Projection(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class StreamAttention(SelfStarting):
    """A direction from attention over the streams; the paper leaves the form open.

    c is the context, k~ the raw direction. q = W_q c; keys W_k N_j + e_j and values W_u N_j of the normalised streams
    N_j = RMSNorm(X_j), where the slot embeddings e_j distinguish streams that are still equal; k~ = W_o sum_j
    softmax_j(q . key_j / sqrt(rank)) value_j. A single stream has weight 1, so queries, keys and slots are omitted.
    """

    def __init__(self, dim: int, num_streams: int, rank: int, *, norm_eps: float = 1e-5):
        super().__init__()
        self.norm = RMSNorm(dim, eps=norm_eps)
        self.value = Projection(dim, rank)
        self.out = Projection(rank, dim)
        self.slots = None
        if num_streams > 1:
            self.query, self.key = Projection(dim, rank), Projection(dim, rank)
            self.slots = nn.Parameter(torch.empty(num_streams, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.slots is not None:
            nn.init.normal_(self.slots, std=1.0)

    def forward(self, context: Tensor, streams: Tensor) -> Tensor:
        normalised = self.norm(streams)
        if self.slots is None:
            return self.out(self.value(normalised).squeeze(-2))
        keys = self.key(normalised)
        keys = keys + self.slots.to(keys.dtype)
        scores = (keys @ self.query(context).unsqueeze(-1)).squeeze(-1) / math.sqrt(keys.shape[-1])
        weights = scores.softmax(-1).to(keys.dtype)
        return self.out((weights.unsqueeze(-1) * self.value(normalised)).sum(-2))


class ChannelPool(SelfStarting):
    """G(X): `"mean"` over the streams (dim features), `"flatten"` (streams * dim), or `"conv"`: a causal filter over
    the tokens for every stream and feature, which starts as the identity, then the mean over the streams
    (dim features).

    (batch, seq, streams, dim) -> (batch, seq, out_features). With `window > 0` the input may begin with earlier tokens.
    """

    def __init__(self, kind: str, dim: int, num_streams: int, *, kernel: int = 4):
        super().__init__()
        self.kind = kind
        self.window = kernel - 1 if kind == "conv" else 0
        self.out_features = num_streams * dim if kind == "flatten" else dim
        self.taps = nn.Parameter(torch.empty(kernel, num_streams, dim)) if kind == "conv" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.taps is not None:
            nn.init.zeros_(self.taps)
            nn.init.ones_(self.taps[0])

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        if self.taps is not None:
            expect_tokens(streams, self.window, axes="(batch, seq, streams, dim)")
            told = padding_in(memory, streams), documents_in(memory, streams)
            return causal_read(streams, self.taps / self.taps.shape[1], *told)
        return streams.mean(-2) if self.kind == "mean" else streams.flatten(-2)


class Direction(nn.Module):
    """phi_k of the v-Map: the raw direction k~ from the context or the state, (batch, seq, dim).

    `"linear"` and `"mlp"` map the context (or x_in, `source="x_in"`); `"pool_mlp"` and `"flatten_mlp"` the state,
    pooled over the streams or flattened; `"attention"` attends over the streams. arXiv 2601.00417v2 sections 2 and 4
    leave the form open; `rank` is the hidden width.
    """

    def __init__(self, kind: str, dim: int, num_streams: int, rank: int, *, source: str, norm_eps: float):
        super().__init__()
        self.kind = kind
        self.source = source
        if kind == "linear":
            self.map: nn.Module = Projection(dim, dim)
        elif kind == "mlp":
            self.map = TwoLayers(dim, rank, dim)
        elif kind == "attention":
            self.map = StreamAttention(dim, num_streams, rank, norm_eps=norm_eps)
        else:
            self.pool = ChannelPool("mean" if kind == "pool_mlp" else "flatten", dim, num_streams)
            self.map = TwoLayers(self.pool.out_features, rank, dim)

    def forward(self, x_in: Tensor, context: Tensor, streams: Tensor) -> Tensor:
        if self.kind in ("linear", "mlp"):
            return self.map(x_in if self.source == "x_in" else context)
        if self.kind == "attention":
            return self.map(context, streams)
        return self.map(self.pool(streams))
