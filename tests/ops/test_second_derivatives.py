"""Second derivatives: right where a gradient can be differentiated itself, and an error where it cannot."""

import pytest
import torch

from residua import ops
from residua.connections import DeepDelta
from residua.ops.derived import derive, flattened
from residua.ops.norm import layer_norm
from support.delta_cases import direction, generator, normal
from support.op_cases import OPS

G = generator(0)
# (batch, seq, channels, dim). The cost grows with the square of what stands here, and finite differences are the cost.
STATE, WIDE = normal(G, 1, 3, 2, 3), normal(G, 1, 3, 3)
WRITE = (STATE, direction(G, 1, 3, 3) * 1.7, normal(G, 1, 3, 2), normal(G, 1, 3).abs())

CASES = {
    **{
        f"unit {k_norm}": (lambda k, k_norm=k_norm: ops.unit(k, k_norm=k_norm, eps=0.3), (WIDE,))
        for k_norm in ops.K_NORMS
    },
    **{
        f"delta_write {k_norm}": (lambda *x, k_norm=k_norm: ops.delta_write(*x, k_norm=k_norm, eps=0.3), WRITE)
        for k_norm in (None, *ops.K_NORMS)
    },
    "delta_write_v1": (ops.delta_write_v1, WRITE),
    "delta_inverse": (ops.delta_inverse, WRITE),
    "stream_read": (ops.stream_read, (STATE, normal(G, 2, 3))),
    "causal_read": (ops.causal_read, (STATE, normal(G, 3, 2, 3))),
    "causal_expand": (ops.causal_expand, (WIDE, normal(G, 3, 2, 3))),
    "hyper_read": (ops.hyper_read, (STATE, normal(G, 1, 3, 2))),
    "hyper_write": (ops.hyper_write, (STATE, WIDE, normal(G, 1, 3, 2, 2), normal(G, 1, 3, 2))),
    "sinkhorn": (lambda x: ops.sinkhorn(x, iterations=3), (normal(G, 1, 3, 3),)),
    "guarded_sinkhorn": (lambda x: ops.guarded_sinkhorn(x, iterations=3), (normal(G, 1, 3, 3),)),
    "rms_norm": (ops.rms_norm, (WIDE, normal(G, 3))),
    "layer_norm": (layer_norm, (WIDE, normal(G, 3), normal(G, 3))),
    "layer_norm, linear": (
        lambda x, w, b, m: ops.linear_at_least_float32(layer_norm(x, w, b), m),
        (WIDE, normal(G, 3), normal(G, 3), normal(G, 2, 3)),
    ),
    "rms_norm, linear": (
        lambda x, w, m: ops.linear_at_least_float32(
            ops.rms_norm(flattened(x.unsqueeze(-2).expand(-1, -1, 2, -1)), w, recompute=True), m
        ),
        (WIDE, normal(G, 6), normal(G, 2, 6)),
    ),
    "hybrid": (
        lambda *x: derive(ops.hybrid, *x),
        (STATE, *(normal(G, 1, 3, 2) for _ in range(2)), normal(G, 1, 3), normal(G, 1, 3, 2), normal(G, 1, 3)),
    ),
    "linear": (ops.linear_at_least_float32, (WIDE, normal(G, 2, 3), normal(G, 2))),
}


@pytest.mark.parametrize("name", OPS)
def test_derivatives_are_those_of_finite_differences(name):
    """Of every number, or more sharply along one direction where there are many, in which a number has a small share.
    CASES have the second of every number."""
    op, shapes = OPS[name]
    inputs = [normal(generator(i), *shape).requires_grad_() for i, shape in enumerate(shapes)]
    many = sum(x.numel() for x in inputs) > 40
    assert torch.autograd.gradcheck(op, inputs, fast_mode=many, atol=1e-7, rtol=1e-6)
    assert torch.autograd.gradgradcheck(op, inputs, fast_mode=many)


@pytest.mark.parametrize("name", OPS)
def test_each_gradient_can_be_computed_separately(name):
    """A frozen argument (a constant v, a cached state) gets no gradient and changes none of the others."""
    op, shapes = OPS[name]
    inputs = [normal(generator(i), *shape).requires_grad_() for i, shape in enumerate(shapes)]
    expected = torch.autograd.grad(op(*inputs).square().sum(), inputs)
    for wanted, gradient in enumerate(expected):
        given = [x.detach().requires_grad_(i == wanted) for i, x in enumerate(inputs)]
        op(*given).square().sum().backward()
        assert torch.equal(given[wanted].grad, gradient)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives(name):
    function, arguments = CASES[name]
    arguments = [x.clone().requires_grad_() for x in arguments]
    assert torch.autograd.gradgradcheck(function, arguments)


@pytest.mark.parametrize(
    "name", ["rms_norm", "layer_norm, linear", "linear", "delta_write rms", "unit add", "causal_read"]
)
def test_second_derivatives_of_bfloat16_inputs(name):
    """A loss that is linear in the result: the incoming gradient is a constant, so nothing but the inputs tells that
    the gradient is to be differentiated."""
    function, arguments = CASES[name]

    def second(dtype):
        leaves = [x.bfloat16().to(dtype).requires_grad_() for x in arguments]
        grads = torch.autograd.grad(function(*leaves).double().sum(), leaves, create_graph=True)
        total = sum(grad.double().square().sum() for grad in grads)
        return torch.autograd.grad(total, leaves, materialize_grads=True)

    for narrow, wide in zip(second(torch.bfloat16), second(torch.float64)):
        assert (narrow.double() - wide).norm() <= 0.03 * wide.norm()


def test_a_gradient_that_needs_a_recomputed_state_is_not_differentiated():
    def penalty(recompute_every):
        state, *rest = (x.clone().requires_grad_() for x in WRITE)
        for _ in range(3):
            state = ops.delta_write(state, *rest, k_norm="rms", recompute_every=recompute_every)
        return torch.autograd.grad(state.sum(), rest, create_graph=True)[0].square().sum()

    penalty(1).backward()
    with pytest.raises(RuntimeError, match="recompute='none'"):
        penalty(4)


@pytest.mark.parametrize("value_channels", [1, 3])
def test_hessian_vector_products_of_a_stack(value_channels):
    stream = DeepDelta(value_channels=value_channels, recompute="none").build(4, 2).double()
    start = normal(generator(1), 1, 3, 4)

    def loss(x):
        state = stream.expand(x)
        for connection in stream.connections:
            y, carry = connection.read(state)
            state = connection.write(torch.tanh(y), carry)
        return stream.collapse(state).sum()

    x, along = start.clone().requires_grad_(), normal(generator(2), 1, 3, 4)
    gradient = lambda at: torch.autograd.grad(loss(at), at, create_graph=True)[0]  # noqa: E731
    (product,) = torch.autograd.grad((gradient(x) * along).sum(), x)
    step = 1e-5
    ahead, behind = ((start + sign * step * along).requires_grad_() for sign in (1, -1))
    expected = (gradient(ahead) - gradient(behind)) / (2 * step)
    torch.testing.assert_close(product, expected.detach(), rtol=1e-6, atol=1e-8)
