"""Turn documents into token ids, on every core: tokenizers encodes the documents of a group side by side."""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import NamedTuple

from residua.errors import extra

with extra("lab"):
    import numpy as np
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

AHEAD = 2
"""Groups that are encoded while an earlier one is written."""


class Group(NamedTuple):
    """Documents that are tokenized together."""

    texts: list[bytes]
    """UTF-8."""
    size: int
    """The part of `Corpus.size` that these texts complete."""


class Encoded(NamedTuple):
    """The ids of a group of documents, concatenated, each document followed by the end of text.

    `lengths` (int64) are the tokens of each document with its end of text, `keys` (uint64) their `text_key`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray


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

    def __call__(self, texts: list[bytes]) -> Encoded:
        encodings = self._backend.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        lengths = np.fromiter((len(encoding) + 1 for encoding in encodings), np.int64, len(texts))
        end = (self._end_of_text,)
        ids = chain.from_iterable(chain(encoding.ids, end) for encoding in encodings)
        keys = np.fromiter(map(text_key, texts), np.uint64, len(texts))
        return Encoded(np.fromiter(ids, self._dtype, int(lengths.sum())), lengths, keys)

    def map(self, groups: Iterable[Group]) -> Iterator[tuple[Encoded, Group]]:
        """Encode the groups in order, with few of them in memory at a time."""
        with ThreadPoolExecutor(AHEAD) as pool:
            waiting = deque()
            for group in groups:
                waiting.append((pool.submit(self, group.texts), group))
                if len(waiting) > AHEAD:
                    encoded, first_group = waiting.popleft()
                    yield encoded.result(), first_group
            for encoded, group in waiting:
                yield encoded.result(), group
