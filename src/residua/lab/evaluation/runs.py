"""Runs, read from their folders or from records, and rows of runs that differ in their seed only."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from residua.connections.names import label
from residua.errors import InputError, fits, require
from residua.lab.evaluation.comparable import Measurement, Unit
from residua.lab.records import jsonlines
from residua.lab.records.folder import LOGGING_KEYS, RunFolder, flatten, read_facts, read_settings
from residua.lab.records.statistics import Estimate


class Point(NamedTuple):
    """A loss (nats per token) and the point in the run where it was measured."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """One run.

    seed, connection    the latter by the name by which people know it, see `names.label`
    measure             how its validation losses were measured
    validation, bits    these losses in nats per token and in bits per byte, NaN where one was not finite

    Only of a folder:

    settings            the resolved configuration with dotted keys, without the seed and `LOGGING_KEYS`. If facts.json
                        has the fingerprint of the data, it replaces the data keys, so that the location of the data
                        does not matter; nor does the location of a base
    repeated, other     the validation losses on labels that repeat an earlier pair of tokens, and on all others
    tokens_per_second   the median of the logged speeds
    """

    seed: int
    connection: str
    measure: Measurement
    validation: tuple[Point, ...]
    bits: tuple[Point, ...]
    parameters: int | None = None
    folder: Path = Path()
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[Point, ...] = ()
    repeated: tuple[Point, ...] = ()
    other: tuple[Point, ...] = ()
    tokens_per_second: float | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """Read a run folder.

        Raises:
            InputError: the folder does not hold a run, or one of its files cannot be read.
        """
        run = RunFolder(Path(folder))
        for path in (run.config, run.metrics):
            if not path.is_file():
                raise InputError(f"give a run folder, got {folder}, which has no {path.name}: train into it first")
        settings = flatten(read_settings(run.config))
        facts = read_facts(run.facts)
        rows = jsonlines.read_metrics(run.metrics)
        require(
            bool(settings.get("model.connection")), f"{run.config}", "a configuration with model.connection", settings
        )
        seed = settings.pop("train.seed", 0)
        require(fits(seed, int), f"{run.config}: train.seed", "a whole number", seed)
        measure = Measurement.of(settings, facts.get("data") or {})
        settings = {key: value for key, value in settings.items() if key not in LOGGING_KEYS}
        if (fingerprint := facts.get("data", {}).get("fingerprint")) is not None:
            settings = {key: value for key, value in settings.items() if not key.startswith("data.")}
            settings["data"] = fingerprint
        if before := [row["steps_before"] for row in facts.get("resumed", []) if "steps_before" in row]:
            # Trained on after its last step, so its learning rate was another than that of a run of this length.
            settings["train.steps"] = ", then ".join(dict.fromkeys(map(str, [*before, settings.get("train.steps")])))
        if settings.get("model.base_sha256") is not None:
            settings.pop("model.base", None)
        # The first logged step is slow and would pull a mean down.
        speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second") is not None]
        speed = median_high(speeds) if speeds else None
        names = ("val_loss", "bits_per_byte", "loss", "repeated_loss", "other_loss")
        for row in (row for row in rows if any(name in row for name in names)):
            for place in ("tokens", "seconds"):
                require(
                    fits(row.get(place), float), f"{run.metrics}: {place}", "a number beside a loss", row.get(place)
                )
        validation, bits, *others = (_points(rows, name) for name in names)
        connection = settings["model.connection"]
        name = label(connection if isinstance(connection, Mapping) else str(connection))
        parameters = facts.get("parameters")
        return cls(seed, name, measure, validation, bits, parameters, run.path, settings, *others, speed)

    @classmethod
    def of(cls, record: Mapping[str, Any], measure: Measurement) -> "Run":
        """Return the run of a record, as studies and tuning write them, with its last losses."""
        step, tokens, seconds = (record.get(name) or 0 for name in ("steps", "tokens", "seconds"))
        rows = [
            {"step": step, "tokens": tokens, "seconds": seconds, name: record[key]}
            for name, key in (("validation", "val_loss"), ("bits", "bits_per_byte"))
            if key in record
        ]
        parameters = (record.get("facts") or {}).get("parameters")
        name = record.get("connection", "")
        return cls(record["seed"], name, measure, _points(rows, "validation"), _points(rows, "bits"), parameters)

    def curve(self, unit: Unit) -> tuple[Point, ...]:
        """Return the validation losses in a unit; none in bits per byte if the tokens may lose text."""
        if unit == "nats per token":
            return self.validation
        return self.bits if self.measure.lossless else ()

    def loss(self, unit: Unit) -> float | None:
        """Return the last validation loss in a unit, NaN if it was not finite; None without one."""
        curve = self.curve(unit)
        return curve[-1].loss if curve else None

    @property
    def stopped(self) -> tuple[int, int] | None:
        """The last step and the steps that were planned, if the run ended, or stands, before them."""
        planned = self.settings.get("train.steps")
        last = self.end.step if self.end else 0
        return (last, planned) if isinstance(planned, int) and last < planned else None

    @property
    def end(self) -> Point | None:
        """The last logged point."""
        return max((*self.training, *self.validation), key=lambda point: point.step, default=None)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[Point, ...]:
    """Return a loss along the rows of metrics that have it, NaN where it was not finite."""
    return tuple(
        Point(row["step"], row["tokens"], row["seconds"], math.nan if row[name] is None else row[name])
        for row in rows
        if name in row
    )


@dataclass(frozen=True)
class Row:
    """A row of a table: runs that differ in their seed only, in the order of their seeds."""

    name: str
    runs: tuple[Run, ...]

    def estimate(self, quantity: Callable[[Run], float | None]) -> Estimate | None:
        """Return a quantity over the runs that have it; None if no run has it."""
        values = [value for value in map(quantity, self.runs) if value is not None]
        return Estimate.of(values) if values else None

    def loss(self, unit: Unit) -> Estimate | None:
        """Return the last validation loss in a unit, over the runs that have one."""
        return self.estimate(lambda run: run.loss(unit))

    def whole_loss(self, unit: Unit) -> Estimate | None:
        """Return the last validation loss in a unit over all runs; None if one diverged or has none."""
        losses = [run.loss(unit) for run in self.runs]
        return None if any(loss is None or not math.isfinite(loss) for loss in losses) else self.loss(unit)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def connection(self) -> str:
        return self.runs[0].connection

    @property
    def measure(self) -> Measurement:
        return self.runs[0].measure

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def stopped(self) -> list[Run]:
        """The runs that ended before their steps, or are still under way."""
        return [run for run in self.runs if run.stopped]

    @property
    def tokens_per_second(self) -> Estimate | None:
        return self.estimate(lambda run: run.tokens_per_second)

    @property
    def seconds(self) -> Estimate | None:
        return self.estimate(lambda run: run.end.seconds if run.end else None)

    @property
    def tokens(self) -> int | None:
        """Training tokens of the shortest run, None before the first logged step."""
        return min((run.end.tokens for run in self.runs if run.end), default=None)
