"""Every operation is one graph for torch.compile, forward and backward, with the numbers of the eager one."""

import pytest
import torch

from residua.ops import delta_write, unit
from support.delta_cases import generator, normal
from support.lanes import some
from support.op_cases import OPS
from support.tolerances import assert_close

HYPER = ["hyper_read", "hyper_mix", "hyper_write", "sinkhorn"]
FIRST = {*{name.partition("-")[0]: name for name in reversed(OPS)}.values()}  # of each operation


@pytest.mark.parametrize("name", some(OPS, FIRST.__contains__))
def test_every_operation_compiles_into_one_graph(name):
    """In bfloat16, which runs every path of float32, and the casts as well."""
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


@pytest.mark.parametrize(
    "name", some(["delta_write", "causal_read", "causal_expand", *HYPER], ("delta_write", "causal_read").__contains__)
)
def test_operations_compile_for_any_sequence_length(name):
    torch.compiler.reset()
    op, shapes = OPS[name]
    compiled = torch.compile(op, fullgraph=True, backend="eager", dynamic=True)
    g = generator(0)
    for length in (5, 9):
        resized = [
            (shape[0], length, *shape[2:]) if i == 0 or name in ("delta_write", *HYPER) else shape
            for i, shape in enumerate(shapes)
        ]
        inputs = [normal(g, *shape).requires_grad_() for shape in resized]
        assert_close(compiled(*inputs), op(*inputs))


@pytest.mark.nightly
def test_numbers_may_vary_between_calls():
    """dynamo takes an eps that it has met with two values for a variable, and everything for one with `dynamic`."""
    state, k = (normal(generator(i), 2, *shape).requires_grad_() for i, shape in enumerate([(3, 4), (4,)]))
    v, beta = torch.ones(2, 3), torch.ones(2)

    def twice(eps):
        first = delta_write(state, unit(k, eps=eps), v, beta)
        return delta_write(first, k, v, beta, k_norm="rms", eps=eps)

    torch.compiler.reset()
    for dynamic in (None, True):
        compiled = torch.compile(twice, fullgraph=True, backend="eager", dynamic=dynamic)
        for eps in (1e-5, 1e-2, 0.3):
            assert_close(compiled(eps), twice(eps))
