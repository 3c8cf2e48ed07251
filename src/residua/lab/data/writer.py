"""Write a corpus into shards, document by document, and continue where an earlier call ended."""

import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError, extra, fits, require
from residua.files.durable import publish, remove, sync, unlinked, write_text
from residua.files.reading import inside
from residua.files.tensors import undamaged
from residua.lab.data.corpus import Corpus, Document, hashed
from residua.lab.data.shards import SplitFiles, read_splits
from residua.lab.data.split import Split
from residua.lab.records.folder import LEASE, LOCK, hold, read_object
from residua.lab.records.progress import Progress, say

with extra("lab"):
    from rich.filesize import decimal

import hashlib
import os
from itertools import chain, islice
from typing import get_args

from residua.errors import extra
from residua.files.durable import file_sha256
from residua.lab.data.encode import Encoded, Encoder
from residua.lab.data.shards import Shard
from residua.lab.data.split import HeldOutShare, split_documents
from residua.lab.data.tokenizer import special_tokens

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast


PROGRESS = "progress.json"


@dataclass
class Staging:
    """The folder of an unfinished preparation, and the part of each split that `save` recorded, empty at first."""

    folder: Path
    plan: dict[str, Any]
    saved: Mapping[Split, SplitFiles]
    lost: int = 0
    """The number of bytes of the saved text that cannot be recovered from the tokens."""

    def save(self, splits: Mapping[Split, SplitFiles]) -> None:
        parts = {name: asdict(split) for name, split in splits.items()}
        write_text(self.folder / PROGRESS, json.dumps({"plan": self.plan, "splits": parts, "lost": self.lost}))
        self.saved = splits

    def close(self) -> None:
        """Print how much progress is kept for the next call, or remove the folder if there is none."""
        if not self.saved:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            tokens = sum(split.tokens for split in self.saved.values())
            say(f"prepare: {tokens:,} tokens are kept in {self.folder}: the same command continues from there")


@contextmanager
def staging(out: Path, plan: dict[str, Any]) -> Iterator[Staging]:
    """Yield a folder to write into, which is renamed to `out` at the end; after an error it stays if it holds progress.

    The progress of an earlier preparation with the same `plan` is kept. Raises InputError if an earlier preparation had
    another plan, another process is preparing `out`, or `out` cannot be made; RunError if writing fails.
    """
    folder = unlinked(out.with_name(f".{out.name}.preparing"))
    with hold(folder, markers=None):
        stage = Staging(folder, plan, *_read_progress(folder, plan))
        try:
            if not stage.saved:
                for path in folder.iterdir():
                    if path.name not in (LOCK, LEASE):
                        remove(path)
            yield stage
            for path in folder.rglob("*"):
                if path.is_file():
                    sync(path)
            publish(folder, out)
            for name in (PROGRESS, LOCK, LEASE):
                (out / name).unlink(missing_ok=True)
            stage.saved = {}
        except OSError as error:
            raise RunError(f"{out}: writing failed: {error.strerror}") from error
        finally:
            stage.close()


def _read_progress(folder: Path, plan: dict[str, Any]) -> tuple[Mapping[Split, SplitFiles], int]:
    """Return the splits that an earlier preparation saved, if any, and the number of its lost bytes.

    Raises InputError if that preparation has another plan.
    """
    path = folder / PROGRESS
    if not path.exists():
        return {}, 0
    with undamaged(path, "the progress of a preparation", f"remove {folder}"):
        progress = read_object(path)
        old_plan = dict(progress["plan"])
        saved, lost = read_splits(path, progress["splits"]), progress.get("lost", 0)
        require(fits(lost, int) and lost >= 0, f"{path}: lost", "a number of bytes", lost)
        for split in saved.values():
            for shard in split.shards:
                inside(folder, shard.file)
    different_keys = [key for key in old_plan | plan if old_plan.get(key) != plan.get(key)]
    if different_keys:
        changes = ", ".join(f"{key} was {old_plan.get(key)} and is {plan.get(key)} now" for key in different_keys)
        raise InputError(
            f"{folder} holds an unfinished preparation with other settings or of another text: {changes}; give the "
            "earlier ones to continue that preparation, or remove the folder"
        )
    return saved, lost


