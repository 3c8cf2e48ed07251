"""The plain pre-norm residual connection, x + F(norm(x)): the baseline for every other scheme.

With a gate for each token it is mHC with a single stream, the cheap control for the effect of mHC's streams:

    x <- x + g F(norm(x)),   g = 2 sigmoid(s w . x / rms(x) + b)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.convolved import CompressingConnection, SingleStreamScheme
from residua.connections.families.stream_logits import StreamLogits
from residua.connections.parts.facts import GateFacts, Mixing
from residua.connections.parts.gates import GateCoefficients
from residua.connections.parts.memory import Memory
from residua.ops import gated_delta


class ResidualCoefficients(NamedTuple):
    """The plain residual has no coefficients."""


class ResidualConnection(CompressingConnection):
    """state + sublayer(norm(x)), state: (batch, seq, dim); x is the state, or a causal convolution of it."""

    def __init__(self, norm: nn.Module, compress: nn.Module):
        super().__init__(compress)
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        return self.norm(self.compress(state, memory)), Carry(state, ResidualCoefficients())

    def write(self, y: Tensor, carry: Carry) -> State:
        return (carry.residual + y).to(carry.residual.dtype)


class GatedWriteConnection(CompressingConnection):
    """state + g sublayer(norm(x)), with g computed from x before the norm. g starts at 1: w and b at 0, s at 1."""

    def __init__(self, norm: nn.Module, compress: nn.Module, dim: int, *, norm_eps: float):
        super().__init__(compress)
        self.norm = norm
        self.logits = StreamLogits(1, dim, [[0.0]], std=0.0, scale=1.0, eps=norm_eps)

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x = self.compress(state, memory)
        (logits,) = self.logits(x.unsqueeze(-2))
        return self.norm(x), Carry(state, GateCoefficients(2 * torch.sigmoid(logits)))

    def write(self, y: Tensor, carry: Carry) -> State:
        return gated_delta(carry.residual, y, None, carry.coefficients.gate)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return the identity, with g as h_post."""
        (gate,) = carry.coefficients
        h_res = gate.new_ones(1, 1)
        return Mixing(h_res, h_post=gate, gates={"gate": gate[..., 0]}, left_out=("h_res",))


@dataclass(frozen=True)
class Residual(SingleStreamScheme):
    """The plain residual: the output of a sublayer is added to its input. The baseline of every comparison.

    write_gate    whether the output of a sublayer is multiplied by a gate for each token, in (0, 2), which starts at 1
    """

    title = "Plain residual"
    equation = "x + F(norm(x))"
    users = "Nearly every Transformer in use. prime-rl has the gate beside its mHC of DeepSeek-V4.1."
    paper = "arXiv 1512.03385"
    residual_start = {}

    write_gate: bool = False

    @property
    def source(self) -> str:
        return "github.com/PrimeIntellect-ai/prime-rl" if self.write_gate else self.paper

    @property
    def gates(self) -> Mapping[str, GateFacts]:
        return {"gate": GateFacts((0.0, 2.0), 1.0)} if self.write_gate else {}

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        def connection(i: int, compress: nn.Module) -> CompressingConnection:
            if self.write_gate:
                return GatedWriteConnection(norm(i), compress, dim, norm_eps=norm_eps)
            return ResidualConnection(norm(i), compress)

        return self.stream(dim, num_sublayers, connection)
