"""Draw ResBench's leads over the plain residual at 0.1M and 0.3M, and on which labels they lie: docs/resbench-lead.png.

python resbench/picture.py
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from residua.lab.records import jsonlines
from residua.lab.records.figures import COLOURS, plain, save
from residua.lab.study.results import Results, read_results

RECORDS = Path(__file__).with_name("records") / "main"
HEADLINE = Path(__file__).with_name("records") / "headline.jsonl"
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


def leads(results: Results, size: str) -> dict[str, Lead]:
    """The leads at equal tokens of the schemes that were trained at a size."""
    rows = {name: row for name in SCHEMES if (row := results.row(size, name))}
    estimates = {name: row.difference(BASELINE, "tokens").estimate for name, row in rows.items()}
    return {name: Lead(-estimate.mean, estimate.half_width) for name, estimate in estimates.items()}


def splits(results: Results) -> dict[str, Split]:
    """The mean leads at 0.3 million parameters of the same runs, trained again with both losses."""
    trained = jsonlines.read(HEADLINE)
    parts = {}
    for name in (BASELINE, *SCHEMES):
        if row := results.row("0.3M", name):
            keys = {run.key for run in row.reported.runs}
            labels = [(run["val_loss"], *run["split"][-1][1:]) for run in trained if run["key"] in keys]
            loss, repeated, other = map(fmean, zip(*labels))
            share = (other - loss) / (other - repeated)
            parts[name] = Split(share * repeated, (1 - share) * other)
    base = parts.pop(BASELINE)
    return {name: Split(base.repeated - part.repeated, base.other - part.other) for name, part in parts.items()}


def draw(results: Results) -> Figure:
    figure = Figure(figsize=(9.6, 4.7), dpi=130, layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    parts = splits(results)
    for panel, size, split in zip(panels, ("0.1M", "0.3M"), ("", ", split by labels")):
        for place, (name, lead) in _placed(panel, leads(results, size)):
            if split:
                repeated, other = parts[name]
                panel.barh(place, repeated, 0.6, color=COLOURS[0])
                panel.barh(place, other, 0.6, left=repeated if other > 0 else 0, color=COLOURS[1])
            else:
                panel.barh(place, lead.mean, 0.6, color=COLOURS[5])
            panel.errorbar(lead.mean, place, xerr=lead.half, color="black", capsize=2.5)
            text = f"{lead.mean:.2f}".replace("-", "\N{MINUS SIGN}")
            panel.text(max(lead.mean, 0) + lead.half + 0.01, place, text, fontsize=9, va="center")
        title = f"{size.removesuffix('M')} million parameters\nfive seeds, 95 % interval{split}"
        panel.set_title(title, fontsize=10)
    labels = "labels that complete a pair of tokens seen earlier in the window (15 %)", "all other labels"
    handles = [panels[0].barh(0, 0, color=COLOURS[5], label="all labels")]
    handles += [panels[1].barh(0, 0, color=colour, label=label) for label, colour in zip(labels, COLOURS)]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, fontsize=10, frameon=False)
    panels[0].set_yticks(range(len(SCHEMES)), [f"{words}\n" for words in SCHEMES.values()], fontsize=9)
    for place, name in enumerate(SCHEMES):
        below = panels[0].text(-0.04, place + 0.22, name, transform=panels[0].get_yaxis_transform())
        below.set(family="monospace", color="#555555", fontsize=8.5, ha="right", va="center")
    panels[0].set_ylim(len(SCHEMES) - 0.5, -0.5)
    panels[0].set_xlim(-0.05, 0.46)
    figure.supxlabel("How far the loss is below the plain residual's (nats per token); longer is better", fontsize=10)
    return figure


def _placed(panel: Axes, values: dict[str, Lead]) -> Iterator[tuple[int, tuple[str, Lead]]]:
    """The places of leads on the y axis. Other places say that there is none."""
    panel.axvline(0, color="#222222", linewidth=1.0)
    plain(panel, "x")
    for place, name in enumerate(SCHEMES):
        if name in values:
            yield place, (name, values[name])
        else:
            panel.text(0.01, place, "not measured", color="#777777", fontsize=8.5, va="center")


if __name__ == "__main__":
    save({PICTURE.name: draw(read_results(RECORDS))}, PICTURE.parent)
