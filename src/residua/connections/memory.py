"""The memory of earlier tokens that a stream needs while a sequence arrives in pieces, as in generation."""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.ops.shapes import expect_shape
from residua.ops.transforms import transformed


class Memory(Protocol):
    """The memory of one part of the stream: its earlier tokens, and the entries that are not earlier tokens.

    A part uses either `extend`, if it needs earlier inputs, or `recall` and `keep`, if it needs a running sum. One that
    reads only tokens with the same number in `documents` says so with the attribute `separates_documents = True`;
    others are never given any.
    """

    keeps: bool  # whether anything is kept for later calls; False without a cache
    padding: Tensor | None  # (batch, seq), 0 at padding and 1 at tokens; None without padding
    documents: Tensor | None  # (batch, seq), the number of each token's document; None for one in every row

    def extend(self, x: Tensor, window: int) -> Tensor:
        """Return up to `window` earlier rows followed by x: (batch, seq, ...), and keep the last `window` of them.

        A row is zero at padding and before the first token: a memory may begin with such rows. Whatever counts them
        as tokens, as a softmax or a mean does, is wrong; `remembered_tokens` tells them apart.
        """

    def recall(self, like: Tensor) -> Tensor | None:
        """Return the last row that was kept, (batch, 1, ...) with the axes and dtype of `like`.

        At the start it is None, or zeros.
        """

    def keep(self, rows: Tensor) -> None:
        """Keep rows: (batch, seq, ...), one per token of this call."""


class StreamMemory:
    """The memory of a whole stream for models that do not use the cache of transformers.

    Pass the same object with every piece of a sequence:

        memory = StreamMemory()
        for piece in x.split(1, dim=1):
            y = stream(piece, sublayers, memory=memory)

    In your own loop, pass it to every `connection(state, sublayer, memory=memory)`, and pass `memory.of(stream.expand)`
    to `stream.expand`, likewise for `stream.collapse`. Tensors are not detached: generate under `torch.no_grad()`.
    """

    def __init__(self) -> None:
        self._rows: dict[nn.Module, Tensor] = {}
        # (batch, 2): whether the row has begun, and whether its last entry is a token; absent before any padding.
        self._ends: dict[nn.Module, Tensor] = {}

    def of(self, part: nn.Module, attention_mask: Tensor | None = None) -> Memory | None:
        """Return the memory of one part of the stream; None if it needs none."""
        return memory_of(part, self, attention_mask, None)

    def reset(self) -> None:
        """Forget everything: the next piece begins a sequence."""
        self._rows.clear()
        self._ends.clear()

    def copy(self) -> "StreamMemory":
        """Return an independent copy, to return to after speculative tokens."""
        other = StreamMemory()
        other._rows, other._ends = dict(self._rows), dict(self._ends)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> "StreamMemory":
        return self.copy()  # its keys are the parts of the stream that it belongs to

    def reorder(self, indices: Tensor) -> None:
        """Select the batch entries `indices`: (new batch,), as beam search does."""
        for store in (self._rows, self._ends):
            store.update({part: rows.index_select(0, indices.to(rows.device)) for part, rows in store.items()})

    def _expect_no_gap(self, part: nn.Module, mask: Tensor | None) -> None:
        """Raise ValueError if a row goes on after padding, in this piece of `part` or since the pieces before."""
        before = self._ends.get(part)
        if mask is None:
            if before is None:
                return
            mask = before.new_ones(before.shape[0], 1)
        if before is None:
            before = mask.new_full((mask.shape[0], 2), part in self._rows, dtype=torch.bool)
        tokens = torch.cat([before, mask != 0], 1)
        expect_no_gap(tokens)
        self._ends[part] = torch.stack([tokens.any(1), tokens[:, -1]], 1)


class _PartMemory:
    """The memory of one part during one call. With `rows` None it keeps nothing: the call has the whole sequence."""

    def __init__(
        self,
        part: nn.Module,
        rows: dict[nn.Module, Tensor] | None,
        padding: Tensor | None,
        documents: Tensor | None,
    ):
        self.keeps = rows is not None
        self.padding = padding
        self.documents = documents
        self._part = part
        self._rows = {} if rows is None else rows

    def extend(self, x: Tensor, window: int) -> Tensor:
        x = masked(x, self.padding)
        if not self.keeps:
            return x
        before = self._rows.get(self._part)
        if before is None:  # as the cache of transformers begins
            before = x.new_zeros(x.shape[0], max(0, window - x.shape[1]), *x.shape[2:])
        extended = torch.cat([before, x], 1)
        self._rows[self._part] = extended[:, -window:]
        return extended

    def recall(self, like: Tensor) -> Tensor | None:
        return self._rows.get(self._part)

    def keep(self, rows: Tensor) -> None:
        if rows.shape[1]:
            self._rows[self._part] = rows[:, -1:]


def window_of(part: nn.Module) -> int:
    """Return how many earlier tokens a part of a stream reads: its `window`, or 0 without one."""
    return getattr(part, "window", 0)


