"""Make untrusted text safe to print: control characters could control the terminal, lone surrogates have no UTF-8, and
a spreadsheet computes what looks like a formula."""

import re

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # all control characters but newlines and tabs


def printable(text: object) -> str:
    """Return a text that is safe to print and to write as UTF-8: control characters, except newlines and tabs, and lone
    surrogates, as in names of files that are not UTF-8, are escaped as in \\u001b.

    JSON text stays JSON with the same value.
    """
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", str(text))


def one_line(text: object) -> str:
    """Return a `printable` text in one line: newlines and tabs become spaces."""
    return printable(text).replace("\n", " ").replace("\t", " ")


def markdown_text(text: object) -> str:
    """Return a `printable` text in one line of Markdown that holds no HTML tag and no link."""
    return " ".join(printable(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace("](", "]\\(")


def cell_text(value: object) -> object:
    """Return a value for a CSV cell. A text that a spreadsheet would compute as a formula begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
