"""The language model: a pre-norm Transformer that works with any residual scheme through `read` and `write`.

    state -> read -x-> attention -y-> write -> state -> read -x-> MLP -y-> write -> state
             '------ connection 2 i ------'             '-- connection 2 i + 1 --'
             '------------------------------ layer i ---------------------------'

Before the first layer, `expand` makes the state from the embeddings; after the last, `collapse` reads it out, then norm
and head follow.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from residua.connections import Connection, Memory, RMSNorm
from residua.connections.base import as_inputs
from residua.connections.parts.memory import positions_in, window_of
from residua.errors import extra
from residua.models.attention import PACKED, PAGED, Attention, AttentionContext, Rotary
from residua.models.cache import (
    CACHE,
    PAGES,
    attention_mask_of,
    cache_for,
    cache_of,
    documents_of,
    expect_no_pages,
    expect_told_apart,
    make_room,
    memories,
    of_current,
    padding_of,
    stream_layer,
    tokens_in,
)
from residua.models.configuration import ResiduaConfig
from residua.models.linear import MLP, initialise
from residua.ops import at_least_float32
from residua.ops.precision import linear
from residua.ops.recompute import cut

with extra("lab"):
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.cache_utils import Cache
    from transformers.masking_utils import create_causal_mask
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
    from transformers.utils import can_return_tuple


@dataclass
class ResiduaModelOutput(BaseModelOutputWithPast):
    """The usual output of a decoder, and in training the `penalty` (a scalar) of a scheme with an auxiliary loss.

    states: with `output_states`, the residual states before the first and after every layer, pytrees of the scheme.
    """

    penalty: Tensor | None = None
    states: tuple[Any, ...] | None = None


@dataclass
class ResiduaCausalLMOutput(CausalLMOutputWithPast):
    """The usual output of a language model; in training, `loss` includes the `penalty` of a scheme that has one.

    states: as in `ResiduaModelOutput`.
    """

    penalty: Tensor | None = None
    states: tuple[Any, ...] | None = None


class Embedding(nn.Embedding):
    """`nn.Embedding` whose rows start from N(0, std^2)."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, std: float):
        self.std = std
        super().__init__(num_embeddings, embedding_dim)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class Head(nn.Linear):
    """`nn.Linear` without a bias. Its weights start from N(0, std^2). It does not keep its input for the backward pass
    if a norm can compute it again.
    """

    def __init__(self, in_features: int, out_features: int, *, std: float):
        self.std = std
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class ConnectionCall:
    """The connection around a sublayer, and its memory of earlier tokens in this call of the model.

    This is not a tuple, so that hooks that move a layer's arguments to its device do not move the connection.
    """

    connection: Connection
    memory: Memory | None


class Layer(GradientCheckpointingLayer):
    """The two sublayers of a layer. Their connections belong to the stream and are passed as arguments."""

    def __init__(self, config: ResiduaConfig, layer_idx: int):
        super().__init__()
        self.attention = Attention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(
        self, state: Any, around_attention: ConnectionCall, around_mlp: ConnectionCall, context: AttentionContext
    ) -> tuple[Any, list[Tensor]]:
        """Return the state after both sublayers, and in training the penalties of their connections."""
        penalties = []
        for reader, sublayer in (
            (around_attention, partial(self.attention, context=context)),
            (around_mlp, self.mlp),
        ):
            connection = reader.connection
            x, carry = connection.read(state, reader.memory)
            # A state may be wider than the weights of the sublayers.
            state = connection.write(sublayer(*(part.to(context.dtype) for part in as_inputs(x))), carry)
            penalty = connection.penalty(carry.coefficients) if self.training else None
            if penalty is not None:
                penalties.append(penalty)
        return state, penalties


class Call(NamedTuple):
    """The inputs of a call of the trunk, other than the embeddings, checked and complete.

    attentions: a list that collects the attention weights of each layer; None if they are not requested. padding:
    (batch, seq), 0 at padding and 1 at tokens, or None. documents: (batch, seq), the number of each token's document,
    or None. tokens: (1 or batch, seq), which tokens are not padding, or None; `padding` where that is known.
    """

    attention: AttentionContext
    attentions: list[Tensor] | None
    cache: Cache | None
    padding: Tensor | None
    documents: Tensor | None
    tokens: Tensor | None


def recomputed(checkpoint: Callable, run: Callable, state: Any, *others: Any) -> Any:
    """Return `run(state, *others)` for a layer; `checkpoint` recomputes it in the backward pass."""
    # `cut` keeps the layer's input. Recomputing this input would run the previous layer, whose weights may be
    # offloaded. Reentrant checkpointing tracks only arguments that are tensors, and a state may be a pytree of tensors.
    return checkpoint(run, cut(state), *others, use_reentrant=False)


