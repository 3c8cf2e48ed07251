"""The pictures of a study: every difference with its interval, those at several sizes side by side, the answers, the
gates.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

from residua.errors import extra
from residua.lab.study.results import Difference, Results, Row, gates_of
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
PANELS = 8
"""Of gates in a row."""
LEVELS = ("q05", "q50", "q95")


def draw(found: Results) -> Figure | None:
    """Draw the differences to each baseline, a panel for each, lowest loss on top; None if there are none.

    Rows of several sizes stand one below the other, under the names of the sizes.
    """
    compared = list(itertools.product(found.study.baselines, found.measures))
    lines: list[Row | str] = []  # from the lowest up: rows, and the size above its rows
    for rung in reversed(found.study.rungs):
        own = [row for row in found.rows if row.rung == rung and any(row.difference(*one) for one in compared)]
        lines += [*sorted(own, key=lambda row: -row.loss.mean if row.loss else -math.inf), *([rung] if own else [])]
    rows = {place: line for place, line in enumerate(lines) if not isinstance(line, str)}
    baselines = [name for name in found.study.baselines if any(row.difference(name, "tokens") for row in rows.values())]
    if not baselines:
        return None
    if len(lines) == len(rows) + 1:
        lines.pop()
    size = 2.2 + 4.2 * len(baselines), 0.37 * len(lines) + 0.8
    figure, (panels,) = figures.panels(1, len(baselines), size, grid="x", sharey=True)
    for panel, baseline in zip(panels, baselines):
        panel.axvline(0, color="#222222", linewidth=1.2)
        for number, measure in enumerate(found.measures):
            (colour, mark), aside = STYLES[measure], 0.2 * ((len(found.measures) - 1) / 2 - number)
            there = {place + aside: row.difference(baseline, measure) for place, row in rows.items()}
            _marks(panel, there, colour, mark, f"equal {measure}")
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


def draw_sizes(found: Results) -> Figure | None:
    """Draw the differences at every size side by side: a row of panels for each baseline, a panel for each measure.

    Only of schemes with rows at three sizes, or at two if the study has no more, the lowest mean difference on top.
    None where there are fewer sizes or no such schemes.
    """
    first, rows, leads = found.study.baselines[0], {}, {}
    for row in found.rows:
        difference = row.difference(first, "tokens")
        if difference is not None and difference.estimate is not None:
            rows[row.scheme, row.rung] = row
            leads.setdefault(row.scheme, []).append(difference.estimate.mean)
    sizes = [rung for rung in found.study.rungs if any(rung == there for _, there in rows)]
    enough = min(3, max(2, len(sizes)))
    names = [name for name in leads if len(leads[name]) >= enough]
    names.sort(key=lambda name: statistics.fmean(leads[name]), reverse=True)
    baselines = [name for name in found.study.baselines if {*names} - {name}]
    if not baselines:
        return None
    shape = len(baselines), len(found.measures)
    size = 2.0 + 2.5 * shape[1], shape[0] * (0.34 * len(names) + 0.5) + 0.5
    figure, panels = figures.panels(*shape, size, grid="x", sharex=True, sharey=True)
    for (baseline, measure), panel in zip(itertools.product(baselines, found.measures), panels.flat):
        panel.axvline(0, color="#222222", linewidth=1.2)
        for number, rung in enumerate(sizes):
            aside = 0.22 * ((len(sizes) - 1) / 2 - number)
            there = {
                place + aside: rows[name, rung].difference(baseline, measure)
                for place, name in enumerate(names)
                if (name, rung) in rows
            }
            _marks(panel, there, COLOURS[number % len(COLOURS)], "osD^vP"[number % 6], rung)
        panel.set_yticks(range(len(names)), names, family="monospace", fontsize=8.5)
    panels[0][0].set_xlim(_limits([one for (name, _), row in rows.items() if name in names for one in row.differences]))
    for panel, measure in zip(panels[0], found.measures):
        panel.set_title(f"equal {measure}", fontsize=10)
    for (panel, *_), baseline in zip(panels, baselines):
        panel.set_ylabel(f"minus {baseline}")
    figure.supxlabel(
        f"Loss minus that of the baseline (nats per token), 95 % intervals; left is better. {FILLED}", fontsize=10
    )
    figures.legend(figure, columns=6, loc="outside upper right")
    return figure


def _marks(panel: Axes, differences: Mapping[float, Difference | None], colour: str, marker: str, label: str) -> None:
    """Draw differences with their intervals at places on the y axis, those that are not clear of zero hollow."""
    shown = {y: d for y, d in differences.items() if d and d.estimate and d.estimate.half_width is not None}
    hollow = [y for y, difference in shown.items() if not difference.clear]
    estimates = {y: difference.estimate for y, difference in shown.items()}
    figures.intervals(panel, estimates, hollow=hollow, marker=marker, color=colour, label=label)


def draw_answers(found: Results) -> Figure | None:
    """Draw the answers at equal tokens: a row for each comparison under its question, a panel for each size.

    None where no comparison has an interval yet.
    """
    answers = [one for one in found.answers if one.measure == "tokens" and one.difference and one.difference.estimate]
    by_size = {rung: [one for one in answers if one.rung == rung] for rung in found.study.rungs}
    by_size = {rung: own for rung, own in by_size.items() if _limits([one.difference for one in own])}
    if not by_size:
        return None
    lines: list[str | tuple[str, str, str]] = []  # from the top down: a question, and the comparisons below it
    for question in found.study.questions.values():
        own = [one for some in by_size.values() for one in some if one.question.name == question.name]
        pairs = dict.fromkeys((question.name, one.scheme, one.to) for one in own)
        lines += [question.ask, *pairs] if own else []
    lines.reverse()
    labels = ["" if isinstance(line, str) else f"{line[1]} − {line[2]}" for line in lines]
    size = 0.07 * max(map(len, labels)) + 2.2 * len(by_size), 0.21 * len(lines) + 1.0
    figure, (panels,) = figures.panels(1, len(by_size), size, grid="x", sharey=True)
    for panel, (rung, own) in zip(panels, by_size.items()):
        panel.axvline(0, color="#222222", linewidth=1.2)
        there = {lines.index((one.question.name, one.scheme, one.to)): one.difference for one in own}
        _marks(panel, there, *STYLES["tokens"], rung)
        panel.set_title(rung, fontsize=10)
        panel.set_xlim(_limits(list(there.values())))
        panel.set_yticks(range(len(lines)), labels, family="monospace", fontsize=7.5)
        panel.tick_params(axis="y", length=0)
    panels[0].set_ylim(-0.7, len(lines) - 0.3)
    for place, line in enumerate(lines):
        if isinstance(line, str):  # over all panels, as it is longer than a label
            line = line.replace("`", "")
            ask = figure.text(-0.02, place, line, transform=panels[0].get_yaxis_transform(), parse_math=False)
            ask.set(fontsize=8.5, weight="bold", verticalalignment="center", in_layout=False)
            ask.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.5})
    figure.supxlabel(
        "Loss of the first minus that of the second at equal tokens (nats per token), 95 % intervals; each size has a "
        f"scale of its own. {FILLED}",
        fontsize=9,
    )
    return figure


def _limits(differences: Sequence[Difference | None]) -> tuple[float, float] | None:
    """The ends of an axis for differences; None without an interval among them.

    An interval around a run that failed would press all others together, so it leaves the panel; no mean does.
    """
    shown = [one.estimate for one in differences if one and one.estimate and one.estimate.half_width is not None]
    if not shown:
        return None
    means = [one.mean for one in shown]
    ends = [one.mean + sign * one.half_width for one in shown for sign in (-1, 1)]
    low, *_, high = statistics.quantiles([*ends, 0.0, 0.0], n=40)
    low, high = min(low, 0.0, *means), max(high, 0.0, *means)
    return low - 0.12 * (high - low), high + 0.12 * (high - low)


def draw_gates(found: Results) -> Figure | None:
    """Draw the gates of the audited runs along training, a panel for each sublayer, eight in a row; None if there are
    none.
    """
    lines = [
        (one, gate, range(first, min(first + PANELS, len(one["points"][0]["sublayers"]))))
        for one in found.audits
        for gate in gates_of(one)
        if all(row.get(f"{gate}_{q}") is not None for p in one["points"] for row in p["sublayers"] for q in LEVELS)
        for first in range(0, len(one["points"][0]["sublayers"]), PANELS)
    ]
    if not lines:
        return None
    across = max(len(places) for _, _, places in lines)
    size = 1.6 + 1.5 * across, 0.6 + 1.7 * len(lines)
    figure, panels = figures.panels(len(lines), across, size, sharex="row", sharey="row")
    for row_of_panels, (one, gate, places) in zip(panels, lines):
        steps = [point["step"] for point in one["points"]]
        for place, panel in zip(places, row_of_panels):
            rows = [point["sublayers"][place] for point in one["points"]]
            low, middle, high = ([row[f"{gate}_{level}"] for row in rows] for level in LEVELS)
            figures.curve(panel, zip(steps, middle), band=(low, high), color=COLOURS[0])
            panel.axhline(0, color="#222222", linewidth=0.6)
            panel.set_title(rows[0]["sublayer"], fontsize=8)
            panel.tick_params(labelsize=7)
        for panel in row_of_panels[len(places) :]:
            panel.set_visible(False)
        seed = one.get("seed", found.study.seeds[0])
        told = f", seed {seed}" if seed != found.study.seeds[0] else ""
        row_of_panels[0].set_ylabel(f"{one['scheme']}\n{one['rung']}{told}\n{gate}", fontsize=8)
    figure.supxlabel("Step. Line: median over held-out tokens; band: 5 % to 95 % of them", fontsize=8)
    return figure
