"""Progress of a preparation in bytes of text, on standard error."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from residua.records.progress import Progress

UPDATE_SECONDS = 1.0
"""Time between two updates; a shorter preparation shows nothing."""


def size_text(count: float) -> str:
    """Spell a number of bytes with its unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@contextmanager
def text_progress(title: str, total: int, done: int, enabled: bool) -> Iterator[Callable[[int], None]]:
    """Show the progress of reading `total` bytes of text (0 if unknown), after `done` bytes of an earlier call.

    Yields the function that advances it.
    """
    start = last_update = time.monotonic()
    earlier_bytes = done

    def advance(size: int) -> None:
        nonlocal done, last_update
        done += size
        now = time.monotonic()
        if now - last_update >= UPDATE_SECONDS:
            last_update = now
            share = f" of {size_text(total)} ({done / total:.1%})" if total else ""
            speed = size_text((done - earlier_bytes) / (now - start))
            bar.update(done, f"prepare: {title}: {size_text(done)} of text{share}, {speed}/s")

    with Progress("", total, done=done, enabled=enabled) as bar:
        yield advance
