"""Tune keys of a training configuration, with the search that a study uses but without baselines and comparisons.

Every scheme must be tuned before it is compared. Swept keys whose values are numbers are tuned. All other keys, such as
`model.connection`, form groups, and each group has its own search. Keys that determine how a loss is measured, such as
`train.sequence_length`, form groups too, so that a best point is never chosen among losses that cannot be compared.
"""

import itertools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from residua.errors import InputError, fits, require, shown
from residua.files.reading import parse_yaml
from residua.lab.data import PreparedData
from residua.lab.evaluation.comparable import NATS, Measurement, Unit, Verdict, common_unit, decides_measure
from residua.lab.evaluation.runs import Row, Run
from residua.lab.experiment import open_or_prepare
from residua.lab.jobs.pool import Executor, Job, Record, open_runs, run_jobs
from residua.lab.records import figures
from residua.lab.records.folder import FREE_KEYS, flatten, writable
from residua.lab.records.table import Table, grouped
from residua.lab.study.engine import train_point
from residua.lab.study.forms import RunRecord, check_records
from residua.lab.study.report import estimate_text
from residua.lab.study.search import Search, at_edge, losses_in, values_of
from residua.lab.training import RunConfig, load_config
from residua.lab.training.config import STEPS, parse_overrides, recipe_shares


