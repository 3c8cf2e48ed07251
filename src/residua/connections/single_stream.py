"""Schemes whose state is a single stream, with the convolutions of Deep Delta Learning if wanted."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn

from residua.connections.base import State, Stream
from residua.connections.compressing import BranchScheme, CompressingConnection
from residua.connections.ends import Collapse, Copies, Same, TokenCompress, TokenConv
from residua.connections.memory import Memory
from residua.connections.options import Taps, only_with


@dataclass(frozen=True, kw_only=True)
class SingleStreamScheme(BranchScheme):
    """A scheme of one stream, (batch, seq, dim), with the convolutions over tokens of Deep Delta Learning if wanted.

    The options are named as in `DeepDelta` and mean the same. They show how much of its gain needs no delta write. Both
    convolutions start as the identity, so that the scheme starts as it does without them.

    compress          None: a sublayer reads the stream; "token": it reads a causal convolution of it over the tokens,
                      as does the readout, and writes to the stream itself. The Canon layers of arXiv 2512.17351 before
                      attention and MLP are such convolutions behind the norm, one for each sublayer
    compress_kernel   taps of that convolution
    compress_sharing  one such convolution for the two sublayers of a "block", or "separate" ones
    expand            "repeat": the stream starts as the embedding; "conv": as a causal convolution of it
    expand_kernel     taps of that convolution
    """

    compress: Literal["token"] | None = None
    compress_kernel: Annotated[Taps, only_with(compress="token")] = 4
    compress_sharing: Annotated[Literal["block", "separate"], only_with(compress="token")] = "block"
    expand: Literal["repeat", "conv"] = "repeat"
    expand_kernel: Annotated[Taps, only_with(expand="conv")] = 4

    def stream(
        self,
        dim: int,
        num_sublayers: int,
        connection: Callable[..., CompressingConnection],
        *,
        copies: int = 1,
        readout: Callable[[nn.Module], nn.Module] = Collapse,
    ) -> Stream:
        """Return the stream of `connection(i, compress)` for each sublayer and `readout(compress)`.

        copies: how many times the state holds the embedding.
        """

        def reader(_: int) -> nn.Module:
            return Same() if self.compress is None else TokenCompress(dim, None, self.compress_kernel)

        sharing = "separate" if self.compress is None else self.compress_sharing
        connections, last = self.connected(dim, num_sublayers, sharing, reader, connection)
        if self.expand == "conv":
            expand: nn.Module = ConvEmbedding(dim, self.expand_kernel, copies)
        else:
            expand = Same() if copies == 1 else Copies(copies)
        return Stream(expand, connections, readout(last))


class ConvEmbedding(TokenConv):
    """The embedding convolution of a state without a stream axis: (batch, seq, dim), or a tuple of copies of it."""

    def __init__(self, dim: int, kernel: int, copies: int):
        super().__init__(dim, kernel)
        self.copies = copies

    def forward(self, x: Tensor, memory: Memory | None = None) -> State:
        x = super().forward(x, memory)
        return x if self.copies == 1 else (x,) * self.copies
