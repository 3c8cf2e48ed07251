"""The types of a study's records, whose fields are checked when a file is read, and the cost of a step."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple, TypedDict

from residua.errors import InputError, Range, fits, refusal, require, shown, types_of
from residua.lab.cost.timing import Quartiles
from residua.lab.records import jsonlines


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(fits(number, float) for number in value)


def _are_points(length: int) -> Callable[[Any], bool]:
    def hold(points: list[Any]) -> bool:
        return all(
            isinstance(point, list)
            and len(point) == length
            and fits(point[0], int)
            and all(fits(number, float | None) for number in point[1:])
            for point in points
        )

    return hold


def _are_facts(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.get("data") or {}, dict)
        and fits(value.get("parameters"), int | None)
        and all(fits(value.get(name), str | None) for name in ("device", "cpu", "commit", "torch", "date"))
    )


def _are_documents(value: dict[str, Any]) -> bool:
    nats, labels = value.get("nats"), value.get("labels")
    return (
        _are_numbers(nats) and _are_numbers(labels) and sum(labels or ()) > 0 and len(nats or ()) == len(labels or ())
    )


def _are_quartiles(value: dict[str, Any]) -> bool:
    return all(fits(value.get(name), float) and value[name] > 0 for name in Quartiles._fields)


def _are_settings(value: dict[str, Any]) -> bool:
    return not any(isinstance(setting, dict | list) for setting in value.values())


_Curve = Annotated[list[Any], Range("a list of [step, number or null]", _are_points(2))]
_Split = Annotated[list[Any], Range("a list of [step, number or null, number or null]", _are_points(3))]
_Documents = Annotated[dict[str, Any] | None, Range("nats and labels of each document", _are_documents)]


class _Named(TypedDict):
    size: str
    scheme: str
    connection: str


class _RunFields(_Named):
    key: str
    kind: str
    point: Annotated[dict[str, Any], Range("settings by key", _are_settings)]
    seed: int
    steps: Annotated[int, Range("a whole number from 1 to 2^53", lambda steps: 0 < steps <= 2**53)]
    val_loss: float | None


class RunRecord(_RunFields, total=False):
    """The fields of the record of a run."""

    facts: Annotated[dict[str, Any] | None, Range("an object with an object data, or null", _are_facts)]
    tokens: int | None
    seconds: float | None
    bits_per_byte: float | None
    diverged: str
    curve: _Curve
    further_curve: _Curve
    split: _Split
    further_split: _Split
    transition: float | None
    further_transition: float | None
    documents: _Documents
    further_documents: _Documents


class _CostFields(_Named):
    baseline: str
    date: str
    device: str
    time_ratio: Annotated[dict[str, Any], Range("the positive numbers lower, median and upper", _are_quartiles)]
    seconds: Annotated[list[Any], Range("a list of numbers", _are_numbers)]
    flops_per_token: Annotated[dict[str, Any], Range("numbers by name", lambda value: _are_numbers([*value.values()]))]


class CostRecord(_CostFields, total=False):
    """The fields of the record of a cost."""

    cpu: str | None
    compiled: bool
    kept_bytes: float | None
    peak_bytes: float | None


class Cost(NamedTuple):
    """The cost of one scheme's step at one size.

    ratio             quartiles of the step's time divided by that of the baseline's step in the same round
    rounds            the number of these rounds
    session           date, device, processor, baseline and rounds, which are the same for all schemes measured together
    flops_per_token   the FLOPs per token of a training step
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
            Quartiles(*(record["time_ratio"][name] for name in Quartiles._fields)),
            rounds,
            (record["date"], record["device"], record.get("cpu"), record["baseline"], rounds),
            record["device"],
            record.get("compiled", False),
            sum(record["flops_per_token"].values()),
            record.get("peak_bytes"),
        )

    @property
    def error(self) -> float:
        """The standard error of the log of the median ratio, from the quartiles, under the assumption of normality."""
        deviation = (self.ratio.upper - self.ratio.lower) / (2 * NormalDist().inv_cdf(0.75))
        return math.sqrt(math.pi / 2 / self.rounds) * deviation / self.ratio.median


def read_records(path: Path, kind: type[RunRecord] | type[CostRecord], title: str) -> list[dict[str, Any]]:
    """Read records of one kind. Raises InputError if a field is missing or wrong. title: the kind in words."""
    rows = jsonlines.read(path)
    check_records(rows, path, kind, kind.__required_keys__, title)
    return rows


def check_records(
    rows: Iterable[dict[str, Any]],
    path: Path,
    kind: type[RunRecord] | type[CostRecord],
    needed: Collection[str],
    title: str,
) -> None:
    """Raise InputError if a record lacks a needed field, or if a field of `kind` has a wrong value."""
    for row in rows:
        require(row.keys() >= {*needed}, str(path), f"{title}, each with {', '.join(sorted(needed))}", row)
        for name in types_of(kind):
            if name in row and (wrong := refusal(kind, name, row[name])):
                raise InputError(f"{path}: {name} of {shown(row.get('key', row.get('scheme')))} {wrong}")
