"""The memory of convolutions and running sums over tokens, as a layer of a transformers cache."""

import warnings
from collections.abc import Callable, Container, Iterable, Mapping
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
"""The keywords for the cache: since transformers 5.24, in earlier versions, and in earlier versions of Mamba."""

CACHE = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"
"""The keyword for the cache in the installed transformers, in inputs and in outputs."""


PAGES = ("write_index", "attention_instances")
"""The keywords of engines that keep keys and values in pages: continuous batching of transformers, vLLM and SGLang."""


def expect_no_pages(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if `arguments` has a paged cache, because pages hold no memory for a scheme that looks back."""
    if any(arguments.get(name) is not None for name in PAGES):
        raise ValueError(
            "cache must not be paged for this scheme, which reads earlier tokens; call generate, not generate_batch or "
            "an engine such as vLLM"
        )


def cache_of(arguments: Mapping[str, Any]) -> tuple[Cache | None, Any]:
    """Return the cache among the arguments of a call, under any of its names, and the paged cache.

    At least one of the two is None. A paged cache, for continuous batching, holds only keys and values; it comes with
    the indices to write to.

    Raises:
        ValueError: there are two caches, or the cache is not a transformers cache.
    """
    caches = {name: arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None}
    if len(caches) > 1:
        raise ValueError(f"{' and '.join(caches)} are names of one argument, got both; leave one out")
    for name, cache in caches.items():
        if isinstance(cache, Cache):
            return cache, None
        if "write_index" in arguments:
            return None, cache
        raise ValueError(f"{name} must be a transformers Cache, such as DynamicCache, got {type(cache).__name__}")
    return None, None


def cache_for(given: dict[str, Any], names: Container[str], config: Any, *, whole: bool) -> Any:
    """Return the cache of a call, or None. If the model would create a cache, create it here and add it to `given`.

    given: the arguments of the call; names: the names of the model's arguments; empty if `given` is not passed to it.
    whole: whether sequences are complete, as in training, and nothing is kept; a recomputed layer would fill a cache
    twice.
    """
    cache: Any = cache_of(given)[0]
    if whole:
        if cache is not None and is_filled(cache):
            raise ValueError("cache: training needs whole sequences, got a filled cache; leave it out")
        if cache is not None:
            warnings.warn("the cache stays empty, because this call has whole sequences for training", stacklevel=2)
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
    except ValueError:  # no layer counts tokens, because all have linear attention
        return any(any(layer.has_previous_state.values()) for layer in cache.layers)


class StreamLayer(LinearAttentionLayer):
    """The last layer of a cache: the memory of a stream, with one state for each part that reads earlier tokens.

    readouts: whether this is the memory of the readouts for `output_hidden_states`, one for each model layer but the
    last.
    """

    keys = values = None  # iterating over a cache reads them in every layer

    def __init__(self, number_of_states: int, *, readouts: bool = False):
        super().__init__(number_of_states=number_of_states)
        self.readouts = readouts
        self.dropped = dict.fromkeys(range(number_of_states), 0)  # rows before those that are kept, if cropped

    def _change(self, rows_of: Callable[[Tensor], Tensor]) -> None:
        for i, state in self.conv_states.items():
            self.conv_states[i] = None if state is None else rows_of(state)

    def reorder_cache(self, beam_idx: Any) -> None:  # states of a model on several devices lie there
        self._change(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_select_indices(self, indices: Any) -> None:
        self._change(lambda state: state[indices, ...])

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change(lambda state: state.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        if not self.record_past:  # a converted model adds the layer only after assisted generation has begun
            raise ValueError(
                "assisted generation and prompt lookup must be off, since this scheme reads earlier tokens; a cache to "
                "crop by hand must record the past before its first token: model.model.make_room(cache), then "
                "cache.activate_past_recording()"
            )
        windows: Any = self.conv_kernel_size
        states: Any = {i: self.conv_states[i] for i, filled in self.has_previous_state.items() if filled}
        ends = {i: state.shape[-1] + tokens_to_remove for i, state in states.items()}
        if any(end < windows[i] and self.dropped[i] and end + self.dropped[i] > 0 for i, end in ends.items()):
            raise ValueError(
                "cache must keep the tokens that it held when it was last cropped, because the memory of this scheme "
                f"has dropped the rows before them, got {-tokens_to_remove} tokens to remove"
            )
        for i, end in ends.items():
            first = max(0, end - windows[i])
            self.conv_states[i] = states[i][..., first : max(0, end)]
            self.dropped[i] = self.dropped[i] + first if end > 0 else 0
            self.has_previous_state[i] = end > 0

    def reset(self) -> None:
        super().reset()
        self.dropped = dict.fromkeys(self.dropped, 0)


def stream_layer(cache: Any, *, readouts: bool = False) -> StreamLayer | None:
    """Return the layer of a cache with the memory of a stream, or of its readouts; None if there is none yet."""
    kinds = (layer for layer in cache.layers if isinstance(layer, StreamLayer))
    return next((layer for layer in kinds if layer.readouts == readouts), None)


def make_room(cache: Any, states: int, num_layers: int, *, readouts: bool = False) -> StreamLayer:
    """Return the layer of a cache with the memory of a stream, or of its readouts; add it if the cache is empty.

    states: the number of parts that read earlier tokens. num_layers: the number of cache layers that the model fills
    itself.

    Raises:
        ValueError: the cache has no list of layers, or already holds tokens that are missing in the memory.
    """
    if not isinstance(getattr(cache, "layers", None), list):
        raise ValueError(f"cache must be a cache with layers, such as DynamicCache, got {type(cache).__name__}")
    layer = stream_layer(cache, readouts=readouts)
    if layer is not None:
        if layer.number_of_states != states:
            raise ValueError(
                "cache must be new or filled by this model, got the cache of a model with another residual scheme"
            )
        return layer
    if is_filled(cache):
        raise ValueError(
            "output_hidden_states must be True from the first token on, because the readout reads earlier tokens, got "
            "a cache with tokens that were computed without it"
            if readouts
            else "cache must be new or filled by this model, got a cache without the memory of its residual scheme"
        )
    if cache.layer_class_to_replicate is not None:  # the cache creates missing layers when they are indexed
        while len(cache.layers) < num_layers:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = StreamLayer(states, readouts=readouts)
    layer.record_past = getattr(stream_layer(cache), "record_past", False)
    cache.layers.append(layer)
    return layer


class CacheMemory:
    """The `Memory` of one part of the stream during one forward pass.

    layer: the `StreamLayer` of the cache; None if there are no earlier tokens and none are kept. state: the index of
    the part in this layer. padding: (batch, seq), boolean, false at padding, or None. documents: (batch, seq), the
    number of each token's document, or None.
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

    # A running sum is kept as one row per token, and not overwritten, so that rows of rejected speculative tokens
    # can be dropped.

    def recall(self, like: Tensor) -> Tensor | None:
        if not self.layer.has_previous_state[self.state]:
            return None
        return self.layer.conv_states[self.state][..., -1:].transpose(1, 2).unflatten(2, like.shape[2:])

    def keep(self, rows: Tensor) -> None:
        self._append(rows, 1)

    def _append(self, x: Tensor, window: int) -> Tensor:
        """Return the earlier rows in the cache followed by x, and keep the last `window` rows in the cache."""
        rows = x.flatten(2).transpose(1, 2)  # the cache has (batch, channels, seq)
        if not self.layer.has_previous_state[
            self.state
        ]:  # new, or reset: the rows that are there may be of another batch
            kept = self.layer.conv_states.get(self.state)
            fits = kept is not None and kept.shape[:-1] == rows.shape[:-1]
            self.layer.is_conv_states_initialized[self.state] &= fits
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
    """Return one memory for each part; None for parts that read single tokens. Without a cache, memories keep nothing.

    num_layers, readouts: as for `make_room`. Raises ValueError as `make_room` does.
    """
    looks_back = [window_of(part) > 0 for part in parts]
    if not any(looks_back):
        return [None] * len(looks_back)
    layer = None if cache is None else make_room(cache, sum(looks_back), num_layers, readouts=readouts)
    states = iter(range(sum(looks_back)))
    return [CacheMemory(layer, next(states), padding, documents) if looks else None for looks in looks_back]


def attention_mask_of(mask: Any) -> Any:
    """Convert a 2-D attention mask to booleans; check a 4-D mask and return it unchanged.

    mask: (batch, all tokens), including those in the cache, in any form that `tokens_of` takes; or
    (batch, 1 or heads, queries, keys), boolean or floating-point numbers that are added to the scores.

    Raises:
        ValueError: a 4-D mask consists of integers, or of the numbers 0 and 1, which attention would add to its scores.
    """
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype != torch.bool:
        wrong = "attention_mask of queries and keys must be boolean, or floating-point biases on the scores, got"
        if not mask.is_floating_point():
            raise ValueError(f"{wrong} {mask.dtype}")
        if mask.shape[2] > 1:
            ones, zeros = mask == 1, mask == 0
            expect_none((ones | zeros).all() & ones.any() & zeros.any(), f"{wrong} 0 and 1, which would hide nothing")
    return tokens_of(mask) if isinstance(mask, Tensor) and mask.dim() == 2 else mask


def expect_told_apart(parts: Iterable[nn.Module], mask: Any, documents: Tensor | None) -> None:
    """Raise ValueError if parts of a stream that read earlier tokens would read across padding or documents.

    mask: from `attention_mask_of`, or a mapping with one such mask for each kind of layer. documents: from
    `documents_of`.
    """
    if documents is not None:
        for part in parts:
            expect_separable(part)
        return
    mask = _of_full_attention(mask)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        expect_no_gap(mask)
    # A square mask is left to `padding_of`, which checks each token's own entry, because its last row may hide tokens
    # that are not padding, as in a window with sinks.
    elif isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] != mask.shape[3]:
        expect_no_gap(seen(mask[:, 0, -1]))


