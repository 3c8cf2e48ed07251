"""Run a study: train the runs that are missing in its folder. A killed study can be resumed.

The folder of a study contains

    study.json       the study, with the schemes and sizes of all calls, so that none is lost from the report
    settings.json    the title and the fingerprint of the data; a call with another title or other data is refused
    records.jsonl    one line for every finished run
    costs.jsonl      one line for the cost of a step of each scheme at each size
    runs/            the state of unfinished runs
"""

import itertools
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from residua.connections.names import today
from residua.errors import Diverged, require, shown
from residua.files.durable import remove, write_text
from residua.lab.cost.steps import ROUNDS, WARMUP, measure, products_of_run, rate
from residua.lab.data import PreparedData
from residua.lab.evaluation.loss import transition
from residua.lab.experiment import losses_by_document, open_run
from residua.lab.experiment import run as train
from residua.lab.jobs.pool import Executor, Job, Record, Records, open_runs, run_jobs
from residua.lab.records import jsonlines
from residua.lab.records.folder import RunFolder, read_object, refuse_changes, writable
from residua.lab.records.jsonlines import finite
from residua.lab.records.progress import say
from residua.lab.records.statistics import detects
from residua.lab.records.table import Table, cell
from residua.lab.study.definition import Study, read_folder
from residua.lab.study.forms import Cost, read_cost_records
from residua.lab.study.plan import Plan, PlannedRun
from residua.lab.study.results import checked_runs, read_fingerprint, read_runs
from residua.lab.training import RunConfig


def run_study(
    study: Study,
    out: str | Path,
    *,
    data: str | None = None,
    sizes: Sequence[str] | None = None,
    processes: int = 1,
    executor: Executor | None = None,
    costs: bool = True,
    rounds: int = ROUNDS,
    progress: bool = True,
) -> Plan:
    """Train the runs of a study that are missing in the folder `out`. After a kill, call this again to continue.

    The study may grow from call to call; runs of other schemes and sizes stay in the folder.

    Args:
        data: a folder of prepared data, in place of the folder in the study's configuration.
        sizes: the sizes to report; the other sizes of `study` are only tuned. None to report all.
        processes: simultaneous runs, each with one thread; no result depends on their number.
        executor: runs the jobs and measures the costs in place of these processes, see `run_jobs`.
        costs: measure the time and memory of each scheme that has no record of its cost yet.
        rounds: the number of timing rounds, in which the schemes take turns.

    Raises:
        InputError: the study, the data or the folder cannot be used.
        RunError: a run failed for a reason other than divergence, or a result could not be written.
    """
    out = Path(out)
    with begun(study, out, data, sizes) as (plan, made):
        if costs:
            measure_costs(plan, out, rounds=rounds, executor=executor, progress=progress)
        if progress:
            for (size, scheme), error in plan.misfits.items():
                say(f"study: {scheme} is left out at {size}: {error}")
            say(f"study: {plan.most} runs at most, {len(made.finished)} finished in {out}")
        run_jobs(
            lambda finished: jobs(plan, finished),
            made,
            processes=processes,
            executor=executor,
            most=plan.most,
            progress=progress,
        )
    return plan


@contextmanager
def begun(
    study: Study, out: Path, data: str | None = None, sizes: Sequence[str] | None = None
) -> Iterator[tuple[Plan, Records]]:
    """Begin or open the folder of a study, lock it, and yield the plan and the records of its runs.

    Raises:
        InputError: the study, the data or the folder cannot be used.
    """
    plan = Plan(study, study.data(data), sizes)
    with open_runs(out, {"title": study.title, "data": plan.facts["fingerprint"]}) as made:
        runs = checked_runs(made.rows, made.path, plan.facts["fingerprint"])
        both = joined(plan.study, out, runs)
        expect_same_settings(plan, runs, made.path)
        with writable(out):
            write_text(out / "study.json", json.dumps(asdict(both), indent=1) + "\n")
        yield plan, made


