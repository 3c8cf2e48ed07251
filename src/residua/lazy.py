"""Packages that load nothing until a name in them is used (PEP 562)."""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any


def attributes(
    package: str, names: Sequence[str], modules: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and `__dir__` of a package that offers `names` from its `modules`.

    A name is looked up in the modules in order, so the light ones belong first. The modules themselves are attributes
    too. For type checkers the package imports the same names under `if TYPE_CHECKING`.
    """

    def get(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        for module in modules if name in names else ():
            offered = import_module(f"{package}.{module}")
            if hasattr(offered, name):
                return getattr(offered, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted({*names, *modules, "__all__", "__doc__", "__name__", "__path__", "__version__"})
