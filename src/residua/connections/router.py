"""The router of JPmHC (arXiv 2602.18308): logits of mixing matrices from the whole state of a token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from residua.connections.projection import Projection
from residua.ops import linear_at_least_float32
from residua.ops.precision import widened


class Router(nn.Module):
    """Logits of `maps` mixing matrices: LayerNorm of the state, then a linear map.

    Weights and biases start at 0, but the bias of the matrix `drawn`, which is H_post, is drawn from N(0, 1): streams
    that are written alike would stay alike.
    (..., streams, dim) -> (..., maps, streams, streams) in float32 at least.
    """

    def __init__(self, dim: int, num_streams: int, maps: int, *, drawn: int | None = 1, norm_eps: float = 1e-5):
        super().__init__()
        self.drawn = drawn
        self.norm = nn.LayerNorm(num_streams * dim, eps=norm_eps)
        self.project = Projection(num_streams * dim, maps * num_streams**2, std=0.0)
        self.bias = nn.Parameter(torch.empty(maps, num_streams, num_streams))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if self.drawn is not None:
            nn.init.normal_(self.bias[self.drawn])

    def forward(self, streams: Tensor) -> Tensor:
        norm = self.norm
        x, weight, bias = widened(streams.flatten(-2), norm.weight, norm.bias)
        x = F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)
        logits = linear_at_least_float32(x, self.project.weight, self.bias.flatten())
        return logits.unflatten(-1, self.bias.shape)
