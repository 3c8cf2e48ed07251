"""Progress of a preparation in bytes of text, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from residua.records.progress import Progress

UPDATE_SECONDS = 1.0
"""Time between two updates: a preparation that takes less shows nothing."""


def size_text(count: float) -> str:
    """Spell a number of bytes with its unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@contextmanager
def text_progress(title: str, total: int, done: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading `total` bytes of text (0 if unknown), of which `done` were read before.

    Yields the function that advances it.
    """
    begun = updated = time.monotonic()
    before = done

    def advance(size: int) -> None:
        nonlocal done, updated
        done += size
        now = time.monotonic()
        if now - updated >= UPDATE_SECONDS:
            updated = now
            of_all = f" of {size_text(total)} ({done / total:.1%})" if total else ""
            speed = size_text((done - before) / (now - begun))
            bar.update(done, f"prepare: {title}: {size_text(done)} of text{of_all}, {speed}/s")

    with Progress("", total, done=done, enabled=enabled) as bar:
        yield advance
