"""Measure a model as a black box: causality, the error in online use, and norms.

A model here is a callable: inputs (trajectories, length, dim) -> predictions of the same shape. Modules are measured in
eval mode and without gradients, on the device and in the dtype of their parameters, and are left unchanged; data may be
on any device. The fields of results have the same names in records.
"""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.utils._pytree import tree_leaves

from residua.lab.geometry.references import causal_floor, expected_first_point
from residua.lab.geometry.tasks import Data, unit_vectors
from residua.models.evaluating import evaluating

Predict = Callable[[Tensor], Tensor]

# Changing the last input of a causal model changes no bit of its earlier outputs if sums keep their order. For kernels
# that change the order, a change of this many float64 epsilons is allowed.
ROUNDINGS = 64
# A result this many standard errors below the floor is a leak. By chance alone, about 1 of 700 measurements is as low.
LEAK_ERRORS = 3.0
BATCH = 256  # trajectories at once


class Causality(NamedTuple):
    """The largest effect of the last input on an earlier output, relative to max |y|, and whether it is rounding."""

    causal: bool
    causality_change: float


class SquaredErrors(NamedTuple):
    """Mean squared errors from full sequences and from prefixes (online).

    `loss` and `by_position` are over all data, from full sequences. `online_difference` is online minus full, over the
    trajectories and positions that were measured both ways; `online_difference_error` is its standard error over
    trajectories (None for one trajectory). `online_loss` is loss + online_difference: the mean error of predictions
    from prefixes, without the noise from the choice of trajectories. `online_by_position` has rows (position, online,
    full) for the measured trajectories.
    """

    loss: float
    online_loss: float
    online_difference: float
    online_difference_error: float | None
    by_position: list[float]
    online_by_position: list[list[float]]


class Position0(NamedTuple):
    """The result of `position0`: whether the model leaks, the floor, and a difference with its standard error.

    The difference is the model's error minus that of the best causal prediction E R x_0. It is taken trajectory by
    trajectory, which removes most of the noise. For a causal model its expectation is not negative.
    """

    position0_leak: bool
    position0_floor: float
    position0_difference: float
    position0_difference_error: float


def causality(model: Predict, dim: int, length: int) -> Causality:
    """Compare earlier outputs before and after a change of the last input, for four sequences of random unit vectors.

    A module is copied to float64, in which rounding is far smaller than any leak. length: at least 2.
    """
    if isinstance(model, nn.Module):
        model = copy.deepcopy(model).double()
    generator = Generator().manual_seed(0)
    inputs = unit_vectors(4, length, dim, generator=generator)
    changed = inputs.clone()
    changed[:, -1] = unit_vectors(4, 1, dim, generator=generator)[:, 0]
    with _measuring(model) as run:
        before, after = (run(x)[:, :-1].double() for x in (inputs, changed))
    if not (before.isfinite().all() and after.isfinite().all()):
        raise ValueError("outputs must be finite to measure causality")
    change, largest = (after - before).abs().max().item(), before.abs().max().item()
    relative = change / largest if largest else (math.inf if change else 0.0)
    return Causality(relative <= ROUNDINGS * torch.finfo(torch.float64).eps, relative)


def full_and_online(
    model: Predict, inputs: Tensor, targets: Tensor, *, trajectories: int = 64, stride: int = 1
) -> SquaredErrors:
    """Compare the error of a model on whole sequences with its error when used online.

    Online, the prediction at t is made only from inputs[:, : t + 1], in a separate forward pass, for the first
    `trajectories` of the data. With a `stride` above 1, the first `stride` positions are all measured, because errors
    change fastest there, and then every `stride`-th; each of these stands for all positions up to the next.
    """
    inputs, targets = inputs.cpu(), targets.cpu()
    length = inputs.shape[1]
    sample = inputs[:trajectories], targets[:trajectories].double()
    positions = [*range(min(stride, length)), *range(stride, length, stride)]
    ends = [*positions[1:], length]
    weights = torch.tensor([end - at for at, end in zip(positions, ends)], dtype=torch.float64) / length
    with _measuring(model) as run:
        full = torch.cat([run(x) for x in inputs.split(BATCH)]).double()
        online = torch.stack(
            [torch.cat([run(x)[:, -1] for x in sample[0][:, : t + 1].split(BATCH)]) for t in positions], dim=1
        ).double()
    errors = (full - targets).square().mean(-1)  # (trajectories, length)
    online_errors = (online - sample[1][:, positions]).square().mean(-1)  # (sample, positions)
    full_errors = errors[: len(sample[0]), positions]
    differences = (online_errors - full_errors) @ weights
    count, difference, loss = len(differences), differences.mean().item(), errors.mean().item()
    by_position = zip(positions, online_errors.mean(0).tolist(), full_errors.mean(0).tolist())
    return SquaredErrors(
        loss=loss,
        online_loss=loss + difference,
        online_difference=difference,
        online_difference_error=differences.std().item() / math.sqrt(count) if count > 1 else None,
        by_position=errors.mean(0).tolist(),
        online_by_position=list(map(list, by_position)),
    )


def position0(model: Predict, data: Data) -> Position0:
    """Detect a leak on the gyroscope: a prediction from only x_0 cannot beat `references.causal_floor`.

    The model gets full sequences. It leaks if its error at position 0, compared trajectory by trajectory, is more than
    3 standard errors below the error of the best causal prediction. This test can miss a leak; `causality` does not.
    """
    inputs, targets = data.val_inputs.cpu(), data.val_targets[:, 0].cpu().double()
    with _measuring(model) as run:
        first = torch.cat([run(x)[:, 0] for x in inputs.split(BATCH)]).double()
    errors = (first - targets).square().mean(-1)
    differences = errors - (expected_first_point(inputs.double()) - targets).square().mean(-1)
    difference, error = differences.mean().item(), differences.std().item() / math.sqrt(len(errors))
    return Position0(difference < -LEAK_ERRORS * error, causal_floor(inputs.shape[-1]), difference, error)


def norm_deviation(model: Predict, dim: int, *, length: int = 100) -> float:
    """Measure how far the outputs for 50 sequences of independent unit vectors are from unit norm, as published.

    N_t is the mean over sequences of ||y_t||; the result is the mean over t of |N_t - 1|. Deviations of single outputs
    cancel in N_t. The result depends only on values after the output norm, and is 0 for a model that copies its input.
    `stream_norms` measures inside the model.
    """
    inputs = unit_vectors(50, length, dim, generator=Generator().manual_seed(0)).float()
    with _measuring(model) as run:
        norms = run(inputs).double().norm(dim=-1)
    return (norms.mean(0) - 1).abs().mean().item()


def stream_norms(states: Sequence[Any]) -> list[float]:
    """Return the norm of the residual state by depth: the mean over tokens of |state_l| / |state_0| for each state l.

    states: pytrees of tensors (batch, seq, ...), the first after the expansion, then one after each sublayer. A norm
    is over all tensors, streams and features of a token.
    """
    rows = ([leaf.detach().flatten(2).double() for leaf in tree_leaves(state)] for state in states)
    norms = [torch.cat(row, -1).norm(dim=-1) for row in rows]
    return [(norm / norms[0]).mean().item() for norm in norms]


@contextmanager
def _measuring(model: Predict) -> Iterator[Predict]:
    """Yield a function that runs the model on the device of its parameters and returns its outputs on the CPU."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None

    def run(inputs: Tensor) -> Tensor:
        return model(inputs if parameter is None else inputs.to(parameter.device, parameter.dtype)).cpu()

    with evaluating(model) if isinstance(model, nn.Module) else torch.no_grad():
        yield run
