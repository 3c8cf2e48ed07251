"""KromHC (arXiv 2601.21579): hyper-connections that mix with a Kronecker product of 2 x 2 matrices.

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))

h_res is doubly stochastic exactly, without iteration, from 2 log2(n) numbers.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.families.mixing import MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.families.stream_logits import StreamLogits, reading_biases
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams, SumStreams
from residua.connections.parts.options import Factor
from residua.errors import Range, at_most
from residua.ops import kronecker_mixture

SWAP = -8.0  # initial logit of the swap in every factor, against 0 for the identity


@dataclass(frozen=True)
class KroneckerHyperConnections(ExpandingScheme, MixingScheme):
    """KromHC. Does not start as the plain residual: a sublayer writes to one stream with 1.46, to the others with 0.54.

    num_streams     n, a power of 2
    scale_init      initial factor on the token-dependent part of all logits
    head            the readout: "sum" of the streams (the authors' code) or "mean"
    start           "published": sublayer i prefers to read and write stream i mod n, by logits of 1 against -1;
                    "residual": all streams are written with 1 and the read weights sum to 1, so that the stream
                    computes exactly the plain residual if the head is "mean"
    """

    title = "KromHC"
    equation = "h_res X + h_post F(norm(h_pre X)), h_res a Kronecker product"
    users = "The authors' experiments. No released model is known."
    paper = "arXiv 2601.21579"
    residual_start = {"start": "residual", "head": "mean"}  # the sum is n times the plain residual
    constraint = "doubly stochastic"

    num_streams: Annotated[
        int, Range("a power of 2, at least 2", lambda n: n >= 2 and n & (n - 1) == 0), at_most(256)
    ] = 4
    scale_init: Factor = 0.01
    head: Literal["sum", "mean"] = "sum"
    start: Literal["published", "residual"] = "published"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [KroneckerConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        collapse = SumStreams() if self.head == "sum" else MeanStreams()
        return Stream(self.expander(dim), connections, collapse)


class KroneckerConnection(MixingConnection):
    """One connection; the state is (batch, seq, n, dim). With z the logits of `StreamLogits`, whose W starts at 0:

        h_pre = sigmoid(z_pre),   h_post = 2 sigmoid(z_post),   h_res = kronecker_mixture(softmax(z_res)[:, 0])

    where z_res has a row of two logits, for the identity and the swap, for each of the log2(n) factors.
    """

    def __init__(self, scheme: KroneckerHyperConnections, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        n = scheme.num_streams
        self.scheme = scheme
        if scheme.start == "published":
            pre = post = [1.0 if i == index % n else -1.0 for i in range(n)]
        else:
            pre, post = reading_biases(n, index % n), [0.0] * n
        biases = [pre, [0.0, SWAP] * (n.bit_length() - 1), post]
        self.logits = StreamLogits(n, dim, biases, std=0.0, scale=scheme.scale_init, eps=norm_eps, gain=True)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        pre, res, post = self.logits(streams)
        h_res = kronecker_mixture(res.unflatten(-1, (-1, 2)).softmax(-1)[..., 0])
        return MixingCoefficients(torch.sigmoid(pre), h_res, 2 * torch.sigmoid(post))
