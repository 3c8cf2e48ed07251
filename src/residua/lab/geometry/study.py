"""Train one model on one sequence task by the recipe of arXiv 2605.06729, and measure the result."""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.errors import require
from residua.lab.geometry.checkpoint import load_checkpoint, save_checkpoint
from residua.lab.geometry.measure import causality, full_and_online, norm_deviation, position0, stream_norms
from residua.lab.geometry.models import Architecture, Sizes, match
from residua.lab.geometry.tasks import Data, Task, task
from residua.records.jobs import Job
from residua.records.jsonlines import finite

REPORT_STEPS = 10  # between two looks at the loss, which make a GPU wait
CHECKPOINT_SECONDS = 10.0
GATES = ("gamma", "beta")


@dataclass(frozen=True)
class Settings:
    """Sizes and recipe of a study, the same for all its models. The defaults are the published ones.

    dim, layers, heads    of the plain residual, which all models match in parameters
    features              of an input, fewer than `dim`, because the last norm takes a direction away, and with it what
                          outputs could say along it; None: as published for the task
    length                inputs of a trajectory; None: as published for the task
    num_train, num_val    trajectories; None: as published for the task
    lr, final_lr          the peak, reached linearly after `warmup` steps, and the end of the cosine
    weight_decay          of the weights of linear maps and of the positions. The published code decays every parameter
                          with two axes or more; a scheme's mixing logits and filters have no reason to be small
    online_trajectories   how many are scored online, at every `online_stride`-th position (see `measure`)
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

    def __post_init__(self) -> None:
        whole = ("steps", "batch_size", "dim", "layers", "heads", "evaluate_every", "online_stride")
        for name in whole:
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        require(self.dim % self.heads == 0, "dim", f"a multiple of the {self.heads} attention heads", self.dim)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.dim, self.layers, self.heads)

    def task(self, name: str) -> Task:
        """Return the task `name` in the sizes of this study. Raises InputError for an unknown one.

        The reflection keeps its single position and its few vectors, which are what it asks about.
        """
        chosen = task(name)
        changed = {"dim": self.features}
        if name != "reflection":
            changed |= {key: getattr(self, key) for key in ("length", "num_train", "num_val")}
        return replace(chosen, **{key: value for key, value in changed.items() if value is not None})

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step 1, 2, ..., `steps`."""
        warmup = min(self.warmup, self.steps // 2)
        if step <= warmup:
            return self.lr * step / warmup
        progress = (step - warmup) / (self.steps - warmup)
        return self.final_lr + (self.lr - self.final_lr) * (1 + math.cos(math.pi * progress)) / 2


FULL = Settings()
# A 12th of the parameters on shorter trajectories of fewer features: a hundred runs in 20 minutes on two cores.
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


def job(model: str, task_name: str, seed: int, settings: Settings, device: torch.device) -> Job:
    """Describe the run of one model, task and seed. Raises InputError where they do not exist or fit."""
    chosen = settings.task(task_name)
    architecture = match(model, features=chosen.dim, length=chosen.length, sizes=settings.sizes)
    return Job(
        key=f"{task_name}+{model}+seed{seed}",
        function=train,
        arguments=(architecture, chosen, seed, settings, str(device)),
        steps=settings.steps,
        cost=architecture.row.cost,
    )


def train(
    architecture: Architecture,
    task: Task,
    seed: int,
    settings: Settings,
    device: str,
    *,
    place: Path | None = None,
    report: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train a model and return its record (see `report`).

    Deterministic in its arguments, up to the order of sums in a GPU's kernels. Where the file `place` holds a
    checkpoint, the run resumes there and ends as if it had never stopped. A run whose loss is not finite ends early.
    """
    data = _data(task, device)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture.build()
    model.to(device)
    optimizer = _optimizer(model, settings)
    step, curve, gates, seconds = 0, [], {}, 0.0
    if place is not None and place.exists():
        saved = load_checkpoint(place, model, optimizer)
        step, curve, gates, seconds = saved["step"], saved["curve"], saved["gates"], saved["seconds"]

    report(step)
    started = time.monotonic() - seconds
    last_saved = time.monotonic()
    good = True
    while step < settings.steps and good:
        step += 1
        loss = _step(model, optimizer, data, seed, step, settings)
        last = step == settings.steps
        if step % REPORT_STEPS == 0 or last:
            good = math.isfinite(loss.item())
            report(step)
        if good and (step % settings.evaluate_every == 0 or last):
            _evaluate(model, data, step, curve, gates)
            good = curve[-1][1] is not None
        if place is not None and step % REPORT_STEPS == 0 and good and not last:
            now = time.monotonic()
            if now - last_saved >= CHECKPOINT_SECONDS:
                save_checkpoint(place, model, optimizer, step=step, curve=curve, gates=gates, seconds=now - started)
                last_saved = now
    seconds = time.monotonic() - started
    record = {
        "kind": "run",
        "task": task.name,
        "model": architecture.name,
        "label": architecture.name,
        "seed": seed,
        "parameters": architecture.parameters,
        **(_measure(model, task, data, settings) if good else _NOTHING),
        "best_loss": min((loss for _, loss in curve if loss is not None), default=None),
        "diverged": not good,
        "steps_done": step,
        "curve": curve,
        "gates": gates,
        "seconds": seconds,
        "architecture": architecture.describe(),
        "data": asdict(task),
        "settings": asdict(settings),
    }
    if task.name == "reflection":
        record |= {"num_train": task.num_train, "controls": {}}
        record |= {gate: gates[gate][-1][1] if gate in gates else None for gate in ("beta", "gamma")}
    return record


@lru_cache(maxsize=1)
def _data(task: Task, device: str) -> Data:
    return Data(*(part.to(device) for part in task.data()))


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.AdamW:
    decayed = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decayed |= {id(model.positions)} if hasattr(model, "positions") else set()
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if id(p) in decayed], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=1e-8,
        fused=True,
    )


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, data: Data, seed: int, step: int, settings: Settings
) -> Tensor:
    """Do one update; return its loss. The batch follows from seed and step alone, so that there is no state to keep."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    chosen = torch.randint(len(data.train_inputs), (settings.batch_size,), generator=generator)
    chosen = chosen.to(data.train_inputs.device)
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate(step)
    coefficients: list[Any] = []
    loss = F.mse_loss(model(data.train_inputs[chosen], coefficients=coefficients), data.train_targets[chosen])
    penalty = model.penalty(coefficients)
    optimizer.zero_grad()
    (loss if penalty is None else loss + penalty).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    return loss.detach()


@torch.no_grad()
def _evaluate(model: nn.Module, data: Data, step: int, curve: list, gates: dict[str, list]) -> None:
    """Append the validation loss to `curve`, and the means of the model's gates to `gates`."""
    total, found = 0.0, {}
    for first in range(0, len(data.val_inputs), 256):
        coefficients: list[Any] = []
        inputs, targets = data.val_inputs[first : first + 256], data.val_targets[first : first + 256]
        total += F.mse_loss(model(inputs, coefficients=coefficients), targets, reduction="sum").item()
        if first == 0:
            for name in GATES:
                values = [getattr(one, name, None) for one in coefficients]
                values = [value.mean().item() for value in values if value is not None]
                if values:
                    found[name] = sum(values) / len(values)
    curve.append([step, finite(total / data.val_targets.numel())])
    for name, value in found.items():
        gates.setdefault(name, []).append([step, finite(value)])


_NOTHING: dict[str, Any] = dict.fromkeys(
    (
        *("loss", "online_loss", "online_difference", "online_difference_error", "by_position", "online_by_position"),
        *("causal", "causality_change", "position0_loss", "norm_deviation", "stream_norms"),
    )
)


def _measure(model: nn.Module, task: Task, data: Data, settings: Settings) -> dict[str, Any]:
    """Measure a trained model whose outputs are finite."""
    states: list[Tensor] = []
    with torch.no_grad():
        model(data.val_inputs[:64], states=states)
        if task.length == 1:  # nothing comes before or after: no order to keep, no prefix to score
            predicted = model(data.val_inputs)
            return _NOTHING | {
                "loss": F.mse_loss(predicted, data.val_targets).item(),
                "cosine": F.cosine_similarity(predicted, data.val_targets, dim=-1).mean().item(),
                "stream_norms": stream_norms(states) if states else None,
            }
    data = Data(*(part.cpu() for part in data))  # scores are summed there, wherever the model is
    seen = causality(model, task.dim, task.length)
    scores = full_and_online(
        model,
        data.val_inputs,
        data.val_targets,
        trajectories=settings.online_trajectories,
        stride=min(settings.online_stride, task.length),
    )
    found = {
        "loss": scores.full,
        "online_loss": scores.online,
        "online_difference": scores.difference,
        "online_difference_error": scores.difference_error,
        "by_position": scores.by_position,
        "online_by_position": [list(row) for row in scores.online_by_position],
        "causal": seen.causal,
        "causality_change": seen.relative,
        "position0_loss": scores.by_position[0],
        "norm_deviation": norm_deviation(model, task.dim, length=min(100, task.length)),
        "stream_norms": stream_norms(states) if states else None,
    }
    if task.name == "gyroscope":
        first = position0(model, data)
        found |= {"position0_leak": first.leak, "position0_floor": first.floor}
        found |= {"position0_difference": first.difference, "position0_difference_error": first.difference_error}
    return found
