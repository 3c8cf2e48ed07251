"""Reads, mixes and writes of streams in Triton against their definitions in float64; interpreted without a GPU."""

import itertools
from functools import partial

import pytest
import torch

from benchmarks import ops as benchmark
from residua.ops import hyper_mix, hyper_read, hyper_write
from support.kernel_cases import DEVICE, assert_as_good, normal, results
from support.lanes import some

triton = pytest.importorskip("triton")

from residua.ops.kernels import streams as kernels  # noqa: E402

read, mix, write = (partial(op, implementation="triton") for op in (hyper_read, hyper_mix, hyper_write))


def added(x, y, h_post):
    return hyper_write(x, y, None, h_post)


def added_by_kernel(x, y, h_post):
    return write(x, y, None, h_post)


def arguments(leading, n, dim, dtype=torch.float32, own=None):
    """streams, y, h_res and h_post, these with the leading axes `own`."""
    own = leading if own is None else own
    return (
        normal(*leading, n, dim, dtype=dtype),
        normal(*leading, dim, seed=1, dtype=dtype),
        normal(*own, n, n, seed=2),
        normal(*own, n, seed=3),
    )


def assert_all_as_good(x, y, h_res, h_post):
    assert_as_good(read, hyper_read, [x, h_post])
    assert_as_good(mix, hyper_mix, [x, h_res])
    assert_as_good(write, hyper_write, [x, y, h_res, h_post])
    assert_as_good(write, hyper_write, [x, normal(*x.shape, seed=4, dtype=x.dtype), h_res, h_post])
    assert_as_good(added_by_kernel, added, [x, y, h_post])


CASES = [  # leading axes, streams, dim
    ((2, 3), 1, 1),
    ((5,), 2, 3),
    ((2,), 3, 300),  # more columns than a warp takes at a time
    ((1, 2, 2), 4, 5),
    ((2,), 8, 48),
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    some(
        itertools.product(CASES, (torch.float32, torch.bfloat16)),
        lambda case: case[1] == torch.float32 or case[0] == CASES[1],
    ),
)
def test_kernels_are_as_accurate_as_the_plain_definitions(case, dtype):
    assert_all_as_good(*arguments(*case, dtype))


def test_sixteen_streams_of_one_token_need_no_leading_axes():
    assert_all_as_good(*arguments((), 16, 3))


def test_float16_and_mixed_dtypes_are_supported():
    """Streams in float32 that a low-precision sublayer writes to, and the other way round."""
    x, y, h_res, h_post = arguments((3,), 2, 48)
    half, low = torch.float16, torch.bfloat16
    assert_all_as_good(x.to(half), y.to(half), h_res.to(half), h_post.to(half))
    assert_all_as_good(x, y.to(low), h_res.to(low), h_post)
    assert_all_as_good(x.to(low), y, h_res, h_post.to(low))


# One for all tokens, for a position, for a sequence, and for some of three axes.
SHARED = [((2, 3), ()), ((2, 3), (3,)), ((2, 3), (1, 3)), ((2, 3), (2, 1)), ((2, 2, 3), (2, 1)), ((2, 2, 3), (2, 1, 3))]


@pytest.mark.parametrize(("leading", "own"), some(SHARED, [((2, 3), ()), ((2, 2, 3), (2, 1))].__contains__))
def test_tokens_may_share_coefficients(leading, own):
    assert_all_as_good(*arguments(leading, 2, 3, own=own))


def test_the_gradient_of_shared_coefficients_in_low_precision_is_rounded_once():
    x, _, h_res, h_post = arguments((3, 5), 2, 3, torch.bfloat16, own=())
    for op, coefficients in [(read, h_post), (mix, h_res)]:
        _, _, wide = results(op, [x, coefficients.bfloat16().float()])
        _, _, low = results(op, [x, coefficients.bfloat16()])
        assert torch.equal(low, wide.bfloat16())


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((3,), 1), ((5, 3), 5), ((4, 1, 3), 4), ((2, 4, 5, 3), 40), ((2, 1, 1, 3), 2), ((2, 1, 5, 3), 40)],
)
def test_shared_coefficients_are_not_copied_for_every_token(shape, rows):
    """A copy is made only if a shared axis lies between two others, as in the last case."""
    leading = (2, 4, 5)
    x = normal(*shape)
    numbers, every, count = kernels._shared(x, leading, 1)
    assert count == rows == numbers.numel() // 3
    tokens = x.expand(*leading, 3).reshape(-1, 3)
    index = torch.arange(40, device=DEVICE) // every % count
    assert torch.equal(numbers.reshape(-1, 3)[index], tokens)


