"""Dtypes: results in the dtype that came in, small decisions in float32 at least, float64 all the way."""

import pytest
import torch
import torch.nn.functional as F

from residua.ops import (
    K_NORMS,
    at_least_float32,
    causal_expand,
    causal_read,
    channel_taps,
    compose,
    delta_inverse,
    delta_write,
    delta_write_v1,
    hyper_mix,
    hyper_read,
    hyper_write,
    linear_at_least_float32,
    stream_read,
    unit,
)
from support import op_cases as every_op
from support.delta_cases import generator, normal, product_form
from support.tolerances import assert_close

LOW = [torch.bfloat16, torch.float16]


def plain_write(state, k, v, beta):
    readout = (state * k.unsqueeze(-2)).sum(-1)
    return state + (beta.unsqueeze(-1) * (v - readout)).unsqueeze(-1) * k.unsqueeze(-2)


def plain_write_v1(state, k, v, beta):
    readout = (state * k.unsqueeze(-2)).sum(-1) / (k.square().sum(-1, keepdim=True) + 1e-5)
    return state + (beta.unsqueeze(-1) * (v - readout)).unsqueeze(-1) * k.unsqueeze(-2)


def plain_inverse(state, k, v, beta):
    return plain_write(state, k, v, beta / (beta * k.square().sum(-1) - 1))


def plain_expand(x, taps):
    kernel, num_streams, dim = taps.shape
    weight = taps.permute(2, 1, 0).flip(-1).reshape(dim * num_streams, 1, kernel)
    return (
        F.conv1d(F.pad(x.mT, (kernel - 1, 0)), weight, groups=dim).unflatten(1, (dim, num_streams)).permute(0, 3, 2, 1)
    )


def plain_read(streams, taps):
    kernel, _, dim = taps.shape
    channels = streams.permute(0, 3, 2, 1).flatten(1, 2)
    return F.conv1d(F.pad(channels, (kernel - 1, 0)), taps.permute(2, 1, 0).flip(-1), groups=dim).mT


def arguments(*shapes):
    g = generator(0)
    return [normal(g, *shape) for shape in shapes]


def write_arguments():
    state, k, v, beta = arguments((2, 5, 4, 64), (2, 5, 64), (2, 5, 4), (2, 5))
    return [state, k / k.norm(dim=-1, keepdim=True), v, 0.8 * beta.sigmoid()]


# name: (op, the same in plain PyTorch, float64 arguments)
OPS = {
    "unit": (unit, lambda k: k / (k.square().sum(-1, keepdim=True) + 1e-5**2).sqrt(), arguments((2, 5, 64))),
    "delta_write": (delta_write, plain_write, write_arguments()),
    "delta_write_v1": (delta_write_v1, plain_write_v1, write_arguments()),
    "delta_inverse": (delta_inverse, plain_inverse, write_arguments()),
    "causal_expand": (causal_expand, plain_expand, arguments((2, 7, 16), (4, 3, 16))),
    "causal_read": (causal_read, plain_read, arguments((2, 7, 3, 16), (4, 3, 16))),
    "stream_read": (stream_read, lambda x, w: (x * w).sum(-2), arguments((2, 7, 3, 16), (3, 16))),
    "hyper_read": (hyper_read, lambda x, h: (x * h.unsqueeze(-1)).sum(-2), arguments((2, 7, 3, 16), (2, 7, 3))),
    "hyper_mix": (hyper_mix, lambda x, h: h @ x, arguments((2, 7, 3, 16), (2, 7, 3, 3))),
    "hyper_write": (
        hyper_write,
        lambda x, y, h, p: h @ x + p.unsqueeze(-1) * y.unsqueeze(-2),
        arguments((2, 7, 3, 16), (2, 7, 16), (2, 7, 3, 3), (2, 7, 3)),
    ),
}


def results_and_gradients(op, inputs, grad):
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = op(*inputs)
    return [out, *torch.autograd.grad(out, inputs, grad.to(out.dtype))]


# Formulas of the spectrum, in the dtype that comes in.
AS_GIVEN = {"delta_operator", "determinant", "eigenvalues", "singular_values"}
ROUNDED = every_op.OPS.keys() - AS_GIVEN


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", sorted(ROUNDED))
def test_low_precision_is_the_float32_computation_rounded_once(name, dtype):
    op, shapes = every_op.OPS[name]
    low = [x.to(dtype).requires_grad_() for x in arguments(*shapes)]
    wide = [x.detach().float().requires_grad_() for x in low]
    with torch.autocast("cpu", torch.bfloat16):
        out = op(*low)
    expected = op(*wide)
    assert torch.equal(out, expected.to(out.dtype))
    if "shared" in name or "sequence" in name:
        return  # their gradients are sums over the tokens
    grad = torch.randn(out.shape, generator=generator(1)).to(dtype)
    theirs = torch.autograd.grad(expected, wide, grad.float())
    for x, a, b in zip(low, torch.autograd.grad(out, low, grad.to(out.dtype)), theirs):
        assert a.dtype == x.dtype
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("name", OPS)
def test_float64_and_float32_stay_what_they_are(name):
    op, plain, exact = OPS[name]
    grad = torch.randn(plain(*exact).shape, generator=generator(1), dtype=torch.float64)
    truth = results_and_gradients(plain, exact, grad)
    for dtype in (torch.float64, torch.float32):
        for actual, expected in zip(results_and_gradients(op, [x.to(dtype) for x in exact], grad), truth):
            assert actual.dtype == dtype
            assert_close(actual, expected)


