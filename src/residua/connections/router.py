"""The router of JPmHC (arXiv 2602.18308): logits of mixing matrices from the whole state of a token."""

import torch
from torch import Tensor, nn

from residua.connections.norm import LayerNorm
from residua.connections.projection import WideProjection, project
from residua.ops.derived import flattened


class Router(nn.Module):
    """Logits of `maps` mixing matrices: LayerNorm of the state, then a linear map.

    Weights and biases start at 0, except the bias of matrix `random_bias`, H_post, which is drawn from N(0, 1): streams
    that are written equally would stay equal.
    (..., streams, dim) -> (..., maps, streams, streams) in at least float32.
    """

    def __init__(self, dim: int, num_streams: int, maps: int, *, random_bias: int | None, norm_eps: float = 1e-5):
        super().__init__()
        self.random_bias = random_bias
        self.norm = LayerNorm(num_streams * dim, eps=norm_eps)
        self.project = WideProjection(num_streams * dim, maps * num_streams**2, std=0.0)
        self.bias = nn.Parameter(torch.empty(maps, num_streams, num_streams))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)
        if self.random_bias is not None and not self.bias.is_meta:
            nn.init.normal_(self.bias[self.random_bias])

    def forward(self, streams: Tensor) -> Tensor:
        logits = project(self.project, self.norm(flattened(streams)), bias=self.bias.flatten())
        return logits.unflatten(-1, self.bias.shape)
