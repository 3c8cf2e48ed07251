"""The plain pre-norm residual connection, X + F(norm(X)): the baseline for every other scheme."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.compressing import CompressingConnection
from residua.connections.memory import Memory
from residua.connections.single_stream import SingleStreamScheme


class ResidualCoefficients(NamedTuple):
    """The plain residual has no coefficients."""


class ResidualConnection(CompressingConnection):
    """state + sublayer(norm(state)), state: (batch, seq, dim), which the sublayer may read through a convolution."""

    def __init__(self, norm: nn.Module, compress: "nn.Module | ResidualConnection"):
        super().__init__(compress)
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        return self.norm(self.compressed(state, memory)), Carry(state, ResidualCoefficients())

    def write(self, y: Tensor, carry: Carry) -> State:
        return (carry.residual + y).to(carry.residual.dtype)


@dataclass(frozen=True)
class Residual(SingleStreamScheme):
    """The scheme of plain residual connections."""

    title: ClassVar[str] = "Plain residual"
    equation: ClassVar[str] = "x + F(norm(x))"
    users: ClassVar[str] = "Nearly every Transformer in use."
    paper: ClassVar[str] = "arXiv 1512.03385"

    def preserving(self) -> "Residual":
        return self

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        return self.stream(dim, num_sublayers, lambda i, compress: ResidualConnection(norm(i), compress))