@pytest.mark.parametrize("k_norm", K_NORMS)
@pytest.mark.parametrize("dtype", LOW)
def test_unit_direction_of_long_low_precision_vectors(k_norm, dtype):
    # 300^2 * 512 overflows float16, and a bfloat16 sum of 512 squares stalls.
    k = unit(torch.full((512,), 300.0, dtype=dtype), k_norm=k_norm)
    assert k.dtype == dtype
    assert_close(k, torch.full((512,), 512**-0.5, dtype=torch.float64))


def test_float32_state_with_a_bfloat16_direction():
    """What a low-precision sublayer writes into a float32 stream: the stream loses nothing, gradients keep dtypes."""
    state, k, v, beta = (x.float() for x in write_arguments())
    mixed = [state.requires_grad_(), k.bfloat16().requires_grad_(), v.requires_grad_(), beta.requires_grad_()]
    widened = [x.detach().float().requires_grad_() for x in mixed]
    written, expected = delta_write(*mixed), delta_write(*widened)
    assert written.dtype == torch.float32
    assert torch.equal(written, expected)
    for x, a, b in zip(mixed, torch.autograd.grad(written.sum(), mixed), torch.autograd.grad(expected.sum(), widened)):
        assert a.dtype == x.dtype
        assert torch.equal(a, b.to(x.dtype))


@pytest.mark.parametrize("name", ["causal_expand", "causal_read", "stream_read"])
def test_bfloat16_streams_with_float32_taps(name):
    op, plain, exact = OPS[name]
    source, taps = exact[0].bfloat16(), exact[1].float()
    out = op(source, taps)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, plain(source.float(), taps).bfloat16())


@pytest.mark.parametrize(
    "name", ["delta_write", "causal_expand", "causal_read", "hyper_read", "hyper_mix", "hyper_write"]
)
def test_the_backward_pass_keeps_large_inputs_in_their_own_dtype(name):
    op, _, exact = OPS[name]
    inputs = [x.bfloat16().requires_grad_() for x in exact]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        op(*inputs)
    assert any(x.shape == inputs[0].shape for x in kept)
    assert all(x.dtype == torch.bfloat16 for x in kept if x.shape == inputs[0].shape)


def test_channel_taps_keep_the_digits_of_low_precision_weights():
    conv, read = arguments((3, 16), (4,))
    taps = channel_taps(conv.bfloat16(), read.bfloat16())
    assert taps.dtype == torch.float32
    assert_close(taps, channel_taps(conv.bfloat16().double(), read.bfloat16().double()))
    assert channel_taps(conv.float(), read).dtype == torch.float64


@pytest.mark.parametrize("autocast", [False, True])
def test_gate_logits_are_computed_in_float32(autocast):
    """A cast after a low-precision product is the mistake: its error in a gate is above 1e-3."""
    x, weight, bias = arguments((64, 256), (1, 256), (1,))
    weight = weight / 16
    low = [t.bfloat16() for t in (x, weight, bias)]
    truth = 2 * F.linear(*(t.double() for t in low)).sigmoid()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        gate = 2 * linear_at_least_float32(*low).sigmoid()
        mistaken = 2 * F.linear(*low).float().sigmoid()
    assert gate.dtype == torch.float32
    assert_close(gate, truth)
    assert (mistaken - truth).abs().max() > 1e-3


def test_float32_weights_of_a_gate_are_not_rounded_by_autocast():
    x, weight, bias = (t.float() for t in arguments((8, 256), (3, 256), (3,)))
    expected = F.linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear_at_least_float32(x, weight, bias), expected)
        assert F.linear(x, weight, bias).dtype == torch.bfloat16  # autocast is on again


def test_linear_in_float64_and_mixed_dtypes():
    x, weight, bias = arguments((8, 5), (3, 5), (3,))
    assert torch.equal(linear_at_least_float32(x, weight, bias), F.linear(x, weight, bias))
    assert linear_at_least_float32(x.bfloat16(), weight).dtype == torch.float64
    low, wide = x.bfloat16(), weight.float()
    assert torch.equal(linear_at_least_float32(low, wide), F.linear(low.float(), wide))
    assert torch.equal(linear_at_least_float32(wide, low), F.linear(wide, low.float()))
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear_at_least_float32, inputs)


def test_at_least_float32():
    for dtype in (torch.bfloat16, torch.float16):
        assert at_least_float32(torch.ones(2, dtype=dtype)).dtype == torch.float32
    for dtype in (torch.float32, torch.float64):
        x = torch.ones(2, dtype=dtype)
        assert at_least_float32(x) is x


def test_composition_ignores_autocast_and_widens_low_precision():
    k, beta, state, v = arguments((5, 16), (5,), (3, 16), (5, 3))
    k = k / k.norm(dim=-1, keepdim=True)
    step = state
    for i in range(5):
        step = product_form(step, k[i], v[i], beta[i])
    with torch.autocast("cpu", torch.bfloat16):
        composition = compose(k.float(), beta.float())
        written = composition.write(state.float(), v.float())
    assert composition.operator().dtype == written.dtype == torch.float32
    assert_close(written, step)
    low = compose(k.bfloat16(), beta.bfloat16())
    assert low.t.dtype == torch.float32
    assert low.write(state.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


def test_shapes_can_be_computed_on_the_meta_device():
    for op, plain, exact in OPS.values():
        out = op(*(x.to("meta") for x in exact))
        assert out.shape == plain(*exact).shape
    x, weight = (t.to("meta") for t in arguments((2, 5), (3, 5)))
    assert linear_at_least_float32(x, weight).shape == (2, 3)
    assert compose(x, x[:, 0]).operator().shape == (5, 5)
