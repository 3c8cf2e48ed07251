"""Every operation is one graph for torch.compile, forward and backward, with the numbers of the eager one."""

import pytest
import torch

from residua.ops import (
    K_NORMS,
    causal_expand,
    causal_read,
    cayley,
    cayley_angle,
    cayley_apply,
    cayley_transform,
    channel_taps,
    compose,
    delta_inverse,
    delta_operator,
    delta_write,
    delta_write_v1,
    depth_read,
    determinant,
    eigenvalues,
    gate_penalty,
    gated_delta,
    guarded_sinkhorn,
    householder,
    hybrid,
    hyper_mix,
    hyper_read,
    hyper_write,
    iterative_cayley,
    kronecker_mixture,
    linear_at_least_float32,
    orthogonal_update,
    permutation_mixture,
    residual_scale,
    scaled_sum,
    singular_values,
    sinkhorn,
    stream_read,
    unit,
)
from support.delta_cases import generator, normal
from support.tolerances import assert_close

WRITE = [(2, 3, 2, 4), (2, 3, 4), (2, 3, 2), (2, 3)]
STREAMS = (2, 3, 4, 5)
# name: (op, shapes of its arguments)
OPS = {
    **{f"unit-{k_norm}": (lambda k, k_norm=k_norm: unit(k, k_norm=k_norm), [(2, 3, 4)]) for k_norm in K_NORMS},
    "delta_write": (delta_write, WRITE),
    "delta_write_v1": (delta_write_v1, WRITE),
    "delta_inverse": (delta_inverse, WRITE),
    "delta_operator": (delta_operator, [(2, 4), (2,)]),
    "compose": (lambda k, beta: compose(k, beta).operator(), [(3, 4), (3,)]),
    "Composition.write": (lambda k, beta, x, v: compose(k, beta).write(x, v), [(3, 4), (3,), (2, 4), (3, 2)]),
    "eigenvalues": (lambda beta: eigenvalues(beta, 3), [(2,)]),
    "singular_values": (lambda beta: singular_values(beta, 3), [(2,)]),
    "determinant": (lambda beta: determinant(beta, 3), [(2,)]),
    "causal_expand": (causal_expand, [(2, 5, 4), (3, 2, 4)]),
    "causal_read": (causal_read, [(2, 5, 2, 4), (3, 2, 4)]),
    "stream_read": (stream_read, [(2, 5, 2, 4), (2, 4)]),
    "channel_taps": (channel_taps, [(2, 4), (3,)]),
    "linear_at_least_float32": (linear_at_least_float32, [(2, 4), (3, 4), (3,)]),
    "hyper_read": (hyper_read, [STREAMS, (2, 3, 4)]),
    "hyper_mix": (hyper_mix, [STREAMS, (2, 3, 4, 4)]),
    "hyper_write": (hyper_write, [STREAMS, (2, 3, 5), (2, 3, 4, 4), (2, 3, 4)]),
    "hyper_write-rows": (hyper_write, [STREAMS, STREAMS, (2, 3, 4, 4), (2, 3, 4)]),
    "hyper_write-shared": (hyper_write, [STREAMS, (2, 3, 5), (4, 4), (4,)]),
    "hyper_write-identity": (lambda x, y, h_post: hyper_write(x, y, None, h_post), [STREAMS, (2, 3, 5), (2, 3, 4)]),
    "sinkhorn": (lambda logits: sinkhorn(logits, 3), [(2, 3, 4, 4)]),
    "guarded_sinkhorn": (lambda logits: guarded_sinkhorn(logits, 3), [(2, 3, 4, 4)]),
    "kronecker_mixture": (lambda weights: kronecker_mixture(weights.sigmoid()), [(2, 3, 2)]),
    "permutation_mixture": (permutation_mixture, [(2, 3, 24)]),
    "cayley": (cayley, [(2, 3, 4), (2, 3, 4), (2, 3)]),
    "cayley_angle": (cayley_angle, [(2, 3, 4), (2, 3, 4), (2, 3)]),
    "cayley_apply": (cayley_apply, [STREAMS, (2, 3, 4), (2, 3, 4), (2, 3)]),
    "cayley_apply-many": (cayley_apply, [(2, 3, 6, 5), (2, 1, 6), (2, 1, 6), (2, 1)]),
    "cayley_transform": (lambda w: cayley_transform(w - w.mT), [(2, 3, 4, 4)]),
    "iterative_cayley": (lambda w: iterative_cayley(w - w.mT), [(2, 3, 4, 4)]),
    "householder": (householder, [STREAMS, (2, 3, 4)]),
    "householder-gate": (householder, [STREAMS, (2, 3, 4), (2, 3)]),
    "hybrid": (hybrid, [STREAMS, (2, 3, 4), (2, 3, 4), (2, 3), (2, 3, 4), (2, 3)]),
    "gate_penalty": (gate_penalty, [(2, 3)]),
    "gated_delta": (gated_delta, [(2, 3, 4), (2, 3, 4), (2, 3, 2), (2, 3, 2)]),
    "gated_delta_channels": (gated_delta, [(2, 3, 5, 4), (2, 3, 4), (2, 3, 1, 2), (2, 3, 5, 2)]),
    "orthogonal_update": (orthogonal_update, [(2, 3, 4), (2, 3, 4), (2, 3, 2)]),
    "residual_scale": (residual_scale, [(2, 3, 4), (2, 3, 4), (2, 3, 2)]),
    "scaled_sum": (lambda x, y, s: scaled_sum((x, y), (s, None)), [(2, 3, 4), (2, 3, 4), (4,)]),
    "depth_read": (lambda query, *sources: depth_read(sources, query)[0], [(4,), *[(2, 3, 4)] * 3]),
    "depth_read_normalised_in_heads": (
        lambda query, *sources: depth_read(sources, query, heads=2, normalise_values=True)[0],
        [(4,), *[(2, 3, 4)] * 3],
    ),
}

