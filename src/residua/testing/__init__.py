"""The kit for your own code: check a scheme against its contract, and a module against a scheme of this library.

    check_scheme(MyScheme())        everything that callers of a scheme rely on
    check_module(MyAdapter())       your module computes the same as ours, gradients included

Both are a pytest plugin too, with one test for each check: `residua.testing.plugin`. Importing this package loads
nothing; torch is imported with the first name that is asked of it.
"""

from typing import TYPE_CHECKING

from residua import lazy

if TYPE_CHECKING:
    from residua.testing.adapter import ConnectionAdapter, StreamAdapter
    from residua.testing.agreement import TOLERANCES, agree, assert_close
    from residua.testing.checks import SPECIFICATION, CheckFailed, NotChecked, Report
    from residua.testing.contract import CONTRACT, check_scheme
    from residua.testing.inputs import bare_sublayers, normal, perturbed
    from residua.testing.module import check_module

__all__ = [
    "CONTRACT",
    "SPECIFICATION",
    "TOLERANCES",
    "CheckFailed",
    "ConnectionAdapter",
    "NotChecked",
    "Report",
    "StreamAdapter",
    "agree",
    "assert_close",
    "bare_sublayers",
    "check_module",
    "check_scheme",
    "normal",
    "perturbed",
]

__getattr__, __dir__ = lazy.attributes(
    __name__, __all__, ["agreement", "checks", "inputs", "adapter", "contract", "module"]
)
