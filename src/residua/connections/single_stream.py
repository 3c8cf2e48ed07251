"""Schemes whose state is a single stream, which starts as the embedding, or as a causal convolution of it."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from residua.connections.base import Scheme, State
from residua.connections.ends import ConvExpand, Copies
from residua.connections.memory import Memory
from residua.connections.options import check_types, expect_used, require


@dataclass(frozen=True, kw_only=True)
class SingleStreamScheme(Scheme):
    """A scheme of one stream, (batch, seq, dim), with the embedding convolution of Deep Delta Learning if wanted.

    The options are named as in `DeepDelta` and mean the same. They show how much of its gain needs no delta write.

    expand           "repeat": the stream starts as the embedding; "conv": as a causal convolution of it, which starts
                     as the identity
    expand_kernel    taps of that convolution
    """

    expand: Literal["repeat", "conv"] = "repeat"
    expand_kernel: int = 4

    def __post_init__(self):
        check_types(self)
        require(self, "expand_kernel", self.expand_kernel >= 1, "at least 1")
        expect_used(self, {"expand_kernel": (self.expand == "conv", "expand is 'conv'")})

    def expander(self, dim: int, copies: int = 1) -> nn.Module:
        """Build the first part of a stream, (batch, seq, dim) -> the same, or a tuple of `copies` times the same."""
        return ConvEmbedding(dim, self.expand_kernel, copies) if self.expand == "conv" else Copies(copies)


class ConvEmbedding(ConvExpand):
    """The embedding convolution for a state without a stream axis: (batch, seq, dim), or a tuple of copies of it."""

    def __init__(self, dim: int, kernel: int, copies: int):
        super().__init__(dim, 1, kernel)
        self.copies = Copies(copies)

    def forward(self, x: Tensor, memory: Memory | None = None) -> State:
        return self.copies(super().forward(x, memory).squeeze(-2))
