"""The loss of a model on another text than its own: prepared with its tokenizer, or as it is."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from residua.errors import InputError, extra
from residua.lab.data.batches import HeldOutBatches
from residua.lab.data.encode import Encoder
from residua.lab.data.shards import DTYPES, PreparedData, Tokens
from residua.lab.data.sources import open_corpus
from residua.lab.evaluation.loss import held_out_loss

with extra("lab"):
    import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


class Text(NamedTuple):
    """Tokens to predict: a name, the bytes of their text (None if the tokens lose some), the digest of data or text."""

    name: str
    tokens: Tokens
    bytes: int | None
    digest: str


class TokensInMemory(Tokens):
    """The token ids of a text that is not on the disk as tokens."""

    def __init__(self, ids: "np.ndarray"):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> "np.ndarray":
        return self.ids[start : start + length].astype(np.int64)


def open_text(place: Path, tokenizer: "PreTrainedTokenizerFast", folder: Path) -> Text:
    """Return the held-out part of prepared data, or the whole of a file or folder of text in a model's own tokens.

    folder: that of the tokenizer, for errors.

    Raises InputError if the data are tokens of another tokenizer, or there is no such text.
    """
    if not (place / "index.json").is_file():
        corpus = open_corpus(place)
        encoder = Encoder(tokenizer, DTYPES["uint32"], lossless=False)
        documents = [document for group in encoder.map([text.text.encode()] for text in corpus) for document in group]
        if not documents:
            raise InputError(f"{place} must hold documents, found nothing or white space")
        lost = sum(document.lost for document in documents)
        length = None if lost else sum(len(document.text) for document in documents)
        digest = hashlib.sha256(b"".join(document.text + b"\0" for document in documents)).hexdigest()
        return Text(f"all of {place}", TokensInMemory(np.concatenate([x.ids for x in documents])), length, digest)
    data = PreparedData.open(place)
    theirs = data.tokenizer()
    same = theirs.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    if not same or theirs.eos_token_id != tokenizer.eos_token_id:
        raise InputError(
            f"--data must be tokens of the tokenizer in {folder}, got those of another in {place}; prepare its text "
            f"with: residua prepare --tokenizer {folder}; or give the text itself"
        )
    length = None if data.facts.get("lost_share") else data.validation_bytes
    return Text(f"the held-out part of {place}", data.validation, length, data.fingerprint)


def text_loss(
    model: "PreTrainedModel", text: Text, *, window: int, batch_size: int, end_of_text: int | None = None
) -> Mapping[str, Any]:
    """Return the `held_out_loss` of a model on a text in windows of so many tokens."""
    batches = HeldOutBatches(text.tokens, batch_size, window)
    return held_out_loss(model, batches, bytes=text.bytes, end_of_text=end_of_text)
