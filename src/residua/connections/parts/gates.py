"""Learned scales, and gates of groups of features (heads): for each token, or the same for all tokens."""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.parts.projection import WideProjection
from residua.connections.parts.sharded import SelfStarting
from residua.ops import at_least_float32


def logit(p: float) -> float:
    """Return the logit log(p / (1 - p)) for 0 < p < 1."""
    return math.log(p) - math.log1p(-p)


class GateCoefficients(NamedTuple):
    """gate: (batch, seq, heads), or (heads,) if it is the same for all tokens, in at least float32."""

    gate: Tensor


class Scale(SelfStarting):
    """A learned scale that starts at `start`: () or, for each feature, (dim,), in at least float32."""

    def __init__(self, start: float, dim: int | None = None):
        super().__init__()
        self.start = start
        self.weight = nn.Parameter(torch.empty(1 if dim is None else dim))  # FSDP2 shards no scalars
        self.single = dim is None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def forward(self) -> Tensor:
        weight = at_least_float32(self.weight)
        return weight[0] if self.single else weight


class TokenGate(nn.Module):
    """e = scale tanh(W c + b), 0 at the start for every c. (..., dim) -> (..., heads) in at least float32."""

    def __init__(self, dim: int, heads: int, *, scale: float):
        super().__init__()
        self.scale = scale
        self.out = WideProjection(dim, heads, std=0.0, bias=0.0)

    def forward(self, context: Tensor) -> Tensor:
        return self.scale * torch.tanh(self.out(context))


class StaticGate(SelfStarting):
    """e = scale tanh(b), 0 at the start; the same for every context. (..., dim) -> (heads,) in at least float32."""

    def __init__(self, heads: int, *, scale: float):
        super().__init__()
        self.scale = scale
        self.bias = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, context: Tensor) -> Tensor:
        return self.scale * torch.tanh(at_least_float32(self.bias))
