"""Write a corpus into shards, document by document, and continue where a state was saved."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from residua.errors import RunError, extra
from residua.lab.data.corpus import Corpus, Document
from residua.lab.data.encode import Encoders, Group, WorkerLost
from residua.lab.data.progress import text_progress
from residua.lab.data.shards import Shard
from residua.lab.data.split import HashSplit, LeadingSplit, Split
from residua.lab.data.staging import SplitState, Staging, State, damaged
from residua.records.durable import file_sha256, sync

with extra("lab"):
    import numpy as np

ENCODE_TEXT = 1_000_000
"""Bytes of text to tokenize at once."""
SAVE_TEXT = 64_000_000
"""Bytes of text, at least, between two saved states. A smaller text is written in one go."""


class Piece(NamedTuple):
    """The ids of one document, and the length of its text in bytes."""

    ids: np.ndarray
    bytes: int


class Written(NamedTuple):
    """What `write_shards` wrote: the splits, the sha256 of the text, and what is to say of the held-out part."""

    splits: dict[Split, "ShardWriter"]
    sha256: str
    held_out: dict[str, Any]


def write_shards(
    corpus: Corpus,
    tokenizer: tuple[str, int, str],
    staged: Staging,
    hold_out: Callable[[dict[str, Any]], HashSplit[Piece] | LeadingSplit[Piece]],
    shard_tokens: int,
    workers: int,
    progress: bool,
) -> Written:
    """Write the shards of both splits into `staged`, from its saved state on if it has one.

    A state is saved after each shard, but at least SAVE_TEXT bytes of text apart: at places that depend on the text
    alone, so that an interrupted preparation ends with the same bytes as any other. It goes on by reading the text from
    the start and passing over the documents that are on the disk.

    Args:
        tokenizer: the settings of `Encoder`: the tokenizer's JSON, the id of the end of text, the dtype.
        hold_out: makes the split from its saved state, which is empty at the beginning.

    Raises:
        InputError: the text cannot be used, or a shard of the saved state is gone or cut.
        RunError: a worker was lost.
        OSError: writing failed.
    """
    saved = staged.saved or State(documents=0, size=0, text_sha256=[], choice={}, splits={})
    split = hold_out(saved.choice)
    writers = {
        name: ShardWriter(staged.folder, name, np.dtype(tokenizer[-1]), shard_tokens, saved.splits.get(name))
        for name in get_args(Split)
    }
    shards = sum(len(writer.shards) for writer in writers.values())
    documents, size = saved.documents, saved.size
    # A sha256 cannot be saved half-way: the text between two saved states has a hash of its own.
    hashes, text, text_bytes = list(saved.text_sha256), hashlib.sha256(), 0
    groups = _groups(islice(corpus, documents, None))
    with text_progress("tokens", corpus.size, size, progress) as advance, Encoders(*tokenizer, workers) as encoders:
        try:
            for encoded, group in encoders.map(groups):
                start = 0
                for document, length, key in zip(group.texts, encoded.lengths.tolist(), encoded.keys.tolist()):
                    text.update(document + b"\0")
                    text_bytes += len(document)
                    piece = Piece(encoded.ids[start : start + length], len(document))
                    start += length
                    for name, placed in split.add(key, piece, length):
                        writers[name].add(placed)
                for writer in writers.values():
                    writer.write()
                advance(group.size)
                documents += len(group.texts)
                size += group.size
                whole = sum(len(writer.shards) for writer in writers.values())
                if whole > shards and text_bytes >= SAVE_TEXT and split.settled:
                    shards = whole
                    hashes.append(text.hexdigest())
                    text, text_bytes = hashlib.sha256(), 0
                    splits = {name: writer.state() for name, writer in writers.items()}
                    staged.save(State(documents, size, hashes, split.state(), splits))
        except WorkerLost as error:
            raise RunError(f"{staged.out}: {error}") from error
    for name, piece in split.end():
        writers[name].add(piece)
    for writer in writers.values():
        writer.close()
    if text_bytes or not hashes:
        hashes.append(text.hexdigest())
    sha256 = hashes[0] if len(hashes) == 1 else hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()
    return Written(writers, sha256, split.facts())


def _groups(documents: Iterable[Document]) -> Iterator[Group]:
    """Gather documents into groups of about ENCODE_TEXT bytes."""
    texts: list[bytes] = []
    length = size = 0
    for document in documents:
        size += document.size
        texts.append(document.text.encode())
        length += len(texts[-1])
        if length >= ENCODE_TEXT:
            yield Group(texts, size)
            texts, length, size = [], 0, 0
    yield Group(texts, size)


class ShardWriter:
    """Write the shards of `split` into `folder`, each of `shard_tokens` tokens except the last.

    saved: the result of `state()`, to continue there. Raises InputError if a shard of that state is gone or cut.
    """

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, saved: SplitState | None = None):
        saved = saved or SplitState(documents=0, bytes=0, tokens=0, sha256=[])
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.documents, self.bytes, self.tokens = saved.documents, saved.bytes, saved.tokens
        self.shards = [Shard(self._path(n).name, shard_tokens, sha256) for n, sha256 in enumerate(saved.sha256)]
        self._pieces: list[np.ndarray] = []
        for number, start in enumerate(range(0, self.tokens, shard_tokens)):
            path, size = self._path(number), min(shard_tokens, self.tokens - start) * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise damaged(path)
            os.truncate(path, size)  # cuts off what was written after the state was saved

    def add(self, piece: Piece) -> None:
        """Take a document. It reaches the disk with the next `write`."""
        self._pieces.append(piece.ids)
        self.documents += 1
        self.bytes += piece.bytes
        self.tokens += len(piece.ids)

    def write(self) -> None:
        """Append what was added to the shards. Raises OSError."""
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self._pieces = []
        written = self.tokens - len(tokens)
        while len(tokens):
            in_shard = written % self.shard_tokens
            part, tokens = np.split(tokens, [self.shard_tokens - in_shard])
            with self._path(len(self.shards)).open("ab" if in_shard else "wb") as file:
                file.write(part)
            written += len(part)
            if written % self.shard_tokens == 0:
                self._end_shard(self.shard_tokens)

    def close(self) -> None:
        """Write the rest and end the last shard."""
        self.write()
        if rest := self.tokens % self.shard_tokens:
            self._end_shard(rest)

    def state(self) -> SplitState:
        """Bring what was added to the disk, and return what is there."""
        self.write()
        if self.tokens % self.shard_tokens:
            sync(self._path(len(self.shards)))
        return SplitState(self.documents, self.bytes, self.tokens, [shard.sha256 for shard in self.shards])

    def _end_shard(self, tokens: int) -> None:
        path = self._path(len(self.shards))
        sync(path)
        self.shards.append(Shard(path.name, tokens, file_sha256(path)))

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}.bin"
