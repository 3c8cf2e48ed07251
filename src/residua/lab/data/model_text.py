"""Read a text in the tokens of a model: data prepared with its tokenizer, or plain text."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from residua.errors import InputError, extra, require
from residua.lab.data.corpus import Corpus, hashed
from residua.lab.data.encode import Encoder
from residua.lab.data.shards import TOKEN_DTYPES, PreparedData, Tokens
from residua.lab.data.sources import open_corpus
from residua.lab.data.split import share_of
from residua.lab.data.tokenizer import expect_documents, same_tokens

with extra("lab"):
    import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


CUTS = ("split", "validation_fraction", "longest_document")
"""The facts that determine how a text was cut into documents; the digest depends on the cuts."""


class Text(NamedTuple):
    """Tokens to predict.

    bytes   the length of the text in UTF-8; None if the tokens lose part of it
    own     whether this is the text of the model's training data; None if unknown
    """

    name: str
    tokens: Tokens
    bytes: int | None
    own: bool | None


class TokensInMemory(Tokens):
    """The token ids of a plain text, in memory."""

    def __init__(self, ids: "np.ndarray"):
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> "np.ndarray":
        return self.ids[start : start + length].astype(np.int64)


def open_text(
    place: Path,
    tokenizer: "PreTrainedTokenizerFast",
    folder: Path,
    *,
    text_column: str = "text",
    trained_on: Mapping[str, Any] = MappingProxyType({}),
) -> Text:
    """Return the held-out part of prepared data, or a whole file or folder of text, in a model's tokens.

    Args:
        folder: the folder of the tokenizer, for errors.
        text_column: the key of the text in rows, if the text is not prepared.
        trained_on: the facts of the model's training data. Long documents are cut as they were in those data.

    Raises:
        InputError: the data were prepared with another tokenizer, or there is no text at `place`.
    """
    expect_documents(tokenizer, folder)
    if (place / "index.json").is_file():
        require(text_column == "text", "--text-column", f"left out, as {place} is prepared", text_column)
        return _held_out(place, tokenizer, folder, trained_on)
    corpus = open_corpus(place, text_column=text_column, longest_document=trained_on.get("longest_document"))
    encoder = Encoder(tokenizer, TOKEN_DTYPES["uint32"], lossless=False)
    documents = [x for group in encoder.map([document.text.encode()] for document in corpus) for x in group]
    if not documents:
        raise InputError(f"{place} must hold documents, found nothing or white space")
    size = sum(len(document.text) for document in documents)
    tokens = TokensInMemory(np.concatenate([document.ids for document in documents]))
    own = size == trained_on.get("bytes") and _sha256(corpus, trained_on) == trained_on.get("sha256")
    return Text(f"all of {place}", tokens, None if any(document.lost for document in documents) else size, own)


def _sha256(corpus: Corpus, facts: Mapping[str, Any]) -> str:
    """Return the digest of a text, cut into documents as the data with these facts were."""
    share, fraction = None, facts.get("validation_fraction")
    if facts.get("split") == "share" and fraction is not None:
        share = share_of(lambda: iter(corpus), fraction, always=True)
    digest = sha256()
    for _ in hashed(corpus if share is None else share.documents(corpus), digest):
        pass
    return digest.hexdigest()


def _held_out(place: Path, tokenizer: "PreTrainedTokenizerFast", folder: Path, trained_on: Mapping[str, Any]) -> Text:
    data = PreparedData.open(place)
    theirs = data.tokenizer()
    if not same_tokens(theirs, tokenizer):
        raise InputError(
            f"--data must be tokens of the tokenizer in {folder}, got tokens of another in {place}; prepare its text "
            f"with: residua prepare --tokenizer {folder}; or give the text itself"
        )
    length = None if data.facts.get("lost_share") else data.validation_bytes
    own: bool | None = data.facts.get("sha256") == trained_on.get("sha256", "")
    if (
        not own
        and data.facts["bytes"] == trained_on.get("bytes")
        and any(data.facts.get(name) != trained_on.get(name) for name in CUTS)
    ):
        own = None
    return Text(f"the held-out part of {place}", data.validation, length, own)
