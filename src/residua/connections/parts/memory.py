"""The memory of earlier tokens that a stream needs while a sequence arrives in pieces, as in generation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.errors import shown
from residua.ops.conv import consecutive
from residua.ops.shapes import expect_shape
from residua.ops.transforms import transformed


class Memory(Protocol):
    """The memory of one part of the stream: its inputs at earlier tokens, the padding and the document numbers.

    A part uses either `extend`, if it needs earlier inputs, or `recall` and `keep`, if it needs a running sum. A part
    that reads only tokens with the same number in `documents` declares this by the attribute
    `separates_documents = True`; for other parts `documents` is always None.
    """

    keeps: bool  # whether anything is kept for later calls; False without a cache
    padding: Tensor | None  # (batch, seq), boolean, false at padding and true at tokens; None without padding
    documents: Tensor | None  # (batch, seq), the document of each token, 0, 1, 2, ... in a row; None: one in each row

    def extend(self, x: Tensor, window: int) -> Tensor:
        """Return up to `window` earlier rows followed by x: (batch, seq, ...), and keep the last `window` of them.

        A row is zero at padding and before the first token: a memory may begin with such rows. A softmax or a mean must
        not count them as tokens; `remembered_tokens` tells them apart.
        """

    def recall(self, like: Tensor) -> Tensor | None:
        """Return the last row that was kept, (batch, 1, ...) with the axes of `like`, in the dtype that it was kept in.

        Before the first token the result is None, or zeros.
        """

    def keep(self, rows: Tensor) -> None:
        """Keep rows: (batch, seq, ...), one per token of this call."""


class Identity:
    """Identifies a stream to its parts and its memory. A deep copy or a loaded stream gets another identity.

    A memory that is loaded without its stream still belongs to the stream that it was saved with. count: the number of
    parts.
    """

    def __init__(self, number: str | None = None, count: int = 0):
        self.number, self.loaded, self.count = number or uuid4().hex, number is not None, count

    def __deepcopy__(self, memo: dict[int, Any]) -> "Identity":
        return Identity(count=self.count)

    def __reduce__(self) -> tuple[Any, ...]:
        return Identity, (self.number, self.count)

    def place(self) -> "Place":
        """Return a new place in the stream, which no other part has."""
        self.count += 1
        return Place(self, self.count)

    def is_of(self, stream: "Identity") -> bool:
        """Return whether a memory with this identity belongs to `stream`."""
        return self is stream or (self.loaded and self.number == stream.number)


class Place(NamedTuple):
    """The place of a part: its stream, and its number in the stream. A memory recognises the part by its place."""

    stream: Identity
    number: int


def give_places(parts: Sequence[nn.Module]) -> None:
    """Give the parts of a stream their places.

    If all parts that already have a place belong to one stream, the others join it. Otherwise all parts form a new one.
    """
    places = [getattr(part, "place", None) for part in parts]
    streams = {id(place.stream): place.stream for place in places if place is not None}
    stream = next(iter(streams.values())) if len(streams) == 1 else Identity()
    for part, place in zip(parts, places):
        if place is None or len(streams) > 1:
            vars(part)["place"] = stream.place()


class StreamMemory:
    """The memory of a whole stream for models that do not use a transformers cache.

    Pass the same object with every piece of a sequence:

        memory = StreamMemory()
        for piece in x.split(1, dim=1):
            y = stream(piece, sublayers, memory=memory)

    In your own loop, pass it to every `connection(state, sublayer, memory=memory)`, and pass `memory.of(part)` to
    `read`, `stream.expand` and `stream.collapse`. Tensors are not detached: generate under `torch.no_grad()`.

    The memory belongs to one stream until `reset`. A copied or pickled memory continues with the same stream; if it is
    copied together with its stream, it continues with the copied stream. A pickle holds the last rows and no weights.
    The memory raises ValueError for another stream, such as a copy with other weights, and for a part that missed a
    piece or gets one twice. If a call of the stream raises, the memory is unchanged: pass the same piece again. In your
    own loop, return to an earlier `copy` instead, and call each part once for a piece: a second call is taken for the
    next piece.
    """

    def __init__(self) -> None:
        self._streams: tuple[Identity, ...] = ()  # one of these owns the memory; several only after a deep copy
        self._tokens: dict[Any, int] = {}  # how many tokens each part has seen, by its number
        self._rows: dict[Any, Tensor] = {}
        # (batch, 2): whether a sequence has begun, and whether its last entry is a token; absent until padding occurs.
        self._ends: dict[Any, Tensor] = {}
        self._task = -1  # autograd's number of the backward pass in which this memory began; -1 for none

    def of(self, part: nn.Module, attention_mask: Tensor | None = None) -> Memory | None:
        """Return the memory of one part of the stream; None if it needs none."""
        return memory_of(part, self, attention_mask, None)

    def reset(self) -> None:
        """Clear the memory: the next piece begins a new sequence, of any stream."""
        vars(self).update(vars(StreamMemory()))

    def copy(self) -> "StreamMemory":
        """Return an independent copy, for example to discard speculative tokens later."""
        other = StreamMemory()
        other._streams, other._task = self._streams, self._task
        other._tokens, other._rows, other._ends = dict(self._tokens), dict(self._rows), dict(self._ends)
        return other

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamMemory":
        other = self.copy()
        other._streams += tuple(deepcopy(stream, memo) for stream in self._streams)  # if the stream is copied too
        return other

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_rows": {number: rows.detach().clone() for number, rows in self._rows.items()}}

    def reorder(self, indices: Tensor) -> None:
        """Keep the batch entries `indices`: (new batch,), as beam search does."""
        for store in (self._rows, self._ends):
            store.update({part: rows.index_select(0, indices.to(rows.device)) for part, rows in store.items()})

    def _number(self, part: nn.Module) -> Any:
        """Return the number that identifies a part in this memory. Raises ValueError for a part of another stream."""
        place = getattr(part, "place", None)
        if place is None:  # in no stream
            return id(part)
        if self._tokens and not any(stream.is_of(place.stream) for stream in self._streams):
            raise ValueError(
                "memory must belong to this stream, got the memory of another stream, such as the original of a copy; "
                "begin with a new StreamMemory(), or copy both together: copy.deepcopy((stream, memory))"
            )
        self._streams = (place.stream,)
        return place.number

    def _count(self, number: Any, tokens: int) -> None:
        """Count tokens of one part. Raises ValueError if the first part has counted a different number."""
        self._expect_one_pass()
        had = self._tokens.get(number, 0) + tokens
        first = next(iter(self._tokens), number)
        if number != first and had != self._tokens[first]:
            raise ValueError(
                f"memory: every part of a stream must get every piece once, got {self._tokens[first]} tokens in the "
                f"first part and {had} in another; pass the same memory to all of them, from the first piece on"
            )
        self._tokens[number] = had

    def _expect_one_pass(self) -> None:
        """Raise ValueError in a backward pass if the forward pass has filled this memory."""
        task = -1 if torch.compiler.is_compiling() else torch._C._current_graph_task_id()
        if not self._tokens:
            self._task = task
        elif self._task != task:
            raise ValueError(
                "memory must be None in an activation checkpoint, got a memory: the forward pass has changed it "
                "before the backward pass repeats the call; pass whole sequences, or make a new StreamMemory() in the "
                "checkpoint"
            )

    def _earlier(self, number: Any, batch: int) -> Tensor | None:
        """Return the rows of a part. Raises ValueError if they belong to a different number of sequences."""
        return _of_batch(self._rows.get(number), batch)

    def _expect_no_gap(self, number: Any, tokens: Tensor | None) -> None:
        """Raise ValueError if a row has padding between its tokens, within this piece or since earlier pieces."""
        before = self._ends.get(number)
        if tokens is None:
            if before is None:
                return
            tokens = before.new_ones(before.shape[0], 1)
        before = _of_batch(before, tokens.shape[0])
        if before is None:
            before = tokens.new_full((tokens.shape[0], 2), self._earlier(number, tokens.shape[0]) is not None)
        tokens = torch.cat([before, tokens], 1)
        expect_no_gap(tokens)
        self._ends[number] = torch.stack([tokens.any(1), tokens[:, -1]], 1)


def _of_batch(rows: Tensor | None, batch: int) -> Tensor | None:
    """Return rows of a memory. Raises ValueError if they belong to a different number of sequences."""
    if rows is not None and rows.shape[0] != batch:
        raise ValueError(
            f"memory must have as many sequences as x, got {rows.shape[0]} and {batch}; choose sequences with "
            "memory.reorder(indices), or begin with a new StreamMemory()"
        )
    return rows


@contextmanager
def whole_piece(memory: StreamMemory | None) -> Iterator[None]:
    """Restore the memory if the `with` block raises, so that the same piece can be passed again."""
    before = memory.copy() if isinstance(memory, StreamMemory) else None
    try:
        yield
    except BaseException:
        if before is not None:
            vars(memory).update(vars(before))
        raise


class _PartMemory:
    """The memory of one part during one call.

    whole: the memory of all parts; None if nothing is kept, because the call has the whole sequence.
    """

    def __init__(self, whole: StreamMemory | None, number: Any, padding: Tensor | None, documents: Tensor | None):
        self.keeps = whole is not None
        self.padding = padding
        self.documents = documents
        self._whole: Any = whole  # not used if `keeps` is False
        self._number = number

    def extend(self, x: Tensor, window: int) -> Tensor:
        x = masked(x, self.padding)
        if not self.keeps:
            return x
        self._whole._count(self._number, x.shape[1])
        before = self._whole._earlier(self._number, x.shape[0])
        if before is None:  # zeros before a short first piece, as in a transformers cache
            before = x.new_zeros(x.shape[0], max(0, window - x.shape[1]), *x.shape[2:])
        extended = torch.cat([before, x], 1)
        self._whole._rows[self._number] = extended[:, -window:]
        return extended

    def recall(self, like: Tensor) -> Tensor | None:
        return self._whole._earlier(self._number, like.shape[0]) if self.keeps else None

    def keep(self, rows: Tensor) -> None:
        self._whole._count(self._number, rows.shape[1])
        if rows.shape[1]:
            self._whole._rows[self._number] = rows[:, -1:]


def window_of(part: nn.Module) -> int:
    """Return the number of earlier tokens that a part of a stream reads: its `window`, or 0."""
    return getattr(part, "window", 0)


def memory_of(
    part: nn.Module, memory: StreamMemory | None, attention_mask: Tensor | None, documents: Tensor | None
) -> Memory | None:
    """Return the memory of `part` for this call; None if it needs none, or if it would be empty.

    attention_mask: (batch, seq), of any form that `tokens_of` takes. documents: (batch, seq), as `consecutive` reads
    them.

    Raises:
        TypeError: `memory` is neither None nor an instance of StreamMemory, or the mask or `documents` is no tensor.
        ValueError: there is padding between tokens; documents are passed together with a memory, or to a part that
            cannot separate them; or padding or a memory is passed to a part that reads the whole sequence.
    """
    if memory is not None and not isinstance(memory, StreamMemory):
        raise TypeError(f"memory must be a StreamMemory, got {shown(memory)}; write memory=StreamMemory()")
    if documents is not None:
        expect_separable(part)
    if not getattr(part, "causal", True):
        if memory is not None:
            raise ValueError("memory must be None for a scheme that reads the whole sequence, got a memory")
        if attention_mask is not None:
            wrong = ~tokens_of(attention_mask)
            expect_none(wrong, "attention_mask: this scheme reads the whole sequence; there must be no padding")
    if not window_of(part) or (memory is None and attention_mask is None and documents is None):
        return None
    if documents is not None and memory is not None:
        raise ValueError(
            "memory must be None with packed documents, got a memory; pass such documents whole, in one call"
        )
    padding = None if attention_mask is None else tokens_of(attention_mask)
    documents = None if documents is None else consecutive(expect_rows("documents", documents))
    if memory is None:
        if padding is not None:
            expect_no_gap(padding, documents)
        return _PartMemory(None, None, padding, documents)
    number = memory._number(part)
    memory._expect_no_gap(number, padding)
    return _PartMemory(memory, number, padding, documents)


def reads_other_tokens(part: nn.Module) -> bool:
    """Return whether a part of a stream reads tokens besides the current one, so that it needs (batch, seq)."""
    return window_of(part) > 0 or not getattr(part, "causal", True)


def whole_sequence(part: nn.Module, call: Memory | None = None) -> Memory | None:
    """Return the memory of `part` for a call with the whole sequence, even of one token; None if it needs none.

    It keeps nothing. call: has the padding and the documents of the call; None without any.
    """
    padding, documents = (None, None) if call is None else (call.padding, call.documents)
    return _PartMemory(None, None, padding, documents) if window_of(part) else None


def expect_memory(part: nn.Module, memory: object, x: Tensor) -> None:
    """Raise ValueError if x is a single token, (batch, 1, dim), and `part` needs earlier tokens but has no memory.

    Generation token by token without a memory would give wrong numbers.
    """
    if window_of(part) and memory is None and x.dim() > 2 and x.shape[-2] == 1:
        raise ValueError(
            "memory: this scheme reads earlier tokens, but it got a single token and no memory; if that token is the "
            "whole sequence, pass memory=StreamMemory(); if you decode piece by piece, create one StreamMemory and "
            "pass it with every piece"
        )


def expect_once(parts: Sequence[nn.Module]) -> None:
    """Raise ValueError if a part that reads earlier tokens stands twice in a stream: a memory keeps one set of rows."""
    reading = [id(part) for part in parts if window_of(part)]
    if len(set(reading)) < len(reading):
        raise ValueError(
            "memory must be None for a stream in which a connection that reads earlier tokens stands twice, got a "
            "memory, which has one place for each connection; pass whole sequences, or build a connection for each "
            "sublayer"
        )


def expect_separable(part: nn.Module) -> None:
    """Raise ValueError if `part` would read earlier tokens across the borders of packed documents."""
    causal = getattr(part, "causal", True)
    if (window_of(part) and not getattr(part, "separates_documents", False)) or not causal:
        raise ValueError(
            f"documents: {type(part).__name__} reads {'earlier' if causal else 'all'} tokens and cannot separate "
            "documents in a sequence; give each document its own row"
        )


def documents_in(memory: Memory | None, x: Tensor) -> Tensor | None:
    """Return the numbers of the documents that are packed into the rows of this call, (batch, seq), or None.

    They are on the device of x. The parts of a model may lie on several.
    """
    return None if memory is None or memory.documents is None else memory.documents.to(x.device)


def padding_in(memory: Memory | None, x: Tensor) -> Tensor | None:
    """Return which tokens are not padding, (batch, seq), boolean, on the device of x; or None."""
    return None if memory is None or memory.padding is None else memory.padding.to(x.device)


def tokens_of(mask: Tensor) -> Tensor:
    """Return which entries of an attention mask (batch, seq) are tokens, as a new boolean tensor.

    In a mask of booleans or integers, every entry but 0 is a token; the entry may be the number of a document. The same
    holds for floating-point numbers, unless one of them is negative or -0.0: such a mask is a bias on attention scores,
    and is read by `seen`.

    Raises:
        TypeError: the mask is no tensor.
        ValueError: the mask is not (batch, seq), or it is 0.0 everywhere, which is ambiguous: all padding if the
            numbers mark tokens, all tokens if they are biases on scores.
    """
    expect_rows("attention_mask", mask)
    if not mask.is_floating_point():
        return mask != 0
    added = mask.signbit().any()
    if mask.numel():
        expect_none(
            (mask == 0).all() & ~added,
            f"attention_mask must be boolean or integer if it is 0 everywhere, got {mask.dtype}: 0 may mark padding "
            "or be a bias on the score of a token",
        )
    return torch.where(added, seen(mask), mask != 0)


HIDDEN_BELOW, LOWEST_BIAS = 100.0, -5000.0


def seen(mask: Tensor) -> Tensor:
    """Return, as booleans, which entries of a mask are visible to attention. The mask is boolean or is added to scores.

    An entry is hidden if it is at least 100 below the largest entry, or at least 100 below 0 if the largest is
    positive: softmax gives it less than 1e-43. All other entries are biases. Entries of -5100 and below are always
    hidden.

    Raises:
        ValueError: the mask holds NaN.
    """
    if mask.dtype == torch.bool or not mask.numel():
        return mask != 0
    expect_none(mask.isnan(), "attention_mask must be numbers, got NaN")
    wide = mask.float()
    return wide > wide.amax().clamp(LOWEST_BIAS, 0) - HIDDEN_BELOW


def expect_rows(name: str, x: Tensor) -> Tensor:
    """Return x; raise TypeError unless it is a tensor, and ValueError unless it has the axes (batch, seq)."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor (batch, seq), got {shown(x)}; write torch.tensor(...)")
    if x.dim() != 2:
        raise ValueError(f"{name} must be (batch, seq), got {tuple(x.shape)}")
    return x


