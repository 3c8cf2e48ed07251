"""mHC as released models run it: DeepSeek-V4 and GLM-5.3-Flash (`deepseek_v4` and `glm5_next` in transformers).

    x = sum_i h_pre[i] X[i],   X[o] <- sum_i C[i, o] X[i] + h_post[o] F(norm(x))

The matrix C is nearly doubly stochastic and mixes transposed: its first axis is the stream that is read. The scheme
differs from `mhc` in this, in the eps of Sinkhorn's iteration, in its start and in the readout. It also omits no
mapping, so that every parameter of a checkpoint has its place. DeepSeek-V4.1 computes all mappings in a single pass:
the h_pre of a sublayer reads the input of the next sublayer, after the write, and the first sublayer reads stream 0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Norm, State, Stream
from residua.connections.families.mixing import MixingCoefficients, MixingConnection
from residua.connections.families.stream_logits import OFFSET, ProductionHyperConnections, reading_biases
from residua.connections.parts.ends import LastOf
from residua.connections.parts.facts import Mixing
from residua.connections.parts.gates import logit
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Steps, require_option
from residua.connections.parts.spec import TensorSpec
from residua.ops import guarded_sinkhorn, hyper_read


@dataclass(frozen=True)
class DeepSeekHyperConnections(ProductionHyperConnections):
    """mHC of DeepSeek-V4 (`head="sigmoid"`) and GLM-5.3-Flash (`head="mean"`). Does not start as the plain residual.

    At the start C is near 1/n everywhere, so it averages the streams, and each stream is read with weight 1/2.

    iterations      pairs of divisions of C by its row and column sums; the first division is a softmax
    gate_eps        a constant that is added to the read weights, to the softmax, and to every sum that divides C
    head            the readout: "sigmoid", its own weights from all streams (DeepSeek-V4), or "mean" (GLM-5.3-Flash);
                    with pre="previous" the h_pre of the last sublayer reads out
    pre             the h_pre that reads for a sublayer: its "own", or that of the "previous" one (DeepSeek-V4.1), where
                    the first sublayer reads stream 0, and the state holds the streams and the x that was read
    start           "published": W is drawn and the biases are 0 (both models in transformers); "residual": W is 0, C is
                    near the identity, each sublayer prefers one stream, and the biases compensate the shrinkage of the
                    state by `gate_eps`, so that the stream computes exactly the plain residual
    """

    title = "mHC of DeepSeek-V4 and GLM-5.3-Flash"
    equation = "C^T X + h_post F(norm(h_pre X)), C nearly doubly stochastic"
    users = (
        'DeepSeek-V4 (`deepseek_v4` in transformers) and GLM-5.3-Flash (`glm5_next`), and with `pre="previous"` '
        "DeepSeek-V4.1-Flash. `residua.models.dialects` loads their parameters."
    )
    paper = "transformers, models/deepseek_v4"
    constraint = "doubly stochastic"

    iterations: Steps = 20
    pre: Literal["own", "previous"] = "own"

    def __post_init__(self):
        super().__post_init__()
        exact = self.start == "published" or self.gate_eps <= 1e-5  # a larger eps needs weights that no sigmoid reaches
        require_option(self, "gate_eps", exact, "at most 1e-5 with start='residual'")
        require_option(self, "head", self.pre == "own" or self.head == "sigmoid", "'sigmoid' with pre='previous'")

    def state_spec(self, boundary: int, dim: int) -> Any:
        streams = TensorSpec((self.num_streams, dim))
        return streams if self.pre == "own" else (streams, TensorSpec((dim,)))

    @property
    def source(self) -> str:
        if self.pre == "previous":
            return "transformers, models/deepseek_v41"
        return self.paper if self.head == "sigmoid" else "transformers, models/glm5_next"

    @property
    def residual_start(self) -> Mapping[str, Any] | str:
        if self.head == "mean" and self.gate_eps:
            return (
                f"every mixing shrinks the state by about gate_eps={self.gate_eps}, which head='mean', the mean of the "
                "streams, cannot undo; use head='sigmoid' or gate_eps=0.0"
            )
        if self.gate_eps > 1e-5:
            return f"no biases in float32 make up for gate_eps={self.gate_eps} exactly; use at most 1e-5"
        return super().residual_start

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        if self.pre == "own":
            return super().assemble(dim, num_sublayers, norm, norm_eps)
        connections = [SinglePassConnection(self, dim, i, norm(i), norm_eps=norm_eps) for i in range(num_sublayers)]
        return Stream(FirstStream(self.expander(dim)), connections, LastOf())  # reads the last connection's x

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
        reads = scheme.read_biases(index if scheme.pre == "own" else index + 1)
        self.logits = scheme.logits(dim, [reads, scheme.write_biases(index), mixing], norm_eps)
        self.norm = norm

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        scheme, n = self.scheme, self.scheme.num_streams
        pre, post, res = self.logits(streams)
        h_pre = torch.sigmoid(pre) + scheme.gate_eps
        mixing = guarded_sinkhorn(res.unflatten(-1, (n, n)), scheme.iterations, eps=scheme.gate_eps)
        return MixingCoefficients(h_pre, mixing.mT.contiguous(), 2 * torch.sigmoid(post))


class SinglePassConnection(DeepSeekConnection):
    """`pre="previous"`: the state is the streams, and x read from them, (batch, seq, dim).

    h_pre is computed from the streams before the write. It reads the streams after the write, for the next sublayer or
    for the readout.
    """

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        streams, x = state
        return self.norm(x), Carry(streams, self.coefficients(streams))

    def write(self, y: Tensor, carry: Carry) -> State:
        streams = super().write(y, carry)
        return streams, hyper_read(streams, carry.coefficients.h_pre, implementation=self.scheme.implementation)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        """Return the mixing of the streams, without h_pre: the weights that read here were computed earlier."""
        return super().shortcut(state, carry, y)._replace(h_pre=None)

    def streams(self, state: State) -> Tensor:
        return state[0]


class FirstStream(nn.Module):
    """Make the first state of `pre="previous"`, the streams and stream 0, from the embedding x: (batch, seq, dim)."""

    def __init__(self, expand: nn.Module):
        super().__init__()
        self.expand = expand

    def forward(self, x: Tensor, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
        streams = self.expand(x)
        return streams, streams[..., 0, :]
