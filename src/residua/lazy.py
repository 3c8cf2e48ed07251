"""Packages that load nothing until a name in them is used (PEP 562).

Their names stand once, in a stub, because type checkers need one and a second list would differ from it some day:

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
    """Return the `__getattr__`, `__dir__` and `__all__` of a package with a stub. Its modules are attributes too.

    hint_for: what to write in place of a name that the package has not, and that resembles none that it has.
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
    """Return the names in the stub of a package, and the modules that they come from; none without a stub.

    "." stands for the package, of which the name is a module.
    """
    stub = _folder(package) / "__init__.pyi"
    return _imported(stub) if stub.is_file() else {}


def _imported(file: Path) -> dict[str, str]:
    """Return the names that a file imports, and their modules; for `*` those that the package itself imports."""
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
