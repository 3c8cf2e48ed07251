"""Measure a model from outside: whether it sees the future, its error online, and norms.

A model here is a callable inputs (trajectories, length, dim) -> predictions of the same shape. Modules are measured in
eval mode and without gradients, on the device and in the dtype of their parameters, and are left as they were; data may
be anywhere.
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

Model = Callable[[Tensor], Tensor]

# A causal model computes its earlier outputs from the same numbers in the same order, equal to the bit. A few roundings
# are allowed for kernels that order their sums differently. In units of float64's epsilon.
ROUNDINGS = 64
# How many standard errors below the floor count as a leak: by chance in about 1 of 700 measurements.
LEAK_ERRORS = 3.0
BATCH = 256  # trajectories at once


class Causality(NamedTuple):
    """The effect of changing the last input on every earlier output: the largest change, and the same over max |y|."""

    change: float
    relative: float
    causal: bool


class Scores(NamedTuple):
    """Mean squared errors from full sequences and from prefixes (`online`).

    `full` and `by_position` cover all data. `difference` is online minus full over the trajectories and positions that
    were measured both ways, `difference_error` its standard error over trajectories (None for one trajectory), and
    `online` is full + difference: the mean error of predictions each made from its prefix, with the noise of choosing
    trajectories removed. `online_by_position` has rows (position, online, full) on the measured trajectories.
    """

    full: float
    online: float
    difference: float
    difference_error: float | None
    by_position: list[float]
    online_by_position: list[tuple[int, float, float]]


class Position0(NamedTuple):
    """Mean squared error at position 0 of the gyroscope, its standard error over trajectories, and the floor.

    `difference` is taken trajectory by trajectory against the best causal prediction E R x_0, which removes most of the
    noise; no causal model's is negative in expectation.
    """

    loss: float
    error: float
    floor: float
    difference: float
    difference_error: float
    leak: bool


def causality(model: Model, dim: int, length: int) -> Causality:
    """Change the last input of four sequences of random unit vectors, and nothing else; look at the outputs before it.

    A module is measured as a copy in float64, where roundings are far below any leak. A single position has nothing
    before it and is causal.
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
        raise ValueError("the model's outputs are not finite: causality cannot be measured")
    if length == 1:
        return Causality(0.0, 0.0, True)
    change, largest = (after - before).abs().max().item(), before.abs().max().item()
    relative = change / largest if largest else (math.inf if change else 0.0)
    bound = ROUNDINGS * torch.finfo(torch.float64).eps
    return Causality(change, relative, relative <= bound)


def full_and_online(
    model: Model,
    inputs: Tensor,
    targets: Tensor,
    *,
    trajectories: int | None = 64,
    stride: int = 1,
    batch: int = BATCH,
) -> Scores:
    """Compare the error of a model on whole sequences with its error when used online.

    Online, the prediction at t is made from inputs[:, : t + 1] alone, in a forward pass of its own, for the first
    `trajectories` of the data (None: all). With a `stride` above 1, all of the first `stride` positions are measured
    (errors change fastest there) and then every `stride`-th, each standing for those up to the next.
    """
    if inputs.shape != targets.shape or inputs.ndim != 3:
        shapes = f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
        raise ValueError(f"inputs and targets must have one shape (trajectories, length, dim), got {shapes}")
    if stride < 1 or (trajectories is not None and trajectories < 1) or batch < 1:
        given = f"stride {stride}, trajectories {trajectories}, batch {batch}"
        raise ValueError(f"stride, trajectories and batch must be at least 1, got {given}")
    inputs, targets = inputs.cpu(), targets.cpu()
    length = inputs.shape[1]
    sample = inputs[:trajectories], targets[:trajectories].double()
    positions, weights = _positions(length, stride)
    with _measuring(model) as run:
        full = torch.cat([run(x) for x in inputs.split(batch)]).double()
        online = torch.stack(
            [torch.cat([run(x)[:, -1] for x in sample[0][:, : t + 1].split(batch)]) for t in positions], dim=1
        ).double()
    errors = (full - targets).square().mean(-1)  # (trajectories, length)
    online_errors = (online - sample[1][:, positions]).square().mean(-1)  # (sample, positions)
    full_errors = errors[: len(sample[0]), positions]
    differences = (online_errors - full_errors) @ weights
    count = len(differences)
    difference = differences.mean().item()
    return Scores(
        full=errors.mean().item(),
        online=errors.mean().item() + difference,
        difference=difference,
        difference_error=differences.std().item() / math.sqrt(count) if count > 1 else None,
        by_position=errors.mean(0).tolist(),
        online_by_position=list(zip(positions, online_errors.mean(0).tolist(), full_errors.mean(0).tolist())),
    )


