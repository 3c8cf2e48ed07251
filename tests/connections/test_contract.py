"""What every scheme promises to a caller that knows only `read` and `write`."""

import json
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import residua
from residua import Carry, Connection
from residua.connections import PRESETS, SCHEMES, RankOne, resolve
from residua.connections.base import as_inputs
from residua.connections.families.streams import ExpandingScheme
from residua.connections.parts.memory import whole_sequence
from residua.testing import check_scheme
from residua.testing.contract import DIM, SUBLAYERS
from support.tolerances import assert_close
from support.variants import (
    ALL,
    ASSEMBLED,
    DEEP_DELTA,
    KERNELS,
    LOOKING_BACK,
    NON_CAUSAL,
    bare_sublayers,
    normal,
    perturbed,
)

every_scheme = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.variant if name in ASSEMBLED else ()) for name in ALL]
)


def build(name: str, dtype: torch.dtype = torch.float64) -> residua.Stream:
    """The perturbed stream of a scheme, four sublayers wide enough for two blocks."""
    torch.manual_seed(0)
    return perturbed(ALL[name].build(DIM, SUBLAYERS)).to(dtype)


@every_scheme
def test_contract(name):
    """Run the suite that the package ships for other people's schemes; a failure has a line for each broken check."""
    report = check_scheme(ALL[name])
    # Only where `preserving` refused, and said why, may a check be left out.
    assert all(reason.startswith("the scheme has no start") for reason in report.not_checked.values()), str(report)


def test_every_choice_of_every_option_has_a_variant():
    """A new option, or a new choice of an old one, needs a variant in `support/variants.py`."""
    for scheme in SCHEMES.values():
        tried = [other for other in (ALL | NON_CAUSAL | KERNELS).values() if type(other) is scheme]
        assert tried
        hints = get_type_hints(scheme)
        shared = {field.name for field in fields(ExpandingScheme)} if issubclass(scheme, ExpandingScheme) else set()
        shared |= {"branch_sublayers", "expand"}
        for option in (field.name for field in fields(scheme)):
            declared = hints[option]
            everywhere = [other for other in ALL.values() if hasattr(other, option)]  # one place reads it for all
            values = {getattr(other, option) for other in (everywhere if option in shared else tried)}
            literals = [declared, *get_args(declared)]
            choices = {choice for hint in literals if get_origin(hint) is Literal for choice in get_args(hint)}
            choices |= {True, False} if declared is bool else set()
            assert choices <= values, f"{option}: never tried with {choices - values}"
            assert len(values) > 1, f"{option}: tried with one value only"


@every_scheme
def test_a_gate_starts_at_the_value_in_its_facts_within_its_range(name):
    scheme, state = ALL[name], normal(2, 5, DIM, dtype=torch.float32)
    stream, sublayer = scheme.build(DIM, SUBLAYERS), bare_sublayers(DIM, SUBLAYERS)[0]
    state = stream.expand(state)
    x, carry = stream.connections[0].read(state)
    shortcut = stream.connections[0].shortcut(state, carry, sublayer(*as_inputs(x)))
    gates = {"beta": shortcut.beta} if isinstance(shortcut, RankOne) else getattr(shortcut, "gates", {})
    assert "gate" not in gates or not gates["gate"].requires_grad or "gate" in scheme.gates
    for symbol in gates.keys() & scheme.gates.keys():
        (low, high), start = scheme.gates[symbol]
        assert gates[symbol].min() >= low
        assert gates[symbol].max() <= high
        if start is not None:
            assert_close(gates[symbol], torch.full_like(gates[symbol], start))


def test_coefficients_are_available_for_telemetry():
    """A k-Map knows beta and v before the sublayer runs, a v-Map beta and k~; None marks those that the output
    determines."""
    x = normal(2, 5, DIM)
    for name, known in (("ddl-cc", {"beta": (2, 5), "v": (2, 5, 4)}), ("ddl-tc-v", {"beta": (2, 5), "k": (2, 5, DIM)})):
        stream = build(name)
        _, carry = stream.connections[0].read(stream.expand(x))
        shapes = {key: tuple(value.shape) for key, value in carry.coefficients._asdict().items() if value is not None}
        assert shapes == known
        assert ((carry.coefficients.beta > 0) & (carry.coefficients.beta < 2)).all()


@pytest.mark.parametrize("name", [name for name in LOOKING_BACK if getattr(ALL[name], "context", None) != "cumulative"])
def test_the_window_is_as_long_as_the_look_back(name):
    """Cut to its last `window` + 1 tokens, the input of every connection gives the same reading of the last token. A
    running mean looks back on everything, with a window of one sum."""
    stream = build(name)
    state = stream.expand(normal(1, 9, DIM))
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, SUBLAYERS), strict=True):
        whole = whole_sequence(connection)  # a window of one leaves a single token, which has no earlier ones here
        full, _ = connection.read(state, whole)
        cut, _ = connection.read(tree_map(lambda leaf: leaf[:, -connection.window - 1 :], state), whole)  # noqa: B023
        for one, other in zip(as_inputs(cut), as_inputs(full), strict=True):
            assert_close(one[:, -1], other[:, -1])
        reads_more = getattr(ALL[name], "beta_input", None) != "conv" and getattr(ALL[name], "branch", None) is None
        if connection.window and reads_more:
            shorter, _ = connection.read(tree_map(lambda leaf: leaf[:, -connection.window :], state), whole)  # noqa: B023
            assert not torch.allclose(shorter[:, -1], full[:, -1])
        state = connection(state, sublayer)


