"""Another residual connection for a transformers model: what `residua.convert` and its companions are.

Importing this package loads nothing; transformers is imported with the first name that is asked of it.
"""

from typing import TYPE_CHECKING

from residua import lazy

if TYPE_CHECKING:
    from residua.conversion.convert_model import convert, unconvert
    from residua.conversion.saving import load, load_connection, save_connection

__all__ = ["convert", "load", "load_connection", "save_connection", "unconvert"]

__getattr__, __dir__ = lazy.attributes(__name__, __all__, ["convert_model", "saving"])
