"""The gated delta, with separate gates for erasing and writing, against its formula and the delta operator."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from residua.ops import (
    compose,
    delta_operator,
    delta_write,
    determinant,
    eigenvalues,
    gated_delta,
    inverse_length,
    orthogonal_update,
    singular_values,
    unit,
)
from support.tolerances import assert_close
from support.variants import normal

X, H, GATE = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 1, seed=2)
CHANNELS = normal(2, 3, 5, 8)  # five value channels


def test_the_gated_delta_erases_along_the_update_and_writes_it():
    """Gates apart: x' = (I - e k k^T) x + w h with the direction of `unit`; without w, w = 1."""
    write, k = normal(2, 3, 1, seed=8), unit(H, eps=0.3)
    erased = (delta_operator(k, GATE[..., 0]) @ X.unsqueeze(-1)).squeeze(-1)
    assert_close(gated_delta(X, H, GATE, write, eps=0.3), erased + write * H)
    assert_close(gated_delta(X, H, GATE, eps=0.3), erased + H)


def test_the_gated_delta_is_the_orthogonal_update_with_state_and_update_exchanged():
    """Erasing a share of x along h is dropping a share of x along h from h + x."""
    assert_close(gated_delta(X, H, GATE, eps=0.3), orthogonal_update(H, X, GATE, eps=0.3**2))


def test_a_gated_delta_that_erases_nothing_is_exactly_the_sum_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, h = X.to(dtype), H.to(dtype)
        for write in (None, torch.ones(2)):
            assert torch.equal(gated_delta(x, h, torch.zeros(2), write), x + h)


@pytest.mark.parametrize(("share", "left"), [(1.0, 0.0), (2.0, -1.0), (-1.0, 2.0)])
def test_the_gated_delta_scales_the_state_along_the_update(share, left):
    """k^T (x' - h) = (1 - e) k^T x: replaced for e = 1, reflected for e = 2, doubled for e = -1."""
    k = unit(H, eps=1e-30)
    after = gated_delta(X, H, torch.tensor([share]).double(), eps=1e-30)
    assert_close((k * (after - H)).sum(-1), left * (k * X).sum(-1))


@pytest.mark.parametrize("gate", [GATE, normal(2, 3, 4, seed=4), normal(2, seed=5)])
@pytest.mark.parametrize("gated", [False, True])
def test_gradients_of_the_gated_delta(gate, gated):
    write = [1.3 * gate.flip(-1) + 0.2] * gated
    inputs = tuple(x.clone().requires_grad_() for x in (X, H, gate, *write))
    assert gradcheck(lambda *x: gated_delta(*x, eps=0.3), inputs)
    assert gradgradcheck(lambda *x: gated_delta(*x, eps=0.3), inputs, fast_mode=True)


def operator(erase: float | Tensor, h: Tensor) -> Tensor:
    """A, from what is left of the identity, whose rows are channels, where nothing is written. h: (..., 8)."""
    erase = torch.as_tensor(erase).double().expand(*h.shape[:-1])[..., None, None]
    identity = torch.eye(8).double().expand(*h.shape[:-1], 8, 8)
    return gated_delta(identity, h, erase, torch.zeros(1, 1).double(), eps=1e-30)


def test_spectrum_and_determinant_of_the_map_on_the_state():
    erase = 2 * torch.tanh(GATE[..., 0])
    matrix = operator(erase, H)
    assert_close(matrix, delta_operator(unit(H, eps=1e-30), erase))
    assert_close(torch.linalg.eigvalsh(matrix), eigenvalues(erase, 8).sort(-1).values)
    assert_close(torch.linalg.svdvals(matrix), singular_values(erase, 8).sort(-1, descending=True).values)
    assert_close(torch.linalg.det(matrix), determinant(erase))


def test_gates_of_0_1_and_2_give_identity_projection_and_reflection():
    """e = 0 keeps, e = 1 projects, e = 2 reflects; no other e is orthogonal."""
    identity = torch.eye(8).double().expand(2, 3, 8, 8)
    assert torch.equal(operator(0.0, H), identity)
    projection, reflection = operator(1.0, H), operator(2.0, H)
    assert_close(projection @ projection, projection)
    assert_close(projection @ H.unsqueeze(-1), torch.zeros(2, 3, 8, 1).double())
    assert_close(reflection @ reflection, identity)
    for erase, orthogonal in ((0.0, True), (2.0, True), (1.0, False), (0.5, False), (-0.5, False)):
        matrix = operator(erase, H)
        assert torch.allclose(matrix.mT @ matrix, identity, atol=1e-12) is orthogonal


def test_every_channel_is_a_gated_delta_of_its_own():
    erase, write = normal(2, 3, 5, 4, seed=3), normal(2, 3, 5, 4, seed=4)
    whole = gated_delta(CHANNELS, H, erase, write)
    for j in range(5):
        assert_close(whole[..., j, :], gated_delta(CHANNELS[..., j, :], H, erase[..., j, :], write[..., j, :]))
    assert_close(
        gated_delta(CHANNELS, H, erase[..., :1, :], write),
        gated_delta(CHANNELS, H, erase[..., :1, :].expand(erase.shape), write),
    )


