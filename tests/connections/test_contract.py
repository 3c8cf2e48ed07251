"""What every scheme promises to a caller that knows only `read` and `write`."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import residua
from residua import SCHEMES, Carry, Connection, DeepDelta, StreamMemory
from residua.connections import Readout, resolve
from residua.connections.memory import window_of
from support.tolerances import assert_close
from support.variants import ALL, KERNELS, LOOKING_BACK, NON_CAUSAL, bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
every_scheme = pytest.mark.parametrize("name", ALL)


def build(name: str, dtype: torch.dtype = torch.float64) -> residua.Stream:
    """The perturbed stream of a scheme, four sublayers wide enough for two blocks."""
    torch.manual_seed(0)
    return perturbed(ALL[name].build(DIM, SUBLAYERS)).to(dtype)


def outputs(stream: residua.Stream, x: Tensor) -> Tensor:
    return stream(x, bare_sublayers(DIM, SUBLAYERS))


def leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def test_every_choice_of_every_option_is_tried():
    """A new option, or a new choice of an old one, needs a variant in `support/variants.py`."""
    for scheme in SCHEMES.values():
        tried = [other for other in (ALL | NON_CAUSAL | KERNELS).values() if type(other) is scheme]
        assert tried
        hints = get_type_hints(scheme)
        for option in (field.name for field in fields(scheme)):
            declared = hints[option]
            values = {getattr(other, option) for other in tried}
            literals = [declared, *get_args(declared)]
            choices = {choice for hint in literals if get_origin(hint) is Literal for choice in get_args(hint)}
            choices |= {True, False} if declared is bool else set()
            assert choices <= values, f"{option}: never tried with {choices - values}"
            assert len(values) > 1, f"{option}: tried with one value only"


def matches(state: Any, spec: Any, batch: tuple[int, ...]) -> bool:
    """Whether a state has the structure and the shapes that its scheme describes."""
    described, structure = tree_flatten(spec)
    tensors, found = tree_flatten(state)
    return structure == found and [(*batch, *one.shape) for one in described] == [tuple(one.shape) for one in tensors]


@every_scheme
def test_shapes(name):
    scheme, stream = ALL[name], build(name)
    x = normal(2, 5, DIM)
    assert len(stream.connections) == SUBLAYERS

    state = stream.expand(x)
    assert matches(state, scheme.state_spec(0, DIM), (2, 5))
    for boundary, connection in enumerate(stream.connections, start=1):
        seen, carry = connection.read(state)
        assert seen.shape == (2, 5, DIM)
        assert isinstance(carry, Carry)
        assert carry._fields == ("residual", "coefficients")
        assert hasattr(carry.coefficients, "_fields"), "coefficients are a NamedTuple of the paper's symbols"
        state = connection.write(torch.tanh(seen), carry)
        assert matches(state, scheme.state_spec(boundary, DIM), (2, 5))
        assert scheme.state_size(boundary, DIM) == sum(leaf[0, 0].numel() for leaf in leaves(state))
    assert stream.collapse(state).shape == x.shape


def test_state_shapes():
    """One stream is (batch, seq, dim); several are (batch, seq, streams, dim), rows of width dim."""
    x = normal(2, 5, DIM)
    assert build("residual").expand(x).shape == (2, 5, DIM)
    assert build("ddl").expand(x).shape == (2, 5, DIM)
    assert build("ddl-cc").expand(x).shape == (2, 5, 4, DIM)
    assert build("token-dv5-k3-ec2").expand(x).shape == (2, 5, 5, DIM)


def test_coefficients_are_telemetry():
    """A k-Map knows beta and v before the sublayer runs, a v-Map beta and k~; None stands for what the output gives."""
    x = normal(2, 5, DIM)
    for name, known in (("ddl-cc", {"beta": (2, 5), "v": (2, 5, 4)}), ("ddl-tc-v", {"beta": (2, 5), "k": (2, 5, DIM)})):
        stream = build(name)
        _, carry = stream.connections[0].read(stream.expand(x))
        shapes = {key: tuple(value.shape) for key, value in carry.coefficients._asdict().items() if value is not None}
        assert shapes == known
        assert ((carry.coefficients.beta > 0) & (carry.coefficients.beta < 2)).all()


@every_scheme
def test_the_sugar_is_read_then_write(name):
    stream = build(name)
    sublayers = bare_sublayers(DIM, SUBLAYERS)
    state = stream.expand(normal(2, 5, DIM))
    for connection, sublayer in zip(stream.connections, sublayers):
        x, carry = connection.read(state)
        expected = connection.write(sublayer(x), carry)
        state = connection(state, sublayer)
        assert all(torch.equal(a, b) for a, b in zip(leaves(state), leaves(expected), strict=True))
    assert torch.equal(stream.collapse(state), outputs(stream, normal(2, 5, DIM)))


@every_scheme
def test_write_read_is_write_then_read(name):
    stream = build(name)
    state = stream.expand(normal(2, 5, DIM))
    first, second = stream.connections[:2]
    x, carry = first.read(state)
    y = torch.tanh(x)
    for following in (second, Readout(stream.collapse)):
        fused = first.write_read(y, carry, following)
        parts = following.read(first.write(y, carry))
        assert all(torch.equal(a, b) for a, b in zip(leaves(fused), leaves(parts), strict=True))
    assert torch.equal(Readout(stream.collapse).read(state)[0], stream.collapse(state))


@every_scheme
def test_a_penalty_only_of_schemes_with_an_auxiliary_loss(name):
    stream = build(name)
    _, carry = stream.connections[0].read(stream.expand(normal(1, 3, DIM)))
    penalty = stream.connections[0].penalty(carry.coefficients)
    if getattr(ALL[name], "penalty", 0):
        assert penalty.shape == ()
        assert penalty.isfinite()
    else:
        assert penalty is None


@every_scheme
def test_forward_writes_nothing_to_self(name):
    """State kept on a module breaks compilation, checkpointing, threads and two passes in flight."""
    stream = build(name)

    def snapshot() -> list[Any]:
        found = []
        for module in stream.modules():
            for part in (vars(module), module._parameters, module._buffers, module._modules):
                found.append({key: id(value) for key, value in part.items()})
        return found + [parameter._version for parameter in stream.parameters()]

    before = snapshot()
    outputs(stream, normal(2, 5, DIM).requires_grad_()).sum().backward()
    stream.zero_grad(set_to_none=True)
    assert snapshot() == before


@every_scheme
def test_inputs_are_left_alone(name):
    stream = build(name)
    x = normal(2, 5, DIM)
    state = stream.expand(x)
    kept = tree_map(torch.clone, state)
    seen, carry = stream.connections[0].read(state)
    residual = tree_map(torch.clone, carry.residual)
    stream.connections[0].write(torch.tanh(seen), carry)
    for after, before in ((state, kept), (carry.residual, residual), (x, normal(2, 5, DIM))):
        assert all(torch.equal(a, b) for a, b in zip(leaves(after), leaves(before), strict=True))


@every_scheme
def test_causal(name):
    """What happens at token 3 leaves the outputs of tokens 0 to 2 the same to the last bit."""
    stream = build(name)
    x = normal(2, 6, DIM)
    other = x.clone()
    other[:, 3] += 1.0
    before, after = outputs(stream, x), outputs(stream, other)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3], after[:, 3])


@every_scheme
def test_batch_entries_do_not_mix(name):
    stream = build(name)
    x = normal(3, 5, DIM)
    assert_close(torch.cat([outputs(stream, row[None]) for row in x]), outputs(stream, x))


@pytest.mark.parametrize("split", [(1, 1, 1, 1, 1, 1, 1), (3, 4), (1, 6), (2, 1, 4)])
@pytest.mark.parametrize("name", LOOKING_BACK)
def test_streaming_equals_the_full_pass(name, split):
    """Any split of the sequence, pieces shorter than every kernel included."""
    stream = build(name)
    x = normal(2, 7, DIM)
    sublayers = bare_sublayers(DIM, SUBLAYERS)
    memory = StreamMemory()
    pieces = [stream(piece, sublayers, memory=memory) for piece in x.split(split, 1)]
    assert_close(torch.cat(pieces, 1), outputs(stream, x))


@every_scheme
def test_num_memories_counts_the_parts_that_look_back(name):
    assert ALL[name].num_memories(DIM, SUBLAYERS) == sum(window_of(part) > 0 for part in build(name).parts)


@pytest.mark.parametrize("name", [name for name in ALL if getattr(ALL[name], "context", None) != "cumulative"])
def test_the_window_is_as_long_as_the_look_back(name):
    """Cut to its last `window` + 1 tokens, the input of every connection gives the same reading of the last token. A
    running mean looks back on everything, with a window of one sum."""
    stream = build(name)
    state = stream.expand(normal(1, 9, DIM))
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, SUBLAYERS), strict=True):
        full, _ = connection.read(state)
        cut, _ = connection.read(tree_map(lambda leaf: leaf[:, -connection.window - 1 :], state))  # noqa: B023
        assert_close(cut[:, -1], full[:, -1])
        if connection.window and ALL[name].beta_input != "conv":
            shorter, _ = connection.read(tree_map(lambda leaf: leaf[:, -connection.window :], state))  # noqa: B023
            assert not torch.allclose(shorter[:, -1], full[:, -1])
        state = connection(state, sublayer)


class OnlyFloat64(TorchDispatchMode):
    """Fails at the first operation that makes floating-point numbers of another dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in leaves(out):
            assert not leaf.is_floating_point() or leaf.dtype == torch.float64, f"{func} made {leaf.dtype}"
        return out


