"""Independent hyper-connections, iHC: n residual streams, read and written by weights for each token, never mixed.

    x = sum_i h_pre[i] X[i],   X[o] <- X[o] + h_post[o] F(norm(x))

This is mHC (arXiv 2512.24880) without its mixing matrix, as Tencent's Hy4 runs it (`hy_v4` in transformers).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.families.mixing import SPREAD, MixingCoefficients, MixingConnection
from residua.connections.families.stream_logits import (
    ProductionHyperConnections,
    even_biases,
    mirrored_biases,
    reading_biases,
)
from residua.connections.parts.gates import logit
from residua.connections.parts.options import Factor, only_with, require_option
from residua.errors import NotNegative, Range


@dataclass(frozen=True)
class IndependentHyperConnections(ProductionHyperConnections):
    """iHC: streams that are never mixed. Starts near the plain residual.

    At the start the logits of the weights deviate by about `scale_init` * `weight_std` * sqrt(num_streams * dim), 0.003
    at width 768.

    magnitude       the write weights lie between 0 and this number
    gate_eps        the constant added to every read and write weight
    head            the readout: "sigmoid", its own weights from all streams (Hy4), or "mean"
    start           "published": W is drawn, every stream is read with 1/n and written with 1 (Hy4). "residual": W is 0
                    and the biases compensate `gate_eps`, so that the stream computes exactly the plain residual; each
                    sublayer prefers one stream. "mirrored": W is 0, each sublayer reads the mean of the streams, and
                    the write weights lie in symmetric pairs around 1: the plain residual, in streams that differ
    """

    title = "Independent hyper-connections"
    equation = "X + h_post F(norm(h_pre X))"
    users = "Hy4 of Tencent (`hy_v4` in transformers). `residua.models.dialects` loads its parameters."
    paper = "transformers, models/hy_v4"

    magnitude: Annotated[float, Range("a number above 1, the initial write weight", lambda x: 1 < x < math.inf)] = 2.0
    scale_init: Factor = 0.01
    weight_std: Annotated[NotNegative, only_with(start="published")] = 0.006
    start: Literal["published", "residual", "mirrored"] = "published"  # type: ignore[assignment]

    def __post_init__(self):
        super().__post_init__()
        reachable = self.start != "mirrored" or self.magnitude + self.gate_eps > 1 + SPREAD
        require_option(self, "magnitude", reachable, f"above {1 + SPREAD} with start='mirrored'")

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        bias = torch.tensor(logit((1 - self.gate_eps) / self.magnitude), dtype=torch.float32, device="cpu").double()
        if abs(self.magnitude * torch.sigmoid(bias) + self.gate_eps - 1) <= 1e-12:
            start = "mirrored" if self.start == "mirrored" else "residual"
            return {"start": start, "weight_std": type(self).weight_std}
        return (
            f"with magnitude={self.magnitude} and gate_eps={self.gate_eps} no bias in float32 gives a write weight of "
            "exactly 1; use magnitude=2.0 and a gate_eps of at most 1e-5"
        )

    def connection(self, dim: int, index: int, norm: nn.Module, norm_eps: float) -> "IndependentConnection":
        return IndependentConnection(self, dim, index, norm, norm_eps=norm_eps)

    def read_biases(self, index: int) -> list[float]:
        if self.start == "published":
            return [-math.log(self.num_streams - 1)] * self.num_streams
        if self.start == "mirrored":
            return [*even_biases(self.num_streams, eps=self.gate_eps)]
        return reading_biases(self.num_streams, index % self.num_streams, eps=self.gate_eps)

    def write_biases(self) -> list[float]:
        """Return the initial biases of a write."""
        if self.start == "mirrored":
            return [*mirrored_biases(self.num_streams, SPREAD, magnitude=self.magnitude, eps=self.gate_eps)]
        bias = 0.0 if self.start == "published" else logit((1 - self.gate_eps) / self.magnitude)
        return [bias] * self.num_streams


class IndependentConnection(MixingConnection):
    """One connection of iHC; the state is (batch, seq, n, dim). With z the logits of `StreamLogits`:

    h_pre = sigmoid(z_pre) + eps,   h_post = magnitude sigmoid(z_post) + eps
    """

    def __init__(self, scheme: IndependentHyperConnections, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        self.scheme: IndependentHyperConnections = scheme
        self.logits = scheme.logits(dim, [scheme.read_biases(index), scheme.write_biases()], norm_eps)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        scheme = self.scheme
        pre, post = self.logits(streams)
        h_post = scheme.magnitude * torch.sigmoid(post) + scheme.gate_eps
        return MixingCoefficients(torch.sigmoid(pre) + scheme.gate_eps, None, h_post)
