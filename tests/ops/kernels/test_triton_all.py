"""What every kernel must do: write all of its results, and be one operator of a compiled graph."""

from functools import partial

import pytest
import torch

from residua.ops import hyper_mix, hyper_read, hyper_write, sinkhorn
from support.kernel_cases import normal, results

pytest.importorskip("triton")

STREAMS, OUTPUT, MATRIX, ROWS = normal(3, 3, 300), normal(3, 300), normal(3, 3, 3, seed=2), normal(3, 3, seed=3)
KERNELS = {
    "hyper_read": (hyper_read, [STREAMS, ROWS]),
    "hyper_read-shared": (hyper_read, [STREAMS, ROWS[0]]),
    "hyper_mix": (hyper_mix, [STREAMS, MATRIX]),
    "hyper_write": (hyper_write, [STREAMS, OUTPUT, MATRIX, ROWS]),
    "sinkhorn": (partial(sinkhorn, iterations=2), [normal(20, 3, 3)]),
}
every_kernel = pytest.mark.parametrize("name", KERNELS)


@every_kernel
def test_a_kernel_writes_every_number_of_its_results(name, monkeypatch):
    op, inputs = KERNELS[name]
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    assert all(made.isfinite().all() for made in results(partial(op, implementation="triton"), inputs))


@every_kernel
def test_every_operation_compiles_into_one_graph(name):
    op, inputs = KERNELS[name]
    kernel = partial(op, implementation="triton")
    torch.compiler.reset()
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled, inputs), results(kernel, inputs)):
        assert torch.equal(actual, expected)
