"""The table of commands."""

from pkgutil import resolve_name
from typing import Any

COMMANDS = {
    "train": "train:train",
    "evaluate": "evaluate:evaluate",
    "generate": "generate:generate",
    "compare": "compare:compare",
    "explore": "explore:explore",
    "study run": "study:run",
    "study report": "study:report",
    "study verify": "study:verify",
    "study tune": "tune:tune",
    "study geometry reflection": "geometry:reflection",
    "study geometry quick": "geometry:quick",
    "prepare": "prepare:prepare",
    "convert": "convert:convert",
    "export": "export:export",
    "schemes": "schemes:schemes",
    "cost count": "cost:count",
    "cost step": "cost:step",
    "demo": "demo:demo",
}
"""The commands, in the order in which the help lists them, each with its function in a module of this package.

If several commands begin with the same word, the help of this word is the docstring of the module with its name: for
`study run` and `study report`, of the module `study`."""


def words_after(words: list[str]) -> list[str]:
    """Return the words that may follow `words` in a command, in the order in which the help lists the commands."""
    below = [name.split()[len(words) :] for name in COMMANDS if name.split()[: len(words)] == words]
    return list(dict.fromkeys(rest[0] for rest in below))


def explained(words: list[str]) -> Any:
    """Return the function of a command, or the module that explains words that several commands begin with."""
    return resolve_name(f"residua.commands.{COMMANDS.get(' '.join(words), words[-1])}")
