"""The picture of a study: every difference with its interval."""

import itertools
import math
from collections.abc import Mapping

from residua.errors import extra
from residua.lab.study.results import Difference, Results, Row
from residua.records import figures
from residua.records.figures import COLOURS

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = {
    "tokens": (COLOURS[0], "o"),
    "FLOPs": (COLOURS[2], "D"),
    "seconds": (COLOURS[1], "s"),
    "compiled seconds": (COLOURS[3], "^"),
}
"""Colour and mark of each measure."""
FILLED = "Filled: clear of zero after the correction"


def draw(results: Results) -> Figure | None:
    """Draw the differences to each baseline, a panel for each, lowest loss on top; None if there are none.

    Rows of several sizes stand one below the other, under the names of the sizes.
    """
    compared = list(itertools.product(results.study.baselines, results.measures))
    lines: list[Row | str] = []  # from the lowest up: rows, and the size above its rows
    for size in reversed(results.study.sizes):
        some = [row for row in results.rows if row.size == size and any(row.difference(*pair) for pair in compared)]
        lines += [*sorted(some, key=lambda row: -row.loss.mean if row.loss else -math.inf), *([size] if some else [])]
    rows = {place: line for place, line in enumerate(lines) if not isinstance(line, str)}
    baselines = [
        name for name in results.study.baselines if any(row.difference(name, "tokens") for row in rows.values())
    ]
    if not baselines:
        return None
    if len(lines) == len(rows) + 1:
        lines.pop()
    inches = 2.2 + 4.2 * len(baselines), 0.37 * len(lines) + 0.8
    figure, (panels,) = figures.panels(1, len(baselines), inches, grid="x", sharey=True)
    for panel, baseline in zip(panels, baselines):
        panel.axvline(0, color="#222222", linewidth=1.2)
        for number, measure in enumerate(results.measures):
            (colour, mark), aside = STYLES[measure], 0.2 * ((len(results.measures) - 1) / 2 - number)
            differences = {place + aside: row.difference(baseline, measure) for place, row in rows.items()}
            _marks(panel, differences, colour, mark, f"equal {measure}")
        panel.set_yticks(range(len(lines)), [line if isinstance(line, str) else line.scheme for line in lines])
        for place, label in enumerate(panel.get_yticklabels()):
            label.set(family="monospace", fontsize=8.5, weight="normal" if place in rows else "bold")
        for place in set(range(len(lines))) - set(rows):
            panel.axhline(place + 0.5, color="#999999", linewidth=0.6)
        panel.set_ylim(-0.7, len(lines) - 0.5)
        panel.set_xlabel(f"Loss minus that of {baseline} (nats per token)")
    figures.legend(figure, columns=2 * len(baselines), loc="outside upper right")
    figure.supxlabel(FILLED, fontsize=9)
    return figure


def _marks(panel: Axes, differences: Mapping[float, Difference | None], colour: str, marker: str, label: str) -> None:
    """Draw differences with their intervals at places on the y axis, those that are not clear of zero hollow."""
    shown = {y: d for y, d in differences.items() if d and d.estimate and d.estimate.half_width is not None}
    hollow = [y for y, difference in shown.items() if not difference.clear]
    estimates = {y: difference.estimate for y, difference in shown.items()}
    figures.intervals(panel, estimates, hollow=hollow, marker=marker, color=colour, label=label)
