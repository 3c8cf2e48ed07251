"""The command `residua`: the table of commands, and one line for whatever goes wrong in one."""

import importlib
import os
import sys
import textwrap
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence

from residua import __version__
from residua.checks import did_you_mean
from residua.commands.base import BAD_INPUT, FAILED, INTERRUPTED, Command, HelpShown, Parser, fail
from residua.errors import InputError, ReportedElsewhere, RunError
from residua.terminal import printable_output

COMMANDS = (
    "schemes",
    "prepare",
    "train",
    "sweep",
    "estimate",
    "evaluate",
    "export",
    "generate",
    "compare",
    "explore",
    "analyze",
    "demo",
    "mup-check",
    "bench",
    "geometry",
)
"""The names, in the order of the overview; the module of each is in `residua.commands`."""

EXHAUSTED = ("out of memory", "not enough memory", "can't allocate memory", "size calculation overflow")
"""What torch says of sizes that no machine holds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status: 0, 1 for a failure at run time, 2 for bad input, 130 if interrupted."""
    _replace_closed_streams()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        with printable_output():
            status = _dispatch(list(sys.argv[1:] if argv is None else argv)) or 0
        sys.stdout.flush()
        return status
    except InputError as error:
        return fail(error, BAD_INPUT)
    except ReportedElsewhere as error:
        return error.status
    except RunError as error:
        return fail(error, FAILED)
    except BrokenPipeError:
        _discard_output()  # the reader, such as `head`, has had enough
        return FAILED
    except OSError as error:
        _discard_output()
        return fail(error, FAILED)
    except KeyboardInterrupt:
        return fail("interrupted", INTERRUPTED)
    except ImportError as error:
        if _interrupted(error):
            return fail("interrupted", INTERRUPTED)
        if not isinstance(error, ModuleNotFoundError):
            raise
        return fail(error, FAILED)
    except RecursionError:
        return fail("expected input with a few levels, got some nested too deeply", FAILED)
    except OverflowError as error:
        return fail(f"expected numbers that the machine can hold, got one too large: {error}", BAD_INPUT)
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and not any(words in text.lower() for words in EXHAUSTED):
            raise
        return fail(f"not enough memory: {text.splitlines()[0] if text else 'none is left'}; use smaller sizes", FAILED)


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


def _replace_closed_streams() -> None:
    """Give a process that was started without stdin, stdout or stderr the null device in their place: files opened
    later would take their numbers and receive what is printed."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _discard_output() -> None:
    """Send what a stream still holds nowhere if it cannot be written: Python would complain when it closes it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _interrupted(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused this error: extension modules turn it into an ImportError."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False
