"""Of many lines in a panel, three have a colour and a name. The note explains only marks that are drawn."""

from types import SimpleNamespace

import pytest

from residua.lab.geometry.pictures import LOSS, POSITIONS, _figure, _mean, _named, _styles


@pytest.mark.parametrize(
    ("count", "expected"),
    [(3, {"residual", "model 1", "model 2"}), (9, {"residual", "model 1", "model 8"})],
)
def test_among_many_lines_only_the_plain_residual_the_best_and_the_worst_are_named(count, expected):
    last = {"residual" if number == 0 else f"model {number}": 3.5 if number == 0 else number for number in range(count)}
    groups = [SimpleNamespace(name=name, runs=[{"curve": [[0, 9.0], [1, loss]]}]) for name, loss in last.items()]
    assert _named(LOSS._replace(groups=groups)) == expected


def test_a_run_that_diverged_is_in_no_mean_curve():
    whole = {"curve": [[0, 1.0], [1, 0.5], [2, 0.25]], "diverged": False}
    lost = {"curve": [[0, 3.0]], "diverged": True}
    mean = _mean(SimpleNamespace(name="ddl", runs=[whole, lost]), LOSS.curve)
    assert mean == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert _mean(SimpleNamespace(name="ddl", runs=[lost]), LOSS.curve) == [(0, 3.0)]


@pytest.mark.parametrize("causal", [True, False])
def test_circles_are_explained_only_if_some_are_drawn(causal):
    run = {"by_position": [0.3, 0.2], "online_by_position": [[0, 0.4, 0.3], [1, 0.2, 0.2]], "causal": causal}
    panel = POSITIONS._replace(groups=[SimpleNamespace(name="residual", runs=[run])])
    figure = _figure([panel], _styles(["residual"]), "")
    circles = [line for line in figure.axes[0].lines if line.get_markerfacecolor() == "none"]
    assert [len(line.get_xdata()) for line in circles] == ([] if causal else [2])
    assert ("Circles:" in figure.get_supxlabel()) is not causal
