"""Causal multi-head attention with rotary positions and normalised queries and keys, without a residual."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections import Memory, RMSNorm
from residua.connections.parts.ends import TokenConv
from residua.errors import extra
from residua.models.configuration import ResiduaConfig
from residua.models.linear import linear, start_of
from residua.ops import at_least_float32

with extra("lab"):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class Rotary(NamedTuple):
    """cos and sin of the rotation angles, each (batch, seq, rotated / 2), in at least float32."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def at(cls, positions: Tensor, config: ResiduaConfig, dtype: torch.dtype) -> "Rotary":
        """Return cos and sin of positions * theta^(-2i / rotated) for pair i; positions: (batch, seq), from 0.

        arXiv 2104.09864.
        """
        head_dim: int = config.head_dim  # type: ignore[assignment]  # the configuration has chosen it
        rotated = int(config.rope_ratio * head_dim) // 2 * 2
        dtype = torch.promote_types(dtype, torch.float32)
        pairs = torch.arange(0, rotated, 2, device=positions.device, dtype=dtype)
        angles = positions.unsqueeze(-1).to(dtype) * config.rope_theta ** (-pairs / max(rotated, 1))
        return cls(angles.cos(), angles.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + rotated / 2) of features in x: (batch, heads, seq, head_dim); keep all others."""
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        half = cos.shape[-1]
        first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], -1)
        a, b = at_least_float32(first), at_least_float32(second)
        return torch.cat([(a * cos - b * sin).to(x.dtype), (a * sin + b * cos).to(x.dtype), rest], -1)


PACKED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))
"""The keywords by which packed documents are described to the attention functions in transformers."""

CONTINUOUS = ("read_index", "write_index", "block_table", "logits_indices", "logits_processor_args", "is_causal")
OLDER = ("max_seqlen_q", "max_seqlen_k")  # of continuous batching in transformers 5.17 and 5.18
ENGINES = ("attention_instances", "forward_batch")  # of vLLM and SGLang
PAGED = PACKED.union(CONTINUOUS, OLDER, ENGINES)
"""The keywords by which paged keys and values are passed to the attention functions in transformers and in engines."""


class AttentionContext(NamedTuple):
    """The inputs of attention in addition to x.

    cache: the cache, which is paged in continuous batching, or None; dtype: the dtype in which sublayers compute;
    keep_weights: a callback that receives the attention weights; options: keywords for the attention function of
    transformers, such as positions and the borders of packed documents; memories: by layer, the memory for the
    convolution of keys and values, if any.
    """

    rotary: Rotary
    mask: Tensor | None
    cache: Any
    dtype: torch.dtype
    keep_weights: Callable[[Tensor], None] | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    memories: Mapping[int, Memory | None] = MappingProxyType({})


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, **_: object
) -> tuple[Tensor, Tensor]:
    """Return softmax(q k^T scaling + mask) v and the weights: (batch, heads, seq, dim) -> (batch, seq, heads, dim).

    A boolean mask is true where a query may see a key.
    """
    scores = at_least_float32(query @ key.mT * scaling)
    if mask is not None:
        mask = mask[..., : key.shape[-2]]
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Causal attention without biases: (batch, seq, hidden_size) -> the same shape.

    Queries, keys and values come from one input, or from three if the connection reads three. `qk_norm="post_rope"`
    normalises after the rotation, as the authors of DDL do. If gains differ within a rotated pair, scores then depend
    on absolute positions. "pre_rope" normalises first. With `key_value_kernel` keys and values become k + conv(k) and
    v + conv(v), before their norm and rotation, as in Inkling (`inkling` in transformers).
    """

    is_causal = True

    def __init__(self, config: ResiduaConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        head_dim: int = config.head_dim  # type: ignore[assignment]  # the configuration has chosen it
        self.scaling = head_dim**-0.5
        width = config.num_attention_heads * head_dim
        std = start_of(config, config.hidden_size, width)
        self.q_proj = linear(config.hidden_size, width, std=std)
        self.k_proj = linear(config.hidden_size, width, std=std)
        self.v_proj = linear(config.hidden_size, width, std=std)
        self.o_proj = linear(width, config.hidden_size, std=start_of(config, width, config.hidden_size, writes=True))
        if config.key_value_kernel is not None:
            self.convolution = TokenConv(2 * width, config.key_value_kernel)
        if config.qk_norm is not None:
            self.q_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)
        if config.attention_output_gate:
            self.g_proj = linear(config.hidden_size, width, std=std)
            self.o_norm = RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, for_keys: Tensor | None = None, for_values: Tensor | None = None, *, context: AttentionContext
    ) -> Tensor:
        config = self.config
        heads = (*x.shape[:-1], -1, config.head_dim)  # all heads, or this rank's
        inputs = (x, x if for_keys is None else for_keys, x if for_values is None else for_values)
        q, k, v = (project(part) for project, part in zip((self.q_proj, self.k_proj, self.v_proj), inputs))
        if config.key_value_kernel is not None:
            k, v = self.convolution(torch.cat([k, v], -1), context.memories.get(self.layer_idx)).chunk(2, -1)
        q, k, v = (part.reshape(heads).transpose(1, 2) for part in (q, k, v))
        if config.qk_norm == "pre_rope":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = context.rotary.rotate(q), context.rotary.rotate(k)
        if config.qk_norm == "post_rope":
            q, k = self.q_norm(q), self.k_norm(k)
        options = context.options
        if "write_index" in options:  # since transformers 5.24, `update` of a paged cache changes the options
            options = dict(options)
            k, v = context.cache.update(k, v, self.layer_idx, kwargs=options) if context.cache is not None else (k, v)
        elif context.cache is not None:
            k, v = context.cache.update(k, v, self.layer_idx)

        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager_attention)
        y, weights = attend(self, q, k, v, context.mask, scaling=self.scaling, dropout=0.0, **options)
        if context.keep_weights is not None and weights is not None:
            context.keep_weights(weights)
        if config.attention_output_gate:
            y = self.o_norm(y) * F.silu(self.g_proj(x).view(heads))
        return self.o_proj(y.reshape(*x.shape[:-1], -1))
