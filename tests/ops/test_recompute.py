"""States that are recomputed in the backward pass equal the kept ones to the last bit, and are not kept."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from residua.ops import (
    causal_read,
    delta_write,
    hybrid,
    hyper_mix,
    hyper_read,
    hyper_write,
    linear_at_least_float32,
    rms_norm,
    stream_read,
    unit,
)
from residua.ops.derived import derive, flattened
from residua.ops.norm import layer_norm, mean_square
from residua.ops.precision import linear
from support.variants import normal

BATCH, SEQ, STREAMS, DIM, WRITES = 2, 5, 3, 8, 9
WEIGHTS = torch.tensor([0.5, 0.3, 0.2])
DTYPES = [torch.float32, torch.bfloat16]  # as wide as coefficients are computed, and narrower


def delta(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A delta write along y."""
    v, beta = x[..., :STREAMS], 2 * torch.sigmoid(x[..., 0])
    return delta_write(state, y, v, beta, k_norm="rms", recompute_every=every)


def mixed(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A write to mixed streams, whose weights come from the whole state by a norm and by linear maps."""
    flat = state.flatten(-2)
    ones = torch.ones(flat.shape[-1], dtype=x.dtype)
    weight = (normal(STREAMS**2, flat.shape[-1], seed=7) / flat.shape[-1]).to(x.dtype)
    logits = linear_at_least_float32(layer_norm(flat, ones, ones), weight)
    logits = logits + linear_at_least_float32(flat, weight) * torch.rsqrt(mean_square(flat) + 1e-5)
    h_res = logits.unflatten(-1, (STREAMS, STREAMS)).softmax(-1)
    return hyper_write(state, y, h_res, h_res[..., 0], recompute_every=every)


def unmixed(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A write to streams that are not mixed."""
    return hyper_write(state, y, None, x[..., :STREAMS], recompute_every=every)


def fractions(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A write to the fractions of a state, which is one row between two writes."""
    parts, outputs = (row.unflatten(-1, (2, -1)) for row in (state.flatten(-2), y.repeat(1, 1, STREAMS)))
    weights = x[..., :4].unflatten(-1, (2, 2)).tanh()
    return hyper_write(parts, outputs, weights, x[..., 4:6], recompute_every=every).flatten(-2).view_as(state)


def turned(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A write to streams that were turned, by an operator from their norm; a read of what was turned, gated."""
    k, u, v = (unit(x[..., i : i + STREAMS], k_norm="add") for i in range(3))
    again = every > 1
    flat = rms_norm(flattened(state), recompute=again)
    weight = (normal(2, flat.shape[-1], seed=7) / flat.shape[-1]).to(x.dtype)
    beta, gamma = linear(flat, weight).float().sigmoid().unbind(-1)
    chosen = derive if again else lambda function, *inputs: function(*inputs)
    g = chosen(hybrid, state, u, v, beta, k, gamma)
    gated = chosen(gate, g, y)
    y = y + stream_read(gated, torch.ones_like(g[0, 0]) / 9)
    return hyper_write(g, y, None, x[..., :STREAMS].tanh(), recompute_every=every)


def gate(streams: Tensor, y: Tensor) -> Tensor:
    return streams * torch.sigmoid(y).unsqueeze(-2)


def corrected(state: Tensor, x: Tensor, y: Tensor, every: int) -> Tensor:
    """A write of the prediction error to predicted streams; the error is not kept."""
    chosen = derive if every > 1 else lambda function, *inputs: function(*inputs)
    h_res = (x[..., :STREAMS, None] * x[..., None, STREAMS : 2 * STREAMS]).softmax(-1)
    predicted = chosen(hyper_mix, state, h_res)
    return hyper_write(predicted, chosen(off, y, predicted), None, x[..., :STREAMS].tanh(), recompute_every=every)


def off(y: Tensor, streams: Tensor) -> Tensor:
    return y - streams[..., 0, :]


@pytest.fixture(params=[delta, mixed, unmixed, turned, corrected])
def write(request):
    return request.param


class Chain:
    """Writes of one kind, of what is read; one read by each kind in turn."""

    def __init__(self, dtype: torch.dtype = torch.float32, write: Callable[..., Tensor] = delta):
        self.write = write
        self.start = normal(BATCH, SEQ, STREAMS, DIM, dtype=dtype).requires_grad_()
        self.mix = [(normal(DIM, DIM, seed=10 + i) / DIM).to(dtype).requires_grad_() for i in range(WRITES)]
        self.taps = (normal(3, STREAMS, DIM, seed=2) / STREAMS).to(dtype).requires_grad_()
        self.leaves = [self.start, self.taps, *self.mix]

    def states(self, every: int) -> list[Tensor]:
        state = self.start
        found = [state]
        for i, mix in enumerate(self.mix):
            x = (causal_read(state, self.taps), stream_read(state, self.taps[0]), hyper_read(state, WEIGHTS))[i % 3]
            state = self.write(state, x, torch.tanh(x @ mix), every)
            found.append(state)
        return found

    def loss(self, every: int) -> Tensor:
        return causal_read(self.states(every)[-1], self.taps).float().square().mean()

    def gradients(self, every: int, **options) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(every), self.leaves, **options)


def kept_states(chain: Chain, every: int) -> int:
    """How many different tensors of the size of the state the graph keeps."""
    found = {}

    def pack(x: Tensor) -> Tensor:
        if x.numel() == chain.start.numel():
            found[x.data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        chain.loss(every)
    return len(found)


@pytest.mark.parametrize("every", [2, 3, 4, 9, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_are_equal_to_the_last_bit(dtype, every, write):
    chain = Chain(dtype, write)
    for ours, theirs in zip(chain.gradients(every), chain.gradients(1), strict=True):
        assert ours.isfinite().all()
        assert torch.equal(ours, theirs)


def test_fractions_of_a_row_are_recomputed_through_views():
    chain = Chain(write=fractions)
    expected = chain.gradients(1)
    for every in (2, 4, 100):
        assert all(map(torch.equal, chain.gradients(every), expected))
    outputs = WRITES  # as large as a state, and kept
    assert [kept_states(chain, every) - outputs for every in (1, 3, 4, 100)] == [WRITES + 1, 4, 3, 1]


def test_one_of_m_states_is_kept(write):
    chain = Chain(write=write)
    assert kept_states(chain, 1) == (WRITES + 1 if write is not turned else 3 * WRITES + 1)
    assert kept_states(chain, 3) == 4  # of the ten states the first, fourth, seventh and tenth
    assert kept_states(chain, 4) == 3
    assert kept_states(chain, 100) == 1


def test_recomputed_states_are_freed(write):
    """During the backward pass no more than m states are alive at once, and none afterwards."""
    chain = Chain(write=write)
    states = chain.states(4)
    nodes = [state.grad_fn for state in states[1:]]
    alive = []
    for state in states[1:]:
        state.register_hook(lambda _: alive.append(sum(node.recomputed is not None for node in nodes)))
    causal_read(states[-1], chain.taps).sum().backward()
    assert 0 < max(alive) <= 3
    assert all(node.recomputed is None and node.opened is None for node in nodes)


def test_a_graph_that_is_kept_can_be_used_again(write):
    chain = Chain(write=write)
    loss = chain.loss(4)
    first = torch.autograd.grad(loss, chain.leaves, retain_graph=True)
    second = torch.autograd.grad(loss, chain.leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_losses_may_start_in_the_middle_of_a_chain(write):
    """Several losses on states in between, some of which nothing else reads."""
    chain = Chain(write=write)
    found = []
    for every in (1, 4):
        states = chain.states(every)
        total = sum(states[i].square().mean() + stream_read(states[i], chain.taps[0]).mean() for i in (2, 3, 6))
        found.append(torch.autograd.grad(total, [chain.start, chain.taps, *chain.mix[:6]]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_differentiating_twice_is_refused(write):
    chain = Chain(write=write)
    state = chain.states(4)[2]
    with pytest.raises(RuntimeError, match="recompute='none'"):
        torch.autograd.grad(state.sum(), chain.start, create_graph=True)
    read = stream_read(state, chain.taps[0])
    with pytest.raises(RuntimeError, match="recompute='none'"):
        torch.autograd.grad(read.sum(), chain.taps, create_graph=True)


def test_a_state_changed_in_place_is_noticed(write):
    chain = Chain(write=write)
    loss = chain.loss(4)
    with torch.no_grad():
        chain.start.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("patched", [1, 2, 3])
def test_a_state_patched_under_no_grad_is_kept(patched, write):
    """A change under `no_grad`, as when activations are patched, could not be recomputed."""

    def gradients(every):
        chain = Chain()
        state = chain.start
        for i, mix in enumerate(chain.mix):
            if i == patched:
                with torch.no_grad():
                    state[:, 1] = 0.25
            x = causal_read(state, chain.taps)
            state = write(state, x, torch.tanh(x @ mix), every)
        return torch.autograd.grad(state.square().sum(), chain.leaves)

    assert all(torch.equal(a, b) for a, b in zip(gradients(4), gradients(1)))


def test_saved_tensors_go_through_hooks(write):
    """The tensors that a write keeps are saved by autograd, so that they can be offloaded."""
    chain = Chain(write=write)
    expected = chain.gradients(4)
    with torch.autograd.graph.save_on_cpu():
        loss = chain.loss(4)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss, chain.leaves), expected))


def test_parts_of_a_chain_may_be_checkpointed(write):
    """Activation checkpointing hands out each saved tensor once; recomputing asks for tensors of other writes."""
    chain = Chain(write=write)

    def stretch(state: Tensor, low: int, high: int) -> Tensor:
        for i in range(low, high):
            x = causal_read(state, chain.taps)
            state = write(state, x, torch.tanh(x @ chain.mix[i]), 4)
        return state

    def loss(checkpointed: bool) -> Tensor:
        state = chain.start
        for low, high in pairwise([0, 2, 5, 9]):
            if checkpointed:
                state = torch.utils.checkpoint.checkpoint(stretch, state, low, high, use_reentrant=False)
            else:
                state = stretch(state, low, high)
        return causal_read(state, chain.taps).square().sum()

    expected = torch.autograd.grad(loss(False), chain.leaves)
    assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(loss(True), chain.leaves), expected))


def test_without_gradients_no_tensor_is_kept(write):
    with torch.no_grad():
        assert Chain(write=write).states(4)[-1].grad_fn is None


def test_a_frozen_first_state_is_kept(write):
    """A first state without a gradient is kept by the writes and reads that need it."""
    chain = Chain(write=write)
    chain.start.requires_grad_(False)
    leaves = [chain.taps, *chain.mix]
    grads = [torch.autograd.grad(chain.loss(every), leaves) for every in (1, 4)]
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