def test_a_delta_write_is_a_gated_delta_with_one_gate_for_both_halves():
    """e = beta and w = beta v / |h|."""
    beta, v = torch.tanh(GATE[..., 0]), normal(2, 3, 5, seed=5)
    write = (beta.unsqueeze(-1) * v * inverse_length(H, 1, eps=0.3)).unsqueeze(-1)
    expected = delta_write(CHANNELS, H, v, beta, k_norm="rms", eps=0.3)
    assert_close(gated_delta(CHANNELS, H, beta[..., None, None], write, eps=0.3), expected)


def test_several_writes_in_sequence_equal_their_composition_in_this_order():
    """X_r = P X_0 + ..., with the T of `compose`, whose v = w |h| / e; in another order they are another map."""
    h, erase, write = normal(2, 3, 3, 8, seed=6), 0.2 + torch.rand(2, 3, 3).double(), normal(2, 3, 3, 5, seed=7)
    state = CHANNELS
    for r in range(3):
        state = gated_delta(state, h[..., r, :], erase[..., r, None, None], write[..., r, :, None], eps=1e-30)
    length = h.norm(dim=-1, keepdim=True)
    composed = compose(h / length, erase)
    assert_close(state, composed.write(CHANNELS, write * length / erase.unsqueeze(-1)))
    other = compose((h / length).flip(-2), erase.flip(-1)).operator()
    assert (other - composed.operator()).abs().max() > 0.1
    assert_close(torch.linalg.det(composed.operator()), (1 - erase).prod(-1))


GATES = {"each": (2, 3, 5, 2), "shared": (2, 3, 1, 2), "without tokens": (5, 2), "none": None}


@pytest.mark.parametrize("write", GATES.values(), ids=GATES)
@pytest.mark.parametrize("erase", GATES.values(), ids=GATES)
def test_gradients_with_channels(erase, write):
    state, h = normal(2, 3, 5, 4), normal(2, 3, 4, seed=1)
    gates = [None if shape is None else normal(*shape, seed=i) for i, shape in enumerate((erase, write))]
    inputs = tuple(x.clone().requires_grad_() for x in (state, h, *(gate for gate in gates if gate is not None)))

    def applied(state, h, *given):
        left = iter(given)
        return gated_delta(state, h, *(None if gate is None else next(left) for gate in gates), eps=0.3)

    assert gradcheck(applied, inputs, fast_mode=True)
    assert gradgradcheck(applied, inputs, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("erased", [True, False])
def test_recomputed_states_give_the_same_gradients_to_the_bit(erased, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in (CHANNELS, *(normal(2, 3, 8, seed=i) for i in range(5)))]
    gates = [normal(2, 3, 5, 2, seed=i).float().requires_grad_() for i in range(10)]

    def gradients(every: int) -> tuple[Tensor, ...]:
        state, (_, *updates) = leaves[0], leaves
        for i, h in enumerate(updates):
            erase = gates[2 * i] if erased else None
            state = gated_delta(state, h, erase, gates[2 * i + 1], recompute_every=every)
        used = [*leaves, *(gates if erased else gates[1::2])]
        return state, *torch.autograd.grad(state.float().square().sum(), used)

    expected = gradients(1)
    for every in (2, 3, 8):
        assert all(map(torch.equal, gradients(every), expected))


@pytest.mark.parametrize(("erased", "states"), [(True, 2), (False, 2)])
def test_one_of_four_states_is_kept(erased, states):
    state = CHANNELS.clone().requires_grad_()
    gate, kept = torch.ones(1, 1, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        for _ in range(8):
            state = gated_delta(state, H, gate if erased else None, gate, recompute_every=4)
    assert kept.count(CHANNELS.shape) == states


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: gated_delta(X, H[:1], GATE), ["y must", "the shape of the state"]),
        (lambda: gated_delta(X, H, normal(2, 3, 3)), ["erase must", "divides 8"]),
        (lambda: gated_delta(X, H, normal(3, 2, 1)), ["erase must", "(..., groups)"]),
        (lambda: gated_delta(X, H, GATE, normal(2, 3, 2)), ["write must", "(..., groups)"]),
        (lambda: gated_delta(X, H, torch.ones(())), ["erase must be (..., groups)", "got ()"]),
        (lambda: gated_delta(CHANNELS, H[..., :4], GATE), ["y must be (..., dim) = (2, 3, 8)"]),
        (lambda: gated_delta(CHANNELS, H, normal(2, 3, 4, 1)), ["erase must be (..., 5 or 1, groups)"]),
        (lambda: gated_delta(CHANNELS, H, None, torch.ones(1)), ["write must be (..., 5 or 1, groups)", "(1,)"]),
    ],
)
def test_wrong_shapes_give_a_one_line_error(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert all(word in str(raised.value) for word in words), str(raised.value)
