"""Draw a comparison: the losses, and the differences to the baseline, which distinguish schemes better."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from residua.errors import extra
from residua.lab.evaluation.compare import Comparison, published_beside
from residua.lab.evaluation.runs import Axis, LossPoint, Row
from residua.lab.records import figures

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

RESIDUAL_COLOUR = "#222222"  # used only for the plain residual
# The loss axis excludes the first part of a run, in which the loss falls so much that the rest would look flat.
UNSETTLED_LOSS = 0.1
UNSETTLED_DIFFERENCE = 0.3
LABEL_CHARACTERS = 60  # characters that fit below one panel
PANELS: dict[Axis, str] = {"step": "Training step", "seconds": "Wall-clock time of the training steps (seconds)"}
LABELS = {
    "repeated": "Labels that repeat an earlier pair of tokens in the window",
    "other": "All other labels",
}
SLOWER_IS_EARLIER = "A slower run is seen earlier in its learning-rate schedule"
APART = "cannot be compared"
PUBLISHED = "Pale and wide: published (arXiv 2601.00417), one seed, on its own validation text."
UNITS: dict[Axis, str] = {"step": "steps", "seconds": "seconds"}


def draw(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Draw `loss.png`, `difference.png` if there are differences, and `repeats.png` if its losses were measured.

    The first two have a panel by training step and one by seconds. The third has a panel for labels that repeat an
    earlier pair of tokens, which a model can look up, and one for all other labels. Return the paths of the pictures.
    """
    compared = any(comparison.differences(row) for row in comparison.rows)
    pictures = {
        "loss.png": _loss_figure(comparison),
        "difference.png": _difference_figure(comparison) if compared else None,
        "repeats.png": _repeat_figure(comparison) if any(run.repeated for run in comparison.runs) else None,
    }
    return figures.save(pictures, folder)


def draw_published(comparison: Comparison, folder: str | Path) -> list[Path]:
    """Draw `published.png` into `folder`: validation losses by tokens, and the paper's curves of the same schemes."""
    figure, ((panel,),) = figures.panels(1, 1, (9, 4.5), dpi=150)
    curves = published_beside(comparison)
    end = max((point.tokens / 1e9 for run in comparison.runs for point in run.validation), default=0.0)
    shown: list[float] = []
    for row, style in _styles(comparison):
        for run in row.runs:
            points = [(point.tokens / 1e9, point.loss) for point in run.validation]
            label = row.name if run is row.runs[0] else None
            figures.curve(panel, points, **style, linewidth=1.3, label=label)
            shown += [loss for at, loss in points if at >= UNSETTLED_LOSS * end and math.isfinite(loss)]
    colours = {row.connection: style["color"] for row, style in reversed(list(_styles(comparison)))}
    for model in curves:
        begun = end >= model.curve[0][0]  # a run may end before the published curve begins
        points = [(at, loss) for at, loss in model.curve if not begun or at <= 1.15 * end]
        colour = colours.get(model.preset, "#888888")
        panel.plot(*zip(*points), color=colour, linewidth=4, alpha=0.3, zorder=1, label=model.title)
        shown += [loss for at, loss in points if at >= UNSETTLED_LOSS * points[-1][0]]
    _fit_axis(panel, shown)
    panel.set_xlim(left=0)
    panel.set_xlabel("Training tokens (billions)")
    panel.set_ylabel("Validation loss (nats per token)")
    panel.set_title(PUBLISHED, loc="right", fontsize=8, color="#555555")
    figures.legend(figure)
    return figures.save({"published.png": figure}, folder)


def _loss_figure(comparison: Comparison) -> Figure:
    figure, panels = _panels()
    shown: dict[Axis, list[tuple[float, float]]] = {axis: [] for axis in panels}
    for axis, panel in panels.items():
        for row, style in _styles(comparison):
            name = _shown_name(comparison, row)
            for run in row.runs:
                training = _columns(run.training if comparison.unit == "nats per token" else (), axis)
                points = _columns(run.curve(comparison.unit), axis) or training
                label = name if run is row.runs[0] else None
                figures.curve(panel, points, seeds=[training], **style, linewidth=1.1, label=label)
                shown[axis] += points if len(points) > 1 else training
    _finish(figure, panels, shown, UNSETTLED_LOSS, "Strong: validation. Pale: training. One line per seed.")
    panels["step"].set_ylabel(f"Loss ({comparison.unit})")
    return figure


def _shown_name(comparison: Comparison, row: Row) -> str:
    """Return the name of a row, marked if it cannot be compared."""
    return row.name if comparison.verdict(row).unit else f"{row.name} ({APART})"


def _repeat_figure(comparison: Comparison) -> Figure:
    figure, (panels,) = figures.panels(1, len(LABELS), (10, 4), dpi=150)
    for panel, (kind, title) in zip(panels, LABELS.items()):
        shown: list[float] = []
        for row, style in _styles(comparison):
            for run in row.runs:
                points = _columns(getattr(run, kind), "step")
                label = _shown_name(comparison, row) if run is row.runs[0] else None
                figures.curve(panel, points, **style, linewidth=1.1, label=label)
                start = UNSETTLED_LOSS * max((step for step, _ in points), default=0)
                shown += [loss for step, loss in points if step >= start and math.isfinite(loss)]
        _fit_axis(panel, shown)
        panel.set_xlim(left=0)
        panel.set_xlabel(PANELS["step"])
        panel.set_title(title, loc="left", fontsize=9)
    panels[0].set_ylabel("Validation loss (nats per token)")
    figures.legend(figure)
    return figure


