"""The options of a scheme: parsed from text, and checked against the types and ranges that its dataclass declares.

A type with a range is one of those below, such as `Count`, or `Annotated[int, Range(...)]`.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

from residua.errors import did_you_mean, fits, types_of, words


@dataclass(frozen=True)
class Range:
    """The values that an option may have: in words, and as a function that says whether it may have a value."""

    words: str
    holds: Callable[[Any], bool]


def at_most(limit: int) -> Range:
    """A limit far beyond any trained model, so that no typing error fills the memory or loops for hours."""
    return Range(f"at most {limit}", lambda x: x <= limit)


Natural = Annotated[int, Range("0 or more", lambda x: x >= 0)]
Count = Annotated[int, Range("at least 1", lambda x: x >= 1)]
Rows = Annotated[Count, at_most(256)]
SeveralRows = Annotated[int, Range("at least 2", lambda x: x >= 2), at_most(256)]
Taps = Annotated[Count, at_most(1024)]
Steps = Annotated[Count, at_most(1000)]
Finite = Annotated[float, Range("a finite number", math.isfinite)]
Positive = Annotated[float, Range("a positive number", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Range("0 or more", lambda x: 0 <= x < math.inf)]
Beta = Annotated[float, Range("a number in [0, 2]", lambda x: 0 <= x <= 2)]
Factor = Annotated[
    float, Range("a finite number other than 0, which would stop the gradient", lambda x: math.isfinite(x) and x != 0)
]


def named(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "name" or "name:option=value,option=value" into the name and the options.

    A value is read as JSON if possible, otherwise as text: 4, 0.5, true, null, token. Raises ValueError for any other
    form.
    """
    name, colon, listed = text.partition(":")
    options = {}
    for part in listed.split(",") if colon else []:
        option, equals, value = part.partition("=")
        if not equals or not option:
            raise ValueError(f"{text} must be NAME:OPTION=VALUE,OPTION=VALUE, got {part!r}")
        if option in options:
            raise ValueError(f"{text} must have every option once, got {option} twice")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return name, options


def check_options(kind: type, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of the `options` whose value is not of the type that the class `kind` declares, or
    outside its range. None is inside every range.
    """
    hints = types_of(kind)
    for name, value in options.items():
        wrong = [] if fits(value, hints[name]) else [words(hints[name])]
        if not wrong and value is not None:
            wrong = [allowed.words for allowed in _ranges(kind)[name] if not allowed.holds(value)]
        if wrong:
            raise ValueError(f"{kind.__name__}: {name} must be {wrong[0]}, got {value!r}")


@functools.cache
def _ranges(kind: type) -> dict[str, list[Range]]:
    """Return the ranges that a class declares, by the names of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: [part for part in _parts(hint) if isinstance(part, Range)] for name, hint in hints.items()}


def _parts(hint: Any) -> list[Any]:
    """Return the arguments of a type, which the ranges are among, and the arguments of these."""
    return [*get_args(hint), *(part for argument in get_args(hint) for part in _parts(argument))]


def require_option(scheme: Any, name: str, condition: bool, expected: str) -> None:
    """Raise ValueError unless `condition` holds: the field `name` of `scheme`, the text `expected`, and its value."""
    if not condition:
        raise ValueError(f"{type(scheme).__name__}: {name} must be {expected}, got {getattr(scheme, name)!r}")


def expect_used(scheme: Any, uses: dict[str, tuple[bool, str]]) -> None:
    """Raise ValueError for an option that is set but has no effect, because the user expects one.

    uses: for an option, whether it has an effect given the other options, and the condition in words.
    """
    for field in fields(scheme):
        used, when = uses.get(field.name, (True, ""))
        require_option(
            scheme, field.name, used or getattr(scheme, field.name) == field.default, f"{field.default!r} unless {when}"
        )


def nearest(name: str, choices: list[str]) -> str:
    """Return the end of an error message that suggests the likeliest of `choices` and lists them all."""
    quoted = {choice: repr(choice) for choice in choices}
    return f"{did_you_mean(name, choices, show=quoted, cutoff=0.5)} (known: {', '.join(choices)})"
