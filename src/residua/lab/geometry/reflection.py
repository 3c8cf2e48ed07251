"""The reflection experiment of arXiv 2605.06729: learn y = -x on R^64 with one operator, without a network around it.

The published comparison has three operators: the pooled Householder ("DDL" there, without the delta write), the gated
mixture of rotation and reflection ("hybrid"), and a truncated Cayley map ("JPmHC"), whose start from I keeps it from
ever reaching the eigenvalue -1. The comparison leaves out, and this one adds: the exact rotation alone, the Cayley
map from its own start and exact, x + MLP(x), one linear map, and the hybrid from other gates and penalties.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.errors import InputError, did_you_mean, require
from residua.lab.geometry.tasks import task
from residua.ops import (
    cayley_apply,
    cayley_transform,
    gate_penalty,
    householder,
    hybrid,
    iterative_cayley,
    unit,
)
from residua.records.jobs import Job
from residua.records.jsonlines import finite

DIM, HIDDEN = 64, 128


class Result(NamedTuple):
    """predictions: (batch, dim); beta and gamma: (batch,), None where the operator has none."""

    prediction: Tensor
    beta: Tensor | None = None
    gamma: Tensor | None = None


def _network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, outputs))


class HouseholderToy(nn.Module):
    """(I - beta k k^T) x with k and beta = 2 sigmoid computed from x."""

    def __init__(self):
        super().__init__()
        self.k = _network(DIM)
        self.beta = _network(1)

    def forward(self, x: Tensor) -> Result:
        beta = 2 * self.beta(x).squeeze(-1).sigmoid()
        return Result(householder(x.unsqueeze(-1), unit(self.k(x)), beta).squeeze(-1), beta)


def _plane(u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return two orthogonal unit vectors that span the plane of u and v: the angle of the rotation is beta's alone."""
    u = unit(u)
    return u, unit(v - (u * v).sum(-1, keepdim=True) * u)


class CayleyToy(nn.Module):
    """Q x, the exact Cayley rotation of one plane, with u, v and beta = softplus computed from x; no reflection."""

    def __init__(self):
        super().__init__()
        self.u = _network(DIM)
        self.v = _network(DIM)
        self.beta = _network(1)

    def forward(self, x: Tensor) -> Result:
        beta = F.softplus(self.beta(x).squeeze(-1))
        return Result(cayley_apply(x.unsqueeze(-1), *_plane(self.u(x), self.v(x)), beta).squeeze(-1), beta)


class HybridToy(CayleyToy):
    """gamma Q x + (1 - gamma)(x - 2 k k^T x) with a gate gamma = sigmoid(w x + gate_bias), w = 0 at the start."""

    def __init__(self, gate_bias: float = -1.5):
        super().__init__()
        self.k = _network(DIM)
        self.gate = nn.Linear(DIM, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, gate_bias)

    def forward(self, x: Tensor) -> Result:
        beta = F.softplus(self.beta(x).squeeze(-1))
        gamma = self.gate(x).squeeze(-1).sigmoid()
        u, v = _plane(self.u(x), self.v(x))
        return Result(hybrid(x.unsqueeze(-1), u, v, beta, unit(self.k(x)), gamma).squeeze(-1), beta, gamma)


class SkewToy(nn.Module):
    """Y x, Y a Cayley map of a skew matrix W = S - S^T whose S is computed from x.

    mode: "identity", the iteration from Y = I as in the published experiment; "linear", from Y = I + alpha W as JPmHC
    defines it; "exact", a solve.
    """

    def __init__(self, mode: str = "identity", alpha: float = 0.1):
        super().__init__()
        self.s = _network(DIM * DIM)
        self.mode, self.alpha = mode, alpha

    def forward(self, x: Tensor) -> Result:
        s = self.s(x).unflatten(-1, (DIM, DIM))
        w = s - s.mT
        if self.mode == "exact":
            y = cayley_transform(w, self.alpha)
        else:
            y = iterative_cayley(w, self.alpha, steps=2, start=self.mode)
        return Result((y @ x.unsqueeze(-1)).squeeze(-1))


class AdditiveToy(nn.Module):
    """x + MLP(x)."""

    def __init__(self):
        super().__init__()
        self.mlp = _network(DIM)

    def forward(self, x: Tensor) -> Result:
        return Result(x + self.mlp(x))


