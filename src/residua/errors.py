"""The errors that the command line prints as one line, and the checks of values from outside that raise them."""

import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")

_LAB = {
    *("datasets", "filelock", "huggingface_hub", "matplotlib", "numpy", "plotly", "pyarrow", "rich", "safetensors"),
    *("scipy", "tensorboard", "tokenizers", "transformers", "yaml"),
}
PACKAGES = {"lab": _LAB, "eval": _LAB | {"lm_eval", "accelerate"}, "completion": {"shtab"}}
"""The packages of each extra, by the names that are imported."""


class InputError(ValueError):
    """The user's input cannot be used. The message says what must be, what it got and what to do. Exit status 2."""


class RunError(RuntimeError):
    """Something failed while running on good input. The message says what failed and what was kept. Exit status 1."""


class Diverged(RunError):
    """A loss or a gradient is not finite."""


class ReportedElsewhere(Exception):
    """Another process of the same job reports the error. This one ends silently, with the same exit `status`."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def first_line(error: BaseException) -> str:
    """Return the first line with text of an error's message, or the name of its class if it has none."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import optional packages of the extra `name` in this context.

    Raises:
        ModuleNotFoundError: a package is missing; if the extra brings it, the message has the command that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in PACKAGES[name]:
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed; it comes with: pip install 'residua[{name}]'", name=error.name
        ) from error


LONGEST = 300
"""Characters of a wrong value that an error shows."""


def require(condition: bool, name: str, expected: str, got: Any) -> None:
    """Raise InputError for the value `got` of `name` unless `condition` holds."""
    if not condition:
        raise InputError(f"{name} must be {expected}, got {shown(got)}")


def shown(value: Any) -> str:
    """Return the repr of a value as an error shows it, cut if it is long. A tuple is shown as the list of a file."""
    text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def did_you_mean(
    name: object, choices: Iterable[str], *, show: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """Return "; did you mean X?" with the nearest of the `choices`, or "" if none is near.

    `show` gives the text to show for each name in place of the name.
    """
    close = get_close_matches(str(name), list(choices), n=1, cutoff=cutoff)
    if not close:
        return ""
    return f"; did you mean {close[0] if show is None else show[close[0]]}?"


def decoded(document: Any, kind: type[T], where: str = "") -> T:
    """Return the dataclass `kind` with the values of a mapping from a YAML or JSON file.

    `kind` checks its values itself, with `check_types` and `require`, and names its fields alone; `where` is the dotted
    key of the mapping, which errors put before them. A list becomes a tuple where that is the field's type.

    Raises:
        InputError: it is not a mapping, a key is unknown or missing, or `kind` refuses a value.
    """
    require(isinstance(document, Mapping), where or "the document", "a mapping of keys to values", document)
    prefix = f"{where}." if where else ""
    items = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]  # every `kind` is a dataclass
    for name in document:
        if name not in items:
            raise InputError(f"unknown key {prefix}{name}{did_you_mean(name, items)}")
    for name, item in items.items():
        required = item.default is MISSING and item.default_factory is MISSING
        require(not required or name in document, f"{prefix}{name}", words(types_of(kind)[name]), None)
    try:
        return kind(**{name: _tuples(value, types_of(kind)[name]) for name, value in document.items()})
    except InputError as error:
        raise InputError(f"{prefix}{error}") from error


def _tuples(value: Any, declared: Any) -> Any:
    """Return a list, and those in it, as tuples where the declared type has tuples."""
    kind = next((option for option in (declared, *get_args(declared)) if get_origin(option) is tuple), None)
    if kind is None or not isinstance(value, list):
        return value
    return tuple(_tuples(item, get_args(kind)[0]) for item in value)


def check_types(values: Any, kind: type | None = None) -> None:
    """Raise InputError for the first field of a dataclass whose value is not of the type that its class, or the base
    class `kind`, declares."""
    for name, declared in types_of(kind or type(values)).items():
        value = getattr(values, name)
        require(fits(value, declared), name, words(declared), value)


def require_all(values: Any, names: Iterable[str], accepts: Callable[[Any], bool], expected: str) -> None:
    """Raise InputError for the first attribute out of `names` whose value is not accepted."""
    for name in names:
        value = getattr(values, name)
        require(accepts(value), name, expected, value)


types_of = functools.cache(get_type_hints)
"""The declared types of a class by the names of its fields, read once: a study makes thousands of configurations."""


def fits(value: Any, declared: Any) -> bool:
    """Return whether `value` is of the declared type. An int is a float too; a bool is neither.

    Of types with parameters only those of a tuple count. Any value fits a type that is not a class, as a `TypeVar`.
    """
    if get_origin(declared) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(declared))
    if get_origin(declared) in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(declared))
    if declared is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if declared is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(declared) is tuple:
        items = get_args(declared)
        if not isinstance(value, tuple):
            return False
        items = items[:1] * len(value) if items[1:] == (...,) else items
        return len(value) == len(items) and all(map(fits, value, items))
    plain = get_origin(declared) or declared
    return plain is Any or not isinstance(plain, type) or isinstance(value, plain)


def words(declared: Any) -> str:
    """Return a type in words, as a configuration file has it: "a whole number or null"."""
    if get_origin(declared) is Literal:
        return f"one of {', '.join(map(str, get_args(declared)))}"
    if get_origin(declared) in (Union, types.UnionType):
        return " or ".join(map(words, get_args(declared)))
    if get_origin(declared) is tuple:
        item, *others = get_args(declared)
        return f"a list, each item {words(item)}" if others == [...] else f"a list of {1 + len(others)} items"
    plain = get_origin(declared) or declared
    return _WORDS.get(plain, getattr(plain, "__name__", str(plain)))


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    Mapping: "a mapping",
    list: "a list",
    type(None): "null",
}
