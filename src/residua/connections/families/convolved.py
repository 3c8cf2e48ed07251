"""The convolutions of Deep Delta Learning: on reads, on writes and on the embedding, for several streams or one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Scheme, State, Stream
from residua.connections.parts.ends import Collapse, Copies, Same, Smear, TokenCompress, TokenConv
from residua.connections.parts.facts import Mixing, RankOne
from residua.connections.parts.memory import Memory, whole_sequence, window_of
from residua.connections.parts.options import OnlyIf, Taps, only_with, require_option
from residua.connections.parts.phases import SharedModule


class CompressingConnection(Connection):
    """A connection that reads the state through a compressor.

    compress: the map from the state to x_in, (batch, seq, dim), or the earlier connection that owns this map.
    """

    separates_documents = True

    def __init__(self, compress: nn.Module):
        super().__init__()
        borrowed = isinstance(compress, CompressingConnection)
        self.compress: Any = SharedModule(compress, "compressor") if borrowed else compress
        self.window = window_of(self.compressor)

    @property
    def compressor(self) -> nn.Module:
        return self.compress.module if isinstance(self.compress, SharedModule) else self.compress


@dataclass(frozen=True, kw_only=True)
class CompressingScheme(Scheme):
    """A scheme with the convolutions of Deep Delta Learning over the tokens, around sublayers and at the start.

    branch            None: a sublayer's output y is written as it is; "conv": y plus a causal convolution of y over
                      the tokens, which starts at 0
    branch_kernel     taps of the convolution of `branch`
    branch_sublayers  the sublayers with this convolution: "all", the even ones ("attention") or the odd ones ("mlp")
    compress_sharing  one compressor for the two sublayers of a "block", or "separate" ones
    expand            "repeat" the embedding; "conv": a causal convolution of the embedding that starts as "repeat";
                      "smear": add a gated copy of the previous token's embedding, then repeat, as in nanochat. The
                      gate reads 24 features, and the copy has a factor that starts at 0
    expand_kernel     taps of the convolution of `expand`
    """

    branch: Literal["conv"] | None = None
    branch_kernel: Annotated[Taps, only_with(branch="conv")] = 4
    branch_sublayers: Annotated[Literal["all", "attention", "mlp"], only_with(branch="conv")] = "all"
    compress: Literal["token", "channel"] | None = None
    compress_kernel: Taps | None = None
    compress_sharing: Annotated[
        Literal["block", "separate"], OnlyIf("compress is not null", lambda scheme: scheme.compresses)
    ] = "block"
    expand: Literal["repeat", "conv", "smear"] = "repeat"
    expand_kernel: Annotated[Taps, only_with(expand="conv")] = 4

    @property
    def compresses(self) -> bool:
        """Whether sublayers read the state through a learned compressor."""
        return self.compress is not None

    def has_branch(self, index: int) -> bool:
        """Whether the output of sublayer `index` is convolved."""
        return self.branch is not None and self.branch_sublayers in ("all", ("attention", "mlp")[index % 2])

    def stack(
        self,
        expand: nn.Module,
        dim: int,
        num_sublayers: int,
        compressor: Callable[[int], nn.Module],
        connection: Callable[..., CompressingConnection],
        readout: Callable[[nn.Module], nn.Module] = Collapse,
    ) -> Stream:
        """Build the stream: `expand`, then `connection(i, compress)` for each sublayer i, then `readout(compress)`.

        compressor: a function that makes compressor j; the last compressor belongs to the readout. If the sublayers of
        a block share a compressor, the second connection gets the first one, which owns it, as its `compress`.
        """
        if self.expand == "smear":
            expand = Smear(dim, expand)
        connections: list[CompressingConnection] = []
        count = 0
        for i in range(num_sublayers):
            if i % 2 and self.compresses and self.compress_sharing == "block":
                compress: nn.Module = connections[-1]
            else:
                compress, count = compressor(count), count + 1
            made = connection(i, compress)
            if self.has_branch(i):
                # A connection has one memory, and the convolutions of read and branch would each need one.
                require_option(self, "branch", not made.window, "null if reads are convolved over the tokens too")
                made = BranchConnection(made, dim, self.branch_kernel)
            connections.append(made)
        return Stream(expand, connections, readout(compressor(count)))


@dataclass(frozen=True, kw_only=True)
class SingleStreamScheme(CompressingScheme):
    """A scheme of one stream, (batch, seq, dim), with the optional convolutions of Deep Delta Learning over the tokens.

    The options have the same names and meanings as in `DeepDelta`. They show how much of the gain of DDL is due to
    convolutions, without a delta write. The convolutions start as the identity, so they do not change the initial
    scheme.

    compress          None: a sublayer reads the stream; "token": sublayers and the readout read a causal convolution
                      of the stream over the tokens, and write to the stream itself. The Canon layers of arXiv
                      2512.17351 before attention and MLP are such convolutions too, but after the norm, and with
                      weights of their own for each sublayer
    compress_kernel   taps of the convolution of `compress`
    """

    compress: Literal["token"] | None = None
    compress_kernel: Annotated[Taps, only_with(compress="token")] = 4

    def stream(
        self,
        dim: int,
        num_sublayers: int,
        connection: Callable[..., CompressingConnection],
        *,
        copies: int = 1,
        readout: Callable[[nn.Module], nn.Module] = Collapse,
    ) -> Stream:
        """Build the stream: `connection(i, compress)` for each sublayer i, then `readout(compress)`.

        copies: the number of copies of the embedding in the state.
        """

        def compressor(_: int) -> nn.Module:
            return TokenCompress(dim, None, self.compress_kernel) if self.compresses else Same()

        expand: nn.Module = Same() if copies == 1 else Copies(copies)
        if self.expand == "conv":
            expand = TokenConv(dim, self.expand_kernel, copies=copies)
        return self.stack(expand, dim, num_sublayers, compressor, connection, readout)


class BranchCoefficients(NamedTuple):
    """inner: the coefficients of the inner connection. memory: the memory of earlier sublayer outputs, or None."""

    inner: Any
    memory: Memory | None


class BranchConnection(CompressingConnection):
    """A connection that convolves the sublayer's output before `inner` writes it: y <- y + conv(y).

    Inkling has such short convolutions after attention and MLP (`attn_sconv`, `mlp_sconv` in transformers). The sum is
    computed as one convolution, in which the tap of the current token starts at 1 and all others at 0.
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
        """Return the shortcut of the inner connection, for y of this call: `memory` would store y a second time."""
        coefficients, memory = carry.coefficients
        y = self.convolution(y, whole_sequence(self, memory))
        return self.inner.shortcut(state, Carry(carry.residual, coefficients), y)

    def streams(self, state: State) -> Tensor | None:
        return self.inner.streams(state)

    def penalty(self, coefficients: BranchCoefficients) -> Tensor | None:
        return self.inner.penalty(coefficients.inner)
