"""The state of Deep Delta Learning: value channels, read through a compressor (arXiv 2601.00417)."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from residua.connections.base import State, Stream
from residua.connections.families.convolved import CompressingConnection, CompressingScheme
from residua.connections.families.streams import RecomputingScheme
from residua.connections.parts.ends import (
    ChannelCompress,
    CompressStart,
    OnlyStream,
    Repeat,
    Same,
    TokenCompress,
    TokenConv,
)
from residua.connections.parts.options import OnlyIf, Rows, Taps, only_with, require_option
from residua.connections.parts.spec import TensorSpec

Compressor = TokenCompress | ChannelCompress | OnlyStream


def _convolves(scheme: "ChannelScheme") -> bool:
    reads = scheme.compress != "channel" or scheme.compress_form == "read"
    return scheme.compresses and (reads or scheme.compress_kernel == scheme.value_channels)


@dataclass(frozen=True)
class ChannelScheme(CompressingScheme, RecomputingScheme):
    """A scheme whose state has the value channels of Deep Delta Learning.

    value_channels   d_v, the rows of the state; 1 for a single residual stream
    compress         how x_in is read from d_v > 1 channels: "token" (a causal convolution over the second axis, the
                     tokens) or "channel" (pointwise); None means "token" for d_v > 1 and no compression otherwise
    compress_kernel  taps of the convolution of `compress`; None means 4 for "token", value_channels for "channel"
    compress_form    "read": convolution and read vector (the code), "direct": one weight per channel (the paper)
    compress_causal  whether result a of the channel convolution depends only on channels up to a (form "read")
    """

    derived = {"compress_kernel": ("compress", "value_channels")}

    value_channels: Rows = 1
    compress_kernel: Annotated[Taps | None, OnlyIf("compress convolves", _convolves)] = field(
        default=None, kw_only=True
    )
    compress_form: Annotated[Literal["read", "direct"], only_with(compress="channel")] = "read"
    compress_causal: Annotated[bool, only_with(compress="channel", compress_form="read")] = False

    @property
    def compresses(self) -> bool:
        return self.compress is not None or self.value_channels > 1

    def __post_init__(self):
        super().__post_init__()
        if self.compress is None and self.value_channels > 1:
            object.__setattr__(self, "compress", "token")
        if self.compress is not None and self.compress_kernel is None:
            object.__setattr__(self, "compress_kernel", 4 if self.compress == "token" else self.value_channels)
        if self.compress == "channel":
            few = self.compress_kernel <= self.value_channels
            most = f"at most value_channels ({self.value_channels}) taps with channel compression"
            require_option(self, "compress_kernel", few, most)

    def state_spec(self, boundary: int, dim: int) -> TensorSpec:
        return TensorSpec((self.value_channels, dim) if self.has_stream_axis else (dim,))

    @property
    def has_stream_axis(self) -> bool:
        """Whether the state is (batch, seq, streams, dim) rather than (batch, seq, dim)."""
        return self.compresses or self.expand == "conv"

    def build_compress(self, dim: int, start: CompressStart) -> Compressor:
        """Build one compressor, (batch, seq, streams, dim) -> (batch, seq, dim); `start` is passed to its class."""
        kernel = self.compress_kernel
        if self.compress is None or kernel is None:
            return OnlyStream()
        if self.compress == "token":
            return TokenCompress(dim, self.value_channels, kernel, start=start)
        form, causal = self.compress_form, self.compress_causal
        return ChannelCompress(dim, self.value_channels, kernel, form=form, causal=causal, start=start)

    def stream(
        self, dim: int, num_sublayers: int, compressor: Callable[[int], Compressor], connection: Callable[..., Any]
    ) -> Stream:
        """Build the stream: `connection(i, compress)` makes connection i, `compressor(j)` compressor j."""

        def unread(_: nn.Module) -> nn.Module:
            return Same()

        if not self.has_stream_axis:
            return self.stack(Same(), dim, num_sublayers, compressor, connection, unread)
        expand: nn.Module = Repeat(self.value_channels)
        if self.expand == "conv":
            expand = TokenConv(dim, self.expand_kernel, self.value_channels)
        return self.stack(expand, dim, num_sublayers, compressor, connection)


class ChannelConnection(CompressingConnection):
    """A connection that reads the channels through a compressor."""

    compressor: Compressor

    def __init__(self, scheme: ChannelScheme, compress: nn.Module):
        super().__init__(compress)
        self.has_stream_axis = scheme.has_stream_axis

    def streams(self, state: State) -> Tensor:
        """Return the state as (batch, seq, streams, dim)."""
        return state if self.has_stream_axis else state.unsqueeze(-2)
