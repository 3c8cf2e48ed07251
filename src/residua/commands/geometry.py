"""The command `residua study geometry`: the benchmarks of arXiv 2605.06729, with controls and references."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.commands.base import Arguments, Parser, SubCommand, add_json, whole
from residua.errors import extra
from residua.records.table import print_table

if TYPE_CHECKING:
    import torch

    from residua.lab.geometry.tasks import Task
    from residua.records.jobs import Job

HELP = "the geometric benchmarks of arXiv 2605.06729, with controls and references"
EXAMPLES = """\
residua study geometry reflection
residua study geometry quick --tasks gyroscope --models residual ddl edelta-token:num_streams=8
residua study geometry quick --full --device cuda --out runs/full"""
SEEDS = (42, 123, 456)
NOT_QUICK = ("hc", "edelta-stream")
"""Models that `quick` trains only when asked: they are not in the publication."""


def add_arguments(parser: Parser) -> None:
    parser.add_subcommands(SUBCOMMANDS)


def run(arguments: Arguments) -> int | None:
    return arguments.chosen(arguments)


def _reflection_arguments(parser: Parser) -> None:
    from residua.lab.geometry.operators import OPERATORS

    _add_names(parser, "--models", list(OPERATORS))
    _add_runs(parser, SEEDS, "runs/geometry/reflection")


def _quick_arguments(parser: Parser) -> None:
    from residua.lab.geometry.models import MODELS
    from residua.lab.geometry.tasks import TASKS

    _add_names(parser, "--models", [name for name in MODELS if name not in NOT_QUICK])
    _add_names(parser, "--tasks", list(TASKS))
    parser.add_argument("--full", action="store_true", help="the published sizes and steps")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: cuda if there)")
    _add_runs(parser, SEEDS[:2], "runs/geometry/quick, or full with --full")


def _add_names(parser: Parser, option: str, names: list[str]) -> None:
    parser.add_argument(option, nargs="+", default=names, metavar="NAME", help=f"(default: {' '.join(names)})")


def _add_runs(parser: Parser, seeds: Sequence[int], out: str) -> None:
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=whole(0, 2**32 - 1),
        default=seeds,
        metavar="N",
        help=f"of weights and batches (default: {' '.join(map(str, seeds))})",
    )
    parser.add_argument("--steps", type=whole(1), metavar="N", help="of each run (default: as the recipe has it)")
    parser.add_argument("--out", metavar="DIR", help=f"a new folder, or one to resume (default: {out})")
    parser.add_argument(
        "--workers", type=whole(1, 1024), metavar="N", help="runs at the same time (default: one for each core)"
    )
    add_json(parser)


def _reflection(arguments: Arguments) -> int:
    import torch

    from residua.lab.geometry.study import OperatorSettings, operator_job
    from residua.lab.geometry.tasks import task

    recipe = OperatorSettings(steps=arguments.steps or OperatorSettings.steps)
    names, seeds = map(dict.fromkeys, (arguments.models, arguments.seeds))
    jobs = [operator_job(name, seed, recipe) for name in names for seed in seeds]
    settings = {"experiment": "reflection"} | {k: v for k, v in asdict(recipe).items() if k != "num_train"}
    out = Path(arguments.out or "runs/geometry/reflection")
    return _study(arguments, out, settings, jobs, [task("reflection")], torch.device("cpu"))


def _quick(arguments: Arguments) -> int:
    from residua.lab.geometry.study import FULL, QUICK, job
    from residua.lab.geometry.tasks import TASKS
    from residua.lab.training import pick_device

    settings = FULL if arguments.full else QUICK
    settings = replace(settings, steps=arguments.steps or settings.steps)
    device = pick_device(arguments.device, "--device")
    tasks, models, seeds = map(dict.fromkeys, (arguments.tasks, arguments.models, arguments.seeds))
    jobs = [job(model, task, seed, settings, device) for task in tasks for model in models for seed in seeds]
    out = Path(arguments.out or f"runs/geometry/{'full' if arguments.full else 'quick'}")
    facts = {"experiment": "sequences", **asdict(settings)}
    return _study(arguments, out, facts, jobs, [settings.task(name) for name in TASKS], device)


def _study(
    arguments: Arguments,
    out: Path,
    settings: dict[str, Any],
    jobs: "Sequence[Job]",
    tasks: "Sequence[Task]",
    device: "torch.device",
) -> int:
    """Make the runs, then the tables and pictures of all runs in the folder."""
    from residua.lab.geometry.references import references
    from residua.lab.geometry.report import table, write_tables
    from residua.records.jobs import open_runs, run_jobs
    from residua.records.provenance import available_cores, circumstances

    workers = arguments.workers or min(available_cores(), 4 if device.type == "cuda" else 1024)
    with extra("lab"):  # raises before hours of training
        from residua.lab.geometry.pictures import draw
    facts = {"circumstances": circumstances(device) | {"threads": 1}}
    with open_runs(out, settings) as runs:
        rows = run_jobs(jobs, runs, processes=workers, finish=lambda job, record: {"key": job.key, **record, **facts})
        keys = {record["key"] for record in rows}
        records = [*rows, *(record for key, record in runs.finished.items() if key not in keys)]
        tasks = [task for task in tasks if any(record["task"] == task.name for record in records)]
        for task in tasks:
            records += references(task)
        paths = [runs.path, *write_tables(records, out), *draw(records, out)]
    if arguments.json:
        print((out / "tables.json").read_text(encoding="utf-8"), end="")
        return 0
    for task in tasks:
        print(f"{task.name}:")
        print_table(*table(records, task.name))
        print()
    for path in paths:
        print(f"written: {path}")
    return 0


SUBCOMMANDS = {
    "reflection": SubCommand(
        "learn y = -x with one operator, with gate controls and baselines; about 2 minutes",
        "Learn y = -x on R^64 with one operator: the published ones, exact ones, a linear map, and the hybrid from "
        "other gates and penalties. Print ours beside the published numbers.",
        _reflection_arguments,
        _reflection,
    ),
    "quick": SubCommand(
        "train residual schemes on all tasks at reduced sizes; 20 minutes",
        "Train every scheme in the published wrapper at matched parameters, and measure causality, the loss online, "
        "norms inside the residual stream and more. --full is the published size, which wants a GPU.",
        _quick_arguments,
        _quick,
    ),
}
