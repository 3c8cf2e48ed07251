"""The configuration of a language model: its sizes, and the residual scheme as a mapping with all its options."""

import warnings
from dataclasses import fields
from math import inf
from typing import Any

from residua.connections import Scheme, describe, resolve
from residua.errors import extra, fits, require
from residua.models.memory import states_per_layer

with extra("lab"):
    from transformers import PreTrainedConfig
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

# Far beyond what any machine holds, and small enough that sizes multiply without overflow.
MOST_LAYERS, MOST_ROWS = 2**14, 2**28

ATTENTION = ("eager", "sdpa", "flex_attention")
"""Implementations of attention that are part of transformers and torch."""
FLASH_ATTENTION = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
"""Implementations of optional packages, and whether these are installed."""


def usable(config: Any, source: object) -> Any:
    """Return the content of a configuration file without flash attention if that is not installed.

    The model then runs with the default attention and a warning. For any other attention not in `ATTENTION`
    transformers may download a kernel and run it. Pass such a one to `from_pretrained`. Layers are built until there is
    no memory.

    Raises:
        ValueError: the file names such an attention, or more than `MOST_LAYERS` layers.
    """
    content = _usable(config, source)
    if content != config:
        warnings.warn(
            f"{source}: flash attention is not installed; the model runs with the attention that transformers chooses",
            stacklevel=3,
        )
    return content


