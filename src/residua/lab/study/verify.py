"""Repeat runs of a study, which gives the same bits, and measure their connections as they train."""

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from residua.errors import InputError, require
from residua.lab.experiment import open_run
from residua.lab.inspection import Trace, sublayer_statistics, trace
from residua.lab.study.definition import check_names
from residua.lab.study.engine import open_study, train_run
from residua.lab.study.folder import AUDITS
from residua.lab.study.plan import Plan, Run
from residua.lab.training.checkpoint import saved_steps
from residua.records.folder import writable
from residua.records.jobs import Record
from residua.records.jsonlines import JsonLines, finite
from residua.records.progress import Progress
from residua.records.provenance import circumstances
from residua.records.threads import threads

SAME = ("device", "torch")
"""Facts of a run with which its last bits can change."""
WINDOWS = 8
"""Sequences of held-out tokens that are measured at every evaluation."""
_OF_ALL_TOKENS = ("alignment", "compress_share", "direction", "singular_values")


class Verified(NamedTuple):
    """A run that was repeated: what its record says, what came now, and what was measured at its evaluations."""

    key: str
    recorded: Record
    repeated: Record
    points: Sequence[Record] = ()

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
    def row(self) -> Record:
        """The line of what was measured."""
        names = ("key", "rung", "scheme", "connection", "seed", "steps")
        named = {name: self.recorded[name] for name in names}
        return {**named, "equal": self.equal, "points": self.points, "facts": circumstances(torch.device("cpu"))}


def verify(
    out: str | Path,
    *,
    data: str | None = None,
    share: float = 0.1,
    schemes: Sequence[str] | None = None,
    rungs: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    connections: bool = False,
    progress: bool = True,
) -> Iterator[Verified]:
    """Repeat a random share of a study's runs, one at least, and compare them with their records.

    Args:
        schemes, rungs, seeds: the runs to draw from. None for all of them.
        connections: draw from the reported runs, of the study's first seed without `seeds`; measure their connections
            at each evaluation, and append one row to audits.jsonl for each run that has none there: `equal`, whether
            the bits are those of its record, and `points`, the `sublayer_statistics` at each evaluation.

    Raises:
        InputError: the folder holds no such run, or records that the study would not make, which nobody can repeat; or
            an argument cannot be used.
        RunError: a run failed for another reason than its numbers.
    """
    require(0 < share <= 1, "--share", "a number above 0, 1 at most", share)
    out = Path(out)
    plan, rows = open_study(out, data)
    check_names("--schemes", schemes, plan.study.schemes)
    check_names("--rungs", rungs, plan.study.rungs)
    finished = {row["key"]: row for row in rows}
    seeds = plan.study.seeds[:1] if connections and seeds is None else seeds
    runs = [
        run
        for run in _runs_of(plan, finished, out)
        if not connections or (run.kind == "report" and finished[run.key]["val_loss"] is not None)
        if _is_among(run.scheme, schemes) and _is_among(run.size, rungs) and _is_among(run.config.train.seed, seeds)
    ]
    if not runs:
        raise InputError(f"{out}: must have finished runs of these schemes, sizes and seeds, got none")
    places = random.sample(range(len(runs)), max(1, round(share * len(runs))))
    with writable(out), JsonLines(out / AUDITS) if connections else nullcontext() as lines:
        measured = {row.get("key") for row in lines.rows} if lines else set()
        chosen = [runs[place] for place in sorted(places) if runs[place].key not in measured]
        for number, run in enumerate(chosen, start=1):
            text = f"{number}/{len(chosen)} {run.key}"
            with Progress("", run.config.train.steps, enabled=progress) as bar:
                rerun = repeat(run, finished[run.key], partial(bar.update, text=text), _measure if lines else None)
            if lines:
                lines.write({**rerun.row, "tokens": WINDOWS * run.config.train.sequence_length})
                lines.sync()
            yield rerun


def _runs_of(plan: Plan, finished: Mapping[str, Record], out: Path) -> list[Run]:
    """Return the runs behind the records of a study. Raises InputError for a record that the study would not make."""
    runs = [plan.recorded(row) for row in finished.values()]
    if strange := finished.keys() - {run.key for run in runs}:
        listed = f"{len(strange)} others: {min(strange)!r}"
        raise InputError(f"{out} must hold records of the study's own runs, got {listed}")
    return runs


def _is_among(value: Any, choices: Sequence[Any] | None) -> bool:
    return choices is None or value in choices


def repeat(
    run: Run, recorded: Record, report: Callable[[int], None], measure: Callable[[Path, int], Record] | None = None
) -> Verified:
    """Train a run once more, with one thread as all runs.

    measure: what goes into the points, from the run's folder and the step of a checkpoint. There is one at every
        evaluation, which changes no number of the run.
    """
    train = run.config.train
    if measure is not None:
        most = -(-train.steps // train.evaluate_every) + 1
        train = replace(train, checkpoint_every=train.evaluate_every, keep_checkpoints=most)
    with tempfile.TemporaryDirectory() as home:
        place = Path(home) / "run"
        with threads(1):
            repeated = train_run(run._replace(config=replace(run.config, train=train)), place=place, report=report)
        points = [{"step": step, **measure(place, step)} for step in saved_steps(place)] if measure else []
    return Verified(run.key, recorded, finite(repeated), finite(points))


def _measure(place: Path, step: int) -> Record:
    """The statistics of a checkpoint on the first sequences of the validation data."""
    opened = open_run(place, step, device="cpu")
    length, held_out = opened.config.train.sequence_length, opened.data.validation
    count = max(1, min(WINDOWS, len(held_out) // length))
    with opened.precision():
        traces = [
            trace(opened.model, held_out.window(i * length, min(length, len(held_out))).tolist()) for i in range(count)
        ]
    names = [name for name, value in traces[0].values.items() if value.dim() > 1 and name not in _OF_ALL_TOKENS]
    values = {name: torch.cat([each.values[name] for each in traces], dim=1) for name in names}
    return {
        "sublayers": sublayer_statistics(Trace(traces[0].facts, [t for each in traces for t in each.tokens], values))
    }