def expect_no_gap(tokens: Tensor, documents: Tensor | None = None) -> None:
    """Raise ValueError for padding between the tokens of a row, or of one of its documents.

    A part that reads earlier tokens would count the padding as tokens. tokens: (batch, seq), as from `tokens_of`;
    documents: (batch, seq), as from `consecutive`.
    """
    counts = tokens.cumsum(1)
    if documents is not None:
        expect_shape("documents", documents, tokens.shape, "(batch, seq) of the attention mask")
        counts = counts - (counts - tokens.long()).gather(1, firsts_in(documents))
    expect_none(
        tokens[:, 1:] & ~tokens[:, :-1] & (counts > 1)[:, 1:],
        "attention_mask must have padding only before or after the tokens of a row, got padding between them: this "
        "scheme reads earlier tokens; move the padding to the left, and begin with an empty cache or memory",
    )


def expect_none(wrong: Tensor, message: str) -> None:
    """Raise ValueError with this message if any entry of `wrong` is true.

    A compiled graph makes the check when it runs, and raises RuntimeError. Inside a torch.func transform, on the meta
    device, and while a CUDA graph is captured, nothing is checked, because values cannot be read.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), message)
    elif transformed() or wrong.is_meta or (wrong.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    elif wrong.any():
        raise ValueError(message)


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0; documents: (batch, seq), a number per token."""
    return torch.arange(documents.shape[1], device=documents.device) - firsts_in(documents)


