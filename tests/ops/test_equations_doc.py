"""docs/equations.md names only functions and tests that exist, and every public operation."""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import residua.ops

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "equations.md").read_text(encoding="utf-8").splitlines() if "`" in line]
NAMES = sorted({name for row in ROWS for name in re.findall(r"`(residua(?:\.\w+)+)", row)})
TESTS = sorted({found for row in ROWS for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)})


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def importable(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(importlib.import_module(module), attribute)


def test_every_name_can_be_imported():
    assert [name for name in NAMES if not importable(name)] == []


def test_every_test_exists():
    assert [f"{file}::{test}" for file, test in TESTS if test not in functions_of(file)] == []


def test_every_public_operation_is_listed():
    public = {name for name, x in vars(residua.ops).items() if not name.startswith("_") and not inspect.ismodule(x)}
    assert {f"residua.ops.{name}" for name in public} - set(NAMES) == set()


def test_the_tables_of_the_page_are_found():
    """An edit that hides the rows from the tests above is an error, not a pass."""
    assert len(NAMES) >= 40
    assert len(TESTS) >= 30
