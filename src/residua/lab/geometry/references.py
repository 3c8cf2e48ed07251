"""References without training: causal predictors, and the floors that they imply for every causal model.

A predictor maps inputs (trajectories, length, dim) to predictions of the same shape; prediction t uses inputs up to t.
A trained model that does worse than one of these has learned little.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from residua.lab.geometry.tasks import Task, expected_cosine_and_sine, near_pi_planes, rotate

Predictor = Callable[[Tensor], Tensor]


def running_mean(inputs: Tensor) -> Tensor:
    """Return the mean of x_s over s <= t: nearly the best predictor for the task "stability"."""
    counts = torch.arange(1, inputs.shape[1] + 1, device=inputs.device, dtype=torch.float64)
    return (inputs.cumsum(1, dtype=torch.float64) / counts.unsqueeze(-1)).to(inputs.dtype)


def true_rotation(task: Task) -> Predictor:
    """Return the predictor R x_t, with the single rotation R of a near-pi task."""
    first, second, angle = near_pi_planes(task)
    axes = torch.eye(task.dim, dtype=torch.float64)
    planes = first.expand(task.dim, -1), second.expand(task.dim, -1)
    # Row i of the points after one step is R e_i, so they form the transpose of R.
    transposed = rotate(axes, *planes, torch.tensor([[angle]], dtype=torch.float64), 1)[:, 1]
    return lambda inputs: (inputs.double() @ transposed.to(inputs.device)).to(inputs.dtype)


def expected_rotation(dim: int) -> Tensor:
    """Return E R, the mean rotation of the gyroscope over planes and angles, (dim, dim) in float64.

    E R x_0 is the best causal prediction at position 0.
    """
    cosine, sine = expected_cosine_and_sine()
    first = torch.arange(dim - 1, dtype=torch.float64)
    # The probability of axes i < j is that of the first, 1 / (dim - 1), times that of the second, 1 / (dim - 1 - i).
    plane = torch.zeros(dim, dim, dtype=torch.float64)
    plane[:-1] = (1 / ((dim - 1) * (dim - 1 - first))).unsqueeze(1)
    plane = plane.triu(1)
    in_plane = plane.sum(0) + plane.sum(1)
    return torch.diag(1 - in_plane * (1 - cosine)) + sine * (plane.T - plane)


def causal_floor(dim: int) -> float:
    """Return the smallest expected squared error at position 0 of the gyroscope that a causal model can reach.

    x_0 has no information on the rotation, so the best prediction is E R x_0, whose mean squared error per coordinate
    is (1 - ||E R||_F^2 / dim) / dim. A model below this floor has seen later inputs.
    """
    return (1 - expected_rotation(dim).square().sum().item() / dim) / dim


def plane_known_floor(dim: int) -> float:
    """Return the floor of `causal_floor` for a model that knows the plane of rotation in advance, but not the angle."""
    cosine, sine = expected_cosine_and_sine()
    return (2 - 2 * (cosine**2 + sine**2)) / dim**2


def expected_first_point(inputs: Tensor) -> Tensor:
    """Return E R x_0, (trajectories, dim), the prediction that reaches `causal_floor` on the gyroscope."""
    return (inputs[:, 0].double() @ expected_rotation(inputs.shape[-1]).to(inputs.device).T).to(inputs.dtype)


def solved_rotation(inputs: Tensor) -> Tensor:
    """Predict E R x_0 at position 0; afterwards compute the rotation from the last two points, and apply it.

    Two points are enough, because they differ only in the two axes of the plane, by the angle. After position 0 there
    is therefore nothing to learn, and this is the best causal predictor, up to rounding.
    """
    before, now = inputs[:, :-1].double(), inputs[:, 1:].double()
    axes = (now - before).abs().topk(2, dim=-1).indices
    (a, b), (c, d) = (points.gather(-1, axes).unbind(-1) for points in (before, now))
    angle = torch.atan2(a * d - b * c, a * c + b * d)
    cos, sin = angle.cos(), angle.sin()
    after = now.scatter(-1, axes, torch.stack((cos * c - sin * d, sin * c + cos * d), dim=-1))
    return torch.cat((expected_first_point(inputs).unsqueeze(1), after.to(inputs.dtype)), dim=1)


class Reference(NamedTuple):
    label: str
    predict: Predictor


def predictors(task: Task) -> dict[str, Reference]:
    """Return the references of a task by key; "solved" is the best possible predictor, if its closed form is known."""
    references = {
        "zero": Reference("predict 0", torch.zeros_like),
        "copy": Reference("copy x_t", torch.clone),
        "negate": Reference("negate: −x_t", torch.neg),
    }
    if task.length > 1:
        references["running-mean"] = Reference("running mean", running_mean)
    if task.name == "gyroscope":
        references["solved"] = Reference("rotation from two points", solved_rotation)
    if task.name.startswith("near-pi"):
        references["solved"] = Reference("the true rotation", true_rotation(task))
    return references


def references(task: Task) -> list[dict[str, Any]]:
    """Return a record (see `report`) for each reference: its mean squared error on the validation data of `task`.

    For the gyroscope there are also the two floors of position 0, which are exact and not measured. Their `loss` is the
    contribution of position 0 to the mean over positions, so "causal-floor" is the lowest expected loss of a causal
    model.
    """
    inputs, targets = task.data()[2:]
    records: list[dict[str, Any]] = []
    for key, (label, predict) in predictors(task).items():
        predictions = predict(inputs)
        by_position = (predictions.double() - targets).square().mean((0, 2))
        record = {"model": key, "label": label, "causal": True, "loss": by_position.mean().item()}
        record |= {"position0_loss": by_position[0].item(), "by_position": by_position.tolist()}
        if task.name == "reflection" and key != "zero":
            record["cosine"] = cosine_similarity(predictions, targets, dim=-1).mean().item()
        records.append(record)
    if task.name == "gyroscope":
        for key, label, floor in (
            ("causal-floor", "expected floor of position 0, causal", causal_floor(task.dim)),
            ("plane-known-floor", "expected floor of position 0, plane known", plane_known_floor(task.dim)),
        ):
            loss = {"loss": floor / task.length, "position0_loss": floor}
            records.append({"model": key, "label": label, "causal": key == "causal-floor", **loss})
    return [{"kind": "reference", "task": task.name, **record} for record in records]
