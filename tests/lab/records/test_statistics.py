import math
import statistics

import numpy
import pytest
from scipy.stats import nct, t, ttest_1samp, ttest_ind, ttest_rel

from residua.lab.records.statistics import (
    Contrast,
    Estimate,
    Noise,
    detects,
    holm,
    over_documents,
    paired,
    t95,
    welch,
)

TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 30: 2.042, 120: 1.980}


@pytest.mark.parametrize(("freedom", "value"), TABLE.items())
def test_quantiles_are_those_of_printed_tables(freedom, value):
    assert t95(freedom) == value


def test_an_estimate_has_a_mean_a_sample_deviation_and_an_interval():
    values = [1.0, 2.5, 4.0, 7.0]
    found = Estimate.of(iter(values))
    assert found == pytest.approx((statistics.mean(values), statistics.stdev(values), 4))
    assert found.half_width == pytest.approx(3.182 * statistics.stdev(values) / 2)


def test_an_estimate_ignores_unknown_values():
    assert Estimate.of_known([1.0, None, 3.0]) == (pytest.approx(2.0), pytest.approx(2**0.5), 2)
    assert Estimate.of_known([None]) is None


def test_one_value_has_no_deviation_and_no_interval():
    found = Estimate.of([3.0])
    assert found == (3.0, None, 1)
    assert found.half_width is None
    assert Estimate(1.0, 0.5, 0).half_width is None


def test_pairs_are_formed_by_seed():
    ours, theirs = {0: 1.0, 1: 2.0, 5: 9.0}, {1: 1.5, 0: 0.5, 7: 100.0}
    assert paired(ours, theirs) == (0.5, 0.0, 2)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_numbers_that_are_not_finite_give_an_estimate_that_is_not_finite():
    assert math.isnan(Estimate.of([1.0, math.nan]).mean)


def test_p_values_agree_with_the_printed_quantiles():
    """A mean at the edge of its 95 % interval has p = 0.05; with one degree of freedom the distribution is Cauchy's."""
    for freedom in (1, 2, 4, 9, 30):
        count = freedom + 1
        half = Estimate(0.0, 1.0, count).half_width
        assert Estimate(half, 1.0, count).p_value == pytest.approx(0.05, abs=1e-4)
    assert Estimate(1 / math.sqrt(2), 1.0, 2).p_value == pytest.approx(0.5)
    assert Estimate(1.0, None, 1).p_value is None
    assert Estimate(1.0, 0.0, 3).p_value is None


def test_a_detectable_mean_is_found_in_four_of_five_samples():
    """With many values it is (1.96 + 0.84) standard errors, with few more than that of Student's t."""
    for freedom in (1, 2, 4, 30):
        standard_errors = Contrast(0.0, 2.0, freedom, 3).detectable / 2.0
        assert nct.sf(t.ppf(0.975, freedom), freedom, standard_errors) == pytest.approx(0.8, abs=1e-4)
        alone = Estimate(0.0, math.sqrt(freedom + 1), freedom + 1)
        assert alone.detectable == pytest.approx(standard_errors)
    assert Estimate(0.0, None, 1).detectable is None
    assert Estimate(0.0, 10.0, 10_001).detectable == pytest.approx(0.1 * (1.960 + 0.8416), rel=1e-3)


@pytest.mark.parametrize(("seeds", "schemes"), [(2, 4), (3, 4), (5, 12), (2, None), (3, None), (5, None)])
def test_a_study_finds_what_it_detects_in_four_of_five_repetitions(seeds, schemes):
    """By the tests that its report uses: the noise of all schemes, or that of two schemes of their own."""
    draws, found = numpy.random.default_rng(0), []
    for _ in range(2000):
        runs = draws.normal(size=(schemes or 2, seeds)) / math.sqrt(2)  # the difference of two has the deviation 1
        runs[0] -= detects(seeds, schemes)
        losses = [dict(enumerate(row)) for row in runs]
        noise = Noise.of(losses)
        contrast = welch(runs[0], runs[1]) if schemes is None else noise.contrast(runs[0], runs[1])
        found.append(contrast.mean + contrast.half_width < 0)
    assert statistics.mean(found) == pytest.approx(0.8, abs=0.04)
    assert detects(1, 4) is detects(3, 1) is detects(1) is None


def test_for_documents_of_one_length_the_error_is_that_of_their_mean():
    ours, theirs = [[10.0, 11.0, 12.5], [12.0, 13.0, 12.5]], [[11.0, 11.0, 14.0]]
    found = over_documents(ours, theirs, [5, 5, 5])
    test = ttest_1samp([0.0, 0.2, -0.3], 0)
    assert (found.mean, found.p_value, found.count) == pytest.approx((-0.1 / 3, test.pvalue, 3))
    assert over_documents([[1.0]], [[2.0]], [5]) is None


def test_for_documents_of_many_lengths_the_interval_has_its_stated_coverage():
    """Of texts whose documents are drawn with a difference of 0.1 per label, 95 % of the intervals hold 0.1."""
    random = numpy.random.default_rng(0)
    covered = 0
    for _ in range(400):
        labels = random.integers(10, 200, size=60)
        differences = labels * (0.1 + random.normal(0, 0.05, size=60))
        found = over_documents([differences], [numpy.zeros(60)], labels.tolist())
        covered += abs(found.mean - 0.1) < found.half_width
    assert 0.91 < covered / 400 < 0.98


def test_holm_corrects_step_by_step_and_keeps_the_order():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_an_error_that_all_seeds_share_does_not_average_out():
    alone = Contrast(3.0, math.sqrt(0.5), 4, 5)
    both = alone.shared(0.5)
    assert (both.mean, both.freedom, both.count) == (3, 4, 5)
    assert both.half_width == pytest.approx(2.7764 * math.sqrt(0.5 + 0.25), rel=1e-4)  # standard errors, squared
    assert alone.shared(0.0) == alone
    assert Contrast(1.0, 0.0, 4, 5).p_value is None  # equal values say nothing of their noise


def test_two_schemes_have_the_noise_of_their_paired_differences():
    ours, theirs = {1: 4.0, 2: 4.3, 3: 3.9}, {1: 4.5, 2: 4.4, 3: 4.1}
    pairs, noise = paired(ours, theirs), Noise.of([ours, theirs])
    contrast = noise.contrast(list(ours.values()), list(theirs.values()))
    assert (contrast.mean, contrast.freedom) == (pytest.approx(pairs.mean), 2)
    assert contrast.error == pytest.approx(pairs.deviation / math.sqrt(3))
    assert contrast.p_value == pytest.approx(ttest_rel(list(ours.values()), list(theirs.values())).pvalue)
    assert Noise.of([ours]) is None
    assert Noise.of([{1: 4.0}, {1: 4.1}]) is None
    assert Noise.of([]) is None


def test_schemes_that_differ_in_their_noise_are_compared_as_in_scipy():
    ours, theirs = [4.0, 4.3, 3.9, 4.1], [4.5, 4.45, 4.5]
    contrast, test = welch(ours, theirs), ttest_ind(ours, theirs, equal_var=False)
    assert contrast.p_value == pytest.approx(test.pvalue)
    low, high = test.confidence_interval()
    assert (contrast.mean, contrast.half_width) == (pytest.approx((low + high) / 2), pytest.approx((high - low) / 2))
    assert contrast.count == 3
    assert welch([4.0], theirs) is None
    assert welch([4.0, 4.0], [5.0, 5.0]).p_value is None


def test_a_p_value_is_never_below_zero():
    assert min(Estimate(1.7**power, 1.0, count).p_value for power in range(60) for count in (2, 3, 5, 10, 45)) >= 0
