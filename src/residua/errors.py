"""The errors that the command line prints as one line, and the checks of user input that raise them."""

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_LAB = {
    *("datasets", "filelock", "huggingface_hub", "matplotlib", "numpy", "plotly", "pyarrow", "rich", "safetensors"),
    *("scipy", "tensorboard", "tokenizers", "transformers", "yaml"),
}
PACKAGES = {
    "lab": _LAB,
    "eval": _LAB | {"lm_eval", "accelerate"},
    "slurm": _LAB | {"submitit"},
    "vllm": _LAB | {"vllm"},
}
"""The packages of each extra, by the names that are imported."""


class NotInstalled(ModuleNotFoundError):
    """An optional package is not installed. The message has the command that installs it. Exit status 1."""


class InputError(ValueError):
    """The user's input is invalid. The message gives the requirement, the value and the remedy. Exit status 2."""


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
    """Return the first non-empty line of an error's message, or the name of its class if the message is empty."""
    return next(filter(str.strip, str(error).splitlines()), type(error).__name__)


@contextmanager
def without_panics() -> Iterator[None]:
    """Turn a panic of a library in Rust, such as tokenizers, into a ValueError: it is no Exception."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(first_line(error)) from error


def installing(name: str) -> str:
    """Return the command that installs the extra `name`, and where to run it: no index has residua yet."""
    return f'pip install ".[{name}]" in a clone of residua'


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Wrap imports of optional packages: if one of them is missing, name the extra `name`, which installs it.

    Raises:
        NotInstalled: a package of this extra is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if isinstance(error, NotInstalled) or error.name not in PACKAGES[name]:
            raise
        raise NotInstalled(
            f"{error.name} is not installed; it comes with: {installing(name)}", name=error.name
        ) from error


LONGEST = 300
"""The largest number of characters of a wrong value that an error shows."""


def require(condition: bool, name: str, expected: str, got: Any) -> None:
    """Raise InputError for the value `got` of `name` unless `condition` holds."""
    if not condition:
        raise InputError(f"{name} must be {expected}, got {shown(got)}")


def shown(value: Any) -> str:
    """Return the repr of a value in one line, cut if it is long. A tuple is shown as a list, as in a file."""
    text = " ".join(map(str.strip, repr(list(value) if isinstance(value, tuple) else value).split("\n")))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def did_you_mean(
    name: object, choices: Iterable[str], *, show: Mapping[str, str] | None = None, cutoff: float = 0.6
) -> str:
    """Return "; did you mean X?" with the nearest of the `choices`, or "" if none is near.

    `show` gives the text to show for each name in place of the name.
    """
    name = str(name).replace("learning_rate", "lr")  # the name in most other libraries
    close = get_close_matches(name, list(choices), n=1, cutoff=cutoff)
    if not close:
        return ""
    return f"; did you mean {close[0] if show is None else show[close[0]]}?"


def keywords(function: Function) -> Function:
    """Decorate a function without `**`: the error for an unknown keyword then names the nearest keyword, or all."""
    known = list(inspect.signature(function).parameters)
    listed = f"; it takes {', '.join(name for name in known if name != 'self')}"
    if "connection" in known:
        listed += "; an option of the scheme goes with its name, as in 'ddl-tc:beta_init=0.5'"

    @functools.wraps(function)
    def checked(*arguments: Any, **named: Any) -> Any:
        for name in named.keys() - known:
            hint = did_you_mean(name, known) or listed
            raise TypeError(f"{function.__name__} takes no argument {name!r}{hint}")
        return function(*arguments, **named)

    return checked  # type: ignore[return-value]


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return a value of a YAML or JSON file that must be a mapping. Raises InputError."""
    require(isinstance(value, Mapping), name, "a mapping of keys to values", value)
    return value


def decoded(document: Any, kind: type[T], where: str = "") -> T:
    """Return the dataclass `kind` with the values of a mapping from a YAML or JSON file.

    `kind` checks its own values, with `check_types` and `require`; its errors name only the field. `where` is the
    dotted key of the mapping in the file, which is put before the field in errors. A list becomes a tuple if the field
    is a tuple.

    Raises:
        InputError: `document` is not a mapping, a key is unknown or missing, or `kind` refuses a value.
    """
    document = mapping(document, where or "the document")
    prefix = f"{where}." if where else ""
    names = [item.name for item in fields(kind)]  # type: ignore[arg-type]  # every `kind` is a dataclass
    for name in document:
        if name not in names:
            raise InputError(f"unknown key {prefix}{name}{did_you_mean(name, names)}")
    for name in _needed(kind):
        declared = types_of(kind)[name]
        expected = f"a mapping with {', '.join(_needed(declared))}" if is_dataclass(declared) else words(declared)
        require(name in document, f"{prefix}{name}", expected, None)
    try:
        return kind(**{name: _tuples(value, types_of(kind)[name]) for name, value in document.items()})
    except InputError as error:
        raise InputError(f"{prefix}{error}") from error


