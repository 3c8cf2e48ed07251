"""JPmHC (arXiv 2602.18308): hyper-connections that mix by an approximate or exact rotation of the streams.

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i h_res[o, i] X[i] + h_post[o] F(norm(x))

One map of a token's whole state gives three n x n matrices: the rows of H_pre and the columns of H_post sum to 1,
and H_res is the Cayley transform of a skew matrix.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.families.mixing import MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.families.stream_logits import Router
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.ends import MeanStreams
from residua.connections.parts.options import Steps, only_with
from residua.errors import Positive
from residua.ops import at_least_float32, cayley_transform, iterative_cayley


class JacobianMatrices(NamedTuple):
    """The paper's H_pre, H_res, H_post, (batch, seq, n, n) each, in at least float32; None if omitted."""

    pre: Tensor | None
    res: Tensor
    post: Tensor | None


@dataclass(frozen=True)
class JacobianHyperConnections(ExpandingScheme, MixingScheme):
    """JPmHC. The mean of the streams starts as the pre-norm residual. The streams differ after the first write.

    In the paper one linear map makes the n streams and another reads them out. Here the embedding is repeated and the
    readout is the mean of the streams, as in the other schemes.

    alpha           factor on W: how far it rotates the streams
    iterations      "iterative": number of fixed-point iterations, starting from I + alpha W
    cayley          "iterative" (the paper), orthogonal only for small alpha W, or "exact", by a linear solve
    """

    title = "JPmHC"
    equation = "h_res X + h_post F(norm(h_pre X)), h_res orthogonal"
    users = "The authors' experiments. No released model is known."
    paper = "arXiv 2602.18308"
    # Reads start as the mean of the streams. Mixing keeps that mean, and every write adds y to it.
    residual_start = {}
    constraint = "orthogonal"

    alpha: Positive = 0.1
    iterations: Annotated[Steps, only_with(cayley="iterative")] = 2
    cayley: Literal["iterative", "exact"] = "iterative"

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        places = range(num_sublayers)
        connections = [JacobianConnection(self, dim, i, num_sublayers, norm(i), norm_eps=norm_eps) for i in places]
        return Stream(self.expander(dim), connections, MeanStreams())


class JacobianConnection(MixingConnection):
    """One connection of JPmHC; the state is (batch, seq, n, dim), m = LayerNorm of all n dim features of a token.

        [P, R, S] = W m + b,   H_pre = softmax(P, -1),   H_post = softmax(R, -2),   H_res = Cayley(alpha (S - S^T))

    W and b start as in `Router`, so that the mean of the streams is the residual, while the streams differ.

    The sublayer reads the mean of the rows of H_pre X, and all columns of H_post multiply the same output. Only two
    vectors therefore matter: h_pre, the mean of the rows of H_pre, which sums to 1, and h_post, the row sums of H_post,
    which sum to n.

    If the streams start as copies, the first of `count` sublayers has no H_pre, because all averages of equal streams
    are the same. The last has no H_post, because the mean of the streams grows by y for any H_post.
    """

    def __init__(
        self, scheme: JacobianHyperConnections, dim: int, index: int, count: int, norm: nn.Module, *, norm_eps: float
    ):
        super().__init__()
        self.scheme: JacobianHyperConnections = scheme
        self.selects, self.distributes = index > 0 or scheme.streams_differ, index < count - 1
        maps = [*["pre"] * self.selects, *["post"] * self.distributes, "res"]
        self.router = Router(dim, scheme.num_streams, maps, norm_eps=norm_eps)
        self.norm = norm

    def matrices(self, streams: Tensor) -> JacobianMatrices:
        """Compute H_pre, H_res and H_post from a state."""
        scheme = self.scheme
        logits = list(self.router(streams).unbind(-3))
        pre = logits.pop(0).softmax(-1) if self.selects else None
        post = logits.pop(0).softmax(-2) if self.distributes else None
        w = logits[0] - logits[0].mT
        if scheme.cayley == "exact":
            return JacobianMatrices(pre, cayley_transform(w, scheme.alpha), post)
        return JacobianMatrices(pre, iterative_cayley(w, scheme.alpha, scheme.iterations), post)

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        pre, h_res, post = self.matrices(streams)
        h_pre = None if pre is None else pre.mean(-2)
        h_post = at_least_float32(streams).new_ones(h_res.shape[:-1]) if post is None else post.sum(-1)
        return MixingCoefficients(h_pre, h_res, h_post)