def padding_of(x: Tensor, mask: Any, cache: Any, documents: Tensor | None) -> Tensor | None:
    """Return which of the current tokens are not padding, (batch, seq), boolean; None without a mask.

    x: (batch, seq, dim) or (batch, seq), the tokens; mask: as for `expect_told_apart`. A token that may not attend to
    itself is padding.

    Raises:
        ValueError: the mask has another form, or it hides the previous token from a token, and there are no `documents`
            and no chunks of attention.
    """
    chunked = isinstance(mask, dict) and "full_attention" not in mask and "chunked_attention" in mask
    mask = _of_full_attention(mask)
    batch, length = x.shape[:2]
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return of_current(mask, length, cache)
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be (batch, seq), got {got}: this scheme needs the padding")
    past: Any = 0 if cache is None else cache.get_seq_length()
    if cache is not None and isinstance(past, int) and any(cache.is_sliding):
        past = min(past, max(0, mask.shape[3] - length))  # a mask of a full window begins at its first key
    if mask.shape[2] != length or mask.shape[3] < length + (past if isinstance(past, int) else 0):
        expected = f"(batch, 1, {length}, {past + length})"
        raise ValueError(f"attention_mask must be (batch, seq) or {expected}, got {tuple(mask.shape)}")
    rows = torch.arange(length, device=mask.device)
    before = mask[:, 0, rows[1:], rows[1:] + past - 1]
    tokens, sees_before = seen(torch.cat([mask[:, 0, rows, rows + past], before], 1)).tensor_split([length], 1)
    tokens = tokens.expand(batch, length)
    expect_no_gap(tokens, documents)
    if documents is None and not chunked:  # the first token of a chunk does not see the one before it
        expect_none(
            tokens[:, 1:] & tokens[:, :-1] & ~sees_before,
            "attention_mask must let every token see the one before it, because this scheme reads earlier tokens, "
            "got a mask that hides some; name packed documents with seq_idx, one number per token",
        )
    return tokens


