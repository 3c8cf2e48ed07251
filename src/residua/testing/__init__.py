"""The kit for your own code: check a scheme against its contract, and a module against a scheme of this library.

    check_scheme(MyScheme())        your scheme does everything that its callers rely on
    check_module(MyAdapter())       your module computes the same as the module of residua, gradients included

Both also run as a pytest plugin, with one test for each check: `residua.testing.plugin`. Importing this package loads
nothing; torch is imported when a name of the package is first used.
"""

from residua import lazy

__getattr__, __dir__, __all__ = lazy.attributes(__name__)
