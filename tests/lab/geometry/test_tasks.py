from dataclasses import replace

import pytest
import torch

from residua.errors import InputError
from residua.lab.geometry.tasks import GYROSCOPE_ANGLES, NEAR_PI_ANGLE, NEAR_PI_MULTI_ANGLE, TASKS, rotate, task
from support.tolerances import assert_close

SEQUENCES = ["gyroscope", "stability", "near-pi", "near-pi-multi"]
ROTATIONS = ["gyroscope", "near-pi", "near-pi-multi"]


def points(name, **sizes):
    """All points of the training trajectories of a task, (trajectories, length + 1, dim) in float64."""
    inputs, targets = replace(task(name), **sizes).data()[:2]
    return torch.cat((inputs, targets[:, -1:]), dim=1).double()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim", "length", "num_train", "num_val"),
    [
        ("gyroscope", 16, 255, 9000, 1000),
        ("stability", 64, 127, 900, 100),
        ("near-pi", 64, 127, 1000, 500),
        ("near-pi-multi", 64, 127, 1000, 500),
        ("reflection", 64, 1, 500, 500),
    ],
)
def test_the_tasks_have_the_published_sizes(name, dim, length, num_train, num_val):
    data = TASKS[name].data()
    for tensor, count in zip(data, (num_train, num_train, num_val, num_val), strict=True):
        assert tensor.shape == (count, length, dim)
        assert tensor.dtype == torch.float32
        assert tensor.isfinite().all()


@pytest.mark.parametrize("name", SEQUENCES)
def test_targets_are_the_inputs_one_step_later(name):
    data = replace(task(name), length=20, num_train=30, num_val=10).data()
    for inputs, targets in (data[:2], data[2:]):
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert not torch.equal(inputs[:, 0], targets[:, 0])


@pytest.mark.parametrize("name", TASKS)
def test_equal_fields_give_equal_numbers_and_the_global_generator_is_unchanged(name):
    small = replace(task(name), num_train=12, num_val=7)
    torch.manual_seed(1)
    before, first = torch.get_rng_state(), small.data()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    second = small.data()
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    other = replace(small, seed=43).data()
    assert not torch.equal(first.train_inputs, other.train_inputs)


@pytest.mark.parametrize("name", ["gyroscope", "stability"])
def test_validation_data_is_the_end_of_the_single_draw(name):
    split = replace(task(name), length=9, num_train=40, num_val=15).data()
    moved = replace(task(name), length=9, num_train=45, num_val=10).data()
    for train, val in ((0, 2), (1, 3)):
        assert torch.equal(torch.cat((split[train], split[val])), torch.cat((moved[train], moved[val])))


@pytest.mark.parametrize(("name", "val_seed"), [("near-pi", 1042), ("near-pi-multi", 1042), ("reflection", 999)])
def test_validation_data_is_drawn_separately(name, val_seed):
    small = replace(task(name), num_train=20, num_val=20)
    assert small.seed == 42
    assert small.val_seed == val_seed
    data = small.data()
    assert not torch.equal(data.train_inputs, data.val_inputs)
    assert torch.equal(data.val_inputs, replace(small, seed=val_seed).data().train_inputs)
    assert torch.equal(data.val_inputs, replace(small, num_train=5).data().val_inputs)


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_keep_unit_norm_to_the_end(name):
    assert_close(
        points(name, num_train=50, num_val=1).norm(dim=-1),
        torch.ones(50, task(name).length + 1).double(),
        dtype=torch.float32,
    )


def test_a_gyroscope_turns_by_one_angle_in_one_plane():
    x = points("gyroscope", length=40, num_train=400, num_val=1)
    moving = (x - x[:, :1]).abs().amax(1) > 0
    assert (moving.sum(-1) == 2).all()
    planes = x[moving.unsqueeze(1).expand_as(x)].view(400, 41, 2)
    a, b = planes[:, :-1], planes[:, 1:]
    angles = torch.atan2(a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0], (a * b).sum(-1))
    assert (angles.std(1) < 1e-3).all()
    angle = angles.mean(1)
    low, high = GYROSCOPE_ANGLES
    assert (angle > low - 1e-3).all()
    assert (angle < high + 1e-3).all()


