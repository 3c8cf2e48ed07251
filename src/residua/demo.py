"""The demonstration of what ResBench found: three schemes on the same tokens, each with its tuned settings."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from residua.errors import extra
from residua.evaluation.compare import Comparison, compare
from residua.evaluation.generate import complete
from residua.evaluation.plots import draw
from residua.experiment import open_or_prepare, open_run, run
from residua.explorer import write_page
from residua.explorer.collect import collect
from residua.runs.progress import say
from residua.training import RunConfig, load_config

RECIPES = {"residual": "nano", "ddl-tc": "nano-ddl-tc", "residual-tc": "nano-residual-tc"}
"""The recipe of each run. They differ only in the connection and in what was tuned for it."""
PROMPT = "The function returns"
SAMPLE_TOKENS = 80
PAGE = "explorer.html"


@dataclass(frozen=True)
class Demonstration:
    """The comparison, the paths of its pictures and of the explorer's page about the runs, and the text that each model
    writes after `PROMPT`.
    """

    comparison: Comparison
    pictures: list[Path]
    page: Path
    texts: dict[str, str]


def demonstrate(out: str | Path, *, steps: int | None = None) -> Demonstration:
    """Train whatever is not trained yet into `out`, one run after the other, and compare.

    Args:
        out: a folder. Runs that were begun resume; finished ones stay as they are.
        steps: training steps of each run, with warmup and evaluations moved in proportion; None as in the recipes.

    Raises:
        InputError: `out` holds runs with other settings.
        RunError: a run failed.
        KeyboardInterrupt: a run was interrupted; its work is saved.
    """
    out = Path(out)
    with extra("lab"):  # before minutes are spent on what it will show
        importlib.import_module("plotly")
    configs = {name: shortened(load_config(recipe), steps) for name, recipe in RECIPES.items()}
    data = open_or_prepare(configs["residual"].data, out / "data", progress=True)
    for number, (name, config) in enumerate(configs.items(), start=1):
        say(f"{number} of {len(configs)}: {name}")
        config = replace(config, data=replace(config.data, path=str(data.folder)))
        begun = (out / name / "config.yaml").is_file()
        if run(config, out / name, resume=begun)["interrupted"]:
            raise KeyboardInterrupt

    runs = [out / name for name in configs]
    comparison = compare(runs)
    page = write_page(out / PAGE, *collect(runs))
    return Demonstration(comparison, draw(comparison, out), page, dict(_texts(out)))


def shortened(config: RunConfig, steps: int | None) -> RunConfig:
    """Return the same run with `steps` steps; warmup, evaluations and checkpoints keep their proportion to it."""
    if steps is None:
        return config
    scaled = {
        name: max(1, round(getattr(config.train, name) * steps / config.train.steps))
        for name in ("evaluate_every", "checkpoint_every")
    }
    warmup = config.train.warmup_steps * steps // config.train.steps
    return replace(config, train=replace(config.train, steps=steps, warmup_steps=warmup, **scaled))


def _texts(out: Path) -> Iterator[tuple[str, str]]:
    for name in RECIPES:
        opened = open_run(out / name)
        written = complete(
            opened.model, opened.tokenizer, PROMPT, max_new_tokens=SAMPLE_TOKENS, min_new_tokens=SAMPLE_TOKENS
        )
        yield name, PROMPT + written
