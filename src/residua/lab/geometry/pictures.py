"""Draw geometry records: losses, gates, norms by depth, errors by position, and the reflection."""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from residua.errors import extra
from residua.lab.geometry.report import TITLES, Group, Record, groups, is_causal
from residua.lab.records.figures import curve, legend, line_style, panels, save

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

FIXED = {"residual": "#111111", "zero-layer": "#8a8a8a"}  # the colours of rows without a scheme
PATTERNS: tuple[Any, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (6, 2, 1, 2)),
    (0, (9, 3)),
    (0, (3, 1, 1, 1, 1, 1)),
)
REFERENCE_COLOUR = "#777777"
WIDTH, PANEL_HEIGHT = 10.0, 3.3  # inches
MOST_DOTS = 12  # more dots would hide the dashes
MOST_LINES = 7  # a panel with more curves shows three in colour with names, and the others in grey
OTHERS = {"color": "#c9c9c9", "linewidth": 0.9, "marker": "", "zorder": 1}

PointList = list[tuple[float, float]]
Curve = Callable[[Record], PointList]


class Panel(NamedTuple):
    """The content of a panel: the mean curve of each group with more than one point, and pale curves for its seeds.

    scale     the scale of the values; "ratio" is logarithmic with plain numbers
    line      a value at which a line divides the panel
    levels    whether references with similar losses are drawn as grey lines
    circles   a second curve, for the groups that are not causal
    """

    values: str
    curve: Curve
    scale: Literal["log", "ratio", "unit", "linear"] = "log"
    at: str = "training step"
    line: float | None = None
    levels: bool = False
    circles: Curve | None = None
    title: str = ""
    groups: Sequence[Group] = ()
    references: Sequence[Record] = ()


def _finite(points: Iterable[Sequence[float | None]]) -> PointList:
    return [(at, value) for at, value in points if value is not None and math.isfinite(value)]


def _online(record: Record) -> PointList:
    """Return the online error by position: the curve over all data plus the paired difference online minus full.

    This removes the noise from the choice of trajectories.
    """
    full = record.get("by_position") or []
    measured = [row for row in record.get("online_by_position") or [] if len(row) == 3]  # early records have no pairs
    points = _finite((at + 1, full[at] + online - same) for at, online, same in measured)
    return [(at, loss) for at, loss in points if loss > 0]


LOSS = Panel("validation MSE", lambda run: _finite(run.get("curve") or []), levels=True)
GATES = (
    Panel("mean gate γ", lambda run: _finite(run.get("gates", {}).get("gamma", [])), "unit", line=0.5),
    Panel("mean strength β", lambda run: _finite(run.get("gates", {}).get("beta", [])), "ratio"),
)
NORM_PANEL = Panel(
    "state norm / first state norm",
    lambda run: _finite(enumerate(run.get("stream_norms") or [])),
    "ratio",
    at="sublayers written",
    line=1,
)
POSITIONS = Panel(
    "validation MSE",
    lambda run: _finite(enumerate(run.get("by_position") or [], start=1)),
    at="inputs seen",
    circles=_online,
)
COSINE_PANEL = Panel("cosine with −x", lambda run: _finite(run.get("cosines") or []), "linear")
PICTURES: dict[str, tuple[tuple[Panel, ...], str]] = {
    "loss.png": ((LOSS,), "Full sequences."),
    "gates.png": (GATES, "Mean over sublayers and tokens. β is at most 2 for a reflection, any number for a rotation."),
    "norms.png": ((NORM_PANEL,), "Inside the stream, before any output norm."),
    "positions.png": ((POSITIONS,), "Lines: full sequences."),
    "reflection.png": ((COSINE_PANEL, LOSS, *GATES), ""),
}