def _needed(kind: Any) -> list[str]:
    """Return the fields of a dataclass without a default."""
    return [item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING]


def _tuples(value: Any, declared: Any) -> Any:
    """Convert a list, and the lists inside it, to tuples if the declared type has tuples there."""
    kind = next((option for option in (declared, *get_args(declared)) if get_origin(option) is tuple), None)
    if kind is None or not isinstance(value, list):
        return value
    return tuple(_tuples(item, get_args(kind)[0]) for item in value)


def check_types(values: Any, kind: type | None = None) -> None:
    """Raise InputError for the first field of a dataclass whose value has the wrong type or is outside its range.

    kind: the base class that declares the fields to check, with their types and ranges; None for the class itself.
    """
    kind = kind or type(values)
    for name in types_of(kind):
        value = getattr(values, name)
        if wrong := refusal(kind, name, value):
            raise InputError(f"{name} {wrong}")


def refusal(kind: type, name: str, value: Any) -> str | None:
    """Return why the class `kind` refuses a value for its field `name`: "must be at least 1, got 0"; None if it fits.

    A range is declared as `Annotated[int, Range(...)]`, or by one of the types below. None is inside every range.
    """
    declared = types_of(kind)[name]
    expected = [] if fits(value, declared) else [words(declared)]
    if not expected and value is not None:
        expected = [allowed.words for allowed in ranges_of(kind)[name] if not allowed.holds(value)]
    return f"must be {expected[0]}, got {shown(value)}" if expected else None


@dataclass(frozen=True)
class Range:
    """The range of a field: in words, and as a function that returns whether a value is inside."""

    words: str
    holds: Callable[[Any], bool]


def at_most(limit: int) -> Range:
    """Return an upper bound on a size. Set it far above any real model: it only keeps a typo from exhausting memory."""
    return Range(f"at most {limit}", lambda x: x <= limit)


def between(low: int, high: int) -> Range:
    return Range(f"a whole number from {low} to {high}", lambda value: low <= value <= high)


# Larger numbers do not fit into a tensor; the largest do not even fit into a float.
Natural = Annotated[int, Range("0 or more", lambda x: x >= 0), at_most(2**63 - 1)]
Count = Annotated[int, Range("at least 1", lambda x: x >= 1)]
Finite = Annotated[float, Range("a finite number", math.isfinite)]
Positive = Annotated[float, Range("a positive number", lambda x: 0 < x < math.inf)]
NotNegative = Annotated[float, Range("0 or more", lambda x: 0 <= x < math.inf)]
Share = Annotated[float, Range("a number in [0, 1]", lambda x: 0 <= x <= 1)]


@functools.cache
def ranges_of(kind: type) -> dict[str, list[Range]]:
    """Return the ranges that a class declares, by the names of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: [part for part in _parts(hint) if isinstance(part, Range)] for name, hint in hints.items()}


def _parts(hint: Any) -> list[Any]:
    """Return all arguments of a type at any depth; ranges are among them."""
    return [*get_args(hint), *(part for argument in get_args(hint) for part in _parts(argument))]


types_of = functools.cache(get_type_hints)
"""Return the declared types of a class by field name. Cached, because a study makes thousands of configurations."""


def fits(value: Any, declared: Any) -> bool:
    """Return whether `value` is of the declared type.

    An int also counts as a float, if torch takes it. A bool counts as neither. Type parameters are ignored, except
    those of `tuple`. Any value fits a type that is not a class, such as a `TypeVar`.
    """
    if get_origin(declared) is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(declared))
    if get_origin(declared) in (Union, types.UnionType):
        return any(fits(value, option) for option in get_args(declared))
    if get_origin(declared) is Annotated:
        return fits(value, get_args(declared)[0])
    if declared is float:
        return isinstance(value, float) or (fits(value, int) and abs(value) < 2**63)
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
        choices = get_args(declared)
        return f"{'one of ' * (len(choices) > 1)}{', '.join(map(str, choices))}"
    if get_origin(declared) in (Union, types.UnionType):
        return " or ".join(map(words, get_args(declared)))
    if get_origin(declared) is Annotated:
        return words(get_args(declared)[0])
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
