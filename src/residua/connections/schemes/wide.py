"""The wide residual: n residual streams that are read and written by learned constants, and never mixed.

    x = sum_i s(a_i) X_i,   X_i <- rho_i X_i + 2 s(b_i) F(norm(x)),   s = sigmoid

This is the streamwise wide residual that NVIDIA proposes for Megatron-LM (pull request 6716). At the start all streams
are read alike, and the write weights lie in symmetric pairs around 1. The mean of the streams is therefore the plain
residual, although the streams differ.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from residua.connections.base import Norm, Stream
from residua.connections.families.mixing import MixingCoefficients, MixingConnection, MixingScheme
from residua.connections.families.stream_logits import even_biases
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.gates import logit
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Fraction, OnlyIf, require_option
from residua.connections.parts.sharded import SelfStarting
from residua.errors import NotNegative
from residua.ops import at_least_float32, hyper_read
from residua.ops.dispatch import Implementation


@dataclass(frozen=True)
class WideResidual(ExpandingScheme, MixingScheme):
    """The wide residual. Without `retention` it starts as the plain residual, in streams that differ.

    spread          c: the write logits b start evenly between -c and c; with 0 the streams never differ
    retention       start of rho = 1 - max_forget s(-r) with learned r, the share of a stream that a write keeps; None:
                    a write keeps all of it
    max_forget      the largest share that a write can forget
    """

    title = "Wide residual"
    equation = "rho X + p F(norm(sum_i r_i X_i))"
    users = "Proposed for Megatron-LM by NVIDIA; no public model is known to use it."
    paper = "github.com/NVIDIA/Megatron-LM/pull/6716"
    residual_start = {"retention": None, "max_forget": 0.1}

    spread: NotNegative = 0.01
    retention: Fraction | None = None
    max_forget: Annotated[Fraction, OnlyIf("retention is a number", lambda scheme: scheme.retention is not None)] = 0.1

    def __post_init__(self):
        super().__post_init__()
        if self.retention is not None:
            lowest = 1 - self.max_forget
            require_option(self, "retention", self.retention > lowest, f"above 1 - max_forget, {lowest:g}, or null")

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections = [WideConnection(self, norm(i)) for i in range(num_sublayers)]
        return Stream(self.expander(dim), connections, WideCollapse(self.num_streams, self.implementation))


class WideRead(SelfStarting):
    """The weights s(a) that read n streams, (n,) in at least float32; they start at 1 / n within 1e-3, with sum 1."""

    def __init__(self, num_streams: int):
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_streams))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.logits.copy_(torch.tensor(even_biases(len(self.logits)), dtype=self.logits.dtype, device="cpu"))

    def forward(self) -> Tensor:
        return torch.sigmoid(at_least_float32(self.logits))


class WideCollapse(nn.Module):
    """The readout x = sum_i s(a_i) X_i: (batch, seq, n, dim) -> (batch, seq, dim)."""

    def __init__(self, num_streams: int, implementation: Implementation):
        super().__init__()
        self.weights = WideRead(num_streams)
        self.implementation: Implementation = implementation

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        return hyper_read(streams, self.weights(), implementation=self.implementation)


class WideConnection(MixingConnection):
    """One wide residual; the state is (batch, seq, n, dim). h_pre = s(a), h_post = 2 s(b), h_res = diag(rho)."""

    def __init__(self, scheme: WideResidual, norm: nn.Module):
        super().__init__()
        self.scheme: WideResidual = scheme
        self.weights = WideRead(scheme.num_streams)
        self.write_logits = nn.Parameter(torch.empty(scheme.num_streams))
        self.retention_logits: nn.Parameter | None = None
        if scheme.retention is not None:
            self.retention_logits = nn.Parameter(torch.empty(scheme.num_streams))
        self.norm = norm
        self.reset_parameters()

    def reset_parameters(self) -> None:
        scheme = self.scheme
        with torch.no_grad():
            spread = torch.linspace(-scheme.spread, scheme.spread, scheme.num_streams, device="cpu")
            self.write_logits.copy_(spread)
            if self.retention_logits is not None and scheme.retention is not None:
                nn.init.constant_(self.retention_logits, -logit((1 - scheme.retention) / scheme.max_forget))

    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        h_res = None
        if self.retention_logits is not None:
            h_res = torch.diag(1 - self.scheme.max_forget * torch.sigmoid(-at_least_float32(self.retention_logits)))
        return MixingCoefficients(self.weights(), h_res, 2 * torch.sigmoid(at_least_float32(self.write_logits)))