class LinearToy(nn.Module):
    """One linear map."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Result:
        return Result(self.map(x))


class Toy(NamedTuple):
    """One row of the table: its label, how it is built, the weight of its gate penalty, and how long a step takes.

    `cost` is in units of the linear map's step; `controls` are what a control changes, {} for the rows themselves.
    """

    label: str
    build: Callable[[], nn.Module]
    penalty: float = 0.0
    cost: float = 1.0
    controls: Mapping[str, float] = {}


TOYS: dict[str, Toy] = {
    "householder": Toy("pooled Householder, published as DDL", HouseholderToy, cost=3),
    "hybrid": Toy("EDelta hybrid, gate from -1.5, penalty 0.5", HybridToy, penalty=0.5, cost=7),
    "jpmhc": Toy("truncated Cayley from Y = I, published as JPmHC", SkewToy, cost=10),
    "jpmhc-linear": Toy("truncated Cayley from Y = I + alpha W", lambda: SkewToy(mode="linear"), cost=12),
    "jpmhc-exact": Toy("exact Cayley of the same W", lambda: SkewToy(mode="exact", alpha=1.0), cost=20),
    "cayley": Toy("exact Cayley rotation of one plane alone", CayleyToy, cost=5),
    "mlp": Toy("x + MLP(x)", AdditiveToy, cost=1.5),
    "linear": Toy("one linear map", LinearToy),
}
GATE_BIASES, PENALTIES = (-1.5, 0.0, 1.5), (0.0, 0.5)


# The published setting, -1.5 and 0.5, is the row "hybrid" itself.
CONTROLS: dict[str, Toy] = {
    f"hybrid:gate_bias={bias:g},penalty={weight:g}": TOYS["hybrid"]._replace(
        label=f"EDelta hybrid, gate from {bias:g}, penalty {weight:g}",
        build=partial(HybridToy, bias),
        penalty=weight,
        controls={"gate_bias": bias, "penalty": weight},
    )
    for bias in GATE_BIASES
    for weight in PENALTIES
    if (bias, weight) != (-1.5, 0.5)
}


@dataclass(frozen=True)
class ReflectionSettings:
    """The published recipe: AdamW without a schedule. Of the data, only the size of the training set is a choice."""

    steps: int = 2000
    batch_size: int = 32
    lr: float = 1e-3
    weight_decay: float = 0.01
    num_train: int = 500
    evaluate_every: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "num_train", "evaluate_every"):
            require(getattr(self, name) >= 1, f"reflection: {name}", "at least 1", getattr(self, name))


def toy(name: str) -> Toy:
    """Return the row or control called `name`. Raises InputError, with the nearest name."""
    known = TOYS | CONTROLS
    if name not in known:
        raise InputError(
            f"no reflection model is called {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})"
        )
    return known[name]


def reflection_job(name: str, seed: int, settings: ReflectionSettings) -> Job:
    """Describe the run of one operator and seed. Raises InputError for an unknown name."""
    key = f"reflection+{name}+{settings.num_train}+seed{seed}"
    return Job(key, train_toy, (name, seed, settings), settings.steps, toy(name).cost)


def train_toy(
    name: str,
    seed: int,
    settings: ReflectionSettings,
    *,
    place: Path | None = None,
    report: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Train the operator `name` and return its record (see `report`); deterministic in its arguments.

    `report` is called now and then with the number of steps done. It keeps no state in `place`: it takes seconds.
    """
    chosen = toy(name)
    data = [part.squeeze(1) for part in replace(task("reflection"), num_train=settings.num_train).data()]
    train_x, train_y, val_x, val_y = data
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = chosen.build()
    batches = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, fused=True)
    curve, trajectory = [], {"cosine": [], "beta": [], "gamma": []}

    def evaluate(step: int) -> dict[str, float | None]:
        with torch.no_grad():
            result = model(val_x)
        scores = {
            "loss": F.mse_loss(result.prediction, val_y).item(),
            "cosine": F.cosine_similarity(result.prediction, val_y, dim=-1).mean().item(),
            "beta": None if result.beta is None else result.beta[:100].mean().item(),
            "gamma": None if result.gamma is None else result.gamma[:100].mean().item(),
        }
        curve.append([step, finite(scores["loss"])])
        for key, points in trajectory.items():
            if scores[key] is not None:
                points.append([step, finite(scores[key])])
        return scores

    report(0)
    scores = evaluate(0)
    started = time.monotonic()
    for step in range(1, settings.steps + 1):
        chosen_rows = torch.randint(len(train_x), (settings.batch_size,), generator=batches)
        result = model(train_x[chosen_rows])
        loss = F.mse_loss(result.prediction, train_y[chosen_rows])
        if chosen.penalty:
            loss = loss + chosen.penalty * gate_penalty(result.gamma).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % settings.evaluate_every == 0 or step == settings.steps:
            scores = evaluate(step)
            report(step)
            if not math.isfinite(scores["loss"]):
                break
    losses = [loss for _, loss in curve if loss is not None]
    diverged = not math.isfinite(scores["loss"])
    return {
        "kind": "run",
        "task": "reflection",
        "model": name.partition(":")[0],
        "label": chosen.label,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "causal": None,
        "causality_change": None,
        **finite(scores),
        "best_loss": min(losses, default=None),
        "diverged": diverged,
        "curve": curve,
        "gates": {key: points for key, points in trajectory.items() if points and key != "cosine"},
        "cosines": trajectory["cosine"],
        "num_train": settings.num_train,
        "controls": dict(chosen.controls),
        "seconds": time.monotonic() - started,
        "settings": asdict(settings),
    }
