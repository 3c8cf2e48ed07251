"""Give a transformers model another residual connection: `residua.convert` and the functions around it.

Importing this package loads nothing; transformers is imported when a name of the package is first used.
"""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
