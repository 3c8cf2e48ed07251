import math
from dataclasses import replace

import pytest
import torch

from residua.lab.geometry.references import (
    causal_floor,
    expected_rotation,
    plane_known_floor,
    predictors,
    references,
    running_mean,
)
from residua.lab.geometry.tasks import TASKS, rotate, task
from support.tolerances import assert_close


def rows(name, **sizes):
    return {record["model"]: record for record in references(replace(task(name), **sizes))}


def monte_carlo_rotations(dim, count):
    """Rotations R of the gyroscope, (count, dim, dim), drawn by other code than the task's."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randint(0, dim - 1, (count,), generator=generator)
    later = torch.rand(count, generator=generator, dtype=torch.float64)
    second = first + 1 + (later * (dim - 1 - first)).long()
    angle = 0.1 + 2.4 * torch.rand(count, generator=generator, dtype=torch.float64)
    every = torch.arange(count)
    r = torch.eye(dim, dtype=torch.float64).repeat(count, 1, 1)
    r[every, first, first] = r[every, second, second] = angle.cos()
    r[every, second, first] = angle.sin()
    r[every, first, second] = -angle.sin()
    return r


def test_the_floors_of_the_gyroscope_have_the_expected_numbers():
    assert causal_floor(16) == pytest.approx(1.161e-2, rel=1e-3)
    assert plane_known_floor(16) == pytest.approx(3.10e-3, rel=1e-3)


@pytest.mark.parametrize("dim", [2, 3, 16])
def test_the_expected_rotation_agrees_with_monte_carlo(dim):
    r = monte_carlo_rotations(dim, 40_000)
    mean, error = r.mean(0), r.std(0) / 200
    assert ((mean - expected_rotation(dim)).abs() <= 5 * error + 1e-12).all()
    # For every x_0 of unit norm, E ||R x - E R x||^2 / dim averages to the floor.
    floor = (1 - mean.square().sum().item() / dim) / dim
    assert causal_floor(dim) == pytest.approx(floor, rel=0.02)


def test_with_one_plane_to_choose_from_the_two_floors_agree():
    assert plane_known_floor(2) == pytest.approx(causal_floor(2))


def test_the_predictor_reaches_the_floor_with_no_error_after_position_0():
    solved = rows("gyroscope", num_train=1, num_val=8000, length=6)["solved"]
    assert solved["position0_loss"] == pytest.approx(causal_floor(16), rel=0.03)
    assert max(solved["by_position"][1:]) < 1e-8
    assert solved["loss"] == pytest.approx(solved["position0_loss"] / 6, rel=1e-4)


# The loss of a reference on a published task, and by how much of it a draw of the data may differ.
PUBLISHED = {
    "gyroscope": {
        "zero": (6.25e-2, 1e-3),
        "copy": (1.238e-2, 0.06),
        "solved": (4.55e-5, 0.06),
        "causal-floor": (4.55e-5, 1e-3),
    },
    "stability": {
        "zero": (1.563e-2, 1e-3),
        "copy": (2.003e-6, 0.01),
        "negate": (6.25e-2, 1e-3),
        "running-mean": (1.045e-6, 0.01),
    },
    # The in-plane part of a start varies as much as its mean: 500 of them are known to 1 / sqrt(500).
    "near-pi": {
        "zero": (1.562e-2, 1e-3),
        "copy": (2 * (2 - 2 * math.cos(3.10)) / 64**2, 4 / 500**0.5),
        "negate": (6.04e-2, 0.01),
        "solved": (0.0, 0.0),
    },
    "near-pi-multi": {"copy": (6.25e-2, 1e-3), "negate": (3.96e-8, 0.01), "solved": (0.0, 0.0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_references_have_the_published_losses(name):
    found = rows(name)
    for model, (loss, share) in PUBLISHED[name].items():
        assert found[model]["loss"] == pytest.approx(loss, rel=share, abs=1e-15), model
    assert {model for model, record in found.items() if not record["causal"]} == {"plane-known-floor"} & found.keys()


def test_references_have_the_expected_scores_on_the_reflection():
    found = rows("reflection")
    assert found["negate"]["loss"] == 0
    assert found["negate"]["cosine"] == pytest.approx(1)
    assert found["copy"]["cosine"] == pytest.approx(-1)
    assert found["copy"]["loss"] == pytest.approx(4, rel=0.05)
    assert "cosine" not in found["zero"]
    assert "running-mean" not in found


def test_the_running_mean_is_over_all_positions_so_far():
    x = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [2.0, -2.0]]])
    assert_close(running_mean(x), torch.tensor([[[1.0, 2.0], [2.0, 4.0], [2.0, 2.0]]]))


@pytest.mark.parametrize("name", TASKS)
def test_no_predictor_reads_later_positions(name):
    small = (
        replace(task(name), num_train=6, num_val=6)
        if name == "reflection"
        else (replace(task(name), dim=8, length=7, num_train=6, num_val=6))
    )
    inputs = small.data().val_inputs
    for reference in predictors(small).values():
        whole = reference.predict(inputs)
        for seen in range(1, small.length + 1):
            assert torch.equal(reference.predict(inputs[:, :seen]), whole[:, :seen])


@pytest.mark.parametrize("angle", [0.1, 1.3, 2.5])
def test_every_gyroscope_is_solved_from_two_points(angle):
    start = torch.randn(5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    planes = torch.tensor([[1]]).expand(5, -1), torch.tensor([[4]]).expand(5, -1)
    points = rotate(start, *planes, torch.tensor([[angle]], dtype=torch.float64), 8)
    solve = predictors(task("gyroscope"))["solved"].predict
    assert_close(solve(points[:, :-1])[:, 1:], points[:, 2:], factor=10)  # the angle divides by what is in the plane
