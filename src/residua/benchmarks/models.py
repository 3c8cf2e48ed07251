"""The training step of a language model under every scheme, as a ratio to the plain residual's in the same run."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from residua.benchmarks.timing import Clock, Timing, compare, cuda_clock, process_clock, wall_clock
from residua.connections import PRESETS
from residua.errors import InputError, RunError
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.provenance import circumstances

BASELINE = "residual"
Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "bfloat16"]


class Errors(NamedTuple):
    """How far a step is from its float64 copy: the loss relatively, the gradient at its worst parameter (`_errors`)."""

    loss: float
    gradient: float


# Several times what rounding alone does to models of the default size; a wrong term does far more.
TOLERANCES: Mapping[Precision, Errors] = {"float32": Errors(1e-5, 1e-4), "bfloat16": Errors(1e-3, 0.2)}


@dataclass(frozen=True)
class ModelSettings:
    """What is measured, and how; the plain residual always takes part.

    presets        names in `residua.PRESETS`
    vocab_size, dim, layers, heads, head_dim, sequence_length, batch_size   the model and its batch of random tokens
    precision      "bfloat16": autocast around the forward pass, as in training; weights stay in float32
    compile        the whole model through `torch.compile`, as one graph
    rounds, warmup see `timing.compare`
    threads        of PyTorch on the CPU. With one, the CPU time of the process counts; with more, the time that passes

    Raises InputError where a value cannot be used.
    """

    presets: tuple[str, ...] = tuple(PRESETS)
    device: Device = "cpu"
    layers: int = 6
    dim: int = 384
    heads: int = 3
    head_dim: int = 128
    sequence_length: int = 256
    batch_size: int = 2
    vocab_size: int = 4096
    precision: Precision = "float32"
    compile: bool = False
    rounds: int = 9
    warmup: int = 2
    threads: int = 1
    seed: int = 0

    def __post_init__(self):
        object.__setattr__(self, "presets", tuple(dict.fromkeys([BASELINE, *self.presets])))
        for name in ("layers", "sequence_length", "batch_size", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.warmup < 0:
            raise InputError(f"warmup: expected at least 0, got {self.warmup}")
        for name, choices in (("device", get_args(Device)), ("precision", get_args(Precision))):
            if getattr(self, name) not in choices:
                raise InputError(f"{name}: expected {' or '.join(choices)}, got {getattr(self, name)!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise InputError("device: expected a machine with a CUDA device, found none; use cpu")
        for preset in self.presets:
            self.config(preset)

    def config(self, preset: str) -> ResiduaConfig:
        """The model of one preset. Raises InputError where there is no such preset or a size cannot be used."""
        try:
            return ResiduaConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.dim,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                head_dim=self.head_dim,
                max_position_embeddings=self.sequence_length,
                connection=preset,
            )
        except ValueError as error:
            raise InputError(str(error)) from error

    @property
    def clock(self) -> Clock:
        if self.device == "cuda":
            return cuda_clock
        return process_clock if self.threads == 1 else wall_clock


class TrainingStep:
    """The model of one preset; calling it does one training step: forward, backward, fused AdamW."""

    def __init__(self, preset: str, settings: ModelSettings):
        self.preset = preset
        self.precision: Precision = settings.precision
        self.device = torch.device(settings.device)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            tokens = torch.randint(settings.vocab_size, (settings.batch_size, settings.sequence_length + 1))
            model = ResiduaForCausalLM(settings.config(preset))
            with torch.no_grad():
                for parameter in model.parameters():
                    # Gates and filters start with many zeros, behind which a wrong term would hide from `check`.
                    parameter.add_(torch.randn_like(parameter), alpha=0.02)
        tokens = tokens.to(self.device)
        self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.model = model.to(self.device).train()
        self.forward = torch.compile(self.model, fullgraph=True, dynamic=False) if settings.compile else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        self.last_loss = torch.zeros((), device=self.device)

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def __call__(self) -> None:
        self.last_loss = self._backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self) -> Errors:
        """How far the loss and the gradient are from those of a float64 copy that is neither compiled nor autocast.

        Raises:
            RunError: further than `TOLERANCES` allows, or not finite.
        """
        reference = copy.deepcopy(self.model).double()
        expected = self._loss(reference)
        expected.backward()
        loss = self._backward()
        errors = _errors(loss, expected.detach(), self.model, reference)
        self.optimizer.zero_grad()
        for name, error, allowed in zip(Errors._fields, errors, TOLERANCES[self.precision]):
            if not error <= allowed:  # also where it is not a number
                raise RunError(
                    f"{self.preset}: expected the {name} within {allowed:g} of a float64 copy's, relatively, got "
                    f"{error:.2g} (loss {loss.item():.6f} and {expected.item():.6f}); a wrong model has no speed"
                )
        return errors

    def _backward(self) -> Tensor:
        """The loss, detached, with its gradient in the parameters."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bfloat16"):
            loss = self._loss(self.forward)
        loss.backward()
        return loss.detach()

    def _loss(self, forward: Callable[..., Any]) -> Tensor:
        return forward(input_ids=self.inputs, labels=self.labels, shift_labels=self.labels).loss


