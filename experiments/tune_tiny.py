"""Tune the recipes tiny and tiny-ddl*: learning rate, embedding and hidden initialisation, the residual hardest.

For every scheme a grid is run with one seed, then the neighbours of the best point (each axis halved or doubled) until
it has none that is better, then the best points with two more seeds. One JSON line for each run goes into the
record, which is also what makes it resumable: runs that stand in it are not repeated.

A control asks what of a scheme's result is due to one of its parts: another scheme at the best point of the first.

    python experiments/tune_tiny.py [--record experiments/tune-tiny.jsonl] [--workers 2] [--steps 400]
    python experiments/tune_tiny.py --control ddl-cc ddl-cc-ec
"""

import argparse
import itertools
import math
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from throwaway import embedded_corpus, throwaway_run

from residua.lab.jobs.pool import Job, Records, run_jobs
from residua.lab.records import jsonlines
from residua.lab.records.statistics import Estimate

AXES = ("lr", "embedding_init_std", "hidden_init_std_factor")
GRIDS = {
    # The plain residual gets the larger grid and more finalists; the others start from fewer points.
    "residual": ((2e-3, 4e-3, 8e-3), (0.03, 0.06, 0.12), (0.5,)),
    "ddl": ((2e-3, 4e-3, 8e-3), (0.03, 0.06), (0.5,)),
    "ddl-cc-ec": ((2e-3, 4e-3, 8e-3), (0.03, 0.06), (0.5,)),
}
FIRST_SEED, MORE_SEEDS = 0, (1, 2)
FINALISTS = {"residual": 4, "ddl": 3, "ddl-cc-ec": 3}


def train_one(
    scheme: str, point: tuple[float, ...], seed: int, steps: int, data: str, *, place: None, report: Callable
) -> dict:
    """One run of the tiny recipe in a folder that is thrown away; returns its line for the record."""
    lr, embedding, hidden = point
    overrides = [
        f"--data.path={data}", f"--model.connection={scheme}", f"--train.lr={lr}", f"--train.seed={seed}",
        f"--model.embedding_init_std={embedding}", f"--model.hidden_init_std_factor={hidden}", f"--train.steps={steps}",
        f"--train.warmup_steps={steps // 10}", f"--train.evaluate_every={steps}", f"--train.checkpoint_every={steps}",
    ]  # fmt: skip
    settings = {"scheme": scheme, **dict(zip(AXES, point)), "seed": seed, "steps": steps, "threads": 1}
    return settings | throwaway_run("tiny", overrides, report)


def key(row: dict) -> tuple:
    return row["scheme"], tuple(row[axis] for axis in AXES), row["seed"], row["steps"]


class Sweep:
    """What follows from the runs that are done: `done` holds them by (scheme, point, seed, steps)."""

    def __init__(self, done: dict[tuple, dict], steps: int):
        self.losses = {
            key[:3]: math.inf if row["val_loss"] is None else row["val_loss"]
            for key, row in done.items()
            if key[3] == steps
        }

    def ranking(self, scheme: str, seed: int) -> list[tuple[float, tuple[float, ...]]]:
        """(loss, point) of all points of a scheme with this seed, best first; a diverged run is last."""
        losses = [(loss, point) for (name, point, s), loss in self.losses.items() if name == scheme and s == seed]
        return sorted((loss if math.isfinite(loss) else math.inf, point) for loss, point in losses)

    def wanted(self, scheme: str) -> list[tuple]:
        """The runs that a scheme needs, as far as can be known."""
        runs = [(scheme, point, FIRST_SEED) for point in itertools.product(*GRIDS[scheme])]
        if not self.has(runs):
            return runs
        best = self.ranking(scheme, FIRST_SEED)[0][1]
        runs += [
            (scheme, tuple(round(x * factor, 6) if i == axis else x for i, x in enumerate(best)), FIRST_SEED)
            for axis in range(len(AXES))
            for factor in (0.5, 2.0)
        ]
        if not self.has(runs):
            return runs
        finalists = [point for _, point in self.ranking(scheme, FIRST_SEED)[: FINALISTS[scheme]]]
        return runs + [(scheme, point, seed) for seed in MORE_SEEDS for point in finalists]

    def control(self, scheme: str, other: str) -> list[tuple]:
        """The runs of `scheme` at the point where `other` has the best mean over the seeds."""
        seeds = (FIRST_SEED, *MORE_SEEDS)
        whole = {
            point: sum(self.losses[other, point, seed] for seed in seeds)
            for _, point in self.ranking(other, FIRST_SEED)
            if self.has([(other, point, seed) for seed in seeds])
        }
        point = min(whole, key=whole.get)
        return [(scheme, point, seed) for seed in seeds]

    def has(self, runs: list[tuple]) -> bool:
        return all(run in self.losses for run in runs)

    def summary(self) -> str:
        """For every scheme its finalists: mean and standard deviation over the seeds, best first."""
        lines = []
        for scheme in GRIDS:
            rows = []
            for _, point in self.ranking(scheme, FIRST_SEED)[: FINALISTS[scheme]]:
                seeds = [seed for seed in (FIRST_SEED, *MORE_SEEDS) if (scheme, point, seed) in self.losses]
                found = Estimate.of(self.losses[scheme, point, seed] for seed in seeds)
                rows.append((found.mean, math.nan if found.deviation is None else found.deviation, len(seeds), point))
            for mean, spread, seeds, point in sorted(rows):
                settings = ", ".join(f"{axis} {value:g}" for axis, value in zip(AXES, point))
                lines.append(f"{scheme:10s} {mean:.4f} +- {spread:.4f} ({seeds} seeds)  {settings}")
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("tune-tiny.jsonl"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--control", nargs=2, metavar=("SCHEME", "OTHER"), help="SCHEME at the best point of OTHER")
    parser.add_argument("--summary", action="store_true", help="print what the record says and stop")
    args = parser.parse_args()
    if args.summary:
        print(Sweep({key(row): row for row in jsonlines.read(args.record)}, args.steps).summary())
        return

    with embedded_corpus() as data, Records(args.record, key) as records:

        def jobs(done: dict[tuple, dict]) -> list[Job]:
            sweep = Sweep(done, args.steps)
            wanted = sweep.control(*args.control) if args.control else chain(*map(sweep.wanted, GRIDS))
            return [Job((*run, args.steps), train_one, (*run, args.steps, data), args.steps) for run in wanted]

        run_jobs(jobs, records, processes=args.workers)
        print(Sweep(records.finished, args.steps).summary())


if __name__ == "__main__":
    main()
