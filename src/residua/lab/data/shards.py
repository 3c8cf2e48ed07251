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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, get_args

from residua.errors import InputError, extra
from residua.lab.data.split import Split
from residua.lab.data.tokenizer import saved_tokenizer, tokenizer_hash
from residua.records.durable import file_sha256
from residua.records.reading import read_json
from residua.records.tensors import undamaged

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedTokenizerFast

FORMAT = "residua tokens"
VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
VERIFY_ON_OPEN = 64_000_000
"""Bytes of shards up to which `PreparedData.open` also verifies their content."""
MAPPED_SHARDS = 256
"""The most shards that are mapped at a time; each has a file descriptor."""


@dataclass(frozen=True)
class Shard:
    """A file in the folder, the number of its tokens, and the sha256 of its content."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class SplitFiles:
    """The documents of a split, the bytes of their text, their tokens, and the whole shards of these."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    shards: tuple[Shard, ...] = ()

    @classmethod
    def read(cls, entry: dict[str, Any]) -> "SplitFiles":
        """Return a split from its entry in a JSON file."""
        return cls(**entry | {"shards": tuple(Shard(**shard) for shard in entry["shards"])})


class Tokens:
    """The token ids of one split, in shards that are mapped into memory.

    `len(tokens)` is their number, `tokens.window(start, length)` an int64 array of consecutive ones.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], dtype: np.dtype):
        self.folder = folder
        self.shards = tuple(shards)
        self.dtype = dtype
        self._starts = [0, *accumulate(shard.tokens for shard in self.shards)]
        self._mapped: dict[int, np.memmap] = {}

    def __len__(self) -> int:
        return self._starts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_mapped": {}}

    def window(self, start: int, length: int) -> np.ndarray:
        """Return the ids of tokens start, ..., start + length - 1, across shards. Raises IndexError beyond the ends."""
        if not 0 <= start <= start + length <= len(self):
            raise IndexError(f"tokens {start} to {start + length} of {len(self)}")
        window = np.empty(length, dtype=np.int64)
        number = bisect.bisect_right(self._starts, start) - 1
        position = 0
        while position < length:
            offset = start + position - self._starts[number]
            part = self._shard(number)[offset : offset + length - position]
            window[position : position + len(part)] = part
            position += len(part)
            number += 1
        return window

    def _shard(self, number: int) -> np.memmap:
        if number not in self._mapped:
            if len(self._mapped) == MAPPED_SHARDS:
                self._mapped.pop(next(iter(self._mapped)))
            self._mapped[number] = np.memmap(self.folder / self.shards[number].file, self.dtype, "r")
        return self._mapped[number]


@dataclass(frozen=True)
class PreparedData:
    """A folder that `prepare` wrote.

    `vocab_size` and `eos_token_id` are the tokenizer's. `fingerprint` is a sha256 over everything that determines the
    tokens: training on two folders with the same fingerprint gives the same model. `facts` describe the data in the
    records of a run, with the fingerprints of tokens and tokenizer. `validation_bytes` is the length of the validation
    text in UTF-8, for bits per byte.
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

        Raises InputError if a file is missing, cut, edited or of another format.
        """
        folder = Path(folder)
        with undamaged(folder / "index.json", "an index of prepared data", "prepare the data again"):
            index = _read_index(folder)
            vocab_size, eos_token_id = index["vocab_size"], index["eos_token_id"]
            splits = {split: SplitFiles.read(index["splits"][split]) for split in get_args(Split)}
            tokenizer = None
            with suppress(OSError):
                tokenizer = tokenizer_hash(folder / "tokenizer")
            if tokenizer != index["tokenizer_sha256"]:
                raise InputError(f"{folder}: tokenizer/ is gone or did not make the tokens; prepare the data again")

            content = [VERSION, index["dtype"], vocab_size, eos_token_id, tokenizer]
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
                train=Tokens(folder, splits["train"].shards, DTYPES[index["dtype"]]),
                validation=Tokens(folder, splits["validation"].shards, DTYPES[index["dtype"]]),
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
        return saved_tokenizer(self.folder / "tokenizer")

    def verify(self) -> None:
        """Read every shard. Raises InputError if a sha256 is wrong."""
        for path, sha256, _ in self._files():
            if file_sha256(path) != sha256:
                raise InputError(
                    f"{path} was edited or damaged, its sha256 is not the one in index.json; prepare the data again"
                )

    def _files(self) -> list[tuple[Path, str, int]]:
        """Return the shards: path, sha256 and bytes of each."""
        return [
            (self.folder / shard.file, shard.sha256, shard.tokens * tokens.dtype.itemsize)
            for tokens in (self.train, self.validation)
            for shard in tokens.shards
        ]


def _fingerprint(content: list[Any]) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / "index.json"
    index = read_json(path) if path.exists() else None
    if isinstance(index, dict) and (index.get("format"), index.get("version")) == (FORMAT, VERSION):
        return index
    raise InputError(f"{folder} must hold prepared data, with an index.json of format {VERSION}; run `residua prepare`")
