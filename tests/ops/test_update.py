"""The sum with scales, and the sum with a gated share along the state, against their formulas."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from residua.ops import orthogonal_update, residual_scale, scaled_sum
from support.tolerances import assert_close
from support.variants import normal

X, H, GATE = normal(2, 3, 8), normal(2, 3, 8, seed=1), normal(2, 3, 1, seed=2)


def along(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The component of h along x, token by token, by the unit vector of x."""
    unit = x / x.norm(dim=-1, keepdim=True)
    return torch.einsum("btd,btd->bt", h, unit).unsqueeze(-1) * unit


def test_the_update_loses_a_share_of_its_component_along_the_state():
    assert_close(orthogonal_update(X, H, GATE, eps=1e-30), X + H - GATE * along(H, X))
    assert_close(orthogonal_update(X, H, GATE, eps=1e-30), residual_scale(X, H, GATE, eps=1e-30) * X + H)


def test_a_zero_gate_gives_exactly_the_sum_in_every_dtype():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x, h = X.to(dtype), H.to(dtype)
        assert torch.equal(orthogonal_update(x, h, torch.zeros(1)), x + h)


@pytest.mark.parametrize("eps", [1e-12, 0.5])
def test_a_gate_of_one_is_orthogonal_to_the_state_up_to_eps(eps):
    """<x' - x, x> = <h, x> eps / (|x|^2 + eps)."""
    after = orthogonal_update(X, H, torch.ones(1).double(), eps=eps)
    left = ((after - X) * X).sum(-1)
    squared = X.square().sum(-1)
    assert_close(left, (H * X).sum(-1) * eps / (squared + eps))


def test_groups_are_updates_of_their_own_features():
    gates = normal(2, 3, 4, seed=3)
    whole = orthogonal_update(X, H, gates)
    for group in range(4):
        own = slice(2 * group, 2 * group + 2)
        assert_close(whole[..., own], orthogonal_update(X[..., own], H[..., own], gates[..., group : group + 1]))


def test_the_size_of_the_state_does_not_change_the_written_vector():
    gate = torch.full((1,), 0.7, dtype=torch.float64)
    assert_close(orthogonal_update(5 * X, H, gate, eps=1e-30) - 5 * X, orthogonal_update(X, H, gate, eps=1e-30) - X)


@pytest.mark.parametrize("gate", [GATE, normal(2, 3, 4, seed=4), normal(2, seed=5)])
def test_gradients_of_the_update(gate):
    inputs = tuple(x.clone().requires_grad_() for x in (X, H, gate))
    assert gradcheck(lambda *x: orthogonal_update(*x, eps=0.3), inputs)
    assert gradgradcheck(lambda *x: orthogonal_update(*x, eps=0.3), inputs, fast_mode=True)


def test_a_zero_state_has_finite_gradients():
    x, h = torch.zeros(1, 4, requires_grad=True), torch.ones(1, 4, requires_grad=True)
    orthogonal_update(x, h, torch.ones(1)).sum().backward()
    assert x.grad.isfinite().all()
    assert torch.equal(h.grad, torch.ones(1, 4))


SCALES = {
    "numbers": [(), ()],
    "features": [(8,), (8,)],
    "both": [(), (8,)],
    "first": [(), None],
    "second": [None, (8,)],
}


@pytest.mark.parametrize("shapes", SCALES.values(), ids=SCALES)
def test_the_scaled_sum_and_its_gradients(shapes):
    scales = [
        None if shape is None else normal(*(shape or (1,)), seed=6 + i).reshape(shape) for i, shape in enumerate(shapes)
    ]
    expected = sum(x if s is None else s * x for x, s in zip((X, H), scales))
    assert_close(scaled_sum((X, H), scales), expected)
    inputs = tuple(x.clone().requires_grad_() for x in (X, H, *(s for s in scales if s is not None)))

    def summed(x, h, *given):
        left = iter(given)
        return scaled_sum((x, h), [None if s is None else next(left) for s in scales])

    assert gradcheck(summed, inputs)
    assert gradgradcheck(summed, inputs, fast_mode=True)


def test_a_sum_without_scales_is_exactly_the_plain_sum():
    for dtype in (torch.float32, torch.bfloat16):
        x, h = X.to(dtype), H.to(dtype)
        assert torch.equal(scaled_sum((x, h), (None, None)), x + h)
        assert torch.equal(scaled_sum((x, h), (torch.ones(()), torch.ones(8))), x + h)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: orthogonal_update(X, H[:1], GATE), ["y must", "the shape of the state"]),
        (lambda: orthogonal_update(X, H, normal(3, 2, 1)), ["gate must", "(..., groups)"]),
        (lambda: orthogonal_update(X, H, torch.ones(())), ["gate must be (..., groups)", "got ()"]),
        (lambda: orthogonal_update(X[0, 0], H[0, 0], torch.ones(())), ["gate must be (..., groups)", "got ()"]),
        (lambda: orthogonal_update(X, H, normal(2, 3, 3)), ["gate must", "divides 8", "got (2, 3, 3)"]),
        (lambda: residual_scale(X, H, torch.ones(())), ["gate must", "got ()"]),
        (lambda: scaled_sum((X, H[:1]), (None, None)), ["terms must"]),
        (lambda: scaled_sum((X, H), (None, normal(4))), ["scales must be () or (dim,)"]),
    ],
)
def test_wrong_shapes_give_a_one_line_error(call, words):
    with pytest.raises(ValueError) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert all(word in str(raised.value) for word in words), str(raised.value)
