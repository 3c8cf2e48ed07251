"""The boundary between two sublayers in Triton against its plain definition in float64."""

from functools import partial

import pytest
import torch

from residua.ops import delta_write
from residua.ops.write_read import boundary
from support.kernel_cases import DEVICE, assert_as_good, normal, results, write_arguments

triton = pytest.importorskip("triton")

from residua.ops.kernels.channel_boundary import channel_backward_op, channel_op  # noqa: E402

kernel = partial(boundary, implementation="triton")

CASES = [  # batch, seq, value channels, dim
    (2, 3, 1, 64),
    (1, 7, 2, 5),
    (2, 2, 3, 300),
    (1, 3, 4, 48),
    (1, 3, 8, 5),
    (1, 1, 16, 48),
    *([(1, 5, 4, 768), (4, 203, 4, 768)] if DEVICE == "cuda" else []),  # there, few tokens have a program each
]


def arguments(batch: int, seq: int, channels: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [
        *write_arguments(batch, seq, channels, dim, dtype),
        0.5 + 0.3 * normal(channels, dim, seed=3),
        1 + 0.3 * normal(dim, seed=4),
        normal(dim, seed=5) / dim**0.5,
        normal(channels, dim, seed=6) / dim**0.5,
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_the_plain_definition(case, dtype):
    value_input = "context" if case[2] in (2, 3) else "x_in"
    options = {"value_input": value_input, "norm_eps": 1e-3}
    assert_as_good(partial(kernel, **options), partial(boundary, **options), arguments(*case, dtype))


@pytest.mark.parametrize("k_norm", [None, "add"])
def test_other_norms_of_the_direction(k_norm):
    """Which norms there are, the delta write tells; here that the boundary passes them on."""
    inputs = arguments(2, 4, 2, 48, torch.float32)
    inputs[1] = inputs[1] * torch.linspace(0, 0.2, 8, device=DEVICE).reshape(2, 4, 1)
    options = {"k_norm": k_norm, "eps": 0.5}
    assert_as_good(partial(kernel, **options), partial(boundary, **options), inputs)


def test_low_precision_parameters_have_low_precision_gradients():
    inputs = [x.bfloat16() for x in arguments(1, 5, 2, 48, torch.bfloat16)]
    assert_as_good(kernel, boundary, inputs)


def test_every_number_of_the_results_is_written(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(float("nan")))
    for made in results(kernel, arguments(1, 3, 3, 300, torch.float32)):
        assert made.isfinite().all()


def test_results_that_nobody_uses_have_no_gradient():
    inputs = [x.requires_grad_() for x in arguments(1, 3, 2, 48, torch.float32)]
    for i in range(4):
        ours = torch.autograd.grad(kernel(*inputs)[i].sum(), inputs)
        plain = torch.autograd.grad(boundary(*inputs)[i].sum(), inputs, materialize_grads=True)
        for a, b in zip(ours, plain):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_repeated_states_and_no_tokens():
    inputs = arguments(2, 2, 4, 48, torch.float32)
    repeated = normal(2, 2, 48).unsqueeze(-2).expand(2, 2, 4, 48)
    for a, b in zip(kernel(repeated, *inputs[1:]), kernel(repeated.contiguous(), *inputs[1:])):
        assert torch.equal(a, b)
    none = [x[:, :0] for x in inputs[:4]]
    made = results(kernel, [*none, *inputs[4:]])
    assert made[1].shape == (2, 0, 48)
    assert all((x == 0).all() for x in made[-4:])


def test_the_same_bits_every_time():
    inputs = arguments(1, 7, 4, 48, torch.bfloat16)
    for a, b in zip(results(kernel, inputs), results(kernel, inputs)):
        assert torch.equal(a, b)


def test_what_is_kept_for_the_backward_pass():
    kept = []
    inputs = [x.requires_grad_() for x in arguments(1, 5, 4, 48, torch.bfloat16)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        kernel(*inputs)
    tokens, channels, dim = 5, 4, 48
    parameters = sum(x.numel() * x.itemsize for x in inputs[4:])
    numbers = sum(x.numel() * x.itemsize for x in kept) - parameters
    assert numbers == tokens * (2 * (channels + 1) * dim + 4 * (2 * channels + 3))


def test_compiles_into_one_graph():
    torch.compiler.reset()
    inputs = arguments(1, 3, 2, 48, torch.float32)
    compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(results(compiled, inputs), results(kernel, inputs)):
        assert torch.equal(actual, expected)


def test_the_operator_is_registered_as_torch_demands():
    inputs = arguments(1, 2, 2, 48, torch.float32)
    state, write, reader = inputs[0], inputs[1:4], inputs[4:]
    torch.library.opcheck(channel_op, (state, write, reader, "rms", 1e-5, 1e-5, False))
    *made, error, scale, root = channel_op(state, write, reader, "rms", 1e-5, 1e-5, False)
    since = [write[0], scale, write[2], error]
    saved = [error, scale, root]
    torch.library.opcheck(channel_backward_op, (made, state, since, write, reader, saved, "rms", 1e-5, False))


def test_what_the_kernel_does_not_take_is_an_error():
    inputs = arguments(1, 2, 2, 48, torch.float32)
    with pytest.raises(TypeError, match=r"gain: .*float64"):
        kernel(*inputs[:5], inputs[5].double(), *inputs[6:])
    with pytest.raises(ValueError, match=r"weights must be .*\(2, 48\)"):
        kernel(*inputs[:4], inputs[4][:1], *inputs[5:])
    with pytest.raises(ValueError, match="value_input must be 'x_in' or 'context'"):
        kernel(*inputs, value_input="y")


def test_the_public_op_runs_the_kernel_also_while_compiling():
    inputs = arguments(1, 3, 2, 48, torch.float32)
    chosen = partial(boundary, implementation="triton")
    torch.compiler.reset()
    for compute in (chosen, torch.compile(chosen, fullgraph=True, backend="aot_eager")):
        for actual, expected in zip(compute(*inputs), kernel(*inputs)):
            assert torch.equal(actual, expected)
    with pytest.raises(TypeError, match="float64"):
        delta_write(*(x.double() for x in inputs[:4]), implementation="triton")
