"""mHC as released models run it: DeepSeek-V4 and GLM-5.3 (`deepseek_v4` and `glm5_next` in transformers).

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i C[i, o] X[i] + h_post[o] F(norm(x))

The matrix C is nearly doubly stochastic and mixes transposed: its first axis is the stream that is read. The scheme
differs from `mhc` in this, in the eps of Sinkhorn's iteration, in its start, in the readout, and in that no mapping is
left out, so that every parameter of a checkpoint has its place.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from residua.connections.gates import logit
from residua.connections.hyper import MixingCoefficients, MixingConnection
from residua.connections.mhc import OFFSET
from residua.connections.options import Steps
from residua.connections.stream_logits import ProductionHyperConnections, reading_biases
from residua.ops import guarded_sinkhorn


@dataclass(frozen=True)
class DeepSeekHyperConnections(ProductionHyperConnections):
    """mHC of DeepSeek-V4 (`head="sigmoid"`) and GLM-5.3 (`head="mean"`). Starts by averaging the streams, not as the
    residual: C starts near 1/n everywhere, and the streams are read with 1/2 each.

    num_streams     n, at least 2
    iterations      of `guarded_sinkhorn`: pairs of divisions by row and column sums; the first division is a softmax
    gate_eps        the constant added to the read weights, to the softmax, and to every sum that C is divided by
    scale_init      initial factor on the token-dependent part of all logits
    weight_std      standard deviation of the initial W, with start="published"
    head            the readout: "sigmoid", its own weights from all streams (DeepSeek-V4), or "mean" (GLM-5.3)
    start           "published": W is drawn and the biases are 0 (both models in transformers); "residual": W is 0, C is
                    near the identity, each sublayer prefers one stream, and the biases make up for what `gate_eps`
                    takes from the state, so that the stream computes exactly the plain residual
    """

    title: ClassVar[str] = "mHC of DeepSeek-V4 and GLM-5.3"
    equation: ClassVar[str] = "C^T X + h_post F(norm(h_pre X)), C nearly doubly stochastic"
    users: ClassVar[str] = (
        "DeepSeek-V4 (`deepseek_v4` in transformers) and GLM-5.3-Flash (`glm5_next`). `residua.models.dialects` loads "
        "their parameters."
    )
    paper: ClassVar[str] = "transformers, models/deepseek_v4"
    constraint: ClassVar[str] = "doubly stochastic"

    iterations: Steps = 20

    @property
    def source(self) -> str:
        return self.paper if self.head == "sigmoid" else "transformers, models/glm5_next"

    def preserving(self) -> ProductionHyperConnections:
        if self.head == "mean" and self.gate_eps:
            raise ValueError(
                f"DeepSeekHyperConnections: head='mean', gate_eps={self.gate_eps}: every mixing shrinks the state by "
                "about gate_eps, which the mean of the streams cannot undo; use head='sigmoid' or gate_eps=0.0"
            )
        if self.gate_eps > 1e-5:
            raise ValueError(
                f"DeepSeekHyperConnections: gate_eps={self.gate_eps}: no biases in float32 make up for it exactly; "
                "use a gate_eps of at most 1e-5"
            )
        return super().preserving()

    def connection(self, dim: int, index: int, norm: nn.Module, norm_eps: float) -> "DeepSeekConnection":
        return DeepSeekConnection(self, dim, index, norm, norm_eps=norm_eps)

    def read_biases(self, index: int) -> list[float]:
        n = self.num_streams
        if self.start == "published":
            return [0.0] * n
        return reading_biases(n, index % n, eps=self.gate_eps, total=self.shrinkage() ** -index)

    def write_biases(self, index: int) -> list[float]:
        """Return the initial biases of the write of sublayer `index`."""
        bias = 0.0 if self.start == "published" else logit(self.shrinkage() ** (index + 1) / 2)
        return [bias] * self.num_streams

    def mixing_biases(self) -> Tensor:
        """Return the initial biases of C, (n, n)."""
        offset = 0.0 if self.start == "published" else OFFSET
        return offset * torch.eye(self.num_streams, dtype=torch.float64, device="cpu")

    def shrinkage(self) -> float:
        """Return the sum of every column of the initial C with start="residual", by which a mixing scales the state."""
        return guarded_sinkhorn(self.mixing_biases(), self.iterations, eps=self.gate_eps).sum(0)[0].item()


class DeepSeekConnection(MixingConnection):
    """One connection; the state is (batch, seq, n, dim). With z the logits of `StreamLogits`:

    h_pre = sigmoid(z_pre) + eps,   h_post = 2 sigmoid(z_post),   C = guarded_sinkhorn(z_res),   h_res = C^T
    """

    def __init__(self, scheme: DeepSeekHyperConnections, dim: int, index: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        self.scheme: DeepSeekHyperConnections = scheme
        mixing = scheme.mixing_biases().flatten().tolist()
        self.logits = scheme.logits(dim, [scheme.read_biases(index), scheme.write_biases(index), mixing], norm_eps)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        scheme, n = self.scheme, self.scheme.num_streams
        pre, post, res = self.logits(streams)
        h_pre = torch.sigmoid(pre) + scheme.gate_eps
        mixing = guarded_sinkhorn(res.unflatten(-1, (n, n)), scheme.iterations, eps=scheme.gate_eps)
        return MixingCoefficients(h_pre, mixing.mT.contiguous(), 2 * torch.sigmoid(post))
