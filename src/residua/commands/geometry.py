"""Run the geometric benchmarks of arXiv 2605.06729, with controls."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from residua.commands.signature import Output
from residua.errors import Count, at_most, between

NOT_QUICK = ("hc", "edelta-stream")
"""Models that `quick` trains only if they are named."""
FULL_MODELS = (
    "edelta-sequence",
    "residual",
    "jpmhc",
    "zero-layer",
    "pooled-householder-sequence",
    "edelta-token",
    "mhc-split",
)
"""The models of `quick --full`, the most important first: the published models, and two controls."""
SEEDS = (42, 123, 456)
Seed = Annotated[int, between(0, 2**32 - 1)]
Vectors = Annotated[Count, at_most(10**9)]
Processes = Annotated[int, between(1, 1024)]


def reflection(
    *,
    models: tuple[str, ...] | None = None,
    seeds: tuple[Seed, ...] = SEEDS,
    steps: Count | None = None,
    vectors: tuple[Vectors, ...] = (500,),
    out: str = "runs/geometry/reflection",
    processes: Processes | None = None,
) -> Output:
    """Learn y = -x on R^64 with one operator, in about 2 minutes.

    Trains the published operators, exact ones, a linear map, and the hybrid with other gates and penalties, and prints
    the results with the published numbers.

    Examples:
        residua study geometry reflection
        residua study geometry reflection --models linear householder --seeds 1
        residua study geometry reflection --models jpmhc --vectors 10 100 500

    Args:
        models: operators (default: all; an unknown name lists them)
        seeds (N): seeds of weights and batches
        steps: steps of each run (default: as in the publication)
        vectors (N): numbers of training vectors, with a run for each
        out (DIR): a new folder, or one to resume
        processes: runs at the same time (default: one per core)
    """
    import torch

    from residua.lab.geometry.experiment import run_experiment
    from residua.lab.geometry.operators import OPERATORS
    from residua.lab.geometry.study import OperatorSettings, operator_job
    from residua.lab.geometry.tasks import task

    recipe = OperatorSettings(steps=steps or OperatorSettings.steps)
    jobs = [
        operator_job(name, seed, replace(recipe, num_train=number))
        for name in dict.fromkeys(models or OPERATORS)
        for number in dict.fromkeys(vectors)
        for seed in dict.fromkeys(seeds)
    ]
    settings = {"experiment": "reflection"} | {k: v for k, v in asdict(recipe).items() if k != "num_train"}
    return Output(*run_experiment(Path(out), settings, jobs, [task("reflection")], torch.device("cpu"), processes))


def quick(
    *,
    models: tuple[str, ...] | None = None,
    tasks: tuple[str, ...] | None = None,
    full: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    seeds: tuple[Seed, ...] | None = None,
    steps: Count | None = None,
    out: str | None = None,
    processes: Processes | None = None,
) -> Output:
    """Train schemes on all tasks at reduced sizes, in 20 minutes.

    The models have the published wrapper and matched parameters. Each run measures causality, the loss online, norms
    inside the residual stream and more.

    Examples:
        residua study geometry quick --tasks gyroscope --models residual ddl
        residua study geometry quick --full --device cuda --out runs/full

    Args:
        models (SCHEME): schemes, and controls (default: all but hc and edelta-stream, with --full the published ones
            and two controls; an unknown name lists all)
        tasks: tasks to train on (default: all, with --full those on sequences; an unknown name lists them)
        full: the published sizes and steps, which need a GPU; the first seed of all models runs first
        device: auto is cuda if available
        seeds (N): seeds of weights and batches (default: 42 123, with --full also 456)
        steps: steps of each run (default: as in the recipe)
        out (DIR): a new folder, or one to resume (default: runs/geometry/quick, or full with --full)
        processes: runs at the same time (default: one per core, on a GPU four at most)
    """
    from residua.lab.geometry.experiment import run_experiment
    from residua.lab.geometry.models import MODELS, own_name
    from residua.lab.geometry.study import FULL, QUICK, job
    from residua.lab.geometry.tasks import TASKS
    from residua.lab.training import pick_device

    settings = FULL if full else QUICK
    settings = replace(settings, steps=steps or settings.steps)
    place = pick_device(device, "--device")
    chosen = models or (FULL_MODELS if full else [name for name in MODELS if name not in NOT_QUICK])
    wanted = tasks or [name for name in TASKS if not full or TASKS[name].length > 1]
    jobs = [
        replace(job(model, task, seed, settings, place), order=(nth, rank) if full else ())
        for task in dict.fromkeys(wanted)
        for rank, model in enumerate(dict.fromkeys(map(own_name, chosen)))
        for nth, seed in enumerate(dict.fromkeys(seeds or (SEEDS if full else SEEDS[:2])))
    ]
    folder = Path(out or f"runs/geometry/{'full' if full else 'quick'}")
    facts = {"experiment": "sequences", **asdict(settings)}
    return Output(*run_experiment(folder, facts, jobs, [settings.task(name) for name in TASKS], place, processes))
