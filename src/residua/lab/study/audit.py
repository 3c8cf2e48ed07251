"""Audit the connections of a study's runs: repeat a run, which gives the same bits, and measure it as it trains."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from residua.errors import InputError
from residua.lab.experiment import open_run
from residua.lab.inspection import Trace, sublayer_statistics, trace
from residua.lab.study.engine import Verified, open_study, repeat
from residua.lab.study.folder import AUDITS
from residua.lab.study.plan import Run
from residua.lab.training.checkpoint import saved_steps
from residua.records.folder import writable
from residua.records.jobs import Record
from residua.records.jsonlines import JsonLines, finite
from residua.records.progress import Progress
from residua.records.provenance import circumstances

WINDOWS = 8
"""Sequences of held-out tokens that are measured at every checkpoint."""


def audit(
    out: str | Path,
    *,
    data: str | None = None,
    schemes: Sequence[str] | None = None,
    rungs: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    progress: bool = True,
) -> Iterator[Record]:
    """Repeat reported runs of every scheme and size, and record their connections along training.

    Those of the study's first seed, or of `seeds`.

    Appends one row to audits.jsonl for each run that has none, and yields it: `equal`, whether the repeated run has the
    losses of its record to the last bit, and `points`, the `sublayer_statistics` at each evaluation.

    Raises:
        InputError: the folder holds no such finished run.
        RunError: a run failed for another reason than its numbers.
    """
    out = Path(out)
    plan, rows, _ = open_study(out, data)
    finished = {row.get("key"): row for row in rows}
    for name, known in ((name, plan.study.schemes) for name in schemes or ()):
        if name not in known:
            raise InputError(f"--schemes: expected some of {', '.join(known)}, got {name!r}")
    chosen = [plan.study.seeds[0]] if seeds is None else seeds
    found = [
        run
        for run in plan.runs(finished)
        if run.kind == "report"
        and run.config.train.seed in chosen
        and run.scheme in (schemes or plan.study.schemes)
        and run.rung in (rungs or plan.study.rungs)
        and finished.get(run.key, {}).get("val_loss") is not None
    ]
    if not found:
        raise InputError(f"{out}: expected finished runs of seed {', '.join(map(str, chosen))} to audit, found none")
    with writable(out), JsonLines(out / AUDITS) as lines:
        there = {row.get("key") for row in lines.rows}
        for number, run in enumerate((run for run in found if run.key not in there), start=1):
            text = f"audit {number}/{len(found)} {run.key}"
            with Progress("", run.config.train.steps, enabled=progress) as bar:
                row = _audited(run, finished[run.key], lambda step, bar=bar, text=text: bar.update(step, text))
            lines.write(row)
            lines.sync()
            yield row


def _audited(run: Run, recorded: Record, report: Any) -> Record:
    row = train_again(run, recorded, lambda *at: {"sublayers": sublayer_statistics(measured(*at))}, report)
    return {**row, "tokens": WINDOWS * run.config.train.sequence_length}


def train_again(run: Run, recorded: Record, measure: Callable[[Path, int], Record], report: Any) -> Record:
    """Repeat a run with a checkpoint at every evaluation, which changes none of its numbers, and measure each.

    measure: called with the run's folder and the step of a checkpoint; returns what goes into its point.
    """
    every = run.config.train.evaluate_every
    kept = replace(run.config.train, checkpoint_every=every, keep_checkpoints=-(-run.config.train.steps // every) + 1)
    with tempfile.TemporaryDirectory() as home:
        place = Path(home) / "run"
        repeated = finite(repeat(run._replace(config=replace(run.config, train=kept)), place, report))
        points = [{"step": step, **measure(place, step)} for step in saved_steps(place)]
    return {
        **{name: recorded[name] for name in ("key", "rung", "scheme", "connection", "seed", "steps")},
        "equal": Verified(run.key, recorded, repeated).equal,
        "points": finite(points),
        "facts": circumstances(torch.device("cpu")),
    }


def measured(place: Path, step: int) -> Trace:
    """Trace a checkpoint on the first sequences of the validation data, and join the traces along the tokens."""
    opened = open_run(place, step, device="cpu")
    length, held_out = opened.config.train.sequence_length, opened.data.validation
    count = max(1, min(WINDOWS, len(held_out) // length))
    with opened.precision():
        traces = [
            trace(opened.model, held_out.window(i * length, min(length, len(held_out))).tolist()) for i in range(count)
        ]
    names = [name for name, value in traces[0].values.items() if value.dim() > 1 and name not in _OF_ALL_TOKENS]
    values = {name: torch.cat([one.values[name] for one in traces], dim=1) for name in names}
    return Trace(traces[0].facts, [token for one in traces for token in one.tokens], values)


_OF_ALL_TOKENS = ("alignment", "compress_share", "direction", "singular_values")
