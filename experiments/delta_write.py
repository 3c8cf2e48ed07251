"""Draw the picture of the delta write in the README, docs/delta-write.png.

python experiments/delta_write.py
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure

from residua.lab.records.figures import COLOURS, save
from residua.ops import delta_write as write

BLUE, RED, GREEN, PURPLE = COLOURS[0], "#C62828", COLOURS[2], COLOURS[3]
GATES = {0.0: "β = 0 keeps x", 1.0: "β = 1 replaces the part along k", 2.0: "β = 2 mirrors x at the line kᵀx = v"}


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


if __name__ == "__main__":
    for path in save({"delta-write.png": delta_write()}, Path(__file__).parents[1] / "docs"):
        print(path.name)
