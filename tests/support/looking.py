"""Third-party schemes: a softmax over the last tokens, where a row of zeros that is no token would count."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections import Carry, Connection, Scheme, Stream, remembered, remembered_tokens
from residua.connections.parts.ends import Same
from residua.ops import at_least_float32


class Weights(NamedTuple):
    a: Tensor


class LookConnection(Connection):
    def __init__(self, scheme: "Look", dim: int, norm: nn.Module):
        super().__init__()
        self.scheme, self.norm, self.window = scheme, norm, scheme.window
        self.query, self.gate = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.query)
        nn.init.constant_(self.gate, 0.5)

    def read(self, state, memory=None):
        rows, tokens = self.scheme.rows(state, memory)
        rows, now = at_least_float32(rows), torch.arange(state.shape[1])[:, None] + rows.shape[1] - state.shape[1]
        places = torch.arange(rows.shape[1])
        near = (places <= now) & (places >= now - self.window)
        scores = (rows * self.query.to(rows.dtype)).sum(-1)[:, None].expand(-1, len(now), -1)
        a = scores.masked_fill(~(near & tokens[:, None] | (places == now)), -torch.inf).softmax(-1)
        seen = (a.unsqueeze(-1) * rows.unsqueeze(1)).sum(2)
        return self.norm((state + self.gate.to(rows.dtype) * seen).to(state.dtype)), Carry(state, Weights(a))

    def write(self, y, carry):
        return (carry.residual + y).to(carry.residual.dtype)


@dataclass(frozen=True)
class Look(Scheme):
    equation: ClassVar[str] = "x + F(norm(x + g sum_s softmax(q . x_s) x_s)), s the last tokens"
    paper: ClassVar[str] = "none"

    window: int = 4

    def rows(self, state: Tensor, memory) -> tuple[Tensor, Tensor]:
        """Return the rows to look at, and which of them count."""
        return remembered_tokens(state, memory, self.window)

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return Stream(Same(), [LookConnection(self, dim, norm(i)) for i in range(num_sublayers)], Same())


@dataclass(frozen=True)
class CountsAllRows(Look):
    """Takes every row for a token."""

    def rows(self, state, memory):
        rows = remembered(state, memory, self.window)
        return rows, torch.ones(rows.shape[:2], dtype=torch.bool)


@dataclass(frozen=True)
class CountsKeptRows(Look):
    """Knows the padding of this call alone: right in a call of the whole, and in pieces without padding."""

    window: int = 1

    def rows(self, state, memory):
        rows, tokens = CountsAllRows.rows(self, state, memory)
        if memory is not None and memory.padding is not None:
            tokens[:, -state.shape[1] :] = memory.padding != 0
        return rows, tokens
