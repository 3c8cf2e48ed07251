"""The completion of a shell for all commands, written by shtab."""

import argparse

from residua.commands.signature import command_parser, summary
from residua.commands.table import COMMANDS, explained, words_after
from residua.connections.names import PRESETS
from residua.errors import extra, require


def completion(shell: str) -> str:
    """Return the script for a shell. Raises InputError for a shell that shtab does not know."""
    with extra("completion"):
        import shtab
    require(shell in shtab.SUPPORTED_SHELLS, "--print-completion", f"one of {', '.join(shtab.SUPPORTED_SHELLS)}", shell)
    root = argparse.ArgumentParser(prog="residua")
    _add_commands(root, [])
    return shtab.complete(root, shell)


def _add_commands(parser: argparse.ArgumentParser, words: list[str]) -> None:
    """Give the parser of these words one for each word that may follow."""
    import shtab

    children = parser.add_subparsers()
    for word in words_after(words):
        path = [*words, word]
        if " ".join(path) not in COMMANDS:
            _add_commands(children.add_parser(word, help=summary(explained(path))), path)
            continue
        options = command_parser(" ".join(path), explained(path), everything=True)
        children.add_parser(word, help=summary(explained(path)), parents=[options])
        for action in options._actions:
            metavar = str(action.metavar)
            if metavar == "SCHEME":
                action.choices = list(PRESETS)
            elif "|" in metavar and metavar.islower():
                action.choices = metavar.split("|")
            elif "DIR" in metavar or "RUN" in metavar:
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]  # which shtab reads
            elif "FILE" in metavar:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
