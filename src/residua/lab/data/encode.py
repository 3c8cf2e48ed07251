"""Turn documents into token ids, in this process or in several worker processes.

Every tokenizing process imports this module, so it loads neither torch nor transformers.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np


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

    ids: "np.ndarray"
    lengths: "np.ndarray"
    keys: "np.ndarray"


def text_key(text: bytes) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Encoder:
    """Encode UTF-8 texts with a tokenizer (the JSON of a `tokenizers.Tokenizer`) to arrays of `dtype` ("<u2", "<u4").

    It encodes whole texts: no special tokens, truncation or padding.
    """

    def __init__(self, tokenizer: str, end_of_text: int, dtype: str):
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(tokenizer)
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()
        self._end_of_text, self._dtype = end_of_text, dtype

    def __call__(self, texts: list[bytes]) -> Encoded:
        import numpy as np

        encodings = self._backend.encode_batch_fast([text.decode() for text in texts], add_special_tokens=False)
        lengths = np.fromiter((len(encoding) + 1 for encoding in encodings), np.int64, len(texts))
        end = (self._end_of_text,)
        ids = chain.from_iterable(chain(encoding.ids, end) for encoding in encodings)
        keys = np.fromiter(map(text_key, texts), np.uint64, len(texts))
        return Encoded(np.fromiter(ids, self._dtype, int(lengths.sum())), lengths, keys)


class WorkerLost(RuntimeError):
    """A tokenizing process ended unexpectedly."""


class Encoders:
    """Encode groups of documents in `workers` processes, or in this one if it is 0.

    Processes start on demand, and end with the process that started them, however that ends.
    """

    def __init__(self, tokenizer: str, end_of_text: int, dtype: str, workers: int):
        self._settings = tokenizer, end_of_text, dtype
        self._ahead = 2 * workers + 1
        self._pool = None
        if workers:
            spawn = multiprocessing.get_context("spawn")  # a fork would copy locks that other threads hold
            self._pool = ProcessPoolExecutor(workers, spawn, _start, self._settings)

    def __enter__(self) -> "Encoders":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(self, groups: Iterable[Group]) -> Iterator[tuple[Encoded, Group]]:
        """Encode the groups in order, with few of them in memory at a time. Raises WorkerLost."""
        if self._pool is None:
            encoder = Encoder(*self._settings)
            for group in groups:
                yield encoder(group.texts), group
            return
        waiting: deque[tuple[Future[Encoded], Group]] = deque()
        try:
            for group in groups:
                with _spawning():
                    waiting.append((self._pool.submit(_encode, group.texts), group))
                if len(waiting) > self._ahead:
                    future, first_group = waiting.popleft()
                    yield future.result(), first_group
            while waiting:
                future, first_group = waiting.popleft()
                yield future.result(), first_group
        except BrokenProcessPool as error:
            raise WorkerLost(
                "a tokenizing process ended unexpectedly (out of memory? give fewer workers; a script must call this "
                'under `if __name__ == "__main__":`)'
            ) from error


@contextmanager
def _spawning() -> Iterator[None]:
    """Block Ctrl-C in processes that start inside, so that only this process receives it."""
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if old_mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


_encoder: Encoder
"""The encoder of a tokenizing process."""


def _start(*settings: Any) -> None:
    global _encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already run side by side
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(*settings)


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _encode(texts: list[bytes]) -> Encoded:
    return _encoder(texts)
