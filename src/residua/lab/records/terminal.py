"""Make foreign text safe to print: control characters could steer a terminal."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except newlines and tabs


def printable(text: object) -> str:
    """Return a text that is safe to print: control characters except newlines and tabs appear as \\u001b and the like.

    JSON text stays JSON of the same value.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def one_line(text: object) -> str:
    """Return a `printable` text in one line: newlines and tabs become spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")
