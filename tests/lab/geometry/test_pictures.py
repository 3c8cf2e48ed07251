"""Of many lines in a panel, three have a colour and a name."""

from types import SimpleNamespace

import pytest

from residua.lab.geometry.pictures import LOSS, _named


@pytest.mark.parametrize(
    ("count", "expected"),
    [(3, {"residual", "model 1", "model 2"}), (9, {"residual", "model 1", "model 8"})],
)
def test_among_many_lines_only_the_plain_residual_the_best_and_the_worst_are_named(count, expected):
    last = {"residual" if number == 0 else f"model {number}": 3.5 if number == 0 else number for number in range(count)}
    groups = [SimpleNamespace(name=name, runs=[{"curve": [[0, 9.0], [1, loss]]}]) for name, loss in last.items()]
    assert _named(LOSS._replace(groups=groups)) == expected
