"""Frac-Connections: the paper's algorithm, start and counts, and hyper-connections as the case of one fraction."""

import pytest
import torch
from torch import Tensor

from residua import FracConnections
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import built
from support.variants import every


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: FracConnections) -> Tensor:
    """Algorithms 1 and 2 of the paper for one token after another: [B; Y | A] as one matrix FC, (m + 1, 2 m)."""
    m = scheme.num_fractions
    h = token
    for connection, sublayer in zip(stream.connections, sublayers):
        parts = h.reshape(m, -1)
        fc = torch.cat([torch.cat([torch.zeros_like(connection.beta), connection.beta])[None], connection.alpha])
        if scheme.dynamic:
            size = (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            share = parts / size * connection.stream_norm.weight @ connection.project.weight.T
            share = torch.tanh(share) if scheme.tanh else share
            s_alpha, s_beta = connection.scales
            written = torch.cat([torch.zeros_like(connection.beta), s_beta * share[:, -1]])
            fc = fc + torch.cat([written[None], s_alpha * share[:, :-1]])
        (b, (y, a)) = fc[0, m:], fc[1:].split(m, 1)
        read = (y.T @ parts).reshape(-1)
        out = sublayer(rms_norm(read, connection.norm.weight))
        h = (torch.diag(b) @ out.reshape(m, -1) + a.T @ parts).reshape(-1)
    return h


@every(FracConnections)
def test_values_and_gradients_are_those_of_the_algorithm(scheme):
    assert_computes(built(scheme, noise=0.3, count=3), published, scheme, tokens=(1, 2))


@pytest.mark.parametrize(("dynamic", "count"), [(False, 1152), (True, 165_056)])
def test_the_number_of_parameters_is_the_published_one(dynamic, count):
    """OLMo-1B with four fractions, width 2048 and 16 layers (section 4.4), without the norms before the sublayers."""
    with torch.device("meta"):
        stream = FracConnections(dynamic=dynamic).build(2048, 32)
    assert sum(parameter.numel() for parameter in stream.parameters()) == count + 32 * 2048
