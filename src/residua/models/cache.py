"""The memory of short convolutions and running sums, kept in the cache of transformers next to the keys and values."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.parts.memory import (
    expect_no_gap,
    expect_none,
    expect_separable,
    masked,
    positions_in,
    seen,
    tokens_of,
    window_of,
)
from residua.errors import extra

with extra("lab"):
    from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache, LinearAttentionLayer
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
    """Return the cache of a call, None if it has none; it gets a new one if its model would make one.

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


class StreamLayer(LinearAttentionLayer):
    """The last layer of a cache: it remembers the earlier tokens of a stream, one state for each part that reads them.

    readouts: whether this layer serves hidden states: it then remembers the readouts after each layer but the last.
    """

    keys = values = None  # of every layer of a cache that is iterated over

    def __init__(self, number_of_states: int, *, readouts: bool = False):
        super().__init__(number_of_states=number_of_states)
        self.readouts = readouts

    def batch_select_indices(self, indices: Any) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        for i, state in self.conv_states.items():
            self.conv_states[i] = None if state is None else state.repeat_interleave(repeats, 0)

    def crop(self, tokens_to_remove: int) -> None:
        if not self.record_past:  # it was added after drafts were announced, by a model that has only a hook for it
            raise ValueError(
                "assisted generation and prompt lookup must be off, since this scheme reads earlier tokens"
            )
        super().crop(tokens_to_remove)


def stream_layer(cache: Any, *, readouts: bool = False) -> StreamLayer | None:
    """Return the layer of a cache that remembers the parts of a stream, or their readouts; None if it has none yet."""
    kinds = (layer for layer in cache.layers if isinstance(layer, StreamLayer))
    return next((layer for layer in kinds if layer.readouts == readouts), None)


