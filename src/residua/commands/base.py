"""The interface of the commands, their exit statuses and parser, and the options of several commands."""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Protocol

from residua.errors import InputError, did_you_mean, shown
from residua.records.terminal import one_line

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses."""
Arguments = argparse.Namespace


class Command(Protocol):
    """The interface of a command's module."""

    HELP: str
    """One line for the overview and for `--help`."""
    EXAMPLES: str
    """Command lines, one per line."""

    def add_arguments(self, parser: "Parser") -> None:
        """Add the options to the command's parser."""

    def run(self, arguments: Arguments) -> int | None:
        """Run the command; return an exit status, None for 0. InputError and RunError become one line."""


class SubCommand(NamedTuple):
    """A subcommand. Its arguments are added when its name is parsed."""

    help: str
    description: str
    add_arguments: Callable[["Parser"], None]
    run: Callable[[Arguments], int | None]


class HelpShown(Exception):
    """Raised after argparse has printed the help."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises instead of ending the process, and suggests a name for a misspelt option."""

    def __init__(self, *args: Any, fill: Callable[["Parser"], None] | None = None, **options: Any):
        super().__init__(*args, allow_abbrev=False, **options)
        self._fill = fill

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Arguments, list[str]]:
        """Parse all arguments; an unknown one is an error."""
        if self._fill is not None:
            fill, self._fill = self._fill, None
            fill(self)
        for argument in sys.argv[1:] if args is None else args:
            if argument.startswith("--") and argument.endswith("=--"):  # argparse would return a list as this value
                self.error(f"argument {argument[:-3]} must have a value, got --")
        arguments, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self._refuse(unknown[0])
        return arguments, unknown

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; {self.prog} --help shows what there is")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise HelpShown

    def add_subcommands(self, table: Mapping[str, SubCommand]) -> None:
        """Require the name of a subcommand; set `arguments.chosen` to its `run`."""
        parsers = self.add_subparsers(required=True, dest="subcommand", metavar="|".join(table))
        for name, (help, description, add_arguments, run) in table.items():
            child = parsers.add_parser(name, help=help, description=description, fill=add_arguments)
            child.set_defaults(chosen=run)

    def _refuse(self, argument: str) -> NoReturn:
        if not argument.startswith("-"):
            self.error(f"unexpected argument {shown(argument)}")
        option = argument.partition("=")[0]
        names = {name: name for name in self._option_string_actions}
        # `--lr` for `--train.lr`
        names = {f"--{name.rpartition('.')[2]}": name for name in names if "." in name} | names
        self.error(f"unknown option {option}{did_you_mean(option, names, show=names)}")


def whole(low: int = -(2**63), high: int = 2**63 - 1) -> Callable[[str], int]:
    """Return the type of an option that takes a whole number from `low` to `high`; the default is 64 bits."""
    limits = f" from {low} to {high}" if low > -(2**63) else " of at most 64 bits"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:  # also for more digits than Python converts
            raise argparse.ArgumentTypeError(f"must be a whole number, got {shown(text)}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be a whole number{limits}, got {shown(value)}")
        return value

    return read


def number(text: str) -> float:
    """Read the value of an option that takes a finite number."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {shown(text)}") from None
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run, made by residua train")
    add_checkpoint(parser)


def add_checkpoint(parser: Any) -> None:
    parser.add_argument(
        "--checkpoint",
        type=_step,
        metavar="STEP",
        help="the checkpoint of this step, or best: the one with the lowest validation loss among the kept ones "
        "(default: the newest)",
    )


def add_data(parser: Parser) -> None:
    parser.add_argument("--data", metavar="DIR", help="the run's prepared data, where they have moved")


def opens_model(folder: str | Path, checkpoint: object) -> bool:
    """Return whether `folder` holds a Hugging Face model and not a run. A model has no checkpoint to choose."""
    from residua.lab.experiment import is_model_folder

    if not is_model_folder(folder):
        return False
    if checkpoint is not None:
        raise InputError(f"--checkpoint must be a run folder, got {folder}")
    return True


def _step(text: str) -> int | str:
    if text == "best" or (text.isascii() and text.isdecimal() and len(text) < 20):
        return text if text == "best" else int(text)
    raise argparse.ArgumentTypeError(f"must be the number of a step or best, got {shown(text)}")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def stopped_by(number: int) -> int:
    """Return the exit status after a signal, as shells give it: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + number


def fail(error: object, status: int) -> int:
    """Print one line on stderr, if it is open; return `status`."""
    with suppress(OSError):  # stderr may be closed
        print(f"residua: {one_line(error)}", file=sys.stderr, flush=True)
    return status
