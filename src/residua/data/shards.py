"""Text turned into tokens on disk: `prepare` writes a folder, `PreparedData` opens it, `Tokens` reads from it.

    index.json               format version, dtype, vocabulary, every shard with its tokens and sha256, facts
    tokenizer/               loadable by transformers.AutoTokenizer
    train-00000.bin ...      token ids, little-endian uint16 (uint32 for more than 65536 entries), nothing else
    validation-00000.bin ...

Each document is followed by the end-of-text token.
"""

import bisect
import hashlib
import json
import os
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from residua.data.corpus import Corpus, Document, Split, open_corpus, split_documents
from residua.data.tokenizer import (
    byte_tokenizer,
    load_tokenizer,
    save_tokenizer,
    text_encoder,
    tokenizer_hash,
    train_bpe,
    vocabulary,
)
from residua.errors import InputError, RunError, extra

with extra("data"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast

FORMAT = "residua tokens"
VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
BPE_TEXT = 100_000_000
"""Bytes of text, about, that a BPE is trained on: of a larger corpus every n-th document."""
ENCODE_TEXT = 1_000_000
"""Characters that are tokenized at once."""
VERIFY_ON_OPEN = 64_000_000
"""Bytes of shards up to which `PreparedData.open` verifies their content too."""
OPEN_SHARDS = 256
"""Shards that are mapped at a time; each holds a file descriptor."""


class Shard(NamedTuple):
    file: str
    tokens: int
    sha256: str


class Tokens:
    """The token ids of one split, read through memory maps.

    `len(tokens)` is their number, `tokens.window(start, length)` an int64 array of consecutive ones.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype, vocab_size: int):
        self.folder = folder
        self.shards = tuple(shards)
        self.dtype = dtype
        self.vocab_size = vocab_size
        self._starts = [0]
        for shard in self.shards:
            self._starts.append(self._starts[-1] + shard.tokens)
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def window(self, start: int, length: int) -> np.ndarray:
        """The ids of tokens start, ..., start + length - 1, across shards. Raises IndexError beyond the ends."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        window = np.empty(length, dtype=np.int64)
        number = bisect.bisect_right(self._starts, start) - 1
        done = 0
        while done < length:
            offset = start + done - self._starts[number]
            part = self._mapped(number)[offset : offset + length - done]
            window[done : done + len(part)] = part
            done += len(part)
            number += 1
        if window.max(initial=0) >= self.vocab_size:
            raise InputError(
                f"{self.folder}: token id {window.max()} near token {start} is outside the vocabulary of "
                f"{self.vocab_size}: the shard was edited or damaged, prepare the data again"
            )
        return window

    def _mapped(self, number: int) -> np.ndarray:
        if number not in self._maps:
            if len(self._maps) == OPEN_SHARDS:
                self._maps.pop(next(iter(self._maps)))
            shard = self.shards[number]
            path = self.folder / shard.file
            try:
                mapped = np.memmap(path, self.dtype, mode="r", shape=(shard.tokens,))
            except (OSError, ValueError) as error:
                raise RunError(f"{path}: the shard can no longer be read: {error}") from error
            self._maps[number] = mapped.view(np.ndarray)
        return self._maps[number]


@dataclass(frozen=True)
class PreparedData:
    """A folder that `prepare` wrote.

    `vocab_size` and `eos_token_id` are the tokenizer's. `fingerprint` is a sha256 over all that determines the tokens:
    two folders with the same one train alike. `facts` describe the data in the records of a run. `validation_bytes` is
    the length of the validation text in UTF-8, for bits per byte.
    """

    folder: Path
    vocab_size: int
    eos_token_id: int
    fingerprint: str
    facts: dict[str, Any]
    train: Tokens
    validation: Tokens
    validation_bytes: int

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "PreparedData":
        """Open a prepared folder after checking it: shards of up to `VERIFY_ON_OPEN` bytes whole, larger ones by size.

        Raises InputError where a file is missing, cut off, edited or of another format.
        """
        folder = Path(folder)
        index = _read_index(folder)
        try:
            dtype = DTYPES[index["dtype"]]
            vocab_size, eos_token_id = int(index["vocab_size"]), int(index["eos_token_id"])
            shards = {
                split: [
                    Shard(str(s["file"]), int(s["tokens"]), str(s["sha256"])) for s in index["splits"][split]["shards"]
                ]
                for split in get_args(Split)
            }
            validation_bytes = int(index["splits"]["validation"]["bytes"])
            expected_tokenizer = index["tokenizer_sha256"]
            facts = dict(index["facts"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError(f"{folder / 'index.json'}: damaged ({error!r}); prepare the data again") from None

        if vocab_size - 1 > np.iinfo(dtype).max:
            raise InputError(f"{folder}: a vocabulary of {vocab_size} does not fit shards of {index['dtype']}")
        if not 0 <= eos_token_id < vocab_size:
            raise InputError(f"{folder}: end of text {eos_token_id} is outside the vocabulary of {vocab_size}")
        try:
            tokenizer = tokenizer_hash(folder / "tokenizer")
        except OSError as error:
            raise InputError(f"{folder}: its tokenizer cannot be read: {error}; prepare the data again") from None
        if tokenizer != expected_tokenizer:
            raise InputError(f"{folder}: tokenizer/ is not the one that made the tokens; prepare the data again")

        content = [VERSION, index["dtype"], vocab_size, eos_token_id, tokenizer]
        content += [[split, [shard[1:] for shard in shards[split]]] for split in shards]
        fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        data = cls(
            folder=folder,
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            fingerprint=fingerprint,
            facts=facts | {"fingerprint": fingerprint},
            train=Tokens(folder, shards["train"], dtype, vocab_size),
            validation=Tokens(folder, shards["validation"], dtype, vocab_size),
            validation_bytes=validation_bytes,
        )
        if data._check_sizes() <= VERIFY_ON_OPEN:
            data.verify()
        return data

    def tokenizer(self) -> PreTrainedTokenizerFast:
        return load_tokenizer(self.folder / "tokenizer")

    def verify(self) -> None:
        """Read every shard; raise InputError for one whose sha256 or token ids are not as they were written."""
        for tokens in (self.train, self.validation):
            for shard in tokens.shards:
                _verify(self.folder / shard.file, shard, tokens.dtype, self.vocab_size)

    def _check_sizes(self) -> int:
        total = 0
        for tokens in (self.train, self.validation):
            for shard in tokens.shards:
                path, expected = self.folder / shard.file, shard.tokens * tokens.dtype.itemsize
                try:
                    size = path.stat().st_size
                except OSError as error:
                    raise InputError(f"{path}: missing shard ({error.strerror}); prepare the data again") from None
                if size != expected:
                    raise InputError(f"{path}: expected {expected} bytes, got {size}; prepare the data again")
                total += size
        return total


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 2048,
    tokenizer: str = "bpe",
    validation_fraction: float = 0.05,
    shard_tokens: int = 100_000_000,
    progress: bool = True,
) -> PreparedData:
    """Tokenize the text of `source` into the new folder `out`.

    source: "stdlib" (the documentation inside this Python, about 2 MB) or a path, see `open_corpus`.
    tokenizer: "bpe" is trained on the training part, with `vocab_size` entries (fewer for a short text, with a
        warning); "byte" has the 256 bytes and the end of text; or a folder with a tokenizer saved by transformers.
    validation_fraction: the part of the documents, about, that is held out; the choice is a hash of each text.
    shard_tokens: tokens in a shard; the last one of a split has fewer.

    The same arguments and text give the same bytes. `out` appears when all of it is written, or not at all. Memory
    does not grow with the text. Raises InputError for arguments or text that cannot be used and for an `out` that is
    not empty; RunError when writing fails, for instance on a full disk.
    """
    if not 0 < validation_fraction < 1:
        raise InputError(f"validation_fraction: expected a number between 0 and 1, got {validation_fraction}")
    if shard_tokens < 1:
        raise InputError(f"shard_tokens: expected at least 1, got {shard_tokens}")
    out = Path(out).resolve()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; give another folder or remove it")
    corpus = open_corpus(source)
    if next(iter(corpus), None) is None:
        raise InputError(f"{source}: no text: expected documents, found nothing or white space")

    with _appearing(out) as folder:
        made = _make_tokenizer(tokenizer, corpus, vocab_size, validation_fraction, progress)
        save_tokenizer(made, folder / "tokenizer")
        index = _write_shards(corpus, made, folder, validation_fraction, shard_tokens, progress)
        index["tokenizer_sha256"] = tokenizer_hash(folder / "tokenizer")
        index["facts"]["tokenizer"] = tokenizer if tokenizer in ("bpe", "byte") else Path(tokenizer).resolve().name
        (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    data = PreparedData.open(out)
    if tokenizer == "bpe" and data.vocab_size < vocab_size:
        warnings.warn(
            f"{corpus.name}: the text gives {data.vocab_size} of the {vocab_size} vocabulary entries", stacklevel=2
        )
    return data


def _make_tokenizer(
    kind: str, corpus: Corpus, vocab_size: int, validation_fraction: float, progress: bool
) -> PreTrainedTokenizerFast:
    if kind == "byte":
        return byte_tokenizer()
    if kind != "bpe":
        return load_tokenizer(kind)
    with _bar("tokenizer", corpus.size, progress) as advance:
        documents = split_documents(_watched(corpus, advance), validation_fraction)
        training = (document.text for split, document in documents if split == "train")
        return train_bpe(islice(training, 0, None, -(-corpus.size // BPE_TEXT)), vocab_size)


def _write_shards(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    validation_fraction: float,
    shard_tokens: int,
    progress: bool,
) -> dict[str, Any]:
    vocab_size = vocabulary(tokenizer)
    dtype = "uint16" if vocab_size <= 65536 else "uint32"
    encode = text_encoder(tokenizer)
    text_hash = hashlib.sha256()
    writers = {
        split: _Writer(folder, split, DTYPES[dtype], shard_tokens, encode, tokenizer.eos_token_id)
        for split in get_args(Split)
    }
    with _bar("tokens", corpus.size, progress) as advance:
        for split, document in split_documents(_hashed(_watched(corpus, advance), text_hash), validation_fraction):
            writers[split].add(document.text)
    for writer in writers.values():
        writer.close()

    documents = sum(writer.documents for writer in writers.values())
    for split, writer in writers.items():
        if writer.tokens < 2:
            raise InputError(
                f"{corpus.name}: too small: of {documents} document(s) nothing is left for {split}; give more text"
            )
    splits = {
        split: {
            "documents": writer.documents,
            "bytes": writer.bytes,
            "tokens": writer.tokens,
            "shards": [shard._asdict() for shard in writer.shards],
        }
        for split, writer in writers.items()
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_token_id": tokenizer.eos_token_id,
        "splits": splits,
        "facts": {
            "source": corpus.name,
            **corpus.facts,
            "sha256": text_hash.hexdigest(),
            "documents": documents,
            "bytes": sum(writer.bytes for writer in writers.values()),
            "tokens": sum(writer.tokens for writer in writers.values()),
            "train_tokens": writers["train"].tokens,
            "validation_tokens": writers["validation"].tokens,
            "validation_fraction": validation_fraction,
            "vocab_size": vocab_size,
        },
    }


class _Writer:
    """Collects the documents of one split, tokenizes them many at a time and appends the ids to its shards."""

    def __init__(
        self,
        folder: Path,
        split: Split,
        dtype: np.dtype,
        shard_tokens: int,
        encode: Callable[[list[str]], list[list[int]]],
        end_of_text: int,
    ):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.encode, self.end_of_text = encode, end_of_text
        self.shards: list[Shard] = []
        self.documents = self.bytes = self.tokens = 0
        self._texts: list[str] = []
        self._characters = 0
        self._hash = hashlib.sha256()
        self._in_shard = 0

    def add(self, text: str) -> None:
        self._texts.append(text)
        self._characters += len(text)
        self.documents += 1
        self.bytes += len(text.encode())
        if self._characters >= ENCODE_TEXT:
            self._write()

    def close(self) -> None:
        self._write()
        if self._in_shard:
            self._end_shard()

    def _write(self) -> None:
        end = (self.end_of_text,)
        ids = chain.from_iterable(chain(document, end) for document in self.encode(self._texts))
        tokens = np.fromiter(ids, dtype=self.dtype)
        self._texts, self._characters = [], 0
        self.tokens += len(tokens)
        while len(tokens):
            part, tokens = np.split(tokens, [self.shard_tokens - self._in_shard])
            with self._path().open("ab") as file:
                file.write(part)
            self._hash.update(part)
            self._in_shard += len(part)
            if self._in_shard == self.shard_tokens:
                self._end_shard()

    def _end_shard(self) -> None:
        self.shards.append(Shard(self._path().name, self._in_shard, self._hash.hexdigest()))
        self._hash, self._in_shard = hashlib.sha256(), 0

    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    try:
        index = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(f"{folder}: no prepared data here (no index.json); make it with `residua prepare`") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: not a readable index ({error}); prepare the data again") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise InputError(f"{path}: not an index of prepared data; make one with `residua prepare`")
    if index.get("version") != VERSION:
        raise InputError(f"{path}: expected format {VERSION}, got {index.get('version')}; prepare the data again")
    return index


def _verify(path: Path, shard: Shard, dtype: np.dtype, vocab_size: int) -> None:
    digest, largest = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(16 * 2**20):
                digest.update(chunk)
                largest = max(largest, np.frombuffer(chunk, dtype).max())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if largest >= vocab_size:
        problem = f"token id {largest} is outside the vocabulary of {vocab_size}"
    elif digest.hexdigest() != shard.sha256:
        problem = "its sha256 is not the one in index.json"
    else:
        return
    raise InputError(f"{path}: {problem}: it was edited or damaged, prepare the data again")


@contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `out` if all goes well and leaves no trace otherwise."""
    prefix = f".{out.name}.preparing-"
    folder = out.with_name(prefix + secrets.token_hex(4))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out.parent, prefix)
        folder.mkdir()
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{out}: cannot be made here: {error.strerror}; give another folder") from None
    except OSError as error:
        raise _failed(out, error) from error
    lock = _lock(folder)
    try:
        yield folder
        for path in folder.rglob("*"):
            if path.is_file():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())
        os.replace(folder, out)
    except OSError as error:
        raise _failed(out, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _failed(out: Path, error: OSError) -> RunError:
    return RunError(f"{out}: writing failed: {error.strerror}; nothing was kept, prepare the data again")


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove what a killed process left: nobody holds its lock any more."""
    for folder in [path for path in parent.iterdir() if path.name.startswith(prefix)]:
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock `folder` as long as the returned descriptor is open; None if another process has it or locks are missing."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
    except (ImportError, OSError):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _watched(documents: Iterable[Document], advance: Callable[[int], None]) -> Iterator[Document]:
    for document in documents:
        yield document
        advance(document.size)


def _hashed(documents: Iterable[Document], digest: Any) -> Iterator[Document]:
    for document in documents:
        digest.update(document.text.encode() + b"\0")
        yield document


@contextmanager
def _bar(title: str, total: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on an interactive terminal where `rich` is installed; else nothing. Yields how to advance it."""
    if not (progress and sys.stderr.isatty()):
        yield lambda size: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    except ModuleNotFoundError:
        yield lambda size: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda size: bar.advance(task, size)
        bar.update(task, completed=total)
