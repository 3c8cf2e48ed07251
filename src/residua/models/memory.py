"""The memory of short convolutions and running sums, kept in the cache of transformers beside the keys and values."""

from typing import Any, NamedTuple

from torch import Tensor

from residua.connections import Stream
from residua.connections.memory import window_of
from residua.errors import extra

with extra("lab"):
    from transformers.cache_utils import Cache


class CacheSlot(NamedTuple):
    """The slot of the cache for the memory of one part of the stream: the layer, and the index of its state."""

    layer: int
    conv_state: int


def cache_slots(stream: Stream, num_layers: int) -> list[CacheSlot | None]:
    """Return a slot for each part that needs a memory, None for others: expand, all connections, collapse."""
    numbers = iter(range(len(stream.parts)))
    looking = [next(numbers) if window_of(part) else None for part in stream.parts]
    return [None if i is None else CacheSlot(i % num_layers, i // num_layers) for i in looking]


class CacheMemory:
    """The memory of one part of the stream during one forward pass (`connections.Memory`).

    padding: (batch, seq), 0 at padding and 1 at tokens, or None. Without a cache there are no earlier tokens.
    """

    def __init__(self, cache: Cache | None, slot: CacheSlot, padding: Tensor | None):
        self.cache: Any = cache  # not used if `keeps` is False
        self.slot = slot
        self.padding = padding
        self.keeps = cache is not None

    def extend(self, x: Tensor, window: int) -> Tensor:
        if not self.keeps:
            return x
        return self._append(x, window)[:, -(window + x.shape[1]) :]

    # A running sum is kept as one row per token instead of one state that is overwritten, so that its rows can be
    # dropped together with rejected speculative tokens.

    def recall(self, like: Tensor) -> Tensor | None:
        if hasattr(self.cache, "get_conv_state"):  # not in every version of transformers
            rows = self.cache.get_conv_state(*self.slot)
            return None if rows is None else rows[..., -1:].transpose(1, 2).unflatten(2, like.shape[2:])
        rows = self._append(like[:, :0], 1)[:, -1:]  # zeros at the very start, or no row at all
        return rows if rows.shape[1] else None

    def keep(self, rows: Tensor) -> None:
        self._append(rows, 1)

    def _append(self, x: Tensor, window: int) -> Tensor:
        """Return the earlier rows in the cache, if any, then x; the cache keeps the last `window` rows."""
        # The cache keeps (batch, channels, seq).
        rows = x.flatten(2).transpose(1, 2)
        seen = self.cache.update_conv_state(
            rows, self.slot.layer, state_idx=self.slot.conv_state, conv_kernel_size=window
        ).transpose(1, 2)
        return seen.unflatten(2, x.shape[2:])


def memories(
    slots: list[CacheSlot | None], cache: Cache | None, padding: Tensor | None, x: Tensor
) -> list[CacheMemory | None]:
    """Return one memory per slot; None for parts without a slot, or if there is neither a cache nor padding.

    Unused convolution states get an empty tensor once, because `Cache.crop` slices all of them. Raises ValueError for a
    cache without convolution states, such as `DynamicCache()` without a configuration.
    """
    if cache is not None and any(slots):
        layers: list[Any] = cache.layers
        room = [getattr(layer, "number_of_states", 0) for layer in layers]
        if any(slot and (slot.layer >= len(room) or slot.conv_state >= room[slot.layer]) for slot in slots):
            raise ValueError(
                "past_key_values: expected a cache that keeps convolution states, as DynamicCache(config=model.config) "
                f"does, got {type(cache).__name__} without them"
            )
        for index, layer in enumerate(layers):
            for state in range(getattr(layer, "number_of_states", 0)):
                if CacheSlot(index, state) not in slots and not layer.is_conv_states_initialized[state]:
                    cache.update_conv_state(x.new_zeros(x.shape[0], 0, 1), index, state_idx=state, conv_kernel_size=1)
    if cache is None and padding is None:
        return [None] * len(slots)
    return [None if slot is None else CacheMemory(cache, slot, padding) for slot in slots]
