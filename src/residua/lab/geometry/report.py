"""Records of geometry experiments, and the tables and pictures made of them.

A record is a dict that JSON can hold. A run writes one:

    kind              "run"
    task              a key of `tasks.TASKS`
    model             the scheme's key ("residual", "ddl", "mhc-split", "edelta-sequence", "zero-layer", ...)
    label             what a reader sees
    seed              int: initialisation and batches (the data's seed is the task's)
    parameters        int, all of the model, wrapper included
    causal            bool, `measure.Causality.causal`; None where a task has a single position
    causality_change  float, `measure.Causality.relative`
    loss              float, mean squared error on the whole validation set at the end, from full sequences
    best_loss         float, the lowest of the evaluations during training
    online_loss       float, `measure.Scores.online`; None where a task has a single position
    position0_loss    float, mean squared error at position 0, from full sequences
    position0_leak    bool, optional, `measure.Position0.leak` (gyroscope only)
    by_position       [float, ...], mean squared error at each position, from full sequences
    online_by_position  [[position, online, full], ...], optional: `measure.Scores.online_by_position`; without the
                      third, which is of the same trajectories, the picture shows the noise of choosing them
    norm_deviation    float or None, `measure.norm_deviation`
    stream_norms      [float, ...], `measure.stream_norms`: after the expansion, then after each sublayer
    curve             [[step, validation loss], ...]
    gates             {"gamma": [[step, mean], ...], "beta": [...]}, only those that the model has
    seconds           float, of training
    settings          {name: plain value}: sizes and recipe. Runs of different settings are never averaged.
    diverged          bool, optional: the run ended with numbers that are not finite, which are then None

A record of the task "reflection" also has

    cosine            float, mean over the validation set of cos(prediction, -x)
    beta, gamma       float or None, at the end (mean over the first 100 validation inputs)
    cosines           [[step, cosine], ...], optional
    num_train         int
    controls          {name: plain value}, such as {"gate_bias": -1.5, "penalty": 0.5}; {} where there are none

and may leave out what has no meaning for single vectors. Whatever is missing or None is shown as a dash. An analytic
reference (see `references.references`) has

    kind "reference", task, model, label, loss, and where they apply: causal, position0_loss, by_position, cosine

Records of other kinds are left to whoever wrote them. Published numbers are not records: `published.published` has
them, and every table gives them rows of their own.
"""

import json
import math
from collections.abc import Iterable, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from residua.lab.geometry.published import README, RESEARCH, Value, published
from residua.lab.geometry.tasks import TASKS
from residua.records import table as results
from residua.records.durable import write_text
from residua.records.jsonlines import finite

Record = dict[str, Any]
OURS, PUBLISHED, OLDER, REFERENCE = "ours", "published", "published (older)", "reference"
DASH = "—"

TITLES = {
    "gyroscope": "Gyroscope: rotations in unknown planes",
    "stability": "Stability: a constant under noise",
    "near-pi": "Near π: one plane, 177.6°",
    "near-pi-multi": "Near π: every plane, 179.9°",
    "reflection": "Reflection: x to −x",
}


class Column(NamedTuple):
    """A column of a table: the key of a row, its heading, how a number is written, and the task that alone has it."""

    key: str
    heading: str
    style: str = ""
    task: str | None = None


SEQUENCE_COLUMNS = (
    Column("source", "source"),
    Column("name", "model"),
    Column("seeds", "seeds"),
    Column("parameters", "parameters", ","),
    Column("causal", "causal"),
    Column("loss", "MSE, full sequence", "e"),
    Column("online_loss", "MSE, online", "e"),
    Column("position0_loss", "MSE, position 0", "e", task="gyroscope"),
    Column("norm_deviation", "norm deviation", "g"),
)
REFLECTION_COLUMNS = (
    Column("source", "source"),
    Column("name", "model"),
    Column("num_train", "training vectors"),
    Column("seeds", "seeds"),
    Column("parameters", "parameters", ","),
    Column("cosine", "cosine with −x", "f"),
    Column("beta", "β", "f"),
    Column("gamma", "γ", "f"),
    Column("loss", "MSE", "g"),
)
_NOT_IN_ROWS = ("kind", "task", "label", "older", "source")
AVERAGED = ("loss", "best_loss", "online_loss", "position0_loss", "norm_deviation", "cosine", "beta", "gamma")