def expect_same_settings(plan: Plan, runs: Sequence[Record], path: Path) -> None:
    """Raise InputError for a run that the study would train with other settings now, so that rows would mix runs.

    The study names the files and recipes of `config`, and their content may change.
    """
    for row in runs:
        entry = plan.study.schemes.get(row["scheme"])
        known = row["size"] in plan.study.sizes and entry is not None and entry.connection == today(row["connection"])
        if known and row["scheme"] in plan.schemes_at(row["size"]):
            expected = f"{shown(row['key'])}, as recorded, but config has changed; restore it, or use another folder"
            name = f"{path}: the key of a run by the study's settings"
            require((key := plan.recorded(row).key) == row["key"], name, expected, key)


class Forecast(NamedTuple):
    """The largest possible cost of one size of a study, and the difference that the study can detect there.

    tokens   the tokens of a reported run
    flops    the FLOPs of the matrix products of all runs and of their evaluations on the study's held-out text
    hours    the hours of all runs, one after the other
    detects  the smallest difference that the study would detect four times in five, before a correction for several
             comparisons, in standard deviations of the difference between two runs with the same seed; with the noise
             of all schemes of the size, or with that of both where each has its own
    """

    size: str
    schemes: int
    runs: int
    tokens: int
    flops: float
    hours: float
    detects: float | None


def forecast(plan: Plan, flops_per_second: float | None = None) -> Iterator[Forecast]:
    """Yield the cost of each size of a study that has runs, without training.

    flops_per_second: the speed; None to measure it here at each size, by a step of the first baseline.
    """
    held_out = len(plan.prepared.validation)
    for size, group in itertools.groupby(plan.at_most(), lambda part: part.size):
        parts = list(group)
        configs = {name: plan.config(size, name) for name in plan.schemes_at(size)}
        per_token = {name: products_of_run(config, plan.model(config)) for name, config in configs.items()}
        # An evaluation has no backward pass, which is two thirds of a step, or half of it if the base is frozen.
        evaluation = {name: held_out / (2 if config.freezes_base else 3) for name, config in configs.items()}
        flops = sum(
            part.runs
            * per_token[part.scheme]
            * (part.steps * plan.step_tokens[size] + part.evaluations * evaluation[part.scheme])
            for part in parts
        )
        base = configs[plan.study.baselines[0]]
        speed = flops_per_second or rate(base, plan.model(base))
        shared = len(configs) if plan.study.sizes[size].noise == "pooled" else None
        yield Forecast(
            size,
            len(configs),
            sum(part.runs for part in parts),
            plan.steps[size] * plan.step_tokens[size],
            flops,
            flops / speed / 3600,
            detects(len(plan.study.seeds_at(size)), shared) if size in plan.sizes else None,
        )


def forecast_table(forecasts: Sequence[Forecast]) -> Table:
    rows = [
        [
            *map(cell, (each.size, each.schemes, each.runs, each.tokens)),
            f"{each.flops:.2e}",
            duration(each.hours),
            "nothing" if each.detects is None else f"{each.detects:.1f} deviations",
        ]
        for each in forecasts
    ]
    return Table(["size", "schemes", "runs at most", "tokens of a run", "FLOPs", "time", "detects"], rows)


def duration(hours: float) -> str:
    """Return a number of hours with three significant digits, in minutes or seconds if it is short."""
    small = (60 * hours, "minutes") if 60 * hours >= 1 else (3600 * hours, "seconds")
    amount, unit = (hours, "hours") if hours >= 1 else small
    return f"{float(f'{amount:.3g}'):,g} {unit}"


def joined(study: Study, out: Path, runs: Sequence[Record]) -> Study:
    """Return the study with the schemes and sizes that are already recorded in its folder. runs: its records.

    Raises:
        InputError: the runs in the folder have other settings, so that rows would mix runs that cannot be compared; the
            study lacks seeds, baselines, longer runs, tuning runs or primary contrasts of the folder's study; or it
            names a new primary contrast whose runs are already in the folder.
    """
    if not (out / "study.json").is_file():
        return study
    before = read_folder(out)
    settings, lists = _fixed(before), _growing(study)
    refuse_changes(
        settings, settings | {k: v for k, v in _fixed(study).items() if k in settings}, out, free=(), of="a study"
    )
    for name, earlier in _growing(before).items():
        now = lists.get(name, earlier)
        require({*earlier} <= {*now}, name, f"at least {shown(earlier)}, as in {out}", now)
    first = before.baselines[0]
    require(study.baselines[0] == first, "baselines", f"{first} first, as step times in {out}", study.baselines)
    for name in ("runs", "baseline_runs", "finalists"):
        least, budget = getattr(before.tuning, name), getattr(study.tuning, name)
        require(budget >= least, f"tuning.{name}", f"at least {least}, as in {out}", budget)
    reported = {(run["size"], run["scheme"]) for run in runs if run["kind"] == "report"}
    for size, pairs in study.primary.items():
        named = {frozenset(pair) for pair in before.primary.get(size, ())}
        late = [pair for pair in pairs if frozenset(pair) not in named and {(size, name) for name in pair} <= reported]
        require(not late, f"primary.{size}", f"contrasts named before both have runs in {out}", late)
    return replace(study, schemes={**before.schemes, **study.schemes}, sizes={**before.sizes, **study.sizes})