def _usable(config: Any, source: object) -> Any:
    if not isinstance(config, dict):
        return config
    content = {}
    for key, value in config.items():
        if key.lstrip("_").startswith("attn_implementation"):
            names = [name for name in (value.values() if isinstance(value, dict) else [value]) if name is not None]
            for name in names:
                if name not in ATTENTION and name not in FLASH_ATTENTION:
                    raise ValueError(
                        f"{source} must have {key} {', '.join(ATTENTION)} or none, got {name!r}, for which code may be "
                        "downloaded; remove it from the file, and give attn_implementation= to from_pretrained instead"
                    )
            if all(name in ATTENTION or FLASH_ATTENTION[name]() for name in names):
                content[key] = value
        elif key.endswith(("layer", "layers")) and fits(value, int):
            require(value <= MOST_LAYERS, f"{source}: {key}", f"at most {MOST_LAYERS}", value)
            content[key] = value
        else:
            content[key] = _usable(value, source)
    return content


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Arguments of every configuration of transformers, which its base class does not declare."""


class ResiduaConfig(PreTrainedConfig):
    """Configuration of `ResiduaModel` and `ResiduaForCausalLM`.

    vocab_size               rows of the embedding
    hidden_size              width d
    num_hidden_layers        blocks of attention and MLP, two sublayers each
    num_attention_heads      heads
    head_dim                 width of a head; None for hidden_size / num_attention_heads
    intermediate_size        width of the SwiGLU; None for floor(8 hidden_size / 3)
    max_position_embeddings  longest sequence the model is meant for
    connection               the residual scheme: a preset's name, or {"preset": name, **options}, or a `Scheme`; the
                             configuration stores a mapping with all its options
    state_dtype              dtype of the residual state, "float32" or "bfloat16"; None for the embeddings', which
                             is float32 under autocast
    qk_norm                  norm of queries and keys: "post_rope" (the authors' order), "pre_rope", or None for none
    rope_theta               base of the rotary frequencies
    rope_ratio               fraction of each head that is rotated
    attention_output_gate    heads are normalised and gated by SiLU(W_g x) before the output projection
    rms_norm_eps             epsilon of every norm
    embedding_init_std       standard deviation of the embedding at the start
    hidden_init_std_factor   projections start with standard deviation factor / sqrt(hidden_size), projections that
                             write into the residual with another 1 / sqrt(num_hidden_layers)
    tie_word_embeddings      the head's weights are the embedding's
    mup                      scale logits by mup_base_width / hidden_size, and learning rates by the rules of muP
    mup_base_width           the width at which muP changes nothing
    use_cache                keep keys and values while generating

    Raises ValueError for a value of the wrong type or out of range, TypeError for an argument that nothing takes.
    """

    model_type = "residua"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    vocab_size: int = 50304
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int = 1024
    connection: str | dict | Scheme = "ddl"
    state_dtype: str | None = None
    qk_norm: str | None = "post_rope"
    rope_theta: float = 10000.0
    rope_ratio: float = 1.0
    attention_output_gate: bool = False
    rms_norm_eps: float = 1e-5
    embedding_init_std: float = 0.02
    hidden_init_std_factor: float = 0.5
    tie_word_embeddings: bool = True
    mup: bool = False
    mup_base_width: int = 1024
    use_cache: bool = True

    def __post_init__(self, **kwargs: Any):
        self._check_layers()
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            self._check_size(name, MOST_ROWS)
        if self.head_dim is None:
            self._require(
                "num_attention_heads",
                self.hidden_size % self.num_attention_heads == 0,
                f"a divisor of hidden_size ({self.hidden_size}), or head_dim given",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        even = fits(self.head_dim, int) and 2 <= self.head_dim <= MOST_ROWS and self.head_dim % 2 == 0
        self._require("head_dim", even, "an even number")
        if self.intermediate_size is None:
            self.intermediate_size = 8 * self.hidden_size // 3
        width = self.intermediate_size
        self._require("intermediate_size", fits(width, int) and width >= 1, "at least 1")
        self._require("intermediate_size", width <= 3 * MOST_ROWS, f"at most {3 * MOST_ROWS}")
        self._require("qk_norm", self.qk_norm in ("post_rope", "pre_rope", None), "'post_rope', 'pre_rope' or None")
        self._require("state_dtype", self.state_dtype in ("float32", "bfloat16", None), "'float32', 'bfloat16' or None")
        for name in ("rope_theta", "rms_norm_eps", "mup_base_width"):
            self._require(name, fits(getattr(self, name), float) and 0 < getattr(self, name) < inf, "a positive number")
        for name in ("embedding_init_std", "hidden_init_std_factor"):
            value = getattr(self, name)
            self._require(name, fits(value, float) and 0 <= value < inf, "a number of at least 0")
        self._require("rope_ratio", fits(self.rope_ratio, float) and 0 <= self.rope_ratio <= 1, "a number in [0, 1]")

        for name in ("attention_output_gate", "tie_word_embeddings", "mup", "use_cache"):
            self._require(name, fits(getattr(self, name), bool), "true or false")

        for derived in ("layer_types", "number_of_conv_states"):  # a saved configuration's, perhaps of another scheme
            kwargs.pop(derived, None)
        self._spell_out()
        vars(self)["base_model_tp_plan"] = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)
        if "model_type" not in kwargs:  # a saved configuration may name what another version of transformers takes
            for name in kwargs:
                if name in vars(self) and name not in TOKENS and not hasattr(type(self), name):
                    raise TypeError(f"{type(self).__name__} takes no argument {name!r}")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class does. Raises ValueError, and warns, as `usable` does."""
        return super().from_dict(usable(config_dict, "config.json"), **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in ("connection", "num_hidden_layers") and "layer_types" in vars(self):
            self._check_layers()
            self._spell_out()

    def _spell_out(self) -> None:
        """Store the scheme with all its options, and the number of cache states that it needs for earlier tokens."""
        scheme, layers = resolve(self.connection), self.num_hidden_layers
        if not scheme.causal:
            raise ValueError(
                "connection must be a causal scheme, got one whose coefficients depend on the whole sequence, so "
                "that every token would see later ones; use context='token' or 'cumulative'"
            )
        vars(self)["connection"] = describe(scheme)
        # Besides keys and values, the cache then holds this many convolution states in every layer.
        states = states_per_layer(scheme, self.hidden_size, layers)
        vars(self)["layer_types"] = ["hybrid" if states else "full_attention"] * layers
        vars(self)["number_of_conv_states"] = states

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """Return how to cut the trunk: into heads and rows of the MLP. Every rank has all connections."""
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

    def _check_layers(self) -> None:
        self._check_size("num_hidden_layers", MOST_LAYERS)

    def _check_size(self, name: str, most: int) -> None:
        size = getattr(self, name)
        self._require(name, fits(size, int) and size >= 1, "a whole number of at least 1")
        self._require(name, size <= most, f"at most {most}")

    def _require(self, name: str, condition: bool, expected: str) -> None:
        require(condition, name, expected, getattr(self, name))


MODEL_FIELDS: tuple[tuple[str, Any, Any], ...] = tuple(
    (field.name, ResiduaConfig.__annotations__[field.name], field.default)
    for field in fields(ResiduaConfig)
    if field.name in ResiduaConfig.__annotations__
)
"""(name, type, default) of every field that ResiduaConfig declares itself."""
