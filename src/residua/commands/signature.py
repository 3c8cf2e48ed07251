"""The options and the help of a command, read from the signature and the docstring of its function.

Parameters before `*` are arguments, the others are options: `batch_size: int = 8` is `--batch-size N`. A bool is a
switch, a tuple takes several values, and a parameter whose type is a dataclass stands for the fields of the class. A
function in the metadata of a field's type yields the options in its place. A function that returns an `Output` has
`--json` too.

The sections of the docstring are the groups of `--help`, with one entry each: "name (METAVAR): text". Examples stand
first. What stands under "Rarely:" is for `--help-all`.
"""

import argparse
import inspect
import json
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from residua.errors import InputError, Range, did_you_mean, shown
from residua.records.table import print_table

HELP = {"-h", "--help", "--help-all"}
RARELY = "Rarely"
METAVARS = {int: "N", float: "X", str: "NAME"}


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of ending the process, and suggests a name for a misspelt option."""

    def __init__(self, prog: str, description: str, usage: str = ""):
        wide = shutil.get_terminal_size().columns - 2
        super().__init__(
            prog=prog,
            usage=usage.replace("%", "%%"),
            description=description,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=wide),
            allow_abbrev=False,
            add_help=False,
        )

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        for argument in args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse would return a list as this value
                self.error(f"argument {argument[:-3]} must have a value, got --")
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"^argument (\S+): must", r"\1 must", message)
        message = re.sub(r"^argument (\S+): expected (?:at least )?one argument", r"\1 must have a value", message)
        raise InputError(f"{message}; see {self.prog} --help")

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {shown(argument)}")
        option = argument.partition("=")[0]
        names = {name: name for name in self._option_string_actions}
        # `--lr` for `--train.lr`
        names = {f"--{name.rpartition('.')[2]}": name for name in names if "." in name} | names
        self.error(f"unknown option {option}{did_you_mean(option, names, show=names)}")


class Output(NamedTuple):
    """What a command prints: the value for --json, else texts and tables, which are a header and rows."""

    value: Any
    parts: Iterable[Any]

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print(json.dumps(self.value, indent=2, ensure_ascii=False, allow_nan=False))
            return
        for part in self.parts:
            print(part) if isinstance(part, str) else print_table(*part)


class Entry(NamedTuple):
    """The text on a parameter in a docstring, and the title of its section."""

    group: str
    metavar: str
    text: str
    rare: bool = False


class Option(NamedTuple):
    """A parameter of a function, or a field of a dataclass that a parameter stands for."""

    name: str
    kind: Any
    default: Any
    positional: bool
    entry: Entry
    override: bool = False
    """Whether the parameter `overrides` takes its values, as texts --name=value."""

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def flag(self) -> str:
        """The option's name: `--no-peak` for a switch that is on unless this is given."""
        name = self.name if self.override else self.name.replace("_", "-")
        return f"--{'no-' * (self.default is True)}{name}"

    @property
    def metavar(self) -> str:
        item, _ = _item(self.kind)
        plain = get_args(item)[0] if get_origin(item) is Annotated else item
        choices = get_args(plain) if get_origin(plain) is Literal else ()
        return self.entry.metavar or "|".join(choices) or METAVARS.get(plain, "NAME")

    @property
    def usage(self) -> str:
        _, several = _item(self.kind)
        values = f"{self.metavar}{' ...' * several}"
        if not self.positional:
            return f"{self.flag} {values}"
        return values if self.required else f"[{values}]"

    @property
    def help(self) -> str:
        """The text, with the default unless it is a switch's, empty or in the text."""
        text, default = self.entry.text, self.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if not (self.required or default is None or isinstance(default, bool) or default == "" or "(default" in text):
            text += f" (default: {default})"
        return text.replace("%", "%%")


JSON = Option("json", bool, False, False, Entry("Args", "", "print JSON instead of text"))


def run_function(prog: str, function: Callable[..., Any], argv: list[str]) -> Any:
    """Call a function with the arguments of a command line, or print its help; return an exit status, None for 0."""
    parser = command_parser(prog, function, everything="--help-all" in argv)
    if HELP.intersection(argv):
        print(parser.format_help(), end="")
        return 0
    return call(function, parser.parse_args(argv))


def command_parser(prog: str, function: Callable[..., Any], *, everything: bool = False) -> Parser:
    """Return the parser of a function. Its help leaves out what is rare unless `everything` is asked for."""
    options = list(_options(function))
    needed = [option.usage for option in options if option.positional or option.required]
    parser = Parser(prog, _description(function), " ".join([prog, *needed, "[options]"]))
    groups: dict[str, Any] = {}
    for option in options:
        title = option.entry.group
        if title not in groups:
            groups[title] = parser.add_argument_group("options" if title == "Args" else title.lower())
        _add(groups[title], option, hide=option.entry.rare and not everything)
    hidden = sum(option.entry.rare for option in options)
    parser.epilog = f"{prog} --help-all shows {hidden} more" if hidden and not everything else None
    return parser


def call(function: Callable[..., Any], arguments: argparse.Namespace) -> Any:
    """Call a function with the values that its parser has read, and its own defaults for the others. Print its output;
    return any other result."""
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(arguments).items()}
    hints = get_type_hints(function)
    as_json = given.get("json", False) if "json" in hints else given.pop("json", False)
    for name, kind in hints.items():
        if is_dataclass(kind):
            given[name] = kind(**{item.name: given.pop(item.name) for item in fields(kind) if item.name in given})
    result = function(**given)
    if isinstance(result, Output):
        result.print(as_json=as_json)
        return None
    return result