def test_repeated_and_strided_streams_need_no_copy(monkeypatch):
    x, y, h_res, h_post = arguments((2, 3), 4, 48)
    repeated = y.unsqueeze(-2).expand(2, 3, 4, 48)
    stored = torch.empty(4, 2, 3, 48, device=DEVICE).permute(1, 2, 0, 3).copy_(x)
    wide_y = torch.cat([y, y], -1)[..., :48]
    turned = h_res.mT.contiguous().mT
    expected = [write(t.contiguous(), y, h_res, h_post) for t in (repeated, stored)]
    reads = [read(t.contiguous(), h_post) for t in (repeated, stored)]
    copy = torch.Tensor.contiguous  # which the coefficients may need
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda t: copy(t) if t.numel() <= 96 else pytest.fail("copied"))
    assert torch.equal(write(repeated, wide_y, turned, h_post), expected[0])
    assert torch.equal(write(stored, wide_y, turned, h_post), expected[1])
    assert torch.equal(read(repeated, h_post), reads[0])
    assert torch.equal(read(stored, h_post), reads[1])


def test_gradients_of_repeated_streams_are_exact():
    def through(op):
        return lambda x, *others: op(x.unsqueeze(-2).expand(2, 3, 4, 5), *others)

    _, y, h_res, h_post = arguments((2, 3), 4, 5)
    assert_as_good(through(read), through(hyper_read), [y, h_post])
    assert_as_good(through(write), through(hyper_write), [y, y + 1, h_res, h_post])


def test_gradients_may_have_zero_strides_or_gaps():
    """The gradient of a sum is one number for all; that of a transposed result has no contiguous rows."""
    x, y, h_res, h_post = (t.requires_grad_() for t in arguments((2, 3), 4, 5))
    for op, plain, inputs in [
        (read, hyper_read, (x, h_post)),
        (write, hyper_write, (x, y, h_res, h_post)),
        (added_by_kernel, added, (x, y, h_post)),
    ]:
        for number in (lambda made: made.sum(), lambda made: (made.mT.contiguous() ** 2).sum()):
            ours = torch.autograd.grad(number(op(*inputs)), inputs)
            theirs = torch.autograd.grad(number(plain(*inputs)), inputs)
            for a, b in zip(ours, theirs):
                torch.testing.assert_close(a, b)


@pytest.mark.parametrize("leading", [(2, 0), (2,)], ids=["no tokens", "no features"])
def test_empty_inputs_give_zero_gradients(leading):
    x, y, h_res, h_post = arguments(leading, 3, 4 if 0 in leading else 0, own=())
    for op, inputs in [
        (read, (x, h_post)),
        (mix, (x, h_res)),
        (write, (x, y, h_res, h_post)),
        (added_by_kernel, (x, y, h_post)),
    ]:
        made, *gradients = results(op, inputs)
        assert made.shape == (x.shape[:-2] + x.shape[-1:] if op is read else x.shape)
        for gradient, x_in in zip(gradients, inputs):
            assert gradient.shape == x_in.shape
            assert not gradient.any()


def test_the_backward_pass_keeps_only_the_expected_tensors():
    x, y, h_res, h_post = (t.requires_grad_() for t in arguments((5,), 4, 48, torch.bfloat16))

    def kept(op, *inputs):
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            op(*inputs)
        return {t.data_ptr() for t in found}

    assert kept(read, x, h_post) == {x.data_ptr(), h_post.data_ptr()}
    assert kept(write, x, y, h_res, h_post) == {t.data_ptr() for t in (x, y, h_res, h_post)}
    assert kept(added_by_kernel, x, y, h_post) == {y.data_ptr(), h_post.data_ptr()}


def test_the_operators_are_registered_as_torch_demands():
    x, y, h_res, h_post = (t.requires_grad_() for t in arguments((1, 2), 2, 3))
    torch.library.opcheck(kernels.hyper_read, (x, h_post))
    torch.library.opcheck(kernels.hyper_write, (x, None, h_res, None))
    torch.library.opcheck(kernels.hyper_write, (x, y, None, h_post))
    x, y, h_res, h_post = (t.detach() for t in (x, y, h_res, h_post))
    torch.library.opcheck(kernels.hyper_read_backward, (y, x, h_post))
    torch.library.opcheck(kernels.hyper_write_backward, (x, x + 1, None, h_res, None))
    torch.library.opcheck(kernels.hyper_write_backward, (x, None, y, None, h_post))


def test_a_second_derivative_is_an_error():
    inputs = [t.requires_grad_() for t in arguments((2,), 2, 3)]
    (first,) = torch.autograd.grad(write(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), inputs[2])


WITH_KERNELS = ("hyper_read", "hyper_write", "sinkhorn")


def test_kernels_are_timed_against_the_plain_definitions(monkeypatch):
    monkeypatch.setattr(benchmark, "cold", lambda clock, device: clock)
    settings = benchmark.OpSettings(
        operations=WITH_KERNELS,
        implementations=("reference", "triton"),
        tokens=(2,),
        dims=(16,),
        channels=(2,),
        sequence_length=2,
        rounds=1,
        warmup=0,
        device=DEVICE,
    )
    result = benchmark.benchmark(settings)
    runs = {(one.operation, one.runs) for one in result.results}
    assert runs >= {(name, which) for name in WITH_KERNELS for which in ("reference", "triton")}
