"""Manifold-constrained hyper-connections: mHC (arXiv 2512.24880) and mHC-lite (arXiv 2601.05732).

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))

h_pre in (0, 1), h_post in (0, 2), and h_res is doubly stochastic: mixing cannot make the streams grow, however deep.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.ends import MeanStreams, Same
from residua.connections.expanding import ExpandingScheme
from residua.connections.gates import Scale
from residua.connections.hyper import CutConnection, MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.options import Factor, Steps, expect_used, require_option
from residua.connections.projection import WideProjection, project_normalised
from residua.connections.sharded import on_whole_tensors
from residua.connections.spec import TensorSpec
from residua.connections.stream_logits import reading_biases, scaled_groups
from residua.ops import hyper_read, permutation_mixture, sinkhorn
from residua.ops.derived import flattened

# Initial distance of the logits of h_res. With 6, h_res starts with e^-6 = 0.0025 off its diagonal: the difference
# between streams shrinks to 0.99 in each sublayer and to 0.79 in 24. With 4 it would shrink to 0.18; with 8 hardly at
# all, but the gradient, which is proportional to that entry, would be a seventh.
OFFSET = 6.0
# The comparison code of arXiv 2605.06729 has b_res = 2 I.
SPLIT_OFFSET = 2.0


@dataclass(frozen=True)
class ManifoldHyperConnections(ExpandingScheme, MixingScheme):
    """mHC: hyper-connections whose mixing is doubly stochastic. Starts as the pre-norm residual (`layout="copies"`).

    layout          "copies": n streams of full width, (batch, seq, n, dim), the paper. "split": the width is cut into
                    n pieces, as in the comparison code of arXiv 2605.06729; the state is (batch, seq, dim). The
                    sublayers then see one mixture of the pieces, repeated n times, a bottleneck of dim / n features.
                    It does not start as the residual; do not judge the papers' mHC by it
    mixing          "sinkhorn": `iterations` of alternate row and column scaling (mHC), doubly stochastic up to its
                    convergence; "permutations": a mixture of all n! permutations (mHC-lite), exact, n at most 5
    iterations      "sinkhorn": number of pairs of scalings
    alpha_init      initial factor on the token-dependent part of all logits
    start           of the reads with layout="copies": "prefer": logits of 2 and -2, whose sigmoids sum to 1.24 for four
                    streams, which the norm before a sublayer undoes up to its eps; "residual": they sum to 1, so
                    that the stream computes exactly the plain residual whatever the norms are
    """

    title: ClassVar[str] = "Manifold-constrained hyper-connections"
    equation: ClassVar[str] = "h_res X + h_post F(norm(h_pre X)), h_res doubly stochastic"
    users: ClassVar[str] = "DeepSeek-V4 and GLM-5.3-Flash, in a form of their own: `mhc_deepseek`."
    paper: ClassVar[str] = "arXiv 2512.24880"
    constraint: ClassVar[str] = "doubly stochastic"
    # Reads sum to 1, writes are 1, and mixing keeps equal streams.
    residual_start: ClassVar[dict[str, str]] = {"start": "residual"}

    layout: Literal["copies", "split"] = "copies"
    mixing: Literal["sinkhorn", "permutations"] = "sinkhorn"
    iterations: Steps = 20
    alpha_init: Factor = 0.01
    start: Literal["prefer", "residual"] = "prefer"

    def __post_init__(self):
        super().__post_init__()
        if self.mixing == "permutations":
            require_option(
                self, "num_streams", self.num_streams <= 5, "at most 5 with mixing='permutations', as there are n!"
            )
        copies = (self.layout == "copies", "layout is 'copies'")
        expect_used(self, {"start": copies, "expand": copies})

    def state_spec(self, boundary: int, dim: int) -> TensorSpec:
        return TensorSpec((self.num_streams, dim) if self.layout == "copies" else (dim,))

    @property
    def cannot_preserve(self) -> str:
        if self.layout == "copies":
            return ""
        return "with layout='split' a sublayer sees a mixture of the pieces, never the whole state; use layout='copies'"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        if self.layout == "split":
            require_option(self, "num_streams", dim % self.num_streams == 0, f"a divisor of the width dim = {dim}")
            pieces = [SplitConnection(self, dim, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
            return Stream(Same(), pieces, Same())
        last, differ = num_sublayers - 1, [i > 0 or self.streams_differ for i in range(num_sublayers)]
        connections = [
            ManifoldConnection(
                self, dim, i, norm(i), selects=differ[i], mixes=differ[i] and i < last, norm_eps=norm_eps
            )
            for i in range(num_sublayers)
        ]
        return Stream(self.expander(dim), connections, MeanStreams())


class Mappings(nn.Module):
    """h_pre = sigmoid(z_pre), h_post = 2 sigmoid(z_post), h_res = doubly stochastic(z_res) with the logits

        z = alpha (phi r) + b,   r = vec(X) / rms(vec(X))                       (arXiv 2512.24880 equations 7 and 8)

    with one alpha each. streams: (batch, seq, n, d); returns `MixingCoefficients`.

    Without `selects` there is no h_pre, without `mixes` no h_res. phi is drawn from N(0, std^2); b_post starts at 0
    (h_post = 1), b_pre at +2 for the stream `preferred` and at -2 for the others (with start="residual" such that h_pre
    sums to 1), or at 0 if `preferred` is None; b_res such that the entries of h_res on and off the diagonal are in
    the ratio 1 : e^-offset.
    """

    def __init__(
        self,
        scheme: ManifoldHyperConnections,
        width: int,
        *,
        selects: bool = True,
        mixes: bool = True,
        preferred: int | None = None,
        offset: float = OFFSET,
        std: float = 0.0,
    ):
        super().__init__()
        n = scheme.num_streams
        self.scheme = scheme
        self.preferred, self.offset = preferred, offset
        mixing = n * n if scheme.mixing == "sinkhorn" else math.factorial(n)
        self.sizes = [n if selects else 0, n, mixing if mixes else 0]
        self.phi = WideProjection(n * width, sum(self.sizes), std=std)
        self.alpha = nn.Parameter(torch.empty(1 + selects + mixes))
        self.bias = nn.Parameter(torch.empty(sum(self.sizes)))
        self.reset_parameters()

    @on_whole_tensors
    def reset_parameters(self) -> None:
        n = self.scheme.num_streams
        with torch.no_grad():
            self.alpha.fill_(self.scheme.alpha_init)
            self.bias.zero_()
            b_pre, _, b_res = self.bias.split(self.sizes)
            if self.preferred is not None and b_pre.numel() and self.scheme.start == "residual":
                b_pre.copy_(torch.tensor(reading_biases(n, self.preferred), dtype=b_pre.dtype, device="cpu"))
            elif self.preferred is not None and b_pre.numel():
                b_pre.fill_(-2)
                b_pre[self.preferred] = 2
            if b_res.numel() and self.scheme.mixing == "sinkhorn":
                b_res.view(n, n).fill_diagonal_(self.offset)
            elif b_res.numel():
                # An entry off the diagonal has (n - 1)! of the equal weights, the diagonal all others and this one.
                b_res[0] = math.log(math.factorial(n - 1) * math.expm1(self.offset) + 1)

    def forward(self, streams: Tensor, gain: Tensor | None = None, *, eps: float) -> MixingCoefficients:
        n = self.scheme.num_streams
        products = project_normalised(self.phi, flattened(streams), eps, gain=gain)
        groups = iter(scaled_groups(products, [size for size in self.sizes if size], self.alpha, self.bias))
        pre, post, res = (next(groups) if size else None for size in self.sizes)
        assert post is not None  # every connection has h_post
        h_res = None
        if res is not None and self.scheme.mixing == "sinkhorn":
            # sinkhorn has the tokens as innermost axis in memory, which makes products of small matrices much slower.
            logits = res.unflatten(-1, (n, n))
            h_res = sinkhorn(logits, self.scheme.iterations, implementation=self.scheme.implementation).contiguous()
        elif res is not None:
            h_res = permutation_mixture(res.softmax(-1))
        return MixingCoefficients(None if pre is None else torch.sigmoid(pre), h_res, 2 * torch.sigmoid(post))


class ManifoldConnection(MixingConnection):
    """One connection of mHC; the state is (batch, seq, n, dim). It starts by preferring the stream `index` mod n.

    Some mappings cannot change anything, and their parameters would be dead. `selects=False` omits h_pre in the first
    sublayer: its streams are equal, so the norm undoes h_pre. `mixes=False` omits h_res in the first sublayer, where
    mixing equal streams changes nothing, and in the last, where only the mean of the streams is read, which mixing
    keeps (up to the remaining error of Sinkhorn's row sums).
    """

    def __init__(
        self,
        scheme: ManifoldHyperConnections,
        dim: int,
        index: int,
        norm: nn.Module,
        *,
        selects: bool,
        mixes: bool,
        norm_eps: float,
    ):
        super().__init__()
        self.scheme = scheme
        self.norm_eps = norm_eps
        preferred = index % scheme.num_streams
        self.mappings = Mappings(scheme, dim, selects=selects, mixes=mixes, preferred=preferred)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        return self.mappings(streams, eps=self.norm_eps)


class SplitConnection(CutConnection):
    """`layout="split"`: the state (batch, seq, dim) is n pieces X[i] of dim / n features.

        x = n times [sum_i h_pre[i] X[i]],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))[o]

    As in the comparison code of arXiv 2605.06729: b_res = 2 I, so that h_res keeps 0.71 of a piece (n = 4), phi
    from N(0, 0.02^2), and a gain on the normalised state. It does not start as the residual.
    """

    def __init__(self, scheme: ManifoldHyperConnections, dim: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        self.scheme: ManifoldHyperConnections = scheme
        self.pieces = scheme.num_streams
        self.norm_eps = norm_eps
        self.state_norm = Scale(1.0, dim)
        self.mappings = Mappings(scheme, dim // scheme.num_streams, offset=SPLIT_OFFSET, std=0.02)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        return self.mappings(streams, self.state_norm(), eps=self.norm_eps)

    def gather(self, rows: Tensor, h_pre: Tensor) -> Tensor:
        mixture = hyper_read(rows, h_pre, implementation=self.scheme.implementation)
        return mixture.unsqueeze(-2).expand(rows.shape)
