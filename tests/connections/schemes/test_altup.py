"""AltUp with LAuReL against a plain form for one token, its blocks, its ends, and its start."""

import math

import torch
from torch import Tensor

from residua import AlternatingUpdates
from support.references import assert_computes, by_token, rms_norm
from support.stream_cases import DIM, built
from support.tolerances import assert_close
from support.variants import bare_sublayers, every, normal, perturbed


def routed(router, x: Tensor) -> Tensor:
    return torch.tanh(router.project.weight @ rms_norm(x, router.norm.weight) / DIM)


def sized(x: Tensor, like: Tensor) -> Tensor:
    return x * like.square().mean().sqrt() / x.square().mean().clamp_min(1e-5).sqrt()


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: AlternatingUpdates) -> Tensor:
    """Token by token and block by block: predict, update the active stream, correct."""
    n, a = scheme.num_streams, scheme.active
    rows = [token] * n
    if scheme.expand == "projections":
        rows = [token, *(sized(part.weight @ token, token) for part in stream.expand.project)]
    for block in range(len(sublayers) // 2):
        first, second = stream.connections[2 * block], stream.connections[2 * block + 1]
        entries = first.predict.weight @ routed(first.router, rows[a])
        predicted = [rows[k] + sum(entries[k * n + j] * rows[j] for j in range(n)) for k in range(n)]
        active = predicted[a]
        read = rms_norm(active, first.norm.weight)
        updated = active + sublayers[2 * block](read)
        if first.laurel is not None:
            low = first.laurel.right.weight @ (first.laurel.left.weight @ read)
            updated = (updated + read + rms_norm(low, first.laurel.norm.weight)) / math.sqrt(2)
        updated = updated + sublayers[2 * block + 1](rms_norm(updated, second.norm.weight))
        weights = second.correct.weight @ routed(first.router, updated) + 1
        rows = [predicted[k] + weights[k] * (updated - active) for k in range(n)]
    if scheme.expand == "projections":
        parts = stream.collapse.read.project
        rows = [rows[0], *(sized(part.weight @ row, rows[0]) for part, row in zip(parts, rows[1:]))]
    return sum(rows) / n


@every(AlternatingUpdates)
def test_a_zero_token_has_finite_gradients(scheme):
    """The row of padding in an embedding is such a token: its size is 0, where the derivative of a root is not
    finite."""
    stream = perturbed(scheme.build(DIM, 4)).double()
    x = normal(2, 5, DIM)
    x[0, 1] = 0
    x.requires_grad_()
    found = torch.autograd.grad(
        stream(x, bare_sublayers(DIM, 4)).square().sum(), [x, *stream.parameters()], allow_unused=True
    )
    assert all(grad.isfinite().all() for grad in found if grad is not None)


@every(AlternatingUpdates)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3), published, scheme, tokens=(2, 2))


def test_a_block_consists_of_attention_and_mlp():
    """Between them the state holds the predicted streams and the active one, and the readout moves all by as much."""
    scheme = AlternatingUpdates(expand="repeat", active=2)
    stream = built(scheme, noise=0.3)
    state = stream.expand(normal(2, 3, DIM))
    for index, (connection, sublayer) in enumerate(zip(stream.connections, bare_sublayers(DIM, 6))):
        state = connection(state, sublayer)
        assert isinstance(state, tuple) == (index % 2 == 0)
        if index % 2 == 0:
            streams, active = state
            expected = streams.mean(-2) + active - streams[..., 2, :]
            assert_close(stream.collapse(state), expected)


def test_projected_streams_have_the_root_mean_square_of_the_embedding():
    expand = built(AlternatingUpdates()).expand
    x = 3 * normal(2, 3, DIM)
    streams = expand(x)
    assert torch.equal(streams[..., 0, :], x)
    sizes = streams.square().mean(-1).sqrt()
    assert_close(sizes, sizes[..., :1].expand_as(sizes))


def test_a_router_shared_by_two_connections_has_one_name():
    """The MLP's connection borrows it from the attention's; its own parameters are its norm and its weights."""
    stream = AlternatingUpdates().build(DIM, 4)
    assert {name for name, _ in stream.connections[1].named_parameters()} == {"correct.weight", "norm.weight"}
    assert len(stream.state_dict()) == len(list(stream.parameters()))
