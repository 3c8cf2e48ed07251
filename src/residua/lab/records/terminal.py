"""Make untrusted text safe to print, because control characters could control the terminal."""

import re

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all except newlines and tabs


def printable(text: object) -> str:
    """Return a text that is safe to print: control characters, except newlines and tabs, are escaped as in \\u001b.

    JSON text stays JSON with the same value.
    """
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def one_line(text: object) -> str:
    """Return a `printable` text in one line: newlines and tabs become spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")
