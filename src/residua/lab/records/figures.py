"""Parts of figures: panels of one style, training curves, estimates with intervals, and a legend."""

from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from residua.errors import extra
from residua.files.durable import replacing
from residua.lab.records.statistics import Estimate

with extra("lab"):
    import numpy
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any colour vision can distinguish. The explorer's page uses the same
# colours, as --scheme-N in style.css.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES: tuple[Any, ...] = ("-", "--", ":")
FEW_POINTS = 24
LEGEND_CHARACTERS, LEGEND_ROW_HEIGHT = 110, 0.21  # characters that fit above the panels; inches of a row

Points = Iterable[tuple[float, float]]


def panels(
    rows: int, columns: int, size: tuple[float, float], *, grid: Literal["x", "y"] = "y", dpi: int = 130, **shared: Any
) -> tuple[Figure, numpy.ndarray]:
    """Return a figure of `size` inches and the array of its panels, each made `plain`. shared: `sharex`, `sharey`."""
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **shared)
    for panel in axes.flat:
        plain(panel, grid)
    return figure, axes


def plain(panel: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Hide the upper and the right edge of a panel, and draw a pale grid at the ticks of `axis`, in the background."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=axis, color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)


def line_style(number: int, dashes: Sequence[Any] = DASHES) -> dict[str, Any]:
    """Return the style of line `number`: all colours in turn, then all again with the next dash."""
    dash, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": dashes[dash % len(dashes)]}


def curve(
    panel: Axes,
    points: Points,
    *,
    seeds: Iterable[Points] = (),
    band: tuple[Sequence[float], Sequence[float]] | None = None,
    **style: Any,
) -> None:
    """Draw a line through points (x, y), with markers if there are few points.

    seeds: further curves, drawn pale. band: lower and upper values at the points; the area between them is shaded.
    """
    points = list(points)
    across, values = zip(*points) if points else ((), ())
    for pale in map(list, seeds):
        if pale:
            panel.plot(*zip(*pale), **{**style, "linewidth": 0.6, "label": None}, alpha=0.3)
    if band is not None:
        panel.fill_between(across, *band, color=style["color"], alpha=0.17, linewidth=0)
    dots = {"marker": "o", "markersize": 3} if len(points) <= FEW_POINTS else {}
    panel.plot(across, values, **{"linewidth": 1.5, **dots, **style})


def intervals(
    panel: Axes,
    estimates: Mapping[float, Estimate],
    *,
    filled: Container[float] = (),
    marker: str = "o",
    **style: Any,
) -> None:
    """Draw estimates with their 95 % intervals, keyed by position on the y axis.

    filled: the positions whose markers are filled; all others are hollow, as in the legend.
    """
    if not estimates:
        return
    places, means = list(estimates), [estimate.mean for estimate in estimates.values()]
    half = [estimate.half_width or 0.0 for estimate in estimates.values()]
    marks = {"marker": marker, "markersize": 4.5, "linestyle": "none", "linewidth": 1.3, **style}
    panel.errorbar(means, places, xerr=half, capsize=2.5, markerfacecolor="white", **marks)
    full = [(mean, place) for mean, place in zip(means, places) if place in filled]
    panel.plot(*(zip(*full) if full else ((), ())), **{**marks, "label": None}, zorder=3)


def as_text(name: str) -> str:
    """Return a name as matplotlib shows it unchanged: a text with two dollar signs would be read as a formula."""
    return name.replace("$", r"\$")


def legend(figure: Figure, *, columns: int | None = None, **options: Any) -> None:
    """Add one legend above the panels, with the labels of all panels, and make room for it in the height of the figure.

    columns: None for as many as fit with the longest label.
    """
    handles: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    columns = columns or max(1, LEGEND_CHARACTERS // (max(map(len, handles), default=0) + 6))
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_HEIGHT * -(-len(handles) // columns))
    look = {"loc": "outside upper left", "ncols": columns, "frameon": False, **options}
    figure.legend(list(handles.values()), [*map(as_text, handles)], **look)


def save(figures: Mapping[str, Figure | None], folder: str | Path) -> list[Path]:
    """Write figures as PNG files, by name, into a folder, which may be new. Return their paths. Raises OSError.

    If a figure is None, an earlier file of this name is removed, because it would not match the others.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        path = Path(folder) / name
        if figure is None:
            path.unlink(missing_ok=True)
            continue
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)
        paths.append(path)
    return paths
