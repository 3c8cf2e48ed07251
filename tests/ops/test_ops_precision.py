"""Dtypes: results in the dtype of the inputs, gates in at least float32, float64 throughout."""

import pytest
import torch
import torch.nn.functional as F

from residua.ops import (
    K_NORMS,
    at_least_float32,
    channel_taps,
    compose,
    linear_at_least_float32,
    unit,
)
from support.delta_cases import generator, normal, product_form
from support.op_cases import OPS
from support.tolerances import assert_close

LOW = [torch.bfloat16, torch.float16]


def arguments(*shapes):
    g = generator(0)
    return [normal(g, *shape) for shape in shapes]


# Formulas of the spectrum, in the dtype that comes in.
AS_GIVEN = {"delta_operator", "determinant", "eigenvalues", "singular_values"}
# Operations on a state, their first argument, which keeps its dtype beside coefficients of any other.
STARTS = ("causal", "cayley_apply", "delta_inverse", "delta_write", "gated", "h", "orthogonal", "scaled", "stream")
ON_STATES = [name for name in OPS if name.startswith(STARTS)]


def gradients(op, inputs, grad, *, autocast=False):
    """What `op` makes of the inputs, and the gradients of these."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = op(*inputs)
    return out, torch.autograd.grad(out, inputs, grad.to(out.dtype))


# Their gradients are autograd's, so that matrix products of a backward pass under autocast are rounded.
LEFT_TO_AUTOGRAD = (
    *("Composition", "compose", "channel_taps", "cayley", "delta_inverse", "delta_operator", "delta_write_v1"),
    *("iterative_cayley", "permutation_mixture", "hybrid", "householder", "linear_at_least_float32"),
)


@pytest.mark.parametrize("name", [name for name in OPS if not name.startswith(LEFT_TO_AUTOGRAD)])
def test_gradients_are_not_rounded_if_the_backward_pass_runs_under_autocast(name):
    op, shapes = OPS[name]
    inputs = [x.float().requires_grad_() for x in arguments(*shapes)]
    out = op(*inputs)
    expected = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(map(torch.equal, actual, expected))


def assert_rounded_once(name, inputs):
    """The result and the gradients are those of float32, rounded to dtypes that are given here; return the result."""
    op, _ = OPS[name]
    wide = [x.float() for x in inputs]
    grad = torch.randn(op(*wide).shape, generator=generator(1)).to(inputs[0].dtype)
    (out, ours), (expected, theirs) = gradients(op, inputs, grad, autocast=True), gradients(op, wide, grad)
    assert torch.equal(out, expected.to(out.dtype))
    for x, a, b in zip(inputs, ours, theirs):
        assert a.dtype == x.dtype
        if "shared" not in name and "sequence" not in name:  # their gradients are sums over the tokens
            assert torch.equal(a, b.to(a.dtype))
    return out


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", sorted(OPS.keys() - AS_GIVEN))
def test_low_precision_is_the_float32_computation_rounded_once(name, dtype):
    assert_rounded_once(name, [x.to(dtype) for x in arguments(*OPS[name][1])])


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("name", ON_STATES)
def test_a_state_keeps_its_dtype_with_coefficients_of_another_dtype(name, dtypes):
    """Low-precision sublayers write into float32 streams, and float32 mappings mix bfloat16 streams."""
    state, *others = arguments(*OPS[name][1])
    assert assert_rounded_once(name, [state.to(dtypes[0]), *(x.to(dtypes[1]) for x in others)]).dtype == dtypes[0]
    assert OPS[name][0](state.float(), *others).dtype == torch.float32


@pytest.mark.parametrize("name", sorted(set(ON_STATES) - {"delta_write_v1"}))
def test_the_backward_pass_keeps_no_wide_copy_of_a_state(name):
    """A float32 copy of a bfloat16 state would take twice its memory until then."""
    op, shapes = OPS[name]
    inputs, kept = [x.bfloat16().requires_grad_() for x in arguments(*shapes)], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        op(*inputs)
    assert all(x.dtype == torch.bfloat16 for x in kept if x.shape == inputs[0].shape)


@pytest.mark.parametrize("name", OPS)
def test_float32_stays_float32_and_is_near_float64(name):
    op, shapes = OPS[name]
    exact = arguments(*shapes)
    grad = torch.randn(op(*exact).shape, generator=generator(1), dtype=torch.float64)
    (single, ours), (double, theirs) = (
        gradients(op, [x.to(t) for x in exact], grad) for t in (torch.float32, grad.dtype)
    )
    assert (single.dtype, double.dtype) == (torch.float32, torch.float64)
    assert_close(single, double)
    for a, b in zip(ours, theirs):
        assert a.dtype == torch.float32
        assert_close(a, b)
    assert op(*(x.to("meta") for x in exact)).shape == double.shape


@pytest.mark.parametrize("k_norm", K_NORMS)
@pytest.mark.parametrize("dtype", LOW)
def test_unit_direction_of_long_low_precision_vectors(k_norm, dtype):
    # 300^2 * 512 overflows float16, and a bfloat16 sum of 512 squares stalls.
    k = unit(torch.full((512,), 300.0, dtype=dtype), k_norm=k_norm)
    assert k.dtype == dtype
    assert_close(k, torch.full((512,), 512**-0.5, dtype=torch.float64))


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


def test_at_least_float32_widens_only_narrow_dtypes():
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
