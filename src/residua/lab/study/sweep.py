"""Tune keys of a training configuration: train every point of a grid over several seeds, or walk to the best point.

Every scheme must be tuned by itself before it is compared. Swept keys whose values are numbers are tuned; the others,
such as `model.connection`, make groups, and each group is tuned by itself.
"""

import itertools
import json
import math
import shlex
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from residua.errors import Diverged, InputError, require
from residua.lab.data import PreparedData
from residua.lab.evaluation.loss import transition
from residua.lab.experiment import open_or_prepare, run
from residua.lab.training import RunConfig, load_config
from residua.records.durable import remove, write_text
from residua.records.folder import FREE_KEYS, RunFolder, flatten, read_object, writable
from residua.records.jobs import Job, Record, open_runs, run_jobs
from residua.records.jsonlines import finite, read_metrics
from residua.records.reading import parse_yaml
from residua.records.statistics import Estimate
from residua.records.table import Table, grouped

Point = tuple[Any, ...]
"""A value for each swept key."""
FACTOR = 2.0
"""From a point to its neighbours, in both directions."""


@dataclass(frozen=True)
class Sweep:
    """What is tuned, and how.

    source, overrides    of the configuration, as `training.load_config` takes them
    over                 the values of every swept key
    seeds                runs of a point, with the seeds train.seed, train.seed + 1, ...
    neighbours           when the grid is done, train the neighbours of the best point of each group (each number halved
                         and doubled), until none of them is better
    finalists            how many points of each group get more than the first seed, the best ones; None: all of them
    budget               how many points of each group are trained at most; None: as many as it takes
    factors              from a point to its neighbours in a key; FACTOR for the keys that are not here
    """

    source: str | Sequence[str] | None
    overrides: tuple[str, ...]
    over: Mapping[str, tuple[Any, ...]]
    seeds: int = 1
    neighbours: bool = False
    finalists: int | None = None
    budget: int | None = None
    factors: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.over:
            raise InputError("--over must have at least one key to sweep, such as train.lr=1e-3,2e-3; got none")
        if "train.seed" in self.over:
            raise InputError("--over must be another key than train.seed; --seeds N trains every point N times")
        for name, value in (("seeds", self.seeds), ("finalists", self.finalists), ("budget", self.budget)):
            require(value is None or value >= 1, f"--{name}", "at least 1", value)
        if self.neighbours and not self.numeric:
            raise InputError("--neighbours needs --over with a key whose values are numbers, got none")

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.over)

    @property
    def numeric(self) -> tuple[int, ...]:
        """The places of the keys that are tuned: all their values are positive numbers."""
        return tuple(
            place
            for place, values in enumerate(self.over.values())
            if all(isinstance(value, int | float) and not isinstance(value, bool) and value > 0 for value in values)
        )

    def config(self, point: Point, seed: int = 0, data: str | None = None) -> RunConfig:
        """The configuration of one run, its seed counted from 0. Raises InputError."""
        known = frozen(point), seed, data
        if known not in self._configs:
            self._configs[known] = self._read(point, seed, data)
        return self._configs[known]

    @cached_property
    def _configs(self) -> dict[tuple, RunConfig]:
        """What was read before: reading takes a tenth of a second."""
        return {}

    def _read(self, point: Point, seed: int, data: str | None) -> RunConfig:
        changes = [f"--{key}={_text(value)}" for key, value in zip(self.keys, point)]
        if data is not None:
            changes.append(f"--data.path={data}")
        config = load_config(self.source, [*self.overrides, *changes])
        train = replace(config.train, seed=config.train.seed + seed, keep_checkpoints=1, tensorboard=False)
        return replace(config, train=train)

    def group(self, point: Point) -> Point:
        """The values that are not tuned."""
        return tuple(value for place, value in enumerate(point) if place not in self.numeric)

    def wanted(self, losses: Mapping[tuple[Point, int], float]) -> Iterator[tuple[Point, int]]:
        """The runs (point, seed) that are needed, as far as the losses that are there tell."""
        groups: dict[Point, list[Point]] = {}
        for point in itertools.product(*self.over.values()):
            groups.setdefault(frozen(self.group(point)), []).append(point)
        for points in groups.values():
            ranked = self._ranked(points, losses)
            while self.neighbours and ranked is not None and math.isfinite(losses[frozen(ranked[0]), 0]):
                known = {frozen(point) for point in points}
                new = [point for point in self._beside(ranked[0]) if frozen(point) not in known]
                new = new[: None if self.budget is None else max(0, self.budget - len(points))]
                if not new:
                    break
                points += new
                ranked = self._ranked(points, losses)
            yield from ((point, 0) for point in points)
            if ranked is not None:
                yield from ((point, seed) for seed in range(1, self.seeds) for point in ranked[: self.finalists])

    def best(self, losses: Mapping[tuple[Point, int], float]) -> list[Point]:
        """The points that did not diverge, the best of the first seed first; none of them while a run is missing."""
        points = [point for point, seed in self.wanted(losses) if seed == 0]
        return [point for point in self._ranked(points, losses) or () if math.isfinite(losses[frozen(point), 0])]

    def _ranked(self, points: Sequence[Point], losses: Mapping[tuple[Point, int], float]) -> list[Point] | None:
        """The points, the best of the first seed first; None where one is missing."""
        if not all((frozen(point), 0) in losses for point in points):
            return None
        return sorted(points, key=lambda point: losses[frozen(point), 0])

    def _beside(self, point: Point) -> Iterator[Point]:
        for place in self.numeric:
            width = self.factors.get(self.keys[place], FACTOR)
            for factor in (1 / width, width):
                typed = flatten(asdict(self.config(point)))[self.keys[place]]
                value = round(typed * factor) if isinstance(typed, int) else float(f"{typed * factor:.6g}")
                other = (*point[:place], value, *point[place + 1 :])
                try:
                    self.config(other)
                except InputError:  # beyond the range of the key
                    continue
                if value != point[place]:
                    yield other