def memory_of(
    part: nn.Module, memory: StreamMemory | None, padding: Tensor | None, documents: Tensor | None
) -> Memory | None:
    """Return the memory of `part` for this call; None if it needs none, or if it would be empty.

    Raises:
        ValueError: padding between tokens; documents for a part that cannot separate them, or with a memory; padding
            or a memory for a part that reads the whole sequence.
    """
    if documents is not None:
        expect_separable(part)
    if not getattr(part, "causal", True):
        if memory is not None:
            raise ValueError("memory must be None for a scheme that reads the whole sequence, got one")
        if padding is not None:
            expect_none(padding == 0, "attention_mask: this scheme reads the whole sequence; there must be no padding")
    if not window_of(part) or (memory is None and padding is None and documents is None):
        return None
    if documents is not None and memory is not None:
        raise ValueError("documents: packed documents come whole, in one call; memory must be None, got one")
    if memory is not None:
        memory._expect_no_gap(part, padding)
    elif padding is not None:
        expect_no_gap(padding)
    return _PartMemory(part, None if memory is None else memory._rows, padding, documents)


def expect_separable(part: nn.Module) -> None:
    """Raise ValueError if `part` reads earlier tokens and would read across the borders of packed documents."""
    causal = getattr(part, "causal", True)
    if (window_of(part) and not getattr(part, "separates_documents", False)) or not causal:
        raise ValueError(
            f"documents: {type(part).__name__} reads {'earlier' if causal else 'all'} tokens and cannot separate "
            "documents in a sequence; give each its own row"
        )


def documents_in(memory: Memory | None) -> Tensor | None:
    """Return the numbers of the documents that are packed into the rows of this call, (batch, seq), or None."""
    return None if memory is None else memory.documents


def expect_no_gap(mask: Tensor) -> None:
    """Raise ValueError for padding between the tokens of a row of mask: (batch, seq), 0 at padding and 1 at tokens.

    A part that reads earlier tokens would count the padding as tokens.
    """
    tokens = mask != 0
    expect_none(
        tokens[:, 1:] & ~tokens[:, :-1] & (tokens.cumsum(1) > 1)[:, 1:],
        "attention_mask must have padding only before or after the tokens of a row, got padding between them: this "
        "scheme reads earlier tokens; move the padding to the left, and begin with an empty cache or memory",
    )


def expect_none(wrong: Tensor, message: str) -> None:
    """Raise ValueError with this message if any entry of `wrong` is true.

    A compiled graph checks it too, and raises RuntimeError when it runs. Not checked inside a transform, on the meta
    device, or while a CUDA graph is captured, which cannot ask for values.
    """
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), message)
    elif transformed() or wrong.is_meta or (wrong.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    elif wrong.any():
        raise ValueError(message)


def positions_in(documents: Tensor) -> Tensor:
    """Return the position of each token in its document, from 0; documents: (batch, seq), a number per token."""
    tokens = torch.arange(documents.shape[1], device=documents.device)
    begins = F.pad(documents.diff() != 0, (1, 0))
    return tokens - (begins * tokens).cummax(1).values


def masked(x: Tensor, padding: Tensor | None) -> Tensor:
    """Return x: (batch, seq, ...) with zeros at padding: (batch, seq), 0 at padding and 1 at tokens, or None."""
    if padding is None:
        return x
    expect_shape("attention_mask", padding, x.shape[:2], "(batch, seq) of this call")
    return x * padding.to(x.dtype).view(*padding.shape, *(1,) * (x.dim() - 2))


def remembered(x: Tensor, memory: Memory | None, window: int) -> Tensor:
    """Return the earlier rows in `memory`, if any, followed by x: (batch, seq, ...); zeros as from `Memory.extend`."""
    return x if memory is None or not window else memory.extend(x, window)


def remembered_tokens(x: Tensor, memory: Memory | None, window: int) -> tuple[Tensor, Tensor]:
    """Return the rows of `remembered`, (batch, rows, ...), and which of them are tokens: (batch, rows), boolean.

    For reads that must not count the other rows, such as a softmax over the last tokens. The memory keeps a column of
    ones next to x, which is zero where x is.
    """
    marked = torch.cat([x.flatten(2), x.new_ones(*x.shape[:2], 1)], -1)
    rows = remembered(marked, memory, window)
    return rows[..., :-1].unflatten(-1, x.shape[2:]), rows[..., -1] != 0


def current(out: Tensor, x: Tensor, extended: Tensor) -> Tensor:
    """Return the part of `out` for the tokens of x, where `out` was computed from `extended = remembered(x, ...)`."""
    return out if extended is x else out[:, out.shape[1] - x.shape[1] :]


def expect_tokens(x: Tensor, window: int, *, axes: str) -> None:
    """Raise ValueError if earlier tokens are needed (`window` > 0) and x lacks one of its `axes`.

    Without the check, the entries of a batch (batch, dim) would be mixed as if they were a sequence.
    """
    if window and x.dim() < axes.count(",") + 1:
        raise ValueError(f"a module that reads earlier tokens must get {axes}, got {tuple(x.shape)}")
