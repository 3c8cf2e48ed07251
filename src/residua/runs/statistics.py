"""Mean, sample deviation, Student's 95 % interval, and paired differences."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple


class Estimate(NamedTuple):
    """The mean of `count` values, and their sample standard deviation (None for a single value)."""

    mean: float
    deviation: float | None
    count: int  # type: ignore[assignment]  # a tuple has a method of this name

    @classmethod
    def of(cls, values: Iterable[float]) -> "Estimate":
        """Raises ZeroDivisionError for no values."""
        values = list(values)
        mean = math.fsum(values) / len(values)
        if len(values) == 1:
            return cls(mean, None, 1)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance), len(values))

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean (Student's t); None for a single value."""
        if self.deviation is None or self.count < 2:
            return None
        return t95(self.count - 1) * self.deviation / math.sqrt(self.count)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """The estimate of ours minus theirs over the seeds that both have, which leaves out the noise that they share."""
    shared = sorted(ours.keys() & theirs.keys())
    return Estimate.of(ours[seed] - theirs[seed] for seed in shared) if shared else None


@lru_cache
def t95(freedom: int) -> float:
    """The number of standard errors within which Student's t with `freedom` >= 1 degrees lies with 95 %, to three
    decimals, as tables print it: 12.706, 4.303, 3.182, ...
    """
    low, high = 1.0, 16.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return round(low, 3)


def _within(t: float, freedom: int) -> float:
    """The probability that Student's t lies between -t and t (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = total = cosine if odd else 1.0
    for n in range(3 if odd else 2, freedom, 2):
        term *= (n - 1) / n * cosine**2
        total += term
    if odd:
        return 2 / math.pi * (angle + (sine * total if freedom > 1 else 0.0))
    return sine * total
