"""What the records of a study must hold: a report refuses the rest, as anybody may have written them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from residua.errors import InputError, fits, words
from residua.lab.study.plan import Kind
from residua.records.jobs import Record

LOSS = "a number that is not negative, or null"


def checked_runs(rows: Sequence[Record], where: str, data: str | None = None) -> Sequence[Record]:
    """The records of runs, all of them on the data with a fingerprint if it is given.

    Raises InputError for one that lacks something.
    """
    for row in rows:
        place = f"{where}: the run {str(row.get('key'))[:80]!r}"
        for name in ("key", "rung", "scheme", "connection"):
            _expect(fits(row.get(name), str), place, name, "text", row.get(name))
        _expect(row.get("kind") in get_args(Kind), place, "kind", words(Kind), row.get("kind"))
        _expect(fits(row.get("seed"), int), place, "seed", "a whole number", row.get("seed"))
        _expect(fits(row.get("steps"), int) and row["steps"] >= 1, place, "steps", "at least 1", row.get("steps"))
        _expect(isinstance(row.get("point"), Mapping), place, "point", "a mapping", row.get("point"))
        _expect("val_loss" in row and _loss(row["val_loss"]), place, "val_loss", LOSS, row.get("val_loss"))
        _expect_whole(row, place)
        other = (row.get("facts") or {}).get("data") or {}
        good = data is None or other.get("fingerprint", data) == data
        _expect(good, place, "facts.data", f"the data {data}", other.get("fingerprint"))
    return rows


def _expect_whole(row: Record, place: str) -> None:
    """Check what a record says beside its loss."""
    curve = row.get("curve", [])
    good = isinstance(curve, list) and all(_is_point(point) for point in curve)
    _expect(good, place, "curve", "pairs of a step and a loss", curve)
    for name, kind in (("tokens", int), ("seconds", float), ("diverged", str)):
        _expect(row.get(name) is None or fits(row[name], kind), place, name, words(kind), row.get(name))
    facts = row.get("facts") or {}
    _expect(isinstance(facts, Mapping), place, "facts", "a mapping", facts)
    kinds = {"commit": str, "device": str, "torch": str, "date": str, "parameters": int, "data": dict}
    for name, kind in kinds.items():
        good = facts.get(name) is None or fits(facts[name], kind)
        _expect(good, place, f"facts.{name}", words(kind), facts.get(name))


def checked_costs(rows: Sequence[Record], where: str) -> Sequence[Record]:
    """The records of costs. Raises InputError for one that lacks something."""
    for row in rows:
        place = f"{where}: the cost of {str(row.get('scheme'))[:80]!r}"
        for name in ("rung", "scheme", "connection", "baseline", "device", "date"):
            _expect(fits(row.get(name), str), place, name, "text", row.get(name))
        ratio, flops = row.get("time_ratio"), row.get("flops_per_token")
        quartiles = [ratio.get(name) for name in ("lower", "median", "upper")] if isinstance(ratio, Mapping) else [None]
        good = all(map(_positive, quartiles)) and quartiles == sorted(quartiles)
        _expect(good, place, "time_ratio", "positive lower, median and upper, in this order", ratio)
        good = isinstance(flops, Mapping) and all(map(_positive, flops.values())) and _positive(sum(flops.values()))
        _expect(good, place, "flops_per_token", "positive numbers", flops)
        rounds = row.get("seconds")
        good = isinstance(rounds, list) and len(rounds) > 0 and all(map(_positive, rounds))
        _expect(good, place, "seconds", "positive numbers, one of each round", rounds)
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
        raise InputError(f"{place}: {name} must be {expected}, got {str(value)[:80]!r}")


def _number(value: Any) -> bool:
    return value is None or (fits(value, float) and math.isfinite(value))


def _loss(value: Any) -> bool:
    return _number(value) and (value is None or value >= 0)


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
    return fits(row.get("sublayer"), str) and all(map(_number, numbers))
