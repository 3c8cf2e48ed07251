"""The memory of short convolutions and running sums, kept in the cache of transformers beside the keys and values."""

from typing import Any, NamedTuple

from torch import Tensor

from residua.connections import Stream
from residua.errors import extra

with extra("lab"):
    from transformers.cache_utils import Cache


class Place(NamedTuple):
    """Where in the cache one part of the stream keeps its memory: the layer, and which convolution state of it."""

    layer: int
    slot: int


def places(stream: Stream, num_layers: int) -> list[Place | None]:
    """For expand, every connection and collapse, in this order: its place if it looks back, spread over the layers."""
    numbers = iter(range(len(stream.parts)))
    looking = [next(numbers) if part.window else None for part in stream.parts]
    return [None if i is None else Place(i % num_layers, i // num_layers) for i in looking]


class CacheMemory:
    """The memory of one part of the stream during one forward pass (`connections.Memory`).

    padding: (batch, seq), 0 at padding and 1 at tokens, or None. Without a cache nothing earlier exists.
    """

    def __init__(self, cache: Cache | None, place: Place, padding: Tensor | None):
        self.cache: Any = cache  # where `keeps` is false, nothing asks it
        self.place = place
        self.padding = padding
        self.keeps = cache is not None

    def extend(self, x: Tensor, window: int) -> Tensor:
        if not self.keeps:
            return x
        return self._append(x, window)[:, -(window + x.shape[1]) :]

    # What sums up all tokens so far is kept as rows, in the place of one state that is overwritten: then rows can be
    # dropped again together with tokens that were only guessed.

    def recall(self, like: Tensor) -> Tensor | None:
        if hasattr(self.cache, "get_conv_state"):  # not in every version of transformers
            rows = self.cache.get_conv_state(*self.place)
            return None if rows is None else rows[..., -1:].transpose(1, 2).unflatten(2, like.shape[2:])
        rows = self._append(like[:, :0], 1)[:, -1:]  # zeros at the very start, or no row at all
        return rows if rows.shape[1] else None

    def keep(self, rows: Tensor) -> None:
        self._append(rows, 1)

    def _append(self, x: Tensor, window: int) -> Tensor:
        """What the cache held before, if anything, followed by x; it keeps the last `window` rows of that."""
        # The cache keeps (batch, channels, seq).
        rows = x.flatten(2).transpose(1, 2)
        seen = self.cache.update_conv_state(
            rows, self.place.layer, state_idx=self.place.slot, conv_kernel_size=window
        ).transpose(1, 2)
        return seen.unflatten(2, x.shape[2:])


def memories(
    where: list[Place | None], cache: Cache | None, padding: Tensor | None, x: Tensor
) -> list[CacheMemory | None]:
    """One memory for every place; None where nothing looks back, or where there is neither a cache nor padding.

    Convolution states that nothing uses are given an empty tensor once, because `Cache.crop` slices every one.
    ValueError for a cache without convolution states, such as `DynamicCache()` without a configuration.
    """
    if cache is not None and any(where):
        layers: list[Any] = cache.layers
        room = [getattr(layer, "number_of_states", 0) for layer in layers]
        if any(place and (place.layer >= len(room) or place.slot >= room[place.layer]) for place in where):
            raise ValueError(
                "past_key_values: expected a cache that keeps convolution states, as DynamicCache(config=model.config) "
                f"does, got {type(cache).__name__} without them"
            )
        for index, layer in enumerate(layers):
            for slot in range(getattr(layer, "number_of_states", 0)):
                if Place(index, slot) not in where and not layer.is_conv_states_initialized[slot]:
                    cache.update_conv_state(x.new_zeros(x.shape[0], 0, 1), index, state_idx=slot, conv_kernel_size=1)
    if cache is None and padding is None:
        return [None] * len(where)
    return [None if place is None else CacheMemory(cache, place, padding) for place in where]
