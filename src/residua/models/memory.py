"""The memory of short convolutions and running sums, kept in the cache of transformers next to the keys and values."""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections import Scheme, Stream
from residua.connections.ends import TokenConv
from residua.connections.memory import expect_no_gap, expect_none, expect_separable, masked, window_of
from residua.errors import extra

with extra("lab"):
    from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""The keywords for the cache: since transformers 5.24, before it, and before it of Mamba."""

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The keyword for the cache in the installed transformers, in inputs and in outputs."""


PAGES = ("write_index", "attention_instances")
"""The keywords of engines that keep keys and values in pages: continuous batching of transformers, vLLM and SGLang."""


def expect_no_pages(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a call comes with pages, which keep nothing for a scheme that looks back."""
    if any(arguments.get(name) is not None for name in PAGES):
        raise ValueError(
            "cache must not be paged for this scheme, which reads earlier tokens; call generate, not generate_batch or "
            "an engine such as vLLM"
        )


def cache_of(arguments: Mapping[str, Any]) -> tuple[Cache | None, Any]:
    """Return the cache among the arguments of a call, under whichever name, and the pages of continuous batching.

    At least one of the two is None. Pages keep only keys and values, and come with the places to write to.

    Raises:
        ValueError: two caches, or something that is not a cache of transformers.
    """
    caches = {name: arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None}
    if len(caches) > 1:
        raise ValueError(f"{' and '.join(caches)} are names of one argument, got both; leave one out")
    for name, cache in caches.items():
        if isinstance(cache, Cache):
            return cache, None
        if "write_index" in arguments:
            return None, cache
        raise ValueError(f"{name} must be a Cache of transformers, such as DynamicCache, got {type(cache).__name__}")
    return None, None


def cache_for(given: dict[str, Any], names: Container[str], config: Any, *, whole: bool) -> Any:
    """Return the cache of a call, None for none; the call gets a new one where its model would make one.

    given: the arguments of the call; names: those that its model takes, none if the call goes no further. whole: the
    sequences come whole, as in training, and nothing is kept; a recomputed layer would fill a cache twice.
    """
    cache: Any = cache_of(given)[0]
    if whole:
        if cache is not None and is_filled(cache):
            raise ValueError("cache: training needs whole sequences, got a filled cache")
        if "use_cache" in names:
            given["use_cache"] = False
        return None
    use_cache = given.get("use_cache")
    if cache is None and (getattr(config, "use_cache", False) if use_cache is None else use_cache):
        cache = DynamicCache(config=config)
        if getattr(config, "is_encoder_decoder", False):
            cache = EncoderDecoderCache(cache, DynamicCache(config=config))
        given[next((name for name in CACHE_NAMES if name in names), CACHE)] = cache
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache


def is_filled(cache: Any) -> bool:
    """Return whether a cache holds tokens."""
    try:
        return bool(cache.get_seq_length())
    except ValueError:  # none of its layers counts tokens: linear attention everywhere
        return any(any(layer.has_previous_state.values()) for layer in cache.layers)


class CacheSlot(NamedTuple):
    """The slot of the cache for one memory: the layer, and the index of its convolution state."""

    layer: int
    conv_state: int


class CacheSlots(NamedTuple):
    """A slot for each part of a model, None for parts that need no memory.

    parts: expand, all connections, collapse. readouts: collapse after each layer but the last, for hidden states, which
    are used only if a call asks for these. attentions: the convolution of keys and values of each layer, if there are.
    """

    parts: list[CacheSlot | None]
    readouts: list[CacheSlot | None]
    attentions: list[CacheSlot | None]

    @property
    def per_layer(self) -> int:
        """How many convolution states the fullest layer of the cache has."""
        slots = (*self.parts, *self.readouts, *self.attentions)
        return max((slot.conv_state + 1 for slot in slots if slot), default=0)


def cache_slots(stream: Stream, num_layers: int, attentions: Sequence[nn.Module] = ()) -> CacheSlots:
    """Return the slots for the first `num_layers` layers of a stream, spread over as many layers of the cache.

    attentions: the convolutions of keys and values of these layers.
    """
    parts = [stream.expand, *stream.connections[: 2 * num_layers], stream.collapse]
    needs = [window_of(part) > 0 for part in parts] + [window_of(stream.collapse) > 0] * (num_layers - 1)
    needs += [window_of(convolution) > 0 for convolution in attentions]
    numbers = iter(range(len(needs)))
    looking = [next(numbers) if need else None for need in needs]
    slots = [None if i is None else CacheSlot(i % num_layers, i // num_layers) for i in looking]
    first, last = len(parts), len(needs) - len(attentions)
    return CacheSlots(slots[:first], slots[first:last], slots[last:])


@lru_cache(maxsize=256)
def states_per_layer(scheme: Scheme, dim: int, num_layers: int, key_value_kernel: int | None) -> int:
    """Return how many convolution states the cache needs in every layer."""
    with torch.device("meta"):
        attentions = [] if key_value_kernel is None else [TokenConv(1, key_value_kernel)] * num_layers
        return cache_slots(scheme.build(dim, 2 * num_layers), num_layers, attentions).per_layer


class CacheMemory:
    """The memory of one part of the stream during one forward pass (`connections.Memory`).

    padding: (batch, seq), 0 at padding and 1 at tokens, or None. documents: (batch, seq), the number of each token's
    document, or None. Without a cache there are no earlier tokens.
    """

    def __init__(self, cache: Cache | None, slot: CacheSlot, padding: Tensor | None, documents: Tensor | None):
        self.cache: Any = cache  # not used if `keeps` is False
        self.slot = slot
        self.padding = padding
        self.documents = documents
        self.keeps = cache is not None

    def extend(self, x: Tensor, window: int) -> Tensor:
        x = masked(x, self.padding)
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
        extended = self.cache.update_conv_state(
            rows, self.slot.layer, state_idx=self.slot.conv_state, conv_kernel_size=window
        ).transpose(1, 2)
        return extended.unflatten(2, x.shape[2:])


class Memories(NamedTuple):
    """The memories of one forward pass, as in `CacheSlots`; None for parts that need none.

    readouts: empty unless hidden states are asked for, now or in an earlier pass with this cache.
    """

    parts: list[CacheMemory | None]
    readouts: list[CacheMemory | None]
    attentions: list[CacheMemory | None]


def memories(
    slots: CacheSlots,
    cache: Cache | None,
    padding: Tensor | None,
    documents: Tensor | None,
    x: Tensor,
    *,
    hidden_states: bool,
) -> Memories:
    """Return one memory per slot; None for all if there is neither a cache nor padding nor documents.

    Raises:
        ValueError: a cache without convolution states, such as `DynamicCache()` without a configuration; hidden states
            are asked for, and the cache holds tokens whose readouts were not.
    """
    if cache is not None and slots.per_layer:
        hidden_states = _expect_readouts(slots, cache, hidden_states)
        _fill_unused(cache, {*slots.parts, *(slots.readouts if hidden_states else ()), *slots.attentions}, x)
    return Memories(
        *(
            [memory_at(slot, cache, padding, documents) for slot in some]
            for some in (slots.parts, slots.readouts if hidden_states else [], slots.attentions)
        )
    )


def _expect_readouts(slots: CacheSlots, cache: Any, hidden_states: bool) -> bool:
    """Return whether the cache takes readouts, from now on or as before; raise ValueError as `memories`."""
    room = [getattr(layer, "number_of_states", 0) for layer in cache.layers]
    used = [slot for slot in (*slots.parts, *slots.readouts, *slots.attentions) if slot]
    if any(slot.layer >= len(room) or slot.conv_state >= room[slot.layer] for slot in used):
        raise ValueError(
            "cache must be a cache that keeps convolution states, as DynamicCache(config=model.config) "
            f"does, got {type(cache).__name__} without them"
        )
    contents = [_content(cache.layers[slot.layer], slot.conv_state) for slot in slots.readouts if slot]
    if hidden_states and EMPTY in contents:
        raise ValueError(
            "output_hidden_states: the readout looks back at earlier tokens, and the cache holds tokens that were "
            "computed without; ask for hidden states from the first token"
        )
    return hidden_states or FILLED in contents  # once begun, they go on: a token that is left out would be missing


def _fill_unused(cache: Any, used: set[CacheSlot | None], x: Tensor) -> None:
    """Give unused convolution states an empty tensor once, because `Cache.crop` slices all of them."""
    for index, layer in enumerate(cache.layers):
        for state in range(getattr(layer, "number_of_states", 0)):
            if _content(layer, state) != NOTHING:
                continue
            if layer.is_conv_states_initialized[state] and not layer.conv_states[state].shape[1]:
                layer.is_conv_states_initialized[state] = False  # the cache was reset, and may be used otherwise
            if CacheSlot(index, state) not in used:
                cache.update_conv_state(x.new_zeros(x.shape[0], 0, 1), index, state_idx=state, conv_kernel_size=1)


def memory_at(
    slot: CacheSlot | None, cache: Cache | None, padding: Tensor | None, documents: Tensor | None
) -> CacheMemory | None:
    """Return the memory of a slot; None without one, or if there is neither a cache nor padding nor documents."""
    if slot is None or (cache is None and padding is None and documents is None):
        return None
    return CacheMemory(cache, slot, padding, documents)


def expect_told_apart(parts: Iterable[nn.Module], mask: Any, documents: Tensor | None) -> None:
    """Raise ValueError if parts of a stream that read earlier tokens would read across padding or documents.

    mask: (batch, all tokens), those in the cache too, or of the attention, (batch, 1, queries, keys), boolean or to be
    added; also by kind of layer. documents: as `documents_of` returns them.
    """
    if documents is not None:
        for part in parts:
            expect_separable(part)
        return
    mask = _of_full_attention(mask)
    if isinstance(mask, Tensor) and mask.dim() in (2, 4):
        expect_no_gap(mask if mask.dim() == 2 else _attended(mask[:, 0, -1]))


def padding_of(x: Tensor, mask: Any, cache: Any, documents: Tensor | None) -> Tensor | None:
    """Return the padding among the current tokens, (batch, seq) with 0 at padding, or None without any.

    x: (batch, seq, dim) or (batch, seq), the tokens; mask: as for `expect_told_apart`. A token that may not attend to
    itself is padding.

    Raises:
        ValueError: the mask is of another kind, or it keeps a token from the one before it and no `documents` say why.
    """
    mask = _of_full_attention(mask)
    batch, length = x.shape[:2]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return of_current(mask, length, cache)
    if mask is None or length == 1:  # generate() prepares the others, and a generated token is never padding
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        raise ValueError(
            f"attention_mask must be (batch, seq), got {type(mask).__name__}: this scheme needs the padding"
        )
    past = 0 if cache is None else cache.get_seq_length()
    rows = torch.arange(length, device=mask.device)
    tokens = _attended(mask[:, 0, rows, rows + past])
    if documents is None:
        expect_none(
            tokens[:, 1:] & tokens[:, :-1] & ~_attended(mask[:, 0, rows[1:], rows[1:] + past - 1]),
            "attention_mask must let every token see the one before it, got a mask that keeps some apart: this "
            "scheme reads earlier tokens; name packed documents with seq_idx, one number per token",
        )
    return tokens.expand(batch, length)


def of_current(x: Tensor, length: int, cache: Cache | None) -> Tensor:
    """Return the columns of x: (batch, all tokens) that are about the `length` tokens of this call.

    They come after the tokens in the cache. More may follow, if x is as long as a cache of fixed length.

    Raises:
        ValueError: x ends before them.
    """
    past: Any = 0
    if cache is not None:
        try:
            past = cache.get_seq_length()
        except ValueError:  # nothing in this cache counts tokens, so it has no fixed length
            past = x.shape[1] - length
    if isinstance(past, Tensor):
        return x.index_select(1, torch.arange(length, device=x.device) + past.to(x.device))
    if x.shape[1] < past + length:
        raise ValueError(
            f"attention_mask must be (batch, {past + length}), {past} tokens in the cache and {length} in this call, "
            f"got {tuple(x.shape)}"
        )
    return x[:, past : past + length]


def documents_of(x: Tensor, mask: Any, position_ids: Any, options: Mapping[str, Any], *, cached: bool) -> Tensor | None:
    """Return the documents that are packed into the rows of a call, as consecutive numbers (batch, seq), or None.

    They are known from `seq_idx` (batch, seq) or `cu_seq_lens_q` (documents + 1,) over the flattened rows, among the
    options of the call, or from positions (1 or batch, seq) that do not go on by one, if there is no attention mask.
    A compiler cannot look at values: it gets numbers wherever there are positions and no cache.

    x: (batch, seq, dim) or (batch, seq), the tokens; cached: whether this call fills or reads a cache.

    Raises:
        ValueError: shapes do not fit; two sources name other borders; there is a mask (batch, all tokens) or a cache
            with packed documents, which attention would not know of.
    """
    batch, length = x.shape[:2]
    numbers, ends = options.get("seq_idx"), options.get("cu_seq_lens_q")
    begins: dict[str, Tensor] = {}  # where the documents of each row begin, after the first
    if isinstance(numbers, Tensor):
        begins["seq_idx"] = _rows("seq_idx", numbers, batch, length).diff() != 0
    if isinstance(ends, Tensor):
        places = torch.arange(batch * length, device=x.device)
        numbers = torch.bucketize(places, ends.to(x.device)[1:], right=True)
        begins["cu_seq_lens_q"] = numbers.view(batch, length).diff() != 0
    compiling = torch.compiler.is_compiling()
    positioned = isinstance(position_ids, Tensor) and position_ids.dim() == 2 and mask is None and length > 1
    if positioned and not (compiling and cached):
        jumps = _rows("position_ids", position_ids, batch, length).diff() != 1
        if begins or compiling or jumps.any():
            begins["position_ids"] = jumps
    if not begins:
        return None
    names = ", ".join(begins)
    if cached:
        raise ValueError(f"use_cache must be False with packed documents ({names}), got a cache: they come whole")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise ValueError(f"attention_mask must be None with packed documents ({names}): attention would mix them")
    (first, borders), *others = begins.items()
    for name, other in others:
        expect_none(borders != other, f"{name} must have the borders of documents that {first} has, got others")
    return F.pad(borders.cumsum(1), (1, 0))


def _rows(name: str, x: Tensor, batch: int, length: int) -> Tensor:
    """Return x: (1 or batch, seq) expanded to (batch, seq)."""
    if x.dim() != 2 or x.shape[0] not in (1, batch) or x.shape[1] != length:
        raise ValueError(f"{name} must be (1 or {batch}, {length}), got {tuple(x.shape)}")
    return x.expand(batch, length)


def _of_full_attention(mask: Any) -> Any:
    """Return the mask of layers with full attention, if `mask` has one for each kind of layer."""
    return mask.get("full_attention", next(iter(mask.values()), None)) if isinstance(mask, dict) else mask


def _attended(mask: Tensor) -> Tensor:
    """Return the entries that a mask, boolean or to be added, lets attention see, as a boolean mask."""
    return mask if mask.dtype == torch.bool else mask == 0


NOTHING, EMPTY, FILLED = "nothing", "the empty tensor of an unused state", "rows of earlier tokens"


def _content(layer: Any, state: int) -> str:
    """Return the content of a convolution state in a layer of the cache: NOTHING, EMPTY or FILLED."""
    if not layer.has_previous_state[state]:
        return NOTHING
    return FILLED if layer.conv_states[state].shape[1] else EMPTY
