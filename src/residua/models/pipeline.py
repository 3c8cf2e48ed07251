"""Stages of a language model for pipeline parallelism: some layers each, each in its own process.

    stage 0: token ids -> embedding -> expand -> layers 0, 1 -> state
    stage 1: state -> layers 2, 3 -> collapse -> norm -> head -> logits

A stage sends the state of the scheme, flattened: the tensors that `Scheme.state_spec` describes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_structure, tree_unflatten

from residua.connections import Carry, Connection, Memory, Readout, StreamMemory
from residua.connections.base import State, as_inputs
from residua.connections.memory import memory_of
from residua.errors import extra, require
from residua.models.attention import AttentionContext, Rotary
from residua.models.transformer import Reader, Readers, ResiduaForCausalLM, scaled_logits

with extra("lab"):
    from transformers.cache_utils import DynamicCache
    from transformers.masking_utils import create_causal_mask


class StageCache:
    """The cache of one stage for earlier tokens: keys and values of its layers, and the memory of its stream.

    Pass the same object with every piece of a sequence.
    """

    def __init__(self, first_layer: int):
        self.first_layer = first_layer
        self.attention = DynamicCache()
        self.stream = StreamMemory()

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return int(self.attention.get_seq_length())

    def update(self, keys: Tensor, values: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        """Add keys and values: (batch, heads, seq, head_dim) of a layer, by its index in the whole model."""
        return self.attention.update(keys, values, layer_idx - self.first_layer)


class _Border:
    """The end of a stage in place of a following connection: it passes the state on and reads nothing."""

    def read(self, state: State, memory: Memory | None = None) -> tuple[State, Carry]:
        return state, Carry(state, None)


class Stage(nn.Module):
    """Stage `index` of `count` of a model, whose modules it takes over under the same names.

    Its parameters have the names of the whole model's, so that checkpoints fit. To build only one stage, make the model
    under `torch.device("meta")`, then call `to_empty` and load or initialise the stage's parameters. Whole sequences
    without padding only.

    Raises:
        ValueError: fewer layers than stages; tied embeddings, whose weight would be in the first and the last stage.
    """

    def __init__(self, model: ResiduaForCausalLM, index: int, count: int):
        super().__init__()
        config: Any = model.config
        depth = config.num_hidden_layers
        require(1 <= count <= depth, "count", f"1 to {depth} stages, as there are layers", count)
        require(0 <= index < count, "index", f"0 to {count - 1}", index)
        tied = config.tie_word_embeddings and count > 1
        require(not tied, "tie_word_embeddings", "false for a model that is cut into stages", tied)
        self.config = config
        self.first, self.last = index * depth // count, (index + 1) * depth // count
        self.begins, self.ends = index == 0, index == count - 1
        self.structure = tree_structure(config.scheme.state_spec(2 * self.first, config.hidden_size))

        trunk, inside = model.model, range(self.first, self.last)
        self.model, self.model.stream = nn.Module(), nn.Module()
        self.model.layers = nn.ModuleDict({str(i): trunk.layers[i] for i in inside})
        self.model.stream.connections = nn.ModuleDict(
            {str(j): trunk.stream.connections[j] for i in inside for j in (2 * i, 2 * i + 1)}
        )
        if self.begins:
            self.model.embed_tokens = trunk.embed_tokens
            self.model.stream.expand = trunk.stream.expand
        if self.ends:
            self.model.stream.collapse = trunk.stream.collapse
            self.model.norm = trunk.norm
            self.lm_head = model.lm_head

    def cache(self) -> StageCache:
        """Return an empty cache of this stage, for one batch of sequences that arrive in pieces."""
        return StageCache(self.first)

    def forward(self, *payload: Tensor, cache: StageCache | None = None) -> Any:
        """Map token ids (batch, seq) or the tensors of the stage before to the tensors of the next, or to the logits.

        Raises ValueError for a scheme with a penalty, in training: the loss of the last stage would lack it.
        """
        trunk: Any = self.model
        layers: list[Any] = list(trunk.layers.values())
        dtype = layers[0].mlp.down_proj.weight.dtype
        memory = None if cache is None else cache.stream
        if self.begins:
            embeddings = trunk.embed_tokens(*payload)
            state_dtype = getattr(torch, self.config.state_dtype) if self.config.state_dtype else embeddings.dtype
            expand = trunk.stream.expand
            state, dtype = expand(embeddings.to(state_dtype), memory_of(expand, memory, None, None)), embeddings.dtype
        else:
            state = tree_unflatten(list(payload), self.structure)

        connections: list[Connection] = list(trunk.stream.connections.values())
        readers = [Reader(connection, memory_of(connection, memory, None, None)) for connection in connections]
        if self.ends:
            collapse = trunk.stream.collapse
            readers.append(Reader(Readout(collapse), memory_of(collapse, memory, None, None)))
        else:
            readers.append(Reader(_Border(), None))
        x, carry = readers[0].connection.read(state, readers[0].memory)
        context = self._context(as_inputs(x)[0].to(dtype), cache)
        for i, layer in enumerate(layers):
            x, carry, penalties, _ = layer(x, carry, Readers(*readers[2 * i : 2 * i + 3]), context)
            if penalties:
                raise ValueError("connection must be a scheme without a penalty in a pipeline; set penalty to 0")
        if not self.ends:
            return tuple(leaf.contiguous() for leaf in tree_leaves(x))
        return scaled_logits(self.lm_head(trunk.norm(x.to(dtype))), self.config)

    def _context(self, x: Tensor, cache: StageCache | None) -> AttentionContext:
        """Return the inputs of attention besides x: (batch, seq, dim)."""
        past = 0 if cache is None else cache.length
        positions = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        mask = create_causal_mask(self.config, x, None, None if cache is None else cache.attention)
        rotary = Rotary.at(positions, self.config, x.dtype)
        memories = {}
        if cache is not None and self.config.key_value_kernel is not None:
            layers: Any = self.model.layers
            memories = {int(i): cache.stream.of(layer.attention.convolution) for i, layer in layers.items()}
        return AttentionContext(rotary, mask, cache, x.dtype, None, {"position_ids": positions}, memories)
