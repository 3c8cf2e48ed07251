"""The configuration of a language model: its sizes, and the residual scheme as a mapping with all its options."""

import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from residua.connections import Scheme, describe, resolve
from residua.errors import InputError, check_types, did_you_mean, extra, require, types_of
from residua.model_fields import MOST_LAYERS, ModelFields

with extra("lab"):
    from transformers import PreTrainedConfig

IMPLEMENTATIONS = {
    "attn_implementation": (None, "eager", "sdpa", "flex_attention"),
    "experts_implementation": (None, "eager", "batched_mm", "grouped_mm"),
}
"""The implementations in transformers and torch, by key. For other names, transformers may download and run code."""


def usable(config: Any, source: object) -> Any:
    """Return the content of a configuration file, without an implementation that is not in `IMPLEMENTATIONS`.

    Warn if one was removed; the model then uses the default. Pass another implementation to `from_pretrained`.

    Raises:
        InputError: the configuration has more layers than `MOST_LAYERS`.
    """
    content = _without_downloads(config, source)
    if content != config:
        warnings.warn(
            f"{source}: the attention or the experts that the file names are left out, because code may be downloaded "
            "for them; give attn_implementation= or experts_implementation= to from_pretrained instead",
            stacklevel=3,
        )
    return content


def _without_downloads(config: Any, source: object) -> Any:
    if not isinstance(config, dict):
        return config
    content = {}
    for key, value in config.items():
        if str(key).endswith(("layer", "layers")) and isinstance(value, (int, float)) and value > MOST_LAYERS:
            raise InputError(f"{source}: {key} must be at most {MOST_LAYERS}, got {value}")
        names = value.values() if isinstance(value, dict) else [value]
        known = next((known for name, known in IMPLEMENTATIONS.items() if str(key).lstrip("_").startswith(name)), None)
        if known is None or all(name in known for name in names):
            content[key] = _without_downloads(value, source)
    return content


def causal_scheme(connection: str | Mapping[str, Any] | Scheme) -> Scheme:
    """Resolve a connection. Raises ValueError for a scheme that lets tokens see later tokens and padding."""
    scheme = resolve(connection)
    if not scheme.causal:
        raise ValueError(
            "connection must be a causal scheme, got a scheme whose coefficients depend on the whole sequence, so "
            "that a token would see later tokens and padding; use context='token' or 'cumulative'"
        )
    return scheme


@lru_cache(maxsize=256)
def expect_fit(scheme: Scheme, dim: int, num_layers: int) -> None:
    """Raise ValueError if the scheme does not allow this width or number of layers.

    This builds the scheme on the meta device, which takes milliseconds.
    """
    with torch.device("meta"):
        scheme.build(dim, 2 * num_layers)


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Arguments of every transformers configuration that the base class does not declare."""


class ResiduaConfig(PreTrainedConfig, ModelFields):
    """Configuration of `ResiduaModel` and `ResiduaForCausalLM`: the fields of `residua.model_fields.ModelFields`.

    `connection` may also be a `Scheme`; the configuration stores a mapping with all its options. If `head_dim` or
    `intermediate_size` is None, the configuration stores the derived size. Raises ValueError for a value of the wrong
    type or out of range, TypeError for an unknown argument.
    """

    model_type = "residua"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 50304
    connection: str | dict | Scheme = "ddl"  # type: ignore[assignment]  # a mapping as soon as it is stored

    def __post_init__(self, **kwargs: Any):
        scheme = self._describe_connection()
        ModelFields.__post_init__(self)
        self._expect_vocabulary()
        expect_fit(scheme, self.hidden_size, self.num_hidden_layers)
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        self.intermediate_size = self.intermediate_size or 8 * self.hidden_size // 3
        vars(self)["base_model_tp_plan"] = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)
        if "model_type" not in kwargs:  # a saved configuration may have options of another version of transformers
            for name in kwargs:
                if name in vars(self) and name not in TOKENS and not hasattr(type(self), name):
                    hint = did_you_mean(name, types_of(ModelFields))
                    raise TypeError(f"{type(self).__name__} takes no argument {name!r}{hint}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return a configuration as the base class does, from only the `usable` settings."""
        return super().from_dict(usable(config_dict, "config.json"), **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in types_of(ModelFields) and "base_model_tp_plan" in vars(self):
            scheme = self._describe_connection() if name in ("connection", "num_hidden_layers") else None
            check_types(self, ModelFields)
            self._expect_vocabulary()
            if scheme is not None:
                expect_fit(scheme, self.hidden_size, self.num_hidden_layers)
            vars(self)["base_model_tp_plan"] = self._tensor_parallel_plan()

    def _expect_vocabulary(self) -> None:
        """Raise InputError for a vocabulary of unknown size, which only the configuration of a run may have."""
        require(self.vocab_size is not None, "vocab_size", "a whole number of at least 1", None)

    def _describe_connection(self) -> Scheme:
        """Store the scheme as a mapping with all its options. Return the scheme."""
        scheme = causal_scheme(self.connection)
        vars(self)["connection"] = describe(scheme)
        return scheme

    def _tensor_parallel_plan(self) -> dict[str, str] | None:
        """The tensor-parallel plan of the trunk: attention by heads, the MLP by rows. Every rank has all connections.

        None if keys and values are convolved, because the taps are one tensor for all heads.
        """
        if self.key_value_kernel is not None:
            return None
        gated, normed = self.attention_output_gate, self.qk_norm is not None
        projections, norms = ("qkvg" if gated else "qkv"), ("qk" if normed else "") + ("o" if gated else "")
        return {
            **dict.fromkeys((f"layers.*.attention.{name}_proj" for name in projections), "colwise"),
            **dict.fromkeys((f"layers.*.attention.{name}_norm" for name in norms), "replicated_with_grad_allreduce"),
            "layers.*.attention.o_proj": "rowwise",
            "layers.*.mlp.gate_proj": "colwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }

    @property
    def scheme(self) -> Scheme:
        """The residual scheme as an object."""
        return resolve(self.connection)


_SIZED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")


SIZES: dict[str, dict[str, int]] = {
    "nano": dict(zip(_SIZED, (4, 32, 1, 32, 256))),
    "tiny": dict(zip(_SIZED, (4, 128, 2, 64, 256))),
    "small": dict(zip(_SIZED, (12, 768, 6, 128, 1024))),
    "medium": dict(zip(_SIZED, (24, 1024, 8, 128, 1024))),
}
