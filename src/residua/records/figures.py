"""What all pictures share: colours, the look of a panel, and how they are saved."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from residua.errors import extra
from residua.records.durable import replacing

with extra("lab"):
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which people with any colour vision can tell apart. The explorer's page has the same colours,
# as --scheme-N in its style.css.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def plain(panel: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Leave out the upper and the right edge of a panel; draw pale lines at the ticks of an axis, behind the rest."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis=axis, color="#e6e6e6", linewidth=0.8)
    panel.set_axisbelow(True)


def save(figures: Mapping[str, Figure], folder: str | Path) -> list[Path]:
    """Write figures as PNG files of these names into a folder, which may be new; return their paths. Raises OSError."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / name for name in figures]
    for path, figure in zip(paths, figures.values()):
        with replacing(path) as file:
            FigureCanvasAgg(figure).print_png(file)
    return paths
