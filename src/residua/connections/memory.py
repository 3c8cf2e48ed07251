"""What a stream remembers of earlier tokens while a sequence arrives in pieces, as in generation."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Memory(Protocol):
    """What one part of the stream remembers of earlier tokens, and which of the tokens at hand are padding.

    It serves one of two purposes: `extend` for a look back on inputs, or `recall` and `keep` for what sums them up.
    """

    keeps: bool  # whether later calls will ask; without a cache there are none
    padding: Tensor | None  # (batch, seq), 0 at padding and 1 at tokens; None without padding

    def extend(self, x: Tensor, window: int) -> Tensor:
        """Return x: (batch, seq, ...) behind up to `window` inputs of earlier calls, and remember the last `window`."""

    def recall(self, like: Tensor) -> Tensor | None:
        """Return the last row kept before, (batch, 1, ...) with axes and dtype as in `like`; None at the start."""

    def keep(self, rows: Tensor) -> None:
        """Keep rows: (batch, seq, ...), one for each token of this call."""


class StreamMemory:
    """The memory of a whole stream for models that do not use the cache of transformers.

    Pass the same object with every piece of a sequence:

        memory = StreamMemory()
        for piece in x.split(1, dim=1):
            y = stream(piece, sublayers, memory=memory)

    A loop of its own passes it to every `connection(state, sublayer, memory=memory)`, and `memory.of(stream.expand)` to
    `stream.expand`, likewise for `stream.collapse`. It keeps tensors as they are: generate under `torch.no_grad()`.
    """

    def __init__(self) -> None:
        self._rows: dict[nn.Module, Tensor] = {}

    def of(self, part: nn.Module, attention_mask: Tensor | None = None) -> Memory | None:
        """The memory of one part of the stream, None where it does not look back."""
        return memory_of(part, self, attention_mask)

    def reset(self) -> None:
        """Forget everything: the next piece begins a sequence."""
        self._rows.clear()

    def copy(self) -> "StreamMemory":
        """A memory that goes on from here by itself, to come back to when tokens were only guessed."""
        other = StreamMemory()
        other._rows = dict(self._rows)
        return other

    def reorder(self, indices: Tensor) -> None:
        """Take the entries `indices`: (new batch,) of the batch, as beam search does."""
        self._rows = {part: rows.index_select(0, indices.to(rows.device)) for part, rows in self._rows.items()}


class _PartMemory:
    """The memory of one part during one call. `rows` None keeps nothing: the call has the whole sequence."""

    def __init__(self, part: nn.Module, rows: dict[nn.Module, Tensor] | None, padding: Tensor | None):
        self.keeps = rows is not None
        self.padding = padding
        self._part = part
        self._rows = {} if rows is None else rows

    def extend(self, x: Tensor, window: int) -> Tensor:
        before = self._rows.get(self._part)
        seen = x if before is None else torch.cat([before, x], 1)
        if self.keeps:
            self._rows[self._part] = seen[:, -window:]
        return seen

    def recall(self, like: Tensor) -> Tensor | None:
        return self._rows.get(self._part)

    def keep(self, rows: Tensor) -> None:
        self._rows[self._part] = rows[:, -1:]


def window_of(part: nn.Module) -> int:
    """How many earlier tokens a part of a stream looks back on: its `window`, or 0 without one."""
    return getattr(part, "window", 0)


def memory_of(part: nn.Module, memory: StreamMemory | None, padding: Tensor | None) -> Memory | None:
    """What `part` is given for this call: None where it does not look back, or has neither memory nor padding."""
    if not window_of(part) or (memory is None and padding is None):
        return None
    return _PartMemory(part, None if memory is None else memory._rows, padding)


def masked(x: Tensor, padding: Tensor | None) -> Tensor:
    """x: (batch, seq, ...) with zeros at padding: (batch, seq), 0 at padding and 1 at tokens, or None."""
    if padding is None:
        return x
    return x * padding.to(x.dtype).view(*padding.shape, *(1,) * (x.dim() - 2))


def remembered(x: Tensor, memory: Memory | None, window: int) -> Tensor:
    """x: (batch, seq, ...) behind the earlier tokens that `memory` holds, if any, with padding set to zero."""
    return x if memory is None or not window else memory.extend(masked(x, memory.padding), window)


def current(out: Tensor, x: Tensor, seen: Tensor) -> Tensor:
    """The part of `out` that belongs to the tokens of x, where `out` was computed from `seen = remembered(x, ...)`."""
    return out if seen is x else out[:, -x.shape[1] :]


def expect_tokens(x: Tensor, window: int, *, axes: str) -> None:
    """Raise ValueError where a look back of `window` > 0 meets an x that lacks one of its `axes`.

    It would take the entries of a batch (batch, dim) for a sequence, and mix them.
    """
    if window and x.dim() < axes.count(",") + 1:
        raise ValueError(f"what looks back on earlier tokens: expected {axes}, got {tuple(x.shape)}")
