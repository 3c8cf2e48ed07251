"""The program `residua`: run a command by its name, and report any error in one line."""

import os
import sys
from collections.abc import Sequence

from residua import __version__
from residua.commands.base import BAD_INPUT, FAILED, INTERRUPTED, fail
from residua.commands.process import discard_output, in_one_line, interrupts, is_bad_input, lasting_messages
from residua.commands.signature import HELP, examples, run_function, summary
from residua.commands.table import COMMANDS, explained, words_after
from residua.errors import InputError, ReportedElsewhere, did_you_mean, extra


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    0 for success, 1 for a failure at run time, 2 for bad input, 130 after an interrupt, 143 after SIGTERM.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the parent process, as by `2>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115  # open until the process ends
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the terminal cannot encode
    with lasting_messages(), interrupts() as signals:
        return _guarded(list(sys.argv[1:] if argv is None else argv), signals)


def _guarded(argv: list[str], signals: list[int]) -> int:
    try:
        with extra("lab"):  # for an import that no other `extra` wraps
            status = _dispatch(argv) or 0
        sys.stdout.flush()
        return status
    except ReportedElsewhere as error:
        return error.status
    except BrokenPipeError:
        discard_output()  # the reader, such as `head`, closed the pipe
        return FAILED
    except KeyboardInterrupt as stop:
        return fail(str(stop) or "interrupted", 128 + signals[0] if signals else INTERRUPTED)
    except Exception as error:
        line = in_one_line(error)
        if line is None:
            raise
        return fail(line, BAD_INPUT if is_bad_input(error) else FAILED)


def _dispatch(argv: list[str]) -> int | None:
    if argv == ["--version"]:
        print(f"residua {__version__}")
        return 0
    if not argv:
        print(_overview([]), file=sys.stderr)
        return BAD_INPUT
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]
    words: list[str] = []
    while " ".join(words) not in COMMANDS:
        choices = words_after(words)
        word, *argv = argv or [""]
        if word in HELP:
            print(_overview(words))
            return 0
        if word not in choices:
            if not word:
                raise InputError(f"one of {', '.join(choices)} must follow {' '.join(words)}")
            hint = did_you_mean(word, choices) or f"; there are {', '.join(choices)}"
            raise InputError(f"there is no command {' '.join([*words, word])}{hint}")
        words.append(word)
    return run_function(" ".join(["residua", *words]), explained(words), argv)


def _overview(words: list[str]) -> str:
    """Return the help on all commands that begin with `words`: a summary of each, and examples if there are few."""
    prog, choices = " ".join(["residua", *words]), words_after(words)
    width = max(map(len, choices))
    text = f"usage: {prog} COMMAND [options]\n\n"
    if words:
        names = [name.split() for name in COMMANDS if name.split()[: len(words)] == words]
        lines = "\n  ".join(examples(explained(name)).partition("\n")[0] for name in names)
        text += f"{summary(explained(words))}.\n\nexamples:\n  {lines}\n\n"
    else:
        text += "Residual connections for PyTorch, and the laboratory around them.\n\n"
    text += "commands:\n"
    text += "\n".join(f"  {word:{width}}  {summary(explained([*words, word]))}" for word in choices)
    text += f"\n\n{prog} COMMAND --help explains it, --help-all shows all options."
    if not words:
        text += "\nresidua --version prints the version."
    return text
