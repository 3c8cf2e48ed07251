"""The process around a command: its streams, Ctrl-C, and what is said of an error."""

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from types import FrameType
from typing import Any

from residua.errors import InputError, RunError
from residua.terminal import Wrapped

EXHAUSTED = ("out of memory", "not enough memory", "can't allocate memory", "size calculation overflow")
"""What torch says of sizes that no machine holds."""
ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that end a command where nothing else takes them, as training does."""


def in_one_line(error: Exception) -> str | None:
    """Return what to tell the user about an error; None for a defect of ours, which deserves its traceback."""
    text = str(error)
    if no_path(error):
        return f"expected a path, got {no_path(error)}"
    if isinstance(error, (InputError, RunError, ModuleNotFoundError, OSError)):
        return text
    if isinstance(error, RecursionError):
        return "expected input with a few levels, got some nested too deeply"
    if isinstance(error, OverflowError):
        return f"expected numbers that the machine can hold, got one too large: {text}"
    exhausted = isinstance(error, RuntimeError) and any(words in text.lower() for words in EXHAUSTED)
    if isinstance(error, MemoryError) or exhausted:
        reason = text.partition("\n")[0].rpartition("DefaultCPUAllocator: ")[2] or "none is left"
        return f"not enough memory: {reason}; use smaller sizes"
    return None


def no_path(error: Exception) -> str | None:
    """Return what is wrong with a path that cannot be used, for the error that it caused; None for other errors."""
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "one too long"
    loop = isinstance(error, OSError) and error.errno == errno.ELOOP
    if loop or (isinstance(error, RuntimeError) and str(error).startswith("Symlink loop")):  # before Python 3.13
        return f"a link that leads to itself: {error}"
    if isinstance(error, (FileExistsError, NotADirectoryError)) and error.filename is not None:
        return f"the file {error.filename} in the place of a folder"
    return "one with a zero byte" if isinstance(error, ValueError) and "embedded null" in str(error) else None


def replace_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr the null device in their place: files opened
    later would take their numbers and receive what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def discard_output() -> None:
    """Send what a stream still holds nowhere if it cannot be written: Python would complain when it closes it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def _discard(stream: Any) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def lasting_messages() -> AbstractContextManager:
    """Let standard error, in the context that this returns, go nowhere once it cannot be written, as after a lost
    terminal or the end of `2>&1 | head`: nobody reads the messages, and the work goes on.
    """
    return redirect_stderr(_Messages(sys.stderr))  # type: ignore[type-var]


class _Messages(Wrapped):
    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            _discard(self._stream)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _discard(self._stream)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yield a list that receives the number of each signal out of `ENDING`, which raises KeyboardInterrupt: commands
    clean up. Extension modules, and what they leave half imported, turn it into errors of their own.
    """
    seen: list[int] = []
    owner = os.getpid()

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a fork, which ends as if nobody had asked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        seen.append(number)
        raise KeyboardInterrupt

    before = {}
    if threading.current_thread() is threading.main_thread():
        known = (getattr(signal, name) for name in ENDING if hasattr(signal, name))
        handlers = {number: signal.getsignal(number) for number in known}
        defaults = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: handler for number, handler in handlers.items() if handler in defaults}
    for number in before:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
