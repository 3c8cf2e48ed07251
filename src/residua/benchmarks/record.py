"""Records of results: one line of JSON for each, appended to a file."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError


def open_records(path: str | Path) -> None:
    """Make sure, before hours are spent on results, that they can be appended to `path`.

    Raises:
        InputError: it cannot be written.
    """
    try:
        Path(path).open("a", encoding="utf-8").close()
    except OSError as error:
        raise InputError(f"{path}: expected a file to append to, got: {error.strerror or error}") from error


def append_records(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append every record to `path` as one line of JSON.

    Raises:
        RunError: it cannot be written.
    """
    lines = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise RunError(f"{path}: the results could not be written: {error.strerror or error}") from error
