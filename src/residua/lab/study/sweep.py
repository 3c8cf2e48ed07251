"""Tune keys of a training configuration: a search alone, which compares nothing.

Every scheme must be tuned by itself before it is compared. Swept keys whose values are numbers are tuned; the others,
such as `model.connection`, make groups, and each group is tuned by itself.
"""

import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

from residua.errors import InputError
from residua.lab.data import PreparedData
from residua.lab.experiment import open_or_prepare
from residua.lab.study.engine import train_point
from residua.lab.study.report import estimate_text
from residua.lab.study.search import Point, Search, at_edge, frozen, loss_of
from residua.lab.training import RunConfig, load_config
from residua.lab.training.config import parse_overrides
from residua.records import figures
from residua.records.folder import FREE_KEYS, flatten, writable
from residua.records.jobs import Executor, Job, Record, open_runs, run_jobs
from residua.records.reading import parse_yaml
from residua.records.statistics import Estimate
from residua.records.table import Table, grouped


@dataclass(frozen=True)
class Sweep:
    """What is tuned, and how.

    source, overrides    of the configuration, as `training.load_config` takes them
    over                 the values of every swept key
    seeds                runs of a point, with the seeds train.seed, train.seed + 1, ...
    neighbours           whether the search goes on from the best point of the grid
    finalists            how many points of each group get more than the first seed, the best ones; None: all of them
    """

    source: str | Sequence[str] | None
    overrides: tuple[str, ...]
    over: Mapping[str, tuple[Any, ...]]
    seeds: int = 1
    neighbours: bool = False
    finalists: int | None = None

    def __post_init__(self) -> None:
        if not self.over:
            raise InputError("--over must have at least one key to sweep, such as train.lr=1e-3,2e-3; got none")
        if "train.seed" in self.over:
            raise InputError("--over must be another key than train.seed; --seeds N trains every point N times")
        if self.neighbours and not self.search.numeric:
            raise InputError("--neighbours needs --over with a key whose values are numbers, got none")

    @cached_property
    def search(self) -> Search:
        budget = None if self.neighbours else 0
        return Search(self.over, self.config, budget, finalists=self.finalists, seeds=range(1, self.seeds))

    def config(self, point: Mapping[str, Any]) -> RunConfig:
        """The configuration of a point, with the first seed. Raises InputError."""
        return self._configs(json.dumps(dict(point)))

    @cached_property
    def _configs(self) -> Callable[[str], RunConfig]:
        """By point, as JSON: reading one takes a tenth of a second."""

        @cache
        def read(point: str) -> RunConfig:
            config = load_config(self.source, {**parse_overrides(self.overrides), **json.loads(point)})
            return replace(config, train=replace(config.train, keep_checkpoints=1, tensorboard=False))

        return read

    def point(self, record: Record) -> Point:
        return tuple(record["point"][key] for key in self.over)

    def command(self, point: Point) -> str:
        """What a person types to train with the settings of a point."""
        sources = [self.source] if isinstance(self.source, str) else self.source or []
        given = [part for name in sources for part in ("--config", name)]
        over = [f"--{key}={_text(value)}" for key, value in self.search.named(point).items()]
        return shlex.join(["residua", "train", *given, *self.overrides, *over, "--run", "DIR"])


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
        members = grouped(records, lambda record: frozen(sweep.point(record)), itemgetter("seed"))
        results = [Result(sweep.point(runs[0]), tuple(run["val_loss"] for run in runs)) for runs in members]
        most = max((len(result.losses) for result in results if result.loss), default=0)
        order = lambda result: (len(result.losses) < most, result.loss.mean) if result.loss else (2, 0)  # noqa: E731
        return cls(sweep, tuple(sorted(results, key=order)))

    @property
    def best(self) -> Result | None:
        """The best point; None where every run diverged."""
        return self.results[0] if self.results and self.results[0].loss else None

    @property
    def command(self) -> str | None:
        """What a person types to train with the best point."""
        return None if self.best is None else self.sweep.command(self.best.point)

    @property
    def groups(self) -> dict[Point, list[Result]]:
        """The points that are tuned against each other, best first, without those that diverged."""
        groups: dict[Point, list[Result]] = {}
        for result in self.results:
            if result.loss:
                groups.setdefault(frozen(self.sweep.search.group(result.point)), []).append(result)
        return groups

    @property
    def notes(self) -> list[str]:
        """What a reader has to know: best values at the edge of what was tried, too few seeds."""
        notes, search = [], self.sweep.search
        for best, *others in ([result.point for result in results] for results in self.groups.values()):
            values = [
                f"{key}={_text(value)}"
                for key, value, *tried in zip(self.sweep.over, best, best, *others)
                if key in search.numeric and at_edge(value, tried)
            ]
            if values:
                group = "".join(f"{_text(value)}: " for value in search.group(best))
                more = "" if self.sweep.neighbours else ", or --neighbours"
                notes.append(f"{group}the best {', '.join(values)} is at the edge of what was tried; try further{more}")
        if self.best and self.best.loss.count == 1 and len(self.results) > 1:
            notes.append("one seed each: the noise is not measured; try --seeds 3")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values for `json.dumps`."""
        results = [
            {
                "point": self.sweep.search.named(result.point),
                "losses": list(result.losses),
                "mean": result.loss and result.loss.mean,
                "half_width": result.loss and result.loss.half_width,
            }
            for result in self.results
        ]
        return {"results": results, "command": self.command, "notes": self.notes}

    def table(self) -> Table:
        """Return a row for each point."""
        rows = [
            [
                *map(_text, result.point),
                str(len(result.losses)),
                estimate_text(result.loss, ".4f") if result.loss else f"diverged: {result.losses.count(None)}",
            ]
            for result in self.results
        ]
        return Table([*self.sweep.over, "seeds", "validation loss"], rows)

    def draw(self, path: Path) -> None:
        """Draw the loss against each swept key: a dot for every run, and a line through the best points of each group.

        A run that nearly diverged may lie outside.
        """
        keys, groups = list(self.sweep.over), self.groups
        figure, (panels,) = figures.panels(1, len(keys), (max(5.0, 4.2 * len(keys)), 4.2), dpi=150, sharey=True)
        for place, (key, panel) in enumerate(zip(keys, panels)):
            values = {result.point[place]: None for results in groups.values() for result in results}
            ordered = sorted(values) if key in self.sweep.search.numeric else list(values)
            for colour, (group, results) in zip(itertools.cycle(figures.COLOURS), groups.items()):
                best: dict[int, float] = {}
                for result in results:
                    position = ordered.index(result.point[place])
                    best.setdefault(position, result.loss.mean)
                    panel.plot([position] * len(result.losses), result.losses, "o", color=colour, alpha=0.4)
                label = ", ".join(map(_text, group)) or None
                panel.plot(*zip(*sorted(best.items())), "-", color=colour, label=label)
            panel.set_xticks(range(len(ordered)), list(map(_text, ordered)))
            panel.set_xlabel(key)
        losses = sorted(loss for results in groups.values() for result in results for loss in result.losses)
        best_loss, middle, worst = losses[0], losses[len(losses) // 2], losses[-1]
        span = min(worst - best_loss, 4 * (middle - best_loss)) or 0.1
        panels[0].set_ylim(best_loss - 0.1 * span, best_loss + 1.1 * span)
        panels[0].set_ylabel("Validation loss (nats per token)")
        if len(groups) > 1:
            figures.legend(figure)
        figures.save({path.name: figure}, path.parent)


def parse_over(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The swept keys and their values from `KEY=VALUE,VALUE,...`; values are read as in a YAML list.

    Raises:
        InputError: a text is something else, or names a key twice.
    """
    over: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, _, values = text.partition("=")
        try:
            parsed = parse_yaml(f"[{values}]", "--over")
        except InputError:
            parsed = None
        if not parsed:
            raise InputError(f"--over must be KEY=VALUE,VALUE,... such as train.lr=1e-3,2e-3; got {text!r}")
        if key in over:
            raise InputError(f"--over must have {key} once, got it twice; list all its values in one")
        over[key] = tuple({_text(value): value for value in parsed}.values())
    return over


