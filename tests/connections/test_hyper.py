"""Hyper-connections: the equations, the start, and that nothing that is computed is thrown away."""

import math

import pytest
import torch
from torch import Tensor

from residua import HyperConnections
from residua.connections.hyper import HyperConnection
from support.stream_cases import (
    DIM,
    built,
    output_beside_residual,
    states,
)
from support.tolerances import assert_close
from support.variants import ALL, bare_sublayers, normal

VARIANTS = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, HyperConnections)}
every_variant = pytest.mark.parametrize("scheme", VARIANTS.values(), ids=VARIANTS)
PUBLISHED = {name: scheme for name, scheme in VARIANTS.items() if scheme.start == "published"}
every_published_start = pytest.mark.parametrize("scheme", PUBLISHED.values(), ids=PUBLISHED)


def rms_norm(x: list[float], gain: list[float], eps: float = 1e-5) -> list[float]:
    size = math.sqrt(sum(a * a for a in x) / len(x) + eps)
    return [a / size * g for a, g in zip(x, gain)]


def reference(connection: HyperConnection, streams: Tensor, sublayer) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of the paper for one token in loops over numbers: what the sublayer sees, and the next streams.

    streams: (n, dim). Column 0 of alpha reads, the others mix; b writes.
    """
    rows, n = streams.tolist(), len(streams)
    alpha, b = connection.alpha.tolist(), connection.beta.tolist()
    if connection.project is not None:
        w, gain = connection.project.weight.tolist(), connection.stream_norm.weight.tolist()
        s_alpha, s_beta = connection.scales.tolist()
        bounded = math.tanh if connection.scheme.tanh else lambda value: value
        for i in range(n):
            normalised = rms_norm(rows[i], gain)
            products = [sum(a * c for a, c in zip(normalised, row)) for row in w]
            for column in range(n + 1):
                alpha[i][column] += s_alpha * bounded(products[column])
            b[i] += s_beta * bounded(products[n + 1])
    width = range(len(rows[0]))
    mixed = [[sum(alpha[i][column] * rows[i][f] for i in range(n)) for f in width] for column in range(n + 1)]
    x = torch.tensor(rms_norm(mixed[0], connection.norm.weight.tolist()), dtype=torch.float64)
    y = sublayer(x)
    written = [[mixed[1 + o][f] + b[o] * y[f].item() for f in width] for o in range(n)]
    return x, torch.tensor(written, dtype=torch.float64)


@every_variant
def test_the_equations(scheme):
    stream = built(scheme, noise=0.3)
    (sublayer,) = bare_sublayers(DIM, 1)
    streams = normal(2, 3, scheme.num_streams, DIM)
    for connection in stream.connections:
        x, carry = connection.read(streams)
        after = connection.write(sublayer(x), carry)
        for place in [(0, 0), (1, 2)]:
            expected_x, expected_after = reference(connection, streams[place], sublayer)
            assert_close(x[place], expected_x)
            assert_close(after[place], expected_after)


@every_published_start
def test_starts_as_the_residual(scheme):
    """n equal streams, whose sum is n times the residual; the norm after the collapse takes the factor away."""
    ours, residual = output_beside_residual(scheme)
    assert_close(ours, scheme.num_streams * residual)


@every_published_start
def test_sublayers_start_by_reading_one_stream_each_in_turn(scheme):
    stream, n = built(scheme), scheme.num_streams
    for index, (connection, state) in enumerate(states(stream)):
        if connection is None:
            break
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        expected = torch.eye(n, dtype=torch.float64)
        assert torch.equal(h_pre, expected[index % n].expand_as(h_pre))
        assert torch.equal(h_res, expected.expand_as(h_res))
        assert torch.equal(h_post, torch.ones_like(h_post))
