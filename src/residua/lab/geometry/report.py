"""Records of geometry experiments as tables: references, our runs and published numbers, never mixed in a row.

A record is a dict that JSON can hold. A run (`study.train`, `study.train_operator`) writes one of kind "run":

    task, model, label, seed    label: the name in tables; seed: the seed of weights and batches, not of the data
    parameters                  the number of parameters of the model, including the wrapper
    loss, best_loss             mean squared error on the whole validation set, at the end, and the lowest of `curve`
    curve, gates                [[step, validation loss], ...], and the same for the mean "gamma" and "beta"
    diverged                    whether the run ended with numbers that are not finite; unmeasured values are None
    settings                    sizes and recipe; runs with different settings are never averaged
    position0_loss              mean squared error at position 0, from full sequences
    norm_deviation, stream_norms, and the fields of Causality, SquaredErrors and, for the gyroscope, Position0:
                                see `measure`
    cosine, cosines             reflection: the mean cosine of predictions with -x, at the end, and by step (operators)
    beta, gamma                 reflection: the mean gates at the end

A reference (`references.references`) has kind "reference". Records of other kinds are ignored. Published numbers come
from `published.published`, not from records. Missing values and None are shown as a dash.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from residua.files.durable import write_text
from residua.lab.geometry.published import README, RESEARCH, published
from residua.lab.geometry.tasks import TASKS
from residua.lab.jobs.pool import Record
from residua.lab.records.jsonlines import finite
from residua.lab.records.statistics import Estimate
from residua.lab.records.table import Table, cell, grouped
from residua.lab.records.terminal import markdown_text

OURS, PUBLISHED, REFERENCE = "ours", "published", "reference"
DASH = "—"

TITLES = {
    "gyroscope": "Gyroscope: rotations in unknown planes",
    "stability": "Stability: a constant under noise",
    "near-pi": "Near π: one plane, 177.6°",
    "near-pi-multi": "Near π: every plane, 179.9°",
    "reflection": "Reflection: x to −x",
}
# The columns of a table: keys of its rows, with headings.
WHOSE = {"source": "source", "name": "model", "seeds": "seeds", "parameters": "parameters"}
SEQUENCE_COLUMNS = {"causal": "causal", "loss": "MSE, full sequence", "online_loss": "MSE, online"}
SEQUENCE_COLUMNS |= {"position0_loss": "MSE, position 0", "norm_deviation": "norm deviation"}
REFLECTION_COLUMNS = {"cosine": "cosine with −x", "beta": "β", "gamma": "γ", "loss": "MSE"}
AVERAGED = ("loss", "online_loss", "position0_loss", "norm_deviation", "cosine", "beta", "gamma")
# The formats of a mean and of its standard deviation: `LOSS_STYLE` for losses, `STYLES` for other values.
STYLES = dict.fromkeys(("cosine", "beta", "gamma"), (".3f", ".3f")) | {"norm_deviation": (".3g", ".1g")}
LOSS_STYLE = (".2e", ".1e")

NOTES = f"""## How to read this

- Source: *ours* was measured here, *published* is quoted, a *reference* follows from the task and is not
  trained. Sizes and data of ours are those stated, not the published ones.
- *published*: {README}, three seeds.
  The norm deviation: {RESEARCH}.
  Names in “quotes” are the publication's. Its parameters are those of the blocks; ours are all.
- ±: sample standard deviation over seeds; published ones as published. A run that diverged has no number and
  is not in the mean: it is in the column of seeds.
- Full sequence: the model is given whole sequences, as published. Online: each prediction only from its
  prefix. They differ for a model that is not causal; only the online score can be reached in use.
- Causal: whether earlier outputs stay as they are when the last input changes (published rows: by the
  published code). *leak*: below the error that a causal model can reach at position 0, by more than 3 standard errors.
