"""The operators of the reflection experiment of arXiv 2605.06729: learn y = -x on R^64 with a single operator.

The published comparison has three operators: the pooled Householder (called "DDL", but without the delta write), the
gated mixture of rotation and reflection ("hybrid"), and a truncated Cayley map ("JPmHC") that starts from I and
therefore cannot reach the eigenvalue -1. Here there are also the exact rotation without a reflection, the Cayley map
with JPmHC's own start, the exact Cayley map, x + MLP(x), one linear map, and the hybrid with other gates and penalties.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from residua.errors import require
from residua.ops import cayley_apply, cayley_transform, gate_penalty, householder, hybrid, iterative_cayley, unit

DIM, HIDDEN = 64, 128


class Gates(NamedTuple):
    """The gates beta and gamma: (batch,) each, or None if the operator lacks the gate."""

    beta: Tensor | None = None
    gamma: Tensor | None = None


class Operator(nn.Module):
    """An operator (batch, DIM) -> (batch, DIM). Its `forward` appends `Gates` to `coefficients`, as a model's does."""

    gate_penalty = 0.0

    def penalty(self, coefficients: list[Gates]) -> Tensor | None:
        """Return the penalty for the `coefficients` that `forward` collected, or None."""
        if not self.gate_penalty:
            return None
        return self.gate_penalty * gate_penalty(coefficients[0].gamma).mean()


def _network(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, outputs))


class Householder(Operator):
    """(I - beta k k^T) x, with k and beta computed from x; a sigmoid keeps beta between 0 and 2."""

    def __init__(self):
        super().__init__()
        self.k = _network(DIM)
        self.beta = _network(1)

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        beta = 2 * self.beta(x).squeeze(-1).sigmoid()
        coefficients.append(Gates(beta))
        return householder(x.unsqueeze(-1), unit(self.k(x)), beta).squeeze(-1)


class Rotation(Operator):
    """Q x, the exact Cayley rotation of the plane of u and v, without a reflection; u, v and beta > 0 come from x."""

    def __init__(self):
        super().__init__()
        self.u = _network(DIM)
        self.v = _network(DIM)
        self.beta = _network(1)

    def plane(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return u, v and beta. u and v are orthogonal unit vectors, so that only beta determines the angle."""
        u = unit(self.u(x))
        v = self.v(x)
        return u, unit(v - (u * v).sum(-1, keepdim=True) * u), F.softplus(self.beta(x).squeeze(-1))

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        u, v, beta = self.plane(x)
        coefficients.append(Gates(beta))
        return cayley_apply(x.unsqueeze(-1), u, v, beta).squeeze(-1)


class Hybrid(Rotation):
    """gamma Q x + (1 - gamma)(x - 2 k k^T x) with a gate gamma = sigmoid(w x + gate_bias); w starts at 0."""

    def __init__(self, gate_bias: float = -1.5, penalty: float = 0.5):
        super().__init__()
        self.k = _network(DIM)
        self.gate = nn.Linear(DIM, 1)
        nn.init.zeros_(self.gate.weight)
        nn.init.constant_(self.gate.bias, gate_bias)
        self.gate_penalty = penalty

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        u, v, beta = self.plane(x)
        gamma = self.gate(x).squeeze(-1).sigmoid()
        coefficients.append(Gates(beta, gamma))
        return hybrid(x.unsqueeze(-1), u, v, beta, unit(self.k(x)), gamma).squeeze(-1)


class SkewCayley(Operator):
    """Y x, with Y a Cayley map of the skew matrix W = S - S^T, where S is computed from x.

    mode: "identity" iterates from Y = I, as in the published experiment; "linear" iterates from Y = I + alpha W, as in
    JPmHC; "exact" solves a linear system.
    """

    def __init__(self, mode: str = "identity", alpha: float = 0.1):
        super().__init__()
        self.s = _network(DIM * DIM)
        self.mode, self.alpha = mode, alpha

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        s = self.s(x).unflatten(-1, (DIM, DIM))
        w = s - s.mT
        if self.mode == "exact":
            y = cayley_transform(w, self.alpha)
        else:
            y = iterative_cayley(w, self.alpha, steps=2, start=self.mode)
        return (y @ x.unsqueeze(-1)).squeeze(-1)


class Additive(Operator):
    """x + MLP(x)."""

    def __init__(self):
        super().__init__()
        self.mlp = _network(DIM)

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        return x + self.mlp(x)


class Linear(Operator):
    """One linear map."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, coefficients: list[Gates]) -> Tensor:
        return self.map(x)


class OperatorRow(NamedTuple):
    """A row of the table: its label, its class and options, and the cost of a step relative to the linear map's.

    is_control: whether the row is a control for its options.
    """

    label: str
    build: Callable[..., Operator]
    cost: float = 1.0
    options: Mapping[str, Any] = {}
    is_control: bool = False


# The row "hybrid" itself has the published setting: a gate that starts from -1.5, and a penalty of 0.5.
CONTROLS = [(bias, penalty) for bias in (-1.5, 0.0, 1.5) for penalty in (0.0, 0.5) if (bias, penalty) != (-1.5, 0.5)]
OPERATORS: dict[str, OperatorRow] = {
    "householder": OperatorRow("pooled Householder, published as DDL", Householder, 3),
    "hybrid": OperatorRow("EDelta hybrid, gate logit from -1.5, penalty 0.5", Hybrid, 7),
    "jpmhc": OperatorRow("truncated Cayley from Y = I, published as JPmHC", SkewCayley, 10),
    "jpmhc-linear": OperatorRow("truncated Cayley from Y = I + alpha W", SkewCayley, 12, {"mode": "linear"}),
    "jpmhc-exact": OperatorRow("exact Cayley of the same W", SkewCayley, 20, {"mode": "exact", "alpha": 1.0}),
    "cayley": OperatorRow("exact Cayley rotation of a single plane", Rotation, 5),
    "mlp": OperatorRow("x + MLP(x)", Additive, 1.5),
    "linear": OperatorRow("one linear map", Linear),
} | {
    f"hybrid:gate_bias={bias:g},penalty={penalty:g}": OperatorRow(
        f"EDelta hybrid, gate logit from {bias:g}, penalty {penalty:g}",
        Hybrid,
        7,
        {"gate_bias": bias, "penalty": penalty},
        is_control=True,
    )
    for bias, penalty in CONTROLS
}


def operator(name: str) -> OperatorRow:
    """Return the row called `name`. Raises InputError, with all names, for an unknown one."""
    require(name in OPERATORS, "an operator", f"one of {', '.join(OPERATORS)}", name)
    return OPERATORS[name]
