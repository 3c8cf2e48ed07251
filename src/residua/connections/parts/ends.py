"""The ends of a stream: modules that expand an embedding into the state, and that compress the state to width dim.

Streams are (batch, seq, streams, dim). A module with `window > 0` reads that many earlier tokens and takes a `Memory`.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.parts.memory import (
    Memory,
    current,
    documents_in,
    expect_memory,
    expect_tokens,
    masked,
    padding_in,
    remembered,
    window_of,
)
from residua.connections.parts.sharded import SelfStarting
from residua.ops import (
    at_least_float32,
    causal_expand,
    causal_read,
    causal_read_on,
    channel_taps,
    smear,
    stream_read,
)
from residua.ops.precision import promote


class Same(nn.Module):
    """The identity, for a stream whose state is (batch, seq, dim)."""

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        return x


class Copies(nn.Module):
    """Make the first state from the embedding x, (batch, seq, dim): a tuple with `count` references to x."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, ...]:
        return (x,) * self.count


class LastOf(nn.Module):
    """The readout that returns the last tensor of a tuple, (batch, seq, dim)."""

    def forward(self, state: tuple[Tensor, ...], memory: Memory | None = None) -> Tensor:
        return state[-1]


class OnlyStream(nn.Module):
    """The compressor of a state with a single stream. (batch, seq, 1, dim) -> (batch, seq, dim)."""

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return streams.squeeze(-2)

    def shares(self) -> None:
        """Return None: a single stream needs no weights."""


class Repeat(nn.Module):
    """X[j] = x for every stream j. (batch, seq, dim) -> (batch, seq, streams, dim)."""

    def __init__(self, num_streams: int):
        super().__init__()
        self.num_streams = num_streams

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        return x.unsqueeze(-2).expand(*x.shape[:-1], self.num_streams, x.shape[-1])


class SumStreams(nn.Module):
    """sum_j X[j], the collapse of hyper-connections. (batch, seq, streams, dim) -> (batch, seq, dim)."""

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return streams.sum(-2)


class MeanStreams(nn.Module):
    """The mean over the streams. (batch, seq, streams, dim) -> (batch, seq, dim)."""

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return streams.mean(-2)


class TokenConv(SelfStarting):
    """A causal filter over the tokens for each stream and feature: DDL's embedding convolution (EC).

    Starts as a repetition: the tap of the current token is 1, the others are 0. (batch, seq, dim) ->
    (batch, seq, streams, dim). With num_streams=None there is one filter for each feature, and the result is
    (batch, seq, dim), or a tuple of `copies` such tensors if `copies` is above 1.
    """

    separates_documents = True

    def __init__(self, dim: int, kernel: int, num_streams: int | None = None, *, copies: int = 1):
        super().__init__()
        self.window = kernel - 1
        self.single, self.copies = num_streams is None, copies
        self.taps = nn.Parameter(torch.empty(kernel, num_streams or 1, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.taps)
        nn.init.ones_(self.taps[0])

    def forward(self, x: Tensor, memory: Memory | None = None) -> Any:
        expect_tokens(x, self.window, axes="(batch, seq, dim)")
        expect_memory(self, memory, x)
        extended = remembered(x, memory, self.window)
        streams = current(causal_expand(extended, self.taps, documents_in(memory, x)), x, extended)
        state = streams.squeeze(-2) if self.single else streams
        return state if self.copies == 1 else (state,) * self.copies


class Smear(SelfStarting):
    """nanochat's smear: add a gated copy of the previous token's embedding, then make the state by `repeat`.

    (batch, seq, dim) -> a state. The factor `scale` starts at 0, so nothing is added at first. The weights of the gate
    are drawn uniformly from [0, 0.02). The gate reads the first 24 features as in nanochat, or all features of a
    narrower embedding.
    """

    separates_documents = True
    window = 1
    features = 24

    def __init__(self, dim: int, repeat: nn.Module):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.gate = nn.Parameter(torch.empty(min(self.features, dim)))
        self.repeat = repeat
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.scale)
        nn.init.uniform_(self.gate, 0.0, 0.02)

    def forward(self, x: Tensor, memory: Memory | None = None) -> Any:
        expect_tokens(x, self.window, axes="(batch, seq, dim)")
        expect_memory(self, memory, x)
        extended = remembered(x, memory, self.window)
        return self.repeat(current(smear(extended, self.scale, self.gate, documents_in(memory, x)), x, extended))


CompressStart = Literal["average", "authors", "rewrite"] | int
"""How a compressor starts: as the average of the streams; as in the authors' first code ("authors") or their current
code ("rewrite"); or, given as an integer, as the stream with this index."""


def _start_read(read: Tensor, start: CompressStart) -> None:
    """Set the weights `read`, (streams, ...), to the average of the streams, or to the stream with index `start`."""
    if isinstance(start, int):
        nn.init.zeros_(read)
        nn.init.ones_(read[start])
    else:
        nn.init.constant_(read, 1 / read.shape[0])


