"""The boundary with a read over tokens in Triton against its plain definition in float64."""

from functools import partial

import pytest
import torch

from residua.ops.write_read import boundary
from support.kernel_cases import DEVICE, assert_as_good, normal, results, write_arguments

triton = pytest.importorskip("triton")

from residua.ops.kernels.token_boundary import token_backward_op, token_op  # noqa: E402

kernel = partial(boundary, implementation="triton")

CASES = [  # batch, seq, value channels, dim, kernel
    (1, 9, 1, 48, 4),  # chunks of 4 without a GPU: two whole ones and a piece
    (2, 5, 2, 5, 2),
    (1, 5, 4, 64, 3),
    (2, 5, 3, 5, 4),
    (1, 2, 2, 48, 4),  # shorter than the kernel
    (1, 5, 16, 5, 7),  # a kernel longer than a chunk
    (1, 3, 4, 48, 1),
    *([(1, 5, 4, 768, 4), (2, 203, 4, 768, 4)] if DEVICE == "cuda" else []),  # there, chunks have at least 16 tokens
]


def arguments(batch: int, seq: int, channels: int, dim: int, kernel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        *write_arguments(batch, seq, channels, dim, dtype),
        0.5 * normal(kernel, channels, dim, seed=3),
        1 + 0.3 * normal(dim, seed=4),
        normal(dim, seed=5) / dim**0.5,
        normal(channels, dim, seed=6) / dim**0.5,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_the_plain_definition(case, dtype):
    value_input = "context" if case[2] == 2 else "x_in"
    options = {"value_input": value_input, "norm_eps": 1e-3}
    assert_as_good(partial(kernel, **options), partial(boundary, **options), arguments(*case, dtype))


@pytest.mark.parametrize("k_norm", [None, "add"])
def test_other_norms_of_the_direction(k_norm):
    """Which norms there are, the delta write tells; here that the boundary passes them on."""
    inputs = arguments(2, 5, 2, 48, 3, torch.float32)
    inputs[1] = inputs[1] * torch.linspace(0, 0.2, 10, device=DEVICE).reshape(2, 5, 1)
    options = {"k_norm": k_norm, "eps": 0.5}
    assert_as_good(partial(kernel, **options), partial(boundary, **options), inputs)


def test_every_number_of_the_results_is_written(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    for made in results(kernel, arguments(2, 6, 3, 48, 4, torch.float32)):
        assert made.isfinite().all()


def test_nothing_looks_ahead():
    """Not even at a chunk's border: outputs before a changed token are the same to the last bit."""
    inputs = arguments(1, 9, 2, 48, 4, torch.float32)
    before = kernel(*inputs)
    inputs[0] = inputs[0].clone()
    inputs[0][:, 4] += 1
    after = kernel(*inputs)
    for a, b in zip(before, after):
        assert torch.equal(a[:, :4], b[:, :4])
        assert not torch.equal(a[:, 4:], b[:, 4:])


def test_sequences_do_not_see_each_other():
    inputs = arguments(2, 5, 2, 48, 4, torch.float32)
    both = kernel(*inputs)
    for i in range(2):
        single = kernel(*(x[i] for x in inputs[:4]), *inputs[4:])
        for a, b in zip(both, single):
            assert torch.equal(a[i], b)


def test_repeated_states_and_no_tokens():
    inputs = arguments(2, 5, 4, 48, 4, torch.float32)
    repeated = normal(2, 5, 48).unsqueeze(-2).expand(2, 5, 4, 48)
    for a, b in zip(kernel(repeated, *inputs[1:]), kernel(repeated.contiguous(), *inputs[1:])):
        assert torch.equal(a, b)
    made = results(kernel, [*(x[:, :0] for x in inputs[:4]), *inputs[4:]])
    assert made[1].shape == (2, 0, 48)
    assert all((x == 0).all() for x in made[-4:])


def test_what_is_kept_for_the_backward_pass():
    kept = []
    inputs = [x.requires_grad_() for x in arguments(1, 5, 4, 48, 4, torch.bfloat16)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernel(*inputs)
    count, channels, dim = 5, 4, 48
    parameters = sum(x.numel() * x.itemsize for x in inputs[4:])
    numbers = sum(x.numel() * x.itemsize for x in kept) - parameters
    assert numbers == count * (2 * (channels + 1) * dim + 4 * (2 * channels + 3))


def test_compiles_into_one_graph():
    torch.compiler.reset()
    inputs = arguments(1, 5, 2, 48, 3, torch.float32)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled, inputs), results(kernel, inputs)):
        assert torch.equal(actual, expected)


def test_the_operator_is_registered_as_torch_demands():
    inputs = arguments(1, 3, 2, 48, 2, torch.float32)
    state, write, reader = inputs[0], inputs[1:4], inputs[4:]
    torch.library.opcheck(token_op, (state, write, reader, "rms", 1e-5, 1e-5, False))
    *made, error, scale, root = token_op(state, write, reader, "rms", 1e-5, 1e-5, False)
    since = [write[0], scale, write[2], error]
    saved = [error, scale, root]
    torch.library.opcheck(token_backward_op, (made, state, since, write, reader, saved, "rms", 1e-5, False))


def test_what_the_kernel_does_not_take_is_an_error():
    inputs = arguments(1, 2, 2, 48, 2, torch.float32)
    with pytest.raises(TypeError, match=r"taps: .*float64"):
        kernel(*inputs[:4], inputs[4].double(), *inputs[5:])
    with pytest.raises(ValueError, match=r"weights must be .*\(2, 2, 48\)"):
        kernel(*inputs[:4], inputs[4][:, :1], *inputs[5:])
    with pytest.raises(ValueError, match=r"state must be \(..., seq, value_channels, dim\)"):
        kernel(*(x[0, 0] for x in inputs[:4]), *inputs[4:])
