"""What a study's runs learn of repeated pairs of tokens: the loss there, and elsewhere, along training.

A label is repeated if the same token came after the same token before, in the same window: what a network predicts
that looks up the earlier occurrence of the token that it reads (an induction head). Trains reported runs of a seed
again, which gives the same bits, and appends one JSON line for each to the record; runs that stand in it are left out.
Then draws all of the record.

    python experiments/resbench_repeats.py runs/resbench --data data/resbench --rung 0.3M --schemes residual lambdas
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from residua.lab.experiment import evaluate, open_run
from residua.lab.study.engine import open_study
from residua.lab.study.verify import repeat
from residua.records import jsonlines
from residua.records.figures import COLOURS, plain, save
from residua.records.jobs import Record
from residua.records.jsonlines import JsonLines
from residua.records.progress import Progress


def measured(place: Path, step: int) -> Record:
    """The held-out loss of a checkpoint on repeated pairs and on all others, in nats per token."""
    losses = evaluate(open_run(place, step, device="cpu"))
    return {"share": losses["repeated_share"], "repeated": losses["repeated_loss"], "other": losses["other_loss"]}


def draw(rows: Sequence[Record]) -> Figure:
    """Draw both losses along training, a line for each run."""
    figure = Figure(figsize=(8.4, 3.7), dpi=130, layout="constrained")
    (share,) = {round(row["points"][-1]["share"], 2) for row in rows}
    titles = {"repeated": f"labels whose pair came before ({share:.0%})", "other": "all other labels"}
    for panel, (name, title) in zip(figure.subplots(1, 2), titles.items()):
        for row, (colour, mark) in zip(rows, itertools.cycle(zip(COLOURS, "os^Dvp"))):
            steps, losses = zip(*((point["step"], point[name]) for point in row["points"]))
            label = f"{row['scheme']}, {row['rung']}"
            panel.plot(steps, losses, color=colour, marker=mark, markersize=4, label=label)
        panel.set_title(title, fontsize=10)
        plain(panel)
    figure.axes[0].set_ylabel("Held-out loss (nats per token)")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=3,
        frameon=False,
        prop={"family": "monospace", "size": 9},
    )
    figure.supxlabel("Step", fontsize=10)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of a study")
    parser.add_argument("--data", help="the prepared data")
    parser.add_argument("--rung", required=True)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("resbench") / "repeats.jsonl")
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "resbench-repeats.png")
    arguments = parser.parse_args()
    plan, rows = open_study(arguments.study, arguments.data)
    finished = {row["key"]: row for row in rows}
    with JsonLines(arguments.record) as lines:
        there = {row["key"] for row in lines.rows}
        for run in plan.runs(finished):
            wanted = run.kind == "report" and (run.size, run.config.train.seed) == (arguments.rung, arguments.seed)
            if wanted and run.scheme in arguments.schemes and run.key in finished and run.key not in there:
                with Progress(run.key, run.config.train.steps) as bar:
                    one = repeat(run, finished[run.key], lambda step, bar=bar: bar.update(step, ""), measured)
                lines.write(one.row)
                lines.sync()
    if not (rows := jsonlines.read(arguments.record)):
        parser.error(f"{arguments.study} has no finished run of seed {arguments.seed} of these schemes at this size")
    save({arguments.picture.name: draw(rows)}, arguments.picture.parent)


if __name__ == "__main__":
    main()
