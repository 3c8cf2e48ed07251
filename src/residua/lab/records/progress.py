"""Show progress on standard error: a bar on a terminal, otherwise an occasional plain line."""

import functools
import sys
import time
from datetime import timedelta
from typing import Any

from residua.errors import extra
from residua.lab.records.terminal import one_line

LINE_SECONDS = 10.0


def say(message: str) -> None:
    """Print one line for the user on standard error, above a progress bar if there is one."""
    print(one_line(message), file=sys.stderr, flush=True)


@functools.cache
def say_once(message: str) -> None:
    """Print a line for the user, unless this process has printed it before."""
    say(message)


class Progress:
    """A display of the finished share, a text, and the remaining time. A context manager.

    title       the text before the bar
    total       the work, in any unit; it may grow; 0 if unknown
    done        the work that was finished before this process began, which does not count for the speed
    enabled     False shows nothing
    measuring   show nothing without a terminal, and draw the bar only in `update`, so that drawing does not disturb the
                measurements in between
    """

    def __init__(self, title: str, total: float, *, done: float = 0.0, enabled: bool = True, measuring: bool = False):
        self.total, self._done, self._before = total, done, done
        self._started, self._last_line = time.monotonic(), -float("inf")
        self._measuring, self._bar = measuring, None
        use_bar = enabled and sys.stderr.isatty()
        self._lines = enabled and not measuring and not use_bar
        if use_bar:
            with extra("lab"):
                from rich.console import Console
                from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
                from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[text]}", markup=False),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=Console(stderr=True),
                auto_refresh=not measuring,
                refresh_per_second=4,
                speed_estimate_period=120,
            )
            # Given later, `done` would start the clock of the speed, before the slow start of the work.
            self._task = self._bar.add_task(one_line(title), total=total or None, completed=int(done), text="")

    def __enter__(self) -> "Progress":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.stop()

    def skip(self, work: float) -> None:
        """Add work that was finished before this process began. The clock restarts if no other work was done yet."""
        if self._done == self._before:
            self._started = time.monotonic()
        self._before += work

    def update(self, done: float, text: str, *, total: float | None = None, line: bool = False) -> None:
        """Show the amount of finished work, `done`.

        text: shown after the bar, or in the plain line. total: the new total, if it has changed.
        line: print a plain line now, even if the last one is less than `LINE_SECONDS` old.
        """
        self._done, self.total = done, self.total if total is None else total
        if self._bar:
            self._bar.update(self._task, completed=done, total=self.total or None, text=one_line(text))
            if self._measuring:
                self._bar.refresh()
        elif self._lines:
            now = time.monotonic()
            if line or now - self._last_line >= LINE_SECONDS:
                self._last_line = now
                speed = (done - self._before) / max(now - self._started, 1e-9)
                seconds = round((self.total - done) / speed) if speed > 0 and self.total else None
                say(text if seconds is None else f"{text}  {timedelta(seconds=seconds)} left")