def summary(documented: Any) -> str:
    """Return the first sentence of a docstring, without its period."""
    return inspect.cleandoc(documented.__doc__).partition("\n")[0].rstrip(".")


def examples(function: Callable[..., Any]) -> str:
    return _sections(function)["Examples"]


def _description(function: Callable[..., Any]) -> str:
    wide = shutil.get_terminal_size().columns - 2
    paragraphs = [textwrap.fill(" ".join(text.split()), wide) for text in _sections(function)[""].split("\n\n")]
    return "\n\n".join([*paragraphs, f"examples:\n{textwrap.indent(examples(function), '  ')}"])


def _sections(documented: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles, "" for what stands before the first."""
    start, *rest = re.split(r"(?m)^([A-Z].*):\n(?=    )", inspect.cleandoc(documented.__doc__ or ""))
    return {"": start.strip()} | {title: textwrap.dedent(text).strip() for title, text in zip(rest[::2], rest[1::2])}


def _entries(documented: Any) -> dict[str, Entry]:
    pattern = re.compile(r"(?m)^(\w+)(?: \((.+?)\))?: (.*(?:\n +.*)*)")
    return {
        name: Entry(title, metavar, " ".join(text.split()), title == RARELY)
        for title, section in _sections(documented).items()
        for name, metavar, text in pattern.findall(section)
    }


def _options(function: Callable[..., Any]) -> Iterator[Option]:
    hints, entries = get_type_hints(function, include_extras=True), _entries(function)
    for name, parameter in inspect.signature(function).parameters.items():
        if is_dataclass(hints[name]):
            yield from _fields(hints[name])
        else:
            positional = parameter.kind is not parameter.KEYWORD_ONLY
            yield Option(name, hints[name], parameter.default, positional, entries[name])
    returned = hints.get("return")
    if "json" not in hints and Output in (returned, *get_args(returned)):
        yield JSON


def _fields(kind: Any) -> Iterator[Option]:
    hints = get_type_hints(kind, include_extras=True)
    entries = {name: entry for base in reversed(kind.__mro__) for name, entry in _entries(base).items()}
    for item in fields(kind):
        options = _metadata(hints[item.name], Callable)
        if options:
            yield from options[0]()
        else:
            yield Option(item.name, hints[item.name], item.default, False, entries[item.name])


def _add(group: Any, option: Option, *, hide: bool) -> None:
    item, several = _item(option.kind)
    settings: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS if hide else option.help}
    if option.override:
        settings |= {"type": f"{option.flag}={{}}".format, "metavar": option.metavar}
        group.add_argument(option.flag, dest="overrides", action="append", **settings)
        return
    if item is bool:
        action = "store_false" if option.default is True else "store_true"
        group.add_argument(option.flag, dest=option.name, action=action, **settings)
        return
    settings |= {"type": lambda text: _value(text, item), "metavar": option.metavar}
    if option.positional:
        nargs = ("+" if option.required else "*") if several else None if option.required else "?"
        group.add_argument(option.name, nargs=nargs, **settings)
        return
    settings |= {"action": "extend", "nargs": "+"} if several else {}
    group.add_argument(option.flag, dest=option.name, required=option.required, **settings)


def _value(text: str, kind: Any) -> Any:
    try:
        return read(text, kind)
    except ValueError as error:
        expected, value = error.args
        raise argparse.ArgumentTypeError(f"must be {expected}, got {shown(value)}") from None


def read(text: str, kind: Any) -> Any:
    """Return the value of a type that a text stands for. Raises ValueError of what it must be and what it is."""
    if get_origin(kind) is Annotated:
        value = read(text, get_args(kind)[0])
        for allowed in _metadata(kind, Range):
            if not allowed.holds(value):
                raise ValueError(allowed.words, value)
        return value
    if get_origin(kind) in (Union, UnionType):
        expected = []
        for option in get_args(kind):
            try:
                return read(text, option)
            except ValueError as error:
                expected.append(error.args[0])
        raise ValueError(" or ".join(expected), text)
    if kind is int:
        with suppress(ValueError):  # also for more digits than Python converts
            if -(2**63) <= int(text) < 2**63:
                return int(text)
        raise ValueError("a whole number of at most 64 bits", text)
    if kind is float:
        with suppress(ValueError):
            if math.isfinite(float(text)):
                return float(text)
        raise ValueError("a finite number", text)
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            raise ValueError(f"one of {', '.join(choices)}" if choices[1:] else choices[0], text)
        return text
    return kind(text)


def _item(kind: Any) -> tuple[Any, bool]:
    """Return a type without None, the type of the items for that of a tuple, and whether it is a tuple's."""
    if get_origin(kind) in (Union, UnionType):
        rest = tuple(option for option in get_args(kind) if option is not NoneType)
        kind = Union[rest]  # noqa: UP007  # of one type it is this type
    if get_origin(kind) is tuple:
        return get_args(kind)[0], True
    return kind, False


def _metadata(kind: Any, wanted: Any) -> list[Any]:
    return [part for part in getattr(kind, "__metadata__", ()) if isinstance(part, wanted)]
