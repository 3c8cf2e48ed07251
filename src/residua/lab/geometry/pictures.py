"""The pictures of geometry records: losses, gates, norms through depth, errors by position, and the reflection."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from residua.errors import extra
from residua.lab.geometry.report import TITLES, Group, Record, groups
from residua.records.figures import COLOURS, plain, save

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

# A colour is a family of schemes (all before the first hyphen of the key), a dash a member of it; what has no scheme or
# the plain one is black or grey.
FIXED = {"residual": "#111111", "zero": "#8a8a8a", "linear": "#8a8a8a"}
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (9, 3)), (0, (3, 1, 1, 1, 1, 1)))
REFERENCE_COLOUR = "#777777"
PANEL_WIDTH, PANEL_HEIGHT, LEGEND_ROW_HEIGHT = 5.0, 3.3, 0.22  # inches
LEGEND_CHARACTERS, LEGEND_HANDLE = 128, 9  # that fit beside each other; what a line and its gaps take of them
GATES = {"gamma": "gate γ", "beta": "strength β"}
FEW_POINTS = 12

Curve = list[tuple[float, float]]
Style = dict[str, Any]


def draw(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Draw what there is of loss.png, gates.png, norms.png, positions.png and reflection.png; returns their paths."""
    found = {task: groups(records, task) for task in TITLES}
    sequences = {task: members for task, members in found.items() if members and task != "reflection"}
    references = [record for record in records if record.get("kind") == "reference"]
    styles = _styles(sequences.values())
    pictures = {
        "loss.png": _losses(sequences, references, styles),
        "gates.png": _gates(sequences, styles),
        "norms.png": _norms(sequences, styles),
        "positions.png": _positions(sequences, references, styles),
        "reflection.png": _reflection(found["reflection"]),
    }
    return save({name: figure for name, figure in pictures.items() if figure is not None}, folder)


def _losses(sequences: dict[str, list[Group]], references: list[Record], styles: dict[str, Style]) -> Figure | None:
    drawn = _with_curve(sequences, _curve)
    if not drawn:
        return None
    figure, panels = _panels(len(drawn))
    for panel, (task, members) in zip(panels, drawn.items()):
        shown = _lines(panel, members, _curve, styles)
        _title(panel, TITLES[task], "training step")
        panel.set_yscale("log")
        levels = {r["label"]: r["loss"] for r in references if r["task"] == task and r["model"] != "plane-known-floor"}
        _levels(panel, levels, shown)
    _finish(figure, panels, "validation MSE, full sequences", "Strong: mean of seeds. Pale: each seed.")
    return figure


def _gates(sequences: dict[str, list[Group]], styles: dict[str, Style]) -> Figure | None:
    chosen = [(task, gate, some) for gate in GATES for task, some in _with_curve(sequences, _gate(gate)).items()]
    if not chosen:
        return None
    figure, panels = _panels(len(chosen))
    for panel, (task, gate, members) in zip(panels, chosen):
        shown = _lines(panel, members, _gate(gate), styles)
        _title(panel, TITLES[task], "training step")
        panel.set_ylabel(f"mean {GATES[gate]}")
        _gate_scale(panel, gate, shown)
    note = (
        "Mean over sublayers and tokens. Pale: each seed. β is within 2 for a reflection, without bound for a rotation."
    )
    _finish(figure, panels, None, note)
    return figure


def _norms(sequences: dict[str, list[Group]], styles: dict[str, Style]) -> Figure | None:
    def norms(record: Record) -> Curve:
        return _finite(enumerate(record.get("stream_norms") or []))

    drawn = _with_curve(sequences, norms, points=2)
    if not drawn:
        return None
    figure, panels = _panels(len(drawn))
    for panel, (task, members) in zip(panels, drawn.items()):
        panel.axhline(1, color=REFERENCE_COLOUR, linewidth=0.8, zorder=0)
        _lines(panel, members, norms, styles)
        _title(panel, TITLES[task], "sublayers written")
        panel.set_yscale("log")
        _plain_ticks(panel)
    _finish(figure, panels, "state norm / first state norm", "Inside the stream, before any output norm.")
    return figure


