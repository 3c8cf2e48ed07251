"""Turn documents into token ids, on every core: tokenizers encodes the documents of a group side by side."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from residua.errors import extra

with extra("lab"):
    import numpy as np
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

AHEAD = 2
"""Groups that are encoded while an earlier one is written."""


class Encoded(NamedTuple):
    """A document: its text in UTF-8, the `text_key` of that, and its ids, followed by the end of text."""

    text: bytes
    key: int
    ids: np.ndarray


def text_key(text: bytes) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Encoder:
    """Encode UTF-8 texts with a tokenizer to arrays of `dtype` ("<u2", "<u4").

    It encodes whole texts: no special tokens, truncation or padding.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dtype: np.dtype):
        self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._end_of_text, self._dtype = tokenizer.eos_token_id, dtype

    def __call__(self, texts: list[bytes]) -> list[Encoded]:
        encodings = self._backend.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        return [
            Encoded(text, text_key(text), np.array([*encoding.ids, self._end_of_text], self._dtype))
            for text, encoding in zip(texts, encodings, strict=True)
        ]

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
