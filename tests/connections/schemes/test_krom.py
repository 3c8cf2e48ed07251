"""KromHC against a plain form for one token: the Kronecker product, and the start of the authors' code."""

import torch
from torch import Tensor

from residua import KroneckerHyperConnections
from support.references import assert_computes, by_token, logits_of_token, rms_norm
from support.stream_cases import built, states
from support.tolerances import assert_close
from support.variants import every


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: KroneckerHyperConnections) -> Tensor:
    """Token by token, with torch.kron of factors that are sums of the identity and the swap."""
    n = scheme.num_streams
    identity = torch.eye(2, dtype=token.dtype)
    rows = token.expand(n, -1)
    for connection, sublayer in zip(stream.connections, sublayers):
        pre, res, post = logits_of_token(connection.logits, rows).split([n, 2 * (n.bit_length() - 1), n])
        mixing = torch.ones(1, 1, dtype=token.dtype)
        for a, b in res.view(-1, 2):
            p, q = a.exp() / (a.exp() + b.exp()), b.exp() / (a.exp() + b.exp())
            mixing = torch.kron(mixing, p * identity + q * identity.flip(0))
        read = (1 / (1 + torch.exp(-pre))) @ rows
        y = sublayer(rms_norm(read, connection.norm.weight))
        rows = mixing @ rows + 2 / (1 + torch.exp(-post))[:, None] * y
    return rows.sum(0) / (n if scheme.head == "mean" else 1)


@every(KroneckerHyperConnections)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3, count=3), published, scheme, tokens=(1, 2))


def test_the_start_is_that_of_the_authors_code():
    """Logits of 1 for stream `index` mod n and -1 for the others, in reads and writes; every factor keeps 1 - e^-8."""
    for index, (connection, state) in enumerate(states(built(KroneckerHyperConnections()))):
        if connection is None:
            break
        h_pre, h_res, h_post = connection.read(state)[1].coefficients
        favourite = 2 * (torch.arange(4) == index % 4).double() - 1
        assert_close(h_pre, torch.sigmoid(favourite).expand_as(h_pre))
        assert_close(h_post, 2 * torch.sigmoid(favourite).expand_as(h_post))
        kept = torch.sigmoid(torch.tensor(8.0).double())
        assert_close(h_res.diagonal(dim1=-2, dim2=-1), (kept**2).expand_as(h_pre))
        assert not connection.logits.project.weight.any()