@pytest.mark.parametrize("name", DEEP_DELTA)
def test_gates_of_a_bfloat16_model_are_computed_in_float32(name):
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


# The others compute coefficients from what a sublayer reads, which is as narrow as the model, or have none.
FROM_THE_STATE = [
    name for name in PRESETS if not name.startswith(("ddl", "gated", "orthogonal", "residual", "siamese"))
]


@pytest.mark.parametrize("name", FROM_THE_STATE)
def test_coefficients_of_a_bfloat16_model_are_computed_in_float32(name):
    """State and weights are widened before every product: a mixture or a rotation rounded to three digits is none."""
    stream, exact = build(name, torch.bfloat16), build(name)
    exact.load_state_dict(stream.state_dict())
    state, compared = stream.expand(normal(2, 5, DIM, dtype=torch.bfloat16)), 0
    for narrow, wide, sublayer in zip(stream.connections, exact.connections, bare_sublayers(DIM, SUBLAYERS)):
        x, carry = narrow.read(state)
        expected = wide.read(tree_map(lambda leaf: leaf.double(), state))[1].coefficients._asdict()
        for symbol, value in carry.coefficients._asdict().items():
            narrow_input = name == "edelta-stream" and symbol in ("h_pre", "h_post")  # read from what was turned
            if isinstance(value, torch.Tensor) and not narrow_input:
                assert value.dtype == torch.float32
                assert_close(value, expected[symbol].expand_as(value), dtype=torch.float32, what=symbol)
                compared += 1
        state = narrow.write(sublayer(*as_inputs(x)), carry)
    assert compared


def test_the_base_class_is_enough_for_a_new_scheme():
    """A subclass defines only `read` and `write`; the call `connection(x, sublayer)` and the penalty are inherited."""

    class Doubling(Connection):
        def read(self, state, memory=None):
            return state, Carry(state, None)

        def write(self, y, carry):
            return 2 * carry.residual + y

    connection, x = Doubling(), normal(1, 2, DIM)
    assert torch.equal(connection(x, torch.tanh), 2 * x + torch.tanh(x))
    assert connection.penalty(None) is None
    with pytest.raises(TypeError):
        Connection()


def test_methods_may_be_defined_under_another_name():
    class Plain(Connection):
        read = lambda self, state, memory=None: (state, Carry(state, None))  # noqa: E731
        write = lambda self, y, carry: carry.residual + y  # noqa: E731

    x = normal(1, 2, DIM)
    assert torch.equal(Plain()(x, torch.tanh), x + torch.tanh(x))
    assert torch.equal(Plain().write(x, Plain().read(x)[1]), 2 * x)


def test_residual_is_exactly_the_sum():
    stream = resolve("residual").build(DIM, 2)
    x = normal(2, 5, DIM, dtype=torch.float32)
    expected = x
    for sublayer, norm in zip(bare_sublayers(DIM, 2), (connection.norm for connection in stream.connections)):
        expected = expected + sublayer(nn.functional.rms_norm(expected, (DIM,), norm.weight, 1e-5))
    assert torch.equal(stream(x, bare_sublayers(DIM, 2)), expected)


def test_a_stream_requires_as_many_sublayers_as_connections():
    with pytest.raises(ValueError, match=r"sublayers must be 2, .*got 3"):
        resolve("ddl").build(DIM, 2)(normal(1, 2, DIM, dtype=torch.float32), bare_sublayers(DIM, 3))


def test_a_sublayer_must_return_a_tensor_of_its_shape():
    connection, state = build("residual").connections[0], normal(2, 5, DIM)
    with pytest.raises(TypeError, match="sublayer must return a tensor, got tuple"):
        connection(state, lambda x: (x, None))
    with pytest.raises(ValueError, match=r"output must have the shape of its input, .*, got \(2, 5, 1\)"):
        connection(state, lambda x: x[..., :1])


@pytest.mark.parametrize(("name", "sublayers"), [("mudd", 4), ("attnres-inkling", 12)])
def test_a_sublayer_that_takes_too_few_inputs_is_named(name, sublayers):
    """The error also names the option with which the scheme accepts it."""
    x, stream = normal(2, 5, DIM, dtype=torch.float32), PRESETS[name].build(DIM, sublayers)

    def attend(x):
        return x

    for sublayer, called in ((attend, "attend"), (nn.Linear(DIM, DIM), "Linear")):
        with pytest.raises(TypeError, match=rf"sublayer must take 3 inputs, .* got {called}\(") as caught:
            stream(x, [sublayer] * sublayers)
    assert stream(x, [lambda x, k=None, v=None: x] * sublayers).shape == x.shape
    option, _, value = str(caught.value).rpartition(" ")[2].partition("=")
    single = resolve({"preset": name, option: json.loads(value)}).build(DIM, sublayers)
    assert single(x, [attend] * sublayers).shape == x.shape


@pytest.mark.parametrize(
    "name", [name for name, scheme in ALL.items() if getattr(scheme, "context", "token") != "token"]
)
def test_a_mean_over_tokens_does_not_use_the_batch_as_a_sequence(name):
    with pytest.raises(ValueError, match=r"must be \(batch, seq, (3, 8|8|dim)\)"):
        build(name).connections[0].read(normal(4, DIM))
