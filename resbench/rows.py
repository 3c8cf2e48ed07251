"""Rows of ResBench and what they differ by, for the sentences of claims.md."""

from functools import cache
from typing import Any

from tables import SPLIT, answers, records, study

from residua.lab.records.statistics import Contrast, Estimate, welch
from residua.lab.study.results import Difference, SchemeRow

SHAPES = "0.1M", "0.1M-wide", "0.1M-deep"
"""Of four layers, two and eight."""
SIZES = (*SHAPES, "0.3M")
BASELINES = "residual", "lambdas"
MEASURES = "tokens", "FLOPs", "seconds"
WRITING = "ddl-tc-write-only"
NUMBERS = "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"


def row(size: str, scheme: str) -> SchemeRow:
    return study(SPLIT[size] if size in ("1M", "10M") else "main").row(size, scheme)


def apart(size: str, scheme: str, to: str) -> Contrast:
    """The loss of a scheme minus that of another over the reported seeds, with the noise that the study gives it."""
    sides = row(size, scheme), row(size, to)
    losses = [list(side.losses.values()) for side in sides]
    noises = {side.noise for side in sides}
    return welch(*losses) if None in noises else noises.pop().contrast(*losses)


def gain(size: str, scheme: str, to: str = "residual") -> float:
    """Nats per token by which the mean loss of a scheme is below another's."""
    return -apart(size, scheme, to).mean


def side(estimate: Contrast | Estimate) -> str:
    """Where the interval of a difference is."""
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    return "ahead" if high < 0 else "behind" if low > 0 else "level"


def step_time(size: str, scheme: str, *, compiled: bool = False) -> float:
    """The step's time beside the plain residual's, eager or compiled."""
    timed = row(size, scheme)
    return (timed.compiled if compiled else timed.cost).ratio.median


@cache
def split_runs() -> tuple[dict[str, Any], ...]:
    """The runs at 0.3 million parameters that were trained again with the loss split in two."""
    return tuple(run for run in records("headline.jsonl") if run["size"] == "0.3M")


def erasing() -> list[Difference]:
    """The comparisons of forms with and without erasing at equal tokens, up to 0.3 million parameters."""
    answers = [each for each in study("main").answers if each.question.name.startswith("erasing")]
    found = [each.difference for each in answers if each.difference]
    assert "ahead" not in {side(each.estimate) for each in found}
    assert [(each.size, each.scheme) for each in found if each.clear] == [("0.1M-wide", "ddl")]
    return found


def erasing_at_equal_settings() -> Contrast:
    """At 0.3M, ddl-tc at the settings of its form that does not erase, minus that form."""
    theirs = row("0.3M", WRITING)
    runs = [run for run in split_runs() if run["scheme"] == "ddl-tc" and run["point"] == theirs.point]
    ours = {run["seed"]: run["val_loss"] for run in runs}
    assert ours.keys() == theirs.losses.keys()
    contrast = welch(list(ours.values()), list(theirs.losses.values()))
    assert side(contrast) == "level"
    return contrast


def compared(size: str, scheme: str, to: str) -> Contrast:
    """The answer to a question at equal tokens, or `apart`."""
    answer = answers().get((size, scheme, to))
    return answer.estimate if answer else apart(size, scheme, to)
