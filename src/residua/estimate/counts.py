"""Parameters, arithmetic and memory traffic of one token, counted on models without storage."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from residua.models import ResiduaConfig, ResiduaForCausalLM


def on_meta(config: ResiduaConfig) -> ResiduaForCausalLM:
    """Build the model with shapes and no numbers."""
    with torch.device("meta"):
        return ResiduaForCausalLM(config)


def parameters(config: ResiduaConfig) -> dict[str, int]:
    """Count the parameters of the embedding, of the sublayers, and of the scheme with its norms; and their total."""
    parts = {"embedding": 0, "sublayers": 0, "connections": 0}
    for name, parameter in on_meta(config).named_parameters():
        inside = "connections" if ".stream." in name or name == "model.norm.weight" else "sublayers"
        parts["embedding" if "embed_tokens" in name or "lm_head" in name else inside] += parameter.numel()
    return {**parts, "total": sum(parts.values())}


def flops_per_token(config: ResiduaConfig, *, sequence_length: int) -> dict[str, float]:
    """Count the matrix products of one token in a training step, forward and backward, in FLOPs.

    matrices     linear maps of the sublayers and the head, as in the plain residual
    attention    7 T d in each layer for a causal mask that skips what it hides: 2 forward, 5 backward
    connections  what the scheme adds

    PyTorch's counter runs over one sequence on the meta device. Elementwise arithmetic is left out.
    """
    plain, own = (_products(config, name, sequence_length) for name in ("residual", config.connection))
    width = config.num_attention_heads * config.head_dim
    return {
        "matrices": plain,
        "attention": 7.0 * sequence_length * width * config.num_hidden_layers,
        "connections": own - plain,
    }


def _products(config: ResiduaConfig, connection: object, length: int) -> float:
    """FLOPs per token of all matrix products but the two of attention."""
    # Eager attention multiplies what the causal mask hides too, on every device: 4 T d forward, 8 T d backward.
    model = on_meta(ResiduaConfig(**{**config.to_dict(), "connection": connection, "attn_implementation": "eager"}))
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.train()(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
    seen = 12 * length * config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return counter.get_total_flops() / length - seen


def bytes_per_token(config: ResiduaConfig, *, state_bytes: int, fused: bool = True) -> dict[str, float]:
    """Model the memory traffic of one token in a training step, forward and backward, besides the matrix products.

    connections  `Scheme.traffic` of every boundary between sublayers, for a state of `state_bytes` per number
    sublayers    20 bytes per feature and layer to rotate and normalise queries and keys, 16 per feature of the SwiGLU
    logits       8 bytes each

    fused: whether one kernel does all that lies between two sublayers, or one writes and another reads and normalises.
    """
    boundaries = range(1, 2 * config.num_hidden_layers + 1)
    moved = (sum(config.scheme.traffic(i, state_bytes=state_bytes, fused=fused)) for i in boundaries)
    width = config.num_attention_heads * config.head_dim
    return {
        "connections": sum(moved) * config.hidden_size,
        "sublayers": (20 * width + 16 * config.intermediate_size) * config.num_hidden_layers,
        "logits": 8.0 * config.vocab_size,
    }
