"""The sizes of language models that have a name: the two of arXiv 2601.00417, and two for quick runs."""

_SIZED = ("num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings")
SIZES: dict[str, dict[str, int]] = {
    "nano": dict(zip(_SIZED, (4, 32, 1, 32, 256))),
    "tiny": dict(zip(_SIZED, (4, 128, 2, 64, 256))),
    "small": dict(zip(_SIZED, (12, 768, 6, 128, 1024))),
    "medium": dict(zip(_SIZED, (24, 1024, 8, 128, 1024))),
}