class ResiduaPreTrainedModel(PreTrainedModel):
    config: ResiduaConfig
    config_class = ResiduaConfig
    base_model_prefix = "model"
    starts_modules = True  # `_init_weights` lets every module initialise its own parameters
    supports_gradient_checkpointing = True
    _no_split_modules = ["Layer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable = checkpoint, every_n_layers: int = 1
    ) -> None:
        super()._set_gradient_checkpointing(enable, partial(recomputed, gradient_checkpointing_func), every_n_layers)

    def _init_weights(self, module: nn.Module) -> None:
        # Every module initialises all of its own parameters. If only some were loaded, restore their loaded values.
        loaded = [p for p in module.parameters(recurse=False) if getattr(p, "_is_hf_initialized", False)]
        values = [p.detach().clone() for p in loaded]
        initialise(module)
        with torch.no_grad():
            for parameter, value in zip(loaded, values):
                parameter.copy_(value)


class ResiduaModel(ResiduaPreTrainedModel):
    """The trunk: token ids (batch, seq) or embeddings (batch, seq, hidden_size) to the last normalised hidden state."""

    def __init__(self, config: ResiduaConfig):
        super().__init__(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, std=config.embedding_init_std)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.stream = config.scheme.build(
            config.hidden_size, 2 * config.num_hidden_layers, norm_eps=config.rms_norm_eps
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self._keep_in_fp32_modules_strict = {f"stream.{name}" for name in self.stream.float32_parameters()}
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value  # type: ignore[assignment]

    @property
    def parts(self) -> list[nn.Module]:
        """All parts that may need a memory of earlier tokens: those of the stream, and convolutions of keys and values.

        During assisted decoding with an early exit, these are only the parts of the layers that draft tokens.
        """
        depth = self.config.num_hidden_layers
        layers: Any = list(self.layers)[:depth] if self.config.key_value_kernel is not None else ()
        connections = list(self.stream.connections)[: 2 * depth]  # slicing the ModuleList itself would create a module
        return [self.stream.expand, *connections, self.stream.collapse, *(x.attention.convolution for x in layers)]

    def make_room(self, cache: Any) -> None:
        """Add the layer for the stream's memory to a new cache, if any part reads earlier tokens."""
        if states := sum(window_of(part) > 0 for part in self.parts):
            make_room(cache, states, self.config.num_hidden_layers)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        output_states: bool = False,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ResiduaModelOutput:
        """Run the trunk, with the interface of every transformers decoder.

        `hidden_states` are the embeddings, the readout of the state after every layer but the last, and the final
        normalised output: (batch, seq, hidden_size) each. `output_hidden_states` may be a list of indices; None then
        stands for the states that were not chosen. `output_states` returns the states themselves. `output_attentions`
        needs "eager" attention; other implementations warn and return no weights. `past_key_values` is the name of
        `cache` before transformers 5.24. Other keywords go to the attention function: those of packed documents
        (`PACKED` in residua.models.attention) always, those of continuous batching and of serving engines (`PAGED`)
        only together with a paged cache.

        Raises:
            TypeError: a keyword is unknown.
            ValueError: both or neither of `input_ids` and `inputs_embeds` are given, or the mask, the cache or the
                documents do not fit them.
        """
        keywords = PAGED if any(name in kwargs for name in PAGES) else PACKED
        for name in kwargs:
            if name not in keywords:
                raise TypeError(f"{type(self).__name__}.forward() takes no keyword argument {name!r}")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                f"give exactly one of input_ids and inputs_embeds, got {'neither' if input_ids is None else 'both'}"
            )
        if past_key_values is not None and CACHE == "cache" and not torch.compiler.is_compiling():
            warnings.warn("`past_key_values` is deprecated; use `cache` instead", FutureWarning, stacklevel=2)
        config = self.config
        depth = config.num_hidden_layers
        if depth > len(self.layers):
            raise ValueError(f"num_hidden_layers must be at most the {len(self.layers)} that were built, got {depth}")
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        output_attentions = config.output_attentions if output_attentions is None else output_attentions
        embeddings = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        caches = cache_of({**kwargs, "cache": cache, "past_key_values": past_key_values})
        call = self._call(embeddings, attention_mask, position_ids, caches, use_cache, output_attentions, kwargs)
        chosen = chosen_states(output_hidden_states, depth + 1)
        return self._run(embeddings, call, chosen, output_states)

    def _run(self, embeddings: Tensor, call: Call, chosen: set[int], output_states: bool) -> ResiduaModelOutput:
        """Run the trunk. chosen: the indices of the hidden states to return; output_states: as in `forward`."""
        config = self.config
        depth = config.num_hidden_layers
        remember = partial(memories, cache=call.cache, padding=call.padding, documents=call.documents, num_layers=depth)
        parts: Any = self.parts
        first, *others = remember(parts)
        begun = call.cache is not None and stream_layer(call.cache, readouts=True) is not None
        readouts = remember([self.stream.collapse] * (depth - 1), readouts=True) if chosen or begun else []
        readers = list(map(ConnectionCall, parts[1 : 1 + 2 * depth], others))
        at_end, *of_keys = others[2 * depth :]
        state_dtype = getattr(torch, config.state_dtype) if config.state_dtype else embeddings.dtype
        state = self.stream.expand(embeddings.to(state_dtype), first)
        attention = call.attention._replace(memories=dict(enumerate(of_keys)))
        states, penalties = [state], []
        hidden_states: list[Tensor | None] = [embeddings]

        for i, layer in enumerate(self.layers[:depth]):
            state, layer_penalties = layer(state, *readers[2 * i : 2 * i + 2], attention)
            penalties += layer_penalties
            if output_states:  # otherwise each state is freed as soon as possible
                states.append(state)
            wanted = i < len(readouts) and (i + 1 in chosen or readouts[i])
            hidden = self.stream.collapse(state, readouts[i]).to(embeddings.dtype) if wanted else None
            hidden_states.append(hidden)
        hidden_states[-1] = last = self.norm(self.stream.collapse(state, at_end).to(embeddings.dtype))

        # One row may stand for the whole batch.
        tokens = None if call.tokens is None else call.tokens.expand(embeddings.shape[:2])
        selected = tuple(hidden if i in chosen else None for i, hidden in enumerate(hidden_states))
        return ResiduaModelOutput(
            last_hidden_state=last,
            penalty=total_penalty(penalties, tokens),
            hidden_states=selected if chosen else None,  # type: ignore[arg-type]  # as transformers, None if not chosen
            attentions=None if call.attentions is None else tuple(call.attentions),
            states=tuple(states) if output_states else None,
            **{CACHE: call.cache},
        )

    def _call(
        self,
        embeddings: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        caches: tuple[Cache | None, Any],
        use_cache: bool | None,
        output_attentions: bool | None,
        options: dict[str, Any],
    ) -> Call:
        """Check and complete the inputs of `forward`. caches: from `cache_of`; options: the remaining keywords."""
        if position_ids is not None and position_ids.dim() != 2:
            raise ValueError(f"position_ids must be (1 or batch, seq), got {tuple(position_ids.shape)}")
        cache, pages = caches
        cached = bool(use_cache) or cache is not None
        attention_mask = attention_mask_of(attention_mask)
        documents = documents_of(embeddings, attention_mask, position_ids, options, cached=cached)
        looks_back = any(map(window_of, self.parts))
        self._expect_told_apart(attention_mask, documents, options, looks_back=looks_back)
        if documents is not None and position_ids is None:
            position_ids = positions_in(documents)
        given = {"cache": cache, "use_cache": False if self.training and use_cache is None else use_cache}
        whole = documents is not None or (self.training and self.gradient_checkpointing and torch.is_grad_enabled())
        cache = cache_for(given, (), self.config, whole=whole)
        by_row = isinstance(attention_mask, Tensor) and attention_mask.dim() == 2
        padding = padding_of(embeddings, attention_mask, cache, documents) if by_row or looks_back else None
        mask: Any = create_causal_mask(self.config, embeddings, attention_mask, cache, position_ids)
        tokens = tokens_in(attention_mask)
        positions = self._positions(embeddings, attention_mask if by_row else tokens, cache, position_ids)

        options = {**options, "position_ids": positions}
        attentions: list[Tensor] | None = [] if output_attentions else None
        if attentions is not None:
            options["output_attentions"] = True
        if pages is not None and CACHE != "cache":  # before 5.24, attention functions write to the pages
            options["cache"], pages = pages, None
        context = AttentionContext(
            Rotary.at(positions, self.config, embeddings.dtype),
            mask,
            cache if pages is None else pages,
            embeddings.dtype,
            None if attentions is None else attentions.append,
            options,
        )
        return Call(context, attentions, cache, padding, documents, tokens if padding is None else padding)

    def _expect_told_apart(
        self, mask: Tensor | None, documents: Tensor | None, options: dict[str, Any], *, looks_back: bool
    ) -> None:
        """Raise ValueError if a part of the stream or attention would read across padding, pages or documents."""
        if looks_back:
            expect_no_pages(options)
        if looks_back or documents is not None:
            expect_told_apart(self.parts, mask, documents)
        flash = "flash" in (self.config._attn_implementation or "")
        if flash and documents is not None and len(documents) > 1:
            raise ValueError(
                f"input_ids must be one row for packed documents with flash attention, got {len(documents)}"
            )

    def _positions(self, x: Tensor, mask: Tensor | None, cache: Cache | None, position_ids: Tensor | None) -> Tensor:
        """Return the positions (1 or batch, seq) of these tokens, counted from the first token that is not padding."""
        if position_ids is not None:
            return position_ids
        length = x.shape[1]
        if mask is not None:
            return of_current((mask.long().cumsum(-1) - 1).clamp_min(0), length, cache)
        past = cache.get_seq_length() if cache is not None else 0
        return (torch.arange(length, device=x.device) + past).unsqueeze(0)