class TokenCompress(SelfStarting):
    """DDL's token-axis compression: a causal filter over the tokens for every stream and feature, then a read vector.

    Starts as the average of the current token's streams, or as the current token's stream `start`. `start="authors"`
    draws the taps from N(0, (0.5/sqrt(dim))^2), as the authors' first code does; `start="rewrite"` averages over the
    tokens too, as their current code does. (batch, seq, streams, dim), or (batch, seq, dim) with num_streams=None, ->
    (batch, seq, dim).
    """

    separates_documents = True

    def __init__(self, dim: int, num_streams: int | None, kernel: int, *, start: CompressStart = "average"):
        super().__init__()
        self.window = kernel - 1
        self.single = num_streams is None
        self.start = start
        self.taps = nn.Parameter(torch.empty(kernel, num_streams or 1, dim))
        self.read = nn.Parameter(torch.empty(num_streams or 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        _start_read(self.read, self.start)
        if self.start == "authors":
            nn.init.normal_(self.taps, std=0.5 / math.sqrt(self.taps.shape[-1]))
        elif self.start == "rewrite":
            nn.init.constant_(self.taps, 1 / self.taps.shape[0])
        else:
            nn.init.zeros_(self.taps)
            nn.init.ones_(self.taps[0])

    def weights(self) -> Tensor:
        """Return the taps times the read vector, (kernel, streams, dim)."""
        taps, read = promote(self.taps, self.read)
        return taps * read.unsqueeze(-1)

    def shares(self) -> Tensor:
        return _shares(self.weights())

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        expect_tokens(streams, self.window, axes="(batch, seq, dim)" if self.single else "(batch, seq, streams, dim)")
        if self.single:
            streams = streams.unsqueeze(-2)
        taps = self.weights()
        if memory is None or not self.window or not memory.keeps:
            return causal_read(streams, taps, padding_in(memory, streams), documents_in(memory, streams))
        streams = masked(streams, memory.padding)
        like = at_least_float32(streams[..., :1, :]).expand(*streams.shape[:-2], self.window, streams.shape[-1])
        x, sums = causal_read_on(streams, taps, memory.recall(like))
        memory.keep(sums)
        return x


class ChannelCompress(SelfStarting):
    """DDL's channel-axis compression (CC), pointwise in the tokens.

    `form="read"`: a zero-padded convolution over the streams, then a read vector (the authors' code; `causal` pads only
    before the first stream). `form="direct"`: one weight for each stream and feature (the paper). Both start as the
    average of the streams, or as stream `start`; `start="authors"` draws the taps from N(0, (0.5/sqrt(dim))^2),
    `start="rewrite"` sets each to 1 / kernel. (batch, seq, streams, dim) -> (batch, seq, dim).
    """

    def __init__(
        self,
        dim: int,
        num_streams: int,
        kernel: int,
        *,
        form: str = "read",
        causal: bool = False,
        start: CompressStart = "average",
    ):
        super().__init__()
        self.causal = causal
        self.start = start
        self.taps = nn.Parameter(torch.empty(num_streams if form == "direct" else kernel, dim))
        self.read = nn.Parameter(torch.empty(num_streams)) if form == "read" else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.read is not None:
            _start_read(self.read, self.start)
        if self.start == "authors":
            nn.init.normal_(self.taps, std=0.5 / math.sqrt(self.taps.shape[-1]))
        elif self.start == "rewrite":
            nn.init.constant_(self.taps, 1 / self.taps.shape[0])
        elif self.read is None:
            _start_read(self.taps, self.start)
        else:
            # With 1 at the current stream's tap, and 0 elsewhere, the convolution is the identity.
            kernel = self.taps.shape[0]
            nn.init.zeros_(self.taps)
            nn.init.ones_(self.taps[kernel - 1 if self.causal else (kernel - 1) // 2])

    def weights(self) -> Tensor:
        """Return convolution and read vector combined into one weight per stream and feature, (streams, dim)."""
        return self.taps if self.read is None else channel_taps(self.taps, self.read, causal=self.causal)

    def shares(self) -> Tensor:
        return _shares(self.weights())

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return stream_read(streams, self.weights())


def _shares(weights: Tensor) -> Tensor:
    """Return the share of each stream in the read, (streams,) with sum 1, from weights (..., streams, dim)."""
    sizes = at_least_float32(weights).abs().sum(-1)
    sizes = sizes.reshape(-1, sizes.shape[-1]).sum(0)
    return sizes / sizes.sum()


class Collapse(nn.Module):
    """The readout: a separate compressor after the last sublayer. The state -> (batch, seq, dim)."""

    separates_documents = True

    def __init__(self, compress: nn.Module):
        super().__init__()
        self.compress = compress
        self.window = window_of(compress)

    def forward(self, state: Tensor, memory: Memory | None = None) -> Tensor:
        x = self.compress(state, memory)
        expect_memory(self, memory, x)
        return x
