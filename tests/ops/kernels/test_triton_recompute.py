"""States that kernels replay in registers for the backward pass equal kept ones to the last bit, and are not kept."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from residua import ops
from residua.ops import write_read
from residua.ops.recompute import is_kept
from support.kernel_cases import DEVICE, normal

pytest.importorskip("triton")

delta_write, boundary = (partial(op, implementation="triton") for op in (ops.delta_write, write_read.boundary))

KERNELS = ["delta", "channel", "token"]
CHANNELS, DIM = 3, 48
WRITES = 5  # past a second kept state, with one in two; replays of 0 to 3 writes
SEQ = {"delta": 2, "channel": 2, "token": 5}  # without a GPU a program takes a chunk of 4 tokens, or a piece
DTYPES = [torch.float32, torch.bfloat16]


class Chain:
    """Writes by one kernel, each with what the one before makes of the state beside it."""

    def __init__(
        self,
        kernel: str,
        dtype: torch.dtype = torch.float32,
        writes: int = WRITES,
        *,
        shape: tuple[int, int] | None = None,
        channels: int = CHANNELS,
        dim: int = DIM,
    ):
        self.kernel = kernel
        shape = shape or (1, SEQ[kernel])
        self.start = normal(*shape, channels, dim, dtype=dtype)
        self.writes = [
            (
                normal(*shape, dim, seed=10 + i, dtype=dtype),
                normal(*shape, channels, seed=30 + i),
                2 * torch.sigmoid(normal(*shape, seed=50 + i)),
            )
            for i in range(writes)
        ]
        self.parameters = [
            0.5 * normal(*((2,) if kernel == "token" else ()), channels, dim, seed=3),
            1 + 0.3 * normal(dim, seed=4),
            normal(dim, seed=5) / dim**0.5,
            normal(channels, dim, seed=6) / dim**0.5,
        ]
        parameters = self.parameters if kernel != "delta" else []
        self.leaves = [self.start, *parameters, *(x for write in self.writes for x in write)]
        for leaf in self.leaves:
            leaf.requires_grad_()

    def write(self, state: Tensor, others: tuple, i: int, every: int) -> tuple[Tensor, tuple]:
        """X_{i+1}, and what was made beside it, for the write that follows."""
        k, v, beta = self.writes[i]
        if self.kernel == "delta":
            return delta_write(state, k, v, beta, k_norm="rms", recompute_every=every), ()
        if others:
            context, gate, value = others
            k, v, beta = k + context, v + value, beta + 0.1 * torch.tanh(gate)
        state, *others = boundary(state, k, v, beta, *self.parameters, recompute_every=every)
        return state, tuple(others)

    def stretch(self, state: Tensor, others: tuple, low: int, high: int, every: int) -> tuple[Tensor, tuple]:
        for i in range(low, high):
            state, others = self.write(state, others, i, every)
        return state, others

    def loss(self, every: int, writes: int | None = None) -> Tensor:
        state, others = self.stretch(self.start, (), 0, writes or len(self.writes), every)
        return sum((x.float().square().mean() for x in others), state.float().square().mean())

    def gradients(self, loss: Tensor, **options) -> list[Tensor]:
        return torch.autograd.grad(loss, self.leaves, materialize_grads=True, **options)


def assert_equal(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)


def assert_recomputing_changes_nothing(chain: Chain) -> None:
    expected = chain.gradients(chain.loss(1))
    for every in (2, 4):
        assert_equal(chain.gradients(chain.loss(every)), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_equal_to_the_last_bit(kernel, dtype):
    assert_recomputing_changes_nothing(Chain(kernel, dtype))


@pytest.mark.parametrize("kernel", KERNELS)
def test_chains_of_every_length(kernel):
    chain = Chain(kernel)
    for writes in range(2, WRITES):
        expected = chain.gradients(chain.loss(1, writes))
        assert_equal(chain.gradients(chain.loss(4, writes)), expected)


@pytest.mark.parametrize("every", [9, 100])
def test_chains_longer_than_a_kernel_replays(every):
    """Now and then a state is made for those that follow: at most one in eight, and none is left over."""
    chain = Chain("delta", torch.bfloat16, writes=20)
    expected = chain.gradients(chain.loss(1))
    nodes, state = [], chain.start
    for i in range(20):
        state, _ = chain.write(state, (), i, every)
        nodes.append(state.grad_fn)
    alive = []
    for node in nodes:
        node.register_hook(lambda *_: alive.append(sum(node.recomputed is not None for node in nodes)))
    assert_equal(chain.gradients(state.float().square().mean()), expected)
    assert max(alive) == (1 if every == 9 else 2)
    assert all(node.recomputed is None and node.opened is None for node in nodes)


@pytest.mark.parametrize("kernel", KERNELS)
def test_one_state_in_m_is_kept(kernel):
    for every in (1, 2, 4, 100):
        chain, found = Chain(kernel, shape=(1, 1)), set()

        def pack(x: Tensor, shape: tuple = chain.start.shape, found: set = found) -> Tensor:
            if x.shape == shape:
                found.add(x.data_ptr())
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            made = chain.stretch(chain.start, (), 0, WRITES, every)
        assert made[0].grad_fn.age == 1 + (WRITES - 1) % every
        assert len(found) == -(-WRITES // every)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_and_plain_operations_in_one_chain(dtype):
    """Whatever made a state and whatever reads it: the embedding convolution, kernels, plain writes and reads."""
    x = normal(1, 5, DIM, dtype=dtype).requires_grad_()
    taps = (0.5 * normal(3, CHANNELS, DIM, seed=3)).requires_grad_()
    others = [p.detach().requires_grad_() for p in Chain("token").parameters[1:]]
    mixes = [(normal(DIM, DIM, seed=20 + i) / DIM).to(dtype).requires_grad_() for i in range(7)]
    leaves = [x, taps, *others, *mixes]

    def loss(every: int) -> Tensor:
        state, total = ops.causal_expand(x, taps), 0.0
        for i, kind in enumerate("kptpckc"):  # the kernel's write, the plain one, a boundary over tokens, channels
            read = ops.causal_read(state, taps) if i % 2 else ops.stream_read(state, taps[0])
            inputs = state, torch.tanh(read @ mixes[i]), read[..., :CHANNELS], 2 * torch.sigmoid(read[..., 0])
            if kind in "kp":
                write = delta_write if kind == "k" else ops.delta_write
                state = write(*inputs, k_norm="rms", recompute_every=every)
            elif kind == "t":
                state, *made = boundary(*inputs, taps, *others, recompute_every=every)
                total = total + sum(x.float().square().mean() for x in made)
            else:
                state, *made = boundary(*inputs, taps[1], *others, recompute_every=every)
                total = total + sum(x.float().square().mean() for x in made)
        return total + ops.causal_read(state, taps).float().square().mean()

    expected = torch.autograd.grad(loss(1), leaves)
    for every in (2, 4):
        assert_equal(torch.autograd.grad(loss(every), leaves), expected)


def test_only_the_state_is_recomputed():
    """The other results of a boundary have the same node of the graph, and are kept by who reads them."""
    chain = Chain("channel")
    state, (context, *_) = chain.write(chain.start, (), 0, 4)
    assert not is_kept(state)
    assert is_kept(context)
    weights = normal(SEQ["channel"], DIM).requires_grad_()
    read = ops.stream_read(context, weights)  # takes the tokens for streams
    (grad,) = torch.autograd.grad(read.sum(), weights)
    torch.testing.assert_close(grad, context[0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_checkpointed_stretches_of_a_chain(kernel):
    """Activation checkpointing hands out each saved tensor once; a replay asks for those of other writes."""
    chain = Chain(kernel, torch.bfloat16)
    expected = chain.gradients(chain.loss(4))
    state, others = chain.start, ()
    for low, high in pairwise([0, 2, WRITES]):
        state, others = checkpoint(chain.stretch, state, others, low, high, 4, use_reentrant=False)
    loss = sum((x.float().square().mean() for x in others), state.float().square().mean())
    assert_equal(chain.gradients(loss), expected)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_graph_that_is_kept_can_be_used_again_and_offloaded(kernel):
    chain = Chain(kernel, writes=3)
    with torch.autograd.graph.save_on_cpu():
        loss = chain.loss(4)
    first = chain.gradients(loss, retain_graph=True)
    assert_equal(chain.gradients(loss), first)
    assert_equal(chain.gradients(chain.loss(4)), first)


@pytest.mark.parametrize("kernel", KERNELS)
def test_differentiating_twice_is_refused(kernel):
    chain = Chain(kernel, writes=2)
    for every in (1, 4):
        with pytest.raises(RuntimeError, match="implementation='reference' to differentiate twice"):
            torch.autograd.grad(chain.loss(every), chain.start, create_graph=True)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_gradient_keeps_nothing(kernel):
    with torch.no_grad():
        assert Chain(kernel, writes=1).loss(4).grad_fn is None


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_compiler_keeps_every_state(kernel):
    chain = Chain(kernel, writes=2)
    torch.compiler.reset()
    compiled = torch.compile(chain.loss, fullgraph=True, backend="aot_eager")
    assert_equal(chain.gradients(compiled(4)), chain.gradients(chain.loss(4)))


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter has no layouts of registers and fuses nothing")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [768, 1024])
@pytest.mark.parametrize("kernel", KERNELS)
def test_gradients_are_equal_at_real_widths(kernel, dim, dtype):
    assert_recomputing_changes_nothing(Chain(kernel, dtype, shape=(4, 203), channels=4, dim=dim))
