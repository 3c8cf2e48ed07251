"""Describe a scheme in words and numbers: its docstring, the values of its options, its state and its parameters."""

import re
from dataclasses import fields
from functools import cache

import torch

from residua.connections.base import Scheme
from residua.connections.schemes.residual import Residual
from residua.docstrings import docstring
from residua.errors import ranges_of, types_of, words

PAPER_SIZES = {"small": (768, 24), "medium": (1024, 48)}
"""Width and number of sublayers of the models in arXiv 2601.00417. `residua.models.SIZES` has more, but needs
transformers."""


def state(scheme: Scheme) -> str:
    """Return the size of the state per token before and after 24 sublayers, in widths d: "4d", or "d to 25d"."""
    rows = dict.fromkeys(scheme.state_size(boundary, 768) // 768 for boundary in (0, 24))
    return " to ".join(f"{count}d" if count > 1 else "d" for count in rows)


def added(scheme: Scheme) -> dict[str, int]:
    """Return how many parameters a scheme adds to the plain residual at each of the `PAPER_SIZES`."""
    return {size: _parameters(scheme, size) - _parameters(Residual(), size) for size in PAPER_SIZES}


@cache
def _parameters(scheme: Scheme, size: str) -> int:
    with torch.device("meta"):
        stream = scheme.build(*PAPER_SIZES[size])
    return sum(parameter.numel() for parameter in stream.parameters())


def about(kind: type[Scheme]) -> list[str]:
    """Return the paragraphs of the docstring of `kind` that explain it, without the list of options."""
    options = meanings(kind)
    paragraphs = docstring(kind).split("\n\n")
    return [text for text in paragraphs if text.split(maxsplit=1)[0].strip(",") not in options]


def meaning(kind: type[Scheme], option: str) -> str:
    """Return the text on an option from the docstring of `kind` or of its nearest base class that has one, or ""."""
    texts = (meanings(base) for base in kind.__mro__ if issubclass(base, Scheme))
    return next((text[option] for text in texts if option in text), "")


def meanings(kind: type[Scheme]) -> dict[str, str]:
    """Map each option that the docstring of `kind` lists to its text, which follows the name after two spaces."""
    options = "|".join(field.name for field in fields(kind)) or "(?!)"
    pattern = rf"(?m)^((?:{options})(?:, (?:{options}))*) {{2,}}(\S.*(?:\n +\S.*)*)"
    lines = re.findall(pattern, docstring(kind))
    return {name: " ".join(text.split()) for names, text in lines for name in names.split(", ")}


def values(kind: type[Scheme], option: str) -> str:
    """Return the values of an option in words: its choices, or its types and their ranges."""
    text = words(types_of(kind)[option])
    for allowed in ranges_of(kind)[option]:
        if "number" in allowed.words:
            text = re.sub("a (whole )?number", allowed.words, text)
        else:
            text += f", {allowed.words}"
    return text
