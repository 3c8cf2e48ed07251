"""The fields of our language model's configuration, without PyTorch, so that the command line can read them quickly."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from residua.errors import Count, NotNegative, Positive, Share, at_most, check_types, require

# These limits exceed the memory of any machine, but are so small that products of sizes do not overflow.
MOST_LAYERS, MOST_ROWS = 2**14, 2**28
BoundedCount = Annotated[Count, at_most(MOST_ROWS)]


def setting(default: Any, explanation: str) -> Any:
    """Return a field of a dataclass with a default, and the explanation that `--help` shows."""
    return field(default=default, metadata={"help": explanation})


@dataclass(repr=False)
class ModelFields:
    """The sizes and options of a language model. Raises InputError for a value of the wrong type or out of range."""

    vocab_size: BoundedCount | None = setting(None, "rows of the embedding; null for the tokenizer's, rounded up")
    hidden_size: BoundedCount = setting(768, "width d")
    num_hidden_layers: Annotated[Count, at_most(MOST_LAYERS)] = setting(
        12, "blocks of attention and MLP, two sublayers each"
    )
    num_attention_heads: BoundedCount = setting(6, "heads")
    head_dim: int | None = setting(None, "width of a head; null for hidden_size / num_attention_heads")
    intermediate_size: BoundedCount | None = setting(None, "width of the SwiGLU; null for floor(8 hidden_size / 3)")
    max_position_embeddings: BoundedCount = setting(1024, "longest sequence the model is meant for")
    connection: str | dict = setting(
        "ddl",
        "the residual scheme: a preset's name (`residua schemes` lists them, and the paper's names beside them), or "
        '{"preset": name, **options}',
    )
    state_dtype: Literal["float32", "bfloat16"] | None = setting(
        None, "dtype of the residual state; null for the embeddings', which is float32 under autocast"
    )
    qk_norm: Literal["post_rope", "pre_rope"] | None = setting(
        "post_rope", "norm of queries and keys: post_rope (the authors' order), pre_rope, or null for none"
    )
    rope_theta: Positive = setting(10000.0, "base of the rotary frequencies")
    rope_ratio: Share = setting(1.0, "fraction of each head that is rotated")
    attention_output_gate: bool = setting(
        False, "heads are normalised and gated by SiLU(W_g x) before the output projection"
    )
    key_value_kernel: Annotated[Count, at_most(1024)] | None = setting(
        None, "taps of a causal convolution that is added to keys and values and starts at 0; null for none"
    )
    rms_norm_eps: Positive = setting(1e-5, "epsilon of every norm")
    embedding_init_std: NotNegative = setting(0.02, "standard deviation of the embedding at the start")
    hidden_init_std_factor: NotNegative = setting(
        0.5,
        "projections start with standard deviation factor / sqrt(hidden_size), projections that write into the "
        "residual with another 1 / sqrt(num_hidden_layers)",
    )
    output_init: Literal["sqrt_depth", "depth"] = setting(
        "sqrt_depth",
        "sqrt_depth: as above; depth: as the current code of the authors of DDL, factor / sqrt(n_in) * "
        "min(1, sqrt(n_out / n_in)), divided by num_hidden_layers for projections that write into the residual",
    )
    tie_word_embeddings: bool = setting(True, "the head's weights are the embedding's")
    mup: bool = setting(False, "scale logits by mup_base_width / hidden_size, and learning rates by the rules of muP")
    mup_base_width: Count = setting(1024, "the width at which muP changes nothing")
    use_cache: bool = setting(True, "keep keys and values while generating")

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self, ModelFields)
        width, heads, head_dim = self.hidden_size, self.num_attention_heads, self.head_dim
        if head_dim is None:
            expected = f"a divisor of hidden_size ({width}) unless head_dim is given"
            require(width % heads == 0, "num_attention_heads", expected, heads)
            head_dim = width // heads
        require(2 <= head_dim <= MOST_ROWS and head_dim % 2 == 0, "head_dim", "an even number", head_dim)
