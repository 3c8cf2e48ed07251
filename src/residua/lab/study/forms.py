"""The types of a study's records, whose fields are checked when a file is read, and the cost of a step."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from residua.errors import Natural, Range, fits, require, shown
from residua.lab.cost.timing import Quartiles
from residua.lab.records import jsonlines

RunKind = Literal["tune", "final", "report", "longer"]
CLOSE = 1e-3
"""How far two measurements of one loss may be apart, in nats per token and as a share, because of rounding."""


def _is_measured(value: Any) -> bool:
    return jsonlines.is_number(value) and value >= 0


def _are_measured(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_measured, value))


def _are_points(length: int) -> Callable[[Any], bool]:
    def hold(points: list[Any]) -> bool:
        whole = all(
            isinstance(point, list)
            and len(point) == length
            and fits(point[0], int)
            and all(loss is None or _is_measured(loss) for loss in point[1:])
            for point in points
        )
        steps = [point[0] for point in points] if whole else []
        return whole and steps == sorted({*steps}) and min(steps, default=0) >= 0

    return hold


def _are_facts(value: dict[str, Any]) -> bool:
    return (
        isinstance(value.get("data") or {}, dict)
        and fits(value.get("parameters"), int | None)
        and (value.get("parameters") or 0) >= 0
        and all(fits(value.get(name), str | None) for name in ("device", "cpu", "commit", "torch", "date", "residua"))
    )


def _are_documents(value: dict[str, Any]) -> bool:
    nats, labels = value.get("nats"), value.get("labels")
    if not _are_measured(nats) or not _are_measured(labels):
        return False
    return len(nats) == len(labels) and sum(labels) > 0 and all(fits(count, int) for count in labels)


def _are_quartiles(value: dict[str, Any]) -> bool:
    quartiles = [value.get(name) for name in Quartiles._fields]
    return (
        all(map(_is_measured, quartiles)) and quartiles[0] > 1 / jsonlines.OVERFLOWS and quartiles == sorted(quartiles)
    )


def _are_flops(value: dict[str, Any]) -> bool:
    return _are_measured([*value.values()]) and sum(value.values()) >= 1


def _are_settings(value: dict[str, Any]) -> bool:
    return all(map(jsonlines.is_plain, value.values()))


_Measured = Annotated[float, Range("a number from 0, below 2^128", _is_measured)]
_Curve = Annotated[list[Any], Range("a list of [step, loss or null], by step", _are_points(2))]
_Split = Annotated[list[Any], Range("a list of [step, loss or null, loss or null], by step", _are_points(3))]
_Documents = Annotated[dict[str, Any] | None, Range("nats and labels of each document", _are_documents)]


class _Named(TypedDict):
    size: str
    scheme: str
    connection: str


class _RunFields(_Named):
    key: str
    kind: RunKind
    point: Annotated[dict[str, Any], Range("settings by key", _are_settings)]
    seed: Natural
    steps: Annotated[int, Range("a whole number from 1 to 2^53", lambda steps: 0 < steps <= 2**53)]
    val_loss: _Measured | None


class RunRecord(_RunFields, total=False):
    """The fields of the record of a run."""

    facts: Annotated[dict[str, Any] | None, Range("an object with an object data, or null", _are_facts)]
    tokens: Natural | None
    seconds: _Measured | None
    bits_per_byte: _Measured | None
    diverged: str
    curve: _Curve
    further_curve: _Curve
    split: _Split
    further_split: _Split
    transition: _Measured | None
    further_transition: _Measured | None
    documents: _Documents
    further_documents: _Documents


class _CostFields(_Named):
    baseline: str
    date: str
    device: str
    time_ratio: Annotated[
        dict[str, Any], Range("the positive numbers lower, median and upper, in this order", _are_quartiles)
    ]
    seconds: Annotated[list[Any], Range("a list of numbers of 0 or more", _are_measured)]
    flops_per_token: Annotated[dict[str, Any], Range("numbers of 0 or more by name, at least 1 in total", _are_flops)]


class CostRecord(_CostFields, total=False):
    """The fields of the record of a cost."""

    cpu: str | None
    compiled: bool
    parameters: Natural | None
    kept_bytes: _Measured | None
    peak_bytes: _Measured | None


class Cost(NamedTuple):
    """The cost of one scheme's step at one size.

    ratio             quartiles of the step's time divided by that of the baseline's step in the same round
    rounds            the number of these rounds
    session           date, device, processor, baseline and rounds, which are the same for all schemes measured together
    flops_per_token   the FLOPs per token of a training step
    parameters        the parameters of the measured model; None if the record does not say
    """

    ratio: Quartiles
    rounds: int
    session: tuple[Any, ...]
    device: str
    compiled: bool
    flops_per_token: float
    peak_bytes: float | None
    parameters: int | None

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
            record.get("parameters"),
        )

    @property
    def error(self) -> float:
        """The standard error of the log of the median ratio, from the quartiles, under the assumption of normality."""
        deviation = (self.ratio.upper - self.ratio.lower) / (2 * NormalDist().inv_cdf(0.75))
        return math.sqrt(math.pi / 2 / self.rounds) * deviation / self.ratio.median


def read_cost_records(path: Path) -> list[dict[str, Any]]:
    """Read the records of a study's costs. Raises InputError if a field is missing or wrong."""
    rows = jsonlines.read(path)
    check_records(rows, path, CostRecord, CostRecord.__required_keys__, "costs of a study's schemes")
    return rows


def check_records(
    rows: Iterable[dict[str, Any]],
    path: Path,
    kind: type[RunRecord] | type[CostRecord],
    needed: Collection[str],
    title: str,
) -> None:
    """Raise InputError if a record lacks a needed field, or if a field of `kind` is wrong or contradicts another."""
    for row in rows:
        require(row.keys() >= {*needed}, str(path), f"{title}, each with {', '.join(sorted(needed))}", row)
        jsonlines.expect_fields(row, path, kind, row.get("key", row.get("scheme")))
        if kind is RunRecord:
            _expect_consistent(row, path)


def _expect_consistent(row: Mapping[str, Any], path: Path) -> None:
    """Raise InputError if the curves, or the losses by document, of a run's record contradict its steps or its loss."""

    def expect(holds: bool, name: str, expected: str, got: Any) -> None:
        require(holds, f"{path}: {name} of {shown(row.get('key'))}", expected, got)

    steps = row.get("steps", math.inf)
    for prefix in ("", "further_"):
        curve, split, documents, transition = (
            row.get(prefix + name) for name in ("curve", "split", "documents", "transition")
        )
        loss = dict(curve or ()).get(steps) if prefix else row["val_loss"]
        if curve:
            ends = curve[-1][0] < steps or curve[-1] == [steps, loss]
            expect(ends, f"{prefix}curve", f"at most {steps} steps long, and end with its val_loss, {loss}", curve[-1])
        if split:
            end, *parts = split[-1]
            known = end == steps and None not in (loss, *parts)
            between = not known or min(parts) - CLOSE * (1 + loss) <= loss <= max(parts) + CLOSE * (1 + loss)
            name = f"{prefix}split"
            expect(end <= steps and between, name, f"at most {steps} steps long, around its loss, {loss}", split[-1])
        if documents and loss is not None:
            mean = sum(documents["nats"]) / sum(documents["labels"])
            same = math.isclose(mean, loss, rel_tol=CLOSE, abs_tol=CLOSE)
            expect(same, f"the mean of {prefix}documents", f"its loss, {loss}", mean)
        expect((transition or 0) <= steps, f"{prefix}transition", f"a step, {steps} at most", transition)
