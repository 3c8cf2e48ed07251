"""Text turned into tokens on disk: `prepare` writes the folder that `PreparedData` opens.

Until it is whole, the folder stands beside its place under another name. A large text is written in blocks; from time
to time progress.json says what of it is safely on the disk, and the next call with the same arguments goes on there.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, get_args

from residua.data.corpus import (
    Corpus,
    Document,
    HashSplit,
    LeadingSplit,
    Reading,
    Split,
    has_text,
    open_corpus,
    split_documents,
)
from residua.data.encode import Encoders, WorkerLost, encode, text_backend
from residua.data.shards import DTYPES, FORMAT, VERSION, PreparedData, Shard
from residua.data.tokenizer import (
    byte_tokenizer,
    load_tokenizer,
    save_tokenizer,
    tokenizer_hash,
    train_bpe,
    vocabulary,
)
from residua.durable import sync, write_text
from residua.errors import InputError, RunError, extra
from residua.provenance import available_cores

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast

BPE_TEXT = 100_000_000
"""Bytes of text, about, that a BPE is trained on: of a larger corpus every n-th document, of the hub the first ones."""
ENCODE_TEXT = 1_000_000
"""Bytes of text that are tokenized at once."""
BLOCK_TEXT = 64_000_000
"""Bytes of text, at least, between two places where a preparation can go on. A smaller text is written in one go."""
SAVE_SECONDS = 10.0
"""Time, at least, between two notes of what is written."""
REPORT_SECONDS = 30.0
"""Time between two lines about progress where there is no terminal to draw a bar on."""
FINEWEB_VALIDATION = 100_000_000
"""Tokens of FineWeb-Edu that are held out: the 0.1B of arXiv:2601.00417."""
PROGRESS = "progress.json"


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    vocab_size: int = 2048,
    tokenizer: str = "bpe",
    validation_fraction: float | None = None,
    validation_tokens: int | None = None,
    shard_tokens: int = 100_000_000,
    text_column: str = "text",
    sample: str | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> PreparedData:
    """Tokenize the text of `source` into the new folder `out`.

    source: "stdlib" (the documentation inside this Python, about 2 MB), a path, "fineweb-edu" (`sample`: "10BT",
        "100BT" or "350BT", by default the first) or a data set of the hub, see `open_corpus`.
    tokenizer: "bpe" is trained on the training part, with `vocab_size` entries (fewer for a short text, with a
        warning); "byte" has the 256 bytes and the end of text; a folder with a tokenizer saved by transformers; "gpt2"
        or "hf:OWNER/NAME" from the hub.
    validation_fraction: the part of the documents, about, that is held out; the choice is a hash of each text. 0.05
        where neither this nor `validation_tokens` is given.
    validation_tokens: instead, hold out the first documents, at most so many tokens of them, and leave copies of their
        texts out of training. 100 million for fineweb-edu.
    shard_tokens: tokens in a shard; the last one of a split has fewer.
    text_column: the column of parquet files, JSON lines and data sets that holds the text.
    workers: processes that tokenize; None is one for each core, or none beside this one where the text is small.

    The same arguments and text give the same bytes, whatever `workers`. `out` appears when all of it is written, or not
    at all. If a long preparation ends early, even by a kill, what it wrote is kept beside `out`, and a call with the
    same arguments goes on from there. Memory does not grow with the text.
    Raises InputError for arguments or text that cannot be used, for an `out` that is not empty and where the disk is
    too small; RunError when writing fails or the hub cannot be read.
    """
    out = Path(out).resolve()
    if validation_fraction is None and validation_tokens is None:
        if source == "fineweb-edu":
            validation_tokens = FINEWEB_VALIDATION
        else:
            validation_fraction = 0.05
    _check(out, validation_fraction, validation_tokens, shard_tokens, workers, tokenizer)
    made = None if tokenizer == "bpe" else byte_tokenizer() if tokenizer == "byte" else load_tokenizer(tokenizer)
    corpus = open_corpus(source, text_column=text_column, sample=sample)
    if next(iter(corpus), None) is None:
        raise InputError(f"{source}: no text: expected documents, found nothing or white space")
    if workers is None:
        workers = available_cores() if _is_large(corpus) else 0

    plan = {
        "version": VERSION,
        "source": corpus.name,
        **corpus.identity,
        "tokenizer": f"bpe {vocab_size}" if made is None else _content_hash(made),
        "validation_fraction": validation_fraction,
        "validation_tokens": validation_tokens,
        "shard_tokens": shard_tokens,
        "block_text": BLOCK_TEXT,
    }
    with _appearing(out, plan) as staging:
        folder = staging.folder
        if staging.saved is not None:
            made = _saved_tokenizer(staging)
        else:
            if made is None:
                made = _train(corpus, vocab_size, validation_fraction, progress)
            save_tokenizer(made, folder / "tokenizer")
        if _is_large(corpus):
            _announce(corpus, made, staging, progress)
        split = (
            HashSplit(validation_fraction, staging.saved and staging.saved["split"])
            if validation_tokens is None
            else LeadingSplit(validation_tokens, staging.saved and staging.saved["split"])
        )
        index = _write_shards(corpus, made, staging, split, shard_tokens, workers, progress)
        index["tokenizer_sha256"] = tokenizer_hash(folder / "tokenizer")
        index["facts"]["tokenizer"] = _tokenizer_name(tokenizer)
        (folder / "index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    data = PreparedData.open(out)
    if tokenizer == "bpe" and data.vocab_size < vocab_size:
        warnings.warn(
            f"{corpus.name}: the text gives {data.vocab_size} of the {vocab_size} vocabulary entries", stacklevel=2
        )
    return data


def _check(
    out: Path,
    validation_fraction: float | None,
    validation_tokens: int | None,
    shard_tokens: int,
    workers: int | None,
    tokenizer: str,
) -> None:
    if validation_fraction is not None and validation_tokens is not None:
        raise InputError("expected validation_fraction or validation_tokens, got both; leave one out")
    if validation_fraction is not None and not 0 < validation_fraction < 1:
        raise InputError(f"validation_fraction: expected a number between 0 and 1, got {validation_fraction}")
    if validation_tokens is not None and validation_tokens < 2:
        raise InputError(f"validation_tokens: expected at least 2, got {validation_tokens}")
    if validation_tokens is not None and tokenizer == "bpe":
        raise InputError(
            "validation_tokens: a BPE trained here must not see the held-out text, which is counted in its tokens; "
            "give another tokenizer, or validation_fraction"
        )
    if shard_tokens < 1:
        raise InputError(f"shard_tokens: expected at least 1, got {shard_tokens}")
    if workers is not None and workers < 0:
        raise InputError(f"workers: expected at least 0, got {workers}")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out} exists and is not empty; give another folder or remove it")


def _is_large(corpus: Corpus) -> bool:
    return not corpus.local or corpus.size >= BLOCK_TEXT


def _saved_tokenizer(staging: "_Staging") -> PreTrainedTokenizerFast:
    folder = staging.folder / "tokenizer"
    try:
        found = tokenizer_hash(folder)
    except OSError:
        found = None
    if found != staging.saved["tokenizer_sha256"]:
        raise _torn(folder)
    return load_tokenizer(folder)


def _content_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.eos_token}".encode()).hexdigest()


def _tokenizer_name(tokenizer: str) -> str:
    if tokenizer in ("bpe", "byte", "gpt2") or tokenizer.startswith("hf:"):
        return tokenizer
    return Path(tokenizer).resolve().name


def _train(corpus: Corpus, vocab_size: int, validation_fraction: float, progress: bool) -> PreTrainedTokenizerFast:
    with _bar("tokenizer", corpus.size, 0, progress) as advance:
        documents = split_documents(_watched(corpus, advance), validation_fraction)
        training = (document.text for split, document in documents if split == "train")
        if corpus.local:
            chosen = islice(training, 0, None, -(-corpus.size // BPE_TEXT))
        else:
            chosen = _leading(training, BPE_TEXT)
        return train_bpe(chosen, vocab_size)


def _announce(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, staging: "_Staging", progress: bool) -> None:
    """Say what the tokens will take on the disk; refuse where that is more than there is.

    What the text takes is estimated from its beginning.
    """
    texts = [text.encode() for text in _leading((document.text for document in corpus), ENCODE_TEXT)]
    dtype = _dtype(tokenizer)
    backend = text_backend(tokenizer.backend_tokenizer.to_str())
    lengths = encode(backend, tokenizer.eos_token_id, DTYPES[dtype].str, texts).lengths
    width = DTYPES[dtype].itemsize
    free = shutil.disk_usage(staging.folder).free
    if not corpus.size:
        _say(
            f"the size of {corpus.name} is not known; each billion tokens takes {_size(width * 10**9)}, "
            f"{_size(free)} are free",
            progress,
        )
        return
    written = staging.tokens * width
    need = max(corpus.size * int(lengths.sum()) / sum(map(len, texts)) * width, written)
    start = f"{_size(written)} of it written, " if written else ""
    _say(
        f"{corpus.name}: about {need / width:,.0f} tokens, {_size(need)} on the disk, {start}{_size(free)} are free",
        progress,
    )
    if need - written > free:
        raise InputError(
            f"{staging.out}: needs about {_size(need - written)} of disk, {_size(free)} are free; give another disk or "
            "less text"
        )


def _dtype(tokenizer: PreTrainedTokenizerFast) -> str:
    return "uint16" if vocabulary(tokenizer) <= 65536 else "uint32"


class _Mark(NamedTuple):
    """The end of a block: where reading goes on and the hash of the text up to it."""

    reader: dict[str, Any]
    sha256: str
    size: int


class _Group(NamedTuple):
    """What is known of documents that are tokenized together: the length of each in bytes, and what they end."""

    bytes: list[int]
    size: int
    mark: _Mark | None


def _groups(reading: Reading, chained: str | None, size: int) -> Iterator[tuple[list[bytes], _Group]]:
    """Documents in groups of about ENCODE_TEXT bytes; the last of each block of about BLOCK_TEXT bytes has a mark.

    The hash of a text of one block is the sha256 of its documents; further blocks are chained to it. So it can go on.
    """
    texts: list[bytes] = []
    digest, in_group, in_block, before = hashlib.sha256(), 0, 0, size

    def group(ends: bool) -> tuple[list[bytes], _Group]:
        mark = _Mark(reading.state(), chained, size) if ends else None
        return texts, _Group([len(text) for text in texts], size - before, mark)

    for document in reading:
        size += document.size
        if not has_text(document):
            continue
        text = document.text.encode()
        digest.update(text + b"\0")
        texts.append(text)
        in_group += len(text)
        in_block += len(text)
        ends = in_block >= BLOCK_TEXT
        if ends:
            chained = _chain(chained, digest.digest())
            digest, in_block = hashlib.sha256(), 0
        if ends or in_group >= ENCODE_TEXT:
            yield group(ends)
            texts, in_group, before = [], 0, size
    if in_block or chained is None:
        chained = _chain(chained, digest.digest())
    yield group(True)


def _chain(before: str | None, digest: bytes) -> str:
    return digest.hex() if before is None else hashlib.sha256(bytes.fromhex(before) + digest).hexdigest()


class _Piece(NamedTuple):
    """The ids of one document, and the length of its text in bytes."""

    ids: np.ndarray
    bytes: int


def _write_shards(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    staging: "_Staging",
    split: HashSplit[_Piece] | LeadingSplit[_Piece],
    shard_tokens: int,
    workers: int,
    progress: bool,
) -> dict[str, Any]:
    dtype = _dtype(tokenizer)
    saved = staging.saved or {"reader": None, "sha256": None, "size": 0, "splits": {}}
    writers = {
        name: _Writer(staging.folder, name, DTYPES[dtype], shard_tokens, saved["splits"].get(name))
        for name in get_args(Split)
    }
    reading = corpus.read(saved["reader"])
    groups = _groups(reading, saved["sha256"], saved["size"])
    settings = tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id, DTYPES[dtype].str
    mark, noted = None, time.monotonic()
    with _bar("tokens", corpus.size, saved["size"], progress) as advance, Encoders(*settings, workers) as encoders:
        try:
            for encoded, group in encoders.map(groups):
                start = 0
                for length, key, size in zip(encoded.lengths.tolist(), encoded.keys.tolist(), group.bytes):
                    piece = _Piece(encoded.ids[start : start + length], size)
                    start += length
                    for name, placed in split.add(key, piece, length):
                        writers[name].add(placed)
                advance(group.size)
                mark = group.mark
                if mark is not None and split.settled and time.monotonic() - noted >= SAVE_SECONDS:
                    staging.save(_state(mark, split, writers))
                    noted = time.monotonic()
        except WorkerLost as error:
            raise RunError(f"{staging.out}: {error}") from error
    for name, piece in split.end():
        writers[name].add(piece)
    for writer in writers.values():
        writer.close()
    return _index(corpus, tokenizer, writers, mark.sha256, split.facts())


def _state(mark: _Mark, split: HashSplit | LeadingSplit, writers: dict[Split, "_Writer"]) -> dict[str, Any]:
    """What progress.json says of the blocks that are written."""
    return {
        **mark._asdict(),
        "split": split.state(),
        "splits": {name: writer.state() for name, writer in writers.items()},
    }


def _index(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    writers: dict[Split, "_Writer"],
    sha256: str,
    held_out: dict[str, Any],
) -> dict[str, Any]:
    documents = sum(writer.documents for writer in writers.values())
    for name, writer in writers.items():
        if writer.tokens < 2:
            raise InputError(
                f"{corpus.name}: too small: of {documents} document(s) nothing is left for {name}; give more text"
            )
    splits = {
        name: {
            "documents": writer.documents,
            "bytes": writer.bytes,
            "tokens": writer.tokens,
            "shards": [shard._asdict() for shard in writer.shards],
        }
        for name, writer in writers.items()
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "dtype": _dtype(tokenizer),
        "vocab_size": vocabulary(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": splits,
        "facts": {
            "source": corpus.name,
            **corpus.facts,
            "sha256": sha256,
            "documents": documents,
            "bytes": sum(writer.bytes for writer in writers.values()),
            "tokens": sum(writer.tokens for writer in writers.values()),
            "train_tokens": writers["train"].tokens,
            "validation_tokens": writers["validation"].tokens,
            **held_out,
            "vocab_size": vocabulary(tokenizer),
        },
    }


class _Writer:
    """Appends the documents of one split to its shards. With `state`, goes on where `state()` was taken."""

    def __init__(
        self, folder: Path, split: Split, dtype: np.dtype, shard_tokens: int, state: dict[str, Any] | None = None
    ):
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, shard_tokens
        self.shards: list[Shard] = []
        self.documents = self.bytes = self.tokens = 0
        self._pieces: list[np.ndarray] = []
        self._waiting = 0
        self._hash = hashlib.sha256()
        self._in_shard = 0
        self._unsynced: set[Path] = set()
        if state is not None:
            self.shards = [Shard(**shard) for shard in state["shards"]]
            self.documents, self.bytes, self.tokens = state["documents"], state["bytes"], state["tokens"]
            self._in_shard = state["in_shard"]
            self._take_up(state["sha256"])

    def add(self, piece: _Piece) -> None:
        self._pieces.append(piece.ids)
        self._waiting += len(piece.ids)
        self.documents += 1
        self.bytes += piece.bytes
        self.tokens += len(piece.ids)
        if self._waiting >= ENCODE_TEXT:
            self._write()

    def close(self) -> None:
        self._write()
        if self._in_shard:
            self._end_shard()

    def state(self) -> dict[str, Any]:
        """What is on the disk, and will still be after a power cut."""
        self._write()
        for path in self._unsynced:
            sync(path)
        self._unsynced = set()
        return {
            "documents": self.documents,
            "bytes": self.bytes,
            "tokens": self.tokens,
            "shards": [shard._asdict() for shard in self.shards],
            "in_shard": self._in_shard,
            "sha256": self._hash.hexdigest(),
        }

    def _take_up(self, sha256: str) -> None:
        """Cut off what was written after the state was taken. Raises InputError where something before it is gone."""
        for shard in self.shards:
            path = self.folder / shard.file
            if not path.is_file() or path.stat().st_size != shard.tokens * self.dtype.itemsize:
                raise _torn(path)
        path, size = self._path(), self._in_shard * self.dtype.itemsize
        if size:
            if not path.is_file() or path.stat().st_size < size:
                raise _torn(path)
            os.truncate(path, size)
            with path.open("rb") as file:
                while chunk := file.read(16 * 2**20):
                    self._hash.update(chunk)
            if self._hash.hexdigest() != sha256:
                raise _torn(path)
        for later in self.folder.glob(f"{self.split}-*.bin"):
            if later.name > path.name or (later == path and not size):
                later.unlink()

    def _write(self) -> None:
        if not self._pieces:
            return
        tokens = np.concatenate(self._pieces)
        self._pieces, self._waiting = [], 0
        while len(tokens):
            part, tokens = np.split(tokens, [self.shard_tokens - self._in_shard])
            with self._path().open("ab") as file:
                file.write(part)
            self._unsynced.add(self._path())
            self._hash.update(part)
            self._in_shard += len(part)
            if self._in_shard == self.shard_tokens:
                self._end_shard()

    def _end_shard(self) -> None:
        self.shards.append(Shard(self._path().name, self._in_shard, self._hash.hexdigest()))
        self._hash, self._in_shard = hashlib.sha256(), 0

    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"


def _torn(path: Path) -> InputError:
    return InputError(
        f"{path}: what an unfinished preparation wrote was changed or is gone; remove {path.parent} to begin anew"
    )


class _Staging:
    """The folder that is written, until it becomes `out`. `saved` is what progress.json says, None without one."""

    def __init__(self, out: Path, folder: Path, lock: int | None, plan: dict[str, Any], saved: dict[str, Any] | None):
        self.out, self.folder, self.lock, self.plan, self.saved = out, folder, lock, plan, saved

    @property
    def tokens(self) -> int:
        """How many tokens `saved` keeps."""
        return sum(split["tokens"] for split in self.saved["splits"].values()) if self.saved else 0

    def save(self, state: dict[str, Any]) -> None:
        state = state | {"tokenizer_sha256": tokenizer_hash(self.folder / "tokenizer")}
        write_text(self.folder / PROGRESS, json.dumps({"plan": self.plan, **state}))
        self.saved = state

    def kept(self) -> str:
        if self.saved is None:
            return "nothing was kept, prepare the data again"
        return f"{self.tokens:,} tokens are kept in {self.folder}: the same command goes on from there"


@contextmanager
def _appearing(out: Path, plan: dict[str, Any]) -> Iterator[_Staging]:
    """A folder to write into, which becomes `out` if all goes well. Otherwise it stays if it holds saved progress."""
    try:
        staging = _claim(out, plan)
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise InputError(f"{out}: cannot be made here: {error.strerror}; give another folder") from None
    except OSError as error:
        raise RunError(f"{out}: writing failed: {error.strerror}") from error
    try:
        yield staging
        for path in staging.folder.rglob("*"):
            if path.is_file():
                sync(path)
        os.replace(staging.folder, out)
        (out / PROGRESS).unlink(missing_ok=True)
        staging.saved = None
        sync(out.parent)
    except OSError as error:
        raise RunError(f"{out}: writing failed: {error.strerror}; {staging.kept()}") from error
    except (InputError, RunError) as error:
        if staging.saved is None:
            raise
        raise type(error)(f"{error}; {staging.kept()}") from error
    except KeyboardInterrupt:
        if staging.saved is not None:
            _say(staging.kept(), True)
        raise
    finally:
        if staging.saved is None:
            shutil.rmtree(staging.folder, ignore_errors=True)
        if staging.lock is not None:
            os.close(staging.lock)


def _claim(out: Path, plan: dict[str, Any]) -> _Staging:
    """What a preparation with this plan left when it was ended, or a new folder. Clears away what cannot go on."""
    prefix = f".{out.name}.preparing-"
    out.parent.mkdir(parents=True, exist_ok=True)
    found = None
    for folder in sorted(path for path in out.parent.iterdir() if path.name.startswith(prefix)):
        lock = _lock(folder)
        if lock is None:
            continue  # another process is at work there
        try:
            saved = _read_progress(folder)
            if saved is not None and found is None:
                _compare_plans(out, folder, saved.pop("plan"), plan)
                found = _Staging(out, folder, lock, plan, saved)
                lock = None
            elif saved is None:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            if lock is not None:
                os.close(lock)
    if found is not None:
        return found
    folder = out.with_name(prefix + secrets.token_hex(4))
    folder.mkdir()
    return _Staging(out, folder, _lock(folder), plan, None)


def _read_progress(folder: Path) -> dict[str, Any] | None:
    path = folder / PROGRESS
    try:
        saved = json.loads(path.read_bytes())
        for key in ("plan", "reader", "sha256", "size", "split", "splits", "tokenizer_sha256"):
            saved[key]
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _torn(path) from error
    return saved


def _compare_plans(out: Path, folder: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    differing = [key for key in here | there if there.get(key) != here.get(key)]
    if differing:
        what = ", ".join(f"{key} {there.get(key)} there, {here.get(key)} here" for key in differing)
        raise InputError(
            f"{out}: an unfinished preparation in {folder} has other settings or another text ({what}); give those to "
            "go on, or remove that folder"
        )


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


def _leading(texts: Iterable[str], size: int) -> Iterator[str]:
    """The first texts, until they have `size` bytes."""
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return


def _watched(documents: Iterable[Document], advance: Callable[[int], None]) -> Iterator[Document]:
    for document in documents:
        yield document
        advance(document.size)


def _size(count: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _say(message: str, progress: bool) -> None:
    if progress:
        print(f"prepare: {message}", file=sys.stderr, flush=True)


@contextmanager
def _bar(title: str, total: int, done: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Progress with the time left, in bytes of text: a bar on a terminal with `rich`, else a line from time to time.

    Yields how to advance it. `total` is 0 where it is not known.
    """
    if not progress:
        yield lambda size: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        drawn = sys.stderr.isatty()
    except ModuleNotFoundError:
        drawn = False
    if not drawn:
        yield _lines(title, total, done)
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total or None, completed=done)
        yield lambda size: bar.advance(task, size)
        bar.update(task, completed=total)


def _lines(title: str, total: int, done: int) -> Callable[[int], None]:
    begun = said = time.monotonic()
    before = done

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        now = time.monotonic()
        if now - said < REPORT_SECONDS:
            return
        said = now
        speed = (done - before) / (now - begun)
        of_all = f" of {_size(total)} ({done / total:.1%})" if total else ""
        left = f", {_duration((total - done) / speed)} left" if total > done and speed else ""
        _say(f"{title}: {_size(done)} of text{of_all}, {_size(speed)}/s{left}", True)

    return advance


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