def test_the_planes_and_angles_of_the_gyroscope_are_distributed_as_published():
    count = 20_000
    x = points("gyroscope", length=2, num_train=count, num_val=1)
    moving = (x - x[:, :1]).abs().amax(1) > 0
    share = moving.double().mean(0)
    error = (share * (1 - share) / count).sqrt()
    dim = 16
    # i is uniform over 0 ... 14, j over i + 1 ... 15.
    expected = torch.tensor(
        [(k < dim - 1) / (dim - 1) + sum(1 / ((dim - 1) * (dim - 1 - i)) for i in range(k)) for k in range(dim)]
    ).double()
    assert expected[15] == pytest.approx(0.2212, abs=1e-4)
    assert expected[0] == pytest.approx(0.0667, abs=1e-4)
    assert ((share - expected).abs() < 4 * error).all()
    in_plane = x[:, :2][moving.unsqueeze(1).expand(-1, 2, -1)].view(count, 2, 2)
    before, after = in_plane[:, 0], in_plane[:, 1]
    angle = torch.atan2(before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0], (before * after).sum(-1))
    low, high = GYROSCOPE_ANGLES
    assert angle.mean().item() == pytest.approx((low + high) / 2, abs=4 * (high - low) / (12 * count) ** 0.5)
    assert angle.var().item() == pytest.approx((high - low) ** 2 / 12, rel=0.03)


@pytest.mark.parametrize("name", ROTATIONS)
def test_starts_are_uniform_on_the_sphere(name):
    start = points(name, length=1, num_train=4000, num_val=1)[:, 0]
    dim = start.shape[-1]
    assert (start.mean(0).abs() < 5 / (dim * 4000) ** 0.5).all()
    second = start.T @ start / 4000
    assert (second - torch.eye(dim) / dim).abs().max() < 6 * (2 / 4000) ** 0.5 / dim


def test_stability_is_a_constant_under_noise():
    x = points("stability")
    key = x.mean(1, keepdim=True)
    assert key.norm(dim=-1).sub(1).abs().max() < 1e-3
    assert (x - key).std().item() == pytest.approx(1e-3, rel=0.01)


@pytest.mark.parametrize(
    ("name", "angle", "planes"), [("near-pi", NEAR_PI_ANGLE, 1), ("near-pi-multi", NEAR_PI_MULTI_ANGLE, 32)]
)
def test_near_pi_has_one_rotation_for_all_trajectories(name, angle, planes):
    x = points(name, length=12, num_train=100, num_val=1)
    rotation = torch.eye(64).double()
    for plane in range(planes):
        i, j = 2 * plane, 2 * plane + 1
        rotation[i, i] = rotation[j, j] = torch.tensor(angle).double().cos()
        rotation[j, i] = torch.tensor(angle).double().sin()
        rotation[i, j] = -rotation[j, i]
    assert_close(x[:, 1:], x[:, :-1] @ rotation.T, dtype=torch.float32)


def test_reflection_negates_standard_normal_vectors():
    data = TASKS["reflection"].data()
    for inputs, targets in (data[:2], data[2:]):
        assert torch.equal(targets, -inputs)
        assert inputs.mean().item() == pytest.approx(0, abs=0.03)
        assert inputs.var().item() == pytest.approx(1, abs=0.05)


def test_powers_of_a_rotation_equal_repeated_rotations():
    start = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = torch.tensor([[0, 2]]).expand(3, -1), torch.tensor([[1, 5]]).expand(3, -1)
    angle = torch.tensor([[0.3, -1.2]], dtype=torch.float64)
    walked = rotate(start, first, second, angle, 7)
    assert torch.equal(walked[:, 0], start)
    x = start
    for step in range(1, 8):
        x = rotate(x, first, second, angle, 1)[:, 1]
        assert_close(walked[:, step], x)


def test_an_unknown_task_is_refused_with_all_names():
    with pytest.raises(InputError, match=r"near-pi-multi.*got 'gyroscop'"):
        task("gyroscop")