- Norm deviation is taken after the output norm, as published.
"""


class Group(NamedTuple):
    """Runs of one model that differ only in their seed, sorted by seed."""

    name: str
    runs: tuple[Record, ...]

    def estimate(self, quantity: Callable[[Record], float | None]) -> Estimate | None:
        """Return a quantity over the runs that have it; None if no run has it."""
        return Estimate.of_known(map(quantity, self.runs))


def groups(records: Iterable[Record], task: str) -> list[Group]:
    """Group the runs of a task that differ only in their seed; groups are in order of first appearance."""
    runs = [record for record in records if record.get("kind") == "run" and record.get("task") == task]
    members = grouped(runs, lambda run: (run["label"], json.dumps(run.get("settings"))), itemgetter("seed"))
    return [Group(some[0]["label"], some) for some in members]


def is_causal(group: Group) -> bool | None:
    """Return whether all runs of a group are causal; None if this was not measured."""
    measured = [run["causal"] for run in group.runs if run.get("causal") is not None]
    return all(measured) if measured else None


def summary(records: Sequence[Record], task: str) -> list[dict[str, Any]]:
    """Return the rows of a task's table as numbers: references, then our runs, then published rows.

    `source` names the origin of a row; no row mixes two. Means over seeds are `Estimate`s.
    """
    references = {r["model"]: r for r in records if r.get("kind") == "reference" and r.get("task") == task}
    rows: list[dict[str, Any]] = []
    for record in references.values():
        row = {"source": REFERENCE, "name": record["label"], "model": record["model"], "causal": record["causal"]}
        rows.append(row | {key: Estimate.of([record[key]]) for key in AVERAGED if record.get(key) is not None})
    rows += [_ours(group) for group in groups(records, task)]
    for entry in published(task):
        row = {"source": PUBLISHED, "name": entry["label"], "citation": entry["source"]}
        rows.append(row | {key: value for key, value in entry.items() if key not in ("label", "source")})
    return rows


def table(records: Sequence[Record], task: str) -> Table:
    """Return the table of a task as text; the first column has the source: published, ours or reference."""
    rows = summary(records, task)
    columns = WHOSE | (REFLECTION_COLUMNS if task == "reflection" else SEQUENCE_COLUMNS)
    columns = {key: heading for key, heading in columns.items() if any(row.get(key) is not None for row in rows)}
    return Table([*columns.values()], [[_cell(row, key) for key in columns] for row in rows])


def write_tables(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Write `tables.md` and `tables.json`, with a table for every task that has runs; return their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = {task: members for task in TASKS if (members := groups(records, task))}
    sections = [_section(task, table(records, task), members) for task, members in tasks.items()]
    values = {
        "sources": {PUBLISHED: README},
        "tasks": {task: [finite(_plain(row)) for row in summary(records, task)] for task in tasks},
    }
    markdown, numbers = folder / "tables.md", folder / "tables.json"
    write_text(markdown, "\n".join(["# Geometry: results", "", *sections, NOTES]))
    write_text(numbers, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return [markdown, numbers]


def _ours(group: Group) -> dict[str, Any]:
    first = group.runs[0]
    return {
        "source": OURS,
        "name": group.name,
        "model": first["model"],
        "seeds": len(group.runs),
        "diverged": sum(bool(run.get("diverged")) for run in group.runs),
        "causal": is_causal(group),
        "parameters": first["parameters"],
        "position0_leak": any(run.get("position0_leak") for run in group.runs),
        **{key: group.estimate(lambda run, key=key: run.get(key)) for key in AVERAGED},
    }


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its `Estimate`s as objects for JSON."""
    return {
        key: {"mean": value.mean, "std": value.deviation} if isinstance(value, Estimate) else value
        for key, value in row.items()
    }


def _cell(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return DASH
    if key == "causal":
        return "causal" if value else "not causal"
    if key == "seeds" and row.get("diverged"):
        return f"{value} ({row['diverged']} diverged)"
    if not isinstance(value, Estimate):
        return cell(value)
    style, deviation_style = STYLES.get(key, LOSS_STYLE)
    if "citation" in row and key in STYLES:
        style = deviation_style = "g"  # no more digits than were published
    text = f"{value.mean:{style}}"
    if value.deviation is not None:
        text += f" ± {value.deviation:{deviation_style}}"
    return f"{text} (leak)" if key == "position0_loss" and row.get("position0_leak") else text


def _section(task: str, rows: Table, members: Sequence[Group]) -> str:
    settings = members[0].runs[0]["settings"]
    shared = {
        key: value for key, value in settings.items() if all(g.runs[0]["settings"].get(key) == value for g in members)
    }
    recipe = markdown_text(", ".join(f"{key} {value}" for key, value in shared.items() if value is not None))
    return "\n".join([f"## {TITLES[task]}", "", rows.markdown(), "", f"Ours, all rows: {recipe}.", ""])
