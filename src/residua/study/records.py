"""What the records of a study must hold: a report refuses the rest, as anybody may have written them."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from residua.checks import fits, words
from residua.errors import InputError
from residua.runs.sweep import Record
from residua.study.plan import Kind


def checked_runs(rows: Sequence[Record], where: str) -> Sequence[Record]:
    """The records of runs. Raises InputError for one that lacks something, and for two of one seed and settings."""
    known: dict[str, str] = {}
    losses: dict[str, float | None] = {}
    for row in rows:
        place = f"{where}: the run {str(row.get('key'))[:80]!r}"
        for name in ("key", "rung", "scheme", "connection"):
            _expect(fits(row.get(name), str), place, name, "text", row.get(name))
        _expect(row.get("kind") in get_args(Kind), place, "kind", words(Kind), row.get("kind"))
        _expect(fits(row.get("seed"), int), place, "seed", "a whole number", row.get("seed"))
        _expect(fits(row.get("steps"), int) and row["steps"] >= 1, place, "steps", "at least 1", row.get("steps"))
        _expect(isinstance(row.get("point"), Mapping), place, "point", "a mapping", row.get("point"))
        _expect(
            "val_loss" in row and _loss(row["val_loss"]), place, "val_loss", "a number or null", row.get("val_loss")
        )
        curve = row.get("curve") or []
        good = isinstance(curve, list) and all(_is_point(point) for point in curve)
        _expect(good, place, "curve", "pairs of a step and a loss", curve)
        facts = row.get("facts") or {}
        _expect(isinstance(facts, Mapping), place, "facts", "a mapping", facts)
        for name, kind in (("commit", str), ("device", str), ("parameters", int), ("data", dict)):
            _expect(
                facts.get(name) is None or fits(facts[name], kind), place, f"facts.{name}", words(kind), facts.get(name)
            )
        told = losses.setdefault(row["key"], row["val_loss"])
        _expect(told == row["val_loss"], place, "val_loss", f"{told}, as an earlier record of it has", row["val_loss"])
        same = json.dumps([row[name] for name in ("rung", "scheme", "connection", "kind", "seed", "steps", "point")])
        if known.setdefault(same, row["key"]) != row["key"]:
            raise InputError(f"{place}: expected one run of its seed and settings, found another, {known[same][:80]!r}")
    return rows


def checked_costs(rows: Sequence[Record], where: str) -> Sequence[Record]:
    """The records of costs. Raises InputError for one that lacks something."""
    for row in rows:
        place = f"{where}: the cost of {str(row.get('scheme'))[:80]!r}"
        for name in ("rung", "scheme", "connection", "device"):
            _expect(fits(row.get(name), str), place, name, "text", row.get(name))
        ratio, flops = row.get("time_ratio"), row.get("flops_per_token")
        good = isinstance(ratio, Mapping) and all(_positive(ratio.get(name)) for name in ("lower", "median", "upper"))
        _expect(good, place, "time_ratio", "positive lower, median and upper", ratio)
        good = isinstance(flops, Mapping) and len(flops) > 0 and all(_positive(value) for value in flops.values())
        _expect(good, place, "flops_per_token", "positive numbers", flops)
        compiled = row.get("compiled", False)
        _expect(fits(compiled, bool), place, "compiled", "true or false", compiled)
        peak = row.get("peak_bytes")
        _expect(peak is None or _positive(peak), place, "peak_bytes", "a positive number or null", peak)
    return rows


def checked_audits(rows: Sequence[Record], where: str) -> Sequence[Record]:
    """The records of audits. Raises InputError for one that lacks something."""
    for row in rows:
        place = f"{where}: the audit of {str(row.get('key'))[:80]!r}"
        for name in ("key", "rung", "scheme"):
            _expect(fits(row.get(name), str), place, name, "text", row.get(name))
        _expect(fits(row.get("equal"), bool), place, "equal", "true or false", row.get("equal"))
        points = row.get("points")
        good = isinstance(points, list) and len(points) > 0 and all(_is_audited(point) for point in points)
        _expect(good, place, "points", "a step and the numbers of every sublayer, each", points)
        depths = {len(point["sublayers"]) for point in points}
        _expect(len(depths) == 1, place, "points", "the same sublayers at every step", sorted(depths))
    return rows


def _expect(condition: bool, place: str, name: str, expected: str, value: Any) -> None:
    if not condition:
        raise InputError(f"{place}: {name}: expected {expected}, got {str(value)[:80]!r}")


def _loss(value: Any) -> bool:
    return value is None or (fits(value, float) and math.isfinite(value))


def _positive(value: Any) -> bool:
    return fits(value, float) and 0 < value < math.inf


def _is_point(point: Any) -> bool:
    return isinstance(point, list) and len(point) == 2 and fits(point[0], int) and _loss(point[1])


def _is_audited(point: Any) -> bool:
    if not (isinstance(point, Mapping) and fits(point.get("step"), int)):
        return False
    rows = point.get("sublayers")
    return isinstance(rows, list) and len(rows) > 0 and all(isinstance(row, Mapping) and _is_row(row) for row in rows)


def _is_row(row: Mapping[str, Any]) -> bool:
    numbers = (value for name, value in row.items() if name != "sublayer" and not isinstance(value, list))
    return fits(row.get("sublayer"), str) and all(map(_loss, numbers))
