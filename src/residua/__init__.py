"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface.

Importing this package loads nothing; torch is imported when a name of the package is first used. If transformers is
already imported, importing residua registers our models and converted models with its Auto classes.
"""

import sys
from contextlib import suppress

from residua import lazy

__version__ = "0.1.0"


def _built_by_name(name: str) -> str:
    """Return the hint to call `residua.build` if `name` is that of a preset or an alias; "" for any other name."""
    from residua.connections import names

    preset = names.meaning(name)
    return f"; residua.build({preset!r}, ...) builds it" if preset.partition(":")[0] in names.PRESETS else ""


__getattr__, __dir__, __all__ = lazy.attributes(__name__, _built_by_name)

if "transformers" in sys.modules:
    with suppress(ImportError):  # connections work without a supported transformers
        import residua.conversion.configuration  # noqa: F401
