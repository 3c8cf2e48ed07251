"""Compare the loss and the gradients of a training step with a float64 copy: a wrong model has no speed."""

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from residua.errors import RunError
from residua.lab.cost.steps import MeasuredStep
from residua.lab.training import RunConfig
from residua.models import ResiduaForCausalLM


class Errors(NamedTuple):
    """Relative errors of a step against its float64 copy: of the loss, and of the worst gradient."""

    loss: float
    gradient: float


# Several times the effect of rounding on models of the default size, far below that of a wrong term.
TOLERANCES: Mapping[str, Errors] = {"float32": Errors(1e-5, 1e-4), "bfloat16": Errors(1e-3, 0.2)}
CHECKED_TOKENS = 4096  # at once


def check(config: RunConfig, model_config: PreTrainedConfig) -> Errors:
    """Compare loss and gradients of a run's step with those of the model's definitions in float64.

    Raises:
        RunError: an error larger than `TOLERANCES` allows, or not finite.
    """
    step = MeasuredStep(config, model_config)
    model, device = step.model, step.batch[0].device
    inputs, labels = step.batch
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        perturb(model)
    reference = in_float64(model)
    exact = torch.zeros((), dtype=torch.float64, device=device)
    # A few sequences at a time, as float64 takes two or four times the memory. Gradients add up.
    part = max(1, CHECKED_TOKENS // inputs.shape[1])
    for some, wanted in zip(inputs.split(part), labels.split(part)):
        share = reference(input_ids=some, labels=wanted, shift_labels=wanted).loss * (len(some) / len(inputs))
        share.backward()
        exact += share.detach()
    measured = step.loss()
    measured.backward()
    errors = _errors(measured.detach(), exact, model, reference)
    narrow = "bfloat16" in (config.train.precision, getattr(config.model, "state_dtype", None))
    for kind, error, allowed in zip(Errors._fields, errors, TOLERANCES["bfloat16" if narrow else "float32"]):
        if not error <= allowed:  # also if the error is NaN
            raise RunError(
                f"{config.model.connection} must have the {kind} within {allowed:g} of a float64 copy's, relatively, "
                f"got {error:.2g} (loss {measured.item():.6f} and {exact.item():.6f}); a wrong model has no speed"
            )
    return errors


def perturb(model: nn.Module) -> None:
    """Add noise to every parameter: gates and filters start with many zeros, which would hide a wrong term."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def in_float64(model: Any) -> Any:
    """Return a copy of a model that computes with the plain definitions, in float64 end to end."""
    if not isinstance(model, ResiduaForCausalLM):  # a Hugging Face model, perhaps converted
        return copy.deepcopy(model).double()
    config = copy.deepcopy(model.config)
    config.state_dtype = None
    if "implementation" in config.connection:
        config.connection = {**config.connection, "implementation": "reference"}
    with torch.random.fork_rng(devices=[]):
        reference = ResiduaForCausalLM(config)
    reference.load_state_dict(model.state_dict())
    return reference.to(model.device, torch.float64).train(model.training)


def _errors(loss: Tensor, exact_loss: Tensor, model: nn.Module, reference: nn.Module) -> Errors:
    """|loss - loss'| / |loss'|, and the largest |g - g'| / max(|g'|, |all gradients'| / 1000) of a parameter.

    The floor is for gradients that consist only of rounding.
    """
    pairs = [
        (weight.grad.double(), exact.grad)
        for weight, exact in zip(model.parameters(), reference.parameters(), strict=True)
        if weight.requires_grad
    ]
    total = math.sqrt(sum(exact.square().sum().item() for _, exact in pairs))
    worst = torch.stack([(gradient - exact).norm() / exact.norm().clamp_min(total / 1000) for gradient, exact in pairs])
    return Errors(((loss.double() - exact_loss).abs() / exact_loss.abs()).item(), worst.max().item())
