"""Does the best learning rate stay where it is when the width grows? With muP and without, on the embedded corpus.

Each width is trained with every learning rate of a grid, one JSON line for each run in the record, which is also what
makes it resumable: runs that stand in it are not repeated. Only the width changes; heads have 32 features.

    python experiments/mup_transfer.py [--record experiments/mup-transfer.jsonl] [--connections ddl-cc residual]
    python experiments/mup_transfer.py --table
"""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path

from throwaway import embedded_corpus, throwaway_run

from residua.lab.jobs.pool import Job, Records, run_jobs
from residua.lab.records import jsonlines

WIDTHS = (64, 128, 256)
RATES = tuple(0.002 * 2**i for i in range(7))
BASE = 64
KEY = ("connection", "mup", "width", "lr", "seed", "steps")


def train_one(
    connection: str,
    mup: bool,
    width: int,
    lr: float,
    seed: int,
    steps: int,
    data: str,
    *,
    place: None,
    report: Callable,
) -> dict:
    """One run in a folder that is thrown away; returns its line for the record."""
    overrides = [
        f"--data.path={data}", f"--model.connection={connection}", f"--model.mup={str(mup).lower()}",
        f"--model.mup_base_width={BASE}", f"--model.hidden_size={width}", f"--model.num_attention_heads={width // 32}",
        "--model.head_dim=32", "--model.num_hidden_layers=2", f"--train.lr={lr}", f"--train.seed={seed}",
        f"--train.steps={steps}", f"--train.warmup_steps={steps // 10}", "--train.batch_size=8",
        "--train.sequence_length=64", f"--train.evaluate_every={steps}", f"--train.checkpoint_every={steps}",
        "--train.device=cpu",
    ]  # fmt: skip
    settings = dict(zip(KEY, (connection, mup, width, lr, seed, steps)))
    return settings | throwaway_run("tiny", overrides, report)


def table(rows: list[dict]) -> str:
    """Markdown: validation loss by width and learning rate, the best of each width in bold."""
    lines = []
    for connection, mup in sorted({(row["connection"], row["mup"]) for row in rows}):
        chosen = {
            (r["width"], r["lr"]): r["val_loss"] for r in rows if (r["connection"], r["mup"]) == (connection, mup)
        }
        rates = sorted({lr for _, lr in chosen})
        lines += [f"`{connection}`, {'muP' if mup else 'standard'}:", ""]
        lines += ["| width | " + " | ".join(f"{lr:g}" for lr in rates) + " |", "|---" * (len(rates) + 1) + "|"]
        for width in sorted({width for width, _ in chosen}):
            best = min(loss for (w, _), loss in chosen.items() if w == width)
            losses = [chosen.get((width, lr)) for lr in rates]
            cells = ["" if x is None else f"**{x:.3f}**" if x == best else f"{x:.3f}" for x in losses]
            lines.append(f"| {width} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("mup-transfer.jsonl"))
    parser.add_argument("--connections", nargs="+", default=["ddl-cc", "residual"])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="LR")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time; sets nothing but the speed")
    parser.add_argument("--table", action="store_true", help="print the record as tables and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(jsonlines.read(arguments.record)))
        return
    points = itertools.product(arguments.connections, (True, False), WIDTHS, arguments.rates, arguments.seeds)
    with embedded_corpus() as data, Records(arguments.record, lambda row: tuple(row[name] for name in KEY)) as records:
        runs = [(*point, arguments.steps) for point in points]
        jobs = [Job(run, train_one, (*run, data), arguments.steps, cost=run[2]) for run in runs]
        run_jobs(jobs, records, processes=arguments.processes)


if __name__ == "__main__":
    main()
