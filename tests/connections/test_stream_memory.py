"""Sequences that arrive in pieces, and padding, in models that do not use the cache of transformers."""

import copy

import pytest
import torch

from residua import EDelta, PooledHouseholder, StreamMemory
from residua.connections import PRESETS
from support.tolerances import assert_close
from support.variants import ALL, LOOKING_BACK, bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
looking_back = pytest.mark.parametrize("name", LOOKING_BACK)
SUB = bare_sublayers(DIM, SUBLAYERS)


def build(name):
    torch.manual_seed(0)
    return perturbed(ALL[name].build(DIM, SUBLAYERS).double())


@torch.no_grad()
@looking_back
def test_a_loop_over_the_connections_of_ones_own(name):
    """As in somebody else's decoder, whose layers call one connection each."""
    stream, x, memory = build(name), normal(2, 6, DIM), StreamMemory()
    pieces = []
    for token in x.split(1, 1):
        state = stream.expand(token, memory.of(stream.expand))
        for connection, sublayer in zip(stream.connections, SUB):
            state = connection(state, sublayer, memory=memory)
        pieces.append(stream.collapse(state, memory.of(stream.collapse)))
    assert_close(torch.cat(pieces, 1), stream(x, SUB))


@looking_back
def test_a_single_token_without_a_memory_is_refused(name):
    """A model that decodes token by token would otherwise compute wrong numbers without a word."""
    stream, token = build(name), normal(2, 1, DIM)
    with pytest.raises(ValueError, match="reads earlier tokens and got a single one; pass the same memory"):
        stream(token, SUB)
    for connection in stream.connections:
        if connection.window:
            state = stream.expand(token, StreamMemory().of(stream.expand))
            with pytest.raises(ValueError, match="reads earlier tokens"):
                connection(state, SUB[0])
    assert stream(token, SUB, memory=StreamMemory()).shape == (2, 1, DIM)


@torch.no_grad()
@looking_back
def test_a_copy_goes_on_by_itself_and_a_reset_forgets(name):
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    expected = stream(x, SUB)
    stream(x[:, :3], SUB, memory=memory)
    stream(normal(2, 2, DIM, seed=9), SUB, memory=memory.copy())  # tokens that were guessed, and wrong
    for same in (copy.deepcopy(memory), memory):
        assert_close(stream(x[:, 3:], SUB, memory=same), expected[:, 3:])
    memory.reset()
    assert_close(stream(x, SUB, memory=memory), expected)


@torch.no_grad()
@looking_back
def test_a_piece_without_tokens_changes_nothing(name):
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    pieces = [stream(piece, SUB, memory=memory) for piece in x.split([3, 0, 2], 1)]
    assert_close(torch.cat(pieces, 1), stream(x, SUB))


@looking_back
def test_a_mask_of_other_tokens_than_those_of_the_call_is_refused(name):
    """Such as one that grows as that of a cache does, or one row for the whole batch."""
    stream, x, memory = build(name), normal(2, 5, DIM), StreamMemory()
    stream(x[:, :3], SUB, memory=memory)
    for piece, shape, kept in [(x[:, 3:4], (2, 4), memory), (x, (1, 5), None), (x, (2, 1), None)]:
        with pytest.raises(ValueError, match=r"mask must be .*, got"):
            stream(piece, SUB, memory=kept, attention_mask=torch.ones(shape))


@torch.no_grad()
@looking_back
def test_beams_are_reordered(name):
    stream, x, memory = build(name), normal(3, 5, DIM), StreamMemory()
    stream(x[:, :3], SUB, memory=memory)
    order = torch.tensor([2, 0, 0, 1])
    memory.reorder(order)
    assert_close(stream(x[order, 3:], SUB, memory=memory), stream(x[order], SUB)[:, 3:])


def test_padding_between_tokens_is_refused():
    stream = PRESETS["ddl-tc"].build(8, 2)
    x, sublayers = torch.randn(2, 5, 8), [torch.nn.Identity()] * 2
    for fine in ([1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0]):
        stream(x, sublayers, attention_mask=torch.tensor([[1, 1, 1, 1, 1], fine]))
    for gap in ([1, 0, 1, 1, 1], [0, 1, 0, 0, 1]):
        with pytest.raises(ValueError, match="got padding between them"):
            stream(x, sublayers, attention_mask=torch.tensor([[1, 1, 1, 1, 1], gap]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-ec"])
def test_a_row_that_ended_goes_on_in_no_later_piece(name):
    """Neither with a mask nor without; rows move with the beams, a copy knows them, a reset forgets them."""
    stream, x, memory = build(name), normal(2, 4, DIM), StreamMemory()
    stream(x[:, :1], SUB, memory=memory)
    stream(x[:, :2], SUB, memory=memory, attention_mask=torch.tensor([[1, 1], [1, 0]]))
    memory.reorder(torch.tensor([1, 0]))
    stream(x[:, :1], SUB, memory=memory.copy(), attention_mask=torch.tensor([[0], [1]]))
    for mask in (None, torch.ones(2, 2), torch.tensor([[0, 1], [1, 1]])):
        for kept in (memory, memory.copy()):
            with pytest.raises(ValueError, match="got padding between them"):
                stream(x[:, 2:], SUB, memory=kept, attention_mask=mask)
    memory.reorder(torch.tensor([1, 1]))
    stream(x[:, 2:], SUB, memory=memory)
    memory.reset()
    assert_close(stream(x, SUB, memory=memory), stream(x, SUB))


@pytest.mark.parametrize("name", ["ddl-tc", "hc", "mhc", "attnres", "residual"])
def test_what_is_no_state_is_refused(name):
    """Such as the embedding itself, or a state of another width."""
    scheme = PRESETS[name]
    stream = scheme.build(8, 2)
    state = stream.expand(torch.randn(2, 5, 8))
    connection = stream.connections[0]
    connection(state, torch.nn.Identity())
    wrong = [torch.randn(2, 5, 6)] if name == "residual" else [torch.randn(2, 5, 8), torch.randn(2, 5, 4, 6)]
    for bare in wrong:
        with pytest.raises(ValueError, match=r"state must be .* from stream.expand or the connection before, got"):
            connection(bare, torch.nn.Identity())
        with pytest.raises(ValueError, match="state must"):
            connection.read(bare)


@pytest.mark.parametrize("scheme", [EDelta(context="sequence"), PooledHouseholder(context="sequence")])
def test_a_mean_over_the_whole_sequence_counts_no_padding_and_no_piece(scheme):
    stream, x = scheme.build(DIM, SUBLAYERS).double(), normal(2, 5, DIM)
    assert_close(stream(x, SUB, attention_mask=torch.ones(2, 5)), stream(x, SUB))
    with pytest.raises(ValueError, match="attention_mask: this scheme reads the whole sequence"):
        stream(x, SUB, attention_mask=torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="memory must be None for a scheme that reads the whole sequence"):
        stream(x[:, :2], SUB, memory=StreamMemory())
