"""Hyper-Connections (arXiv 2409.19606): n residual streams that are read, mixed and written by learned weights.

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))

The weights are constants (static) or depend on the token (dynamic). They are unconstrained.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.families.mixing import SPREAD, MixingCoefficients, WeightedConnection, WeightedScheme
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams, SumStreams
from residua.connections.parts.options import Rows


@dataclass(frozen=True)
class HyperConnections(ExpandingScheme, WeightedScheme):
    """Hyper-Connections. Starts as the pre-norm residual in n equal streams; the final norm cancels the factor n.

    The paper calls the weights DHC with `dynamic`, SHC without. It also starts the output maps of the sublayers sqrt(n)
    times as large (section 4); this is left to your model.

    num_streams     n; a single stream is not mixed, but the weights still scale it
    head            the readout: "sum" of the streams (the paper) or "mean"
    start           "published": each sublayer reads one stream, and all are written alike; "mirrored": each sublayer
                    reads the mean of the streams, and the write weights lie in symmetric pairs around 1, so that the
                    mean is the plain residual although the streams differ
    """

    title = "Hyper-connections"
    equation = "h_res X + h_post F(norm(h_pre X))"
    users = "The authors' experiments; its constrained successor mHC is what released models use."
    paper = "arXiv 2409.19606"
    residual_start = {"head": "mean"}  # the sum of n equal streams is n times the plain residual

    num_streams: Rows = 4
    head: Literal["sum", "mean"] = "sum"
    start: Literal["published", "mirrored"] = "published"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [HyperConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        collapse = SumStreams() if self.head == "sum" else MeanStreams()
        return Stream(self.expander(dim), connections, collapse)


class HyperConnection(WeightedConnection):
    """One hyper-connection; the state is (batch, seq, n, dim). It reads the single mixture x = h_pre X.

    At the start x is stream `index` mod n, so that sublayers read different streams and the streams become different in
    the first training step. With a mirrored start the streams differ at once.
    """

    scheme: HyperConnections

    def __init__(self, scheme: HyperConnections, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__(scheme, scheme.num_streams, dim, norm, reads=1, first=index, norm_eps=norm_eps)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.scheme.start == "mirrored":
            n, middle = len(self.beta), (len(self.beta) - 1) // 2
            with torch.no_grad():
                self.alpha[:, 0] = 1 / n
                rest = self.alpha[middle : n - middle, 0]  # one or two streams compensate the rounding of the others
                rest.fill_((1 - 2 * self.alpha[:middle, 0].sum(dtype=torch.float64).item()) / len(rest))
                self.beta.copy_(1 + SPREAD * (n > 1) * torch.linspace(-1, 1, n, device="cpu"))
                self.beta[: n // 2] = 2 - self.beta[n - n // 2 :].flip(0)  # symmetric around 1 to the last bit

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        alpha, beta = self.weights(streams)
        # Products of many small matrices are several times slower on slices.
        return MixingCoefficients(alpha[..., 0].contiguous(), alpha[..., 1:].mT.contiguous(), beta)