def firsts_in(documents: Tensor) -> Tensor:
    """Return the index of the first token of each token's document; documents: (batch, seq), a number per token."""
    tokens = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents.diff() != 0, (1, 0))
    return (begins * tokens).cummax(1).values


def masked(x: Tensor, padding: Tensor | None) -> Tensor:
    """Return x: (batch, seq, ...) with zeros at padding, even in place of NaN.

    padding: (batch, seq), boolean, false at padding and true at tokens, or None.
    """
    if padding is None:
        return x
    expect_shape("attention_mask", padding, x.shape[:2], "(batch, seq) of this call")
    return torch.where(padding.to(x.device).view(*padding.shape, *(1,) * (x.dim() - 2)), x, 0)


def finite_at_padding(x: Tensor, tokens: Tensor) -> Tensor:
    """Return x: (batch, seq, dim) with 0 in place of numbers at padding that are not finite.

    0 times NaN is NaN, so NaN would reach the gradients of tokens. tokens: (batch, seq), as from `tokens_of`.
    """
    padding = ~tokens.to(x.device)
    expect_shape("attention_mask", padding, x.shape[:2], "(batch, seq) of this call")
    return torch.where(padding.unsqueeze(-1) & ~x.isfinite(), 0, x)


def remembered(x: Tensor, memory: Memory | None, window: int) -> Tensor:
    """Return the earlier rows in `memory`, if any, followed by x: (batch, seq, ...). See `Memory.extend` for zeros."""
    return x if memory is None or not window else memory.extend(x, window)