@every_scheme
def test_float64_from_end_to_end(name):
    """One float32 step inside costs nine digits and fails every numerical gradient check."""
    stream = build(name)
    x = normal(2, 5, DIM).requires_grad_()
    with OnlyFloat64():
        outputs(stream, x).square().sum().backward()


@every_scheme
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_come_back_in_their_dtype(name, dtype):
    stream = build(name, dtype)
    sublayers = bare_sublayers(DIM, SUBLAYERS)
    state = stream.expand(normal(2, 5, DIM, dtype=dtype))
    assert all(leaf.dtype == dtype for leaf in leaves(state))
    for connection, sublayer in zip(stream.connections, sublayers):
        x, carry = connection.read(state)
        assert x.dtype == dtype
        state = connection.write(sublayer(x), carry)
        assert all(leaf.dtype == dtype for leaf in leaves(state))
    assert stream.collapse(state).dtype == dtype
    assert stream.collapse(state).isfinite().all()


@pytest.mark.parametrize("name", [name for name, scheme in ALL.items() if isinstance(scheme, DeepDelta)])
def test_gates_of_a_bfloat16_model_lose_nothing(name):
    """Inputs and weights of the gate are widened before the product: casting its result would lose 1e-3."""
    stream, exact = build(name, torch.bfloat16), build(name)
    exact.load_state_dict(stream.state_dict())
    x = normal(4, 5, DIM, dtype=torch.bfloat16)
    narrow, wide = stream.connections[0], exact.connections[0]
    rows = normal(4, 5, wide.beta.out.in_features if wide.beta.hidden is None else wide.beta.hidden.in_features)
    rows = rows.to(torch.bfloat16)
    assert narrow.beta(rows).dtype == torch.float32
    assert_close(narrow.beta(rows), wide.beta(rows.double()), dtype=torch.float32)
    if wide.value.project is not None:
        assert narrow.value(x).dtype == torch.float32
        assert_close(narrow.value(x), wide.value(x.double()), dtype=torch.float32)


