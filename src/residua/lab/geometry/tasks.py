"""The tasks of arXiv 2605.06729, generated on the fly: predict the next point of a motion on the sphere, or negate x.

The distributions are those of the paper's public code (commit 783e727). Random numbers are torch's, so the trajectories
differ. The data of a task are a pure function of its fields, and the same everywhere.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from residua.errors import require

# Angles in radians. The gyroscope's angle is uniform in this range. An exact Cayley transform cannot reach pi.
GYROSCOPE_ANGLES = (0.1, 2.5)
NEAR_PI_ANGLE = 3.10
NEAR_PI_MULTI_ANGLE = 3.14
STABILITY_NOISE = 1e-3


class Data(NamedTuple):
    """Inputs and targets, (trajectories, length, dim), in float32 on the CPU.

    Target t has to be predicted from inputs up to t.
    """

    train_inputs: Tensor
    train_targets: Tensor
    val_inputs: Tensor
    val_targets: Tensor


@dataclass(frozen=True)
class Task:
    """A task and its sizes; `dataclasses.replace` gives a smaller one.

    length: the number of inputs of a trajectory, which has one more point. val_seed: the seed of the validation data;
    None: the last `num_val` trajectories drawn with `seed` are the validation data.
    """

    name: str
    dim: int
    length: int
    num_train: int
    num_val: int
    seed: int = 42
    val_seed: int | None = None

    def data(self) -> Data:
        """Return training and validation data; tasks with equal fields have equal data."""
        draw = _DRAW[self.name]
        generator = Generator().manual_seed(self.seed)
        if self.val_seed is None:
            inputs, targets = draw(self, self.num_train + self.num_val, generator)
            train, val = slice(self.num_train), slice(self.num_train, None)
            return Data(inputs[train], targets[train], inputs[val], targets[val])
        train = draw(self, self.num_train, generator)
        return Data(*train, *draw(self, self.num_val, Generator().manual_seed(self.val_seed)))


def task(name: str) -> Task:
    """Return the task `name` at its published size. Raises InputError, with all names, for an unknown name."""
    require(name in TASKS, "a task", f"one of {', '.join(TASKS)}", name)
    return TASKS[name]


def rotate(start: Tensor, first: Tensor, second: Tensor, angle: Tensor, steps: int) -> Tensor:
    """Return R^s start for s = 0 ... steps, with R the rotation by `angle` from axis `first` towards axis `second`.

    start: (num, dim); first, second: (num, planes), axes that are in no other plane; angle: (num, planes) or
    broadcastable. Returns (num, steps + 1, dim). R^s is a rotation by s * angle, so that errors do not accumulate.
    """
    turns = torch.arange(steps + 1, dtype=start.dtype).view(1, -1, 1) * angle.unsqueeze(1)
    a, b = start.gather(1, first).unsqueeze(1), start.gather(1, second).unsqueeze(1)
    cos, sin = turns.cos(), turns.sin()
    points = start.unsqueeze(1).repeat(1, steps + 1, 1)
    points.scatter_(2, first.unsqueeze(1).expand(-1, steps + 1, -1), cos * a - sin * b)
    points.scatter_(2, second.unsqueeze(1).expand(-1, steps + 1, -1), sin * a + cos * b)
    return points


def unit_vectors(*shape: int, generator: Generator) -> Tensor:
    """Draw points on the unit sphere of the last axis, uniformly, in float64."""
    points = torch.randn(shape, generator=generator, dtype=torch.float64)
    return points / points.norm(dim=-1, keepdim=True)


def _whole(below: Tensor, generator: Generator) -> Tensor:
    """Draw a uniform integer in [0, below) for each entry of `below`."""
    return (torch.rand(below.shape, generator=generator, dtype=torch.float64) * below).long().clamp(max=below - 1)


def _shifted(points: Tensor) -> tuple[Tensor, Tensor]:
    points = points.float()
    return points[:, :-1], points[:, 1:]


def _gyroscope(task: Task, num: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw a rotation per trajectory in the plane of axes i < j: i uniform over all but the last, j over those after i.

    As published, planes are not equally likely: of 16 axes, the last is in 22 % of the planes and the first in 6.7 %.
    """
    start = unit_vectors(num, task.dim, generator=generator)
    low, high = GYROSCOPE_ANGLES
    angle = low + (high - low) * torch.rand(num, 1, generator=generator, dtype=torch.float64)
    first = _whole(torch.full((num, 1), task.dim - 1), generator)
    second = first + 1 + _whole(task.dim - 1 - first, generator)
    return _shifted(rotate(start, first, second, angle, task.length))


def _stability(task: Task, num: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw a constant unit vector, with fresh noise at every point."""
    key = unit_vectors(num, task.dim, generator=generator).unsqueeze(1)
    noise = torch.randn(num, task.length + 1, task.dim, generator=generator, dtype=torch.float64)
    return _shifted(key + STABILITY_NOISE * noise)


def near_pi_planes(task: Task) -> tuple[Tensor, Tensor, float]:
    """Return the first axes (planes,), second axes (planes,) and angle of the single rotation of a near-pi task."""
    if task.name == "near-pi":
        return torch.tensor([0]), torch.tensor([1]), NEAR_PI_ANGLE
    first = torch.arange(0, task.dim, 2)
    return first, first + 1, NEAR_PI_MULTI_ANGLE


def _near_pi(task: Task, num: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw the starts; the rotation is the same for all trajectories."""
    first, second, angle = near_pi_planes(task)
    start = unit_vectors(num, task.dim, generator=generator)
    planes = first.expand(num, -1), second.expand(num, -1)
    return _shifted(rotate(start, *planes, torch.tensor([[angle]], dtype=torch.float64), task.length))


def _reflection(task: Task, num: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Draw standard normal vectors, which are not of unit norm, and return them with their negatives."""
    x = torch.randn(num, 1, task.dim, generator=generator, dtype=torch.float64).float()
    return x, -x


_DRAW: dict[str, Callable[[Task, int, Generator], tuple[Tensor, Tensor]]] = {
    "gyroscope": _gyroscope,
    "stability": _stability,
    "near-pi": _near_pi,
    "near-pi-multi": _near_pi,
    "reflection": _reflection,
}

# The published sizes and seeds (public code at 783e727; its documentation says 800 and 200 trajectories for near-pi).
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("gyroscope", dim=16, length=255, num_train=9000, num_val=1000),
        Task("stability", dim=64, length=127, num_train=900, num_val=100),
        Task("near-pi", dim=64, length=127, num_train=1000, num_val=500, val_seed=1042),
        Task("near-pi-multi", dim=64, length=127, num_train=1000, num_val=500, val_seed=1042),
        Task("reflection", dim=64, length=1, num_train=500, num_val=500, val_seed=999),
    )
}


def expected_cosine_and_sine() -> tuple[float, float]:
    """Return the means of cos and sin over the gyroscope's angles."""
    low, high = GYROSCOPE_ANGLES
    return (math.sin(high) - math.sin(low)) / (high - low), (math.cos(low) - math.cos(high)) / (high - low)