HYPER = ["hyper_read", "hyper_mix", "hyper_write", "sinkhorn"]


@pytest.mark.parametrize("name", OPS)
def test_compiles_into_one_graph(name):
    """In bfloat16, which takes every path of float32 and the casts beside it."""
    torch.compiler.reset()
    op, shapes = OPS[name]
    g = generator(0)
    inputs = [normal(g, *shape).bfloat16().requires_grad_() for shape in shapes]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    actual, expected = compiled(*inputs), op(*inputs)
    assert_close(actual, expected)
    grad = torch.ones_like(expected)
    for a, b in zip(torch.autograd.grad(actual, inputs, grad), torch.autograd.grad(expected, inputs, grad)):
        assert_close(a, b)


@pytest.mark.parametrize("name", ["delta_write", "causal_read", "causal_expand", *HYPER])
def test_compiles_for_any_sequence_length(name):
    torch.compiler.reset()
    op, shapes = OPS[name]
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    g = generator(0)
    for length in (5, 9):
        resized = [
            (shape[0], length, *shape[2:]) if i == 0 or name in ("delta_write", *HYPER) else shape
            for i, shape in enumerate(shapes)
        ]
        inputs = [normal(g, *shape).requires_grad_() for shape in resized]
        assert_close(compiled(*inputs), op(*inputs))


def test_numbers_that_vary_between_calls():
    """dynamo takes an eps that it has met with two values for a variable, and everything for one with `dynamic`."""
    state, k = (normal(generator(i), 2, *shape).requires_grad_() for i, shape in enumerate([(3, 4), (4,)]))
    v, beta = torch.ones(2, 3), torch.ones(2)

    def twice(eps):
        first = delta_write(state, unit(k, eps=eps), v, beta)
        return delta_write(first, k, v, beta, k_norm="rms", eps=eps)

    torch.compiler.reset()
    for dynamic in (None, True):
        compiled = torch.compile(twice, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for eps in (1e-5, 1e-2, 0.3):
            assert_close(compiled(eps), twice(eps))
