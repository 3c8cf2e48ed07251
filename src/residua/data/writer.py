"""Write a corpus into shards, document by document, and continue where a saved state was taken."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

from residua.data.corpus import Corpus, Reading, has_text
from residua.data.encode import Encoders, Group, WorkerLost
from residua.data.progress import text_progress
from residua.data.shards import Shard
from residua.data.split import HashSplit, LeadingSplit, Split
from residua.data.staging import PROGRESS, Staging, changed
from residua.errors import InputError, RunError, extra
from residua.runs.durable import file_sha256, sync, unlinked

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
    hold_out: Callable[[dict[str, Any] | None], HashSplit[Piece] | LeadingSplit[Piece]],
    shard_tokens: int,
    workers: int,
    progress: bool,
) -> Written:
    """Write the shards of both splits into `staged`, from its saved state on if it has one.

    A state is saved after each shard, but at least SAVE_TEXT bytes of text apart: at places that depend on the text
    alone, so that an interrupted preparation ends with the same bytes as any other.

    Args:
        tokenizer: the settings of `Encoder`: the tokenizer's JSON, the id of the end of text, the dtype.
        hold_out: makes the split, from its saved state or None.

    Raises:
        InputError: the text cannot be used, or the saved state does not fit the files.
        RunError: a worker was lost.
        OSError: writing failed.
    """
    saved = staged.saved or {"reader": None, "text_sha256": [], "size": 0, "split": None, "splits": {}}
    dtype = np.dtype(tokenizer[-1])
    try:
        split = hold_out(saved["split"])
        writers = {
            name: ShardWriter(staged.folder, name, dtype, shard_tokens, saved["splits"].get(name))
            for name in get_args(Split)
        }
        text, size = _TextHash(list(saved["text_sha256"])), int(saved["size"])
        reading = corpus.read(saved["reader"])
    except (InputError, RunError):
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise changed(staged.folder / PROGRESS) from error

    shards = sum(writer.full_shards for writer in writers.values())
    with text_progress("tokens", corpus.size, size, progress) as advance, Encoders(*tokenizer, workers) as encoders:
        try:
            for encoded, group in encoders.map(_groups(reading)):
                start = 0
                for document, length, key in zip(group.texts, encoded.lengths.tolist(), encoded.keys.tolist()):
                    text.add(document)
                    piece = Piece(encoded.ids[start : start + length], len(document))
                    start += length
                    for name, placed in split.add(key, piece, length):
                        writers[name].add(placed)
                for writer in writers.values():
                    writer.write()
                advance(group.size)
                size += group.size
                full = sum(writer.full_shards for writer in writers.values())
                if full > shards and text.size >= SAVE_TEXT and split.settled:
                    shards = full
                    staged.save(
                        {
                            "reader": group.reader,
                            "text_sha256": text.end_part(),
                            "size": size,
                            "split": split.state(),
                            "splits": {name: writer.state() for name, writer in writers.items()},
                        }
                    )
        except WorkerLost as error:
            raise RunError(f"{staged.out}: {error}") from error
    for name, piece in split.end():
        writers[name].add(piece)
    for writer in writers.values():
        writer.close()
    return Written(writers, text.end(), split.facts())


def _groups(reading: Reading) -> Iterator[Group]:
    """Gather documents into groups of about ENCODE_TEXT bytes, without the blank ones."""
    texts: list[bytes] = []
    length = size = 0
    for document in reading:
        size += document.size
        if not has_text(document):
            continue
        texts.append(document.text.encode())
        length += len(texts[-1])
        if length >= ENCODE_TEXT:
            yield Group(texts, size, reading.state())
            texts, length, size = [], 0, 0
    yield Group(texts, size, reading.state())


class _TextHash:
    """The sha256 of a text: over each document and a zero byte; if states were saved, over the hashes of its parts.

    A sha256 cannot be saved half-way, so each saved state ends a part.
    """

    def __init__(self, parts: list[str]):
        self._parts = parts
        self._part = hashlib.sha256()
        self.size = 0
        """Bytes of text in the current part."""

    def add(self, text: bytes) -> None:
        self._part.update(text + b"\0")
        self.size += len(text)

    def end_part(self) -> list[str]:
        self._parts = [*self._parts, self._part.hexdigest()]
        self._part, self.size = hashlib.sha256(), 0
        return self._parts

    def end(self) -> str:
        parts = self.end_part() if self.size or not self._parts else self._parts
        return parts[0] if len(parts) == 1 else hashlib.sha256(bytes.fromhex("".join(parts))).hexdigest()


class ShardWriter:
    """Write the shards of `split` into `folder`, each of `shard_tokens` tokens except the last.

    saved: the result of `state()`, to continue there. Raises InputError if a file of that state is gone or changed.
    """

    def __init__(
        self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, saved: dict[str, Any] | None = None
    ):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.documents = self.bytes = self.tokens = 0
        self.shards: list[Shard] = []
        self._pieces: list[np.ndarray] = []
        if saved is not None:
            self.documents, self.bytes, self.tokens = saved["documents"], saved["bytes"], saved["tokens"]
            self._restore(saved["sha256"])

    @property
    def full_shards(self) -> int:
        return self.tokens // self.shard_tokens

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
            with unlinked(self._path(len(self.shards))).open("ab" if in_shard else "wb") as file:
                file.write(part)
            written += len(part)
            if written % self.shard_tokens == 0:
                self.shards.append(self._on_disk(self.shard_tokens))

    def close(self) -> None:
        """Write the rest and end the last shard."""
        self.write()
        if rest := self.tokens % self.shard_tokens:
            self.shards.append(self._on_disk(rest))

    def state(self) -> dict[str, Any]:
        """Bring what was added to the disk and return what is there, as a JSON object."""
        self.write()
        rest = self.tokens % self.shard_tokens
        shards = [*self.shards, self._on_disk(rest)] if rest else self.shards
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "sha256": [shard.sha256 for shard in shards],
        }

    def _restore(self, hashes: list[str]) -> None:
        """Find the shards of a saved state, and cut off what was written to the last one after it."""
        rest = self.tokens % self.shard_tokens
        if len(hashes) != self.full_shards + bool(rest):
            raise ValueError(f"{len(hashes)} shards for {self.tokens} tokens")
        for number, sha256 in enumerate(hashes):
            path = self._path(number)
            unfinished = number == self.full_shards
            tokens = rest if unfinished else self.shard_tokens
            size = tokens * self.dtype.itemsize
            found = path.stat().st_size if path.is_file() else -1
            if found < size or (found > size and not unfinished):
                raise changed(path)
            if unfinished:
                os.truncate(path, size)
                if file_sha256(path) != sha256:
                    raise changed(path)
            else:
                self.shards.append(Shard(path.name, tokens, sha256))

    def _on_disk(self, tokens: int) -> Shard:
        """Describe the current shard, which has `tokens` tokens, once it would survive a power cut."""
        path = self._path(len(self.shards))
        sync(path)
        return Shard(path.name, tokens, file_sha256(path))

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.split}-{number:05d}.bin"
