"""A residual scheme of one's own: momentum residuals (arXiv 2102.07870), published as a package.

The sublayer's output is added to a velocity, and the velocity to the stream:

    v <- mu v + F(norm(x)),   x <- x + v

pyproject.toml beside this file declares the scheme in the entry-point group `residua.schemes`:

    pip install examples/custom_scheme
    residua train --config tiny --model.connection momentum --data.source stdlib --run runs/momentum
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

import residua
from residua.connections import Connection, TensorSpec


class MomentumCoefficients(NamedTuple):
    """mu: a number in (-1, 1), the share of the velocity that remains."""

    mu: Tensor


class MomentumConnection(Connection):
    """The state is (batch, seq, 2, dim): the stream, its velocity. The first velocity is zero and needs no mu."""

    def __init__(self, norm: nn.Module, first: bool):
        super().__init__()
        self.norm, self.logit = norm, None if first else nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self):
        if self.logit is not None:
            nn.init.zeros_(self.logit)

    def read(self, state, memory=None):
        mu = state.new_zeros(()) if self.logit is None else self.logit.tanh()
        return self.norm(state[..., 0, :]), residua.Carry(state, MomentumCoefficients(mu))

    def write(self, y, carry):
        x, v = carry.residual.unbind(-2)
        v = carry.coefficients.mu.to(v.dtype) * v + y.to(v.dtype)
        return torch.stack([x + v, v], dim=-2)


class AtRest(nn.Module):
    """The embedding with a velocity of zero: (batch, seq, dim) -> (batch, seq, 2, dim)."""

    def forward(self, x, memory=None):
        return torch.stack([x, torch.zeros_like(x)], dim=-2)


class Position(nn.Module):
    """The stream without its velocity: (batch, seq, 2, dim) -> (batch, seq, dim)."""

    def forward(self, state, memory=None):
        return state[..., 0, :]


@dataclass(frozen=True)
class Momentum(residua.Scheme):
    """Momentum residuals with one learned mu for each sublayer. Starts as the plain residual; it has no options."""

    equation = "x + v, v = mu v + F(norm(x))"
    paper = "arXiv 2102.07870"
    residual_start = {}

    def state_spec(self, boundary, dim):
        return TensorSpec((2, dim))

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        connections = [MomentumConnection(norm(i), first=i == 0) for i in range(num_sublayers)]
        return residua.Stream(AtRest(), connections, Position())
