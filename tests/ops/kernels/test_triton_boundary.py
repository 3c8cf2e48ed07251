"""The boundary between two sublayers in Triton, read over channels or over tokens, against its plain definition in
float64."""

from functools import partial

import pytest
import torch

from residua.ops.write_read import boundary
from support.kernel_cases import DEVICE, assert_as_good, boundary_arguments, normal, results

triton = pytest.importorskip("triton")

from residua.ops.kernels.channel_boundary import channel_backward_op, channel_op  # noqa: E402
from residua.ops.kernels.token_boundary import token_backward_op, token_op  # noqa: E402

boundary_kernel = partial(boundary, implementation="triton")

CASES = [  # batch, seq, value channels, dim, taps of the read over tokens
    (2, 3, 1, 64, None),
    (1, 7, 2, 5, None),
    (2, 2, 3, 300, None),
    (1, 3, 4, 48, None),
    (1, 3, 8, 5, None),
    (1, 1, 16, 48, None),
    (1, 9, 1, 48, 4),  # chunks of 4 without a GPU: two whole ones and a piece
    (2, 5, 2, 5, 2),
    (1, 5, 4, 64, 3),
    (2, 5, 3, 5, 4),
    (1, 2, 2, 48, 4),  # shorter than the kernel
    (1, 5, 16, 5, 7),  # a kernel longer than a chunk
    (1, 3, 4, 48, 1),
]
if DEVICE == "cuda":  # there, few tokens have a program each, and chunks have at least 16
    CASES += [(1, 5, 4, 768, None), (4, 203, 4, 768, None), (1, 5, 4, 768, 4), (2, 203, 4, 768, 4)]
both_reads = pytest.mark.parametrize("taps", [None, 3], ids=["channels", "tokens"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_good_as_the_plain_definition(case, dtype):
    options = {"value_input": "context" if case[2] in (2, 3) else "x_in", "norm_eps": 1e-3}
    assert_as_good(partial(boundary_kernel, **options), partial(boundary, **options), boundary_arguments(*case, dtype))


@both_reads
@pytest.mark.parametrize("k_norm", [None, "add"])
def test_other_norms_of_the_direction(k_norm, taps):
    """Which norms there are, the delta write tells; here that the boundary passes them on."""
    inputs = boundary_arguments(2, 5, 2, 48, taps)
    inputs[1] = inputs[1] * torch.linspace(0, 0.2, 10, device=DEVICE).reshape(2, 5, 1)
    options = {"k_norm": k_norm, "eps": 0.5}
    assert_as_good(partial(boundary_kernel, **options), partial(boundary, **options), inputs)


def test_low_precision_parameters_have_low_precision_gradients():
    inputs = [x.bfloat16() for x in boundary_arguments(1, 5, 2, 48, None, torch.bfloat16)]
    assert_as_good(boundary_kernel, boundary, inputs)


def test_results_that_nobody_uses_have_no_gradient():
    inputs = [x.requires_grad_() for x in boundary_arguments(1, 3, 2, 48, None)]
    for i in range(4):
        ours = torch.autograd.grad(boundary_kernel(*inputs)[i].sum(), inputs)
        plain = torch.autograd.grad(boundary(*inputs)[i].sum(), inputs, materialize_grads=True)
        for a, b in zip(ours, plain):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5)


def test_nothing_looks_ahead():
    """Not even at a chunk's border: outputs before a changed token are the same to the last bit."""
    inputs = boundary_arguments(1, 9, 2, 48, 4)
    before = boundary_kernel(*inputs)
    inputs[0] = inputs[0].clone()
    inputs[0][:, 4] += 1
    for a, b in zip(before, boundary_kernel(*inputs)):
        assert torch.equal(a[:, :4], b[:, :4])
        assert not torch.equal(a[:, 4:], b[:, 4:])


def test_sequences_do_not_see_each_other():
    inputs = boundary_arguments(2, 5, 2, 48, 4)
    together = boundary_kernel(*inputs)
    for i in range(2):
        single = boundary_kernel(*(x[i] for x in inputs[:4]), *inputs[4:])
        for a, b in zip(together, single):
            assert torch.equal(a[i], b)


@both_reads
def test_repeated_states_and_no_tokens(taps):
    inputs = boundary_arguments(2, 5, 4, 48, taps)
    repeated = normal(2, 5, 48).unsqueeze(-2).expand(2, 5, 4, 48)
    for a, b in zip(boundary_kernel(repeated, *inputs[1:]), boundary_kernel(repeated.contiguous(), *inputs[1:])):
        assert torch.equal(a, b)
    made = results(boundary_kernel, [*(x[:, :0] for x in inputs[:4]), *inputs[4:]])
    assert made[1].shape == (2, 0, 48)
    assert all((x == 0).all() for x in made[-4:])


def test_the_same_bits_every_time():
    inputs = boundary_arguments(1, 7, 4, 48, None, torch.bfloat16)
    for a, b in zip(results(boundary_kernel, inputs), results(boundary_kernel, inputs)):
        assert torch.equal(a, b)


@both_reads
def test_what_is_kept_for_the_backward_pass(taps):
    kept = []
    inputs = [x.requires_grad_() for x in boundary_arguments(1, 5, 4, 48, taps, torch.bfloat16)]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        boundary_kernel(*inputs)
    tokens, channels, dim = 5, 4, 48
    parameters = sum(x.numel() * x.itemsize for x in inputs[4:])
    numbers = sum(x.numel() * x.itemsize for x in kept) - parameters
    assert numbers == tokens * (2 * (channels + 1) * dim + 4 * (2 * channels + 3))


@pytest.mark.parametrize(
    ("op", "backward_op", "taps"),
    [(channel_op, channel_backward_op, None), (token_op, token_backward_op, 2)],
    ids=["channels", "tokens"],
)
def test_the_operator_is_registered_as_torch_demands(op, backward_op, taps):
    inputs = boundary_arguments(1, 3, 2, 48, taps)
    state, write, reader = inputs[0], inputs[1:4], inputs[4:]
    torch.library.opcheck(op, (state, write, reader, "rms", 1e-5, 1e-5, False))
    *made, error, scale, root = op(state, write, reader, "rms", 1e-5, 1e-5, False)
    since = [write[0], scale, write[2], error]
    saved = [error, scale, root]
    torch.library.opcheck(backward_op, (made, state, since, write, reader, saved, "rms", 1e-5, False))


def test_what_the_kernel_does_not_take_is_an_error():
    for taps, shape in ((None, r"\(2, 48\)"), (2, r"\(2, 2, 48\)")):
        *before, weights, gain, gate, value = boundary_arguments(1, 2, 2, 48, taps)
        after = gate, value
        with pytest.raises(ValueError, match=f"weights must be .*{shape}"):
            boundary_kernel(*before, weights[..., :1, :], gain, *after)
    with pytest.raises(TypeError, match=r"taps: .*float64"):
        boundary_kernel(*before, weights.double(), gain, *after)
    with pytest.raises(TypeError, match=r"gain: .*float64"):
        boundary_kernel(*before, weights[0], gain.double(), *after)
    with pytest.raises(ValueError, match="value_input must be 'x_in' or 'context'"):
        boundary_kernel(*before, weights[0], gain, *after, value_input="y")
    with pytest.raises(ValueError, match=r"state must be \(..., seq, value_channels, dim\)"):
        boundary_kernel(*(x[0, 0] for x in before), weights, gain, *after)
