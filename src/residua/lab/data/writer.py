"""Write a corpus into shards, document by document, continuing from a saved state."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple, get_args

from residua.errors import extra
from residua.lab.data.corpus import Corpus, Document
from residua.lab.data.encode import Encoder, Group
from residua.lab.data.progress import text_progress
from residua.lab.data.shards import Shard, SplitFiles
from residua.lab.data.split import HashSplit, Split
from residua.lab.data.staging import Staging, State, damage_error
from residua.records.durable import file_sha256, sync

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast

ENCODE_TEXT = 1_000_000
"""Bytes of text to tokenize at once."""
SAVE_TEXT = 64_000_000
"""Bytes of text, at least, between two saved states. A smaller text is written in one go."""


class Piece(NamedTuple):
    """The ids of one document, and the length of its text in bytes."""

    ids: np.ndarray
    bytes: int


class WriteResult(NamedTuple):
    """The result of `write_shards`: the splits, and the sha256 of the text."""

    splits: dict[Split, SplitFiles]
    sha256: str


def write_shards(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    dtype: np.dtype,
    stage: Staging,
    validation_fraction: float,
    shard_tokens: int,
    progress: bool,
) -> WriteResult:
    """Write the shards of both splits into `stage`, continuing from its saved state if it has one.

    A state is saved after each shard, but at least SAVE_TEXT bytes of text apart. An interrupted preparation ends with
    the same bytes as any other: it reads the text from the start and skips the documents that are on the disk.

    Args:
        dtype: of a token on the disk.

    Raises:
        InputError: the text cannot be used, or a shard of the saved state is gone or cut.
        OSError: writing failed.
    """
    start_state = stage.saved or State(documents=0, size=0, splits={})
    split: HashSplit[Piece] = HashSplit(validation_fraction, settled=stage.saved is not None)
    writers = {
        name: ShardWriter(stage.folder, name, dtype, shard_tokens, start_state.splits.get(name, SplitFiles()))
        for name in get_args(Split)
    }
    shards = sum(len(writer.shards) for writer in writers.values())
    documents, size = start_state.documents, start_state.size
    text, unsaved_bytes = hashlib.sha256(), 0
    remaining = iter(corpus)
    for skipped in islice(remaining, documents):
        text.update(skipped.text.encode() + b"\0")
    with text_progress("tokens", corpus.size, size, progress) as advance:
        for encoded, group in Encoder(tokenizer, dtype).map(_groups(remaining)):
            start = 0
            for document, length, key in zip(group.texts, encoded.lengths.tolist(), encoded.keys.tolist()):
                text.update(document + b"\0")
                unsaved_bytes += len(document)
                piece = Piece(encoded.ids[start : start + length], len(document))
                start += length
                for name, item in split.add(key, piece):
                    writers[name].add(item)
            for writer in writers.values():
                writer.write()
            advance(group.size)
            documents += len(group.texts)
            size += group.size
            whole_shards = sum(len(writer.shards) for writer in writers.values())
            if whole_shards > shards and unsaved_bytes >= SAVE_TEXT and split.settled:
                shards, unsaved_bytes = whole_shards, 0
                splits = {name: writer.state() for name, writer in writers.items()}
                stage.save(State(documents, size, splits))
    for name, piece in split.end():
        writers[name].add(piece)
    return WriteResult({name: writer.close() for name, writer in writers.items()}, text.hexdigest())


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

    state: where to continue, from `state()`. Raises InputError if a shard of that state is gone or cut.
    """

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, state: SplitFiles):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.documents, self.bytes, self.tokens = state.documents, state.bytes, state.tokens
        self.shards = list(state.shards)
        self._pieces: list[np.ndarray] = []
        for number, start in enumerate(range(0, self.tokens, shard_tokens)):
            path, size = self._path(number), min(shard_tokens, self.tokens - start) * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise damage_error(path)
            os.truncate(path, size)  # cuts off tokens written after the state was saved

    def add(self, piece: Piece) -> None:
        """Add a document. The next `write` brings it to the disk."""
        self._pieces.append(piece.ids)
        self.documents += 1
        self.bytes += piece.bytes
        self.tokens += len(piece.ids)

    def write(self) -> None:
        """Append the added documents to the shards. Raises OSError."""
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self._pieces = []
        position = self.tokens - len(tokens)
        while len(tokens):
            in_shard = position % self.shard_tokens
            part, tokens = np.split(tokens, [self.shard_tokens - in_shard])
            with self._path(len(self.shards)).open("ab" if in_shard else "wb") as file:
                file.write(part)
            position += len(part)
            if position % self.shard_tokens == 0:
                self._end_shard(self.shard_tokens)

    def close(self) -> SplitFiles:
        """Write the rest and end the last shard; return the whole split."""
        self.write()
        if rest := self.tokens % self.shard_tokens:
            self._end_shard(rest)
        return SplitFiles(self.documents, self.bytes, self.tokens, tuple(self.shards))

    def state(self) -> SplitFiles:
        """Bring the added documents to the disk, and return the state there, which may end within a shard."""
        self.write()
        if self.tokens % self.shard_tokens:
            sync(self._path(len(self.shards)))
        return SplitFiles(self.documents, self.bytes, self.tokens, tuple(self.shards))

    def _end_shard(self, tokens: int) -> None:
        path = self._path(len(self.shards))
        sync(path)
        self.shards.append(Shard(path.name, tokens, file_sha256(path)))

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}.bin"