@dataclass(frozen=True)
class Result:
    """The finished runs of one point, in the order of their seeds. `losses` has None for a run that diverged."""

    point: Point
    losses: tuple[float | None, ...]

    @property
    def loss(self) -> Estimate | None:
        """The last validation loss over the seeds; None where a run diverged."""
        return None if None in self.losses else Estimate.of(self.losses)


@dataclass(frozen=True)
class Outcome:
    """The results of a sweep, best first; points with fewer seeds than others stand below them."""

    sweep: Sweep
    results: tuple[Result, ...]

    @classmethod
    def of(cls, sweep: Sweep, records: Iterable[Record]) -> "Outcome":
        members = grouped(records, lambda record: frozen(_point(sweep, record)), itemgetter("seed"))
        results = [Result(_point(sweep, runs[0]), tuple(run["val_loss"] for run in runs)) for runs in members]
        whole = [result for result in results if result.loss]
        most = max((len(result.losses) for result in whole), default=0)
        whole.sort(key=lambda result: (len(result.losses) < most, result.loss.mean))
        return cls(sweep, (*whole, *(result for result in results if not result.loss)))

    @property
    def groups(self) -> dict[Point, list[Result]]:
        """The results of each group, best first, without those of which a run diverged."""
        groups: dict[Point, list[Result]] = {}
        for result in filter(lambda result: result.loss, self.results):
            groups.setdefault(frozen(self.sweep.group(result.point)), []).append(result)
        return groups

    @property
    def best(self) -> Result | None:
        """The best point; None where every run diverged."""
        return self.results[0] if self.results and self.results[0].loss else None

    @property
    def notes(self) -> list[str]:
        """What a reader has to know: best values at the edge of what was tried, too few seeds."""
        notes = []
        for results in self.groups.values():
            for place in self.sweep.numeric:
                tried = {result.point[place] for result in results}
                value = results[0].point[place]
                if len(tried) > 1 and value in (min(tried), max(tried)):
                    whose = " ".join(map(_text, self.sweep.group(results[0].point)))
                    more = "" if self.sweep.neighbours else ", or --neighbours"
                    notes.append(
                        f"{whose}{whose and ': '}the best {_label(self.sweep.keys[place], value)} is at the edge of "
                        f"what was tried; try further values{more}"
                    )
        if self.best and self.best.loss.count == 1 and len(self.results) > 1:
            notes.append("one seed each: the noise is not measured; try --seeds 3")
        return notes

    def command(self) -> str | None:
        """What a person types to train with the best point."""
        if self.best is None:
            return None
        sources = [self.sweep.source] if isinstance(self.sweep.source, str) else self.sweep.source or []
        source = [part for name in sources for part in ("--config", name)]
        over = [f"--{key}={_text(value)}" for key, value in zip(self.sweep.keys, self.best.point)]
        return shlex.join(["residua", "train", *source, *self.sweep.overrides, *over, "--run", "DIR"])

    def table(self) -> Table:
        """Return a row for each point."""
        header = [*self.sweep.keys, "seeds", "validation loss", "95 % interval"]
        rows = []
        for result in self.results:
            loss = result.loss
            half = loss and loss.half_width
            cells = [
                f"{loss.mean:.4f}" if loss else f"– ({result.losses.count(None)} diverged)",
                "–" if half is None else f"± {half:.4f}",
            ]
            rows.append([*map(_text, result.point), str(len(result.losses)), *cells])
        return Table(header, rows)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for `json.dumps`."""
        results = [
            {
                "point": dict(zip(self.sweep.keys, result.point)),
                "losses": list(result.losses),
                "mean": result.loss and result.loss.mean,
                "half_width": result.loss and result.loss.half_width,
            }
            for result in self.results
        ]
        return {"results": results, "command": self.command(), "notes": self.notes}

    def draw(self, path: Path) -> None:
        """Draw the loss against each swept key: a dot for every run, and a line along the best points of each group."""
        from residua.records import figures

        keys, groups = self.sweep.keys, self.groups
        figure, (panels,) = figures.panels(1, len(keys), (max(5.0, 4.2 * len(keys)), 4.2), dpi=150, sharey=True)
        for place, panel in enumerate(panels):
            self._panel(panel, place, groups)
        losses = sorted(loss for results in groups.values() for result in results for loss in result.losses)
        best, middle, worst = losses[0], losses[len(losses) // 2], losses[-1]
        span = min(worst - best, 4 * (middle - best)) or 0.1  # a run that nearly diverged must not flatten the rest
        panels[0].set_ylim(best - 0.3 * span, best + 1.3 * span)
        panels[0].set_ylabel("Validation loss (nats per token)")
        panels[-1].set_title("Dots: runs. Lines: best point at each value, ± 95 %.", loc="right", fontsize=8)
        if len(groups) > 1:
            figures.legend(figure)
        figures.save({path.name: figure}, path.parent)

    def _panel(self, panel: Any, place: int, groups: Mapping[Point, Sequence[Result]]) -> None:
        """Draw one swept key. Groups stand beside each other at each value."""
        from residua.records import figures

        numeric = place in self.sweep.numeric
        values = {frozen(result.point)[place]: result.point[place] for some in groups.values() for result in some}
        ordered = sorted(values) if numeric else list(values)
        at = {value: math.log2(value) if numeric else float(number) for number, value in enumerate(ordered)}
        for number, (group, results) in enumerate(groups.items()):
            aside = 0.05 * (number - (len(groups) - 1) / 2)
            colour = figures.COLOURS[number % len(figures.COLOURS)]
            places = [at[frozen(result.point)[place]] + aside for result in results]
            lowest: dict[float, Estimate] = {}
            for x, result in sorted(zip(places, results), key=itemgetter(0)):  # at each place the best comes first
                lowest.setdefault(x, result.loss)
            dots = [(x, loss) for x, result in zip(places, results) for loss in result.losses]
            panel.scatter(*zip(*dots), s=12, facecolor="none", edgecolor=colour, linewidth=0.6, alpha=0.6)
            label = ", ".join(map(_text, group))
            figures.intervals(panel, lowest, upright=True, color=colour, linestyle="-", label=label)
        names = [_text(value) for value in ordered]
        panel.set_xticks(list(at.values()), names, rotation=45 if sum(map(len, names)) > 40 else 0)
        panel.set_xlim(min(at.values()) - 0.4, max(at.values()) + 0.4)
        panel.set_xlabel(self.sweep.keys[place])


def parse_over(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The swept keys and their values from `KEY=VALUE,VALUE,...`; values are read as in a YAML list.

    Raises:
        InputError: a text is something else, or names a key twice.
    """
    over: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            found = parse_yaml(f"[{values}]", "--over") if equals and values else None
        except InputError:
            found = None
        if not found or not isinstance(found, list):
            raise InputError(f"--over must be KEY=VALUE,VALUE,... such as train.lr=1e-3,2e-3; got {text!r}")
        if key in over:
            raise InputError(f"--over must have {key} once, got it twice; list all its values in one")
        over[key] = tuple({_text(value): value for value in found}.values())
    return over


