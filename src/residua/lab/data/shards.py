"""Tokens on disk: `PreparedData` opens a folder that `prepare` wrote, `Tokens` reads from it.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

try:
    import resource
except ModuleNotFoundError:  # Windows
    resource = None  # type: ignore[assignment]

from residua.errors import Count, InputError, Natural, check_types, extra, fits, require
from residua.files.durable import file_sha256
from residua.files.reading import inside, read_json
from residua.files.tensors import undamaged
from residua.lab.data.split import Split
from residua.lab.data.tokenizer import saved_tokenizer, tokenizer_hash, vocabulary

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast

FORMAT = "residua tokens"
DATA_VERSION = 1
TOKEN_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
VERIFY_ON_OPEN = 64_000_000
"""The largest total size of shards, in bytes, for which `PreparedData.open` also verifies their content."""
MAPPED_SHARDS = 256
"""The largest number of a split's shards that are mapped at a time; each needs a file descriptor."""


@dataclass(frozen=True)
class Shard:
    """A file in the folder, the number of its tokens, and the sha256 of its content."""

    file: str
    tokens: Count
    sha256: str

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class SplitFiles:
    """The files of a split: the numbers of documents, bytes of text and tokens, and the complete shards."""

    documents: Natural = 0
    bytes: Natural = 0
    tokens: Natural = 0
    shards: tuple[Shard, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "SplitFiles":
        """Return a split from its entry in a JSON file."""
        return cls(**entry | {"shards": tuple(Shard(**shard) for shard in entry["shards"])})


class Tokens:
    """The token ids of one split, in shards that are mapped into memory.

    `len(tokens)` is their number; `tokens.window(start, length)` returns consecutive ids as an int64 array.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype, vocab_size: int | None = None):
        self.folder = folder
        self.vocab_size = vocab_size
        self.shards = tuple(shards)
        self.dtype = dtype
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self._mapped: dict[int, np.memmap] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def window(self, start: int, length: int) -> np.ndarray:
        """Return the ids of tokens start, ..., start + length - 1, across shards.

        Raises IndexError beyond the ends, and InputError for a token beyond the vocabulary.
        """
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"a window must lie within tokens 0 to {len(self)}, got {start} to {start + length}")
        window = np.empty(length, dtype=np.int64)
        number = bisect.bisect_right(self._starts, start) - 1
        position = 0
        while position < length:
            offset = start + position - self._starts[number]
            part = self._shard(number)[offset : offset + length - position]
            window[position : position + len(part)] = part
            position += len(part)
            number += 1
        if self.vocab_size is not None and length and window.max() >= self.vocab_size:
            expected = f"tokens below {self.vocab_size}, the size of its vocabulary"
            raise InputError(f"{self.folder} must hold {expected}, got {window.max()}; prepare the data again")
        return window

    def _shard(self, number: int) -> np.memmap:
        if number not in self._mapped:
            while len(self._mapped) >= _most_mapped():
                self._mapped.pop(next(iter(self._mapped)))
            self._mapped[number] = np.memmap(self.folder / self.shards[number].file, self.dtype, "r")
        return self._mapped[number]


def _most_mapped() -> int:
    """Return MAPPED_SHARDS, or an eighth of the process's limit of open files if this is less."""
    if resource is None:
        return MAPPED_SHARDS
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAPPED_SHARDS if files < 0 else max(1, min(MAPPED_SHARDS, files // 8))


@dataclass(frozen=True)
class PreparedData:
    """A folder that `prepare` wrote.

    vocab_size, eos_token_id: of the tokenizer. fingerprint: a sha256 over everything that determines the tokens;
    training on folders with equal fingerprints gives equal models. facts: describe the data in the records of a run,
    with the fingerprints of tokens and tokenizer. validation_bytes: the length of the validation text in UTF-8, for
    bits per byte.
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
        """Open a prepared folder after checking it.

        The content of shards is verified if they have up to `VERIFY_ON_OPEN` bytes, otherwise only their size. Raises
        InputError if a file is missing, truncated, edited or of another format.
        """
        folder = Path(folder)
        place = Path(os.path.abspath(folder))  # shards are opened later, when the working directory may be another one
        with undamaged(folder / "index.json", "an index of prepared data", "prepare the data again"):
            index = _read_index(folder)
            vocab_size, eos_token_id = index["vocab_size"], index["eos_token_id"]
            splits = read_splits(folder / "index.json", index["splits"])
            _check_counts(folder / "index.json", vocab_size, eos_token_id, splits)
            tokenizer = None
            with suppress(OSError):
                tokenizer = tokenizer_hash(folder / "tokenizer")
            if tokenizer != index["tokenizer_sha256"]:
                raise InputError(f"{folder}: tokenizer/ is gone or did not make the tokens; prepare the data again")

            content = [DATA_VERSION, index["dtype"], vocab_size, eos_token_id, tokenizer]
            content += [[name, [[x.tokens, x.sha256] for x in split.shards]] for name, split in splits.items()]
            fingerprints = {
                "fingerprint": _fingerprint(content),
                "tokenizer_fingerprint": _fingerprint([vocab_size, eos_token_id, tokenizer]),
            }
            data = cls(
                folder=folder,
                vocab_size=vocab_size,
                eos_token_id=eos_token_id,
                fingerprint=fingerprints["fingerprint"],
                facts=index["facts"] | fingerprints,
                train=Tokens(place, splits["train"].shards, TOKEN_DTYPES[index["dtype"]], vocab_size),
                validation=Tokens(place, splits["validation"].shards, TOKEN_DTYPES[index["dtype"]], vocab_size),
                validation_bytes=splits["validation"].bytes,
            )
        files = data._files()
        for path, _, size in files:
            actual = path.stat().st_size if path.is_file() else None
            if actual != size:
                raise InputError(f"{path} must have {size} bytes, got {actual}; prepare the data again")
        if sum(size for _, _, size in files) <= VERIFY_ON_OPEN:
            data.verify()
        return data

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Return the tokenizer that made the tokens. Raises InputError if index.json has another vocabulary."""
        tokenizer = saved_tokenizer(self.folder / "tokenizer")
        made, said = (vocabulary(tokenizer), tokenizer.eos_token_id), (self.vocab_size, self.eos_token_id)
        expected = f"those of its tokenizer, {list(made)}"
        require(made == said, f"{self.folder / 'index.json'}: vocab_size and eos_token_id", expected, said)
        return tokenizer

    def verify(self) -> None:
        """Verify the content of every shard. Raises InputError if a sha256 differs."""
        for path, sha256, _ in self._files():
            if file_sha256(path) != sha256:
                raise InputError(
                    f"{path} was edited or damaged: its sha256 is not the one in index.json; prepare the data again"
                )

    def _files(self) -> list[tuple[Path, str, int]]:
        """Return path, sha256 and size in bytes of each shard."""
        return [
            (inside(self.folder, shard.file), shard.sha256, shard.tokens * tokens.dtype.itemsize)
            for tokens in (self.train, self.validation)
            for shard in tokens.shards
        ]


def read_splits(path: Path, entries: Mapping[str, Any]) -> dict[Split, SplitFiles]:
    """Return the splits described in a JSON file. Raises InputError, with `path`, for an invalid value."""
    try:
        return {split: SplitFiles.read(entries[split]) for split in get_args(Split)}
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _check_counts(path: Path, vocab_size: Any, eos_token_id: Any, splits: Mapping[Split, SplitFiles]) -> None:
    """Raise InputError if the numbers in index.json are impossible or contradict each other."""
    require(fits(vocab_size, int) and vocab_size >= 1, f"{path}: vocab_size", "at least 1", vocab_size)
    known = fits(eos_token_id, int) and 0 <= eos_token_id < vocab_size
    require(known, f"{path}: eos_token_id", "a token of the vocabulary", eos_token_id)
    for name, split in splits.items():
        in_shards = sum(shard.tokens for shard in split.shards)
        whole = split.tokens == in_shards >= 2 and 1 <= split.documents <= split.tokens and split.bytes >= 1
        counts = {"documents": split.documents, "bytes": split.bytes, "tokens": split.tokens}
        require(whole, f"{path}: {name}", f"documents, bytes and {in_shards} tokens, those of its shards", counts)


def _fingerprint(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    index = read_json(path) if path.exists() else None
    if isinstance(index, dict) and (index.get("format"), index.get("version")) == (FORMAT, DATA_VERSION):
        return index
    found = "" if folder.is_dir() else ", found a file" if folder.exists() else ", found no such folder"
    raise InputError(
        f"{folder} must hold prepared data, with an index.json of format {DATA_VERSION}{found}; run `residua prepare`"
    )