def _positions(sequences: dict[str, list[Group]], references: list[Record], styles: dict[str, Style]) -> Figure | None:
    def errors(record: Record) -> Curve:
        return _finite((at + 1, loss) for at, loss in enumerate(record.get("by_position") or []))

    def online(record: Record) -> Curve:
        # Online minus full is paired: added to the line over all data, it has no noise from the choice of trajectories.
        full = dict(enumerate(record.get("by_position") or []))
        points = []
        for at, loss, *same in record.get("online_by_position") or []:
            if None not in (loss, *same, full.get(at)):
                points.append((at + 1, full[at] + loss - same[0] if same else loss))
        return [(at, loss) for at, loss in _finite(points) if loss > 0]

    drawn = _with_curve(sequences, errors, points=2)
    if not drawn:
        return None
    figure, panels = _panels(len(drawn))
    prefixes = False
    for panel, (task, members) in zip(panels, drawn.items()):
        shown = _lines(panel, members, errors, styles, seeds=False)
        for group in members:
            points = _mean_curve(group, online) if group.causal is False else []
            if points:
                prefixes = True
                colour = styles[group.name]["color"]
                panel.plot(
                    *zip(*points), "o", markersize=3.2, markerfacecolor="none", color=colour, markeredgewidth=0.9
                )
                shown += [value for _, value in points]
        _title(panel, TITLES[task], "inputs seen")
        panel.set_xscale("log", base=2)
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.set_yscale("log")
        if task == "gyroscope":
            floor = next(
                (r["position0_loss"] for r in references if r["task"] == task and r["model"] == "causal-floor"), None
            )
            if floor is not None:
                panel.plot([1], [floor], marker="_", markersize=16, markeredgewidth=2, color="#111111", zorder=5)
                panel.annotate(
                    "causal floor",
                    (1, floor),
                    (10, 4),
                    textcoords="offset points",
                    fontsize=8,
                    color="#111111",
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5},
                    zorder=6,
                )
                shown.append(floor)
        levels = {
            r["label"]: r["by_position"][-1]
            for r in references
            if r["task"] == task and r.get("by_position") and r["model"] != "running-mean"
        }
        _levels(panel, levels, shown)
    note = "Lines: full sequences. Circles: from prefixes alone, for models that are not causal."
    _finish(figure, panels, "validation MSE", note if prefixes else "Full sequences, mean of seeds.")
    return figure


def _reflection(members: list[Group]) -> Figure | None:
    """Draw the runs with most training vectors by step; with several sizes, also the final cosine by size."""
    if not members:
        return None
    sizes = sorted({group.runs[0].get("num_train") or 0 for group in members})
    largest = [group for group in members if (group.runs[0].get("num_train") or 0) == sizes[-1]]
    # Here the colours go round: most rows are of one family.
    styles = {
        name: {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}
        for number, name in enumerate(dict.fromkeys(group.name for group in members))
    }
    kinds: dict[str, tuple[str, Callable[[Record], Curve]]] = {
        "cosine": ("cosine with −x", lambda record: _finite(record.get("cosines") or [])),
        "loss": ("validation MSE", _curve),
        **{gate: (f"mean {name}", _gate(gate)) for gate, name in GATES.items()},
    }
    kinds = {kind: drawn for kind, drawn in kinds.items() if any(_mean_curve(g, drawn[1]) for g in largest)}
    if not kinds:
        return None
    figure, panels = _panels(len(kinds) + (len(sizes) > 1))
    for panel, (kind, (name, curve)) in zip(panels, kinds.items()):
        shown = _lines(panel, [group for group in largest if _mean_curve(group, curve)], curve, styles)
        _title(panel, f"{name}, {sizes[-1]} training vectors" if sizes[-1] else name, "training step")
        if kind == "loss":
            panel.set_yscale("log")
        _gate_scale(panel, kind, shown)
    if len(sizes) > 1:
        for name in styles:
            points = [(g.runs[0]["num_train"], g.value("cosine")) for g in members if g.name == name]
            points = sorted((count, value.mean) for count, value in points if value is not None)
            panels[-1].plot(*zip(*points), **styles[name], marker="o", markersize=3, label=name)
        _title(panels[-1], "cosine with −x at the end", "training vectors")
        panels[-1].set_xscale("log")
        panels[-1].set_xticks(sizes, [str(size) for size in sizes], minor=False)
        panels[-1].xaxis.set_minor_formatter(NullFormatter())
    _finish(figure, panels, None, "Strong: mean of seeds. Pale: each seed.")
    return figure


def _styles(members: Iterable[list[Group]]) -> dict[str, Style]:
    """Give every name a style, the same in all pictures, and different from all others as long as there are dashes."""
    styles: dict[str, Style] = {}
    colours: dict[str, str] = dict(FIXED)
    used: Counter[str] = Counter()
    for group in (group for groups_of_task in members for group in groups_of_task):
        if group.name in styles:
            continue
        family = group.model.partition(":")[0].partition("-")[0]
        if family not in colours:
            colours[family] = COLOURS[(len(colours) - len(FIXED)) % len(COLOURS)]
        colour = colours[family]
        dash, cycle = used[colour] % len(DASHES), used[colour] // len(DASHES)
        used[colour] += 1
        styles[group.name] = {"color": colour, "linestyle": DASHES[dash], "linewidth": 1.5 + cycle}
    return styles


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(2 * PANEL_WIDTH, PANEL_HEIGHT * rows), dpi=150, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel in panels[count:]:
        panel.remove()
    for panel in panels[:count]:
        plain(panel)
    return figure, panels[:count]


