"""The norm before a sublayer."""

from torch import Tensor, nn

from residua.connections.base import Norm
from residua.ops import rms_norm


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` in float32 at least, with the result in the dtype of its input: gains keep their precision.

    (..., dim) -> (..., dim).
    """

    eps: float

    def __init__(self, dim: int, *, eps: float = 1e-5):
        super().__init__(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def norms(dim: int, eps: float, norm: Norm | None) -> Norm:
    """`norm` where it is given, otherwise an RMSNorm of width `dim` for every sublayer."""
    return (lambda _: RMSNorm(dim, eps=eps)) if norm is None else norm