class Group(results.Group[Record]):
    @property
    def model(self) -> str:
        return self.runs[0]["model"]

    @property
    def causal(self) -> bool | None:
        """None where no run has been judged; a model that was once seen to look ahead is not causal."""
        seen = [run["causal"] for run in self.runs if run.get("causal") is not None]
        return all(seen) if seen else None

    def value(self, key: str) -> Value | None:
        """Return mean and sample standard deviation (None for one seed) over the runs that have `key`."""
        estimate = self.estimate(lambda run: run.get(key))
        return estimate and Value(estimate.mean, estimate.deviation)


def groups(records: Iterable[Record], task: str) -> list[Group]:
    """Group the runs of a task, each group under a unique name, in the order in which they first appear.

    The name is the label, followed by the controls and settings that distinguish two groups with the same label.
    """
    runs = [record for record in records if record.get("kind") == "run" and record.get("task") == task]
    members = results.grouped(runs, _identity, itemgetter("seed"))
    heads, result = [some[0] for some in members], []
    for head, some in zip(heads, members):
        rivals = [other for other in heads if other is not head and _place(other) == _place(head)]
        name = f"{head['label']} ({_differing(head, rivals) or head['model']})" if rivals else head["label"]
        result.append(Group(name, some))
    return result


def summary(records: Sequence[Record], task: str) -> list[dict[str, Any]]:
    """Return the rows of a task's table as numbers: references, then ours, then published; `source` says which.

    Means over seeds are `Value`s. A row never holds numbers of two sources.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown, must be one of {', '.join(TASKS)}")
    chosen = {r["model"]: r for r in records if r.get("kind") == "reference" and r.get("task") == task}
    rows: list[dict[str, Any]] = []
    for record in chosen.values():
        row = {"source": REFERENCE, "name": record["label"], "model": record["model"], "causal": record.get("causal")}
        rows.append(row | {key: Value(record[key]) for key in AVERAGED if record.get(key) is not None})
    ours = [_ours(group) for group in groups(records, task)]
    theirs = []
    for entry in published(task):
        row = {"source": OLDER if entry["older"] else PUBLISHED, "name": entry["label"], "citation": entry["source"]}
        theirs.append(row | {key: value for key, value in entry.items() if key not in _NOT_IN_ROWS})
    if task == "reflection":
        ours.sort(key=_most_vectors_first)
        theirs.sort(key=lambda row: (row["source"], _most_vectors_first(row)))
    return rows + ours + theirs


def table(records: Sequence[Record], task: str) -> results.Table:
    """The rows of a task as text; the first column says whose number it is: published, ours or reference."""
    rows = summary(records, task)
    columns = REFLECTION_COLUMNS if task == "reflection" else SEQUENCE_COLUMNS
    columns = [column for column in columns if column.task in (None, task)]
    shown = [column for column in columns if any(row.get(column.key) is not None for row in rows)]
    header = [column.heading for column in shown]
    return results.Table(header, [[_cell(row, column) for column in shown] for row in rows])


def write_tables(records: Sequence[Record], folder: str | Path) -> list[Path]:
    """Write `tables.md` and `tables.json`, with a table for every task that has runs; returns their paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = [task for task in TASKS if groups(records, task)]
    sections = [_section(records, task) for task in tasks]
    values = {
        "sources": {PUBLISHED: README, OLDER: RESEARCH},
        "tasks": {task: [finite(_named(row)) for row in summary(records, task)] for task in tasks},
    }
    markdown, numbers = folder / "tables.md", folder / "tables.json"
    write_text(markdown, "\n".join(["# Geometry: results", "", *sections, *_notes()]))
    write_text(numbers, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return [markdown, numbers]


def _named(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its `Value`s as objects for JSON."""
    return {
        key: {"mean": value.mean, "std": value.deviation} if isinstance(value, Value) else value
        for key, value in row.items()
    }


def _identity(record: Record) -> tuple[str, ...]:
    parts = (record.get("num_train"), record.get("controls") or {}, _settings(record))
    return record["model"], record["label"], *(json.dumps(part, sort_keys=True) for part in parts)


def _place(record: Record) -> tuple[Any, ...]:
    """Return what a reader of a table sees of a record: two with the same need names that tell them apart."""
    return record["label"], record.get("num_train")


def _differing(record: Record, rivals: Sequence[Record]) -> str:
    """Say which controls and settings of a record differ from those of its rivals."""
    own, others = _options(record), [_options(rival) for rival in rivals]
    different = [key for key, value in own.items() if any(other.get(key) != value for other in others)]
    return ", ".join(f"{key.replace('_', ' ')} {_number(own[key])}" for key in different)


def _options(record: Record) -> dict[str, Any]:
    return _settings(record) | (record.get("controls") or {})


def _settings(record: Record) -> dict[str, Any]:
    return {key: value for key, value in record.get("settings", {}).items() if key != "seed"}


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _ours(group: Group) -> dict[str, Any]:
    first = group.runs[0]
    row: dict[str, Any] = {
        "source": OURS,
        "name": group.name,
        "model": group.model,
        "seeds": len(group.runs),
        "seed_list": [run["seed"] for run in group.runs],
        "diverged": sum(bool(run.get("diverged")) for run in group.runs),
        "causal": group.causal,
        "parameters": first.get("parameters"),
        "settings": _settings(first),
        "seconds": group.value("seconds"),
    }
    changes = [run["causality_change"] for run in group.runs if run.get("causality_change") is not None]
    row["causality_change"] = max(changes, default=None)
    row["position0_leak"] = any(run.get("position0_leak") for run in group.runs)
    row |= {key: first[key] for key in ("num_train", "controls") if key in first}
    return row | {key: group.value(key) for key in AVERAGED}


def _most_vectors_first(row: dict[str, Any]) -> int:
    return -(row.get("num_train") or 0)


def _cell(row: dict[str, Any], column: Column) -> str:
    value = row.get(column.key)
    if column.key == "seeds" and row.get("diverged"):
        return f"{value} ({row['diverged']} diverged)"
    if value is None:
        return DASH
    if column.key == "causal":
        return "causal" if value else "not causal"
    if isinstance(value, Value):
        quoted = "citation" in row and column.style != "e"  # with no more digits than were published
        text = _spread(value, "g", "g") if quoted else _WRITE[column.style](value)
        return f"{text} (leak)" if column.key == "position0_loss" and row.get("position0_leak") else text
    return f"{value:{column.style}}"


def _scientific(value: Value) -> str:
    mean, deviation = value
    if not math.isfinite(mean) or mean == 0:
        return f"{mean:g}"
    digits, _, exponent = f"{mean:.2e}".partition("e")
    power = int(exponent)
    if deviation is None:
        return f"{digits}e{power}"
    return f"{digits}e{power} ± {deviation / 10.0**power:.2f}e{power}"


def _spread(value: Value, form: str, deviation_form: str) -> str:
    mean, deviation = value
    return f"{mean:{form}}" if deviation is None else f"{mean:{form}} ± {deviation:{deviation_form}}"


_WRITE = {
    "e": _scientific,
    "f": partial(_spread, form=".3f", deviation_form=".3f"),
    "g": partial(_spread, form=".3g", deviation_form=".1g"),
}


def _section(records: Sequence[Record], task: str) -> str:
    lines = [f"## {TITLES[task]}", "", table(records, task).markdown(), ""]
    settings = [_settings(group.runs[0]) for group in groups(records, task)]
    shared = {
        key: value
        for key, value in settings[0].items()
        if isinstance(value, int | float | str) and all(one.get(key) == value for one in settings)
    }
    if shared:
        lines += ["Ours, all rows: " + ", ".join(f"{key} {_number(value)}" for key, value in shared.items()) + ".", ""]
    return "\n".join(lines)


def _notes() -> list[str]:
    return [
        "## How to read this",
        "",
        "- Source: *ours* was measured here, *published* is quoted, a *reference* follows from the task and is not",
        "  trained. Sizes and data of ours are those stated, not the published ones.",
        f"- *published*: {README}, three seeds (the norm deviation: docs/RESEARCH.md).",
        f"  *published (older)*: {RESEARCH}, one seed.",
        "  Names in “quotes” are the publication's. Its parameters leave out what surrounds the blocks; ours are all.",
        "- ±: sample standard deviation over seeds; published ones as published. A run that diverged has no number and",
        "  is not in the mean: it stands in the column of seeds.",
        "- Full sequence: the model is given whole sequences, as published. Online: each prediction from its prefix",
        "  alone. They differ for a model that is not causal, and online is what can be had in use.",
        "- Causal: whether earlier outputs stay as they are when the last input changes (published rows: by the",
        "  published code). *leak*: below what a causal model can reach at position 0, by more than 3 standard errors.",
        "- Norm deviation is taken after the output norm, as published.",
        "",
    ]
