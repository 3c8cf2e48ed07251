"""The family of hyper-connections: streams that are read, mixed and written by weights."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Connection, State
from residua.connections.families.streams import RecomputingScheme
from residua.connections.parts.facts import Mixing
from residua.connections.parts.gates import Scale
from residua.connections.parts.memory import Memory
from residua.connections.parts.options import Factor, only_with
from residua.connections.parts.projection import WideProjection, project_normalised
from residua.ops import at_least_float32, hyper_read, hyper_write
from residua.ops.dispatch import Implementation

SPREAD = 0.005
"""Distance from 1 of the largest initial write weight of a mirrored start, as in Megatron-LM's wide residual."""


class MixingCoefficients(NamedTuple):
    """h_pre: (..., n), h_res: (..., n, n) with the target stream first, h_post: (..., n), in at least float32.

    h_pre is (..., n, n) if a sublayer reads a mixture for each row (Frac-Connections). The leading axes are
    (batch, seq), or none if the coefficients are static. If h_pre is None, the first stream is read; if h_res is None,
    nothing is mixed: the scheme has no such mapping, or this connection omits it because it could change nothing.
    """

    h_pre: Tensor | None
    h_res: Tensor | None
    h_post: Tensor


@dataclass(frozen=True, kw_only=True)
class MixingScheme(RecomputingScheme):
    """A scheme that reads, mixes and writes the rows of the state by `MixingCoefficients`.

    implementation  how reads, writes and Sinkhorn's iteration are computed: "reference" (PyTorch), "triton" (CUDA
                    kernels, for the operations that have one), or "auto", triton if it can run. The kernels were
                    timed on a GPU only in isolation, not in a model, so the default is "reference"
    """

    implementation: Implementation = "reference"


@dataclass(frozen=True, kw_only=True)
class WeightedScheme(MixingScheme):
    """A scheme whose weights are constants, plus a part that depends on the token.

    dynamic         True: the weights also depend on the token; False: they are constants
    tanh            with dynamic=True: whether the token-dependent part is bounded by tanh
    scale_init      with dynamic=True: initial factor on the token-dependent part
    """

    dynamic: bool = True
    tanh: Annotated[bool, only_with(dynamic=True)] = True
    scale_init: Annotated[Factor, only_with(dynamic=True)] = 0.01


class MixingConnection(Connection):
    """Read, mix and write the streams by `MixingCoefficients`, which a subclass computes in `coefficients`."""

    scheme: MixingScheme
    norm: nn.Module

    @abstractmethod
    def coefficients(self, streams: Tensor) -> MixingCoefficients:
        """Return the coefficients for streams: (batch, seq, n, dim)."""

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        coefficients = self.coefficients(state)
        h_pre, implementation = coefficients.h_pre, self.scheme.implementation
        x = state[..., 0, :] if h_pre is None else hyper_read(state, h_pre, implementation=implementation)
        return self.norm(x), Carry(state, coefficients)

    def write(self, y: Tensor, carry: Carry) -> State:
        state, (_, h_res, h_post) = carry
        every, implementation = self.scheme.keeps_every, self.scheme.implementation
        return hyper_write(state, y, h_res, h_post, recompute_every=every, implementation=implementation)

    def shortcut(self, state: State, carry: Carry, y: Tensor) -> Mixing:
        h_pre, h_res, h_post = carry.coefficients
        identity = torch.eye(h_post.shape[-1], dtype=h_post.dtype, device=h_post.device)
        left_out = tuple(name for name, value in carry.coefficients._asdict().items() if value is None)
        return Mixing(
            identity if h_res is None else h_res, identity[0] if h_pre is None else h_pre, h_post, left_out=left_out
        )


class CutConnection(MixingConnection):
    """A mixing connection that cuts the width into `pieces` rows of equal size; the state is (batch, seq, dim)."""

    pieces: int

    @abstractmethod
    def gather(self, rows: Tensor, h_pre: Tensor) -> Tensor:
        """Return a sublayer's input from the rows, (batch, seq, pieces, dim / pieces) -> the same shape.

        Several mixtures are put side by side; a single one is repeated.
        """

    def rows(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.pieces, -1))

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        rows = self.rows(state)
        coefficients = self.coefficients(rows)
        assert coefficients.h_pre is not None
        return self.norm(self.gather(rows, coefficients.h_pre).flatten(-2)), Carry(state, coefficients)

    def write(self, y: Tensor, carry: Carry) -> State:
        return super().write(self.rows(y), Carry(self.rows(carry.residual), carry.coefficients)).flatten(-2)


class WeightedConnection(MixingConnection):
    """A connection whose weights are constants, plus a part that depends on the token: n rows, `reads` mixtures.

    With [A_m | A_r] the columns of alpha, (n, reads + n), and N = RMSNorm of each row of the state with one gain:

        alpha = start + s_alpha tanh(N W_alpha),   beta = 1 + s_beta tanh(N w_beta)
        h_pre = A_m^T,   h_res = A_r^T,   h_post = beta                        (arXiv 2409.19606 equations 10 to 13)

    At the start mixture c is row (first + c) mod n, A_r is the identity, and W_alpha and w_beta, the rows of `project`,
    are 0. width: the width of one row of the state.
    """

    def __init__(
        self, scheme: WeightedScheme, n: int, width: int, norm: nn.Module, *, reads: int, first: int, norm_eps: float
    ):
        super().__init__()
        self.scheme: WeightedScheme = scheme
        self.reads, self.first = reads, first
        self.norm = norm
        self.norm_eps = norm_eps
        self.alpha = nn.Parameter(torch.empty(n, reads + n))
        self.beta = nn.Parameter(torch.empty(n))
        self.project = self.stream_norm = self.scales = None
        if scheme.dynamic:
            self.project = WideProjection(width, reads + n + 1, std=0.0)
            self.stream_norm = Scale(1.0, width)
            self.scales = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.alpha.zero_()
            for column in range(self.reads):
                self.alpha[(self.first + column) % len(self.alpha), column] = 1
            self.alpha[:, self.reads :].fill_diagonal_(1)
            self.beta.fill_(1)
            if self.scales is not None:
                self.scales.fill_(self.scheme.scale_init)

    def weights(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return alpha, (..., n, reads + n), and beta, (..., n), for a state (..., n, width)."""
        alpha, beta = at_least_float32(self.alpha), at_least_float32(self.beta)
        if self.project is not None and self.stream_norm is not None and self.scales is not None:
            share = project_normalised(self.project, rows, self.norm_eps, gain=self.stream_norm())
            if self.scheme.tanh:
                share = share.tanh()
            s_alpha, s_beta = at_least_float32(self.scales).unbind()
            alpha = alpha + s_alpha * share[..., :-1]
            beta = beta + s_beta * share[..., -1]
        return alpha, beta
