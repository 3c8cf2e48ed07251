"""Read a run folder: its settings, losses and speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_high
from typing import Any, NamedTuple

from residua.errors import InputError, require
from residua.records import jsonlines
from residua.records.folder import LOGGING_KEYS, RunFolder, flatten, read_object, read_settings


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
    `tokens_per_second` is the median of the logged speeds.
    """

    folder: Path
    seed: int
    settings: Mapping[str, Any]
    training: tuple[Point, ...]
    validation: tuple[Point, ...]
    tokens_per_second: float | None
    parameters: int | None

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
        facts = read_object(run.facts) if run.facts.is_file() else {}
        rows = jsonlines.read(run.metrics)
        require(
            bool(settings.get("model.connection")), f"{run.config}", "a configuration with model.connection", settings
        )
        seed = settings.pop("train.seed", 0)
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
        training, validation = _points(rows, "loss"), _points(rows, "val_loss")
        return cls(run.path, seed, settings, training, validation, speed, facts.get("parameters"))

    @property
    def connection(self) -> str:
        """The connection in short form: the name of the preset or scheme, with its options."""
        connection = self.settings["model.connection"]
        if not isinstance(connection, Mapping):
            return str(connection)
        name = connection.get("preset") or connection.get("scheme")
        options = [f"{key}={value}" for key, value in connection.items() if key not in ("preset", "scheme")]
        return f"{name}({', '.join(options)})" if options else str(name)

    @property
    def context(self) -> int | None:
        """The number of tokens in a sequence, of training and of validation; None where the settings do not say."""
        return self.settings.get("train.sequence_length")

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
