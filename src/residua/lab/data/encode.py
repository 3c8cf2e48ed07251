"""Turn documents into token ids on all cores: the package tokenizers encodes the documents of a group in parallel."""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from residua.errors import extra

with extra("lab"):
    import numpy as np
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

AHEAD = 2
"""The number of groups that are encoded while an earlier group is written."""


class Encoded(NamedTuple):
    """A document: its text in UTF-8, the `text_key` of the text, and its ids, with the end-of-text token at the end."""

    text: bytes
    key: int
    ids: np.ndarray
    lost: int = 0
    """The number of bytes of the text that cannot be recovered from the ids."""


def text_key(text: bytes) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def lost_bytes(text: str, decoded: str) -> int:
    """Return how many UTF-8 bytes of a text are missing from `decoded`; at least 1 if the texts differ.

    Whitespace that a tokenizer adds or drops at the ends is ignored.
    """
    if text == decoded:
        return 0
    lost = sum(count * len(character.encode()) for character, count in (Counter(text) - Counter(decoded)).items())
    return lost or int(text.strip() != decoded.strip())


def _unknown_token(backend: Tokenizer) -> int | None:
    """Return the id of the tokenizer's unknown token, if it has one."""
    model = json.loads(backend.to_str())["model"]
    if model.get("unk_token") is None:
        unknown: int | None = model.get("unk_id")
        return unknown
    return backend.token_to_id(model["unk_token"])


class Encoder:
    """Encode UTF-8 texts with a tokenizer to arrays of `dtype` ("<u2", "<u4").

    Texts are encoded whole, without special tokens, truncation or padding. Unless the tokenizer is known to be
    `lossless`, each text is decoded again to count the bytes that were lost.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype, *, lossless: bool = True):
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._end_of_text, self._dtype = tokenizer.eos_token_id, dtype
        self._lossless, self._unknown = lossless, _unknown_token(self._backend)

    def __call__(self, texts: list[bytes]) -> list[Encoded]:
        encodings = self._backend.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        lost = [0] * len(texts) if self._lossless else self._lost(texts, ids)
        return [
            Encoded(text, text_key(text), np.array([*tokens, self._end_of_text], self._dtype), bytes_)
            for text, tokens, bytes_ in zip(texts, ids, lost, strict=True)
        ]

    def _lost(self, texts: list[bytes], ids: list[list[int]]) -> list[int]:
        known = [[token for token in tokens if token != self._unknown] for tokens in ids]
        decoded = self._backend.decode_batch(known, skip_special_tokens=False)
        return [lost_bytes(text.decode(), again) for text, again in zip(texts, decoded, strict=True)]

    def map(self, groups: Iterable[list[bytes]]) -> Iterator[list[Encoded]]:
        """Encode groups of texts in order, with few of them in memory at a time."""
        with ThreadPoolExecutor(AHEAD) as pool:
            waiting = deque()
            for texts in groups:
                waiting.append(pool.submit(self, texts))
                if len(waiting) > AHEAD:
                    yield waiting.popleft().result()
            for encoded in waiting:
                yield encoded.result()
