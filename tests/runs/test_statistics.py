import math
import statistics

import pytest

from residua.runs.statistics import Estimate, paired, t95

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_quantiles_are_the_printed_ones(freedom, value):
    assert t95(freedom) == value


def test_an_estimate_is_mean_sample_deviation_and_interval():
    values = [1.0, 2.5, 4.0, 7.0]
    found = Estimate.of(iter(values))
    assert found == pytest.approx((statistics.mean(values), statistics.stdev(values), 4))
    assert found.half_width == pytest.approx(3.182 * statistics.stdev(values) / 2)


def test_one_value_has_no_deviation_and_no_interval():
    found = Estimate.of([3.0])
    assert found == (3.0, None, 1)
    assert found.half_width is None
    assert Estimate(1.0, 0.5, 0).half_width is None


def test_pairs_share_their_seeds():
    ours, theirs = {0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.5, 7: 100.0}
    assert paired(ours, theirs) == (0.5, 0.0, 2)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_what_is_not_finite_stays_so():
    assert math.isnan(Estimate.of([1.0, math.nan]).mean)
