"""The options of a scheme: parsed from text, and checked against the types that its dataclass declares."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from residua.errors import did_you_mean, fits, types_of, words


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


LARGEST = {
    **dict.fromkeys(("num_streams", "num_fractions", "value_channels"), 256),
    **dict.fromkeys(("compress_kernel", "expand_kernel"), 1024),
    **dict.fromkeys(("iterations", "steps"), 1000),
}
"""Far beyond any trained model, and small enough that no typing error fills the memory or loops for hours."""


def check_types(scheme: Any) -> None:
    """Raise ValueError for the first field of the dataclass `scheme` whose value is not of the declared type, or larger
    than `LARGEST` has it.
    """
    options = {field.name: getattr(scheme, field.name) for field in fields(scheme)}
    check_options(type(scheme), options)
    for name in LARGEST.keys() & options.keys():
        require_option(scheme, name, (options[name] or 0) <= LARGEST[name], f"at most {LARGEST[name]}")


def check_options(kind: type, options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first of the `options` whose value is not of the type that the class `kind` declares."""
    hints = types_of(kind)
    for name, value in options.items():
        if not fits(value, hints[name]):
            raise ValueError(f"{kind.__name__}: {name} must be {words(hints[name])}, got {value!r}")


def require_option(scheme: Any, name: str, condition: bool, expected: str) -> None:
    """Raise ValueError unless `condition` holds: the field `name` of `scheme`, the text `expected`, and its value."""
    if not condition:
        raise ValueError(f"{type(scheme).__name__}: {name} must be {expected}, got {getattr(scheme, name)!r}")


def require_factor(scheme: Any, name: str) -> None:
    """Raise ValueError unless the field `name` of `scheme` is a number that passes on a gradient when multiplied."""
    value = getattr(scheme, name)
    usable = math.isfinite(value) and value != 0
    require_option(scheme, name, usable, "a finite number other than 0, which would stop the gradient")


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
