import math
import statistics
from types import SimpleNamespace

import pytest

from residua.lab.evaluation.published import PAPER_TASKS, SCORES, comparable, models, rows

SIZES = {
    "arc_challenge": 1172,
    "arc_easy": 2376,
    "hellaswag": 10042,
    "openbookqa": 500,
    "piqa": 1838,
    "sciq": 1000,
    "social_iqa": 1954,
    "winogrande": 1267,
}


@pytest.mark.parametrize("row", SCORES, ids=lambda row: f"{row.size}-{row.num_fewshot}-{row.preset}")
def test_a_published_row_is_consistent(row):
    """The average is that of the eight scores, and each score times the size of its test set is a whole number of right
    answers."""
    assert row.average == pytest.approx(statistics.fmean(row.scores), abs=0.0051)
    for task, score in zip(PAPER_TASKS, row.scores, strict=True):
        nearest = 100 * round(score / 100 * SIZES[task]) / SIZES[task]
        misprint = (row.size, row.num_fewshot, row.preset, task) == ("medium", 0, "ddl", "arc_challenge")
        assert (abs(score - nearest) < 0.0051) != misprint


def test_every_scheme_of_the_paper_has_a_row():
    for size in ("small", "medium"):
        for shots in (0, 1):
            presets = [row.preset for row in rows(size, shots)]
            assert presets == ["residual", "ddl", "ddl-tc", "ddl-cc", "ddl-ec", "ddl-cc-ec"]
    assert {row.version for row in rows("small", 1)} == {2}
    assert {row.version for row in rows("medium", 1)} == {2, 3}


def test_published_rows_are_shown_only_for_their_own_size_and_tasks():
    small = SimpleNamespace(num_hidden_layers=12, hidden_size=768)
    assert comparable(small, PAPER_TASKS, 1) == rows("small", 1)
    assert comparable(small, ["sciq", "piqa"], 0) == rows("small", 0)
    assert comparable(small, PAPER_TASKS, 1, size="medium") == rows("medium", 1)
    assert comparable(small, PAPER_TASKS, 5) == []
    assert comparable(small, ["sciq", "lambada"], 1) == []
    assert comparable(small, ["lambada"], 1, size="small") == []
    for other in ({"num_hidden_layers": 24}, {"hidden_size": 1024}, {"num_hidden_layers": 4, "hidden_size": 128}):
        assert comparable(SimpleNamespace(**{**vars(small), **other}), PAPER_TASKS, 1) == []
    assert comparable(SimpleNamespace(), PAPER_TASKS, 1) == []


def test_every_curve_ends_at_the_printed_loss():
    for model in models().values():
        tokens, losses = zip(*model.curve) if model.curve else ((), ())
        assert list(tokens) == sorted(tokens)
        if model.curve and model.loss is not None:
            assert (tokens[-1], losses[-1]) == (49.15, pytest.approx(model.loss, abs=1e-4))
        assert bool(model.curve) != (model.preset == "ddl"), "one value channel has no curve, and all others have one"
    assert models()["small", "residual"].hours == pytest.approx(9.04, abs=0.01)
    assert models()["small", "hc"].loss is None


def test_the_loss_between_two_points_of_a_curve_is_interpolated():
    curve = models()["small", "ddl-tc"].curve
    (start, before), (end, after) = curve[10:12]
    model = models()["small", "ddl-tc"]
    assert model.loss_at(start) == pytest.approx(before)
    assert model.loss_at((start + end) / 2) == pytest.approx((before + after) / 2)
    assert model.loss_at(curve[0][0] - 0.1) is model.loss_at(50.0) is None


def test_the_printed_losses_agree_with_the_perplexities():
    for model in models().values():
        if model.loss is not None:
            assert math.log(model.perplexity) == pytest.approx(model.loss, abs=6e-5)
