"""Draw a comparison: the losses, and the differences to the baseline, where schemes can be distinguished."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from residua.errors import extra
from residua.lab.evaluation.compare import Axis, Comparison, Group
from residua.lab.evaluation.records import Point
from residua.records.figures import COLOURS, plain, save

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

RESIDUAL_COLOUR = "#222222"  # of nothing else
LINE_STYLES = ("-", "--", ":")
# The loss axis excludes the first part of a run, where the loss falls so far that the rest would look flat.
UNSETTLED_LOSS = 0.1
UNSETTLED_DIFFERENCE = 0.3
PANEL_HEIGHT, LEGEND_ROW_HEIGHT = 4.0, 0.21  # inches
LEGEND_CHARACTERS, LABEL_CHARACTERS = 110, 60  # that fit above the panels and below one panel
PANELS: dict[Axis, str] = {"step": "Training step", "seconds": "Wall-clock time of the training steps (seconds)"}
EARLIER = "A slower run is seen earlier in its learning-rate schedule"
UNITS: dict[Axis, str] = {"step": "steps", "seconds": "seconds"}
FEW_POINTS = 24


def draw(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Draw `loss.png` and, if there are differences to a baseline, `difference.png` into `folder`.

    Each has a panel by training step and a panel by seconds. Returns the paths of the pictures.
    """
    pictures = {"loss.png": _losses(comparison)}
    if any(comparison.differences(group) for group in comparison.groups):
        pictures["difference.png"] = _differences(comparison)
    return save(pictures, folder)


def _losses(comparison: Comparison) -> Figure:
    figure, panels = _panels()
    shown = {axis: [] for axis in panels}
    for axis, panel in panels.items():
        for group, style in _styles(comparison):
            for run in group.runs:
                points = run.validation or run.training
                panel.plot(*_columns(run.training, axis), **style, linewidth=0.5, alpha=0.13)
                label = group.name if run is group.runs[0] else None
                panel.plot(*_columns(points, axis), **style, **_marks(points), linewidth=1.1, label=label)
                shown[axis] += zip(*_columns(points, axis))
    _scale(panels, shown, UNSETTLED_LOSS)
    _label(figure, panels, "Loss (nats per token)", "Strong: validation. Pale: training. One line per seed.")
    return figure


def _differences(comparison: Comparison) -> Figure:
    figure, panels = _panels()
    if comparison.speeds_differ:
        panels["seconds"].set_xlabel(f"{PANELS['seconds']}\n{EARLIER}")
    shown = {axis: [] for axis in panels}
    banded = False
    for axis, panel in panels.items():
        missing = []
        for group, style in _styles(comparison):
            if group is comparison.baseline:
                panel.axhline(0, **style, linewidth=1.2, label=f"{group.name} (baseline)")
                continue
            differences = comparison.differences(group, axis)
            if not differences:
                missing.append(group.name)
                continue
            points = [difference.at for difference in differences]
            means = [difference.mean for difference in differences]
            panel.plot(points, means, **style, **_marks(points), linewidth=1.5, label=group.name)
            shown[axis] += zip(points, means)
            if differences[0].deviation is not None:
                banded = True
                edges = [[d.mean + sign * d.deviation for d in differences] for sign in (-1, 1)]
                panel.fill_between(points, *edges, color=style["color"], alpha=0.15, linewidth=0)
                shown[axis] += [*zip(points, edges[0]), *zip(points, edges[1])]
        shown[axis].append((max((at for at, _ in shown[axis]), default=0.0), 0.0))  # the baseline is always visible
        _note_missing(panel, axis, comparison.baseline, missing, everything=len(missing) == len(comparison.groups) - 1)
    _scale(panels, shown, UNSETTLED_DIFFERENCE)
    note = "Band: ± 1 standard deviation over seeds." if banded else "One seed: the noise is not measured."
    _label(figure, panels, "Validation loss minus the baseline's\n(nats per token, below 0 is better)", note)
    return figure


def _note_missing(panel: Axes, axis: Axis, baseline: Group, names: Sequence[str], *, everything: bool) -> None:
    """Name the groups that the panel omits because they share no value of its axis with the baseline."""
    if not names:
        return
    text = f"No common {UNITS[axis]} with {baseline.name}"
    if everything:
        panel.xaxis.set_major_locator(NullLocator())
        panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color="#555555")
    else:
        whose = fill(f"{text}: {', '.join(names)}", LABEL_CHARACTERS)
        panel.set_xlabel(f"{panel.get_xlabel()}\n{whose}")


def _panels() -> tuple[Figure, dict[Axis, Axes]]:
    figure = Figure(figsize=(10, PANEL_HEIGHT), dpi=150, layout="constrained")
    panels = dict(zip(PANELS, figure.subplots(1, len(PANELS), sharey=True)))
    for axis, panel in panels.items():
        panel.set_xlabel(PANELS[axis])
        plain(panel)
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, panels


def _styles(comparison: Comparison) -> Iterator[tuple[Group, dict[str, Any]]]:
    """Yield each group with its line style: black for the plain residual, then colours, then colours with dashes."""
    for group in comparison.groups:
        number = comparison.colours[group.name]
        if number == 0:
            yield group, {"color": RESIDUAL_COLOUR, "linestyle": "-", "zorder": 3}
            continue
        dash, colour = divmod(number - 1, len(COLOURS))
        yield group, {"color": COLOURS[colour], "linestyle": LINE_STYLES[dash % len(LINE_STYLES)]}


def _marks(points: Sequence[Any]) -> dict[str, Any]:
    """Mark the points if there are few, because a single point draws no line."""
    return {"marker": "o", "markersize": 3} if len(points) <= FEW_POINTS else {}


def _columns(points: Sequence[Point], axis: Axis) -> tuple[list[float], list[float]]:
    return [getattr(point, axis) for point in points], [point.loss for point in points]


def _scale(panels: dict[Axis, Axes], shown: dict[Axis, list[tuple[float, float]]], unsettled: float) -> None:
    """Fit the shared loss axis to the points after the first fraction `unsettled` of the runs."""
    settled = []
    for points in shown.values():
        start = unsettled * max((at for at, _ in points), default=0)
        settled += [loss for at, loss in points if at >= start and math.isfinite(loss)]
    if settled:
        margin = 0.05 * (max(settled) - min(settled)) or 0.01
        next(iter(panels.values())).set_ylim(min(settled) - margin, max(settled) + margin)


def _label(figure: Figure, panels: dict[Axis, Axes], loss: str, note: str) -> None:
    first = next(iter(panels.values()))
    first.set_ylabel(loss)
    handles, labels = first.get_legend_handles_labels()
    columns = max(1, LEGEND_CHARACTERS // (max(map(len, labels), default=0) + 6))
    figure.set_figheight(PANEL_HEIGHT + LEGEND_ROW_HEIGHT * -(-len(labels) // columns))
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, frameon=False)
    panels["seconds"].set_title(note, loc="right", fontsize=8, color="#555555")
