"""Time the training step of a language model under every scheme, relative to the plain residual in the same run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from residua.conversion.convert_model import convert
from residua.errors import RunError, require
from residua.lab.cost.settings import (
    BASELINE,
    Precision,
    Settings,
    expect_at_least,
    in_float64,
    llama,
    many_graphs,
)
from residua.lab.cost.timing import Timing, compare
from residua.records.provenance import circumstances
from residua.records.threads import threads

Base = Literal["residua", "llama"]


class Errors(NamedTuple):
    """Relative errors of a step against its float64 copy: of the loss, and of the worst gradient."""

    loss: float
    gradient: float


# Several times the effect of rounding on models of the default size, far below that of a wrong term.
TOLERANCES: Mapping[Precision, Errors] = {"float32": Errors(1e-5, 1e-4), "bfloat16": Errors(1e-3, 0.2)}
CHECKED_TOKENS = 4096  # at once


@dataclass(frozen=True)
class ModelSettings(Settings):
    """The models to measure, and how (`Settings`).

    sequence_length, batch_size   a batch of random tokens
    precision      "bfloat16": autocast around the forward pass, as in training; weights stay in float32
    base           "llama": a Llama of transformers as `residua.convert` makes it, in place of our model; "residual"
                   is then the Llama itself
    """

    base: Base = "residua"

    sequence_length: int = 256
    batch_size: int = 2

    def __post_init__(self):
        expect_at_least(1, self, "sequence_length", "batch_size")
        require(self.base in get_args(Base), "base", " or ".join(get_args(Base)), self.base)
        if self.base == "llama":
            require(self.state_dtype is None, "state_dtype", "None with base='llama'", self.state_dtype)
        super().__post_init__()

    def build(self, preset: str) -> Any:
        if self.base == "residua":
            return super().build(preset)
        model = llama(self.config(preset))
        if preset != BASELINE:
            convert(model, preset, start="fresh")
        return model

    @property
    def positions(self) -> int:
        return self.sequence_length

    @property
    def tolerances(self) -> Errors:
        return TOLERANCES["bfloat16" if "bfloat16" in (self.precision, self.state_dtype) else "float32"]


class TrainingStep:
    """The model of one preset; a call runs one training step: forward, backward, fused AdamW."""

    def __init__(self, preset: str, settings: ModelSettings):
        self.preset = preset
        self.precision: Precision = settings.precision
        self.tolerances = settings.tolerances
        self.device = torch.device(settings.device)
        model, tokens = settings.model(preset, settings.batch_size, settings.sequence_length + 1)
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


@dataclass(frozen=True)
class ModelResult:
    """The timing of all presets, and the parameter count and errors of each."""

    settings: ModelSettings
    timing: Timing
    parameters: Mapping[str, int]
    errors: Mapping[str, Errors]
    circumstances: Mapping[str, Any]

    def tokens_per_second(self, preset: str) -> float:
        return self.settings.batch_size * self.settings.sequence_length / self.timing.median_seconds(preset)

    def records(self) -> list[dict[str, Any]]:
        """Return one complete record per preset: results, every round, settings and circumstances."""
        return [
            {
                "benchmark": "models",
                "preset": preset,
                **self.timing.record(preset),
                "median_seconds": self.timing.median_seconds(preset),
                "tokens_per_second": self.tokens_per_second(preset),
                "parameters": self.parameters[preset],
                "errors": self.errors[preset]._asdict(),
                "clock": self.settings.clock.__name__,
                "settings": asdict(self.settings),
                **self.circumstances,
            }
            for preset in self.timing.seconds
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and the rows of the table, as text."""
        header = ["preset", "ms per step", f"ratio to {self.timing.baseline}", "tokens/s", "parameters"]
        rows = [
            [
                preset,
                f"{1e3 * self.timing.median_seconds(preset):.2f}",
                f"{self.timing.ratio(preset):.3f}",
                f"{self.tokens_per_second(preset):,.0f}",
                f"{self.parameters[preset]:,}",
            ]
            for preset in self.timing.seconds
        ]
        return header, rows


def benchmark(
    settings: ModelSettings,
    *,
    advance: Callable[[], None] = lambda: None,
    keep: Callable[[Mapping[str, Any]], None] = lambda record: None,
) -> ModelResult:
    """Check the training step of every preset against float64, then time all of them in turns.

    `advance` is called after every timed or warm-up step, `len(presets) * (warmup + rounds)` times; `keep` with every
    record once it is complete, or when the timing ends early, with the rounds that all presets have completed.

    Raises:
        RunError: a step computes something wrong, or its last loss is not finite.
    """
    with threads(settings.threads), many_graphs(len(settings.presets)):
        steps = {preset: TrainingStep(preset, settings) for preset in settings.presets}
        errors = {preset: step.check() for preset, step in steps.items()}
        conditions = circumstances(torch.device(settings.device))
        parameters = {preset: step.model.num_parameters() for preset, step in steps.items()}
        seconds: dict[str, list[float]] = {}
        rounds = {"rounds": settings.rounds, "warmup": settings.warmup}
        try:
            compare(steps, BASELINE, **rounds, clock=settings.clock, advance=advance, seconds=seconds)
        finally:
            complete = min(map(len, seconds.values()), default=0)
            timing = Timing(BASELINE, {preset: tuple(times[:complete]) for preset, times in seconds.items()})
            result = ModelResult(settings, timing, parameters, errors, conditions)
            failures = [preset for preset, step in steps.items() if not math.isfinite(step.last_loss.item())]
            for record in result.records() if complete and not failures else ():
                keep(record)
        for preset in failures:
            raise RunError(
                f"{preset} must have a finite loss after the last step, got {steps[preset].last_loss.item()}"
            )
    return result


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
