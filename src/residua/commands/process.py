"""The process around a command: its streams, its signals, and its message for an error."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr, suppress
from types import FrameType
from typing import Any

from residua.errors import InputError, RunError

EXHAUSTED = ("out of memory", "not enough memory", "can't allocate memory")
"""Parts of torch's messages if memory is exhausted."""
ENDING = ("SIGTERM", "SIGHUP")
"""Signals that end a command as Ctrl-C does, unless other code, such as training, handles them."""
MISPLACED = (
    *(errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS),
)
"""System errors for a path from the user: it is a file where a folder must be, a folder where a file must be, or a name
that no file can have; or no file can be made or read there."""


def is_bad_input(error: Exception) -> bool:
    """Return whether an error is the user's: an InputError, or that of a path."""
    return isinstance(error, InputError) or getattr(error, "errno", None) in MISPLACED or _is_loop(error)


def _is_loop(error: Exception) -> bool:
    """Return whether `Path.resolve` found a link that leads to itself; Python 3.13 has an OSError for it later."""
    return isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from ")


def in_one_line(error: Exception) -> str | None:
    """Return the one-line message for an error; None for a bug in residua, for which the traceback is shown."""
    text = str(error)
    if isinstance(error, FileExistsError) and error.filename and os.path.isfile(error.filename):
        return f"{error.filename} must be a folder, found a file; choose another name"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, (InputError, RunError, ModuleNotFoundError, OSError)) or _is_loop(error):
        return text
    exhausted = isinstance(error, RuntimeError) and any(words in text.lower() for words in EXHAUSTED)
    if isinstance(error, MemoryError) or exhausted:
        reason = text.partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2] or "none is left"
        return f"not enough memory: {reason}; use smaller sizes"
    return None


def discard_output() -> None:
    """Discard the rest of standard output, because Python would print an error when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def lasting_messages() -> AbstractContextManager:
    """Ignore write errors on stderr while the `with` block runs: a closed terminal or pipe must not stop the work."""
    return redirect_stderr(_Messages(sys.stderr))  # type: ignore[type-var]


class _Messages:
    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a signal in `ENDING` while the `with` block runs, so that commands clean up.

    Yield a list that receives the number of the signal.
    """
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    numbers = [getattr(signal, name) for name in ENDING if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, stop)
    try:
        yield received
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