@dataclass(frozen=True)
class ModelResult:
    """The timing of all presets, and for each its size and what the check before found."""

    settings: ModelSettings
    timing: Timing
    parameters: Mapping[str, int]
    errors: Mapping[str, Errors]
    circumstances: Mapping[str, Any]

    def tokens_per_second(self, preset: str) -> float:
        return self.settings.batch_size * self.settings.sequence_length / self.timing.median_seconds(preset)

    def records(self) -> list[dict[str, Any]]:
        """One record for each preset, complete in itself: results, every round, settings and circumstances."""
        return [
            {
                "benchmark": "models",
                "preset": preset,
                "baseline": self.timing.baseline,
                "ratio": self.timing.ratio(preset)._asdict(),
                "median_seconds": self.timing.median_seconds(preset),
                "tokens_per_second": self.tokens_per_second(preset),
                "parameters": self.parameters[preset],
                "errors": self.errors[preset]._asdict(),
                "seconds": list(self.timing.seconds[preset]),
                "baseline_seconds": list(self.timing.seconds[self.timing.baseline]),
                "clock": self.settings.clock.__name__,
                "settings": asdict(self.settings),
                **self.circumstances,
            }
            for preset in self.timing.seconds
        ]

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The header and the rows of the table, as text."""
        header = ["preset", "ms per step", f"ratio to {self.timing.baseline}", "tokens/s", "parameters"]
        rows = []
        for preset in self.timing.seconds:
            ratio = self.timing.ratio(preset)
            rows.append(
                [
                    preset,
                    f"{1e3 * self.timing.median_seconds(preset):.2f}",
                    f"{ratio.median:.3f} [{ratio.lower:.3f}, {ratio.upper:.3f}]",
                    f"{self.tokens_per_second(preset):,.0f}",
                    f"{self.parameters[preset]:,}",
                ]
            )
        return header, rows


def benchmark(settings: ModelSettings, *, advance: Callable[[], None] = lambda: None) -> ModelResult:
    """Check the training step of every preset against float64, then time all of them in turns.

    `advance` is called after every timed or warm-up step, `len(presets) * (warmup + rounds)` times.

    Raises:
        RunError: a step computes something wrong, or its loss is no longer finite at the end.
    """
    with _threads(settings.threads), _many_graphs():
        steps = {preset: TrainingStep(preset, settings) for preset in settings.presets}
        errors = {preset: step.check() for preset, step in steps.items()}
        conditions = circumstances(torch.device(settings.device))
        timing = compare(
            steps, BASELINE, rounds=settings.rounds, warmup=settings.warmup, clock=settings.clock, advance=advance
        )
        for preset, step in steps.items():
            if not math.isfinite(step.last_loss.item()):
                raise RunError(f"{preset}: expected a finite loss after the last step, got {step.last_loss.item()}")
    parameters = {preset: step.parameters for preset, step in steps.items()}
    return ModelResult(settings, timing, parameters, errors, conditions)


def _errors(loss: Tensor, expected: Tensor, model: torch.nn.Module, reference: torch.nn.Module) -> Errors:
    """|loss - loss'| / |loss'|, and the largest |g - g'| / max(|g'|, |all gradients'| / 1000) of a parameter.

    The floor is there because rounding is all that is left of some gradients.
    """
    pairs = [
        (ours.grad.double(), theirs.grad)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
    ]
    total = math.sqrt(sum(theirs.square().sum().item() for _, theirs in pairs))
    worst = torch.stack([(ours - theirs).norm() / theirs.norm().clamp_min(total / 1000) for ours, theirs in pairs])
    return Errors(((loss.double() - expected).abs() / expected.abs()).item(), worst.max().item())


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _many_graphs() -> Iterator[None]:
    """Every preset is another graph of the same code, and `torch.compile` by itself gives up after a few of those."""
    with torch._dynamo.config.patch(recompile_limit=4 * len(PRESETS)):
        yield