def make_room(cache: Any, states: int, num_layers: int, *, readouts: bool = False) -> StreamLayer:
    """Return the layer of a cache that remembers this many parts of a stream, or their readouts; add it to a new cache.

    num_layers: how many layers of the cache the model fills by itself.

    Raises:
        ValueError: the cache has no layers, or it holds tokens that this layer does not remember.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(f"cache must be a cache with layers, such as DynamicCache, got {type(cache).__name__}")
    layer = stream_layer(cache, readouts=readouts)
    if layer is not None:
        if layer.number_of_states != states:
            raise ValueError("cache: this cache was filled by a model with another residual scheme")
        return layer
    if is_filled(cache):
        raise ValueError(
            "output_hidden_states: the readout looks back at earlier tokens, and the cache holds tokens that were "
            "computed without; ask for hidden states from the first token"
            if readouts
            else "cache: this cache was filled without the memory of this model's residual scheme"
        )
    if cache.layer_class_to_replicate is not None:  # the cache adds a layer for every index that it has not got yet
        while len(cache.layers) < num_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = StreamLayer(states, readouts=readouts)
    layer.record_past = getattr(stream_layer(cache), "record_past", False)
    cache.layers.append(layer)
    return layer


class CacheMemory:
    """The memory of one part of the stream during one forward pass (`connections.Memory`).

    state: of the part in the layer of the cache. padding: (batch, seq), boolean, false at padding, or None.
    documents: (batch, seq), the number of each token's document, or None. Without a layer there are no earlier tokens.
    """

    def __init__(self, layer: StreamLayer | None, state: int, padding: Tensor | None, documents: Tensor | None):
        self.layer: Any = layer  # not used if `keeps` is False
        self.state = state
        self.padding = padding
        self.documents = documents
        self.keeps = layer is not None

    def extend(self, x: Tensor, window: int) -> Tensor:
        x = masked(x, self.padding)
        if not self.keeps:
            return x
        return self._append(x, window)[:, -(window + x.shape[1]) :]

    # A running sum is kept as one row per token instead of one state that is overwritten, so that its rows can be
    # dropped together with rejected speculative tokens.

    def recall(self, like: Tensor) -> Tensor | None:
        if not self.layer.has_previous_state[self.state]:
            return None
        return self.layer.conv_states[self.state][..., -1:].transpose(1, 2).unflatten(2, like.shape[2:])

    def keep(self, rows: Tensor) -> None:
        self._append(rows, 1)

    def _append(self, x: Tensor, window: int) -> Tensor:
        """Return the earlier rows in the cache, if any, then x; the cache keeps the last `window` rows."""
        rows = x.flatten(2).transpose(1, 2)  # it keeps (batch, channels, seq)
        extended = self.layer.update_conv_state(rows, state_idx=self.state, conv_kernel_size=window)
        return extended.transpose(1, 2).unflatten(2, x.shape[2:])


def memories(
    parts: Iterable[nn.Module],
    cache: Any,
    padding: Tensor | None,
    documents: Tensor | None,
    *,
    num_layers: int,
    readouts: bool = False,
) -> list[CacheMemory | None]:
    """Return one memory for each part; None for those that read single tokens. Without a cache it keeps nothing.

    num_layers, readouts: as of `make_room`. Raises ValueError as it does.
    """
    looks_back = [window_of(part) > 0 for part in parts]
    if not any(looks_back):
        return [None] * len(looks_back)
    layer = None if cache is None else make_room(cache, sum(looks_back), num_layers, readouts=readouts)
    states = iter(range(sum(looks_back)))
    return [CacheMemory(layer, next(states), padding, documents) if looks else None for looks in looks_back]


def attention_mask_of(mask: Any) -> Any:
    """Return an attention mask in the form in which a model passes it on: one of rows as booleans, others as they are.

    mask: of rows, (batch, all tokens), those in the cache too, of any form that `tokens_of` takes; or of queries and
    keys, (batch, 1 or heads, queries, keys), boolean or added to scores.

    Raises:
        ValueError: one of queries and keys holds the numbers 0 and 1, which attention would add to its scores.
    """
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype != torch.bool:
        wrong = "attention_mask of queries and keys must be boolean or added to scores, got"
        if not mask.is_floating_point():
            raise ValueError(f"{wrong} {mask.dtype}")
        if mask.shape[2] > 1:
            ones, zeros = mask == 1, mask == 0
            expect_none((ones | zeros).all() & ones.any() & zeros.any(), f"{wrong} 0 and 1: it would hide nothing")
    return tokens_of(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else mask


def expect_told_apart(parts: Iterable[nn.Module], mask: Any, documents: Tensor | None) -> None:
    """Raise ValueError if parts of a stream that read earlier tokens would read across padding or documents.

    mask: as from `attention_mask_of`, also by kind of layer. documents: as `documents_of` returns them.
    """
    if documents is not None:
        for part in parts:
            expect_separable(part)
        return
    mask = _of_full_attention(mask)
    if isinstance(mask, Tensor) and mask.dim() in (2, 4):
        expect_no_gap(mask if mask.dim() == 2 else seen(mask[:, 0, -1]))


def padding_of(x: Tensor, mask: Any, cache: Any, documents: Tensor | None) -> Tensor | None:
    """Return the padding among the current tokens, (batch, seq), boolean and false at padding, or None without any.

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
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be (batch, seq), got {got}: this scheme needs the padding")
    past: Any = 0 if cache is None else cache.get_seq_length()
    if mask.shape[2] != length or mask.shape[3] < length + (past if isinstance(past, int) else 0):
        expected = f"(batch, 1, {length}, {past + length})"
        raise ValueError(f"attention_mask must be (batch, seq) or {expected}, got {tuple(mask.shape)}")
    rows = torch.arange(length, device=mask.device)
    before = mask[:, 0, rows[1:], rows[1:] + past - 1]
    tokens, sees_before = seen(torch.cat([mask[:, 0, rows, rows + past], before], 1)).tensor_split([length], 1)
    tokens = tokens.expand(batch, length)
    expect_no_gap(tokens, documents)
    if documents is None:
        expect_none(
            tokens[:, 1:] & tokens[:, :-1] & ~sees_before,
            "attention_mask must let every token see the one before it, got a mask that keeps some apart: this "
            "scheme reads earlier tokens; name packed documents with seq_idx, one number per token",
        )
    return tokens


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
    options of the call, or from positions (1 or batch, seq) that do not increase by one, if there is no attention mask.
    A compiler cannot look at values: it gets numbers if there are positions and no cache, and with a cache its
    graph raises RuntimeError for such positions.

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
    if positioned:
        jumps = _rows("position_ids", position_ids, batch, length).diff() != 1
        if compiling and cached:
            expect_none(jumps, COME_WHOLE.format("position_ids"))
        elif begins or compiling or jumps.any():
            begins["position_ids"] = jumps
    if not begins:
        return None
    names = ", ".join(begins)
    if cached:
        raise ValueError(COME_WHOLE.format(names))
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise ValueError(f"attention_mask must be None with packed documents ({names}): attention would mix them")
    (first, borders), *others = begins.items()
    for name, other in others:
        expect_none(borders != other, f"{name} must have the borders of documents that {first} has, got others")
    return F.pad(borders.cumsum(1), (1, 0))


COME_WHOLE = "use_cache must be False with packed documents ({}), got a cache: they come whole"


def _rows(name: str, x: Tensor, batch: int, length: int) -> Tensor:
    """Return x: (1 or batch, seq) expanded to (batch, seq)."""
    if x.dim() != 2 or (x.shape[0] != 1 and x.shape[0] != batch) or x.shape[1] != length:  # a graph knows no `in`
        raise ValueError(f"{name} must be (1 or {batch}, {length}), got {tuple(x.shape)}")
    return x.expand(batch, length)


def _of_full_attention(mask: Any) -> Any:
    """Return the mask of layers with full attention, if `mask` has one for each kind of layer."""
    if not isinstance(mask, dict):
        return mask
    return attention_mask_of(mask.get("full_attention", next(iter(mask.values()), None)))


def documents_apart(input_ids: Tensor, end_of_text: int | None) -> dict[str, Any]:
    """Return the arguments that keep the documents of a row separate; none if end_of_text is None.

    input_ids: int64 (batch, seq). They are the positions (batch, seq), which start again at every `end_of_text`: that
    token begins the document after it, so the first label of a document is predicted from only that token.
    """
    if end_of_text is None:
        return {}
    return {"position_ids": positions_in((input_ids == end_of_text).cumsum(1)), "use_cache": False}
