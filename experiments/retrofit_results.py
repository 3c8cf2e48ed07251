"""What the records in retrofit/ say: rows for the tables of docs/retrofit.md, and its picture.

python experiments/retrofit_results.py docs/retrofit-difference.png
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from residua.lab.records import jsonlines
from residua.lab.records.statistics import Estimate, holm, paired

FOLDER = Path(__file__).with_name("retrofit")
MODES = {"connections": "norms", "all": "residual"}
"""Each mode, and the plain model beside its schemes."""
Record = dict[str, Any]


class Row(NamedTuple):
    """One scheme in one mode, after so many steps. Differences are to the plain model of the mode, in nats per token.

    tokens, seconds  at equal tokens and at equal seconds of process time, over seeds; None without the plain runs, or
                     where a step takes so long that the run was not judged early enough
    documents        the first of them over the documents of validation, means of all seeds
    """

    mode: str
    scheme: str
    steps: int
    seeds: int
    parameters: int
    lr: float | None
    connection_lr: float | None
    loss: Estimate
    tokens: Estimate | None
    documents: Estimate | None
    seconds: Estimate | None
    step_time: Mapping[str, float] | None


def read(folder: Path = FOLDER) -> list[Record]:
    return jsonlines.read(folder / "records.jsonl")


def learned() -> list[Record]:
    """Return what `residua explore` said of trained models."""
    return jsonlines.read(FOLDER / "learned.jsonl")


def rows(records: Iterable[Record]) -> list[Row]:
    """Return a row for each scheme, mode and length of which a seed is finished, plain first."""
    runs: dict[tuple[int, str, str], dict[int, Record]] = {}
    ratios: dict[str, Mapping[str, Mapping[str, float]]] = {}
    for record in records:
        if record["kind"] == "train":
            runs.setdefault((record["steps"], record["mode"], record["scheme"]), {})[record["seed"]] = record
        elif record["kind"] == "time":
            ratios[record["mode"]] = record["ratio"]
    found = []
    for (steps, mode, scheme), seeds in runs.items():
        plain = runs.get((steps, mode, MODES[mode]), {})
        ratio = ratios.get(mode, {}).get(scheme)
        first = next(iter(seeds.values()))
        losses = {seed: run["val_loss"] for seed, run in seeds.items()}
        others = {seed: run["val_loss"] for seed, run in plain.items()}
        if None in losses.values() or None in others.values():
            raise SystemExit(f"{mode} {scheme}, {steps} steps: a run diverged, which these tables do not know")
        compared = scheme != MODES[mode]
        found.append(
            Row(
                mode,
                scheme,
                steps,
                len(seeds),
                first["parameters"],
                first["lr"],
                first["connection_lr"],
                Estimate.of(losses.values()),
                paired(losses, others) if compared else None,
                _over_documents(seeds, plain) if compared else None,
                _at_equal_seconds(seeds, others, ratio["median"]) if compared and ratio else None,
                ratio,
            )
        )
    order = list(MODES)
    return sorted(found, key=lambda row: (order.index(row.mode), row.steps, row.tokens is not None, row.loss.mean))


def sides(found: Sequence[Row], measure: str) -> tuple[list[str], list[str], list[str]]:
    """Return the schemes that are better, worse, and neither, after Holm's correction for the number of `found`."""
    estimates = {row.scheme: getattr(row, measure) for row in found}
    tested = {name: one.p_value for name, one in estimates.items() if one is not None and one.p_value is not None}
    clear = {name for name, p in zip(tested, holm(list(tested.values()))) if p < 0.05}
    better = [name for name in clear if estimates[name].mean < 0]
    return sorted(better), sorted(clear.difference(better)), sorted(estimates.keys() - clear)


def _over_documents(seeds: Mapping[int, Record], plain: Mapping[int, Record]) -> Estimate | None:
    shared = sorted(seeds.keys() & plain.keys())
    if not shared:
        return None
    differences = [
        [own - other for own, other in zip(seeds[seed]["window_losses"], plain[seed]["window_losses"], strict=True)]
        for seed in shared
    ]
    return Estimate.of(sum(found) / len(shared) for found in zip(*differences, strict=True))


def _at_equal_seconds(seeds: Mapping[int, Record], plain: Mapping[int, float], ratio: float) -> Estimate | None:
    """Compare with the loss that a scheme has after 1 / ratio of its steps, between the points of its curve."""
    losses = {seed: _at(run["curve"], run["steps"] / max(1.0, ratio)) for seed, run in seeds.items()}
    return paired({seed: loss for seed, loss in losses.items() if loss is not None}, plain)


def _at(curve: list[Mapping[str, float]], step: float) -> float | None:
    for one, two in pairwise(curve):
        if one["step"] <= step <= two["step"]:
            share = (step - one["step"]) / (two["step"] - one["step"])
            return one["loss"] + share * (two["loss"] - one["loss"])
    return None


def draw(found: list[Row], path: Path) -> None:
    """Draw the differences at equal tokens, a panel for each mode; bars are the intervals over documents."""
    from matplotlib.figure import Figure

    from residua.lab.records.figures import COLOURS, plain, save

    modes = {
        "connections": "only the connections, to the gains of the norms",
        "all": "all weights, to the plain residual",
    }
    compared = [row for row in found if row.tokens is not None]
    names = sorted({row.scheme for row in compared}, reverse=True)
    lengths = sorted({row.steps for row in compared})
    figure = Figure(figsize=(9.6, 0.5 * len(names) + 1.6), dpi=130, layout="constrained")
    for panel, (mode, title) in zip(figure.subplots(1, len(modes), sharex=True, sharey=True), modes.items()):
        panel.axvline(0, color="#222222", linewidth=1.2)
        for i, (steps, colour) in enumerate(zip(lengths, COLOURS)):
            own = [row for row in compared if (row.mode, row.steps) == (mode, steps)]
            aside = 0.16 * (len(lengths) - 1 - 2 * i)
            y = [names.index(row.scheme) + aside for row in own]
            panel.errorbar(
                [row.tokens.mean for row in own], y, xerr=[row.documents.half_width for row in own],
                fmt="o", color=colour, markersize=4.5, linewidth=1.3, capsize=2.5, label=f"{steps} steps",
            )  # fmt: skip
        panel.set_title(title, fontsize=10)
        panel.set_yticks(range(len(names)), names, family="monospace", fontsize=10)
        panel.set_ylim(-0.6, len(names) - 0.4)
        panel.set_xlabel("Difference of the loss (nats per token); left is better")
        plain(panel, "x")
    few = {steps: sorted({row.scheme for row in compared if row.steps == steps}) for steps in lengths}
    handles, _ = panel.get_legend_handles_labels()
    labels = [f"{n} steps" + (f" (only {few[n][0]})" if len(few[n]) == 1 else "") for n in lengths]
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    save({path.name: figure}, path.parent)


if __name__ == "__main__":
    draw(rows(read()), Path(sys.argv[1]))
