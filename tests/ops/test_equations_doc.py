"""docs/equations.md names only functions, files and tests that exist, and every operation is in it."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

import residua.ops

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines() if "`" in line]
NAMES = re.compile(r"`(residua(?:\.\w+)+)")
FILES = re.compile(r"`(src/[\w/]+\.py)`")
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@functools.cache
def definitions(path: Path) -> set[str]:
    """The classes, functions and names defined at the top of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found.update(target.id for target in targets if isinstance(target, ast.Name))
    return found


@pytest.mark.parametrize("name", sorted({name for row in ROWS for name in NAMES.findall(row)}))
def test_name_can_be_imported(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("row", [row for row in ROWS if FILES.search(row)])
def test_names_are_defined_in_the_file_of_their_row(row):
    (file,) = FILES.findall(row)
    assert {name.rpartition(".")[2] for name in NAMES.findall(row)} <= definitions(ROOT / file)


@pytest.mark.parametrize(("file", "test"), sorted({found for row in ROWS for found in TESTS.findall(row)}))
def test_test_exists(file, test):
    assert test in definitions(ROOT / file)


def test_every_operation_has_its_place():
    named = {name.removeprefix("residua.ops.") for row in ROWS for name in NAMES.findall(row)}
    assert set(residua.ops.__all__) <= named


def test_the_tables_were_found():
    """An edit of the tables' form that hides their rows from the tests above is an error, not a pass."""
    assert sum(bool(FILES.search(row)) for row in ROWS) >= 30
    assert sum(bool(TESTS.search(row)) for row in ROWS) >= 30
