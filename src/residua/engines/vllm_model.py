"""Run a converted model in vLLM: the transformers model with vLLM's attention, linear maps and sampling.

Connections stay unchanged, in float32 and in PyTorch: vLLM replaces only the modules around them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.transformers import TransformersForCausalLM
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from residua.connections.parts.memory import window_of
from residua.conversion.configuration import conversion_of
from residua.conversion.flow import MEMORY, STREAM, Reader
from residua.conversion.memory import detach
from residua.conversion.rebuild import stack_in, streams_of
from residua.engines.vllm import FilterMemory, make_filters, window_in


class ConvertedForCausalLM(TransformersForCausalLM):
    """A converted language model."""

    supports_pp = False  # a pipeline stage can only pass on one tensor of hidden states
    supports_eagle3 = False  # EAGLE-3 reads hidden states between layers

    def recursive_replace(self) -> None:
        """Replace the modules of the transformers model by vLLM's, except the connections and their norms."""
        with connections_removed(self.model):
            super().recursive_replace()


class LookingBackForCausalLM(ConvertedForCausalLM):
    """A converted language model whose connections read earlier tokens. vLLM keeps their states for each request."""

    is_hybrid = has_inner_state = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        conversion = conversion_of(self.model)
        parts = [part for stream in streams_of(self.model, conversion) for part in stream.parts]
        make_filters(parts)
        self.memories = {
            part: PartStates(f"{prefix}stream.{i}", vllm_config) if window_of(part) else None
            for i, part in enumerate(parts)
        }
        detach(self.model, stack_in(self.model, conversion))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs, **{MEMORY: self.memories})

    @property
    def _from_config_kwargs(self) -> dict[str, Any]:
        """Return the arguments from which transformers builds its model, with the layer types that `Check` removed."""
        options = super()._from_config_kwargs
        config = copy(options["config"])
        if getattr(config, "layer_types", ()) is None:
            config.layer_types = ["full_attention"] * config.num_hidden_layers
        return {**options, "config": config}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        """Return the shape of a page: the state of the filter that reads the most tokens, for one request."""
        config = vllm_config.model_config.hf_config
        return ((window_in(config) * config.hidden_size,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.float32,)


class PartStates(FilterMemory, MambaBase):
    """The memory of one part of a stream. vLLM keeps its states, one page for each request.

    name: its unique name in vLLM, which must contain exactly one number.
    """

    mamba_type = MambaAttentionBackendEnum.SHORT_CONV
    is_kv_cache_tp_replicated = True

    def __init__(self, name: str, vllm_config: VllmConfig):
        self.name = name
        self.shape = LookingBackForCausalLM.get_mamba_state_shape_from_config(vllm_config)
        vllm_config.compilation_config.static_forward_context[name] = self

    def get_state_shape(self) -> tuple[tuple[int, ...], ...]:
        return self.shape

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.float32,)

    def batch(self) -> Any:
        """As in the base class; None also while vLLM profiles its memory use."""
        return (get_forward_context().attn_metadata or {}).get(self.name)


@contextmanager
def connections_removed(model: nn.Module) -> Iterator[None]:
    """Take the connections and their norms out of a model while the `with` block runs; then put them back."""
    parts = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if name == STREAM or (isinstance(child, Reader) and child.residua_is_norm)
    ]
    for parent, name, _ in parts:
        delattr(parent, name)
    try:
        yield
    finally:
        for parent, name, child in parts:
            parent.add_module(name, child)