def remembered_tokens(x: Tensor, memory: Memory | None, window: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `remembered`, (batch, rows, ...), and whether each is a token: (batch, rows), boolean.

    For reads that must skip rows that are not tokens, such as a softmax over the last tokens. The memory keeps an extra
    column next to x, which is 1 in rows that are tokens and 0 in the others.
    """
    marked = torch.cat([x.flatten(2), x.new_ones(*x.shape[:2], 1)], -1)
    rows = remembered(marked, memory, window)
    return rows[..., :-1].unflatten(-1, x.shape[2:]), rows[..., -1] != 0


def current(out: Tensor, x: Tensor, extended: Tensor) -> Tensor:
    """Return the part of `out` for the tokens of x; `out` was computed from `extended = remembered(x, ...)`."""
    return out if extended is x else out[:, out.shape[1] - x.shape[1] :]


def expect_tokens(x: Tensor, window: int, *, axes: str) -> None:
    """Raise ValueError if earlier tokens are needed (`window` > 0) and the axes of x differ from `axes`.

    Without the check, the entries of a batch (batch, dim), or the columns of an image (batch, height, width, dim),
    would be mixed as if they were a sequence.
    """
    if window and x.dim() != axes.count(",") + 1:
        shape = tuple(x.shape[:-2] + x.shape[-1:] if "streams" in axes else x.shape)  # the shape that the caller passed
        raise ValueError(no_sequence(shape))


def no_sequence(shape: tuple[int, ...]) -> str:
    """Return the error message for x without the axes (batch, seq), which a scheme that reads earlier tokens needs."""
    hint = {2: "; add the axis of the batch: x[None]"}.get(len(shape), "")
    if len(shape) > 3:
        hint = "; flatten height and width: x.flatten(1, -2)"
    return f"x must be (batch, seq, dim), got {shape}: the scheme has a module that reads earlier tokens{hint}"
