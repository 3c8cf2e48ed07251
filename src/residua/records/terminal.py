"""Make foreign text safe to print: control characters could steer a terminal."""

import re
import sys
from contextlib import AbstractContextManager, redirect_stdout
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except newlines and tabs


def printable(text: object) -> str:
    """Return a text that is safe to print: control characters except newlines and tabs appear as \\u001b and the like.

    JSON text stays JSON of the same value.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def one_line(text: object) -> str:
    """Return a `printable` text in one line: newlines and tabs become spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def printable_output() -> AbstractContextManager:
    """Return a context in which standard output shows only `printable` text."""
    return redirect_stdout(_Printable(sys.stdout))


class Wrapped:
    """A stream that forwards to another, except for the methods of a subclass."""

    def __init__(self, stream: Any):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Printable(Wrapped):
    def write(self, text: str) -> int:
        self._stream.write(printable(text))
        return len(text)