def train_sweep(
    sweep: Sweep, out: str | Path, *, processes: int = 1, keep: bool = False, progress: bool = True
) -> Outcome:
    """Train the runs that the folder `out` does not hold yet. After a kill at any moment, call this again to continue.

    A run under way resumes at its newest checkpoint. A run whose loss is not finite is recorded as diverged.

    Args:
        processes: runs at the same time, each with one thread.
        keep: leave the run folders in `out`/runs, with their checkpoints.

    Raises:
        InputError: the configuration or the folder cannot be used, see `records.jobs.open_runs`.
        RunError: a run failed for another reason than its numbers, or a result could not be written.
    """
    require(processes >= 1, "--processes", "at least 1", processes)
    out = Path(out)
    for point in itertools.product(*sweep.over.values()):
        base = sweep.config(point)
    settings = {key: value for key, value in flatten(asdict(base)).items() if key not in {*sweep.over, "train.seed"}}
    settings |= {"over": sorted(sweep.over), "first seed": base.train.seed}
    if base.data.path is not None:
        settings["data"] = PreparedData.open(base.data.path).facts["fingerprint"]
    with open_runs(out, settings, free=FREE_KEYS, keep=keep) as made:
        swept = any(key.startswith("data.") for key in sweep.over)
        data = None if swept else shared_data(base, out / "data", progress=progress)

        job = cache(partial(_job, sweep, data))

        def jobs(finished: Mapping[Any, Record]) -> list[Job]:
            wanted = sweep.wanted(_losses(sweep, finished.values()))
            return [job(json.dumps(point), seed) for point, seed in wanted]

        records = run_jobs(
            jobs, made, processes=processes, finish=lambda job, record: {"key": job.key, **record}, progress=progress
        )
    outcome = Outcome.of(sweep, records)
    with writable(out):
        write_text(out / "sweep.json", json.dumps(finite(outcome.to_json()), indent=1, ensure_ascii=False) + "\n")
        if outcome.best:
            outcome.draw(out / "sweep.png")
    return outcome


