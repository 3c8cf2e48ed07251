"""The options and the help of a command, read from the signature and the docstring of its function.

Parameters before `*` are arguments, the others are options: `batch_size: int = 8` is `--batch-size N`. A bool is a
switch, and a tuple takes several values. A parameter whose type is a dataclass is replaced by the fields of the class.
A function in the metadata of a field's type yields the options of this field. A function that returns an `Output` also
has `--json`.

The sections of the docstring are the groups of `--help`. They have one entry for each option: "name (METAVAR): text".
Examples come first. Only `--help-all` shows the entries under "Rarely:".
"""

import argparse
import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, NoReturn, Union, get_args, get_origin, get_type_hints

from residua.docstrings import docstring
from residua.errors import InputError, Range, did_you_mean, fits, ranges_of, shown, types_of, words
from residua.lab.records.table import print_table
from residua.lab.records.terminal import printable

HELP = {"-h", "--help", "--help-all"}
RARELY = "Rarely"
ENTRY = re.compile(r"(?m)^(\w+)(?: \((.+?)\))?: (.*(?:\n +.*)*)")
"""An entry of a docstring: a name, a metavar and a text."""
PLACE = re.compile("DIR|FILE|RUN|MODEL")
"""In the metavar of a path."""
FINITE = Range("a finite number of at most 64 bits", lambda x: not isinstance(x, (int, float)) or abs(x) < 2**63)