def position0(model: Model, data: Data) -> Position0:
    """Detect a leak on the gyroscope: x_0 alone cannot beat `references.causal_floor`.

    The model gets full sequences. It leaks when its error at position 0, trajectory by trajectory, is more than 3
    standard errors below the error of the best causal prediction. A model can leak unnoticed here: `causality` decides.
    """
    inputs, targets = data.val_inputs.cpu(), data.val_targets[:, 0].cpu().double()
    if len(inputs) < 2:
        raise ValueError(f"a standard error needs at least 2 validation trajectories, got {len(inputs)}")
    with _measuring(model) as run:
        first = torch.cat([run(x)[:, 0] for x in inputs.split(BATCH)]).double()
    errors = (first - targets).square().mean(-1)
    differences = errors - (expected_first_point(inputs.double()) - targets).square().mean(-1)
    root = math.sqrt(len(errors))
    difference, difference_error = differences.mean().item(), differences.std().item() / root
    return Position0(
        loss=errors.mean().item(),
        error=errors.std().item() / root,
        floor=causal_floor(inputs.shape[-1]),
        difference=difference,
        difference_error=difference_error,
        leak=difference < -LEAK_ERRORS * difference_error,
    )


def norm_deviation(model: Model, dim: int, *, length: int = 100) -> float:
    """Measure how far the outputs for 50 sequences of independent unit vectors are from unit norm, as published.

    N_t is the mean over sequences of ||y_t||, and the result the mean over t of |N_t - 1|: deviations of single
    outputs cancel in N_t. It sees only what follows the output norm, and is 0 for copying the input: `stream_norms`
    looks inside.
    """
    inputs = unit_vectors(50, length, dim, generator=Generator().manual_seed(0)).float()
    with _measuring(model) as run:
        norms = run(inputs).double().norm(dim=-1)
    return (norms.mean(0) - 1).abs().mean().item()


def stream_norms(states: Sequence[Any]) -> list[float]:
    """Return the norm of the residual state by depth: for each state, the mean over tokens of |state_l| / |state_0|.

    states: pytrees of tensors (batch, seq, ...), the first after the expansion, then one after each sublayer. The norm
    is over everything that a token has: all tensors, streams and features.
    """
    if not states:
        raise ValueError("there must be at least one state, got none")
    rows = ([leaf.detach().flatten(2).double() for leaf in tree_leaves(state)] for state in states)
    norms = [torch.cat(row, -1).norm(dim=-1) for row in rows]
    if not norms[0].all():
        raise ValueError("the first state is zero at some token, so that no norm is relative to it")
    return [(norm / norms[0]).mean().item() for norm in norms]


def _positions(length: int, stride: int) -> tuple[list[int], Tensor]:
    """Return the positions to measure, and the share of `length` that each stands for, float64: the shares sum to 1."""
    positions = [*range(min(stride, length)), *range(stride, length, stride)]
    ends = [*positions[1:], length]
    return positions, torch.tensor([end - at for at, end in zip(positions, ends)], dtype=torch.float64) / length


@contextmanager
def _measuring(model: Model) -> Iterator[Model]:
    """Run the model where its parameters are; check the shape of its outputs and move them to the CPU."""
    parameter = next(model.parameters(), None) if isinstance(model, nn.Module) else None

    def run(inputs: Tensor) -> Tensor:
        outputs = model(inputs if parameter is None else inputs.to(parameter.device, parameter.dtype))
        if outputs.shape != inputs.shape:
            expected, got = tuple(inputs.shape), tuple(outputs.shape)
            raise ValueError(f"a model must return predictions of its inputs' shape {expected}, got {got}")
        return outputs.cpu()

    with evaluating(model) if isinstance(model, nn.Module) else torch.no_grad():
        yield run
