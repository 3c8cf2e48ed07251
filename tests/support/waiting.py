"""Waiting: for a condition, or for something in a page whose content policy forbids `eval`."""

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 200  # seconds; only a failure takes so long, or a machine with much else to do


def wait_for(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE} seconds"
        time.sleep(0.01)


def until(page: Any, script: str, argument: Any = None) -> None:
    """Return as soon as the JavaScript expression, or the function of `argument`, is true. Raises TimeoutError."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(script, argument):
        if time.monotonic() > end:
            raise TimeoutError(f"not true after {PATIENCE} seconds: {script}, {argument!r}")
        page.wait_for_timeout(20)