def _title(panel: Axes, title: str, x: str) -> None:
    panel.set_title(title, loc="left", fontsize=10.5)
    panel.set_xlabel(x)
    panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _gate_scale(panel: Axes, gate: str, shown: list[float]) -> None:
    """Show gamma on the unit interval, and beta in logarithms where rotations have left reflections far behind."""
    if gate == "gamma":
        panel.set_ylim(-0.03, 1.03)
        panel.axhline(0.5, color=REFERENCE_COLOUR, linewidth=0.8, zorder=0)
    elif gate == "beta" and 0 < 10 * min(shown) < max(shown):
        panel.set_yscale("log")
        _plain_ticks(panel)


def _plain_ticks(panel: Axes) -> None:
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    panel.yaxis.set_minor_formatter(NullFormatter())


def _lines(
    panel: Axes, members: list[Group], curve: Callable[[Record], Curve], styles: dict[str, Style], *, seeds: bool = True
) -> list[float]:
    """Draw the mean of each group and, pale, its seeds; return the values of the means, which the frame must hold."""
    shown: list[float] = []
    for group in members:
        style, mean = styles[group.name], _mean_curve(group, curve)
        if seeds and len(group.runs) > 1:
            for points in filter(None, map(curve, group.runs)):
                panel.plot(*zip(*points), **{**style, "linewidth": 0.6}, alpha=0.35)
        marks = {"marker": "o", "markersize": 2.5} if len(mean) <= FEW_POINTS else {}
        name = group.name if group.causal is not False else f"{group.name} (not causal)"
        panel.plot(*zip(*mean), **{"linewidth": 1.5, **style}, **marks, label=name)
        shown += [value for _, value in mean]
    return shown


def _levels(panel: Axes, levels: dict[str, float], shown: list[float]) -> None:
    """Grey lines for the references, named at the right edge; those far from everything shown are left out."""
    positive = [value for value in shown if value > 0]
    if not positive:
        return
    low, high = math.log10(min(positive)) - 0.5, math.log10(max(positive)) + 0.5
    near = {name: value for name, value in levels.items() if value > 0 and low <= math.log10(value) <= high}
    values = [*positive, *near.values()]
    bottom, top = math.log10(min(values)), math.log10(max(values))
    margin = 0.05 * (top - bottom) or 0.1
    bottom, top = bottom - margin, top + margin
    panel.set_ylim(10**bottom, 10**top)
    last = -math.inf
    for name, value in sorted(near.items(), key=lambda item: item[1]):
        panel.axhline(value, color=REFERENCE_COLOUR, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        # Names that would overlap are moved up, in fractions of the panel.
        last = max((math.log10(value) - bottom) / (top - bottom), last + 0.055)
        panel.text(1.01, last, name, transform=panel.transAxes, fontsize=7.5, color="#555555", va="center")


def _finish(figure: Figure, panels: list[Axes], y: str | None, note: str) -> None:
    """Add one legend for all panels above them, the note below, and the label of the values where they share it."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            entries.setdefault(label, handle)
        if y is not None and panel.get_subplotspec().is_first_col():
            panel.set_ylabel(y)
    rows = _legend_rows([len(label) for label in entries])
    columns = -(-len(entries) // rows)
    figure.set_figheight(figure.get_figheight() + LEGEND_ROW_HEIGHT * rows + 0.3)
    figure.legend(
        list(entries.values()),
        list(entries),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=3.2,
    )
    figure.supxlabel(note, fontsize=8.5, color="#555555", x=0.01, ha="left")


def _legend_rows(lengths: list[int]) -> int:
    """Return the least number of rows at which the columns, filled one after the other, fit beside each other."""
    for rows in range(1, len(lengths) + 1):
        columns = [lengths[start : start + rows] for start in range(0, len(lengths), rows)]
        if sum(max(column) + LEGEND_HANDLE for column in columns) <= LEGEND_CHARACTERS:
            return rows
    return max(1, len(lengths))


def _curve(record: Record) -> Curve:
    return _finite(record.get("curve") or [])


def _gate(name: str) -> Callable[[Record], Curve]:
    return lambda record: _finite((record.get("gates") or {}).get(name) or [])


def _finite(points: Iterable[Sequence[float | None]]) -> Curve:
    return [(at, value) for at, value in points if value is not None and math.isfinite(value)]


def _with_curve(
    sequences: dict[str, list[Group]], curve: Callable[[Record], Curve], points: int = 1
) -> dict[str, list[Group]]:
    """Return the groups of each task whose mean curve has `points`, without tasks that have none."""
    found = {task: [g for g in members if len(_mean_curve(g, curve)) >= points] for task, members in sequences.items()}
    return {task: members for task, members in found.items() if members}


def _mean_curve(group: Group, curve: Callable[[Record], Curve]) -> Curve:
    """Return the mean over the runs that have the curve, at the places that they share."""
    curves = [dict(points) for points in map(curve, group.runs) if points]
    if not curves:
        return []
    shared = sorted(set(curves[0]).intersection(*curves[1:]))
    return [(at, sum(points[at] for points in curves) / len(curves)) for at in shared]