UPDATE_SECONDS = 1.0
"""The time between two updates of the display; a shorter preparation shows none."""


@contextmanager
def text_progress(
    title: str, documents: Iterable[Document], total: int, done: int, enabled: bool, *, time_left: bool = True
) -> Iterator[Iterator[Document]]:
    """Show how much of `total` bytes of text (0 if unknown) is read, after `done` bytes of an earlier call.

    Yields an iterator over the documents. time_left: whether to show the time left; False if long work follows.
    """
    start = last_update = time.monotonic()
    earlier_bytes = done

    def reading() -> Iterator[Document]:
        nonlocal done, last_update
        for document in documents:
            yield document
            done += document.size
            now = time.monotonic()
            if now - last_update >= UPDATE_SECONDS:
                last_update = now
                share = f" of {decimal(total)} ({done / total:.1%})" if total else ""
                speed = decimal(int((done - earlier_bytes) / (now - start)))
                bar.update(done, f"prepare: {title}: {decimal(done)} of text{share}, {speed}/s")

    with Progress("", total if time_left else 0, done=done, enabled=enabled) as bar:
        yield reading()


ENCODE_TEXT = 1_000_000
"""The number of bytes of text to tokenize at once."""
WRITE_TOKENS = 250_000
"""The number of tokens of a split to write at once."""
SAVE_TEXT = 64_000_000
"""The least number of bytes of text between two saves. A smaller text is written without saving progress."""


def write_shards(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    dtype: np.dtype,
    stage: Staging,
    validation_fraction: float,
    shard_tokens: int,
    progress: bool,
    share: HeldOutShare | None = None,
    lossless: bool = True,
) -> tuple[dict[Split, SplitFiles], dict[str, Any]]:
    """Write the shards of both splits into `stage`, and continue after the saved part.

    Progress is saved after each shard, at least SAVE_TEXT bytes of text apart. An interrupted preparation continues to
    the same bytes as an uninterrupted one: it reads the text from the start and skips the saved documents.

    Args:
        dtype: the dtype of token ids on disk.
        share: the documents to hold out, in place of `validation_fraction`.
        lossless: whether the tokenizer is known to lose nothing.

    Returns:
        The splits, and facts about the text: its `sha256`, the `lost_share` of its bytes, and, if there are any, the
        numbers of `blank_documents`, which were left out, and of `documents_with_special_tokens`, written out in their
        text and read as plain text.

    Raises:
        InputError: the text cannot be used, or a saved shard is missing or truncated.
        OSError: writing failed.
    """
    writers = {
        name: ShardWriter(stage.folder, name, dtype, shard_tokens, stage.saved.get(name, SplitFiles()))
        for name in get_args(Split)
    }
    shards = sum(len(writer.shards) for writer in writers.values())
    text, skipped_size, unsaved_bytes = hashlib.sha256(), 0, 0
    counts = Counter[str]()
    remaining = hashed(_with_text(corpus, special_tokens(tokenizer), counts), text)
    for skipped in islice(remaining, sum(writer.documents for writer in writers.values())):
        skipped_size += skipped.size
    with text_progress("tokens", remaining, corpus.size, skipped_size, progress) as documents:
        encoded = chain.from_iterable(Encoder(tokenizer, dtype, lossless=lossless).map(_groups(documents)))
        sides = split_documents(
            encoded, validation_fraction, key=lambda x: x.key, settled=bool(stage.saved), share=share
        )
        for side, document in sides:
            writers[side].add(document)
            stage.lost += document.lost
            unsaved_bytes += len(document.text)
            whole_shards = sum(len(writer.shards) for writer in writers.values())
            # If validation has a document and training gets the next one, no document is held back.
            complete = side == "train" and writers["validation"].documents
            if complete and whole_shards > shards and unsaved_bytes >= SAVE_TEXT:
                shards, unsaved_bytes = whole_shards, 0
                stage.save({name: writer.state() for name, writer in writers.items()})
    splits = {name: writer.close() for name, writer in writers.items()}
    whole = sum(split.bytes for split in splits.values())
    return splits, {"sha256": text.hexdigest(), **counts, "lost_share": stage.lost / max(1, whole)}


