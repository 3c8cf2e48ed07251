"""Repeat runs of a study, which gives the same bits."""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from residua.errors import InputError
from residua.lab.jobs.pool import Record, threads
from residua.lab.records.jsonlines import finite
from residua.lab.records.progress import Progress
from residua.lab.study.definition import check_names
from residua.lab.study.engine import open_study, train_run
from residua.lab.study.plan import Run

SAME = ("device", "torch")
"""Facts of a run with which its last bits can change."""


class Verified(NamedTuple):
    """A run that was repeated: what its record says, and what came now."""

    key: str
    recorded: Record
    repeated: Record

    @property
    def equal(self) -> bool:
        """Whether the losses, all of the curve, agree to the last bit, and the settings that the report shows."""
        names = ("val_loss", "loss", "curve", "connection", "point", "tokens")
        parameters = [(run.get("facts") or {}).get("parameters") for run in (self.recorded, self.repeated)]
        same = all(self.recorded.get(name) == self.repeated.get(name) for name in names)
        return same and parameters[0] == parameters[1]

    @property
    def elsewhere(self) -> str:
        """Where the record was made, if that was another processor or PyTorch, which explains other bits; or ""."""
        made, now = ((run.get("facts") or {}) for run in (self.recorded, self.repeated))
        other = [f"{name} {made.get(name)}, here {now.get(name)}" for name in SAME if made.get(name) != now.get(name)]
        return "; ".join(other) if now else ""

    @property
    def outcome(self) -> str:
        """Whether the bits are equal, or both losses, in words."""
        if self.equal:
            return "equal to the last bit"
        where = f" (recorded with {self.elsewhere}; last bits differ there)" if self.elsewhere else ""
        return f"recorded {self.recorded['val_loss']}, now {self.repeated['val_loss']}{where}"


def verify(
    out: str | Path,
    *,
    data: str | None = None,
    share: float = 0.1,
    schemes: Sequence[str] | None = None,
    sizes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    progress: bool = True,
) -> Iterator[Verified]:
    """Repeat a random share of a study's runs, one at least, and compare them with their records.

    Args:
        schemes, sizes, seeds: the runs to draw from. None for all of them.

    Raises:
        InputError: the folder holds no such run, or records that the study would not make, which nobody can repeat; or
            an argument cannot be used.
        RunError: a run failed for another reason than its numbers.
    """
    plan, rows = open_study(out, data)
    check_names("--schemes", schemes, plan.study.schemes)
    check_names("--sizes", sizes, plan.study.sizes)
    finished = {row["key"]: row for row in rows}
    runs = [plan.recorded(row) for row in finished.values()]
    if strange := finished.keys() - {run.key for run in runs}:
        listed = f"{len(strange)} others: {min(strange)!r}"
        raise InputError(f"{out} must hold records of the study's own runs, got {listed}")
    wanted = {"scheme": schemes, "size": sizes, "seed": seeds}
    asked = [
        run
        for run, row in zip(runs, finished.values())
        if all(choices is None or row[name] in choices for name, choices in wanted.items())
    ]
    if not asked:
        raise InputError(f"{out}: must have finished runs of these schemes, sizes and seeds, got none")
    places = sorted(random.sample(range(len(asked)), max(1, round(share * len(asked)))))
    for number, run in enumerate((asked[place] for place in places), start=1):
        text = f"{number}/{len(places)} {run.key}"
        with Progress("", run.config.train.steps, enabled=progress) as bar:
            yield repeat(run, finished[run.key], partial(bar.update, text=text))


def repeat(run: Run, recorded: Record, report: Callable[[int], None]) -> Verified:
    """Train a run once more, with one thread as all runs."""
    with tempfile.TemporaryDirectory() as home, threads(1):
        repeated = train_run(run, place=Path(home) / "run", report=report)
    return Verified(run.key, recorded, finite(repeated))
