"""A demonstration of ResBench's main result: three schemes on the same tokens, each with its tuned settings."""

import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from residua.errors import extra, require
from residua.lab.evaluation.compare import Comparison, compare
from residua.lab.evaluation.generate import complete
from residua.lab.evaluation.plots import draw
from residua.lab.experiment import open_or_prepare, open_run, run
from residua.lab.explorer import write_page
from residua.lab.explorer.collect import collect, page_of
from residua.lab.explorer.page import PAGE
from residua.lab.jobs.pool import Job, Records, run_jobs
from residua.lab.records.folder import settings_of
from residua.lab.records.progress import say
from residua.lab.training import RunConfig, load_config

RECIPES = {"residual": "nano", "ddl-tc": "nano-ddl-tc", "residual+tc": "nano-residual-tc"}
"""The recipe of each run. They differ only in the connection and the settings tuned for it."""
EARLIER_NAMES = {"residual+tc": "residual-tc"}
"""The names of run folders in earlier versions; folders with these names are still opened."""
PROMPT = "The function returns"
SAMPLE_TOKENS = 80


@dataclass(frozen=True)
class Demonstration:
    """The comparison, the paths of its pictures and the explorer's page, and each model's continuation of `PROMPT`."""

    comparison: Comparison
    pictures: list[Path]
    page: Path
    texts: dict[str, str]


def demonstrate(out: str | Path, *, steps: int | None = None) -> Demonstration:
    """Train the runs that are missing in `out`, and compare all of them.

    Args:
        out: a folder. Unfinished runs in it are resumed; finished runs stay as they are.
        steps: training steps of each run; None for the steps in the recipes.

    Raises:
        InputError: `out` holds runs with other settings.
        RunError: a run failed.
        KeyboardInterrupt: the runs were interrupted; their work is saved.
    """
    out = Path(out)
    with extra("lab"):  # raises before the minutes of training, not after
        importlib.import_module("plotly")
    runs = train_side_by_side(out, steps)
    comparison = compare(runs)
    page = write_page(out / PAGE, *page_of(*collect(runs)))
    return Demonstration(comparison, draw(comparison, out), page, dict(_texts(out)))


def place_of(out: Path, name: str) -> Path:
    """Return the folder of a run."""
    earlier = out / EARLIER_NAMES.get(name, name)
    return earlier if earlier.exists() else out / name


def train_side_by_side(out: Path, steps: int | None = None) -> list[Path]:
    """Train the runs of `demonstrate`, each in a process of one thread; return their folders."""
    changes = {} if steps is None else {"train.steps": steps}
    begun = {name: settings_of(place_of(out, name) / "config.yaml") for name in RECIPES}
    configs = {name: load_config(recipe, changes, begun=begun[name]) for name, recipe in RECIPES.items()}
    data = open_or_prepare(configs["residual"].data, out / "data", progress=True)
    jobs = []
    for name, config in configs.items():
        config = replace(config, data=replace(config.data, path=str(data.folder)))
        if begun[name]:  # more steps would continue a schedule that has ended
            steps_there = begun[name].get("train.steps")
            expected = f"{steps_there}, as in {place_of(out, name) / 'config.yaml'}, unless --out is a new folder"
            require(config.train.steps == steps_there, "--steps", expected, config.train.steps)
        jobs.append(Job(name, _train, (name, config, place_of(out, name)), config.train.steps))
    say(f"training {len(jobs)} models side by side: {', '.join(configs)}")
    with tempfile.TemporaryDirectory() as folder, Records(Path(folder) / "runs.jsonl", lambda row: row["run"]) as runs:
        run_jobs(jobs, runs, processes=len(jobs))
    return [place_of(out, name) for name in configs]


def _train(name: str, config: RunConfig, folder: Path, *, place: Any, report: Callable[[int], None]) -> dict[str, Any]:
    """Train one run to its end, or until the demonstration is interrupted."""
    if "signal" in run(config, folder, resume=(folder / "config.yaml").is_file(), progress=report):
        raise KeyboardInterrupt
    return {"run": name}


def _texts(out: Path) -> Iterator[tuple[str, str]]:
    for name in RECIPES:
        opened = open_run(place_of(out, name))
        continuation = complete(
            opened.model, opened.tokenizer, PROMPT, max_new_tokens=SAMPLE_TOKENS, min_new_tokens=SAMPLE_TOKENS
        )
        yield name, PROMPT + continuation
