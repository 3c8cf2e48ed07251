"""Turn text into tokens on disk (`prepare`), and tokens into batches (`Batches`, `HeldOutBatches`)."""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
