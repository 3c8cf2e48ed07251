"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface.

Importing this package loads nothing; torch is imported with the first name that is asked of it. Where transformers was
imported before, its Auto classes open our models and converted ones from then on.
"""

import sys
from contextlib import suppress

from residua import lazy

__version__ = "0.1.0"


def _built_by_name(name: str) -> str:
    """Return what to write for a preset, or another name of a scheme; "" for any other name."""
    from residua.connections import names

    preset = names.meaning(name)
    return f"; residua.build({preset!r}, ...) builds it" if preset.partition(":")[0] in names.PRESETS else ""


__getattr__, __dir__, __all__ = lazy.attributes(__name__, _built_by_name)

if "transformers" in sys.modules:
    with suppress(ImportError):  # the connections need neither the lab nor a transformers that it takes
        import residua.conversion.configuration  # noqa: F401
