"""Text to tokens on disk (`prepare`), and tokens to batches (`Batches`, `HeldOutBatches`)."""

from typing import TYPE_CHECKING

from residua import lazy

if TYPE_CHECKING:
    from residua.lab.data.batches import Batches, HeldOutBatches
    from residua.lab.data.preparation import prepare
    from residua.lab.data.shards import PreparedData, Tokens
    from residua.lab.data.sources import open_corpus
    from residua.lab.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe

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

__getattr__, __dir__ = lazy.attributes(__name__, __all__, ["sources", "tokenizer", "shards", "preparation", "batches"])
