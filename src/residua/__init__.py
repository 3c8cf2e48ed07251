"""Residual connections for PyTorch: Deep Delta Learning and the schemes it is compared with, behind one interface.

Importing this package loads nothing; torch is imported with the first name that is asked of it. Where transformers was
imported before, its Auto classes open our models and converted ones from then on.
"""

import sys
from contextlib import suppress

from residua import lazy

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy.attributes(__name__)

if "transformers" in sys.modules:
    with suppress(ImportError):  # the connections need neither the lab nor a transformers that it takes
        import residua.conversion.configuration  # noqa: F401
