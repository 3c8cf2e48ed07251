"""Draw ResBench's leads over the plain residual at both sizes, and on which labels they lie: docs/resbench-lead.png.

python experiments/resbench_picture.py
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from residua.lab.study.results import Results, read_results
from residua.records.figures import COLOURS, plain, save

RECORDS = Path(__file__).with_name("resbench")
PICTURE = Path(__file__).parents[1] / "docs" / "resbench-lead.png"
BASELINE = "residual"
SCHEMES = {
    "lambdas": "learned scales",
    "residual+tc": "convolution before every sublayer",
    "lambdas+conv": "scales, convolution of the embedding",
    "lambdas+tc": "scales, convolution before every sublayer",
    "ddl": "Deep Delta Learning (DDL), one channel",
    "ddl-tc": "DDL, four channels, convolution",
    "ddl-tc-write-only": "the same without erasing",
}
"""From the top down."""


class Lead(NamedTuple):
    """Nats per token by which a loss is below the plain residual's, and half of the 95 % interval."""

    mean: float
    half: float


class Split(NamedTuple):
    """The parts of a lead on labels that repeat an earlier pair and on all others. Their sum is the lead."""

    repeated: float
    other: float


def leads(results: Results, rung: str) -> dict[str, Lead]:
    """The leads at equal tokens of the schemes that were trained at a size."""
    rows = {name: row for name in SCHEMES if (row := results.row(rung, name))}
    estimates = {name: row.difference(BASELINE, "tokens").estimate for name, row in rows.items()}
    return {name: Lead(-estimate.mean, estimate.half_width) for name, estimate in estimates.items()}


def splits() -> dict[str, Split]:
    """The leads of one run of each scheme at 0.3 million parameters."""
    lines = (RECORDS / "repeats.jsonl").read_text(encoding="utf-8").splitlines()
    ends = {run["scheme"]: run["points"][-1] for run in map(json.loads, lines)}
    base = ends.pop(BASELINE)
    share = base["share"]
    return {
        name: Split(share * (base["repeated"] - end["repeated"]), (1 - share) * (base["other"] - end["other"]))
        for name, end in ends.items()
    }


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(9.6, 4.7), dpi=130, layout="constrained")
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    parts = splits()
    for panel, rung in zip(panels, ("0.1M", "0.3M")):
        for place, lead in _placed(panel, leads(results, rung)):
            panel.barh(place, lead.mean, 0.6, xerr=lead.half, color=COLOURS[5], error_kw={"capsize": 2.5})
            _number(panel, place, max(lead.mean, 0) + lead.half, lead.mean)
        panel.set_title(f"{rung.removesuffix('M')} million parameters\nfive seeds, 95 % interval", fontsize=10)
    for place, part in _placed(panels[2], parts):
        ends = 0.0
        for value, colour in zip(part, COLOURS):
            panels[2].barh(place, value, 0.6, left=ends if value > 0 else 0, color=colour)
            ends += max(value, 0)
        _number(panels[2], place, ends, sum(part))
    panels[2].set_title("0.3 million parameters\none run each, split by labels", fontsize=10)
    labels = "labels that repeat an earlier pair (15 %)", "all other labels"
    handles = [panels[2].barh(0, 0, color=colour, label=label) for label, colour in zip(labels, COLOURS)]
    figure.legend(handles=handles, loc="outside upper right", ncols=2, fontsize=9, frameon=False)
    panels[0].set_yticks(range(len(SCHEMES)), [f"{words}\n" for words in SCHEMES.values()], fontsize=9)
    for place, name in enumerate(SCHEMES):
        below = panels[0].text(-0.04, place + 0.22, name, transform=panels[0].get_yaxis_transform())
        below.set(family="monospace", color="#555555", fontsize=8.5, ha="right", va="center")
    panels[0].set_ylim(len(SCHEMES) - 0.5, -0.5)
    panels[0].set_xlim(-0.05, 0.46)
    figure.supxlabel("How far the loss is below the plain residual's (nats per token); longer is better", fontsize=10)
    return figure


def _placed(panel: Axes, values: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The places of values on the y axis. Other places say that there is none."""
    panel.axvline(0, color="#222222", linewidth=1.0)
    plain(panel, "x")
    for place, name in enumerate(SCHEMES):
        if name in values:
            yield place, values[name]
        else:
            panel.text(0.01, place, "not measured", color="#777777", fontsize=8.5, va="center")


def _number(panel: Axes, place: int, end: float, value: float) -> None:
    text = f"{value:.2f}".replace("-", "\N{MINUS SIGN}")
    panel.text(end + 0.01, place, text, fontsize=9, va="center")


if __name__ == "__main__":
    save({PICTURE.name: draw(read_results(RECORDS))}, PICTURE.parent)
