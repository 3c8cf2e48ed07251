"""JSON lines: files with one JSON object per line, written so that a kill can tear only the last line."""

import errno
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from residua.errors import InputError, fits, refusal, require, shown, types_of
from residua.files.durable import sync, unlinked, write_bytes
from residua.files.reading import parse_json, regular
from residua.lab.records.folder import writable

LONGEST_LINE = 2**26
"""The longest line that is read, in bytes."""
OVERFLOWS = 2.0**128
"""A finite measured number must be smaller: means are taken of them, and it is the first that no float32 holds."""


def read(path: str | Path) -> list[dict[str, Any]]:
    """Read the objects in a file, in order; [] if the file does not exist.

    A last line without a newline was torn by a kill, or is being written. It is skipped unless it is a complete object.

    Raises:
        InputError: any other line is not a JSON object, or the file cannot be read.
    """
    return [row for _, row in _lines(Path(path))]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a run, in the order of their steps: each has its step, and numbers or null under other names.

    A perplexity that overflows, as earlier versions wrote it for a loss above 88 nats, is read as null.

    Raises:
        InputError: a row has no step, a smaller step than the row before, or a value of another type; or `read` raises
            this error.
    """
    rows, before = read(path), 0
    for row in rows:
        step = step_of(row, path)
        require(step >= before, f"{path}: step", f"at least {before}, that of the row before", step)
        before = step
        for name, value in row.items():
            require(fits(value, float | None), f"{path}: {name}", "a number or null", value)
            small = value is None or not OVERFLOWS <= abs(value) < math.inf
            if not small and name.endswith("perplexity"):
                row[name] = None
                continue
            require(small, f"{path}: {name}", "below 2^128, as a larger number overflows in a mean", value)
    return rows


def step_of(row: Mapping[str, Any], path: str | Path) -> int:
    """Return the step of a row of a run. Raises InputError if the row has none; path: the file, for the message."""
    step = row.get("step")
    require(fits(step, int) and fits(step, float), f"{path}: step", "a whole number in each row", step)
    return int(step or 0)


def is_number(value: Any) -> bool:
    """Return whether a value is a number that fits into a float32. Larger ones would overflow in means."""
    return fits(value, float) and abs(value) < OVERFLOWS


def is_plain(value: Any) -> bool:
    """Return whether a JSON value is neither a list nor an object. Such a value can be a key."""
    return not isinstance(value, list | dict)


def expect_fields(row: Mapping[str, Any], path: str | Path, kind: type, row_name: Any) -> None:
    """Raise InputError for the first value of a row that does not fit its field in `kind`, a TypedDict.

    row_name: what the message calls the row.
    """
    for name in types_of(kind):
        if name in row and (wrong := refusal(kind, name, row[name])):
            raise InputError(f"{path}: {name} of {shown(row_name)} {wrong}")


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    for number, written in enumerate(_written_lines(path), start=1):
        line = written.removesuffix(b"\n")
        try:
            value = parse_json(line.decode(), path)
        except ValueError:
            value = None
        if isinstance(value, dict):
            yield line, value
        elif line != written or not _is_torn(line):
            text = line[:40].decode(errors="replace")
            raise InputError(f"{path} must have a JSON object in line {number}, got {text!r}")


def _is_torn(line: bytes) -> bool:
    """Return whether a last line may be the beginning of one that we write, which has no carriage return in it."""
    return line.lstrip(b"\0")[:1] in (b"{", b"") and b"\r" not in line and len(line) <= LONGEST_LINE


def _written_lines(path: Path) -> Iterator[bytes]:
    try:
        with regular(path).open("rb") as file:
            while line := file.readline(LONGEST_LINE + 1):
                yield line
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"{path} cannot be read as JSON lines: {error.strerror or error}") from error


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, because JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _without_waiting(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)
    if hasattr(os, "set_blocking") and os.name != "nt":
        os.set_blocking(descriptor, True)
    return descriptor


class JsonLines(AbstractContextManager):
    """A file of JSON lines to append to; a context manager. rows: the rows that the file had when it was opened.

    Opening removes a torn last line, and every row for which `keep` is false. A file with several hard links, as in
    copies that `cp -al` makes, is replaced by a copy, because appending would change the others.

    Raises:
        InputError: a line is not a JSON object, or the file is a link or cannot be written.
    """

    def __init__(self, path: str | Path, *, keep: Callable[[dict[str, Any]], bool] = lambda row: True):
        self.path = unlinked(Path(path))
        self.rows: list[dict[str, Any]] = []
        with writable(path, "a file to append to"):
            if self.path.is_file():  # a pipe or a terminal cannot be read first
                lines = [(line, row) for line, row in _lines(self.path) if keep(row)]
                self.rows = [row for _, row in lines]
                before = self.path.stat()
                if before.st_nlink > 1 or before.st_size != sum(len(line) + 1 for line, _ in lines):
                    write_bytes(self.path, b"".join(line + b"\n" for line, _ in lines))
            # Unbuffered, so that closing does not repeat a failed write. Opening a pipe must not wait for its reader.
            self._file = open(self.path, "ab", buffering=0, opener=_without_waiting)  # noqa: SIM115  # as long as self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; numbers that are not finite become null. After an OSError no part of the row is in the file."""
        remaining = (json.dumps(finite(row), allow_nan=False) + "\n").encode()
        opened = os.fstat(self._file.fileno())
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            if stat.S_ISREG(opened.st_mode):
                os.ftruncate(self._file.fileno(), opened.st_size)
            error.filename = str(self.path)
            raise

    def sync(self) -> None:
        """Wait until the rows are on disk. Raises OSError, also if the file or its folder was moved or deleted."""
        opened = os.fstat(self._file.fileno())
        if stat.S_ISREG(opened.st_mode):
            os.fsync(self._file.fileno())
            if not self.path.is_file() or not os.path.samestat(opened, self.path.stat()):
                raise OSError(
                    errno.ESTALE, "the file that was begun is gone: moved, deleted or replaced", str(self.path)
                )
            sync(self.path.parent)
