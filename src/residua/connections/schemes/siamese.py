"""SiameseNorm (arXiv 2602.08064): a post-norm stream and a pre-norm stream, with the same sublayers.

    u = norm_x(X),   h = F(norm(u + norm_y(Y))),   X <- u + h / sqrt(2 (l + 1)),   Y <- Y + h

X and Y start as the embedding; l is the index of the block of two sublayers, from 0. norm_x bounds X in every sublayer,
and Y keeps an identity path through all of them. The readout is norm_x(X) + norm_y(Y), with its own norms.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Norm, Scheme, State, Stream
from residua.connections.parts.ends import Copies
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.spec import TensorSpec
from residua.ops import at_least_float32, scaled_sum
from residua.ops.derived import derive


class SiameseCoefficients(NamedTuple):
    """SiameseNorm has no coefficients."""


@dataclass(frozen=True)
class SiameseNorm(Scheme):
    """SiameseNorm. Does not start as the plain residual: a sublayer sees the bounded stream X too, with equal weight.

    Both streams start as the embedding. Y is the plain residual stream. X is replaced by norm_x(X) before every
    sublayer. The output of a sublayer is added to both streams. l is the index of the block of two sublayers, from 0.

    depth_scaling     divides the update of X by sqrt(2 (l + 1)) ("code"), sqrt(l + 1) ("paper") or nothing
                      ("none")
    normalised_input  True: a sublayer sees norm(norm_x(X) + norm_y(Y)); False: it sees norm_x(X) + norm(Y), where
                      norm is the norm before the sublayer, such as a model's own
    start             start of the gains of norm_x: "published", 1; "residual", 0, so that X has no effect at first
    head              the readout: "norms", norm_x(X) + norm_y(Y); "stream", norm_x(X) + Y
    """

    title = "SiameseNorm"
    equation = "X: u + h / sqrt(2 (l + 1)), Y: Y + h, h = F(norm(u + norm(Y))), u = norm(X)"
    users = (
        "The authors' experiments, up to 15B parameters (`Qwen-Applications/SiameseNorm`), and a model of 1B on "
        "the recipe of OLMo 3, together with another change (`ArchSpace-Collection/SiameseNorm-DepthAttention`)."
    )
    paper = "arXiv 2602.08064"
    # The paper's pre-norm case, norm_x = 0. It requires that only one norm lies between Y and a sublayer.
    residual_start = {"normalised_input": False, "start": "residual", "head": "stream"}

    depth_scaling: Literal["code", "paper", "none"] = "code"
    normalised_input: bool = True
    start: Literal["published", "residual"] = "published"
    head: Literal["norms", "stream"] = "norms"

    @property
    def gain(self) -> float:
        """The start of every gain of norm_x."""
        return 1.0 if self.start == "published" else 0.0

    def state_spec(self, boundary: int, dim: int) -> tuple[TensorSpec, TensorSpec]:
        return TensorSpec((dim,)), TensorSpec((dim,))

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [SiameseConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Copies(2), connections, SiameseCollapse(self, dim, norm_eps=norm_eps))


class SiameseConnection(Connection):
    """One connection; the state is (X, Y), (batch, seq, dim) each. The carry holds norm_x(X) in place of X."""

    def __init__(self, scheme: SiameseNorm, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        places = {"code": 2 * (index // 2 + 1), "paper": index // 2 + 1, "none": 1}
        self.scale = 1 / math.sqrt(places[scheme.depth_scaling])
        self.norm = norm
        self.x_norm = RMSNorm(dim, eps=norm_eps, start=scheme.gain, recompute=True)
        self.y_norm = RMSNorm(dim, eps=norm_eps, recompute=True) if scheme.normalised_input else None

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        x, y = state
        u = self.x_norm(x)
        x_in = u + self.norm(y) if self.y_norm is None else self.norm(derive(torch.add, u, self.y_norm(y)))
        return x_in, Carry((u, y), SiameseCoefficients())

    def write(self, y: Tensor, carry: Carry) -> State:
        bounded, stream = carry.residual
        scale = at_least_float32(bounded).new_full((), self.scale)
        return scaled_sum((bounded, y), (None, scale)), (stream + y).to(stream.dtype)


class SiameseCollapse(nn.Module):
    """The readout. (X, Y) -> (batch, seq, dim)."""

    def __init__(self, scheme: SiameseNorm, dim: int, *, norm_eps: float):
        super().__init__()
        self.x_norm = RMSNorm(dim, eps=norm_eps, start=scheme.gain, recompute=True)
        self.y_norm = RMSNorm(dim, eps=norm_eps, recompute=True) if scheme.head == "norms" else None

    def forward(self, state: State, memory: Memory | None = None) -> Tensor:
        x, y = state
        return self.x_norm(x) + (y if self.y_norm is None else self.y_norm(y))