def tokens_in(mask: Any) -> Tensor | None:
    """Return which tokens are not padding, (batch, seq), by a mask (batch, 1, seq, seq); None for any other mask.

    A token that may not attend to itself is padding.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[2] != mask.shape[3]:
        return None
    return seen(mask[:, 0].diagonal(dim1=1, dim2=2))


def of_current(x: Tensor, length: int, cache: Cache | None) -> Tensor:
    """Return the columns of x, (batch, all tokens), for the `length` tokens of this call.

    They follow the tokens in the cache. More columns may come after them, if x is as long as a cache of fixed length.

    Raises:
        ValueError: x is too short.
    """
    past: Any = 0
    if cache is not None:
        try:
            past = cache.get_seq_length()
        except ValueError:  # nothing in this cache counts tokens, so it has no fixed length
            past = x.shape[1] - length
    if isinstance(past, Tensor):
        wrong = (
            f"attention_mask must be (batch, tokens in the cache and the {length} of this call), got {tuple(x.shape)}"
        )
        expect_none(past.to(x.device) + length > x.shape[1], wrong)
        return x.index_select(1, torch.arange(length, device=x.device) + past.to(x.device))
    if x.shape[1] < past + length:
        raise ValueError(
            f"attention_mask must be (batch, {past + length}), for {past} tokens in the cache and {length} in this "
            f"call, got {tuple(x.shape)}"
        )
    return x[:, past : past + length]


def documents_of(x: Tensor, mask: Any, position_ids: Any, options: Mapping[str, Any], *, cached: bool) -> Tensor | None:
    """Return the document of each token, as consecutive numbers (batch, seq), or None if no documents are packed.

    Documents are described by `seq_idx` (batch, seq) or `cu_seq_lens_q` (documents + 1,) over the flattened rows, among
    the options of the call; or, without an attention mask, by positions (1 or batch, seq) that do not increase by one.
    A compiled graph cannot branch on values. Given positions and no cache, it always computes the numbers; with a cache
    it raises RuntimeError for positions that do not increase by one.

    x: (batch, seq, dim) or (batch, seq), the tokens; cached: whether this call fills or reads a cache.

    Raises:
        ValueError: shapes do not fit; two sources disagree; or packed documents come with a mask (batch, all tokens) or
            a cache, so that attention would mix them.
    """
    batch, length = x.shape[:2]
    numbers, ends = options.get("seq_idx"), options.get("cu_seq_lens_q")
    begins: dict[str, Tensor] = {}  # by source: (batch, seq - 1), whether a document begins
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
        if not compiling and _restarts(position_ids, mask, x):
            raise ValueError(MASKED.format("position_ids"))
        return None
    names = ", ".join(begins)
    if cached:
        raise ValueError(COME_WHOLE.format(names))
    if isinstance(mask, Tensor) and mask.dim() == 2:
        raise ValueError(MASKED.format(names))
    (first, borders), *others = begins.items()
    for name, other in others:
        expect_none(borders != other, f"{name} must have the borders of documents that {first} has, got others")
    return F.pad(borders.cumsum(1), (1, 0))


MASKED = "attention_mask must be None with packed documents ({}): attention would mix them"


def _restarts(position_ids: Any, mask: Any, x: Tensor) -> bool:
    """Return whether positions go back between two tokens of one row that a mask (batch, seq) both shows."""
    masks = isinstance(position_ids, Tensor) and isinstance(mask, Tensor)
    if not masks or position_ids.dim() != 2 or mask.shape != x.shape[:2] or x.shape[1] == 1:
        return False
    shown = mask != 0
    back = _rows("position_ids", position_ids, *x.shape[:2]).diff() < 0
    return bool((back & shown[:, 1:] & shown[:, :-1]).any())


COME_WHOLE = "use_cache must be False with packed documents ({}), got a cache; pass such documents whole, in one call"


def _rows(name: str, x: Tensor, batch: int, length: int) -> Tensor:
    """Return x: (1 or batch, seq) expanded to (batch, seq)."""
    if x.dim() != 2 or (x.shape[0] != 1 and x.shape[0] != batch) or x.shape[1] != length:  # `in` breaks a graph
        raise ValueError(f"{name} must be (1 or {batch}, {length}), got {tuple(x.shape)}")
    return x.expand(batch, length)


def _of_full_attention(mask: Any) -> Any:
    """Return the mask for layers with full attention, if `mask` is a mapping with one for each kind of layer."""
    if not isinstance(mask, dict):
        return mask
    return attention_mask_of(mask.get("full_attention", next(iter(mask.values()), None)))


def documents_apart(input_ids: Tensor, end_of_text: int | None) -> dict[str, Any]:
    """Return the forward arguments that keep the documents of a row separate: positions and no cache, or {}.

    input_ids: int64 (batch, seq). Positions (batch, seq) start again at every `end_of_text`, if it is not None: this
    token begins the next document, whose first token is therefore predicted only from it.
    """
    if end_of_text is None:
        return {}
    return {"position_ids": positions_in((input_ids == end_of_text).cumsum(1)), "use_cache": False}
