"""Seams: the private names of other libraries that residua uses, and what they must provide."""

import ast
import inspect
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import residua


class Seam(NamedTuple):
    """A name in a library and what we use of it.

    purpose: what stops working without it. The others are names with a space between two of them. attributes: of the
    object, or of what `make` makes from it. parameters: that we pass by name, or by position where `ordered`. mentions:
    in its source, of what it reads in our classes.
    """

    path: str
    purpose: str
    attributes: str = ""
    parameters: str = ""
    mentions: str = ""
    ordered: bool = False
    make: Callable[[Any], Any] | None = None


def find(path: str, purpose: str) -> Any:
    """Return what stands at a dotted path; fail with the name of the part that is gone."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        pytest.fail(f"{path}: {error}: {purpose}", pytrace=False)


def check(seam: Seam) -> None:
    """Fail with the name of what a library no longer has."""
    value = find(seam.path, seam.purpose)
    parameters = seam.parameters.split()
    if parameters:
        taken = list(inspect.signature(value).parameters)
        taken = [name for name in taken if name != "self"]
        missing = [name for name in parameters if name not in taken]
        if missing or (seam.ordered and taken[: len(parameters)] != parameters):
            pytest.fail(f"{seam.path} takes {taken}, no longer {parameters}: {seam.purpose}", pytrace=False)
    for name in seam.mentions.split():
        if name not in inspect.getsource(value):
            pytest.fail(f"{seam.path} no longer uses {name}: {seam.purpose}", pytrace=False)
    made = value if seam.make is None else seam.make(value)
    for name in seam.attributes.split():
        if not hasattr(made, name):
            pytest.fail(f"{seam.path} no longer has {name}: {seam.purpose}", pytrace=False)


def reached(library: str) -> set[str]:
    """Return the names below the public surface of a library that our source imports or spells out.

    Below it are names with an underscore and, in transformers, everything that is not in the top module.
    """
    names = set()
    for file in Path(residua.__file__).parent.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if library in text else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                names |= {f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
    names = {name for name in names if name.startswith(f"{library}.")}
    private = {name for name in names if any(part.startswith("_") and part[1] != "_" for part in name.split("."))}
    deep = {name for name in names if library == "transformers" and name.count(".") > 1}
    return {name for name in private | deep if not any(other.startswith(f"{name}.") for other in private)}
