"""Time several candidates and a baseline in turn, so that a busy machine slows all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Clock = Callable[[Callable[[], None]], float]
"""A function that calls its argument once and returns the seconds it took."""


class Quartiles(NamedTuple):
    """The quartiles of some measurements."""

    lower: float
    median: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quartiles":
        """Return the quartiles of at least one value, by linear interpolation between the sorted values."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __format__(self, form: str) -> str:
        """Return "median [lower, upper]", each number formatted by `form`."""
        return f"{self.median:{form}} [{self.lower:{form}}, {self.upper:{form}}]"


@dataclass(frozen=True)
class Timing:
    """The seconds of every candidate in every round: `seconds[name][round]`."""

    baseline: str
    seconds: Mapping[str, tuple[float, ...]]

    def ratios(self, name: str) -> tuple[float, ...]:
        """Return the seconds of `name` divided by those of the baseline, round by round."""
        return tuple(cost / base for cost, base in zip(self.seconds[name], self.seconds[self.baseline], strict=True))

    def record(self, name: str) -> dict[str, Any]:
        """Return every round of `name` and of the baseline, and the quartiles of their ratio, as plain values."""
        return {
            "baseline": self.baseline,
            "ratio": self.ratio(name)._asdict(),
            "seconds": list(self.seconds[name]),
            "baseline_seconds": list(self.seconds[self.baseline]),
        }

    def median_seconds(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str) -> Quartiles:
        """Return the quartiles of the ratios; slow rounds of a busy machine do not move the median."""
        return Quartiles.of(self.ratios(name))


def compare(
    candidates: Mapping[str, Callable[[], None]],
    baseline: str,
    *,
    rounds: int,
    warmup: int,
    clock: Clock,
    advance: Callable[[], None] = lambda: None,
) -> Timing:
    """Time every candidate once per round, in an order that is reversed in every second round.

    Consecutive calls see the same state of the machine. Reversing removes the advantage of the first place.

    Args:
        candidates: functions to call, by name; all calls of one candidate must do equal work.
        baseline: the candidate to compare the others with.
        rounds: the number of rounds that count.
        warmup: the number of rounds before these.
        clock: times one call.
        advance: called after every call, warm-up included, outside the measured time.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(warmup + rounds):
        for name in reversed(candidates) if index % 2 else candidates:
            elapsed = clock(candidates[name])
            if index >= warmup:
                seconds[name].append(elapsed)
            advance()
    return Timing(baseline, {name: tuple(values) for name, values in seconds.items()})


def process_clock(call: Callable[[], None]) -> float:
    """Measure the CPU time of this process, summed over its threads; other processes do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


def cuda_clock(call: Callable[[], None], before: Callable[[], Any] = lambda: None) -> float:
    """Measure the time of the work that `call` launches on the current CUDA device.

    The measured time starts when the device is idle, or has finished the work of `before`.
    """
    import torch  # imported here, so that `residua cost --help` needs no torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    before()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3
