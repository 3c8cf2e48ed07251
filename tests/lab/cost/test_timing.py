import pytest

from residua.lab.cost.timing import Quartiles, compare


def called(calls, name):
    return lambda: calls.append(name)


def ticking(calls, seconds):
    """A clock by which the n-th call of a candidate takes `seconds[name][n]`."""
    left = {name: iter(values) for name, values in seconds.items()}

    def clock(call):
        call()
        return next(left[calls[-1]])

    return clock


def test_candidates_take_turns_and_the_order_is_reversed_every_other_round():
    calls = []
    candidates = {name: called(calls, name) for name in "abc"}
    compare(candidates, "a", rounds=3, warmup=1, clock=lambda call: call() or 1.0)
    assert "".join(calls) == "abc" + "cba" + "abc" + "cba"


def test_warmup_does_not_count():
    calls = []
    seconds = {"a": [90.0, 1.0, 2.0], "b": [70.0, 3.0, 4.0]}
    candidates = {name: called(calls, name) for name in seconds}
    timing = compare(candidates, "a", rounds=2, warmup=1, clock=ticking(calls, seconds))
    assert timing.seconds == {"a": (1.0, 2.0), "b": (3.0, 4.0)}


def test_the_ratio_is_the_median_of_the_ratios_within_rounds():
    # The machine is ten times slower in the third round, for everybody; the ratio of the medians would be 3.
    calls = []
    seconds = {"base": [1.0, 2.0, 10.0], "other": [1.5, 6.0, 15.0]}
    candidates = {name: called(calls, name) for name in seconds}
    timing = compare(candidates, "base", rounds=3, warmup=0, clock=ticking(calls, seconds))
    assert timing.ratios("other") == (1.5, 3.0, 1.5)
    assert timing.ratio("other") == Quartiles(1.5, 1.5, 2.25)
    assert timing.median_seconds("other") == 6.0
    assert timing.ratio("base") == Quartiles(1.0, 1.0, 1.0)


def test_progress_is_reported_for_every_call():
    told = []
    candidates = {name: lambda: None for name in "ab"}
    compare(candidates, "b", rounds=3, warmup=2, clock=lambda call: 1.0, advance=lambda: told.append(1))
    assert len(told) == 2 * (2 + 3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([4.0, 2.0], (2.5, 3.0, 3.5)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (2.0, 3.0, 4.0)),
    ],
)
def test_quartiles_are_those_of_the_sorted_values(values, expected):
    assert Quartiles.of(values) == expected
