"""What a study's runs learn of repeated pairs of tokens: the loss there, and elsewhere, along training.

A label is repeated if the same token came after the same token before, in the same window: what a network predicts
that looks up the earlier occurrence of the token that it reads (an induction head). Trains reported runs of a seed
again, which gives the same bits, and appends one JSON line for each to the record; runs that stand in it are left out.

    python experiments/resbench_repeats.py runs/resbench --data data/resbench --rung 0.3M --schemes residual lambdas
"""

import argparse
from pathlib import Path

from torch import Tensor

from residua.data.batches import HeldOutBatches
from residua.evaluation.loss import IGNORED_LABEL, held_out_loss
from residua.experiment import open_run
from residua.runs.jsonlines import JsonLines
from residua.runs.progress import Progress
from residua.runs.sweep import Record
from residua.study.audit import train_again
from residua.study.engine import open_study


def repeated(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return where the pair (inputs[t], labels[t]) stands earlier in its row: (batch, seq) of bool."""
    pairs = inputs * (1 + max(int(inputs.max()), int(labels.max()))) + labels
    return (pairs.unsqueeze(-1) == pairs.unsqueeze(-2)).tril(-1).any(-1) & (labels != IGNORED_LABEL)


def measured(place: Path, step: int) -> Record:
    """The held-out loss of a checkpoint on repeated pairs and on all others, in nats per token."""
    opened = open_run(place, step, device="cpu")
    batches = list(HeldOutBatches(opened.data.validation, 16, opened.config.train.sequence_length))

    def loss(wanted: bool) -> Record:
        labels = ((inputs, labels, repeated(inputs, labels) == wanted) for inputs, labels in batches)
        with opened.precision():
            return held_out_loss(opened.model, [(one, two.where(kept, IGNORED_LABEL)) for one, two, kept in labels])

    again, other = loss(True), loss(False)
    return {
        "share": again["tokens"] / (again["tokens"] + other["tokens"]),
        "repeated": again["val_loss"],
        "other": other["val_loss"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the folder of a study")
    parser.add_argument("--data", help="the prepared data")
    parser.add_argument("--rung", required=True)
    parser.add_argument("--schemes", nargs="+", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", type=Path, default=Path(__file__).with_name("resbench") / "repeats.jsonl")
    arguments = parser.parse_args()
    plan, rows, _ = open_study(arguments.study, arguments.data)
    finished = {row["key"]: row for row in rows}
    with JsonLines(arguments.record) as lines:
        there = {row["key"] for row in lines.rows}
        for run in plan.runs(finished):
            wanted = run.kind == "report" and (run.rung, run.config.train.seed) == (arguments.rung, arguments.seed)
            if wanted and run.scheme in arguments.schemes and run.key in finished and run.key not in there:
                with Progress(run.key, run.config.train.steps) as bar:
                    row = train_again(run, finished[run.key], measured, lambda step, bar=bar: bar.update(step, ""))
                lines.write(row)
                lines.sync()


if __name__ == "__main__":
    main()
