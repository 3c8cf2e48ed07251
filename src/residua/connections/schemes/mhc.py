"""Manifold-constrained hyper-connections: mHC (arXiv 2512.24880) and mHC-lite (arXiv 2601.05732).

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))

h_pre in (0, 1), h_post in (0, 2), and h_res is doubly stochastic: mixing cannot make the streams grow, however deep.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.families.mixing import CutConnection, MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.families.stream_logits import OFFSET, StreamLogits, reading_biases
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams, Same
from residua.connections.parts.gates import Scale
from residua.connections.parts.options import Factor, Steps, only_with, require_option
from residua.connections.parts.spec import TensorSpec
from residua.ops import hyper_read, permutation_mixture, sinkhorn
from residua.ops.sinkhorn import Order

# The comparison code of arXiv 2605.06729 has b_res = 2 I.
SPLIT_OFFSET = 2.0


@dataclass(frozen=True)
class ManifoldHyperConnections(ExpandingScheme, MixingScheme):
    """mHC: hyper-connections whose mixing is doubly stochastic. Starts as the pre-norm residual (`layout="copies"`).

    layout          "copies": n streams of full width, (batch, seq, n, dim), the paper. "split": the width is cut into
                    n pieces, as in the comparison code of arXiv 2605.06729; the state is (batch, seq, dim). The
                    sublayers then see one mixture of the pieces, repeated n times, a bottleneck of dim / n features.
                    It does not start as the plain residual; do not judge the papers' mHC by it
    mixing          "sinkhorn": `iterations` of alternate row and column scaling (mHC), doubly stochastic as far as
                    they converge; "permutations": a mixture of all n! permutations (mHC-lite), exact, n at most 5
    iterations      "sinkhorn": number of pairs of scalings
    order           "sinkhorn": whether each pair divides first by the sums of "rows" or of "columns"; the sums that it
                    divides by last are exactly 1 at the end. Megatron-LM and Liger-Kernel divide by rows first,
                    equation 9 of the paper by columns
    scale_init      initial factor on the token-dependent part of all logits
    start           how reads start, with layout="copies". "prefer": logits of 2 and -2; the read weights of four
                    streams sum to 1.24, a factor that the norm before a sublayer removes up to its eps. "residual":
                    the read weights sum to 1, so that the stream computes exactly the plain residual for any norms
    """

    title = "Manifold-constrained hyper-connections"
    equation = "h_res X + h_post F(norm(h_pre X)), h_res doubly stochastic"
    users = "DeepSeek-V4 and GLM-5.3-Flash, in a form of their own: `mhc_deepseek`."
    paper = "arXiv 2512.24880"
    constraint = "doubly stochastic"
    published = ("order",)

    layout: Literal["copies", "split"] = "copies"
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    iterations: Annotated[Steps, only_with(mixing="sinkhorn")] = 20
    order: Annotated[Order, only_with(mixing="sinkhorn")] = "rows"
    scale_init: Factor = 0.01
    start: Annotated[Literal["prefer", "residual"], only_with(layout="copies")] = "prefer"

    def __post_init__(self):
        super().__post_init__()
        if self.mixing == "permutations":
            require_option(
                self, "num_streams", self.num_streams <= 5, "at most 5 with mixing='permutations', as there are n!"
            )
        copies = self.layout == "copies" or not self.streams_differ
        require_option(self, "expand", copies, "'repeat' unless layout is 'copies'")

    def state_spec(self, boundary: int, dim: int) -> TensorSpec:
        return TensorSpec((self.num_streams, dim) if self.layout == "copies" else (dim,))

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        if self.layout == "copies":
            return {"start": "residual"}  # reads sum to 1, writes are 1, and equal streams stay equal when mixed
        return "with layout='split' a sublayer sees a mixture of the pieces, never the whole state; use layout='copies'"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        split = self.layout == "split"
        if split:
            require_option(self, "num_streams", dim % self.num_streams == 0, f"a divisor of the width dim = {dim}")
        kind = SplitConnection if split else ManifoldConnection
        connections = [kind(self, dim, i, num_sublayers, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(Same(), connections, Same()) if split else Stream(self.expander(dim), connections, MeanStreams())


class ManifoldConnection(MixingConnection):
    """One connection of mHC; the state is (batch, seq, n, dim). With z = alpha (phi r) + b of `StreamLogits`:

        h_pre = sigmoid(z_pre),   h_post = 2 sigmoid(z_post),   h_res = doubly stochastic(z_res)

    phi starts at 0, and b_post at 0 (h_post = 1). b_pre starts at +2 for the stream `index` mod n and at -2 for the
    others, or with start="residual" such that h_pre sums to 1. b_res starts such that the entries of h_res on and off
    the diagonal are in the ratio 1 : e^-6.

    Mappings that cannot change anything are omitted, because their parameters would be dead. The first of `count`
    sublayers has no h_pre, because its streams are equal and the norm removes the scale. It has no h_res, because
    mixing equal streams changes nothing. The last sublayer has no h_res, because only the mean of the streams is read
    after it, and mixing keeps the mean. Either the rows or the columns of h_res sum to 1 only up to the error of
    Sinkhorn's iteration, so one of these two reasons holds only up to this error.
    """

    def __init__(
        self, scheme: ManifoldHyperConnections, dim: int, index: int, count: int, norm: nn.Module, *, norm_eps: float
    ):
        super().__init__()
        self.scheme: ManifoldHyperConnections = scheme
        n, split, preferred = scheme.num_streams, scheme.layout == "split", index % scheme.num_streams
        self.selects = split or index > 0 or scheme.streams_differ
        self.mixes = split or (self.selects and index < count - 1)
        if split:
            pre = [0.0] * n
        elif scheme.start == "residual":
            pre = reading_biases(n, preferred)
        else:
            pre = [2.0 if i == preferred else -2.0 for i in range(n)]
        offset = SPLIT_OFFSET if split else OFFSET
        if scheme.mixing == "sinkhorn":
            res = [offset if i == j else 0.0 for i in range(n) for j in range(n)]
        else:
            # Each entry off the diagonal sums (n - 1)! equal weights. On the diagonal one of these is the first weight.
            res = [math.log(math.factorial(n - 1) * math.expm1(offset) + 1)] + [0.0] * (math.factorial(n) - 1)
        biases = [*[pre] * self.selects, [0.0] * n, *[res] * self.mixes]
        self.state_norm = Scale(1.0, dim) if split else None
        self.mappings = StreamLogits(
            n,
            dim // n if split else dim,
            biases,
            std=0.02 if split else 0.0,
            scale=scheme.scale_init,
            eps=norm_eps,
            names=("phi", "alpha"),
        )
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        scheme, n = self.scheme, self.scheme.num_streams
        logits = self.mappings(streams, None if self.state_norm is None else self.state_norm())
        h_pre = torch.sigmoid(logits[0]) if self.selects else None
        h_res, h_post = None, 2 * torch.sigmoid(logits[int(self.selects)])
        if self.mixes and scheme.mixing == "sinkhorn":
            # `sinkhorn` returns the tokens innermost in memory, which makes products of small matrices much slower.
            matrices = logits[-1].unflatten(-1, (n, n))
            h_res = sinkhorn(
                matrices, scheme.iterations, order=scheme.order, implementation=scheme.implementation
            ).contiguous()
        elif self.mixes:
            h_res = permutation_mixture(logits[-1].softmax(-1))
        return MixingCoefficients(h_pre, h_res, h_post)


class SplitConnection(CutConnection, ManifoldConnection):
    """`layout="split"`: the state (batch, seq, dim) is n pieces X[i] of dim / n features.

        x = n times [sum_i h_pre[i] X[i]],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))[o]

    The start is that of the comparison code of arXiv 2605.06729: b_res = 2 I, so that h_res keeps 0.71 of a piece
    (n = 4), b_pre = 0, phi from N(0, 0.02^2), and a gain on the normalised state. This is not the plain residual.
    """

    @property
    def pieces(self) -> int:  # type: ignore[override]
        return self.scheme.num_streams

    def gather(self, rows: Tensor, h_pre: Tensor) -> Tensor:
        mixture = hyper_read(rows, h_pre, implementation=self.scheme.implementation)
        return mixture.unsqueeze(-2).expand(rows.shape)
