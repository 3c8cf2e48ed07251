"""Gradients of the delta operations in float64, against the published formulas, autograd and finite differences."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import (
    delta_write,
    unit,
)
from support.delta_cases import cases, generator, leaves, normal, outer, product_form
from support.tolerances import assert_close


@given(cases(norms=st.floats(0.0, 3.0)), st.sampled_from([1e-5, 0.3]), st.integers(0, 2**31))
def test_gradients_of_one_update_reach_the_raw_direction_and_the_gate_logit(case, eps, seed):
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


def test_write_gradcheck_one_token_through_the_norm_at_zero():
    g = generator(0)
    arguments = leaves(normal(g, 1, 1, 3, 4), torch.zeros(1, 1, 4).double(), normal(g, 1, 1, 3), normal(g, 1, 1))
    assert torch.autograd.gradcheck(lambda x, k, v, b: delta_write(x, unit(k, eps=0.3), v, b), arguments)


def test_an_empty_batch_and_no_tokens_are_allowed():
    for leading in [(0, 3), (2, 0)]:
        arguments = leaves(*(torch.zeros(*leading, *rest) for rest in [(4, 5), (5,), (4,), ()]))
        written = delta_write(*arguments)
        written.sum().backward()
        assert written.shape == (*leading, 4, 5)
        assert all(x.grad.shape == x.shape for x in arguments)
