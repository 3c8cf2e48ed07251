"""The types of the record of a geometry run, whose fields are checked when a folder is resumed."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from residua.errors import Natural, Range, require
from residua.lab.geometry.tasks import TASKS
from residua.lab.records.jsonlines import expect_fields, is_number, is_plain


def _are_points(points: list[Any]) -> bool:
    return _rise(points, 2) and all(value is None or is_number(value) for _, value in points)


def _are_errors(points: list[Any]) -> bool:
    return _rise(points, 2, 3) and all(all(map(is_number, point)) for point in points)


def _rise(points: list[Any], *lengths: int) -> bool:
    """Return whether points are lists of one of these lengths, and the first numbers in them rise."""
    whole = all(isinstance(point, list) and len(point) in lengths and is_number(point[0]) for point in points)
    return whole and all(one[0] < two[0] for one, two in pairwise(points))


def _are_settings(settings: dict[str, Any]) -> bool:
    return all(map(is_plain, settings.values()))


def _are_curves(curves: dict[str, Any]) -> bool:
    return all(isinstance(points, list) and _are_points(points) for points in curves.values())


_Number = Annotated[float | None, Range("a number below 2^128", is_number)]
_Numbers = Annotated[list[Any] | None, Range("a list of numbers", lambda values: all(map(is_number, values)))]
_Curve = Annotated[list[Any] | None, Range("a list of [step, number or null], by step", _are_points)]


class _RunFields(TypedDict):
    key: str
    kind: Literal["run"]
    task: Annotated[str, Range(f"one of {', '.join(TASKS)}", TASKS.__contains__)]
    model: str
    label: str
    seed: Natural
    parameters: Natural
    settings: Annotated[dict[str, Any], Range("settings by key", _are_settings)]


class RunRecord(_RunFields, total=False):
    """The fields of a record that tables and pictures read."""

    loss: _Number
    best_loss: _Number
    online_loss: _Number
    position0_loss: _Number
    position0_leak: bool | None
    norm_deviation: _Number
    stream_norms: _Numbers
    by_position: _Numbers
    online_by_position: Annotated[
        list[Any] | None,
        Range("a list of [position, number, number], by position, or without the last in early records", _are_errors),
    ]
    causal: bool | None
    diverged: bool
    curve: _Curve
    gates: Annotated[dict[str, Any], Range("lists of [step, number or null] by gate", _are_curves)]
    cosine: _Number
    cosines: _Curve
    beta: _Number
    gamma: _Number


def expect_runs(records: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Raise InputError if a record in the file `path` lacks a field that all have, or has a wrong one."""
    needed = RunRecord.__required_keys__
    for record in records:
        require(record.keys() >= needed, str(path), f"records of runs, each with {', '.join(sorted(needed))}", record)
        expect_fields(record, path, RunRecord, record["key"])
        inside = range(len(record.get("by_position") or ()))
        measured = all(position in inside for position, *_ in record.get("online_by_position") or ())
        name = f"{path}: online_by_position of {record['key']}"
        require(measured, name, f"positions in by_position, which has {len(inside)}", record.get("online_by_position"))
