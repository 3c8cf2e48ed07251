"""Time the training step of a language model under every scheme, relative to the plain residual in the same run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua.errors import RunError
from residua.lab.cost.models import Measured, in_float64, many_graphs, model_and_tokens
from residua.lab.cost.settings import BASELINE, ModelSettings, Precision
from residua.lab.cost.timing import Quartiles, compare
from residua.records.provenance import circumstances
from residua.records.threads import threads


class Errors(NamedTuple):
    """Relative errors of a step against its float64 copy: of the loss, and of the worst gradient."""

    loss: float
    gradient: float


# Several times the effect of rounding on models of the default size, far below that of a wrong term.
TOLERANCES: Mapping[Precision, Errors] = {"float32": Errors(1e-5, 1e-4), "bfloat16": Errors(1e-3, 0.2)}
CHECKED_TOKENS = 4096  # at once


class TrainingStep:
    """The model of one preset; a call runs one training step: forward, backward, fused AdamW."""

    def __init__(self, preset: str, settings: ModelSettings):
        self.preset = preset
        self.precision: Precision = settings.precision
        narrow = "bfloat16" in (settings.precision, settings.state_dtype)
        self.tolerances = TOLERANCES["bfloat16" if narrow else "float32"]
        self.device = torch.device(settings.device)
        model, tokens = model_and_tokens(settings, preset, settings.batch_size, settings.sequence_length + 1)
        tokens = tokens.to(self.device)
        self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model = model.to(self.device).train()
        self.forward = torch.compile(self.model, fullgraph=True, dynamic=False) if settings.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.last_loss = torch.zeros((), device=self.device)

    def __call__(self) -> None:
        self.last_loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> Errors:
        """Compare loss and gradients with a float64 copy without kernels, compiler and autocast; return the errors.

        Raises:
            RunError: an error larger than `TOLERANCES` allows, or not finite.
        """
        reference = in_float64(self.model)
        expected = torch.zeros((), dtype=torch.float64, device=self.device)
        # A few sequences at a time, as float64 takes two or four times the memory. Gradients add up.
        part = max(1, CHECKED_TOKENS // self.inputs.shape[1])
        for inputs, labels in zip(self.inputs.split(part), self.labels.split(part)):
            share = self._loss(reference, inputs, labels) * (len(inputs) / len(self.inputs))
            share.backward()
            expected += share.detach()
        loss = self._backward()
        errors = _errors(loss, expected, self.model, reference)
        self.optimizer.zero_grad()
        for name, error, allowed in zip(Errors._fields, errors, self.tolerances):
            if not error <= allowed:  # also if the error is NaN
                raise RunError(
                    f"{self.preset} must have the {name} within {allowed:g} of a float64 copy's, relatively, got "
                    f"{error:.2g} (loss {loss.item():.6f} and {expected.item():.6f}); a wrong model has no speed"
                )
        return errors

    def loss(self) -> Tensor:
        """Run the forward pass and return the loss."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            return self._loss(self.forward, self.inputs, self.labels)

    def _backward(self) -> Tensor:
        """Run forward and backward; return the loss, detached."""
        loss = self.loss()
        loss.backward()
        return loss.detach()

    @staticmethod
    def _loss(forward: Callable[..., Any], inputs: Tensor, labels: Tensor) -> Tensor:
        return forward(input_ids=inputs, labels=labels, shift_labels=labels).loss


COLUMNS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "preset": lambda row: row["preset"],
    "ms per step": lambda row: f"{1e3 * row['median_seconds']:.2f}",
    f"ratio to {BASELINE}": lambda row: f"{Quartiles(**row['ratio']):.3f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "parameters": lambda row: f"{row['parameters']:,}",
}


def benchmark(
    settings: ModelSettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> Measured:
    """Check the training step of every preset against float64, then time all of them in turns.

    `advance` is called after every timed or warm-up step, `len(presets) * (warmup + rounds)` times; `keep` with every
    record at the end.

    Raises:
        RunError: a step computes something wrong, or its last loss is not finite.
    """
    with threads(settings.threads), many_graphs(len(settings.presets)):
        steps = {preset: TrainingStep(preset, settings) for preset in settings.presets}
        errors = {preset: step.check() for preset, step in steps.items()}
        conditions = circumstances(torch.device(settings.device))
        rounds = {"rounds": settings.rounds, "warmup": settings.warmup}
        timing = compare(steps, BASELINE, **rounds, clock=settings.clock, advance=advance)
    for preset, step in steps.items():
        if not math.isfinite(loss := step.last_loss.item()):
            raise RunError(f"{preset} must have a finite loss after the last step, got {loss}")
    records = [
        {
            "benchmark": "models",
            "preset": preset,
            **timing.record(preset),
            "median_seconds": timing.median_seconds(preset),
            "tokens_per_second": step.inputs.numel() / timing.median_seconds(preset),
            "parameters": step.model.num_parameters(),
            "errors": errors[preset]._asdict(),
            "clock": settings.clock.__name__,
            "settings": asdict(settings),
            **conditions,
        }
        for preset, step in steps.items()
    ]
    for record in records:
        keep(record)
    return Measured(records, COLUMNS)


def _errors(loss: Tensor, expected: Tensor, model: torch.nn.Module, reference: torch.nn.Module) -> Errors:
    """|loss - loss'| / |loss'|, and the largest |g - g'| / max(|g'|, |all gradients'| / 1000) of a parameter.

    The floor is for gradients that consist only of rounding.
    """
    pairs = [
        (weight.grad.double(), exact.grad)
        for weight, exact in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    total = math.sqrt(sum(exact.square().sum().item() for _, exact in pairs))
    worst = torch.stack([(gradient - exact).norm() / exact.norm().clamp_min(total / 1000) for gradient, exact in pairs])
    return Errors(((loss.double() - expected).abs() / expected.abs()).item(), worst.max().item())
