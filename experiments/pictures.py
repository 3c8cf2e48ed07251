"""Draw the two pictures of the README: docs/delta-write.png, and docs/resbench-convolution.png from the records.

python experiments/pictures.py
"""

import json
from pathlib import Path

import torch
from matplotlib.figure import Figure

from residua.lab.study.plan import load_study
from residua.lab.study.results import results
from residua.ops import delta_write as write
from residua.records.figures import COLOURS, plain, save
from residua.records.statistics import Estimate, paired

ROOT = Path(__file__).resolve().parents[1]
BLUE, RED, GREEN, PURPLE = COLOURS[0], "#C62828", COLOURS[2], COLOURS[3]
GATES = {0.0: "β = 0 keeps x", 1.0: "β = 1 replaces the part along k", 2.0: "β = 2 mirrors x at the line kᵀx = v"}
ROWS = {
    "lambdas": "lambdas: learned scales",
    "residual+tc": "residual+tc: the convolution alone",
    "lambdas+tc": "lambdas+tc: scales and the convolution",
    "ddl-tc": "ddl-tc: Deep Delta Learning, with it",
    "ddl-tc-write-only": "ddl-tc-write-only: the same, never erasing",
}


def delta_write() -> Figure:
    """A state x of two features, and the state after a write of v along k, with three gates."""
    x, k, v = (torch.tensor(numbers, dtype=torch.float64) for numbers in ([-1.0, 0.9], [0.94, 0.342], [1.3]))
    k = k / k.norm()
    figure = Figure(figsize=(10, 2.75), dpi=110, layout="constrained")
    for panel, (gate, title) in zip(figure.subplots(1, len(GATES), sharex=True, sharey=True), GATES.items()):
        after = write(x[None], k, v, torch.tensor(gate).double())[0]
        panel.axline((0, 0), tuple(k.tolist()), color="#999999", linewidth=1)
        across = torch.stack([-k[1], k[0]])
        start, end = (v * k - 4 * across).tolist(), (v * k + 4 * across).tolist()
        panel.plot(*zip(start, end), color=GREEN, linestyle="--", linewidth=1.3)
        for vector, name, colour in ((x, "x", "#111111"), (k, "k", PURPLE), (after, "x′", BLUE)):
            if vector is not after or gate > 0:
                arrow(panel, (0, 0), vector.tolist(), colour)
                place = (vector * (1 + 0.2 / vector.norm())).tolist()
                panel.text(*place, name, color=colour, fontsize=13, style="italic", ha="center", va="center")
        if gate > 0:
            erased = (x - gate * k * (k @ x)).tolist()
            arrow(panel, x.tolist(), erased, RED)
            arrow(panel, erased, after.tolist(), GREEN)
        panel.text(*(v * k - 0.7 * across).tolist(), "  kᵀx = v", color=GREEN, fontsize=10)
        panel.set(title=title, xlim=(-1.5, 3.3), ylim=(-0.55, 2.65), aspect="equal", xticks=[], yticks=[])
        panel.spines[:].set_color("#dddddd")
    figure.suptitle("x′ = x + β k (v − kᵀx): erase what the state holds along k (red), write v (green)", fontsize=12)
    return figure


def arrow(panel, start, end, colour) -> None:
    style = {"arrowstyle": "-|>", "color": colour, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    panel.annotate("", end, start, arrowprops=style)


def differences() -> dict[str, Estimate]:
    """Return the loss minus the plain residual's over the seeds of ResBench at 0.3 million parameters."""
    lines = (ROOT / "experiments/resbench/records.jsonl").read_text(encoding="utf-8").splitlines()
    study = results(load_study("resbench"), [json.loads(line) for line in lines], ())
    rows = {row.scheme: row for row in study.rows if row.rung == "0.3M"}
    return {name: paired(rows[name].losses, rows["residual"].losses) for name in ROWS}


def convolution() -> Figure:
    figure = Figure(figsize=(8, 2.5), dpi=110, layout="constrained")
    panel = figure.subplots()
    for place, (name, estimate) in enumerate(differences().items()):
        colour = BLUE if "tc" in name else "#888888"
        panel.barh(-place, estimate.mean, xerr=estimate.half_width, color=colour, ecolor="#333333", capsize=3)
        panel.text(0.035, -place, ROWS[name], va="center", fontsize=9.5)
    plain(panel, "x")
    panel.spines["left"].set_visible(False)
    panel.axvline(0, color="#333333", linewidth=1)
    panel.set(yticks=[], xlim=(-0.42, 0.32), xticks=[-0.4, -0.3, -0.2, -0.1, 0])
    text = "validation loss minus the plain residual's, nats per token (0.3 million parameters, 5 seeds)"
    panel.set_xlabel(text, fontsize=9)
    return figure


if __name__ == "__main__":
    for path in save({"delta-write.png": delta_write(), "resbench-convolution.png": convolution()}, ROOT / "docs"):
        print(path.relative_to(ROOT))