def total_penalty(penalties: list[Tensor], padding: Tensor | None) -> Tensor | None:
    """Return the sum of the penalties, or None if there are none. Penalties (batch, seq or 1) are averaged over tokens.

    padding: (batch, seq), boolean, false at padding, which does not count; or None.
    """
    if not penalties:
        return None
    if padding is None:
        return torch.stack([penalty.mean() for penalty in penalties]).sum()
    tokens = padding.to(penalties[0].dtype)
    weights = tokens / tokens.sum().clamp_min(1)
    kept = (torch.where(padding, penalty, 0) if penalty.dim() else penalty for penalty in penalties)
    return torch.stack([(penalty * weights).sum() if penalty.dim() else penalty for penalty in kept]).sum()


def chosen_states(request: bool | int | Iterable[int] | None, count: int) -> set[int]:
    """Return the indices of the hidden states that `output_hidden_states` requests; count: how many there are.

    An index may be negative. An index out of range is ignored, as in transformers.
    """
    if request is None or isinstance(request, bool):
        return set(range(count)) if request else set()
    return {index % count for index in ([request] if isinstance(request, int) else request) if -count <= index < count}


def causal_lm_loss(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Return the mean cross-entropy of next-token prediction, in at least float32; labels of -100 do not count.

    logits: (batch, seq, vocab); shift_labels: (batch, seq), the token after each position. If `num_items_in_batch` is
    given, it divides the sum in place of the number of labels, so that each micro-batch is weighted by its tokens.
    """
    loss = F.cross_entropy(
        at_least_float32(logits).flatten(0, -2),
        shift_labels.to(logits.device).flatten(),
        ignore_index=-100,
        reduction="mean" if num_items_in_batch is None else "sum",
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def scaled_logits(logits: Tensor, config: Any) -> Tensor:
    """Return the logits of the head, times mup_base_width / hidden_size under muP."""
    return logits * (config.mup_base_width / config.hidden_size) if config.mup else logits


class ResiduaForCausalLM(ResiduaPreTrainedModel, GenerationMixin):
    """The trunk with a language-model head, tied to the embedding unless `tie_word_embeddings` is False."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: ResiduaConfig):
        super().__init__(config)
        self.model = ResiduaModel(config)
        self.lm_head = Head(config.hidden_size, config.vocab_size, std=config.embedding_init_std)
        self.post_init()

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Any:
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        # An assistant may have sampled the padding id. After the first token of a row, this id is a normal token.
        return mask.cummax(1).values if generation_config.is_assistant else mask

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        mask = model_kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:  # `generate` sums it for positions, and appends ones
            model_kwargs["attention_mask"] = attention_mask_of(mask).long()
        return super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        cache, _ = cache_of(model_kwargs)
        if cache is not None:  # add our layer first: recording concerns only existing layers
            self.model.make_room(cache)
            if generation_config.is_assistant:
                cache.activate_past_recording()
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (batch, seq, vocab_size), given the trunk's last hidden state (batch, seq, hidden_size)."""
        return scaled_logits(self.lm_head(hidden), self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        output_states: bool = False,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> ResiduaCausalLMOutput:
        """Return logits (batch, seq or logits_to_keep, vocab_size), and the loss if `labels` (shifted here) or
        `shift_labels` (already the next tokens) are given; -100 does not count. In training the loss includes the
        scheme's penalty, if it has one. `ResiduaModel.forward` lists the other outputs.
        """
        # `shift_labels` is not in the signature, because the transformers Trainer evaluates a loss only if its batches
        # hold every argument with "label" in its name.
        shift_labels = kwargs.pop("shift_labels", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            output_states=output_states,
            **kwargs,
        )
        hidden = outputs.last_hidden_state
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.logits(hidden[:, positions])
        loss = None
        if shift_labels is None and labels is not None:
            shift_labels = F.pad(labels[..., 1:], (0, 1), value=-100)
        if shift_labels is not None:
            loss = causal_lm_loss(logits, shift_labels, num_items_in_batch)
            if outputs.penalty is not None:
                # A micro-batch is weighted by its number of tokens, as in the loss.
                share = (
                    1 if num_items_in_batch is None else shift_labels.ne(-100).sum().to(loss.dtype) / num_items_in_batch
                )
                loss = loss + outputs.penalty * share
        return ResiduaCausalLMOutput(
            loss=loss,
            penalty=outputs.penalty,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            states=outputs.states,
            **{CACHE: outputs.get(CACHE)},
        )
