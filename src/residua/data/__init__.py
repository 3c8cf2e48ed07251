"""Text to tokens on disk (`prepare`), and tokens to batches (`Batches`, `HeldOutBatches`).

Names load on first use, so that a process that only tokenizes imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from residua.data.batches import Batches, HeldOutBatches
    from residua.data.preparation import prepare
    from residua.data.shards import PreparedData, Tokens
    from residua.data.sources import open_corpus
    from residua.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe

__all__ = [
    "Batches",
    "HeldOutBatches",
    "PreparedData",
    "Tokens",
    "byte_tokenizer",
    "load_tokenizer",
    "open_corpus",
    "prepare",
    "train_bpe",
]

_MODULES = {
    "batches": ("Batches", "HeldOutBatches"),
    "preparation": ("prepare",),
    "shards": ("PreparedData", "Tokens"),
    "sources": ("open_corpus",),
    "tokenizer": ("byte_tokenizer", "load_tokenizer", "train_bpe"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
