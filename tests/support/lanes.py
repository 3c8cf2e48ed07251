"""Which cases of a parametrised test run in which lane."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def some(cases: Iterable[Any], chosen: Callable[[Any], Any]) -> list[Any]:
    """All cases for `pytest.mark.parametrize`: `make test` tries those that are chosen, `make nightly` the others."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if chosen(case) else pytest.mark.nightly)
        for case in cases
    ]