@every_scheme
def test_autocast_leaves_the_coefficients_in_float32(name):
    """All but the raw direction of a v-Map, which a branch computes as a sublayer would."""
    stream = build(name, torch.float32)
    state = stream.expand(normal(2, 5, DIM, dtype=torch.float32))
    expected, plain = stream.connections[0].read(state)
    with torch.autocast("cpu", torch.bfloat16):
        x, carry = stream.connections[0].read(state)
        after = stream.connections[0].write(torch.tanh(x).to(torch.bfloat16), carry)
    assert_close(x.float(), expected, dtype=torch.bfloat16)
    assert all(leaf.dtype == torch.float32 for leaf in leaves(after)), "the state keeps its dtype"
    for symbol, value in plain.coefficients._asdict().items():
        if value is not None and not (symbol == "k" and isinstance(ALL[name], DeepDelta)):
            assert torch.equal(getattr(carry.coefficients, symbol), value), symbol


@every_scheme
def test_every_parameter_matters_and_gets_a_gradient(name):
    """No parameter is unused. Perturbed, because at the start a gate with zero weights passes nothing to what lies
    before them. More than rounding noise, which hides a parameter whose influence cancels."""
    stream = build(name)
    x = normal(2, 6, DIM)
    weights = normal(2, 6, DIM, seed=3)
    before = outputs(stream, x)
    (before * weights).sum().backward()
    for parameter_name, parameter in stream.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} is not used"
        assert parameter.grad.abs().max() > 1e-8, f"{parameter_name} has no influence"
        with torch.no_grad():
            kept = parameter.clone()
            parameter.mul_(1.1).add_(0.05)
            change = (outputs(stream, x) - before).abs().max()
            assert change > 1e-8, f"{parameter_name} does not change the output"
            parameter.copy_(kept)


