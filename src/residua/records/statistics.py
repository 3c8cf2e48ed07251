"""Means with Student's 95 % intervals, paired differences, and Holm's correction."""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from residua.errors import extra


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

    def shared(self, error: float) -> "Estimate":
        """Return the estimate where all values share a further standard error, which does not average out.

        The degrees of freedom stay those of the values. That is cautious where the error is better known; more of them
        (Satterthwaite's) would give false findings at small p-values, where a correction for many comparisons looks.
        """
        deviation = self.deviation and math.hypot(self.deviation, math.sqrt(self.count) * error)
        return self._replace(deviation=deviation)

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean (Student's t); None for a single value."""
        if self.deviation is None or self.count < 2:
            return None
        return t95(self.count - 1) * self.deviation / math.sqrt(self.count)

    @property
    def p_value(self) -> float | None:
        """The probability of a mean at least this far from 0 if the true one were 0 (Student's t, two-sided).

        None for a single value, and for equal values, which say nothing about their noise.
        """
        if not self.deviation or self.count < 2 or not math.isfinite(self.mean):
            return None
        with extra("lab"):
            from scipy.special import stdtr

        return 2 * float(stdtr(self.count - 1, -abs(self.mean) * math.sqrt(self.count) / self.deviation))

    @property
    def detectable(self) -> float | None:
        """The size of a true mean whose interval would exclude 0 in about four of five repetitions."""
        half = self.half_width
        return None if half is None else half * (1 + _quantile(0.8, self.count - 1) / t95(self.count - 1))


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Estimate ours minus theirs over the seeds that both have, which leaves out the noise that they share."""
    shared = sorted(ours.keys() & theirs.keys())
    return Estimate.of(ours[seed] - theirs[seed] for seed in shared) if shared else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down method (Scand. J. Statist. 6:65, 1979).

    Rejecting where the result is below a level keeps the probability of any false rejection below that level, whatever
    the tests have in common.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


@lru_cache
def t95(freedom: int) -> float:
    """Return how many standard errors hold 95 % of Student's t with `freedom` >= 1 degrees, to three decimals, as
    tables print it: 12.706, 4.303, 3.182, ...
    """
    return round(_quantile(0.975, freedom), 3)


def _quantile(probability: float, freedom: int) -> float:
    """Return the t below which a value of Student's t lies with this probability."""
    with extra("lab"):
        from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))