def train_point(
    config: RunConfig, point: Mapping[str, Any], seed: int, *, place: Path, report: Callable[[int], None]
) -> Record:
    """One run, in the folder `place`; returns its record."""
    folder = RunFolder(place)
    begun = folder.config.is_file()
    if not begun:
        remove(place)  # of a run that was killed before it wrote its configuration
    record = {"point": dict(point), "seed": seed, "steps": config.train.steps}
    try:
        result = run(config, place, resume=begun, progress=report)
    except Diverged as error:
        return record | {"val_loss": None, "diverged": str(error)}
    if result["interrupted"]:
        if signal.getsignal(result["signal"]) not in (signal.SIG_DFL, None):
            signal.raise_signal(result["signal"])  # training took it; whoever waits for all runs wants it too
        raise KeyboardInterrupt
    rows = read_metrics(folder.metrics)
    names = ("val_loss", "loss", "tokens", "seconds", "tokens_per_second")
    facts = read_object(folder.facts)
    facts.get("data", {}).pop("place", None)  # of this folder, which is removed
    curve = [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row]
    record |= finite({name: result[name] for name in names}) | {"curve": curve, "facts": facts}
    for prefix in ("", "further_"):
        names = "step", f"{prefix}repeated_loss", f"{prefix}other_loss"
        if split := [[row[name] for name in names] for row in rows if row.get(names[1]) is not None]:
            record |= {f"{prefix}split": split, f"{prefix}transition": transition(split)}
    further = [[row["step"], row["further_val_loss"]] for row in rows if "further_val_loss" in row]
    return record | ({"further_curve": further} if further else {})


def _job(sweep: Sweep, data: str | None, text: str, seed: int) -> Job:
    point = tuple(json.loads(text))
    config = sweep.config(point, seed, data)
    swept = dict(zip(sweep.keys, point))
    key = " ".join([*(_label(key, value) for key, value in swept.items()), f"seed={seed}"])
    return Job(key, train_point, (config, swept, seed), config.train.steps)


def _losses(sweep: Sweep, records: Sequence[Record]) -> dict[tuple[Point, int], float]:
    """The losses that are there; infinite for a run that diverged."""
    return {
        (frozen(_point(sweep, record)), record["seed"]): math.inf if record["val_loss"] is None else record["val_loss"]
        for record in records
    }


def _point(sweep: Sweep, record: Record) -> Point:
    return tuple(record["point"][key] for key in sweep.keys)


def shared_data(config: RunConfig, folder: Path, *, progress: bool) -> str | None:
    """Return the prepared data of all runs; None where the configuration names them."""
    if config.data.path is not None or config.data.source is None:
        return None
    return str(open_or_prepare(config.data, folder, progress=progress).folder)


def frozen(point: Sequence[Any]) -> Point:
    """Return the point as something that can be compared: a mapping in it, such as a connection, becomes text."""
    return tuple(_text(value) if isinstance(value, dict | list) else value for value in point)


def _text(value: Any) -> str:
    """A value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _label(key: str, value: Any) -> str:
    return f"{key}={_text(value)}"
