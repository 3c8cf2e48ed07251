"""Packages that load nothing until a name in them is used (PEP 562).

The names are listed only in a stub, which type checkers need anyway. This is one line of a stub:

    from residua.connections.parts.norm import RMSNorm as RMSNorm
"""

import ast
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from residua.errors import did_you_mean


def attributes(
    package: str, hint_for: Callable[[str], str] = lambda name: ""
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return the `__getattr__`, `__dir__` and `__all__` of a package with a stub.

    The modules of the package are attributes too.

    hint_for: a function from an unknown name to a hint for the error; used if no name of the package is similar.
    """
    places = offered(package)

    def get(name: str) -> Any:
        if places.get(name, ".") != ".":
            return getattr(import_module(places[name]), name)
        if find_spec(f"{package}.{name}") is None:
            hint = "" if name.startswith("_") else did_you_mean(name, places) or hint_for(name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        return import_module(f"{package}.{name}")

    return get, lambda: sorted({*places, "__all__", "__doc__", "__name__", "__path__", "__version__"}), sorted(places)


def offered(package: str) -> dict[str, str]:
    """Map each name in the stub of a package to the module that it comes from; empty if there is no stub.

    The module "." means that the name is itself a module of the package.
    """
    stub = _folder(package) / "__init__.pyi"
    return _imported(stub) if stub.is_file() else {}


def _imported(file: Path) -> dict[str, str]:
    """Map each name that a file imports to its module; `*` stands for all names that the imported package imports."""
    places: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                everything = alias.name == "*"
                places |= _imported(_folder(module) / "__init__.py") if everything else {alias.name: module}
    return places


def _folder(package: str) -> Path:
    return Path(__file__).parent.joinpath(*package.split(".")[1:])
