"""Progress of a preparation on standard error: a bar on a terminal, otherwise a line from time to time."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

REPORT_SECONDS = 30.0
"""Time between two lines of progress without a terminal."""


def say(message: str, progress: bool = True) -> None:
    if progress:
        print(f"prepare: {message}", file=sys.stderr, flush=True)


def size_text(count: float) -> str:
    """Spell a number of bytes with its unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


@contextmanager
def bar(title: str, total: int, done: int, progress: bool) -> Iterator[Callable[[int], None]]:
    """Show progress and the time left, in bytes of text. Yields the function that advances it.

    `total` is 0 if unknown. The bar needs a terminal and `rich`; without them lines appear.
    """
    if not progress:
        yield lambda size: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.progress import TransferSpeedColumn as Speed

        drawn = sys.stderr.isatty()
    except ModuleNotFoundError:
        drawn = False
    if not drawn:
        yield _lines(title, total, done)
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as drawing:
        task = drawing.add_task(title, total=total or None, completed=done)
        yield lambda size: drawing.advance(task, size)
        drawing.update(task, completed=total)


def _lines(title: str, total: int, done: int) -> Callable[[int], None]:
    begun = said = time.monotonic()
    before = done

    def advance(size: int) -> None:
        nonlocal done, said
        done += size
        now = time.monotonic()
        if now - said < REPORT_SECONDS:
            return
        said = now
        speed = (done - before) / (now - begun)
        of_all = f" of {size_text(total)} ({done / total:.1%})" if total else ""
        left = f", {_duration((total - done) / speed)} left" if total > done and speed else ""
        say(f"{title}: {size_text(done)} of text{of_all}, {size_text(speed)}/s{left}")

    return advance


def _duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
