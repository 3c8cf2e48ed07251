"""Gradients of the delta operations in float64, against the published formulas, autograd and finite differences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import (
    delta_write,
    unit,
)
from support.delta_cases import cases, direction, generator, normal, outer, product_form
from support.tolerances import assert_close


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


@given(cases(norms=st.floats(0.0, 3.0)), st.sampled_from([1e-5, 0.3]), st.integers(0, 2**31))
def test_gradients_of_one_update_from_raw_direction_and_gate_logit(case, eps, seed):
    g = generator(seed)
    logit = normal(g, *case.beta.shape)
    grad = normal(g, *case.state.shape)

    dense = leaves(case.state, case.k, case.v, logit)
    state, raw, v, z = dense
    expected = torch.autograd.grad(product_form(state, unit(raw, eps=eps), v, 2 * z.sigmoid()), dense, grad)

    ours = leaves(case.state, case.k, case.v, logit)
    state, raw, v, z = ours
    actual = torch.autograd.grad(delta_write(state, unit(raw, eps=eps), v, 2 * z.sigmoid()), ours, grad)

    # In the paper's layout: X, G in R^{dim x value_channels}; r = v - X^T k, p = G^T k, n_e = sqrt(|k~|^2 + eps^2).
    length = (case.k.square().sum(-1, keepdim=True) + eps**2).sqrt()
    k, beta = case.k / length, 2 * logit.sigmoid()
    r = case.v - (case.state @ k.unsqueeze(-1)).squeeze(-1)
    p = (grad @ k.unsqueeze(-1)).squeeze(-1)
    dbeta = (p * r).sum(-1)
    dk = beta.unsqueeze(-1) * (grad.mT @ r.unsqueeze(-1) - case.state.mT @ p.unsqueeze(-1)).squeeze(-1)
    formulas = (
        grad - (beta[..., None, None] * outer(k, p)).mT,
        (dk - k * (k * dk).sum(-1, keepdim=True)) / length,
        beta.unsqueeze(-1) * p,
        dbeta * beta * (1 - beta / 2),
    )
    for by_write, by_autograd, by_formula in zip(actual, expected, formulas):
        assert_close(by_write, by_autograd)
        assert_close(by_formula, by_autograd)


@given(cases(norms=st.sampled_from([0.0, 0.5, 1.0, 2.0])), st.integers(0, 2**31))
def test_gradients_with_k_as_it_is(case, seed):
    grad = normal(generator(seed), *case.state.shape)
    ours, dense = leaves(*case), leaves(*case)
    actual = torch.autograd.grad(delta_write(*ours), ours, grad)
    expected = torch.autograd.grad(product_form(*dense), dense, grad)
    for by_write, by_autograd in zip(actual, expected):
        assert_close(by_write, by_autograd)


def test_write_gradcheck_one_token_through_the_norm_at_zero():
    g = generator(0)
    arguments = leaves(normal(g, 1, 1, 3, 4), torch.zeros(1, 1, 4).double(), normal(g, 1, 1, 3), normal(g, 1, 1))
    assert torch.autograd.gradcheck(lambda x, k, v, b: delta_write(x, unit(k, eps=0.3), v, b), arguments)


@pytest.mark.parametrize("wanted", range(4))
def test_write_gives_each_gradient_alone(wanted):
    """A frozen argument (a constant v, a cached state) gets no gradient and changes none of the others."""
    g = generator(0)
    arguments = [normal(g, 2, 3, 4), direction(g, 2, 4), normal(g, 2, 3), normal(g, 2)]
    together = leaves(*arguments)
    expected = torch.autograd.grad(delta_write(*together).square().sum(), together)
    arguments[wanted].requires_grad_()
    delta_write(*arguments).square().sum().backward()
    assert torch.equal(arguments[wanted].grad, expected[wanted])
    assert all(x.grad is None for i, x in enumerate(arguments) if i != wanted)


def test_empty_batch_and_no_tokens():
    for leading in [(0, 3), (2, 0)]:
        arguments = leaves(*(torch.zeros(*leading, *rest) for rest in [(4, 5), (5,), (4,), ()]))
        written = delta_write(*arguments)
        written.sum().backward()
        assert written.shape == (*leading, 4, 5)
        assert all(x.grad.shape == x.shape for x in arguments)
