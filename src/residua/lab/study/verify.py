"""Repeat runs of a study and compare the results to the last bit."""

import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from residua.connections.names import today
from residua.errors import InputError
from residua.lab.jobs.pool import Record, threads
from residua.lab.records.jsonlines import finite
from residua.lab.records.progress import Progress
from residua.lab.records.provenance import circumstances
from residua.lab.study.definition import check_names
from residua.lab.study.engine import duration, open_study, train_run
from residua.lab.study.plan import PlannedRun
from residua.lab.training.loop import pick_device

SAME = ("device", "torch")
"""The facts of a run that can change its last bits."""


class Verified(NamedTuple):
    """A run that was repeated: the record in the study, and the record of the repetition."""

    key: str
    recorded: Record
    repeated: Record

    @property
    def equal(self) -> bool:
        """Whether the losses of the curve and the reported settings agree to the last bit."""

        def settled(run: Record) -> list[Any]:
            numbers = [run.get(name) for name in ("val_loss", "loss", "curve", "point", "tokens")]
            return [*numbers, today(run.get("connection")), (run.get("facts") or {}).get("parameters")]

        return settled(self.recorded) == settled(self.repeated)

    @property
    def elsewhere(self) -> str:
        """The recorded device and PyTorch if they differ from those here, which may change the last bits; else ""."""
        made, now = ((run.get("facts") or {}) for run in (self.recorded, self.repeated))
        other = [f"{name} {made.get(name)}, here {now.get(name)}" for name in SAME if made.get(name) != now.get(name)]
        return "; ".join(other) if now else ""

    @property
    def outcome(self) -> str:
        """A sentence: the bits are equal, or both losses are given."""
        if self.equal:
            return "equal to the last bit"
        where = f" (recorded with {self.elsewhere}; last bits differ there)" if self.elsewhere else ""
        return f"recorded {self.recorded['val_loss']}, now {self.repeated['val_loss']}{where}"


class Sample(NamedTuple):
    """The runs to repeat, with their records.

    of        the number of runs from which the sample was taken
    like      how many of the `of` runs were recorded with the device and PyTorch version of this machine
    tokens    the number of tokens that the sampled runs train on
    """

    runs: Sequence[PlannedRun]
    records: Sequence[Record]
    of: int
    like: int
    tokens: int

    @property
    def seconds(self) -> float:
        """The recorded training time of these runs in total, in seconds; a record without a time counts as 0."""
        return sum(record.get("seconds") or 0.0 for record in self.records)

    def __str__(self) -> str:
        return (
            f"repeats {len(self.runs)} of {self.of} runs: {self.tokens:,} tokens, {duration(self.seconds / 3600)} "
            f"by their records; those of the device and torch here come first, {self.like} of the {self.of}"
        )


def sample(
    out: str | Path,
    *,
    data: str | None = None,
    share: float = 0.1,
    schemes: Sequence[str] | None = None,
    sizes: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Sample:
    """Draw a random share of a study's runs, at least one.

    Runs with the device and PyTorch of this machine come first, because all other runs can differ in the last bits.

    Args:
        schemes, sizes, seeds: sample only runs with these; None for all.

    Raises:
        InputError: the folder has no such run, or records of runs that do not belong to the study; or an argument is
            invalid.
    """
    plan, rows = open_study(out, data)
    check_names("--schemes", schemes, plan.study.schemes)
    check_names("--sizes", sizes, plan.study.sizes)
    finished = {row["key"]: row for row in rows}
    runs = [plan.recorded(row) for row in finished.values()]
    fit = {run.key for run in runs if run.config.train.steps in plan.lengths(run.kind, run.size)}
    if strange := finished.keys() - fit:
        listed = f"{len(strange)} that do not, such as {min(strange)!r}"
        raise InputError(f"{out} must hold records that fit its study, got {listed}; restore the study's settings")
    wanted = {"scheme": schemes, "size": sizes, "seed": seeds}
    asked = [
        (run, row)
        for run, row in zip(runs, finished.values())
        if all(choices is None or row[name] in choices for name, choices in wanted.items())
    ]
    if not asked:
        raise InputError(f"{out}: must have finished runs of these schemes, sizes and seeds, got none")
    shuffled = random.sample(asked, len(asked))
    ordered = sorted(shuffled, key=lambda pair: not is_like_here(*pair))
    drawn = ordered[: max(1, round(share * len(asked)))]
    like = sum(is_like_here(*pair) for pair in asked)
    tokens = sum(run.config.train.steps * plan.step_tokens[run.size] for run, _ in drawn)
    return Sample(*zip(*drawn), len(asked), like, tokens)


def is_like_here(run: PlannedRun, recorded: Record) -> bool:
    """Return whether a run was recorded with the PyTorch and the device with which it would be trained here."""
    try:
        here = circumstances_here(run.config.train.device)
    except InputError:  # no such device
        return False
    made = recorded.get("facts") or {}
    return all(made.get(name) == here[name] for name in SAME)


@cache
def circumstances_here(device: str) -> Record:
    """Return the circumstances of runs with this `train.device` here. Raises InputError if the device is missing."""
    return circumstances(pick_device(device))


def verify(drawn: Sample, *, progress: bool = True) -> Iterator[Verified]:
    """Repeat runs and compare them with their records. Raises RunError if a run fails, except by divergence."""
    for number, (run, recorded) in enumerate(zip(drawn.runs, drawn.records), start=1):
        text = f"{number}/{len(drawn.runs)} {run.key}"
        with Progress("", run.config.train.steps, enabled=progress) as bar:
            yield repeat(run, recorded, partial(bar.update, text=text))


def repeat(run: PlannedRun, recorded: Record, report: Callable[[int], None]) -> Verified:
    """Train a run once more, with one thread like all runs. Weights & Biases gets nothing of it."""
    run = run._replace(config=replace(run.config, train=replace(run.config.train, wandb=None)))
    with tempfile.TemporaryDirectory() as home, threads(1):
        repeated = train_run(run, place=Path(home) / "run", report=report)
    return Verified(run.key, recorded, finite(repeated))
