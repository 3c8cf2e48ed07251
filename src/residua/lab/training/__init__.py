"""Training: configuration, optimizer, loop, checkpoints and the log of a run."""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
