"""Hyper-connections: the equations, the start, and that nothing that is computed is thrown away."""

import torch
from torch import Tensor

from residua import HyperConnections
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import (
    built,
    output_beside_residual,
    states,
)
from support.tolerances import assert_close
from support.variants import every


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: HyperConnections) -> Tensor:
    """Algorithm 2 of the paper, token by token. Column 0 of alpha reads, the others mix; b writes."""
    n = scheme.num_streams
    rows = token.expand(n, -1)
    for connection, sublayer in zip(stream.connections, sublayers):
        alpha, b = connection.alpha, connection.beta
        if scheme.dynamic:
            share = rms_norm(rows, connection.stream_norm.weight) @ connection.project.weight.T
            share = share.tanh() if scheme.tanh else share
            alpha, b = alpha + connection.scales[0] * share[:, :-1], b + connection.scales[1] * share[:, -1]
        read, *mixed = (sum(alpha[i, column] * rows[i] for i in range(n)) for column in range(n + 1))
        y = sublayer(rms_norm(read, connection.norm.weight))
        rows = torch.stack([mixed[o] + b[o] * y for o in range(n)])
    return rows.sum(0) / (n if scheme.head == "mean" else 1)


@every(HyperConnections)
def test_values_and_gradients_are_those_of_the_algorithm(scheme):
    assert_computes(built(scheme, noise=0.3, count=4), published, scheme, tokens=(1, 2))


@every(HyperConnections, start="published")
def test_the_scheme_starts_as_the_plain_residual(scheme):
    """n equal streams, whose sum is n times the residual; the norm after the collapse takes the factor away."""
    ours, residual = output_beside_residual(scheme)
    assert_close(ours, scheme.num_streams * residual)


def test_a_single_stream_has_no_pair_of_write_weights_around_one():
    assert_close(*output_beside_residual(HyperConnections(num_streams=1, start="mirrored", head="mean")))


@every(HyperConnections, start="published")
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
