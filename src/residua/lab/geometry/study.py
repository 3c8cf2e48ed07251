"""Train one model on one task, by the recipe of arXiv 2605.06729, and measure the result."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from residua.lab.geometry import measure
from residua.lab.geometry.models import Architecture, match
from residua.lab.geometry.operators import Gates, operator
from residua.lab.geometry.tasks import Data, Task, task
from residua.lab.jobs.pool import Job
from residua.lab.records.jsonlines import finite
from residua.lab.training import TrainConfig
from residua.lab.training.step import Step

REPORT_STEPS = 10  # steps between two checks of the loss, because each makes the host wait for the GPU
StepReport = Callable[[int], None]


@dataclass(frozen=True)
class Settings:
    """Sizes and recipe of a study, the same for all its models. The defaults are the published ones.

    dim, layers, heads    sizes of the plain residual; all models match its number of parameters
    features              features of an input, fewer than `dim`, because the last norm removes a direction; None: as
                          published for the task
    length                inputs of a trajectory; None: as published for the task
    num_train, num_val    trajectories; None: as published for the task
    lr, final_lr          the peak learning rate, reached linearly after `warmup` steps, and that at the end of the
                          cosine
    weight_decay          weight decay of linear maps and of the positions. The published code decays every parameter
                          with two or more axes; a scheme's mixing logits and filters need not be small
    online_trajectories   the number of trajectories scored online, at every `online_stride`-th position (see `measure`)
    """

    steps: int = 2000
    batch_size: int = 64
    lr: float = 1e-3
    final_lr: float = 1e-4
    warmup: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    dim: int = 128
    layers: int = 9
    heads: int = 4
    features: int | None = None
    length: int | None = None
    num_train: int | None = None
    num_val: int | None = None
    evaluate_every: int = 100
    online_trajectories: int = 64
    online_stride: int = 4

    def task(self, name: str) -> Task:
        """Return the task `name` at the sizes of this study. Raises InputError for an unknown name.

        The reflection always has a single position and few vectors, which define it.
        """
        published = task(name)
        sizes = {"dim": self.features}
        if name != "reflection":
            sizes |= {key: getattr(self, key) for key in ("length", "num_train", "num_val")}
        return replace(published, **{key: value for key, value in sizes.items() if value is not None})

    @property
    def training(self) -> TrainConfig:
        """The settings of a training step, except the learning rate."""
        names = ("lr", "beta1", "beta2", "weight_decay", "clip")
        return TrainConfig(**{name: getattr(self, name) for name in names})

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step 1, 2, ..., `steps`."""
        warmup = min(self.warmup, self.steps // 2)
        if step <= warmup:
            return self.lr * step / warmup
        progress = (step - warmup) / (self.steps - warmup)
        return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


FULL = Settings()
# A 12th of the parameters, with shorter trajectories of fewer features: a hundred runs in 20 minutes on two cores.
QUICK = Settings(
    steps=900,
    batch_size=16,
    lr=2e-3,
    final_lr=2e-4,
    warmup=50,
    dim=64,
    layers=3,
    features=16,
    length=32,
    num_train=4000,
    num_val=256,
    online_stride=1,
)


@dataclass(frozen=True)
class OperatorSettings:
    """The published recipe of the operators: AdamW without a schedule."""

    steps: int = 2000
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.01
    num_train: int = 500
    evaluate_every: int = 100
    training: ClassVar[TrainConfig] = TrainConfig(clip=0.0)

    def learning_rate(self, step: int) -> float:
        return self.lr


def job(model: str, task_name: str, seed: int, settings: Settings, device: torch.device) -> Job:
    """Return the job for one model, task and seed. Raises InputError if they do not exist or do not fit."""
    sized = settings.task(task_name)
    sizes = {"dim": settings.dim, "layers": settings.layers, "heads": settings.heads}
    architecture = match(model, features=sized.dim, length=sized.length, **sizes)
    arguments = architecture, sized, seed, settings, str(device)
    return Job(f"{task_name}+{model}+seed{seed}", train, arguments, settings.steps, architecture.row.cost)


def operator_job(name: str, seed: int, settings: OperatorSettings) -> Job:
    """Return the job for one operator and seed on the reflection. Raises InputError for an unknown name."""
    key = f"reflection+{name}+{settings.num_train}+seed{seed}"
    return Job(key, train_operator, (name, seed, settings), settings.steps, operator(name).cost)


def train(
    architecture: Architecture,
    task: Task,
    seed: int,
    settings: Settings,
    device: str,
    *,
    place: Path | None = None,
    report: StepReport = lambda step: None,
) -> dict[str, Any]:
    """Train a model and return its record (see `report`).

    The record depends only on the arguments, up to the order of sums in a GPU's kernels. A run whose loss is not finite
    ends early. At the quick sizes a run takes seconds, so it keeps no state in `place`.
    """
    data = Data(*(part.to(device) for part in task.data()))
    model = _drawn(seed, architecture.build).to(device)

    def evaluate() -> dict[str, float]:
        total, gates = 0.0, {}
        for inputs, targets in zip(*(part.split(measure.BATCH) for part in (data.val_inputs, data.val_targets))):
            coefficients: list[Any] = []
            total += F.mse_loss(model(inputs, coefficients=coefficients), targets, reduction="sum").item()
            gates = gates or _gate_means(coefficients)
        return {"loss": total / data.val_targets.numel(), **gates}

    fit = _fit(model, data, settings, lambda step: Generator().manual_seed(seed * 1_000_003 + step), evaluate, report)
    record = {
        **fit.record(task.name, architecture.name, architecture.name, seed),
        **(_measure(model, task, data, settings) if fit.converges else _NOTHING),
        "parameters": architecture.parameters,
        "steps_done": fit.steps,
        "architecture": architecture.describe(),
        "data": asdict(task),
        "settings": asdict(settings),
    }
    if task.name == "reflection":
        record |= {"num_train": task.num_train, "controls": {}} | {gate: fit.last(gate) for gate in Gates._fields}
    return record


def train_operator(
    name: str,
    seed: int,
    settings: OperatorSettings,
    *,
    place: Path | None = None,
    report: StepReport = lambda step: None,
) -> dict[str, Any]:
    """Train the operator `name` on the reflection and return its record, as `train` does."""
    row = operator(name)
    label = row.label
    if settings.num_train != OperatorSettings.num_train:
        label += f", {settings.num_train} vectors"
    data = Data(*(part.squeeze(1) for part in replace(task("reflection"), num_train=settings.num_train).data()))
    model = _drawn(seed, lambda: row.build(**row.options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    batches = Generator().manual_seed(seed)

    def evaluate() -> dict[str, float]:
        coefficients: list[Gates] = []
        predictions = model(data.val_inputs, coefficients=coefficients)
        gates = coefficients[0]._asdict() if coefficients else {}
        return {
            "loss": F.mse_loss(predictions, data.val_targets).item(),
            "cosine": F.cosine_similarity(predictions, data.val_targets, dim=-1).mean().item(),
            **{gate: value[:100].mean().item() for gate, value in gates.items() if value is not None},
        }

    fit = _fit(model, data, settings, lambda step: batches, evaluate, report, optimizer=optimizer, before=True)
    return {
        **fit.record("reflection", name.partition(":")[0], label, seed),
        **{score: fit.last(score) for score in ("loss", "cosine", *Gates._fields)},
        "causal": None,
        "causality_change": None,
        "cosines": fit.curves["cosine"],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "num_train": settings.num_train,
        "controls": dict(row.options) if row.is_control else {},
        "settings": asdict(settings),
    }


class _Fit(NamedTuple):
    """The result of a training: its steps, whether all losses were finite, and curves [[step, value], ...] by score."""

    steps: int
    converges: bool
    seconds: float
    curves: dict[str, list[list[Any]]]

    def last(self, score: str) -> float | None:
        """Return the last value of a score; None if the model has no such score, or diverged."""
        return self.curves[score][-1][1] if self.converges and score in self.curves else None

    def record(self, task: str, model: str, label: str, seed: int) -> dict[str, Any]:
        """Return the fields of a record that all runs have."""
        return {
            "kind": "run",
            "task": task,
            "model": model,
            "label": label,
            "seed": seed,
            "best_loss": min((loss for _, loss in self.curves.get("loss", []) if loss is not None), default=None),
            "diverged": not self.converges,
            "curve": self.curves.get("loss", []),
            "gates": {gate: self.curves[gate] for gate in Gates._fields if gate in self.curves},
            "seconds": self.seconds,
        }


def _loss(model: Callable[..., Tensor], inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the mean squared error with the penalty of the connections, and the penalty."""
    coefficients: list[Any] = []
    error = F.mse_loss(model(inputs, coefficients=coefficients), targets)
    penalty = model.penalty(coefficients)
    return error if penalty is None else error + penalty, penalty


def _fit(
    model: nn.Module,
    data: Data,
    settings: Settings | OperatorSettings,
    generator: Callable[[int], Generator],
    evaluate: Callable[[], dict[str, float]],
    report: StepReport,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    before: bool = False,
) -> _Fit:
    """Train, and stop early if a loss or a gradient is not finite. before: whether to evaluate at step 0 too."""
    curves: dict[str, list[list[Any]]] = {}

    def evaluated(step: int) -> bool:
        with torch.no_grad():
            scores = evaluate()
        for score, value in scores.items():
            curves.setdefault(score, []).append([step, finite(value)])
        return math.isfinite(scores["loss"])

    def batch(index: int) -> tuple[Tensor, ...]:
        rows = torch.randint(len(data.train_inputs), (settings.batch_size,), generator=generator(index + 1))
        return tuple(part[rows.to(part.device)] for part in (data.train_inputs, data.train_targets))

    report(0)
    if before:
        evaluated(0)
    take_step = Step(model, batch, settings.training, data.train_inputs.device, optimizer=optimizer, loss=_loss)
    started = time.monotonic()
    step, converges = 0, True
    while converges and step < settings.steps:
        step += 1
        for group in take_step.optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        take_step(step)
        last = step == settings.steps
        if last or step % REPORT_STEPS == 0:
            converges = not take_step.finite.failed
            report(step)
        if converges and (last or step % settings.evaluate_every == 0):
            converges = evaluated(step)
    return _Fit(step, converges, time.monotonic() - started, curves)


def _drawn(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return build()


def _gate_means(coefficients: list[Any]) -> dict[str, float]:
    """Return the mean of each gate that the connections of a model have."""
    values = {gate: [getattr(part, gate, None) for part in coefficients] for gate in Gates._fields}
    means = {gate: [part.mean().item() for part in parts if part is not None] for gate, parts in values.items()}
    return {gate: sum(parts) / len(parts) for gate, parts in means.items() if parts}


# The fields of all measurements, without values: for a model that diverged, and for a task with a single position.
_NOTHING: dict[str, Any] = dict.fromkeys(
    (*measure.SquaredErrors._fields, *measure.Causality._fields, "position0_loss", "norm_deviation", "stream_norms")
)


def _measure(model: nn.Module, task: Task, data: Data, settings: Settings) -> dict[str, Any]:
    """Measure a trained model whose outputs are finite."""
    states: list[Tensor] = []
    with torch.no_grad():
        model(data.val_inputs[:64], states=states)
        norms = measure.stream_norms(states)
        if task.length == 1:  # a single position has no later inputs and no prefixes
            predictions = model(data.val_inputs)
            loss = F.mse_loss(predictions, data.val_targets).item()
            cosine = F.cosine_similarity(predictions, data.val_targets, dim=-1).mean().item()
            return _NOTHING | {"loss": loss, "cosine": cosine, "stream_norms": norms}
    data = Data(*(part.cpu() for part in data))  # scores are summed on the CPU
    sample = {"trajectories": settings.online_trajectories, "stride": settings.online_stride}
    scores = measure.full_and_online(model, data.val_inputs, data.val_targets, **sample)
    return {
        **scores._asdict(),
        **measure.causality(model, task.dim, task.length)._asdict(),
        **(measure.position0(model, data)._asdict() if task.name == "gyroscope" else {}),
        "position0_loss": scores.by_position[0],
        "norm_deviation": measure.norm_deviation(model, task.dim, length=min(100, task.length)),
        "stream_norms": norms,
    }
