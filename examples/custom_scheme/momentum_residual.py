"""A residual scheme of one's own: momentum residuals (arXiv 2102.07870), published as a package.

The sublayer's output is added to a velocity, and the velocity to the stream:

    v <- mu v + F(norm(x)),   x <- x + v

pyproject.toml beside this file names the scheme in the entry-point group `residua.schemes`. After `pip install` the
name `momentum` works wherever a preset's does. Without installing it:

    python examples/custom_scheme/momentum_residual.py
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

import residua
from residua.connections import TensorSpec, norms


class MomentumCoefficients(NamedTuple):
    """mu: a scalar in (-1, 1), the share of the velocity that remains."""

    mu: Tensor


class MomentumConnection(residua.Connection):
    """The state is (batch, seq, 2, dim): the stream x, then its velocity v."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm
        self.logit = nn.Parameter(torch.zeros(()))  # mu starts at 0: the plain residual

    def read(self, state, memory=None):
        return self.norm(state[..., 0, :]), residua.Carry(state, MomentumCoefficients(self.logit.float().tanh()))

    def write(self, y, carry):
        x, v = carry.residual.unbind(-2)
        v = carry.coefficients.mu.to(v.dtype) * v + y.to(v.dtype)
        return torch.stack([x + v, v], dim=-2)


class Rest(nn.Module):
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

    equation: ClassVar[str] = "x + v, v = mu v + F(norm(x))"
    paper: ClassVar[str] = "arXiv 2102.07870"

    def state_spec(self, boundary, dim):
        return TensorSpec((2, dim))

    def build(self, dim, num_sublayers, *, norm_eps=1e-5, norm=None):
        norm = norms(dim, norm_eps, norm)
        connections = [MomentumConnection(norm(i)) for i in range(num_sublayers)]
        return residua.Stream(Rest(), connections, Position())


if __name__ == "__main__":
    torch.manual_seed(0)
    sublayers, x = [nn.Linear(32, 32) for _ in range(8)], torch.randn(4, 10, 32)
    difference = Momentum().build(32, 8)(x, sublayers) - residua.Residual().build(32, 8)(x, sublayers)
    print(f"at the start it is the plain residual: largest difference {difference.abs().max():g}")
