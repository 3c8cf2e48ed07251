"""Read docstrings, of which the command line makes its options and help."""

import ast
import inspect
import sys
import textwrap
from typing import Any


def docstring(documented: Any) -> str:
    """Return the docstring of a class or function; under `python -OO`, which drops it, from the source."""
    if sys.flags.optimize < 2:
        return inspect.cleandoc(documented.__doc__ or "")
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(documented))).body
    except (OSError, TypeError):  # there is no source
        return ""
    return ast.get_docstring(node) or "" if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else ""
