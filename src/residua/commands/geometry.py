"""The command `residua study geometry`: the benchmarks of arXiv 2605.06729, with controls and references."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.commands.base import Arguments, Parser, SubCommand, add_json, print_json, whole
from residua.errors import extra
from residua.records.table import print_table

if TYPE_CHECKING:
    import torch

    from residua.lab.geometry.study import Settings
    from residua.lab.geometry.tasks import Task
    from residua.records.jobs import Job

HELP = "the geometric benchmarks of arXiv 2605.06729, with controls and references"
EXAMPLES = """\
residua study geometry reflection
residua study geometry quick --tasks gyroscope --models residual ddl edelta-token:num_streams=8
residua study geometry quick --full --device cuda --out runs/full
residua study geometry sizes --full"""
SEEDS = (42, 123, 456)
NOT_QUICK = ("hc", "edelta-stream", "linear")
"""Models that `quick` trains only when asked: they are not in the publication."""


def add_arguments(parser: Parser) -> None:
    parser.add_subcommands(SUBCOMMANDS)


def run(arguments: Arguments) -> int | None:
    return arguments.chosen(arguments)


def _reflection_arguments(parser: Parser) -> None:
    from residua.lab.geometry.reflection import CONTROLS, TOYS, ReflectionSettings

    _add_runs(parser, models=[*TOYS, *CONTROLS], seeds=SEEDS, out="runs/geometry/reflection")
    parser.add_argument(
        "--samples",
        nargs="+",
        type=whole(),
        default=[ReflectionSettings.num_train],
        metavar="N",
        help="sizes of the training set (default: %(default)s)",
    )


def _quick_arguments(parser: Parser) -> None:
    from residua.lab.geometry.models import MODELS
    from residua.lab.geometry.tasks import TASKS

    models = [name for name in MODELS if name not in NOT_QUICK]
    _add_runs(parser, models=models, seeds=SEEDS[:2], out="runs/geometry/quick, or full with --full")
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=list(TASKS),
        metavar="NAME",
        help=f"(default: {' '.join(TASKS)})",
    )
    parser.add_argument("--full", action="store_true", help="the published sizes and steps")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(default: cuda if there)")


def _sizes_arguments(parser: Parser) -> None:
    from residua.lab.geometry.models import MODELS

    parser.add_argument("--task", default="gyroscope", metavar="NAME", help="(default: %(default)s)")
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="NAME", help="(default: all)")
    parser.add_argument("--full", action="store_true", help="the published sizes, not the quick ones")
    add_json(parser)


def _add_runs(parser: Parser, *, models: Sequence[str], seeds: Sequence[int], out: str) -> None:
    parser.add_argument(
        "--models",
        nargs="+",
        default=list(models),
        metavar="NAME",
        help=f"(default: {' '.join(models)})",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=whole(0, 2**32 - 1),
        default=list(seeds),
        metavar="N",
        help=f"of weights and batches (default: {' '.join(map(str, seeds))})",
    )
    parser.add_argument("--steps", type=whole(), metavar="N", help="of each run (default: as the recipe has it)")
    parser.add_argument("--out", metavar="DIR", help=f"a new folder, or one to resume (default: {out})")
    parser.add_argument(
        "--workers", type=whole(1, 1024), metavar="N", help="runs at the same time (default: one for each core)"
    )
    add_json(parser)


def _reflection(arguments: Arguments) -> int:
    import torch

    from residua.lab.geometry.reflection import ReflectionSettings, reflection_job
    from residua.lab.geometry.tasks import task

    steps = ReflectionSettings.steps if arguments.steps is None else arguments.steps
    recipe = ReflectionSettings(steps=steps)
    jobs = [
        reflection_job(name, seed, replace(recipe, num_train=count))
        for count in _distinct(arguments.samples)
        for name in _distinct(arguments.models)
        for seed in _distinct(arguments.seeds)
    ]
    settings = {"experiment": "reflection"} | {k: v for k, v in asdict(recipe).items() if k != "num_train"}
    out = Path(arguments.out or "runs/geometry/reflection")
    return _study(arguments, out, settings, jobs, [task("reflection")], torch.device("cpu"))


def _quick(arguments: Arguments) -> int:
    from residua.lab.geometry.study import job
    from residua.lab.geometry.tasks import TASKS
    from residua.lab.training import pick_device

    settings = _settings(arguments)
    if arguments.steps is not None:
        settings = replace(settings, steps=arguments.steps)
    device = pick_device(arguments.device, "--device")
    tasks = [settings.task(name) for name in _distinct(arguments.tasks)]
    jobs = [
        job(model, task.name, seed, settings, device)
        for task in tasks
        for model in _distinct(arguments.models)
        for seed in _distinct(arguments.seeds)
    ]
    out = Path(arguments.out or f"runs/geometry/{'full' if arguments.full else 'quick'}")
    all_tasks = [settings.task(name) for name in TASKS]
    return _study(arguments, out, {"experiment": "sequences", **asdict(settings)}, jobs, all_tasks, device)


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

    workers = arguments.workers
    if workers is None:
        workers = min(4, available_cores()) if device.type == "cuda" else available_cores()
    with extra("lab"):  # raises before hours of training
        from residua.lab.geometry.pictures import draw
    facts = {"circumstances": circumstances(device) | {"threads": 1}}
    with open_runs(out, settings) as runs:
        rows = run_jobs(jobs, runs, processes=workers, finish=lambda job, record: {"key": job.key, **record, **facts})
        keys = {record["key"] for record in rows}
        records = [*rows, *(record for key, record in runs.finished.items() if key not in keys)]
        task_names = {record["task"] for record in records}
        for task in tasks:
            if task.name in task_names:
                records += references(task)
        markdown, numbers = write_tables(records, out)
        pictures = draw(records, out)
    if arguments.json:
        print(numbers.read_text(encoding="utf-8"), end="")
        return 0
    for task in tasks:
        if task.name in task_names:
            print(f"{task.name}:")
            print_table(*table(records, task.name))
            print()
    for path in (runs.path, markdown, numbers, *pictures):
        print(f"written: {path}")
    return 0


def _sizes(arguments: Arguments) -> None:
    from residua.lab.geometry import published
    from residua.lab.geometry.models import match
    from residua.lab.geometry.tasks import task

    settings = _settings(arguments)
    target = task(arguments.task) if arguments.task == "reflection" else settings.task(arguments.task)
    models = [
        match(name, features=target.dim, length=target.length, sizes=settings.sizes)
        for name in _distinct(arguments.models)
    ]
    # The published counts do not apply to smaller models.
    counts = {name: model.parameters for name, model in published.MODELS.items()} if arguments.full else {}
    if arguments.json:
        records = [model.describe() | {"published_without_wrapper": counts.get(model.name)} for model in models]
        print_json(records)
        return
    rows = [
        [
            model.name,
            str(model.layers),
            str(model.width),
            str(model.hidden),
            f"{model.parameters:,}",
            f"{model.ratio:.3f}",
            *([f"{counts[model.name]:,}" if model.name in counts else ""] if counts else []),
        ]
        for model in models
    ]
    header = ["model", "layers", "width", "MLP", "parameters", "ratio"]
    header += ["published, without wrapper"] if counts else []
    print_table(header, rows)
    print(
        f"\n{target.name}: {target.length} inputs of {target.dim} features. parameters: ours, all of the model; "
        "ratio: to the plain residual."
    )


def _settings(arguments: Arguments) -> "Settings":
    from residua.lab.geometry.study import FULL, QUICK

    return FULL if arguments.full else QUICK


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys(values))


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
    "sizes": SubCommand(
        "parameters of every model, the wrapper's included",
        "Print the layers, MLP width and parameters at which every model matches the plain residual, counting the "
        "wrapper, beside the published counts, which leave it out.",
        _sizes_arguments,
        _sizes,
    ),
}
