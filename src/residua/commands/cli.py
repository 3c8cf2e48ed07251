"""The command `residua`: run a command by its name, and report any error in one line."""

import importlib
import sys
import textwrap
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from residua import __version__
from residua.commands.base import BAD_INPUT, FAILED, INTERRUPTED, Command, HelpShown, Parser, fail, stopped_by
from residua.commands.process import MISPLACED, discard_output, in_one_line, interrupts, lasting_messages
from residua.errors import InputError, ReportedElsewhere, did_you_mean
from residua.records.terminal import printable_output

COMMANDS = (
    "train",
    "evaluate",
    "generate",
    "compare",
    "explore",
    "study",
    "prepare",
    "convert",
    "export",
    "schemes",
    "cost",
    "demo",
)
"""The names in the order of the overview; each has a module in `residua.commands`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for a failure at run time, 2 for bad input, 130 if interrupted,
    143 after SIGTERM."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    with lasting_messages(), interrupts() as signals:
        return _guarded(list(sys.argv[1:] if argv is None else argv), signals)


def _guarded(argv: list[str], signals: list[int]) -> int:
    try:
        with printable_output():
            status = _dispatch(argv) or 0
        sys.stdout.flush()
        return status
    except ReportedElsewhere as error:
        return error.status
    except BrokenPipeError:
        discard_output()  # the reader, such as `head`, closed the pipe
        return FAILED
    except KeyboardInterrupt as stop:
        return fail(str(stop) or "interrupted", stopped_by(signals[0]) if signals else INTERRUPTED)
    except Exception as error:
        line = in_one_line(error)
        if line is None:
            raise
        return fail(line, BAD_INPUT if isinstance(error, (InputError, *MISPLACED)) else FAILED)


def _dispatch(argv: list[str]) -> int | None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview(), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else BAD_INPUT
    if argv[0] == "--version":
        print(f"residua {__version__}")
        return 0
    name, *rest = argv
    if name not in COMMANDS:
        raise InputError(f"there is no command {name}{did_you_mean(name, COMMANDS)}; residua --help lists them")
    command = _command(name)
    parser = Parser(
        prog=f"residua {name}",
        description=command.HELP,
        epilog="examples:\n" + textwrap.indent(command.EXAMPLES.rstrip(), "  "),
        formatter_class=RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    try:
        arguments = parser.parse_args(rest)
    except HelpShown:
        return 0
    return command.run(arguments)


def _command(name: str) -> Command:
    return importlib.import_module(f"residua.commands.{name.replace('-', '_')}")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {_command(name).HELP}" for name in COMMANDS)
    return f"""usage: residua COMMAND [options]

Residual connections for PyTorch, and the laboratory around them.

commands:
{lines}

residua COMMAND --help explains a command; residua --version prints the version."""