def draw(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Draw the `PICTURES` for which there are data, with a panel for each task; return their paths."""
    members = {task: groups(records, task) for task in TITLES}
    references = [record for record in records if record.get("kind") == "reference"]
    styles = _styles(group.name for group in chain(*members.values()))
    figures = {}
    for name, (templates, note) in PICTURES.items():
        panels = [
            template._replace(
                title=TITLES[task],
                groups=[group for group in groups_of_task if len(_mean(group, template.curve)) > 1],
                references=[row for row in references if row["task"] == task],
            )
            for template in templates
            for task, groups_of_task in members.items()
            if (task == "reflection") == (name == "reflection.png")
        ]
        if shown := [panel for panel in panels if panel.groups]:
            figures[name] = _figure(shown, styles, note)
    return save(figures, folder)


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Map every name to a line style, the same in all pictures. Styles differ as long as there are enough dashes."""
    styles = {name: {"color": colour} for name, colour in FIXED.items()}
    others = (name for name in dict.fromkeys(names) if name not in FIXED)
    return styles | {name: line_style(number, PATTERNS) for number, name in enumerate(others)}


def _figure(shown: Sequence[Panel], styles: dict[str, dict[str, Any]], note: str) -> Figure:
    """Draw the panels, with one shared legend above them and the note below."""
    columns = min(len(shown), 2)
    rows = -(-len(shown) // columns)
    figure, axes = panels(rows, columns, (WIDTH, PANEL_HEIGHT * rows), dpi=150)
    for place, panel in zip_longest(axes.flat, shown):
        if panel is None:
            place.remove()
        else:
            _draw(place, panel, styles)
    legend(figure, fontsize=9, handlelength=3.2)
    grey = " Grey: the others." if any(len(_named(panel)) < len(panel.groups) for panel in shown) else ""
    note = f"Strong: mean of seeds. Pale: each seed.{grey} {note}"
    if any(map(_circled, shown)):
        note += " Circles: each prediction from the inputs up to its position, for models that are not causal."
    figure.supxlabel(note, fontsize=8.5, color="#555555", x=0.01, ha="left")
    return figure


def _draw(axes: Axes, panel: Panel, styles: dict[str, dict[str, Any]]) -> None:
    axes.set_title(panel.title, loc="left", fontsize=10.5)
    axes.set_xlabel(panel.at)
    axes.set_ylabel(panel.values)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if panel.scale in ("log", "ratio"):
        axes.set_yscale("log")
    if panel.scale == "ratio":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    if panel.scale == "unit":
        axes.set_ylim(-0.03, 1.03)
    if panel.line is not None:
        axes.axhline(panel.line, color=REFERENCE_COLOUR, linewidth=0.8, zorder=0)
    named, circled = _named(panel), [group.name for group in _circled(panel)]
    for group in panel.groups:
        mean = _mean(group, panel.curve)
        if group.name not in named:
            curve(axes, mean, **OTHERS)
            continue
        style = styles[group.name] | ({} if len(mean) <= MOST_DOTS else {"marker": ""})
        name = f"{group.name} (not causal)" if is_causal(group) is False else group.name
        seeds = map(panel.curve, group.runs) if len(group.runs) > 1 else ()
        curve(axes, mean, seeds=seeds, label=name, **style)
        if group.name in circled:
            circles = {"marker": "o", "markersize": 3.2, "markerfacecolor": "none", "markeredgewidth": 0.9}
            axes.plot(*zip(*_mean(group, panel.circles)), color=style["color"], linestyle="none", **circles)
    if panel.levels:
        _draw_levels(axes, panel.references)
    if panel.circles:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        floors = [row["position0_loss"] for row in panel.references if row["model"] == "causal-floor"]
        if floors:
            mark = {"marker": "_", "markersize": 16, "markeredgewidth": 2, "linestyle": "none", "color": "#111111"}
            axes.plot([1], floors, **mark, zorder=5, label="causal floor of the first position")


def _named(panel: Panel) -> set[str]:
    """Return the groups to show in colour: all; if there are many, the plain residual, the lowest and the highest."""
    ends = sorted((_mean(group, panel.curve)[-1][1], group.name) for group in panel.groups)
    names = [name for _, name in ends]
    return set(names) if len(names) <= MOST_LINES else {names[0], names[-1], "residual"}


def _circled(panel: Panel) -> list[Group]:
    """Return the groups in colour for which the error from prefixes is drawn too, as circles."""
    named = _named(panel)
    return [group for group in panel.groups if panel.circles and group.name in named and is_causal(group) is False]


def _draw_levels(axes: Axes, references: Sequence[Record]) -> None:
    """Draw grey lines for references near the curves, with their names at the right edge."""
    low, high = axes.get_ylim()
    losses = {row["loss"]: row["label"] for row in references if row["model"] != "plane-known-floor"}
    near = sorted(loss for loss in losses if low / 3 < loss < high * 3)
    for loss in near:
        axes.axhline(loss, color=REFERENCE_COLOUR, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    low, high = map(math.log10, axes.get_ylim())
    place = -math.inf
    for loss in near:  # names that would overlap are moved up, in fractions of the panel
        place = max((math.log10(loss) - low) / (high - low), place + 0.055)
        axes.text(1.01, place, losses[loss], transform=axes.transAxes, fontsize=7.5, color="#555555", va="center")


def _mean(group: Group, curve: Curve) -> PointList:
    """Return the mean curve over the runs that have it, at their common positions.

    As in the tables, a run that diverged is in no mean, unless all did.
    """
    runs = [run for run in group.runs if not run.get("diverged")] or group.runs
    curves = [dict(points) for points in map(curve, runs) if points]
    if not curves:
        return []
    shared = sorted(set(curves[0]).intersection(*curves[1:]))
    return [(at, sum(points[at] for points in curves) / len(curves)) for at in shared]
