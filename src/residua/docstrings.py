"""Read docstrings; the command line builds its options and help from them."""

import ast
import inspect
import sys
import textwrap
from typing import Any


def docstring(documented: Any) -> str:
    """Return the docstring of a class or function. Under `python -OO`, which drops docstrings, read the source file."""
    if sys.flags.optimize < 2:
        return inspect.cleandoc(documented.__doc__ or "")
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(documented))).body
    except (OSError, TypeError):  # there is no source
        return ""
    return ast.get_docstring(node) or "" if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ""
