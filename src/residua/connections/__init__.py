"""Residual connections: one interface (`base.py`, the file to read first), one file for each paper's scheme.

Importing this package loads nothing, so that a name can be looked up (`names.py`) before torch is imported.
"""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
