"""The options of a scheme: parsed from text, and checked against the types and ranges that its dataclass declares."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

from residua.errors import Count, Range, at_most, refusal, types_of

Rows = Annotated[Count, at_most(256)]
SeveralRows = Annotated[int, Range("at least 2", lambda x: x >= 2), at_most(256)]
Taps = Annotated[Count, at_most(1024)]
Steps = Annotated[Count, at_most(1000)]
DIVIDES_WIDTH = Range("a divisor of the width", lambda count: True)  # `Scheme.build` knows the width, and checks it
Divisor = Annotated[Count, DIVIDES_WIDTH]
Beta = Annotated[float, Range("a number in [0, 2]", lambda x: 0 <= x <= 2)]
Fraction = Annotated[float, Range("a number above 0 and below 1", lambda x: 0 < x < 1)]
Factor = Annotated[
    float, Range("a finite number other than 0, which would stop the gradient", lambda x: math.isfinite(x) and x != 0)
]


def named(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "name" or "name:option=value,option=value" into the name and the options.

    A value is read as JSON if possible, otherwise as text: 4, 0.5, true, null, token. Raises ValueError for any other
    form.
    """
    name, colon, given = text.partition(":")
    options = {}
    for part in listed(given) if colon else []:
        option, equals, value = part.partition("=")
        if not equals or not option:
            raise ValueError(f"{text} must be NAME:OPTION=VALUE,OPTION=VALUE, got {part!r}")
        if option in options:
            raise ValueError(f"{text} must have every option once, got {option} twice")
        options[option] = parsed(value)
    return name, options


def listed(options: str) -> list[str]:
    """Return the parts of "option=value,option=value". A comma in brackets separates none."""
    return re.split(r",(?![^\[]*\])", options)


def parsed(value: Any) -> Any:
    """Parse text as JSON if possible; return other text, and values that are not text, unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


@dataclass(frozen=True)
class OnlyIf:
    """The condition under which an option has an effect: in words, and as a predicate on the scheme.

    `Annotated[int, OnlyIf(...)]` declares it. An option that is set but has no effect is refused, because the user
    expects an effect.
    """

    words: str
    holds: Callable[[Any], bool]


def only_with(**options: Any) -> OnlyIf:
    """Return the condition that each option in `options` has the given value, or one of a tuple of values."""
    choices = {name: value if isinstance(value, tuple) else (value,) for name, value in options.items()}
    words = (f"{name} is {' or '.join(map(repr, values))}" for name, values in choices.items())
    return OnlyIf(
        " and ".join(words), lambda scheme: all(getattr(scheme, name) in values for name, values in choices.items())
    )


def check_options(scheme: Any) -> None:
    """Raise ValueError for an option outside its declared type and range, or set without effect."""
    kind: type = type(scheme)
    values = {field.name: getattr(scheme, field.name) for field in fields(scheme)}
    for name, value in values.items():
        if wrong := refusal(kind, name, value):
            raise ValueError(f"{kind.__name__}: {name} {wrong}")
    for field in fields(scheme):
        for condition in _conditions(kind, field.name):
            if values[field.name] != field.default:
                expected = f"{field.default!r} unless {condition.words}"
                require_option(scheme, field.name, condition.holds(scheme), expected)


def has_effect(scheme: Any, name: str) -> bool:
    """Return whether an option has an effect with the other options of `scheme`."""
    return all(condition.holds(scheme) for condition in _conditions(type(scheme), name))


def _conditions(kind: type, name: str) -> list[OnlyIf]:
    declared = types_of(kind, include_extras=True)[name]
    return [part for part in getattr(declared, "__metadata__", ()) if isinstance(part, OnlyIf)]


def require_option(scheme: Any, name: str, condition: bool, expected: str) -> None:
    """Raise ValueError unless `condition` holds: "SCHEME: NAME must be EXPECTED, got VALUE"."""
    if not condition:
        raise ValueError(f"{type(scheme).__name__}: {name} must be {expected}, got {getattr(scheme, name)!r}")