def _fixed(study: Study) -> dict[str, Any]:
    """Return the settings that all runs in a folder share, as plain values."""
    parts = {name: getattr(study, name) for name in ("config", "set", "tokens_per_parameter", "warmup", "evaluations")}
    parts |= {f"tuning.{name}": getattr(study.tuning, name) for name in ("over", "factors", "length", "seed", "rule")}
    parts |= {f"sizes.{name}": replace(size, seeds=None) for name, size in study.sizes.items()}
    parts |= {f"schemes.{name}": entry for name, entry in study.schemes.items()}
    return json.loads(json.dumps(parts, default=asdict))


def _growing(study: Study) -> dict[str, Sequence[Any]]:
    """Return the lists that may grow but not shrink: an entry must not be removed after its results are known."""
    parts = {name: getattr(study, name) for name in ("seeds", "baselines", "longer")}
    parts["tuning.final_seeds"] = study.tuning.finalist_seeds
    parts |= {f"primary.{name}": [tuple(sorted(pair)) for pair in study.primary.get(name, ())] for name in study.sizes}
    return parts | {f"sizes.{name}.seeds": study.seeds_at(name) for name in study.sizes}


def open_study(out: str | Path, data: str | None = None) -> tuple[Plan, list[Record]]:
    """Return the plan of the study in a folder and the folder's records.

    Raises:
        InputError: the folder has no study, or one with other settings; or its data were moved or have changed.
    """
    out = Path(out)
    study = read_folder(out)
    folder, fingerprint = study.data(data), read_fingerprint(out, study)
    same = fingerprint == PreparedData.open(folder).facts["fingerprint"]
    require(same, "--data", f"the data that {out} was begun with", folder)  # checked before the plan needs the tokens
    return Plan(study, folder), read_runs(out / "records.jsonl", fingerprint)


def jobs(plan: Plan, finished: Mapping[Any, Record]) -> list[Job]:
    """Return the jobs of all runs that the study needs so far, including the finished ones."""
    return [
        # The number of steps serves as the cost of a step: both are proportional to the number of parameters.
        Job(run.key, train_run, (run,), run.config.train.steps, float(plan.steps[run.size]), (place,), run.title)
        for place, run in enumerate(plan.runs(finished))
    ]


def train_run(run: PlannedRun, *, place: Path, report: Any) -> Record:
    """Train a run of a study in the folder `place`; return its record."""
    record = train_point(run.config, run.point, run.config.train.seed, place=place, report=report)
    of = {"key": run.key, "kind": run.kind, "size": run.size, "scheme": run.scheme}
    record = {**of, "connection": run.config.model.connection, **record}
    if run.kind != "report" or record["val_loss"] is None:
        return record
    losses = losses_by_document(open_run(place, device=run.config.train.device))
    return record | {f"{prefix}documents": by_document for prefix, by_document in losses.items()}