def _with_text(corpus: Corpus, special: list[str], counts: Counter[str]) -> Iterator[Document]:
    """Yield the documents of a corpus with text; count the others, and those with the text of a special token."""
    written = re.compile("|".join(map(re.escape, special)) or "(?!)")
    for document in corpus.read():
        if not document.text.strip():
            counts["blank_documents"] += 1
            continue
        counts.update(["documents_with_special_tokens"] if written.search(document.text) else [])
        yield document


def _groups(documents: Iterable[Document]) -> Iterator[list[bytes]]:
    """Gather texts into groups of about ENCODE_TEXT bytes."""
    texts: list[bytes] = []
    length = 0
    for document in documents:
        texts.append(document.text.encode())
        length += len(texts[-1])
        if length >= ENCODE_TEXT:
            yield texts
            texts, length = [], 0
    yield texts


class ShardWriter:
    """Write the shards of `split` into `folder`, each of `shard_tokens` tokens except the last.

    saved: the state to continue from, as returned by `state()`. Raises InputError if one of its shards is missing or
    truncated.
    """

    def __init__(self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, saved: SplitFiles):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.documents, self.bytes, self.tokens = saved.documents, saved.bytes, saved.tokens
        self._written = saved.tokens
        self.shards = list(saved.shards)
        self._pieces: list[np.ndarray] = []
        for number, start in enumerate(range(0, self.tokens, shard_tokens)):
            path, size = self._path(number), min(shard_tokens, self.tokens - start) * dtype.itemsize
            if not path.is_file() or path.stat().st_size < size:
                raise InputError(f"{path}: part of an unfinished preparation is damaged or gone; remove {folder}")
            os.truncate(path, size)  # cuts off tokens that were written later

    def add(self, document: Encoded) -> None:
        """Add a document. The next `write` writes it to disk."""
        self._pieces.append(document.ids)
        self.documents += 1
        self.bytes += len(document.text)
        self.tokens += len(document.ids)
        if self.tokens - self._written >= WRITE_TOKENS:
            self.write()

    def write(self) -> None:
        """Append the added documents to the shards. Raises OSError."""
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self._pieces = []
        while len(tokens):
            in_shard = self._written % self.shard_tokens
            part, tokens = np.split(tokens, [self.shard_tokens - in_shard])
            with self._path(len(self.shards)).open("ab" if in_shard else "wb") as file:
                file.write(part)
            self._written += len(part)
            if self._written % self.shard_tokens == 0:
                self._end_shard(self.shard_tokens)

    def close(self) -> SplitFiles:
        """Write the rest and end the last shard; return the whole split."""
        self.write()
        if rest := self.tokens % self.shard_tokens:
            self._end_shard(rest)
        return SplitFiles(self.documents, self.bytes, self.tokens, tuple(self.shards))

    def state(self) -> SplitFiles:
        """Sync the added documents to disk, and return the state on disk, which may end within a shard."""
        self.write()
        if self.tokens % self.shard_tokens:
            sync(self._path(len(self.shards)))
        return SplitFiles(self.documents, self.bytes, self.tokens, tuple(self.shards))

    def _end_shard(self, tokens: int) -> None:
        path = self._path(len(self.shards))
        sync(path)
        self.shards.append(Shard(path.name, tokens, file_sha256(path)))

    def _path(self, number: int) -> Path:
        return unlinked(self.folder / f"{self.split}-{number:05d}.bin")
