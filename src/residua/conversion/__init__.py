"""Another residual connection for a transformers model: what `residua.convert` and its companions are.

Importing this package loads nothing; transformers is imported with the first name that is asked of it.
"""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
