"""Exit statuses, types of options and checks of paths that several commands share."""

import sys
from contextlib import suppress
from pathlib import Path
from typing import Literal

from residua.errors import InputError, Natural
from residua.lab.records.terminal import one_line

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses. After a signal, the status is 128 plus the number of the signal, as in shells."""
CheckpointChoice = Natural | Literal["best"]


def expect_path(path: str, expected: str = "a run folder or a folder with a transformers model") -> None:
    """Raise InputError for a path that does not exist, before slow imports."""
    if not Path(path).exists():
        raise InputError(f"{path} must be {expected}, found no such file or folder")


LONGEST_MESSAGE = 4000
"""The longest error message that is shown, in characters; a message may quote a file."""


def _cut(line: str) -> str:
    """Cut the middle out of a long line, because the remedy is at its end."""
    half = LONGEST_MESSAGE // 2
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:half]} ... {line[-half:]}"


def fail(error: object, status: int) -> int:
    """Print one line on stderr, if it is open; return `status`."""
    with suppress(OSError):  # stderr may be closed
        print(f"residua: {_cut(one_line(error))}", file=sys.stderr, flush=True)
    return status