def train_sweep(
    sweep: Sweep,
    out: str | Path,
    *,
    processes: int = 1,
    executor: Executor | None = None,
    keep: bool = False,
    progress: bool = True,
) -> Outcome:
    """Train the runs that the folder `out` does not hold yet. After a kill at any moment, call this again to continue.

    A run under way resumes at its newest checkpoint. A run whose loss is not finite is recorded as diverged.

    Args:
        processes: runs at the same time, each with one thread.
        executor: makes the runs in place of these processes, see `run_jobs`.
        keep: leave the run folders in `out`/runs, with their checkpoints.

    Raises:
        InputError: the configuration or the folder cannot be used, see `records.jobs.open_runs`.
        RunError: a run failed for another reason than its numbers, or a result could not be written.
    """
    for point in itertools.product(*sweep.over.values()):
        base = sweep.config(sweep.search.named(point))
    settings = {key: value for key, value in flatten(asdict(base)).items() if key not in {*sweep.over, "train.seed"}}
    settings |= {"over": sorted(sweep.over), "first seed": base.train.seed}
    if base.data.path is not None:
        settings["data"] = PreparedData.open(base.data.path).facts["fingerprint"]
    with open_runs(out, settings, free=FREE_KEYS, keep=keep) as made:
        shared, swept = None, any(key.startswith("data.") for key in sweep.over)
        if base.data.path is None and base.data.source is not None and not swept:
            shared = str(open_or_prepare(base.data, Path(out) / "data", progress=progress).folder)

        def jobs(finished: Mapping[Any, Record]) -> list[Job]:
            losses = {(frozen(sweep.point(run)), run["seed"] or None): loss_of(run) for run in finished.values()}
            return [_job(sweep, shared, point, seed or 0) for point, seed in sweep.search.wanted(losses)]

        finish = lambda job, record: {"key": job.key, **record}  # noqa: E731
        records = run_jobs(jobs, made, processes=processes, executor=executor, finish=finish, progress=progress)
    outcome = Outcome.of(sweep, records)
    if outcome.best:
        with writable(out):
            outcome.draw(Path(out) / "sweep.png")
    return outcome


def _job(sweep: Sweep, data: str | None, point: Point, seed: int) -> Job:
    swept = sweep.search.named(point)
    config = sweep.config(swept)
    config = replace(
        config,
        train=replace(config.train, seed=config.train.seed + seed),
        data=config.data if data is None else replace(config.data, path=data),
    )
    key = " ".join([*(f"{key}={_text(value)}" for key, value in swept.items()), f"seed={seed}"])
    return Job(key, train_point, (config, swept, seed), config.train.steps)


def _text(value: Any) -> str:
    """A value as it is written on a command line."""
    return value if isinstance(value, str) else json.dumps(value)
