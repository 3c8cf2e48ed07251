"""The records of a study: the form of each field, checked once, when the file is read, and costs as objects."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from residua.errors import fits, require, shown, words
from residua.lab.cost.timing import Quartiles
from residua.lab.records import jsonlines


class Form(NamedTuple):
    """The values that a field may hold: in words, and as a test. absent: whether the field may be left out."""

    words: str
    holds: Callable[[Any], bool]
    absent: bool = False


def of(kind: Any, *, absent: bool = False) -> Form:
    """Return the form of a value of one type. absent: the field may be left out."""
    return Form(words(kind), lambda value: fits(value, kind), absent)


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(fits(number, float) for number in value)


def _points(value: Any, length: int) -> bool:
    return isinstance(value, list) and all(
        isinstance(point, list)
        and len(point) >= length
        and fits(point[0], int)
        and all(fits(number, float | None) for number in point[1:])
        for point in value
    )


def _facts(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and isinstance(value.get("data") or {}, dict)
        and fits(value.get("parameters"), int | None)
        and all(fits(value.get(name), str | None) for name in ("device", "cpu", "commit", "torch", "date"))
    )


def _documents(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict)
        and _numbers(value.get("nats"))
        and _numbers(value.get("labels"))
        and sum(value["labels"]) > 0
        and len(value["nats"]) == len(value["labels"])
    )


def _quartiles(value: Any) -> bool:
    return isinstance(value, dict) and all(
        fits(value.get(name), float) and value[name] > 0 for name in ("lower", "median", "upper")
    )


CURVE = Form(
    "a list of [step, number or null]",
    lambda value: _points(value, 2) and all(len(point) == 2 for point in value),
    absent=True,
)
SPLIT = Form("a list of [step, number or null, number or null]", lambda value: _points(value, 3), absent=True)
TRANSITION = of(float | None, absent=True)
DOCUMENTS = Form("nats and labels of each document", _documents, absent=True)
PLACE = {name: of(str) for name in ("size", "scheme", "connection")}
RUN: Mapping[str, Form] = {
    **{name: of(str) for name in ("key", "kind")},
    **PLACE,
    "point": Form("settings by key", lambda value: isinstance(value, dict) and not any(map(_nested, value.values()))),
    "seed": of(int),
    "steps": Form("a whole number from 1 to 2^53", lambda value: fits(value, int) and 0 < value <= 2**53),
    "val_loss": of(float | None),
    "facts": Form("an object with an object data, or null", _facts, absent=True),
    "tokens": of(int | None, absent=True),
    "seconds": of(float | None, absent=True),
    **dict.fromkeys(("curve", "further_curve"), CURVE),
    **dict.fromkeys(("split", "further_split"), SPLIT),
    **dict.fromkeys(("transition", "further_transition"), TRANSITION),
    **dict.fromkeys(("documents", "further_documents"), DOCUMENTS),
}
"""The forms of the record of a run."""
COST: Mapping[str, Form] = {
    **PLACE,
    **{name: of(str) for name in ("baseline", "date", "device")},
    "cpu": of(str | None, absent=True),
    "compiled": of(bool, absent=True),
    "time_ratio": Form("the positive numbers lower, median and upper", _quartiles),
    "seconds": Form("a list of numbers", _numbers),
    "flops_per_token": Form("numbers by name", lambda value: isinstance(value, dict) and _numbers([*value.values()])),
    **dict.fromkeys(("kept_bytes", "peak_bytes"), of(float | None, absent=True)),
}
"""The forms of the record of a cost."""


class Cost(NamedTuple):
    """The cost of one scheme's step at one size.

    ratio             quartiles of its time over the baseline's in the same rounds
    rounds            the number of these rounds
    session           date, device, processor, baseline and rounds, which all schemes measured in turns have in common
    flops_per_token   in a training step
    """

    ratio: Quartiles
    rounds: int
    session: tuple[Any, ...]
    device: str
    compiled: bool
    flops_per_token: float
    peak_bytes: float | None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Cost":
        """Return the cost in a record."""
        rounds = len(record["seconds"])
        return cls(
            Quartiles(**record["time_ratio"]),
            rounds,
            (record["date"], record["device"], record.get("cpu"), record["baseline"], rounds),
            record["device"],
            record.get("compiled", False),
            sum(record["flops_per_token"].values()),
            record.get("peak_bytes"),
        )

    @property
    def error(self) -> float:
        """The standard error of the logarithm of the median ratio, by its quartiles, as if rounds were normal."""
        deviation = (self.ratio.upper - self.ratio.lower) / (2 * NormalDist().inv_cdf(0.75))
        return math.sqrt(math.pi / 2 / self.rounds) * deviation / self.ratio.median


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)


def read(path: Path, forms: Mapping[str, Form], title: str) -> list[dict[str, Any]]:
    """Read records of these forms. Raises InputError if one differs. title: the records in words."""
    rows = jsonlines.read(path)
    needed = {name for name, form in forms.items() if not form.absent}
    for row in rows:
        require(row.keys() >= needed, str(path), f"{title}, each with {', '.join(sorted(needed))}", row)
        for name, form in forms.items():
            if name in row:
                place = f"{path}: {name} of {shown(row.get('key', row['scheme']))}"
                require(form.holds(row[name]), place, form.words, row[name])
    return rows
