"""Means with Student's 95 % intervals, differences with pooled or separate noise, and Holm's correction."""

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
        """Return the estimate over values. Raises ZeroDivisionError if there are none."""
        values = list(values)
        mean = math.fsum(values) / len(values)
        if len(values) == 1:
            return cls(mean, None, 1)
        variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
        return cls(mean, math.sqrt(variance), len(values))

    @classmethod
    def of_known(cls, values: Iterable[float | None]) -> "Estimate | None":
        """Return the estimate over the values that are not None; None if there are no such values."""
        known = [value for value in values if value is not None]
        return cls.of(known) if known else None

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % confidence interval of the mean (Student's t); None for a single value."""
        if self.deviation is None or self.count < 2:
            return None
        return t95(self.count - 1) * self.deviation / math.sqrt(self.count)

    @property
    def seen(self) -> bool:
        """Whether the 95 % confidence interval of the mean excludes 0; False for a single value and for equal ones."""
        half = self.half_width or math.inf  # equal values do not determine their noise
        return abs(self.mean) > half

    @property
    def p_value(self) -> float | None:
        """The p-value of a mean of zero, see `Contrast.p_value`; None for a single value."""
        if self.deviation is None:
            return None
        return Contrast(self.mean, self.deviation / math.sqrt(self.count), self.count - 1, self.count).p_value

    @property
    def detectable(self) -> float | None:
        """The size of a true mean whose interval would exclude 0 in four of five repetitions; None for one value."""
        half, freedom = self.half_width, self.count - 1
        return None if half is None else half * _detectable(freedom) / t95(freedom)


class Contrast(NamedTuple):
    """A difference of means over `count` seeds, its standard error, and the degrees of freedom of that error."""

    mean: float
    error: float
    freedom: float
    count: int  # type: ignore[assignment]  # a tuple has a method of this name

    def shared(self, error: float) -> "Contrast":
        """Return the contrast with an additional standard error that all seeds share, so it does not average out."""
        return self._replace(error=math.hypot(self.error, error))

    @property
    def half_width(self) -> float:
        """Half the width of the 95 % confidence interval (Student's t)."""
        return _quantile(0.975, self.freedom) * self.error

    @property
    def p_value(self) -> float | None:
        """The probability of a mean at least this far from 0 if the true mean were 0 (Student's t, two-sided).

        None if the standard error is 0, because equal values do not determine their noise.
        """
        if not self.error or not math.isfinite(self.mean):
            return None
        with extra("lab"):
            from scipy.special import stdtr

        return 2 * float(stdtr(self.freedom, -abs(self.mean) / self.error))

    @property
    def detectable(self) -> float:
        """The size of a true difference whose interval would exclude 0 in four of five repetitions."""
        return _detectable(self.freedom) * self.error


class Noise(NamedTuple):
    """The standard deviation of a single run, pooled over several schemes, and its degrees of freedom."""

    deviation: float
    freedom: int

    @classmethod
    def of(cls, losses: Sequence[Mapping[int, float]]) -> "Noise | None":
        """Return the noise that remains after the effects of scheme and seed; None for fewer than two schemes or seeds.

        losses: for each scheme, the losses by seed. All schemes have the same seeds.
        """
        with extra("lab"):
            import numpy

        values = numpy.array([[scheme[seed] for seed in sorted(scheme)] for scheme in losses])
        freedom = math.prod(size - 1 for size in values.shape) if values.ndim == 2 else 0
        if freedom < 1:
            return None
        rest = values - values.mean(0) - values.mean(1, keepdims=True) + values.mean()
        return cls(math.sqrt(float((rest**2).sum()) / freedom), freedom)

    def contrast(self, ours: Sequence[float], theirs: Sequence[float]) -> Contrast:
        """Compare the runs of two schemes, all with this noise."""
        error = self.deviation * math.sqrt(1 / len(ours) + 1 / len(theirs))
        return Contrast(_mean(ours) - _mean(theirs), error, self.freedom, min(len(ours), len(theirs)))


def welch(ours: Sequence[float], theirs: Sequence[float]) -> Contrast | None:
    """Compare two schemes, each with its own noise (Welch's t); None for fewer than two runs of either."""
    with extra("lab"):
        from scipy.stats import ttest_ind

    if min(len(ours), len(theirs)) < 2:
        return None
    sides = [Estimate.of(side) for side in (ours, theirs)]
    error = math.hypot(*((side.deviation or 0.0) / math.sqrt(side.count) for side in sides))
    freedom = float(ttest_ind(ours, theirs, equal_var=False).df) if error else 1.0
    return Contrast(sides[0].mean - sides[1].mean, error, freedom, min(len(ours), len(theirs)))


def over_documents(
    ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]], labels: Sequence[int]
) -> Contrast | None:
    """Compare two schemes on a text, with its documents as the sample; None for fewer than two documents.

    ours, theirs: for each run, the sum of the losses in every document; labels: the number of losses in each sum. The
    mean is per label. Its error is that of a ratio of two sums over documents, to first order (Cochran 1977, section
    6.4).
    """
    with extra("lab"):
        import numpy

    count = len(labels)
    if count < 2:
        return None
    differences = numpy.mean(ours, 0) - numpy.mean(theirs, 0)
    mean = float(differences.sum()) / sum(labels)
    rest = differences - mean * numpy.array(labels)
    error = math.sqrt(float(rest @ rest) * count / (count - 1)) / sum(labels)
    return Contrast(mean, error, count - 1, count)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Estimate | None:
    """Estimate ours minus theirs over the common seeds, so that noise that depends only on the seed cancels."""
    shared = sorted(ours.keys() & theirs.keys())
    return Estimate.of(ours[seed] - theirs[seed] for seed in shared) if shared else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values corrected for their number by Holm's step-down method (Scand. J. Statist. 6:65, 1979).

    If every test with a corrected p-value below a level is rejected, the probability of any false rejection is below
    this level, however the tests depend on each other.
    """
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = largest
    return corrected


@lru_cache
def t95(freedom: int) -> float:
    """Return the t such that 95 % of Student's t, with `freedom` >= 1 degrees of freedom, lies within +-t.

    Rounded to three decimals, as in printed tables: 12.706, 4.303, 3.182, ...
    """
    return round(_quantile(0.975, freedom), 3)


def _quantile(probability: float, freedom: float) -> float:
    """Return the t below which a value of Student's t lies with this probability."""
    with extra("lab"):
        from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def detects(seeds: int, schemes: int | None = None) -> float | None:
    """Return the true difference of two schemes whose interval would exclude 0 in four of five studies.

    The unit is the standard deviation of the difference between two runs of two schemes with the same seed.

    seeds: how many each scheme has. schemes: how many share one noise; None if each has its own, which are then taken
    to be equal (Welch's t). None is returned for too few of either.
    """
    # Welch's degrees of freedom depend on the draws. With these the power is 0.80, to 0.02, for 2 to 10 seeds.
    freedom = 1.75 * (seeds - 1) - 0.5 if schemes is None else (schemes - 1) * (seeds - 1)
    return Contrast(0.0, 1 / math.sqrt(seeds), freedom, seeds).detectable if freedom > 0 else None


def _detectable(freedom: float) -> float:
    """Return the true mean, in standard errors, for which t exceeds its 97.5 % quantile with probability 0.8.

    t is then noncentral. The sum of two quantiles of Student's t, which is often used, has less power with few degrees
    of freedom: 0.73 with one, 0.77 with two.
    """
    with extra("lab"):
        from scipy.special import nctdtrinc

    return float(nctdtrinc(freedom, 0.2, _quantile(0.975, freedom)))