def _fit_axis(panel: Axes, losses: Sequence[float]) -> None:
    """Fit the loss axis of a panel to these losses, if there are any."""
    if losses:
        margin = 0.05 * (max(losses) - min(losses)) or 0.01
        panel.set_ylim(min(losses) - margin, max(losses) + margin)


def _difference_figure(comparison: Comparison) -> Figure:
    figure, panels = _panels()
    if comparison.speeds_differ:
        panels["seconds"].set_xlabel(f"{PANELS['seconds']}\n{SLOWER_IS_EARLIER}")
    shown: dict[Axis, list[tuple[float, float]]] = {axis: [] for axis in panels}
    banded = False
    for axis, panel in panels.items():
        missing, refused = [], []
        for row, style in _styles(comparison):
            if row is comparison.baseline:
                panel.axhline(0, **style, linewidth=1.2, label=f"{row.name} (baseline)")
                continue
            differences = comparison.differences(row, axis)
            if not differences:
                (missing if comparison.verdict(row).unit else refused).append(row.name)
                continue
            means = [difference.mean for difference in differences.values()]
            spreads = [difference.deviation for difference in differences.values()]
            band = None
            if None not in spreads:
                banded = True
                band = tuple([m + sign * spread for m, spread in zip(means, spreads)] for sign in (-1, 1))
            figures.curve(panel, zip(differences, means), band=band, **style, label=row.name)
            for values in (means, *(band or ())):
                shown[axis] += zip(differences, values)
        shown[axis].append((max((at for at, _ in shown[axis]), default=0.0), 0.0))  # the baseline is always visible
        _note_missing(panel, axis, comparison.baseline, missing, everything=len(missing) == len(comparison.rows) - 1)
        if refused:
            _add_line(panel, f"{APART.capitalize()} with {comparison.baseline.name}: {', '.join(refused)}")
    note = "Band: ± 1 standard deviation over seeds." if banded else "One seed: the noise is not measured."
    _finish(figure, panels, shown, UNSETTLED_DIFFERENCE, note)
    panels["step"].set_ylabel(f"Validation loss minus the baseline's\n({comparison.unit}, below 0 is better)")
    return figure


def _note_missing(panel: Axes, axis: Axis, baseline: Row, names: Sequence[str], *, everything: bool) -> None:
    """Add a line with the rows that the panel omits because their values on its axis do not overlap the baseline's."""
    if not names:
        return
    text = f"No common {UNITS[axis]} with {baseline.name}"
    if everything:
        panel.xaxis.set_major_locator(NullLocator())
        panel.text(0.5, 0.5, text, transform=panel.transAxes, ha="center", va="center", color="#555555")
    else:
        _add_line(panel, f"{text}: {', '.join(names)}")


def _add_line(panel: Axes, text: str) -> None:
    """Add a line to the label below a panel."""
    panel.set_xlabel(f"{panel.get_xlabel()}\n{fill(text, LABEL_CHARACTERS)}")


def _panels() -> tuple[Figure, dict[Axis, Axes]]:
    figure, (row,) = figures.panels(1, len(PANELS), (10, 4), dpi=150, sharey=True)
    panels = dict(zip(PANELS, row))
    for axis, panel in panels.items():
        panel.set_xlabel(PANELS[axis])
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    return figure, panels


def _styles(comparison: Comparison) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Yield each row with its line style: black for the plain residual, then colours, then colours with dashes."""
    for row in comparison.rows:
        number = comparison.colours[row.name]
        residual = {"color": RESIDUAL_COLOUR, "linestyle": "-", "zorder": 3}
        yield row, figures.line_style(number - 1) if number else residual


def _columns(points: Sequence[LossPoint], axis: Axis) -> list[tuple[float, float]]:
    return [(getattr(point, axis), point.loss) for point in points]


def _finish(
    figure: Figure,
    panels: dict[Axis, Axes],
    shown: dict[Axis, list[tuple[float, float]]],
    unsettled: float,
    note: str,
) -> None:
    """Fit the shared loss axis to the points after the fraction `unsettled` of the longest run; add legend and note.

    The note says whether the axis cuts earlier points off.
    """
    settled = []
    for points in shown.values():
        start = unsettled * max((at for at, _ in points), default=0)
        settled += [loss for at, loss in points if at >= start and math.isfinite(loss)]
    _fit_axis(panels["step"], settled)
    low, high = panels["step"].get_ylim()
    if not all(low <= loss <= high for points in shown.values() for _, loss in points if math.isfinite(loss)):
        note += " Early points are cut off."
    for panel in panels.values():
        panel.set_xlim(left=0)
    figures.legend(figure)
    panels["seconds"].set_title(note, loc="right", fontsize=8, color="#555555")
