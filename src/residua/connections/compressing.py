"""Connections that read the state through a compressor and may convolve what they write, and the stacks of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Scheme, State
from residua.connections.ends import TokenConv
from residua.connections.facts import Mixing, RankOne
from residua.connections.memory import Memory, window_of
from residua.connections.options import Taps, only_with, require_option
from residua.connections.phases import Borrowed


class CompressingConnection(Connection):
    """A connection that reads the state through a compressor, its own or that of an earlier connection.

    compress: the map from the state to x_in: (batch, seq, dim).
    """

    separates_documents = True

    def __init__(self, compress: "nn.Module | CompressingConnection"):
        super().__init__()
        borrowed = isinstance(compress, CompressingConnection)
        self.compress: Any = Borrowed(compress, "compressor") if borrowed else compress
        self.window = window_of(self.compressor)

    @property
    def compressor(self) -> nn.Module:
        return self.compress.module if isinstance(self.compress, Borrowed) else self.compress


@dataclass(frozen=True, kw_only=True)
class BranchScheme(Scheme):
    """A scheme whose sublayers' outputs may be convolved before they are written.

    branch         None: a sublayer's output is written as it is; "conv": with a causal convolution of it over the
                   tokens added, which starts at 0
    branch_kernel  taps of that convolution
    """

    branch: Literal["conv"] | None = None
    branch_kernel: Annotated[Taps, only_with(branch="conv")] = 4

    def connected(
        self,
        dim: int,
        num_sublayers: int,
        sharing: str,
        compressor: Callable[[int], nn.Module],
        connection: Callable[..., CompressingConnection],
    ) -> tuple[list[CompressingConnection], nn.Module]:
        """Return the connections of a stack, and the compressor of the readout.

        sharing      "block": the second sublayer of a block borrows the compressor of the first; or "separate"
        compressor   makes compressor j of the stack, that of the readout as the last
        connection   makes that of sublayer i from i and the compressor or its owner
        """
        connections: list[CompressingConnection] = []
        count = 0
        for i in range(num_sublayers):
            if sharing == "block" and i % 2:
                compress: nn.Module = connections[-1]
            else:
                compress, count = compressor(count), count + 1
            made = connection(i, compress)
            if self.branch is not None:  # a connection has one memory
                require_option(self, "branch", not made.window, "null if reads are convolved over the tokens too")
                made = BranchConnection(made, dim, self.branch_kernel)
            connections.append(made)
        return connections, compressor(count)


class BranchCoefficients(NamedTuple):
    """inner: the coefficients of the connection inside. memory: of earlier outputs of the sublayer, or None."""

    inner: Any
    memory: Memory | None


class BranchConnection(CompressingConnection):
    """A connection that convolves the sublayer's output before `inner` writes it: y <- y + conv(y).

    As the short convolutions of Inkling behind attention and MLP (`attn_sconv`, `mlp_sconv` in transformers). The tap
    of the token itself is in the convolution and starts at 1, the others at 0.
    """

    def __init__(self, inner: CompressingConnection, dim: int, kernel: int):
        super().__init__(inner)
        self.inner = inner
        self.convolution = TokenConv(dim, kernel)
        self.window = self.convolution.window

    @property
    def norm(self) -> nn.Module:
        return self.inner.norm  # type: ignore[return-value]

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, (residual, coefficients) = self.inner.read(state)
        return x, Carry(residual, BranchCoefficients(coefficients, memory))

    def write(self, y: Tensor, carry: Carry) -> State:
        coefficients, memory = carry.coefficients
        return self.inner.write(self.convolution(y, memory), Carry(carry.residual, coefficients))

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> RankOne | Mixing | None:
        """Return the map of the connection inside, of a whole sequence: its memory would take y a second time."""
        coefficients, _ = carry.coefficients
        return self.inner.shortcut(state, Carry(carry.residual, coefficients), self.convolution(y))

    def streams(self, state: State) -> Tensor | None:
        return self.inner.streams(state)

    def penalty(self, coefficients: BranchCoefficients) -> Tensor | None:
        return self.inner.penalty(coefficients.inner)
