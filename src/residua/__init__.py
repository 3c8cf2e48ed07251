"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface.

Importing this package loads nothing; torch is imported with the first name that is asked of it. Where transformers was
imported before, its Auto classes open our models and converted ones from then on.
"""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from residua import connections, lazy

if TYPE_CHECKING:
    from residua import ops, testing
    from residua.connections import *  # noqa: F403
    from residua.conversion import convert, load, load_connection, save_connection, unconvert

__version__ = "0.1.0"

__all__ = [
    "connections",
    "convert",
    "load",
    "load_connection",
    "ops",
    "save_connection",
    "testing",
    "unconvert",
]
__all__ += connections.__all__

__getattr__, __dir__ = lazy.attributes(__name__, __all__, ["connections", "conversion", "models", "ops", "testing"])

if "transformers" in sys.modules:
    with suppress(ImportError):  # the connections need neither the lab nor a transformers that it takes
        import residua.conversion.configuration  # noqa: F401