def train_point(
    config: RunConfig, point: Mapping[str, Any], seed: int, *, place: Path, report: Callable[[int], None]
) -> Record:
    """Train one point in the folder `place`; return its record."""
    folder = RunFolder(place)
    begun = folder.config.is_file()
    if not begun:
        remove(place)  # left by a run that was killed before it wrote its configuration
    record = {"point": dict(point), "seed": seed, "steps": config.train.steps}
    try:
        result = train(config, place, resume=begun, progress=report)
    except Diverged as error:
        return record | {"val_loss": None, "diverged": str(error)}
    if "signal" in result:  # also in the last step: the state is kept, and the record follows when the run resumes
        if signal.getsignal(result["signal"]) not in (signal.SIG_DFL, None):
            signal.raise_signal(result["signal"])  # training caught the signal, but the loop over all runs needs it too
        raise KeyboardInterrupt
    rows = jsonlines.read_metrics(folder.metrics)
    names = ("val_loss", "loss", "tokens", "seconds", "tokens_per_second")
    if "bits_per_byte" in result:
        names = (*names, "bits_per_byte")
    facts = read_object(folder.facts)
    facts.get("data", {}).pop("place", None)  # relative to this folder, which will be removed
    curve = [[row["step"], row["val_loss"]] for row in rows if "val_loss" in row]
    record |= finite({name: result[name] for name in names}) | {"curve": curve, "facts": facts}
    for prefix in ("", "further_"):
        names = "step", f"{prefix}repeated_loss", f"{prefix}other_loss"
        if split := [values for row in rows if None not in (values := [row.get(name) for name in names])]:
            record |= {f"{prefix}split": split, f"{prefix}transition": transition(split)}
    further = [[row["step"], row["further_val_loss"]] for row in rows if "further_val_loss" in row]
    return record | ({"further_curve": further} if further else {})


def measure_costs(
    plan: Plan,
    out: Path,
    *,
    rounds: int = ROUNDS,
    again: bool = False,
    compiled: bool = False,
    executor: Executor | None = None,
    progress: bool = True,
) -> None:
    """Measure the cost of a step for every scheme and size that has no record of it yet.

    again: measure all costs again, for example on a quieter machine or in more rounds; the last record counts.
    compiled: measure the time of a step through `torch.compile`; earlier records of the runs' own step still count.

    The schemes of a size are measured in the same rounds of one process. A new scheme is measured with the baselines.
    """
    path = out / "costs.jsonl"
    rows = () if again else read_cost_records(path)
    measured = {(row["size"], row["scheme"], today(row["connection"])) for row in rows if not row.get("compiled")}
    jobs_of_sizes = []
    for size in plan.sizes:
        connections = {name: entry.connection for name, entry in plan.study.schemes.items()}
        missing = [name for name in plan.schemes_at(size) if (size, name, connections[name]) not in measured]
        if not missing:
            continue
        configs = {name: plan.config(size, name) for name in dict.fromkeys([*plan.study.baselines, *missing])}
        pairs = {name: (config, plan.model(config)) for name, config in configs.items()}
        key = f"time and memory at {size}, {rounds} rounds{' compiled' * compiled}"
        steps = len(pairs) * (rounds + WARMUP)
        title = f"timing {len(pairs)} schemes at {size}{'' if again else ', before the runs'}:"
        arguments = (key, size, connections, pairs, rounds, compiled)
        jobs_of_sizes.append(Job(key, _measure_size, arguments, steps, title=title))
    with _Costs(path, lambda row: None) as costs:
        run_jobs(jobs_of_sizes, costs, executor=executor, progress=progress, noun="sizes")


def costs_table(out: Path) -> Table:
    """Return a table of the newest cost of each scheme in the folder of a study; each time with its quartiles."""
    rows = read_cost_records(out / "costs.jsonl")
    newest = {(row["size"], row["scheme"]): Cost.of(row) for row in rows}
    cells = [[*place, f"{cost.ratio:.3f}", f"{cost.flops_per_token:,.0f}"] for place, cost in newest.items()]
    return Table(["size", "scheme", "step time, times the first baseline", "FLOPs per token"], cells)


def _measure_size(
    key: str,
    size: str,
    connections: Mapping[str, str],
    configs: Mapping[str, Any],
    rounds: int,
    compiled: bool,
    *,
    place: Any,
    report: Any,
) -> Record:
    done = itertools.count(1)
    costs = measure(configs, next(iter(configs)), rounds=rounds, compiled=compiled, advance=lambda: report(next(done)))
    return {
        "key": key,
        "costs": [{"size": size, "connection": connections[cost["scheme"]], **cost} for cost in costs],
    }


class _Costs(Records):
    """The file of costs. A job measures several schemes and writes a line for each."""

    def add(self, record: Record) -> None:
        for cost in record["costs"]:
            super().add(cost)
        self.finished[record["key"]] = record