@every_scheme
def test_gradients_are_those_of_finite_differences(name):
    stream = ALL[name].build(4, 2).double()
    perturbed(stream)
    sublayers = bare_sublayers(4, 2)
    x = normal(1, 3, 4).requires_grad_()
    parameters = list(stream.parameters())
    assert torch.autograd.gradcheck(
        lambda x, *_: stream(x, sublayers), (x, *parameters), fast_mode=True, atol=1e-6, rtol=1e-5
    )


def test_the_base_class_is_enough_for_a_new_scheme():
    """A connection needs `read` and `write`; the sugar, the seam and the penalty come with the base class."""

    class Doubling(Connection):
        def read(self, state, memory=None):
            return state, Carry(state, None)

        def write(self, y, carry):
            return 2 * carry.residual + y

    connection, x = Doubling(), normal(1, 2, DIM)
    assert torch.equal(connection(x, torch.tanh), 2 * x + torch.tanh(x))
    assert connection.penalty(None) is None
    assert connection.write_read(x, Carry(x, None), connection)[0].equal(3 * x)
    with pytest.raises(TypeError):
        Connection()


def test_residual_is_exactly_the_sum():
    stream = resolve("residual").build(DIM, 2)
    x = normal(2, 5, DIM, dtype=torch.float32)
    expected = x
    for sublayer, norm in zip(bare_sublayers(DIM, 2), (connection.norm for connection in stream.connections)):
        expected = expected + sublayer(nn.functional.rms_norm(expected, (DIM,), norm.weight, 1e-5))
    assert torch.equal(stream(x, bare_sublayers(DIM, 2)), expected)


def test_a_stream_wants_as_many_sublayers_as_connections():
    with pytest.raises(ValueError, match="sublayers: expected 2, one per connection, got 3"):
        resolve("ddl").build(DIM, 2)(normal(1, 2, DIM, dtype=torch.float32), bare_sublayers(DIM, 3))


@every_scheme
def test_what_a_sublayer_must_return(name):
    connection = build(name).connections[0]
    state = build(name).expand(normal(2, 5, DIM))
    with pytest.raises(TypeError, match="sublayer: expected it to return a tensor, got tuple"):
        connection(state, lambda x: (x, None))
    with pytest.raises(ValueError, match=r"output: expected the shape of its input = .*, got \(2, 5, 1\)"):
        connection(state, lambda x: x[..., :1])


@pytest.mark.parametrize(
    "name", [name for name, scheme in ALL.items() if getattr(scheme, "context", "token") != "token"]
)
def test_a_mean_over_tokens_does_not_take_a_batch_for_a_sequence(name):
    with pytest.raises(ValueError, match=r"expected \(batch, seq, dim\), got"):
        build(name).connections[0].read(normal(4, DIM))


@every_scheme
def test_a_narrow_model_and_a_wide_state_or_the_other_way(name):
    for weights, state in [(torch.float64, torch.float32), (torch.float32, torch.float64)]:
        connection = build(name, weights).connections[0]
        before = tree_map(lambda leaf: leaf.to(state), build(name).expand(normal(2, 5, DIM)))  # noqa: B023
        assert {leaf.dtype for leaf in leaves(connection(before, lambda x: x))} == {state}
