"""Attention Residuals (AttnRes) against the publication's form, the plain residual, and what may be kept."""

import pytest
import torch
from torch import Tensor

from residua import AttentionResiduals, Residual
from support.references import assert_computes, by_token, rms_norm
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM = 8
blocks = pytest.mark.parametrize("block_size", [1, 2, 3, 12])


def stream_of(
    block_size: int, sublayers: int, *, eps: float = 1e-5, dtype: torch.dtype = torch.float64, heads: int = 1
):
    """A stream with random queries and gains."""
    return perturbed(AttentionResiduals(block_size=block_size, heads=heads).build(DIM, sublayers, norm_eps=eps)).to(
        dtype
    )


def attend(values: list[Tensor], read, eps: float) -> Tensor:
    """One token: the softmax over depth of query . norm(value), times the values, for each head's features."""
    keys = [read.query * rms_norm(value, read.gain, eps) for value in values]
    mixed = []
    for features in torch.arange(DIM).chunk(read.heads):
        scores = [key[features].sum().exp() for key in keys]
        mixed.append(sum(score / sum(scores) * value[features] for score, value in zip(scores, values)))
    return torch.cat(mixed)


@by_token
def published(stream, embedding: Tensor, sublayers: list, block_size: int, eps: float) -> Tensor:
    """Token by token: a list of completed blocks, and the partial sum of the running one.

    The first sublayer reads the embedding as it is. A sublayer whose index is a multiple of the block size completes
    the running block. The readout attends over the same list.
    """
    completed, partial = [embedding], None
    for index, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
        if index % block_size == 0 and partial is not None:
            completed.append(partial)
            partial = None
        values = completed if partial is None else [*completed, partial]
        read = embedding
        if index > 0:
            read = attend(values, connection.attend, eps)
        y = sublayer(rms_norm(read, connection.norm.weight, eps))
        partial = y if partial is None else partial + y
    return attend([*completed, partial], stream.collapse.attend, eps)


@blocks
@pytest.mark.parametrize("sublayers", [1, 2, 7])
@pytest.mark.parametrize("heads", [1, 4])
def test_values_and_gradients_are_those_of_the_published_form(block_size, sublayers, heads):
    assert_computes(stream_of(block_size, sublayers, eps=0.01, heads=heads), published, block_size, 0.01)


def test_sources_are_the_embedding_the_sums_of_completed_blocks_and_the_running_sum():
    x, written, read = normal(1, 2, DIM), [normal(1, 2, DIM, seed=10 + i) for i in range(7)], []
    stream = stream_of(3, 7)
    state = stream.expand(x)
    for connection, y in zip(stream.connections, written):
        _, carry = connection.read(state)
        read.append(carry.residual)
        assert (carry.coefficients.weights is None) == (len(read) == 1), "one source is read as it is"
        state = connection.write(y, carry)
    first, second = sum(written[:3]), sum(written[3:6])
    expected = [
        [x],
        [x, written[0]],
        [x, written[0] + written[1]],
        [x, first],
        [x, first, written[3]],
        [x, first, written[3] + written[4]],
        [x, first, second],
    ]
    assert [len(sources) for sources in read] == [1, 2, 2, 2, 3, 3, 3]
    for sources, wanted in zip([*read, state], [*expected, [x, first, second, written[6]]], strict=True):
        for a, b in zip(sources, wanted, strict=True):
            assert_close(a, b)


@blocks
def test_zero_queries_give_the_plain_residual_up_to_eps(block_size):
    """The read is then h / n, the mean of n sources with the sum h, and RMSNorm removes the factor n up to its eps.

    With m = mean(h^2), norm(h / n) = h / sqrt(m + n^2 eps) where the residual has h / sqrt(m + eps): shorter by a
    factor of at least 1 - (n^2 - 1) eps / (2 (m + eps)), because 1 - 1 / sqrt(1 + t) <= t / 2.
    """
    scheme, eps = AttentionResiduals(block_size=block_size), 1e-3
    x, functions = normal(2, 3, DIM), bare_sublayers(DIM, 6)
    stream = scheme.build(DIM, 6, norm_eps=eps).double()
    state = stream.expand(x)
    for connection, function in zip(stream.connections, functions):
        n, h = len(state), sum(state)
        read, carry = connection.read(state)
        square = h.square().mean(-1, keepdim=True) + eps
        share = read * square.sqrt() / h
        assert ((1 - (n**2 - 1) * eps / (2 * square) - 1e-12 <= share) & (share <= 1 + 1e-12)).all()
        state = connection.write(function(read), carry)
    assert_close(stream.collapse(state) * len(state), sum(state))

    ours, plain = (one.build(DIM, 6, norm_eps=0.0).double()(x, functions) for one in (scheme, Residual()))
    assert_close(ours / ours.norm(dim=-1, keepdim=True), plain / plain.norm(dim=-1, keepdim=True))


@blocks
def test_attnres_starts_with_zero_queries_and_unit_gains(block_size):
    reads = [part.attend for part in AttentionResiduals(block_size=block_size).build(DIM, 4).parts[2:]]
    assert all(not read.query.any() and (read.gain == 1).all() for read in reads)
