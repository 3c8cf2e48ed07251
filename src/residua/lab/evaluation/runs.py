"""Runs, from their folders or from records; rows of runs that differ only in their seed; and differences of rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_high
from typing import Any, Literal, NamedTuple

from residua.connections.names import label
from residua.errors import InputError, extra, fits, require
from residua.lab.evaluation.comparable import Measurement, Unit
from residua.lab.records import jsonlines
from residua.lab.records.folder import LOGGING_KEYS, RunFolder, flatten, not_a_run, read_facts, read_settings
from residua.lab.records.jsonlines import finite
from residua.lab.records.statistics import Estimate, paired

with extra("lab"):
    import numpy

Axis = Literal["step", "tokens", "seconds"]


class LossPoint(NamedTuple):
    """A loss (nats per token), NaN if it was not finite, and the point of the run at which it was measured."""

    step: int
    tokens: int
    seconds: float
    loss: float


class Documents(NamedTuple):
    """For each document of a text, the sum of its losses (nats) and the number of its labels."""

    nats: Sequence[float]
    labels: Sequence[int]


@dataclass(frozen=True)
class Run:
    """One run, from a folder or from a record that a study or a sweep wrote.

    seed                the seed
    connection          the scheme by its name in tables, see `names.label`
    measure             how the validation losses were measured
    validation, bits    the validation losses in nats per token and in bits per byte
    repeated, other     the validation losses on labels that repeat an earlier pair of tokens, and on all others
    facts               the code, the machine, the data and the number of parameters, as in facts.json

    Only for a folder:

    settings            the resolved configuration by dotted key, without the seed and `LOGGING_KEYS`. If facts.json has
                        the fingerprint of the data, the fingerprint replaces the data keys, so that the location of
                        the data does not matter; nor does the location of a base
    tokens_per_second   the median of the logged speeds

    Only for a record:

    key, kind           the key of the record, and the purpose of the run, see `forms.RunKind`
    point               the values of the tuned settings
    transition          the step at which the model began to look up earlier pairs of tokens, infinite if it did not;
                        None if this was not measured
    documents           the losses by document: "" for the study's text, "further_" for a second text
    diverged            the message of the error that ended the run
    """

    seed: int
    connection: str
    measure: Measurement
    validation: tuple[LossPoint, ...]
    bits: tuple[LossPoint, ...] = ()
    repeated: tuple[LossPoint, ...] = ()
    other: tuple[LossPoint, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path()
    settings: Mapping[str, Any] = field(default_factory=dict)
    training: tuple[LossPoint, ...] = ()
    tokens_per_second: float | None = None
    key: str = ""
    kind: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    transition: float | None = None
    documents: Mapping[str, Documents] = field(default_factory=dict)
    diverged: str | None = None

    @classmethod
    def read(cls, folder: str | Path) -> "Run":
        """Read a run folder.

        Raises:
            InputError: the folder does not hold a run, or one of its files cannot be read.
        """
        run = RunFolder(Path(folder))
        if not run.config.is_file():
            raise not_a_run(run.path)
        if not run.metrics.is_file():
            raise InputError(f"{folder} must be a run that was trained, found no {run.metrics.name}; train it first")
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
            # This run was extended after its last step, so its learning rates are not those of a run of this length.
            settings["train.steps"] = ", then ".join(dict.fromkeys(map(str, [*before, settings.get("train.steps")])))
        if settings.get("model.base_sha256") is not None:
            settings.pop("model.base", None)
        # The first logged step is slow and would bias a mean.
        speeds = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second") is not None]
        speed = median_high(speeds) if speeds else None
        names = ("val_loss", "bits_per_byte", "loss", "repeated_loss", "other_loss")
        for row in (row for row in rows if any(name in row for name in names)):
            for place in ("tokens", "seconds"):
                require(
                    fits(row.get(place), float),
                    f"{run.metrics}: {place}",
                    "a number in rows with a loss",
                    row.get(place),
                )
        validation, bits, training, repeated, other = (_points(rows, name) for name in names)
        name = _name(settings["model.connection"])
        return cls(seed, name, measure, validation, bits, repeated, other, facts, run.path, settings, training, speed)

    @classmethod
    def of(cls, record: Mapping[str, Any], measure: Measurement) -> "Run":
        """Return the run in a record of a study or a sweep. Tokens and seconds are taken as proportional to steps."""
        steps = record.get("steps") or 1

        def points(pairs: Iterable[tuple[int, float | None]]) -> tuple[LossPoint, ...]:
            tokens, seconds = ((record.get(name) or 0) / steps for name in ("tokens", "seconds"))
            return tuple(
                LossPoint(step, round(step * tokens), step * seconds, math.nan if loss is None else loss)
                for step, loss in pairs
            )

        curve = [(step, loss) for step, loss in record.get("curve") or () if step < steps]
        split = record.get("split") or ()
        documents = {prefix: record.get(f"{prefix}documents") for prefix in ("", "further_")}
        transition = record.get("transition", math.nan)
        return cls(
            record.get("seed", 0),
            record.get("connection", ""),
            measure,
            points([*curve, (steps, record["val_loss"])]),
            points([(steps, record["bits_per_byte"])] if "bits_per_byte" in record else ()),
            points((step, again) for step, again, *_ in split),
            points((step, other) for step, _, other, *_ in split),
            record.get("facts") or {},
            key=record.get("key", ""),
            kind=record.get("kind", ""),
            point=record.get("point", {}),
            transition=math.inf if transition is None else None if math.isnan(transition) else transition,
            documents={name: Documents(some["nats"], some["labels"]) for name, some in documents.items() if some},
            diverged=record.get("diverged"),
        )

    @property
    def parameters(self) -> int | None:
        return self.facts.get("parameters")

    @property
    def steps(self) -> int:
        """The last logged step."""
        return self.end.step if self.end else 0

    def curve(self, unit: Unit) -> tuple[LossPoint, ...]:
        """Return the validation losses in a unit; empty for bits per byte if the tokenizer may lose text."""
        if unit == "nats per token":
            return self.validation
        return self.bits if self.measure.lossless else ()

    def loss(self, unit: Unit) -> float | None:
        """Return the last validation loss in a unit, NaN if it was not finite; None if there is none."""
        curve = self.curve(unit)
        return curve[-1].loss if curve else None

    @property
    def stopped(self) -> tuple[int, int] | None:
        """The last step and the number of planned steps; None if all are taken or their number is unknown."""
        planned = self.settings.get("train.steps")
        return (self.steps, planned) if isinstance(planned, int) and self.steps < planned else None

    @property
    def end(self) -> LossPoint | None:
        """The last logged point of training; None if there is none."""
        return max((*self.training, *self.validation), key=lambda point: point.step, default=None)


def _points(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[LossPoint, ...]:
    """Return the loss called `name` from all rows of metrics that have it; NaN if it was not finite."""
    return tuple(
        LossPoint(row["step"], row["tokens"], row["seconds"], math.nan if row[name] is None else row[name])
        for row in rows
        if name in row
    )


@dataclass(frozen=True)
class Row:
    """A row of a table: runs that differ only in their seed, sorted by seed."""

    name: str
    runs: tuple[Run, ...]

    def estimate(self, quantity: Callable[[Run], float | None]) -> Estimate | None:
        """Return a quantity over the runs that have it; None if no run has it."""
        return Estimate.of_known(map(quantity, self.runs))

    def loss(self, unit: Unit) -> Estimate | None:
        """Return the last validation loss in a unit, over the runs that have one."""
        return self.estimate(lambda run: run.loss(unit))

    def whole_loss(self, unit: Unit) -> Estimate | None:
        """Return the last validation loss in a unit over all runs; None if a run diverged or has no loss."""
        return None if None in self.losses(unit).values() else self.loss(unit)

    def losses(self, unit: Unit) -> dict[int, float | None]:
        """Return the last validation losses in a unit by seed; None for a run that diverged or has no loss."""
        return {run.seed: finite(run.loss(unit)) for run in self.runs}

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.runs)

    @property
    def connection(self) -> str:
        return self.runs[0].connection

    @property
    def point(self) -> Mapping[str, Any]:
        return self.runs[0].point

    @property
    def measure(self) -> Measurement:
        return self.runs[0].measure

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def stopped(self) -> list[Run]:
        """The runs that have not reached their planned steps."""
        return [run for run in self.runs if run.stopped]

    @property
    def tokens_per_second(self) -> Estimate | None:
        return self.estimate(lambda run: run.tokens_per_second)

    @property
    def seconds(self) -> Estimate | None:
        return self.estimate(lambda run: run.end.seconds if run.end else None)

    @property
    def tokens(self) -> int | None:
        """The training tokens of the shortest run; None if no run has a logged step."""
        return min((run.end.tokens for run in self.runs if run.end), default=None)

    def shared(self, other: "Row") -> tuple[dict[int, Run], dict[int, Run]]:
        """Return the evaluated runs of both rows by seed: those with common seeds, or all runs if no seed is common."""
        ours, theirs = ({run.seed: run for run in row.runs if run.validation} for row in (self, other))
        shared = sorted(ours.keys() & theirs.keys())
        if not shared:
            return ours, theirs
        return {seed: ours[seed] for seed in shared}, {seed: theirs[seed] for seed in shared}

    def minus(self, other: "Row", axis: Axis, unit: Unit) -> dict[float, Estimate]:
        """Return the validation loss of this row minus that of another, keyed by position on `axis`.

        Differences are taken seed by seed if there are common seeds. There is a difference at every position at which
        some run was evaluated and which the curves of all runs cover; other curves are interpolated there. Empty if
        the curves do not overlap.
        """
        sides = [
            {
                seed: list(zip(*((getattr(point, axis), point.loss) for point in run.curve(unit))))
                for seed, run in runs.items()
            }
            for runs in self.shared(other)
        ]
        if not all(side and all(side.values()) for side in sides):
            return {}
        axes = [at for side in sides for at, _ in side.values()]
        first, last = max(at[0] for at in axes), min(at[-1] for at in axes)
        points = sorted({value for at in axes for value in at if first <= value <= last})
        losses = (zip(*(numpy.interp(points, *curve).tolist() for curve in side.values())) for side in sides)
        pairs = zip(*([dict(zip(side, values)) for values in columns] for side, columns in zip(sides, losses)))
        return {at: _difference(ours, theirs) for at, (ours, theirs) in zip(points, pairs)}


def _name(connection: Any) -> str:
    """Return the name of a connection in a configuration, with only those options that differ from their defaults."""
    if isinstance(connection, Mapping) and "scheme" in connection:  # with all options, as in a converted model
        from residua.connections.registry import name_of, resolve  # imported here because it loads torch

        with suppress(TypeError, ValueError):  # no installed package has this scheme
            return name_of(resolve(connection))
    return label(connection if isinstance(connection, Mapping) else str(connection))


def _difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate:
    """Return the difference over the common seeds; without common seeds, that of the means, with a count of 0."""
    if pairs := paired(ours, theirs):
        return pairs
    left, right = Estimate.of(ours.values()), Estimate.of(theirs.values())
    single = left.deviation is None or right.deviation is None
    return Estimate(left.mean - right.mean, None if single else math.hypot(left.deviation, right.deviation), 0)
