"""Describe a scheme in words and numbers: its docstring, the values of its options, its state and its parameters."""

import re
from dataclasses import fields
from functools import cache

import torch

from residua.connections.base import Scheme
from residua.connections.schemes.residual import Residual
from residua.docstrings import docstring
from residua.errors import ranges_of, types_of, words

SHARED = {  # an option that several schemes have, its meaning, and that of each value
    "start": (
        "how the connections begin",
        {
            "published": "as the paper, or its public code, begins",
            "residual": "exactly as x + F(x)",
            "mirrored": "as x + F(x) in the mean of the streams, which differ from the start",
            "prefer": "each sublayer reads one stream more than the others, by weights that sum to 1.24",
            "average": "compressors average the channels, and gates are `beta_init` for every token",
            "authors": "as the authors' first code draws compressors and gates",
            "rewrite": 'as their current code does; its models have `output_init="depth"` too',
        },
    ),
    "expand": (
        "how the embedding becomes the state",
        {
            "repeat": "each channel or stream is the embedding",
            "conv": "each is a causal convolution of it over the tokens",
            "smear": "the embedding plus a gated copy of that of the token before",
            "lss": "each is the embedding times learned gains, from noise around 0.6",
            "gains": "the same, from 1",
        },
    ),
    "head": (
        "how the state becomes the output, the readout",
        {
            "sum": "the sum of the streams",
            "mean": "their mean",
            "sigmoid": "weights of its own, from all streams",
            "gated": "a gated read of its own, normalised",
            "norms": "the sum of both streams, each normalised",
            "stream": "the sum of the normalised stream and the plain one",
        },
    ),
}

PAPER_SIZES = {"small": (768, 24), "medium": (1024, 48)}
"""Width and sublayers of the models of arXiv 2601.00417. `residua.models.SIZES` has more, and needs transformers."""


def state(scheme: Scheme) -> str:
    """Return the numbers per token at both ends of 24 sublayers, in units of the width: "4d", or "d to 25d"."""
    rows = dict.fromkeys(scheme.state_size(boundary, 768) // 768 for boundary in (0, 24))
    return " to ".join(f"{count}d" if count > 1 else "d" for count in rows)


def added(scheme: Scheme) -> dict[str, int]:
    """Count the parameters beyond the plain residual in models of the paper's sizes, "small" and "medium"."""
    return {size: _parameters(scheme, size) - _parameters(Residual(), size) for size in PAPER_SIZES}


@cache
def _parameters(scheme: Scheme, size: str) -> int:
    with torch.device("meta"):
        stream = scheme.build(*PAPER_SIZES[size])
    return sum(parameter.numel() for parameter in stream.parameters())


def about(kind: type[Scheme]) -> list[str]:
    """Return the paragraphs of the docstring of `kind` that explain it, without the list of its options."""
    options = meanings(kind)
    paragraphs = docstring(kind).split("\n\n")
    return [text for text in paragraphs if text.split(maxsplit=1)[0].strip(",") not in options]


def meaning(kind: type[Scheme], option: str) -> str:
    """Return the text on an option in the docstring of `kind` or of the nearest base class that has one, else ""."""
    texts = (meanings(base) for base in kind.__mro__ if issubclass(base, Scheme))
    return next((text[option] for text in texts if option in text), "")


def meanings(kind: type[Scheme]) -> dict[str, str]:
    """Return the text on each option that has its own line in the docstring of `kind`."""
    options = "|".join(field.name for field in fields(kind)) or "(?!)"
    pattern = rf"(?m)^((?:{options})(?:, (?:{options}))*) +(\S.*(?:\n +\S.*)*)"
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
