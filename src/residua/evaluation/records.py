"""What a run folder tells: its settings, its losses, its speed."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from residua.errors import InputError, extra

with extra("lab"):
    import yaml


TOLD_ELSEWHERE = {"train.connections_every", "train.tensorboard", "train.wandb"}
"""Settings of what else is written down: runs that differ in them alone are alike."""


class Point(NamedTuple):
    """A loss (nats per token) with the place in the run where it was measured."""

    step: int
    tokens: int
    seconds: float
    loss: float


@dataclass(frozen=True)
class Run:
    """What one run folder tells.

    `settings` is the resolved configuration with dotted keys, without the seed and `TOLD_ELSEWHERE`; the data stand in
    it as their fingerprint where facts.json has it, so that the place where they lie makes no difference.
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
            InputError: it is no run folder, or one of its files cannot be read.
        """
        folder = Path(folder)
        for name in ("config.yaml", "metrics.jsonl"):
            if not (folder / name).is_file():
                raise InputError(f"expected a run folder, got {folder}, which has no {name}: train into it first")
        config = _read_config(folder / "config.yaml")
        facts = _read_facts(folder / "facts.json")
        training, validation, speeds = _read_metrics(folder / "metrics.jsonl")

        settings = dict(_flatten(config))
        seed = settings.pop("train.seed", 0)
        settings = {key: value for key, value in settings.items() if key not in TOLD_ELSEWHERE}
        fingerprint = facts.get("data", {}).get("fingerprint")
        if fingerprint is not None:
            settings = {key: value for key, value in settings.items() if not key.startswith("data.")}
            settings["data"] = fingerprint
        return cls(folder, seed, settings, training, validation, _median(speeds), facts.get("parameters"))

    @property
    def connection(self) -> str:
        """The connection as a person would write it: the name of the preset or scheme, with the options given to it."""
        prefix = "model.connection."
        options = {key.removeprefix(prefix): v for key, v in self.settings.items() if key.startswith(prefix)}
        name = options.pop("preset", None) or options.pop("scheme", None) or self.settings.get("model.connection", "?")
        given = ", ".join(f"{option}={value}" for option, value in options.items())
        return f"{name}({given})" if given else str(name)

    @property
    def end(self) -> Point | None:
        """Where the run stands: its last logged point."""
        return max((*self.training, *self.validation), key=lambda point: point.step, default=None)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"expected YAML in {path}, got something else: {str(error).splitlines()[0]}") from error
    if not isinstance(config, dict):
        raise InputError(f"expected the settings of a run in {path}, got {type(config).__name__}")
    return config


def _read_facts(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"expected JSON in {path}, got something else: {error}") from error
    if not isinstance(facts, dict):
        raise InputError(f"expected a JSON object in {path}, got {type(facts).__name__}")
    return facts


def _read_metrics(path: Path) -> tuple[tuple[Point, ...], tuple[Point, ...], list[float]]:
    """Training points, validation points and the logged speeds.

    A last line that is not complete is being written or was cut by a crash, and is left out. A step that goes back
    means that the run was resumed: what it had logged beyond is void.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    training: list[Point] = []
    validation: list[Point] = []
    speeds: list[float] = []
    tokens, seconds = 0, 0.0
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            step = row["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise InputError(
                f"expected a JSON object with a step in {path}, line {number}, got: {line[:60]}"
            ) from error
        tokens, seconds = row.get("tokens", tokens), row.get("seconds", seconds)
        for points, name in ((training, "loss"), (validation, "val_loss")):
            while points and points[-1].step > step:
                points.pop()
            if name in row:
                if points and points[-1].step == step:
                    points.pop()
                points.append(Point(step, tokens, seconds, math.nan if row[name] is None else row[name]))
        if "tokens_per_second" in row:
            speeds.append(row["tokens_per_second"])
    return tuple(training), tuple(validation), speeds


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _median(values: Sequence[float]) -> float | None:
    """Of the speeds: the first logged step is slow, and a mean would carry that."""
    return sorted(values)[len(values) // 2] if values else None
