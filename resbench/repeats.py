"""What a study's runs learn of repeated pairs of tokens: the loss there, and elsewhere, along training; or their gates.

A label is repeated if the same token came after the same token before, in the same window: what a network predicts
that looks up the earlier occurrence of the token that it reads (an induction head). Trains reported runs of a seed
again, which gives the same bits, and appends one JSON line for each to the record; runs that stand in it are left out.
Then draws all of the record. With --gates it measures what the connections do instead, on eight held-out sequences, and
draws nothing.

    python resbench/repeats.py runs/resbench --data data/resbench --size 0.3M --schemes residual lambdas
    python resbench/repeats.py runs/resbench --data data/resbench --size 0.3M --schemes ddl-tc --gates
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure

from residua.lab.experiment import evaluate, open_run
from residua.lab.inspection import Trace, sublayer_statistics, trace
from residua.lab.jobs.pool import Record, threads
from residua.lab.records import jsonlines
from residua.lab.records.figures import COLOURS, plain, save
from residua.lab.records.jsonlines import JsonLines, finite
from residua.lab.records.progress import Progress
from residua.lab.records.provenance import circumstances
from residua.lab.study.engine import open_study, train_run
from residua.lab.study.plan import PlannedRun
from residua.lab.study.verify import Verified
from residua.lab.training.checkpoint import saved_steps

WINDOWS = 8
"""Held-out sequences on which gates are measured."""
OF_ALL_TOKENS = ("alignment", "compress_share", "direction", "singular_values")


def measured(place: Path, step: int) -> Record:
    """The held-out loss of a checkpoint on repeated pairs and on all others, in nats per token."""
    losses = evaluate(open_run(place, step, device="cpu"))
    return {"share": losses["repeated_share"], "repeated": losses["repeated_loss"], "other": losses["other_loss"]}


def gates(place: Path, step: int) -> Record:
    """The statistics of a checkpoint's connections."""
    opened = open_run(place, step, device="cpu")
    length, held_out = opened.config.train.sequence_length, opened.data.validation
    count = max(1, min(WINDOWS, len(held_out) // length))
    with opened.precision():
        traces = [
            trace(opened.model, held_out.window(i * length, min(length, len(held_out))).tolist()) for i in range(count)
        ]
    names = [name for name, value in traces[0].values.items() if value.dim() > 1 and name not in OF_ALL_TOKENS]
    values = {name: torch.cat([each.values[name] for each in traces], dim=1) for name in names}
    tokens = [token for each in traces for token in each.tokens]
    return {"sublayers": sublayer_statistics(Trace(traces[0].facts, tokens, values))}


def repeated(
    run: PlannedRun, recorded: Record, measure: Callable[[Path, int], Record], report: Callable[[int], None]
) -> Record:
    """Train a run again, with a checkpoint at every evaluation, and return the line of what was measured there."""
    train = run.config.train
    most = -(-train.steps // train.evaluate_every) + 1
    train = replace(train, checkpoint_every=train.evaluate_every, keep_checkpoints=most)
    with tempfile.TemporaryDirectory() as home:
        place = Path(home) / "run"
        with threads(1):
            record = train_run(run._replace(config=replace(run.config, train=train)), place=place, report=report)
        points = finite([{"step": step, **measure(place, step)} for step in saved_steps(place)])
    named = {name: recorded[name] for name in ("key", "size", "scheme", "connection", "seed", "steps")}
    equal = Verified(run.key, recorded, finite(record)).equal
    return {**named, "equal": equal, "points": points, "facts": circumstances(torch.device("cpu"))}


def draw(rows: Sequence[Record]) -> Figure:
    """Draw both losses along training, a line for each run."""
    figure = Figure(figsize=(8.4, 3.7), dpi=130, layout="constrained")
    (share,) = {round(row["points"][-1]["share"], 2) for row in rows}
    titles = {"repeated": f"labels whose pair came before ({share:.0%})", "other": "all other labels"}
    for panel, (name, title) in zip(figure.subplots(1, 2), titles.items()):
        for row, (colour, mark) in zip(rows, itertools.cycle(zip(COLOURS, "os^Dvp"))):
            steps, losses = zip(*((point["step"], point[name]) for point in row["points"]))
            label = f"{row['scheme']}, {row['size']}"
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
    parser.add_argument("--size", required=True)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gates", action="store_true", help="measure the connections, not the loss")
    parser.add_argument("--record", type=Path, help="where the lines go (default: that of ResBench)")
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[1] / "docs" / "resbench-repeats.png")
    arguments = parser.parse_args()
    name, measure = ("audits.jsonl", gates) if arguments.gates else ("repeats.jsonl", measured)
    record = arguments.record or Path(__file__).with_name("records") / "main" / name
    plan, rows = open_study(arguments.study, arguments.data)
    finished = {row["key"]: row for row in rows}
    with JsonLines(record) as lines:
        there = {row["key"] for row in lines.rows}
        for run in plan.runs(finished):
            wanted = run.kind == "report" and (run.size, run.config.train.seed) == (arguments.size, arguments.seed)
            if wanted and run.scheme in arguments.schemes and run.key in finished and run.key not in there:
                with Progress(run.key, run.config.train.steps) as bar:
                    line = repeated(run, finished[run.key], measure, lambda step, bar=bar: bar.update(step, ""))
                tokens = {"tokens": WINDOWS * run.config.train.sequence_length} if arguments.gates else {}
                lines.write({**line, **tokens})
                lines.sync()
    if not (rows := jsonlines.read(record)):
        parser.error(f"{arguments.study} has no finished run of seed {arguments.seed} of these schemes at this size")
    if not arguments.gates:
        save({arguments.picture.name: draw(rows)}, arguments.picture.parent)


if __name__ == "__main__":
    main()
