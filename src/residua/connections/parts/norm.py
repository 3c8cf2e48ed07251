"""Norms: before a sublayer, and inside the maps of a connection."""

from torch import Tensor, nn

from residua.connections.parts.sharded import SelfStarting
from residua.ops import rms_norm
from residua.ops.norm import layer_norm


class RMSNorm(SelfStarting, nn.RMSNorm):
    """`nn.RMSNorm` in at least float32, with the result in the dtype of its input, so that gains keep their precision.

    (..., dim) -> (..., dim). gain: whether there is one; start: its initial values; recompute: whether the backward
    pass computes the result again instead of keeping it.
    """

    eps: float

    def __init__(self, dim: int, *, eps: float = 1e-5, gain: bool = True, start: float = 1.0, recompute: bool = False):
        self.start, self.recompute = start, recompute
        super().__init__(dim, eps=eps, elementwise_affine=gain)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, recompute=self.recompute)


class LayerNorm(SelfStarting, nn.LayerNorm):
    """`nn.LayerNorm` with input, gain, bias and result in at least float32, for the input of a mapping."""

    def reset_parameters(self) -> None:
        super().reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)
