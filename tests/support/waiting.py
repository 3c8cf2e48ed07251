"""Waiting for something in a page whose content policy forbids `eval`, on which `page.wait_for_function` is built."""

import time
from typing import Any

PATIENCE = 200  # seconds; only a failure takes so long, or a machine with much else to do


def until(page: Any, script: str, argument: Any = None) -> None:
    """Return as soon as the JavaScript expression, or the function of `argument`, is true. Raises TimeoutError."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(script, argument):
        if time.monotonic() > end:
            raise TimeoutError(f"not true after {PATIENCE} seconds: {script}, {argument!r}")
        page.wait_for_timeout(20)