@dataclass
class Sweep:
    """A search over keys of a configuration.

    sources, overrides   the configuration, as for `training.load_config`
    over                 the values of every swept key
    seeds                the number of seeds per point: train.seed, train.seed + 1, ...
    neighbours           whether the search continues from the best point of the grid
    finalists            the number of best points of each group that are trained with further seeds; None for all
    begun                the settings in the folder, by dotted key, if the sweep resumes, see `load_config`
    """

    sources: tuple[str, ...]
    overrides: tuple[str, ...]
    over: Mapping[str, tuple[Any, ...]]
    seeds: int = 1
    neighbours: bool = False
    finalists: int | None = None
    begun: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._configs: dict[str, RunConfig] = {}
        if not self.over:
            raise InputError("--over must have at least one key to sweep, such as train.lr=1e-3,2e-3; got none")
        if "train.seed" in self.over:
            raise InputError("--over must not be train.seed; --seeds N trains every point N times")
        if self.neighbours and not self.tuned:
            raise InputError("--neighbours needs --over with a key whose values are numbers to tune, got none")

    @property
    def tuned(self) -> list[str]:
        """The keys that have only positive numbers as values and do not determine how a loss is measured."""
        return [
            key
            for key, values in self.over.items()
            if not decides_measure(key) and all(fits(x, float) and x > 0 for x in values)
        ]

    def searches(self) -> dict[str, Search]:
        """Return the search of each group, keyed by the values that the group's points share."""
        first = {key: values[0] for key, values in self.over.items()}
        others = [key for key in self.over if key not in self.tuned]
        searches = {}
        for values in itertools.product(*map(self.over.get, others)):
            searches[", ".join(map(_group_text, others, values))] = Search(
                {key: self.over[key] for key in self.tuned},
                values_of(self.config),
                {**first, **dict(zip(others, values))},
                budget=None if self.neighbours else 0,
                finalists=self.finalists,
                seeds=range(self.seeds) if self.seeds > 1 else (),
            )
        return searches

    def config(self, point: Mapping[str, Any]) -> RunConfig:
        """Return the configuration of a point, with the first seed. Raises InputError."""
        place = repr(dict(point))  # cached, because reading a configuration takes a tenth of a second
        if place not in self._configs:
            config = load_config(self.sources, self._values(point), begun={} if STEPS in self.over else self.begun)
            train = replace(config.train, keep_checkpoints=1, tensorboard=False)
            self._configs[place] = replace(config, train=train)
        return self._configs[place]

    def _values(self, point: Mapping[str, Any]) -> dict[str, Any]:
        return {**parse_overrides(self.overrides), **point}

    def settings(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the common settings of all runs by dotted key; if train.steps is swept, schedules are shares of it."""
        settings = flatten(asdict(self.config(point)))
        shares = recipe_shares(self.sources, self._values(point)) if STEPS in self.over else {}
        left_out = {*self.over, "train.seed"}
        if "model.base" in self.over and "data.tokenizer" not in self._values(point):
            left_out.add("data.tokenizer")  # each base has its own
        return {key: value for key, value in (settings | shares).items() if key not in left_out}

    def job(self, point: Mapping[str, Any], seed: int | None, data: str | None = None) -> Job:
        """Return the job for a point and a seed (None or 0 for the first). data: prepared data for all runs."""
        config, seed = self.config(point), seed or 0
        config = replace(
            config,
            train=replace(config.train, seed=config.train.seed + seed),
            data=config.data if data is None else replace(config.data, path=data),
        )
        key = " ".join([*(f"{key}={_value_text(value)}" for key, value in point.items()), f"seed={seed}"])
        return Job(key, train_point, (config, point, seed), config.train.steps)

    def command(self, point: Mapping[str, Any]) -> str:
        """Return the command line that trains at a point."""
        given = [part for name in self.sources for part in ("--config", name)]
        over = [f"--{key}={_value_text(value)}" for key, value in point.items()]
        return shlex.join(["residua", "train", *given, *self.overrides, *over, "--run", "DIR"])


@dataclass(frozen=True)
class Outcome:
    """The points of a sweep as rows named after their groups, best first; points with fewer seeds come last.

    winners     the best point of each group; None if all of its runs diverged
    """

    sweep: Sweep
    rows: tuple[Row, ...]
    winners: Mapping[str, Mapping[str, Any] | None]

    @classmethod
    def of(cls, sweep: Sweep, finished: Mapping[Any, Record]) -> "Outcome":
        rows, winners = [], {}
        for group, search in sweep.searches().items():
            jobs, winners[group] = search.walk(sweep.job, losses_in(finished))
            runs = (_run_of(sweep, job, finished[job.key]) for job in jobs)
            points = grouped(runs, lambda run: tuple(map(_value_text, run.point.values())), lambda run: run.seed)
            rows += [Row(group, members) for members in points]
        return cls(sweep, tuple(rows), winners)._sorted()

    def _sorted(self) -> "Outcome":
        most = max((len(row.runs) for row in self.finite), default=0)
        groups = list(dict.fromkeys(row.name for row in self.rows))

        def order(row: Row) -> tuple[float, ...]:
            place = 0 if self.unit else groups.index(row.name)
            loss = row.whole_loss(self.shown_unit)
            return (place, len(row.runs) < most, loss.mean) if loss else (place, 2, 0)

        return replace(self, rows=tuple(sorted(self.rows, key=order)))

    @cached_property
    def verdict(self) -> Verdict:
        """Whether all finite losses can be compared, see `comparable.common_unit`."""
        verdict = common_unit(row.measure for row in self.finite)
        if verdict.unit == "bits per byte" and not all(row.whole_loss("bits per byte") for row in self.finite):
            return verdict._replace(unit=None, reasons=("different tokenizers, and records without bits per byte",))
        return verdict

    @property
    def unit(self) -> Unit | None:
        """The unit in which all points are ranked; None if each group has its own ranking."""
        return self.verdict.unit

    @property
    def shown_unit(self) -> Unit:
        """The unit of the table and the picture."""
        return self.unit or NATS

    @property
    def won(self) -> list[Row]:
        """The best point of each group, best first."""
        return [row for row in self.rows if row.point == self.winners.get(row.name)]

    @property
    def best(self) -> Row | None:
        """The best point; None if every run diverged, or if the groups cannot be compared."""
        return next(iter(self.won), None) if self.unit else None

    @property
    def commands(self) -> dict[str, str]:
        """The command line for the best point of each group; if the groups can be compared, of the best group alone."""
        return {row.name: self.sweep.command(row.point) for row in (self.won[:1] if self.unit else self.won)}

    @property
    def finite(self) -> list[Row]:
        """The points whose runs all have a loss."""
        return [row for row in self.rows if row.whole_loss(NATS)]

    @property
    def notes(self) -> list[str]:
        """The caveats for a reader: best values at the edge of the tried values, too few seeds."""
        notes = []
        for best in self.won:
            tried = [row.point for row in self.rows if row.name == best.name]
            values = [
                f"{key}={_value_text(best.point[key])}"
                for key in self.sweep.tuned
                if at_edge(best.point[key], (point[key] for point in tried))
            ]
            if values:
                group = f"{best.name}: " if best.name else ""
                more = "" if self.sweep.neighbours else ", or --neighbours"
                notes.append(f"{group}the best {', '.join(values)} is at the edge of what was tried; try further{more}")
        for reason in self.verdict.reasons:
            notes.append(f"the groups cannot be compared, so each has a best point of its own: {reason}")
        if self.unit == "bits per byte":
            notes.append("the tokenizers differ, so points are ranked by bits per byte of the same held-out text")
        if self.finite and (marks := self.verdict.marks):
            notes.append(
                f"points differ in more than the tuned keys, which changes the loss by itself: {'; '.join(marks)}"
            )
        if self.best and len(self.best.runs) == 1 and len(self.rows) > 1:
            notes.append("one seed each: the noise is not measured; try --seeds 3")
        return notes

    def to_json(self) -> dict[str, Any]:
        """Return all results as plain values for `json.dumps`."""
        results = [
            {
                "group": row.name,
                "point": row.point,
                "losses": list(row.losses(NATS).values()),
                "won": row in self.won,
                "bits": list(row.losses("bits per byte").values()),
                "mean": loss and loss.mean,
                "half_width": loss and loss.half_width,
            }
            for row, loss in ((row, row.whole_loss(NATS)) for row in self.rows)
        ]
        return {
            "results": results,
            "unit": self.unit,
            "command": self.best and self.sweep.command(self.best.point),
            "commands": self.commands,
            "notes": self.notes,
        }

    def table(self) -> Table:
        """Return a table with a line for each point."""
        unit = self.shown_unit
        lines = [
            [
                *map(_value_text, row.point.values()),
                str(len(row.runs)),
                estimate_text(loss, ".4f") if loss else f"diverged: {[*row.losses(unit).values()].count(None)}",
            ]
            for row, loss in ((row, row.whole_loss(unit)) for row in self.rows)
        ]
        return Table([*self.sweep.over, "seeds", "validation loss" if unit == NATS else unit], lines)

    def draw(self, path: Path) -> None:
        """Draw the loss against each swept key: a dot for every run, and a line through the best points of each group.

        Runs that nearly diverged may lie outside the axes. Keys that form groups have no panel, unless nothing is
        tuned.
        """
        keys = [key for key in self.sweep.over if key in self.sweep.tuned] or list(self.sweep.over)
        groups = list(dict.fromkeys(row.name for row in self.finite))
        figure, (panels,) = figures.panels(1, len(keys), (max(5.0, 4.2 * len(keys)), 4.2), dpi=150, sharey=True)
        for key, panel in zip(keys, panels):
            tried = [row.point[key] for row in self.finite]
            values = list(dict.fromkeys(map(_value_text, sorted(tried) if key in self.sweep.tuned else tried)))
            for colour, group in zip(itertools.cycle(figures.COLOURS), groups):
                best: dict[int, float] = {}
                for row in (row for row in self.finite if row.name == group):
                    position, losses = values.index(_value_text(row.point[key])), row.losses(self.shown_unit).values()
                    best.setdefault(position, row.whole_loss(self.shown_unit).mean)
                    panel.plot([position] * len(losses), list(losses), "o", color=colour, alpha=0.4)
                panel.plot(*zip(*sorted(best.items())), "-", color=colour, label=group or None)
            panel.set_xticks(range(len(values)), [*map(figures.as_text, values)])
            panel.set_xlabel(key)
        losses = sorted(loss for row in self.finite for loss in row.losses(self.shown_unit).values())
        best_loss, middle, worst = losses[0], losses[len(losses) // 2], losses[-1]
        span = min(worst - best_loss, 4 * (middle - best_loss)) or 0.1
        panels[0].set_ylim(best_loss - 0.1 * span, best_loss + 1.1 * span)
        panels[0].set_ylabel(f"Validation loss ({self.shown_unit})")
        if self.unit is None:
            panels[0].set_title("The groups cannot be compared", loc="left", fontsize=9)
        if len(groups) > 1:
            figures.legend(figure)
        figures.save({path.name: figure}, path.parent)


def parse_over(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Return the swept keys and their values from `KEY=VALUE,VALUE,...`; values are read as in a YAML list.

    Raises:
        InputError: a text does not have this form, or a key is named twice.
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
        over[key] = tuple({_value_text(value): value for value in parsed}.values())
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
    """Train the runs that are missing in the folder `out`. After a kill at any moment, call this again to continue.

    An unfinished run resumes at its newest checkpoint. A run whose loss is not finite is recorded as diverged.

    Args:
        processes: simultaneous runs, each with one thread.
        executor: runs the jobs in place of these processes, see `run_jobs`.
        keep: keep the run folders in `out`/runs, with their checkpoints.

    Raises:
        InputError: the configuration or the folder cannot be used, see `jobs.pool.open_runs`.
        RunError: a run failed for a reason other than divergence, or a result could not be written.
    """
    texts = set()
    for values in itertools.product(*sweep.over.values()):
        point = dict(zip(sweep.over, values))
        base = sweep.config(point)
        texts.add(base.data)
    settings = sweep.settings(point) | {"over": sorted(sweep.over), "first seed": base.train.seed}
    if base.data.path is not None:
        settings["data"] = PreparedData.open(base.data.path).facts["fingerprint"]
    with open_runs(out, settings, free=FREE_KEYS | ({"data.tokenizer"} - settings.keys()), keep=keep) as made:
        check_records(made.rows, made.path, RunRecord, {"point", "val_loss"}, "records of a sweep's runs")
        if made.rows and made.rows[0]["point"].keys() == sweep.over.keys():  # the keys of records have this order
            sweep = replace(sweep, over={key: sweep.over[key] for key in made.rows[0]["point"]})
        shared = None
        if base.data.path is None and base.data.source is not None and len(texts) == 1:
            shared = str(open_or_prepare(base.data, Path(out) / "data", progress=progress).folder)

        def jobs(finished: Mapping[Any, Record]) -> list[Job]:
            ended = losses_in(finished)
            walks = (search.walk(partial(sweep.job, data=shared), ended) for search in sweep.searches().values())
            return [job for jobs, _ in walks for job in jobs]

        finish = lambda job, record: {"key": job.key, **record}  # noqa: E731
        run_jobs(jobs, made, processes=processes, executor=executor, finish=finish, progress=progress)
        outcome = Outcome.of(sweep, made.finished)
    if outcome.finite:
        with writable(out):
            outcome.draw(Path(out) / "sweep.png")
    return outcome


def _run_of(sweep: Sweep, job: Job, record: Record) -> Run:
    """Return the run of a job's record. Raises InputError if the record is that of another point, seed or length."""
    _, point, seed = job.arguments
    for name, value in {"point": dict(point), "seed": seed, "steps": job.steps}.items():
        got = record.get(name, value)
        require(got == value, f"{name} of the record {shown(job.key)}", f"{value} (remove the record)", got)
    data = (record.get("facts") or {}).get("data") or {}
    return Run.of(record, Measurement.of(flatten(asdict(sweep.config(record["point"]))), data))


def _group_text(key: str, value: Any) -> str:
    """Format a value for the name of a group; a number becomes KEY=VALUE."""
    return f"{key}={_value_text(value)}" if fits(value, float) else _value_text(value)


def _value_text(value: Any) -> str:
    """Format a value as on a command line."""
    return value if isinstance(value, str) else json.dumps(value, default=str)  # YAML has dates
