"""What a bfloat16 residual state does to the loss of tiny and tiny-ddl*, all else in float32, three seeds.

One JSON line for each run goes into the record; runs that stand in it are not repeated.

    python experiments/state_dtype.py [--record experiments/state-dtype.jsonl] [--steps 400]
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

from throwaway import embedded_corpus, throwaway_run

from residua.lab.jobs.pool import Job, Records, run_jobs
from residua.lab.records.statistics import paired

RECIPES = ("tiny", "tiny-ddl", "tiny-ddl-cc-ec")
DTYPES = ("float32", "bfloat16")
SEEDS = (0, 1, 2)
KEY = ("seed", "recipe", "state_dtype", "steps")


def train_one(seed: int, recipe: str, dtype: str, steps: int, data: str, *, place: None, report: Callable) -> dict:
    """One run in a folder that is thrown away; returns its line for the record."""
    overrides = [
        f"--data.path={data}", f"--model.state_dtype={dtype}", f"--train.seed={seed}", f"--train.steps={steps}",
        f"--train.warmup_steps={steps // 10}", f"--train.evaluate_every={steps}", f"--train.checkpoint_every={steps}",
    ]  # fmt: skip
    settings = {"recipe": recipe, "state_dtype": dtype, "seed": seed, "steps": steps}
    return settings | throwaway_run(recipe, overrides, report)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("state-dtype.jsonl"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time; sets nothing but the speed")
    arguments = parser.parse_args()
    runs = [(*run, arguments.steps) for run in itertools.product(SEEDS, RECIPES, DTYPES)]
    with embedded_corpus() as data, Records(arguments.record, lambda row: tuple(row[name] for name in KEY)) as records:
        jobs = [Job(run, train_one, (*run, data), arguments.steps) for run in runs]
        losses = {
            job.key: row["val_loss"] for job, row in zip(jobs, run_jobs(jobs, records, processes=arguments.processes))
        }
    for recipe in RECIPES:
        narrow, wide = ({s: losses[s, recipe, dtype, arguments.steps] for s in SEEDS} for dtype in reversed(DTYPES))
        found = paired(narrow, wide)
        print(f"{recipe:16s} bfloat16 - float32: {found.mean:+.4f} +- {found.deviation:.4f}")


if __name__ == "__main__":
    main()
