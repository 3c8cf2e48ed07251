"""The kit for your own code: check a scheme against its contract, and a module against a scheme of this library.

    check_scheme(MyScheme())        everything that callers of a scheme rely on
    check_module(MyAdapter())       your module computes the same as ours, gradients included

Both are a pytest plugin too, with one test for each check: `residua.testing.plugin`. Importing this package loads
nothing; torch is imported with the first name that is asked of it.
"""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
