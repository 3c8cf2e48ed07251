"""Shared checks of schemes with several streams: how they start, and whether their streams become different."""

from collections.abc import Iterator

import torch
from torch import Tensor

from residua import Connection, Residual, Scheme, Stream
from support.variants import bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 6


def built(scheme: Scheme, *, noise: float = 0.0, dim: int = DIM, count: int = SUBLAYERS) -> Stream:
    torch.manual_seed(0)
    stream = scheme.build(dim, count).double()
    return perturbed(stream, scale=noise) if noise else stream


def output_beside_residual(scheme: Scheme) -> tuple[Tensor, Tensor]:
    """What the scheme and the plain residual make of the same input with the same sublayers, at the start."""
    x, sublayers = 3 * normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    return built(scheme)(x, sublayers), built(Residual())(x, sublayers)


def states(stream: Stream) -> Iterator[tuple[Connection, Tensor]]:
    """Every connection with the state that it reads, and then None with the last state."""
    state = stream.expand(normal(2, 5, DIM))
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, len(stream.connections))):
        yield connection, state
        state = connection(state, sublayer)
    yield None, state


def spread_over_streams(state: Tensor) -> float:
    """Return the distance between the streams relative to their size. state: (batch, seq, streams, dim)."""
    return ((state - state.mean(-2, keepdim=True)).norm() / state.norm()).item()