class Parser(argparse.ArgumentParser):
    """A parser that raises InputError instead of ending the process, and suggests a name for a misspelt option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        for argument in args:
            option, _, value = argument.partition("=")
            if option.startswith("--") and value == "--":  # argparse would return [] as its value
                self.error(f"argument {option} must have a value, got --")
        for argument in takewhile(lambda argument: argument != "--", args):
            misspelt = argument.startswith("--") and argument.partition("=")[0] not in self._option_string_actions
            if misspelt and " " not in argument:  # argparse would report the correct option as missing
                self._refuse(argument)
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
    """The output of a command: the value to print with --json, and the texts and tables to print otherwise."""

    value: Any
    parts: Iterable[Any]

    def print(self, *, as_json: bool) -> None:
        if as_json:
            print(printable(json.dumps(self.value, indent=2, ensure_ascii=False, allow_nan=False)))
            return
        for part in self.parts:
            print(printable(part)) if isinstance(part, str) else print_table(*part)


class Option(NamedTuple):
    """An argument of the parser: its name or flag, its group in the help, and the settings of `add_argument`.

    usage   the text in the first line of the help; empty for an optional argument
    rare    whether only `--help-all` shows it
    """

    flag: str
    group: str
    settings: dict[str, Any]
    usage: str = ""
    rare: bool = False


def run_function(prog: str, function: Callable[..., Any], argv: list[str]) -> Any:
    """Call a function with the arguments of a command line, or print its help. Return the exit status; None means 0."""
    parser = command_parser(prog, function, everything="--help-all" in argv)
    if HELP.intersection(argv):
        print(parser.format_help(), end="")
        return 0
    return call(function, parser.parse_args(argv))


def command_parser(prog: str, function: Callable[..., Any], *, everything: bool = False) -> Parser:
    """Return the parser of a function. Its help has rare options only if `everything` is set."""
    options = list(_options(function))
    if _prints_json(function):
        options.append(Option("--json", "Args", {"action": "store_true", "help": "print JSON instead of text"}))
    usage = " ".join([prog, *(option.usage for option in options if option.usage), "[options]"])
    wide = max(20, shutil.get_terminal_size().columns - 2)
    parser = Parser(
        prog=prog,
        usage=usage.replace("%", "%%"),
        description=_description(function, wide),
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=30, width=wide),
        allow_abbrev=False,
        add_help=False,
    )
    groups: dict[str, Any] = {}
    for option in options:
        if option.group not in groups:
            title = "options" if option.group == "Args" else option.group.lower()
            groups[option.group] = parser.add_argument_group(title)
        hidden = {"help": argparse.SUPPRESS} if option.rare and not everything else {}
        groups[option.group].add_argument(option.flag, default=argparse.SUPPRESS, **option.settings | hidden)
    rare = sum(option.rare for option in options)
    parser.epilog = f"{prog} --help-all shows {rare} more" if rare and not everything else None
    return parser


def call(function: Callable[..., Any], arguments: argparse.Namespace) -> Any:
    """Call a function with the values that its parser has read, and its own defaults for all others.

    Print the result if it is an `Output`; return any other result.
    """
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(arguments).items()}
    as_json = given.pop("json", False) if _prints_json(function) else given.get("json", False)
    for name, kind in types_of(function).items():
        if is_dataclass(kind):
            given[name] = kind(**{item.name: given.pop(item.name) for item in fields(kind) if item.name in given})
    result = function(**given)
    if isinstance(result, Output):
        result.print(as_json=as_json)
        return None
    return result


def summary(documented: Any) -> str:
    """Return the first sentence of a docstring, without its period."""
    return docstring(documented).partition("\n")[0].rstrip(".")


def examples(function: Callable[..., Any]) -> str:
    return _sections(function)["Examples"]


def _description(function: Callable[..., Any], wide: int) -> str:
    paragraphs = [textwrap.fill(" ".join(text.split()), wide) for text in _sections(function)[""].split("\n\n")]
    return "\n\n".join([*paragraphs, f"examples:\n{textwrap.indent(examples(function), '  ')}"])


def _sections(documented: Any) -> dict[str, str]:
    """Return the sections of a docstring by title; "" is the title of the text before the first section."""
    start, *rest = re.split(r"(?m)^([A-Z].*):\n(?=    )", docstring(documented))
    return {"": start.strip()} | {title: textwrap.dedent(text).strip() for title, text in zip(rest[::2], rest[1::2])}


def _prints_json(function: Callable[..., Any]) -> bool:
    """Return whether a function gets `--json`, because it returns an `Output` and has no such option itself."""
    returned = types_of(function).get("return")
    return "json" not in types_of(function) and Output in (returned, *get_args(returned))


def _options(documented: Any) -> Iterator[Option]:
    """Yield the options of a function, or of the fields of a dataclass."""
    is_class = inspect.isclass(documented)
    entries = {
        name: (title, *entry)
        for part in (reversed(inspect.getmro(documented)) if is_class else [documented])
        for title, section in _sections(part).items()
        for name, *entry in ENTRY.findall(section)
    }
    hints = get_type_hints(documented, include_extras=True)
    for name, parameter in inspect.signature(documented).parameters.items():
        kind = types_of(documented)[name]
        given = [part for part in getattr(hints[name], "__metadata__", ()) if callable(part)]
        if is_dataclass(kind):
            yield from _options(kind)
        elif given:
            yield from given[0]()
        else:
            positional = not is_class and parameter.kind is not parameter.KEYWORD_ONLY
            yield _option(name, kind, parameter.default, entries[name], ranges_of(documented)[name], positional)


def _option(
    name: str, kind: Any, default: Any, entry: tuple[str, str, str], ranges: list[Range], positional: bool
) -> Option:
    """Return the option for a parameter. entry: its section, metavar and text in the docstring."""
    group, metavar, text = entry
    if get_origin(kind) in (Union, UnionType):
        rest = tuple(option for option in get_args(kind) if option is not NoneType)
        kind = Union[rest]  # noqa: UP007  # the union of a single type is this type
    required, several, rare = default is inspect.Parameter.empty, get_origin(kind) is tuple, group == RARELY
    settings: dict[str, Any] = {"help": _help(text, default)}
    if kind is bool:
        flag = f"--{'no-' * default}{name.replace('_', '-')}"
        settings |= {"dest": name, "action": "store_false" if default else "store_true"}
        return Option(flag, group, settings, rare=rare)
    item = get_args(kind)[0] if several else kind
    metavar = metavar or metavar_of(item)
    place = PLACE.search(metavar) is not None
    settings |= {"type": lambda text: read(_place(text) if place else text, item, ranges), "metavar": metavar}
    usage = f"{metavar}{' ...' * several}"
    if positional:
        settings["nargs"] = ("+" if required else "*") if several else None if required else "?"
        return Option(name, group, settings, usage if required else f"[{usage}]", rare)
    flag = f"--{name.replace('_', '-')}"
    settings |= {"dest": name, "required": required} | ({"action": "extend", "nargs": "+"} if several else {})
    return Option(flag, group, settings, f"{flag} {usage}" * required, rare)


def _help(text: str, default: Any) -> str:
    """Return the help text with the default, except for a switch, an empty default, or one that is in the text."""
    text = " ".join(text.split()).replace("%", "%%")
    if default in (inspect.Parameter.empty, None, "", ()) or isinstance(default, bool) or "(default" in text:
        return text
    return f"{text} (default: {' '.join(map(str, default)) if isinstance(default, tuple) else default})"


def _place(text: str) -> str:
    """Return the text of a path. Raises ArgumentTypeError if it is empty, which would be the working directory."""
    if not text:
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return text


def read(text: str, kind: Any, ranges: Sequence[Range] = ()) -> Any:
    """Parse the text of an argument. Raises ArgumentTypeError if it has the wrong type or is outside a range."""
    if text in choices(kind):
        return text
    for convert in (float, int, Path, str):
        with suppress(ValueError):
            value = convert(text)
            if fits(value, kind):
                break
    else:
        raise argparse.ArgumentTypeError(f"must be {words(kind)}, got {shown(text)}")
    for allowed in (FINITE, *ranges):
        if not allowed.holds(value):
            raise argparse.ArgumentTypeError(f"must be {allowed.words}, got {shown(value)}")
    return value


def choices(kind: Any) -> list[str]:
    """Return the values of a type that has only a few, as written in YAML; an empty list for other types."""
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    values = [value for option in get_args(kind) for value in choices(option)]
    return [*values, "null"] if values and NoneType in get_args(kind) else values


def metavar_of(kind: Any) -> str:
    """Return the placeholder of a type in the help: its choices, X for a number, N for a whole number, or NAME."""
    return "|".join(choices(kind)) or ("X" if fits(0.5, kind) else "N" if fits(1, kind) else "NAME")
