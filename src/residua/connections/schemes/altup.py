"""Alternating updates, AltUp (arXiv 2301.13310), with LAuReL (arXiv 2411.07501), as Gemma 3n runs them.

    P = X + C(t) X,   a = P_0,   a <- (a + F_1(norm(a)) + L(norm(a))) / sqrt(2),   a <- a + F_2(norm(a)),
    X_k <- P_k + (1 + c_k(t')) (a - P_0)

A block of attention F_1 and MLP F_2 updates only the active stream. All n streams are predicted before the block and
corrected after it by the error of the active prediction. t and t' are the results of a router for the active stream
before and after the block. L is a low-rank map parallel to the attention. This is `gemma3n` in transformers.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from residua.connections.base import Carry, Connection, Norm, State, Stream
from residua.connections.families.streams import RecomputingScheme
from residua.connections.parts.ends import MeanStreams, Repeat
from residua.connections.parts.memory import Memory
from residua.connections.parts.norm import RMSNorm
from residua.connections.parts.options import SeveralRows, require_option
from residua.connections.parts.phases import SharedModule
from residua.connections.parts.projection import Projection, WideProjection, is_plain
from residua.connections.parts.spec import TensorSpec
from residua.errors import Natural, Positive
from residua.ops import at_least_float32, hyper_mix, hyper_write
from residua.ops.norm import mean_square
from residua.ops.precision import linear


class PredictionCoefficients(NamedTuple):
    """h_res: (batch, seq, n, n), I + C with the target stream first, in at least float32; None before an MLP."""

    h_res: Tensor | None


@dataclass(frozen=True)
class AlternatingUpdates(RecomputingScheme):
    """AltUp with LAuReL. Does not start as the plain residual: L is normalised, and the embedding is mapped to streams.

    A block is two sublayers. Before the first, attention, all streams are predicted; after the second, the MLP, they
    are corrected.

    num_streams   n, at least 2
    active        the stream that the sublayers read and update
    laurel_rank   rank of L(x) = x + norm(B A x), parallel to attention; 0 omits L and the division by sqrt(2)
    weight_std    standard deviation of all initial weights
    expand        "projections": the first stream is the embedding; a linear map makes each other stream from it, and
                  a second one reads that stream out, both rescaled to the root mean square of the first stream
                  (Gemma 3n); "repeat": the streams are copies of the embedding, and their mean is read out
    """

    title = "AltUp with LAuReL"
    equation = "P + (1 + c) (block(P_0) - P_0), P = X + C X"
    users = "Gemma 3n (`gemma3n` in transformers). `residua.models.dialects` loads its parameters."
    paper = "arXiv 2301.13310"
    residual_start = (
        "LAuReL divides the stream by sqrt(2) and adds a normalised term, and the streams are predicted and corrected "
        "by weights that are drawn"
    )

    num_streams: SeveralRows = 4
    active: int = 0
    laurel_rank: Natural = 64
    weight_std: Positive = 0.02
    expand: Literal["projections", "repeat"] = "projections"

    def __post_init__(self):
        super().__post_init__()
        require_option(self, "active", 0 <= self.active < self.num_streams, f"0 to {self.num_streams - 1}, a stream")

    def state_spec(self, boundary: int, dim: int) -> TensorSpec | tuple[TensorSpec, ...]:
        streams = TensorSpec((self.num_streams, dim))
        return (streams, TensorSpec((dim,))) if boundary % 2 else streams

    def assemble(self, dim: int, num_sublayers: int, norm: Norm, norm_eps: float) -> Stream:
        connections: list[Connection] = []
        for i in range(num_sublayers):
            if i % 2:
                predict = connections[-1]
                assert isinstance(predict, PredictConnection)
                connections.append(CorrectConnection(self, norm(i), predict))
            else:
                connections.append(PredictConnection(self, dim, norm(i), norm_eps=norm_eps))
        if self.expand == "repeat":
            return Stream(Repeat(self.num_streams), connections, ClosedCollapse(self, MeanStreams()))
        return Stream(ProjectedExpand(self, dim), connections, ClosedCollapse(self, ProjectedCollapse(self, dim)))


class StreamRouter(nn.Module):
    """t = tanh(W norm(x) / dim): (batch, seq, dim) -> (batch, seq, n), in at least float32."""

    def __init__(self, scheme: AlternatingUpdates, dim: int, *, eps: float):
        super().__init__()
        self.scheme = scheme
        self.dim = dim
        self.norm = RMSNorm(dim, eps=eps, recompute=scheme.recompute == "replay")
        self.project = WideProjection(dim, scheme.num_streams, std=scheme.weight_std)

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype.itemsize >= 4 else self.scheme.derive(at_least_float32, x)
        scaled = self.scheme.derive(partial(torch.div, other=self.dim), self.norm(wide))
        return torch.tanh(self.project(scaled))


class Laurel(nn.Module):
    """x + norm(B A x), with A: dim -> rank: (batch, seq, dim) -> the same shape. arXiv 2411.07501."""

    def __init__(self, scheme: AlternatingUpdates, dim: int, *, eps: float):
        super().__init__()
        self.scheme = scheme
        self.left = Projection(dim, scheme.laurel_rank, std=scheme.weight_std)
        self.right = Projection(scheme.laurel_rank, dim, std=scheme.weight_std)
        self.norm = RMSNorm(dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        low = self.left(x)
        if is_plain(self.right, Projection):  # its result is as wide as the model, and quick to recompute
            return x + self.norm(self.scheme.derive(linear, low, self.right.weight)).to(x.dtype)
        return x + self.norm(self.right(low)).to(x.dtype)


class PredictConnection(Connection):
    """The connection around attention: predicts all streams, (batch, seq, n, dim), and updates the active stream.

    It owns the router, which it shares with the connection around the MLP. Its result is the predicted streams and the
    active stream, (batch, seq, dim).
    """

    def __init__(self, scheme: AlternatingUpdates, dim: int, norm: nn.Module, *, norm_eps: float):
        super().__init__()
        self.scheme = scheme
        self.router = StreamRouter(scheme, dim, eps=norm_eps)
        # C(t): n x n entries, the target stream first
        self.predict = WideProjection(scheme.num_streams, scheme.num_streams**2, std=scheme.weight_std)
        self.laurel = Laurel(scheme, dim, eps=norm_eps) if scheme.laurel_rank else None
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        n, stream = state.shape[-2], partial(_stream, self.scheme.active)
        change = self.predict(self.router(self.scheme.derive(stream, state))).unflatten(-1, (n, n))
        h_res = change + torch.eye(n, dtype=change.dtype, device=change.device)
        predicted = self.scheme.derive(hyper_mix, state, h_res)
        active = self.scheme.derive(stream, predicted)
        x = self.norm(active)
        beside = () if self.laurel is None else (self.laurel(x),)
        return x, Carry((predicted, active, *beside), PredictionCoefficients(h_res))

    def write(self, y: Tensor, carry: Carry) -> State:
        predicted, active, *beside = carry.residual
        updated = (active + y + beside[0]) / math.sqrt(2) if beside else active + y
        return predicted, updated.to(active.dtype)

    def streams(self, state: State) -> Tensor:
        return closed(state, self.scheme.active)


class CorrectConnection(Connection):
    """The connection around the MLP: it updates the active stream, and corrects all streams by the innovation.

    The innovation is the updated active stream minus its prediction.
    """

    def __init__(self, scheme: AlternatingUpdates, norm: nn.Module, predict: PredictConnection):
        super().__init__()
        self.scheme = scheme
        self.router = SharedModule(predict, "router")
        n = scheme.num_streams
        self.correct = WideProjection(n, n, std=scheme.weight_std)
        self.norm = norm

    def read(self, state: State, memory: Memory | None = None) -> tuple[Tensor, Carry]:
        return self.norm(state[1]), Carry(state, PredictionCoefficients(None))

    def write(self, y: Tensor, carry: Carry) -> State:
        predicted, active = carry.residual
        updated = (active + y).to(active.dtype)
        weights = 1 + self.correct(self.router(updated))
        innovation = self.scheme.derive(partial(_innovation, self.scheme.active), updated, predicted)
        return hyper_write(predicted, innovation, None, weights, recompute_every=self.scheme.keeps_every)

    def streams(self, state: State) -> Tensor:
        return closed(state, self.scheme.active)


def _stream(i: int, streams: Tensor) -> Tensor:
    return streams[..., i, :].contiguous()  # a view would keep all streams alive


def _innovation(active: int, updated: Tensor, predicted: Tensor) -> Tensor:
    return updated - predicted[..., active, :]


def closed(state: State, active: int) -> Tensor:
    """Return the streams of a state before or after a connection, (batch, seq, n, dim).

    Between the attention and the MLP of a block the innovation has not been added yet; it is added here to every
    stream, with weight 1.
    """
    if not isinstance(state, tuple):
        return state
    streams, updated = state
    return streams + (updated - streams[..., active, :]).unsqueeze(-2)


def _rescaled(x: Tensor, size: Tensor) -> Tensor:
    """Return x rescaled to the root mean square `size`, (..., 1), in at least float32; 1e-5 guards x = 0."""
    return at_least_float32(x) * size / mean_square(x).clamp_min(1e-5).sqrt()


def _size(x: Tensor) -> Tensor:
    """Return the root mean square of x, (..., dim) -> (..., 1), with derivative 0 if x is zero."""
    square = mean_square(x)
    # sqrt has an infinite derivative at 0; the inner where keeps it out of derivatives.
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


class ProjectedExpand(nn.Module):
    """The embedding, and n - 1 linear maps of it, rescaled to its root mean square.

    (batch, seq, dim) -> (batch, seq, n, dim).
    """

    def __init__(self, scheme: AlternatingUpdates, dim: int):
        super().__init__()
        self.scheme = scheme
        self.project = nn.ModuleList(Projection(dim, dim, std=scheme.weight_std) for _ in range(scheme.num_streams - 1))

    def forward(self, x: Tensor, memory: Memory | None = None) -> Tensor:
        size = _size(x)
        others = (self.scheme.derive(_rescaled, part(x), size) for part in self.project)
        return torch.stack([x, *(other.to(x.dtype) for other in others)], -2)


class ClosedCollapse(nn.Module):
    """The readout `read` of the streams, also between the attention and the MLP of a block."""

    def __init__(self, scheme: AlternatingUpdates, read: nn.Module):
        super().__init__()
        self.active = scheme.active
        self.read = read

    def forward(self, state: State, memory: Memory | None = None) -> Tensor:
        return self.read(closed(state, self.active))


class ProjectedCollapse(nn.Module):
    """The mean of the first stream and of linear maps of the others, rescaled to the first stream's root mean square.

    (batch, seq, n, dim) -> (batch, seq, dim).
    """

    def __init__(self, scheme: AlternatingUpdates, dim: int):
        super().__init__()
        self.scheme = scheme
        self.project = nn.ModuleList(Projection(dim, dim, std=scheme.weight_std) for _ in range(scheme.num_streams - 1))

    def forward(self, streams: Tensor, memory: Memory | None = None) -> Tensor:
        first, *others = (self.scheme.derive(partial(_stream, i), streams) for i in range(streams.shape[-2]))
        size = _size(first)
        parts = [self.scheme.derive(_rescaled, part(other), size) for part, other in zip(self.project, others)]
        return torch.stack([at_least_float32(first), *parts]).mean(0).to(streams.dtype)
