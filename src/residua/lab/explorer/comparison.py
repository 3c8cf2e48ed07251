"""The comparison of several runs on the page: losses, differences to every possible baseline, and settings."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from residua.lab.evaluation.compare import AXES, Comparison, compare
from residua.lab.evaluation.runs import LossPoint, Row
from residua.lab.records.jsonlines import finite

MOST_POINTS = 200
"""The largest number of points in a loss curve; a screen shows no more."""
MOST_DIFFERENCES = 60
"""The largest number of points in a curve of differences; there is a curve for every pair of rows and every axis."""


def comparison_payload(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the comparison of the runs in `folders` as plain values, with each row in turn as the baseline.

    `against[baseline]` has the `unit` of the differences; for every row by name, the differences along each axis as
    lists [position, mean, standard deviation or None, pairs of seeds], zero for the baseline itself; the rows whose
    final difference is more than noise (`clear`); the rows that cannot be compared (`refused`); and `notes`. `colour`
    is the colour number of a row in every picture.

    Raises:
        InputError: a folder is not a run.
    """
    comparison = compare(folders)
    records = {record["name"]: record for record in comparison.to_json()["groups"]}
    names, colours = [row.name for row in comparison.rows], comparison.colours
    return {
        "axes": list(AXES),
        "baseline": comparison.baseline.name if comparison.baseline else names[0],
        "groups": [_row_values(row, records[row.name]) | {"colour": colours[row.name]} for row in comparison.rows],
        "against": {name: _against(comparison.against(name)) for name in names},
        "settings": _settings(comparison.rows),
    }


def _row_values(row: Row, record: dict[str, Any]) -> dict[str, Any]:
    names = ("name", "seeds", "val_loss", "parameters", "tokens", "tokens_per_second", "seconds")
    curves = [
        {
            "run": run.folder.name,
            "seed": run.seed,
            "validation": thinned([_rounded(point) for point in run.validation], MOST_POINTS),
            "training": [_rounded(point) for point in _averaged(run.training, MOST_POINTS)],
        }
        for run in row.runs
    ]
    return {name: record[name] for name in names} | {"runs": curves}


def _against(comparison: Comparison) -> dict[str, Any]:
    differences: dict[str, dict[str, list[Any]]] = {}
    final: dict[str, Any] = {}
    reached = {}
    for row in comparison.rows:
        if row is comparison.baseline:
            points = [point for run in row.runs for point in run.validation]
            curves = {axis: [[at, 0.0, None, 0] for at in sorted({getattr(p, axis) for p in points})] for axis in AXES}
            final[row.name] = [None, 0.0, None, 0]
        else:
            curves = {
                axis: [_rounded([at, *value]) for at, value in comparison.differences(row, axis).items()]
                for axis in AXES
            }
            reached[row.name] = end = comparison.final_difference(row)
            final[row.name] = None if end is None else _rounded([end[0], *end[1]])
        differences[row.name] = {axis: thinned(points, MOST_DIFFERENCES) for axis, points in curves.items()}
    clear = [name for name, difference in reached.items() if difference and difference[1].seen]
    return {
        "differences": differences,
        "final": final,
        "clear": clear,
        "refused": [row.name for row in comparison.rows if comparison.verdict(row).unit is None],
        "unit": comparison.unit,
        "notes": list(comparison.notes),
    }


def _settings(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the settings in which the rows differ, one line each, as text; "–" if a row lacks the setting."""
    runs = [row.runs[0] for row in rows]
    settings = [{**run.settings, "model.connection": run.connection} for run in runs]
    keys = sorted({key for some in settings for key in some})
    differing = [key for key in keys if any(some.get(key, "–") != settings[0].get(key, "–") for some in settings)]
    lines = [[key, *(_setting_text(some, key) for some in settings)] for key in differing]
    return {"rows": lines, "equal": len(keys) - len(differing)}


def _setting_text(settings: Any, key: str) -> str:
    if key not in settings:
        return "–"
    value = settings[key]
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _averaged(points: Sequence[LossPoint], most: int) -> list[LossPoint]:
    """Return at most `most` points, each a mean over neighbours, because the loss of a single batch is noisy."""
    width = -(-len(points) // most) if points else 1
    chunks = (points[start : start + width] for start in range(0, len(points), width))
    return [
        LossPoint(chunk[-1].step, chunk[-1].tokens, chunk[-1].seconds, math.fsum(p.loss for p in chunk) / len(chunk))
        for chunk in chunks
    ]


def thinned(rows: list[Any], most: int) -> list[Any]:
    """Return at most `most` rows, evenly spaced, including the first and the last."""
    if len(rows) <= most:
        return rows
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Return the values for JSON: numbers with seven digits, and None for numbers that are not finite."""
    return [float(f"{value:.7g}") if isinstance(value, float) else value for value in finite(values)]
