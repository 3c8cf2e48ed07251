"""Read the record of a scaled-down reproduction of the paper's comparison, and draw it.

Tuning used seed 0 alone and the results other seeds, so that a lucky run could not choose its own report. The plain
residual was tuned over its initial embedding scale as well, and trained for more steps, which says what a scheme whose
steps take longer has to beat at equal seconds. `residua study` makes such comparisons; this one anew, with its budgets:

    python experiments/docstring_corpus.py corpus.jsonl
    residua prepare --source corpus.jsonl --out data/docstrings --vocab-size 2048 --validation-fraction 0.01
    residua study run experiments/reproduction.yaml --data data/docstrings --out runs/reproduction
    python experiments/reproduction.py --draw docs/results-difference.png
"""

import argparse
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from residua.lab.records import jsonlines
from residua.lab.records.statistics import Estimate

RECORD = Path(__file__).with_name("reproduction.jsonl")
SPEED = Path(__file__).with_name("reproduction-speed.jsonl")
VARIANTS = (
    "residual",
    "ddl",
    "ddl-v",
    "ddl-tc",
    "ddl-tc-v",
    "ddl-cc",
    "ddl-ec",
    "ddl-cc-ec",
    "ddl:beta_init=0.5",
    "ddl:v_activation=linear",
    "ddl-tc:beta_init=0.5",
    "ddl-tc:v_activation=linear",
    # What of the lead of the -ec rows is the embedding convolution: d_v = 1 with it, a control.
    "ddl:expand=conv",
    # And what of that lead is the convolution alone, without a delta write: a plain residual with the same one.
    "residual:expand=conv",
)
TUNING_SEED, SEEDS = 0, (1, 2, 3, 4, 5)
STEPS = 500
LONGER = (1.25, 1.5)  # times as many steps, for the plain residual
KEY = ("variant", "lr", "embedding_init_std", "seed", "steps")


def key(row: dict) -> tuple:
    return tuple(row[name] for name in KEY)


def read(record: Path) -> dict[tuple, dict]:
    return {key(row): row for row in jsonlines.read(record)}


def loss(row: dict | None) -> float:
    value = None if row is None else row["val_loss"]
    return value if value is not None and math.isfinite(value) else math.inf


def best_point(done: dict[tuple, dict], variant: str) -> tuple[float, float]:
    """Learning rate and embedding scale with the lowest loss of the tuning seed."""
    tuned = {key: loss(row) for key, row in done.items() if key[0] == variant and key[3:] == (TUNING_SEED, STEPS)}
    return min(tuned, key=tuned.get)[1:3]


class Result(NamedTuple):
    """What a variant came to over the seeds of the results; differences to the plain residual are paired by seed."""

    variant: str
    lr: float
    parameters: int
    losses: list[float]
    step_ratio: float
    at_tokens: list[float]
    at_seconds: list[float]


def results(record: Path = RECORD, speed: Path = SPEED) -> list[Result]:
    """Every variant whose runs are all there, the plain residual first."""
    done = read(record)
    ratios = {row["preset"]: row["ratio"]["median"] for row in jsonlines.read(speed)}
    point = best_point(done, "residual")
    residual = {
        seed: {steps: loss(done.get(("residual", *point, seed, steps))) for steps in (STEPS, *map(longer, LONGER))}
        for seed in SEEDS
    }
    found = []
    for variant in VARIANTS:
        lr, std = best_point(done, variant)
        rows = [done.get((variant, lr, std, seed, STEPS)) for seed in SEEDS]
        if None in rows:
            continue
        losses = [loss(row) for row in rows]
        steps = STEPS * ratios[variant]
        found.append(
            Result(
                variant,
                lr,
                rows[0]["parameters"],
                losses,
                ratios[variant],
                [mine - residual[seed][STEPS] for mine, seed in zip(losses, SEEDS)],
                [mine - between(residual[seed], steps) for mine, seed in zip(losses, SEEDS)],
            )
        )
    return found


def longer(factor: float) -> int:
    return round(STEPS * factor)


def between(losses: dict[int, float], steps: float) -> float:
    """The loss of a run of `steps` steps, linear in their logarithm between (or beyond) the nearest runs there are."""
    known = sorted(losses)
    upper = next((i for i in range(1, len(known)) if known[i] >= steps), len(known) - 1)
    low, high = known[upper - 1], known[upper]
    share = math.log(steps / low) / math.log(high / low)
    return losses[low] + share * (losses[high] - losses[low])


def interval(values: list[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % confidence interval (Student's t)."""
    found = Estimate.of(values)
    return found.mean, found.half_width


def draw(found: list[Result], path: Path) -> None:
    """The differences with their confidence intervals, best at equal tokens on top."""
    from matplotlib.figure import Figure

    from residua.connections.names import label
    from residua.lab.records.figures import COLOURS, plain, save

    rows = sorted((row for row in found if row.variant != "residual"), key=lambda row: -statistics.mean(row.at_tokens))
    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.axvline(0, color="#222222", linewidth=1.2)
    for offset, name, words, style in (
        (0.14, "at_tokens", "same tokens", {"color": COLOURS[0], "fmt": "o"}),
        (-0.14, "at_seconds", "same seconds", {"color": COLOURS[1], "fmt": "s", "markerfacecolor": "white"}),
    ):
        points = [interval(getattr(row, name)) for row in rows]
        places = [i + offset for i in range(len(rows))]
        axes.errorbar(*zip(*((mean, y) for (mean, _), y in zip(points, places))), xerr=[half for _, half in points],
                      capsize=2.5, linewidth=1.3, markersize=5.5, label=words, **style)  # fmt: skip
    axes.set_yticks(range(len(rows)), [label(row.variant) for row in rows], family="monospace", fontsize=9.5)
    axes.set_xlabel("Validation loss minus that of the plain residual (nats per token): left of the line is better")
    plain(axes, "x")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    save({path.name: figure}, path.parent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, default=RECORD)
    parser.add_argument("--draw", type=Path, required=True, metavar="FILE.png", help="draw what the record says")
    arguments = parser.parse_args()
    draw(results(arguments.record), arguments.draw)


if __name__ == "__main__":
    main()
