"""Read a run folder: its settings, losses and speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from residua.connections.names import label
from residua.errors import InputError, fits, require
from residua.lab.evaluation.comparable import Measurement, Unit
from residua.lab.records import jsonlines
from residua.lab.records.folder import LOGGING_KEYS, RunFolder, flatten, read_facts, read_settings


class Point(NamedTuple):
    """A loss (nats per token) and the point in the run where it was measured."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """One run.

    `settings` is the resolved configuration with dotted keys, without the seed and `LOGGING_KEYS`. If facts.json has
    the fingerprint of the data, it replaces the data keys, so that the location of the data does not matter; nor does
    the location of a base.
    `tokens_per_second` is the median of the logged speeds. `measure` says how the validation losses were measured, in
    nats per token; `bits` has them in bits per byte.
    """

    folder: Path
    seed: int
    settings: Mapping[str, Any]
    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    tokens_per_second: float | None
    parameters: int | None
    measure: Measurement
    bits: tuple[Point, ...]

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
        training, validation, bits = (_points(rows, name, run) for name in ("loss", "val_loss", "bits_per_byte"))
        return cls(run.path, seed, settings, training, validation, speed, facts.get("parameters"), measure, bits)

    @property
    def connection(self) -> str:
        """The name by which people know the connection, see `names.label`."""
        connection = self.settings["model.connection"]
        return label(connection if isinstance(connection, Mapping) else str(connection))

    def curve(self, unit: Unit) -> tuple[Point, ...]:
        """Return the validation losses in a unit."""
        return self.validation if unit == "nats per token" else self.bits

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


def _points(rows: Sequence[Mapping[str, Any]], name: str, run: RunFolder) -> tuple[Point, ...]:
    """Return a loss along the rows of metrics that have it, NaN where it was not finite. Raises InputError for a row
    that does not say where it was measured.
    """
    rows = [row for row in rows if name in row]
    for row in rows:
        for place in ("tokens", "seconds"):
            require(fits(row.get(place), float), f"{run.metrics}: {place}", "a number beside a loss", row.get(place))
    return tuple(
        Point(row["step"], row["tokens"], row["seconds"], math.nan if row[name] is None else row[name]) for row in rows
    )
