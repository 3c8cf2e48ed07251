"""The contract suite names what is wrong with a scheme, and passes those that are right."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import nn

from residua import (
    AttentionResiduals,
    Carry,
    Connection,
    DeepDelta,
    EDelta,
    PooledHouseholder,
    Residual,
    Scheme,
    Stream,
)
from residua.connections import DepthWeights, TensorSpec, register, registry, resolve
from residua.connections.parts.ends import Same
from residua.connections.parts.memory import documents_in, padding_in
from residua.connections.parts.spec import expect_state
from residua.testing import CONTRACT, CheckFailed, assert_close, check_scheme
from residua.testing.contract import checks
from support.looking import CountsAllRows, CountsKeptRows, Look

pytest_plugins = ["pytester"]


class Gain(NamedTuple):
    gain: torch.Tensor


class Scaled(Connection):
    """g x + F(norm(x)): right, and the ground for what is wrong."""

    def __init__(self, norm, dim):
        super().__init__()
        self.norm, self.gain = norm, nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.gain)

    def read(self, state, memory=None):
        gain = self.gain if self.gain.dtype == torch.float64 else self.gain.float()
        return self.norm(state), Carry(state, Gain(gain))

    def write(self, y, carry):
        return (carry.coefficients.gain * carry.residual + y).to(carry.residual.dtype)


def scheme_of(connection: type[Connection], **declared) -> Scheme:
    """A scheme with these connections; `declared` replaces what it says of itself."""

    @dataclass(frozen=True)
    class Wrong(Scheme):
        equation: ClassVar[str] = "g x + F(norm(x))"
        paper: ClassVar[str] = "none"

        def assemble(self, dim, num_sublayers, norm, norm_eps):
            return Stream(Same(), [connection(norm(i), dim) for i in range(num_sublayers)], Same())

    for name, value in declared.items():
        setattr(Wrong, name, value)
    return Wrong()


def test_a_correct_scheme_passes_and_the_report_names_skipped_checks():
    report = check_scheme(scheme_of(Scaled))
    assert report.failed == {}
    of_start = ["preserving_is_the_plain_residual", "every_parameter_learns_from_the_preserving_start"]
    assert list(report.not_checked) == of_start
    assert set(report.passed) | set(report.not_checked) == set(CONTRACT)
    assert "causal: passed" in str(report)
    assert str(report).endswith(f"\nchecks: {len(report.passed)} passed, 2 not checked")


class LooksAhead(Scaled):
    def write(self, y, carry):
        return super().write(y + y.mean(1, keepdim=True), carry)


class LooksBack(Scaled):
    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1], carry


class SumsOverDocuments(Scaled):
    """Says that it keeps documents apart, and does not."""

    window, separates_documents = 1, True

    def read(self, state, memory=None):
        x, carry = super().read(state)
        return (x if memory is None else memory.extend(x, 1)).cumsum(1)[:, -x.shape[1] :], carry


class MixesTheBatch(Scaled):
    def write(self, y, carry):
        return super().write(y + y.mean(0, keepdim=True), carry)


class ReadsItself(Scaled):
    def depth_weights(self, carry):
        return DepthWeights(torch.ones(1, 1), (range(0, 9),))


class Remembers(Scaled):
    def read(self, state, memory=None):
        self.last = state
        return super().read(state)


class InPlace(Scaled):
    def write(self, y, carry):
        carry.residual.detach().mul_(0.5)
        return super().write(y, carry)


class Float32Inside(Scaled):
    def write(self, y, carry):
        return super().write(y.float().to(y.dtype), carry)


class Widens(Scaled):
    def write(self, y, carry):
        return (carry.coefficients.gain * carry.residual + y).float()


class BfloatGain(Scaled):
    def read(self, state, memory=None):
        gain = self.gain.to(torch.bfloat16) if torch.is_autocast_enabled("cpu") else self.gain
        return self.norm(state), Carry(state, Gain(gain))


class Frozen(Scaled):
    def read(self, state, memory=None):
        return self.norm(state), Carry(state, Gain(self.gain.detach()))


class Unused(Scaled):
    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.other = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self):
        super().reset_parameters()
        if hasattr(self, "other"):
            nn.init.zeros_(self.other)


class Uninitialised(Scaled):
    def reset_parameters(self):
        pass


class WrongGradient(Scaled):
    class Half(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad / 2

    def write(self, y, carry):
        return super().write(self.Half.apply(y), carry)


class WrongGainGradient(Scaled):
    def read(self, state, memory=None):
        x, carry = super().read(state, memory)
        return x, Carry(state, Gain(WrongGradient.Half.apply(carry.coefficients.gain)))


class TakesAnything(Scaled):
    def forward(self, state, sublayer, *, memory=None, attention_mask=None, documents=None):
        x, carry = self.read(state)
        y = sublayer(x)
        return self.write(y[0] if isinstance(y, tuple) else y, carry)


class Anew(Scaled):
    """Draws other numbers when it is recomputed."""

    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x * (1 + 0.1 * torch.rand((), generator=GENERATOR)), carry


class Averages(Scaled):
    """Keeps a running mean, in training alone."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.register_buffer("mean", torch.zeros(dim))

    def read(self, state, memory=None):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(state.mean((0, 1)).to(self.mean), 0.1)
        return super().read(state)


class AveragesUnregistered(Averages):
    """The same in a tensor that no module knows."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        del self.mean
        self.mean = torch.zeros(dim)


class History(Scaled):
    """The last state, in a dict in a list."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.seen = [{}]

    def read(self, state, memory=None):
        self.seen[0]["last"] = state
        return super().read(state)


class Hides(Scaled):
    """Parameters and modules in plain containers, and a tensor that should be a Parameter."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.gates = {"a": nn.Parameter(torch.ones(dim))}
        self.maps = [(nn.Linear(dim, dim),)]
        self.share = torch.ones((), requires_grad=True)
        self.own = [self.norm, self.gain]


class UnsavedBuffer(Scaled):
    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.register_buffer("share", torch.tensor(0.5), persistent=False)

    def write(self, y, carry):
        return super().write(self.share.to(y.dtype) * y, carry)


class CountsPadding(Scaled):
    """A mean with the token before, whether that is padding or not."""

    window = 1

    def read(self, state, memory=None):
        x, carry = super().read(state)
        extended = x if memory is None or not memory.keeps else memory.extend(x, 1)
        before = nn.functional.pad(extended, (0, 0, 1, 0))[:, :-1]
        return (extended + before)[:, -x.shape[1] :], carry


class LooksAtNumbers(Scaled):
    def read(self, state, memory=None):
        if state.abs().max() > 1e6:
            raise ValueError("the state is too large")
        return super().read(state)


class OwnNorm(Scaled):
    def __init__(self, norm, dim):
        super().__init__(nn.RMSNorm(dim, eps=1e-5), dim)


class WidePenalty(Scaled):
    def penalty(self, coefficients):
        return coefficients.gain


class DetachedPenalty(Scaled):
    def penalty(self, coefficients):
        return coefficients.gain.detach().sum()


class Seen(NamedTuple):
    gain: torch.Tensor
    state: torch.Tensor


class SeenPenalty(Scaled):
    """A mean over the tokens, and so over padding."""

    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x, carry._replace(coefficients=Seen(carry.coefficients.gain, state))

    def penalty(self, coefficients):
        return (coefficients.gain * coefficients.state).square().mean()


class StatePenalty(SeenPenalty):
    """Right: a number for each token, which no parameter changes at first."""

    def penalty(self, coefficients):
        return coefficients.state.square().mean(-1)


class RowPenalty(SeenPenalty):
    """A mean over the tokens of each row, and so over padding."""

    def penalty(self, coefficients):
        return (coefficients.gain * coefficients.state).square().mean((1, 2)).unsqueeze(-1)


class CumulativePenalty(SeenPenalty):
    """A sum over the tokens so far, whether those are padding or not."""

    def penalty(self, coefficients):
        return (coefficients.gain * coefficients.state).square().mean(-1).cumsum(1)


class NarrowGate(Scaled):
    """A gate of each token in the dtype of the state."""

    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x, Carry(state, Gain(carry.coefficients.gain.to(state.dtype) * state.sigmoid()))


class FirstDocuments(Scaled):
    """x and the token before it, in the same document of the first row."""

    window, separates_documents = 1, True

    def read(self, state, memory=None):
        x, carry = super().read(state)
        extended = x if memory is None else memory.extend(x, 1)
        before = nn.functional.pad(extended, (0, 0, 1, 0))[:, :-1][:, -x.shape[1] :]
        documents = documents_in(memory, x)
        if documents is not None:
            before = before * nn.functional.pad(documents[:1].diff() == 0, (1, 0)).unsqueeze(-1)
        return x + before, carry


class FirstPadding(Scaled):
    """A share of the tokens so far, which knows the padding of the first row alone."""

    window = 1

    def read(self, state, memory=None):
        x, carry = super().read(state)
        padding = padding_in(memory, x)
        tokens = x.new_ones(x.shape[:2]) if padding is None else padding[:1].to(x.dtype)
        return x / tokens.cumsum(1).clamp_min(1).unsqueeze(-1), carry


class Dead(Scaled):
    """Its start is that of the plain residual, on a saddle: a product of two gates that are 0."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.a, self.b = (nn.Parameter(torch.zeros(dim)) for _ in range(2))

    def reset_parameters(self):
        super().reset_parameters()
        for gate in (getattr(self, name) for name in "ab" if hasattr(self, name)):
            nn.init.zeros_(gate)

    def read(self, state, memory=None):
        x, (_, (gain,)) = super().read(state)
        return x, Carry(state, Gain(gain + self.a.to(gain.dtype) * self.b.to(gain.dtype)))


class LooksAheadInTraining(Scaled):
    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x + nn.functional.pad(x, (0, 0, 0, 1))[:, 1:] * self.training, carry


class Box(Scaled):
    """The last state, on an object of its own."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.box = SimpleNamespace(last=None)

    def read(self, state, memory=None):
        self.box.last = state
        return super().read(state)


class ReadsTooFar(Scaled):
    """Asks for eight tokens and reads eleven."""

    window = 8

    def read(self, state, memory=None):
        x, carry = super().read(state)
        earlier = x if memory is None else memory.extend(x, self.window)
        return nn.functional.pad(earlier, (0, 0, 11, 0)).unfold(1, 12, 1).mean(-1)[:, -x.shape[1] :], carry


class Linear(Scaled):
    """A gate that autocast rounds."""

    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.gate = nn.Linear(dim, dim, bias=False)

    def read(self, state, memory=None):
        x, carry = super().read(state)
        return x, Carry(state, Gain(self.gate(state.to(self.gate.weight.dtype)) + carry.coefficients.gain))


class Lazy(Scaled):
    def __init__(self, norm, dim):
        super().__init__(norm, dim)
        self.gate = nn.LazyLinear(1)


class Drops(Scaled):
    """Right, and random in training."""

    def write(self, y, carry):
        return super().write(nn.functional.dropout(y, 0.5, self.training), carry)


def of_pairs(dim, num_sublayers):
    return Stream(Same(), [Scaled(nn.RMSNorm(dim), dim) for _ in range(num_sublayers // 2 * 2)], Same())


def only_last(connection: type[Connection]) -> Scheme:
    """A scheme whose last connection is this one, and whose other ones are right."""

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        kinds = [Scaled] * (num_sublayers - 1) + [connection]
        return Stream(Same(), [kind(norm(i), dim) for i, kind in enumerate(kinds)], Same())

    return scheme_of(Scaled, assemble=assemble)


def by_depth(self, dim, num_sublayers, norm, norm_eps):
    """Starts that the meta device loses: they are scaled after the modules are made."""
    connections = [Linear(norm(i), dim) for i in range(num_sublayers)]
    with torch.no_grad():
        for i, connection in enumerate(connections):
            connection.gate.weight.mul_(0.2 / (i + 1))
    return Stream(Same(), connections, Same())


def with_one_gain(self, dim, num_sublayers, norm, norm_eps):
    connections = [Scaled(norm(i), dim) for i in range(num_sublayers)]
    for connection in connections:
        connection.gain = connections[0].gain
    return Stream(Same(), connections, Same())


GENERATOR = torch.Generator()

WRONG = [
    ("causal", scheme_of(LooksAhead), "in evaluation mode: a later token changes the outputs of earlier ones"),
    ("causal", scheme_of(LooksAheadInTraining), "in training mode: a later token changes the outputs of earlier ones"),
    ("forward_writes_nothing_to_self", scheme_of(Box), r"connections\.0\.box\.last"),
    ("streaming_equals_the_full_pass", scheme_of(ReadsTooFar), r"pieces of \(1, 1, .* differ from the whole"),
    ("autocast_leaves_the_coefficients_in_float32", only_last(Linear), "gain of connection 3 is computed in bfloat16"),
    (
        "gradients_are_those_of_finite_differences",
        only_last(WrongGainGradient),
        "finite differences: connections.2.gain",
    ),
    ("inputs_are_left_alone", only_last(InPlace), "in place"),
    ("weights_and_state_may_differ_in_dtype", only_last(Widens), "with parameters of"),
    ("penalty_is_of_each_token_or_none", scheme_of(SeenPenalty), "a scalar that depends on the tokens"),
    ("penalty_is_of_each_token_or_none", scheme_of(RowPenalty), "a later token changes the penalty of earlier ones"),
    ("penalty_is_of_each_token_or_none", scheme_of(CumulativePenalty), "padding changes the penalty of tokens"),
    (
        "a_bfloat16_state_leaves_the_coefficients_in_float32",
        only_last(NarrowGate),
        "gain of connection 3 is torch.bfloat16 for a bfloat16 state",
    ),
    ("packed_documents_equal_documents_alone", scheme_of(FirstDocuments), "a row of packed documents differs"),
    ("padding_changes_no_token", scheme_of(FirstPadding), "padding on the left changes the outputs"),
    (
        "every_parameter_learns_from_the_preserving_start",
        scheme_of(Dead, residual_start={}),
        r"no gradient reaches connections\.0\.a, connections\.0\.b, connections\.1\.a",
    ),
    (
        "shapes",
        scheme_of(Lazy),
        "parameters must exist after build, these wait for an input: connections.0.gate.weight",
    ),
    (
        "modules_initialise_themselves",
        scheme_of(Linear, assemble=by_depth),
        r"on the meta device connections\.0\.gate\.weight starts with a standard deviation",
    ),
    (
        "modules_initialise_themselves",
        scheme_of(Scaled, assemble=with_one_gain),
        r"to_empty\(\) parts connections\.1\.gain, .* from the parameter that build\(\) shares",
    ),
    ("a_part_without_a_window_reads_its_own_token", scheme_of(LooksBack), "connection 0 has no window and reads"),
    ("streaming_equals_the_full_pass", scheme_of(LooksBack), r"pieces of \(1, 1, .* differ from the whole"),
    (
        "pieces_with_padding_equal_the_rows_alone",
        CountsKeptRows(),
        "padding changes the outputs of tokens",
    ),
    ("packed_documents_equal_documents_alone", scheme_of(SumsOverDocuments), "a row of packed documents differs"),
    ("batch_entries_do_not_mix", scheme_of(MixesTheBatch), "a batch differs from its entries"),
    ("forward_writes_nothing_to_self", scheme_of(Remembers), "writes to the module: connections.0.last"),
    (
        "modules_register_what_they_learn",
        scheme_of(Hides),
        r"not registered: connections\.0\.gates\.a, connections\.0\.maps\.0\.0, .*connections\.0\.share",
    ),
    ("inputs_are_left_alone", scheme_of(InPlace), "in place"),
    ("float64_from_end_to_end", scheme_of(Float32Inside), "made torch.float32"),
    ("narrow_dtypes_come_back_in_their_dtype", scheme_of(Widens), "write changes the dtype torch.bfloat16"),
    ("weights_and_state_may_differ_in_dtype", scheme_of(Widens), "with parameters of"),
    (
        "autocast_leaves_the_coefficients_in_float32",
        scheme_of(BfloatGain),
        "gain of connection 0 is computed in bfloat16",
    ),
    ("every_parameter_matters_and_gets_a_gradient", scheme_of(Unused), "connections.0.other is not used"),
    ("gradients_are_those_of_finite_differences", scheme_of(WrongGradient), "finite differences: the embedding"),
    (
        "gradients_are_those_of_finite_differences",
        scheme_of(WrongGainGradient),
        "finite differences: connections.0.gain, connections.1.gain",
    ),
    ("a_sublayer_must_return_a_tensor_of_its_inputs_shape", scheme_of(TakesAnything), "taken without an error"),
    ("forward_is_read_then_write", scheme_of(Anew), "differs from read and write"),
    ("gradient_checkpointing_changes_no_bit", scheme_of(Anew), "checkpointing"),
    ("modules_initialise_themselves", scheme_of(Uninitialised), "no reset_parameters.. draws connections.0.gain"),
    ("shapes", scheme_of(Scaled, state_spec=lambda *_: TensorSpec((3,))), r"state_spec\(0\) does not describe"),
    ("telemetry_has_its_shapes", scheme_of(ReadsItself), "connection 0: sources .* are not before sublayer 0"),
    (
        "any_number_of_sublayers",
        scheme_of(Scaled, assemble=lambda self, dim, num_sublayers, *_: of_pairs(dim, num_sublayers)),
        "0 connections for 1 sublayers",
    ),
    ("the_norm_is_the_one_given", scheme_of(OwnNorm), "was given for sublayer 0 is not used"),
    ("shapes_without_numbers", scheme_of(LooksAtNumbers), "meta"),
    ("padding_changes_no_token", scheme_of(CountsPadding), "padding on the left changes the outputs"),
    ("declares_itself", scheme_of(Scaled, equation=""), "equation must be a class attribute"),
    ("preserving_is_the_plain_residual", scheme_of(LooksAhead, preserving=lambda self: self), "as the plain residual"),
    ("forward_writes_nothing_to_self", scheme_of(Averages), r"connections\.0\.mean in place"),
    ("forward_writes_nothing_to_self", scheme_of(AveragesUnregistered), r"connections\.0\.mean in place"),
    ("forward_writes_nothing_to_self", scheme_of(History), r"connections\.0\.seen\.0\.last"),
    (
        "modules_initialise_themselves",
        scheme_of(UnsavedBuffer),
        r"no reset_parameters.. draws connections\.0\.share",
    ),
    ("every_parameter_matters_and_gets_a_gradient", scheme_of(Frozen), "connections.0.gain is not used, or detach"),
    ("penalty_is_of_each_token_or_none", scheme_of(WidePenalty), r"must be \(batch, seq\), .* got \(8,\)"),
    ("penalty_is_of_each_token_or_none", scheme_of(DetachedPenalty), "no gradient reaches the parameters"),
    # A memory may begin with rows of zeros, as the cache of transformers does, and they are no tokens.
    ("streaming_equals_the_full_pass", CountsAllRows(), r"pieces of \(1, 1, .* differ from the whole"),
]


@pytest.mark.parametrize(("check", "scheme", "words"), WRONG)
def test_each_failed_check_names_the_mistake(check, scheme, words):
    with pytest.raises((AssertionError, RuntimeError), match=words):  # `check_scheme` reports both alike
        CONTRACT[check](scheme)


def test_every_check_can_fail():
    assert set(CONTRACT) == {check for check, *_ in WRONG}


def test_options_must_be_storable_in_a_file():
    @dataclass(frozen=True)
    class Narrow(NestedScheme):
        equation: ClassVar[str] = "g x + F(norm(x))"
        dtype: torch.dtype | None = torch.float32
        share: tuple[float, ...] = (0.5,)

    with pytest.raises(CheckFailed, match="TypeError: Object of type dtype"):
        CONTRACT["declares_itself"](Narrow())
    CONTRACT["declares_itself"](Narrow(dtype=None))


@pytest.mark.parametrize(
    "scheme",
    [
        pytest.param(EDelta(context="sequence"), marks=pytest.mark.slow),
        PooledHouseholder(context="sequence"),
        # A bias of one random number; and no check warns.
        pytest.param(DeepDelta(start="authors"), marks=pytest.mark.filterwarnings("error")),
        AttentionResiduals(heads=8),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_a_correct_scheme_passes_with_any_options(scheme):
    report = check_scheme(scheme)
    assert ("causal" in report.not_checked) == (not scheme.causal)


def test_a_scheme_that_attends_to_earlier_tokens_passes_if_it_asks_which_rows_are_tokens():
    assert check_scheme(Look()).failed == {}


@pytest.mark.parametrize("connection", [Drops, StatePenalty])
def test_a_scheme_with_dropout_or_a_penalty_of_its_state_passes(connection):
    assert check_scheme(scheme_of(connection, residual_start={})).failed == {}


@pytest.mark.parametrize(
    ("scheme", "dim"), [(AttentionResiduals(heads=12), 24), (resolve("mhc:num_streams=3,layout=split"), 9)]
)
def test_a_scheme_whose_options_exclude_a_width_passes_at_another(scheme, dim):
    with pytest.raises(CheckFailed):
        check_scheme(scheme)
    assert check_scheme(scheme, dim=dim).failed == {}


class FourInputs(Scaled):
    def read(self, state, memory=None):
        x, carry = super().read(state)
        return (x,) * 4, carry


def test_the_plain_residual_gets_as_many_inputs_as_the_scheme_gives():
    CONTRACT["preserving_is_the_plain_residual"](scheme_of(FourInputs, preserving=lambda self: self))


def test_the_keys_of_a_state_in_another_order_are_named():
    spec = {"x": TensorSpec((8,)), "v": TensorSpec((8,))}
    state = {"v": torch.zeros(2, 3, 8), "x": torch.zeros(2, 3, 8)}
    with pytest.raises(ValueError, match="got dict with the keys v, x, whose order counts"):
        expect_state(state, spec)


class Nested(Scaled):
    """The state is a dict: the stream, and a list of the two states before it."""

    def read(self, state, memory=None):
        x, carry = super().read(state["x"] + state["before"][1])
        return x, carry._replace(residual=state)

    def write(self, y, carry):
        state = carry.residual
        after = super().write(y, carry._replace(residual=state["x"]))
        return {"x": after, "before": [state["x"], state["before"][0]]}


class Begin(nn.Module):
    def forward(self, x, memory=None):
        return {"x": x, "before": [torch.zeros_like(x)] * 2}


class End(nn.Module):
    def forward(self, state, memory=None):
        return state["x"]


@dataclass(frozen=True)
class NestedScheme(Scheme):
    equation: ClassVar[str] = "g x + F(norm(x + the state two sublayers before))"
    paper: ClassVar[str] = "none"

    def state_spec(self, boundary, dim):
        one = TensorSpec((dim,))
        return {"x": one, "before": [one, one]}

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return Stream(Begin(), [Nested(norm(i), dim) for i in range(num_sublayers)], End())


def test_a_state_may_be_any_tree_of_tensors():
    assert check_scheme(NestedScheme()).failed == {}
    stream = NestedScheme().build(8, 2)
    with pytest.raises(ValueError, match=r"state must be \{x: .*, before: .*\}, .* got tuple"):
        stream.connections[0].read((torch.ones(1, 2, 8),))
    with pytest.raises(ValueError, match=r"state must be \{x: .*, before: .*\}, .* got dict"):
        stream.connections[0].read({"x": torch.ones(1, 2, 8), "before": (torch.ones(1, 2, 8),)})


def test_all_failures_are_in_one_message_and_an_unexpected_error_counts_as_a_failure():
    class Raises(LooksAhead):
        def write(self, y, carry):
            if y.dtype == torch.float16:
                raise RuntimeError("no kernel for float16")
            return super().write(y, carry)

    with pytest.raises(CheckFailed) as raised:
        check_scheme(scheme_of(Raises))
    lines = str(raised.value).splitlines()
    assert "Wrong breaks the contract of a scheme" in lines[0]
    assert any("causal: not causal" in line for line in lines)
    assert any("narrow_dtypes" in line and "RuntimeError: no kernel for float16" in line for line in lines)


def test_only_a_scheme_can_be_checked():
    with pytest.raises(TypeError, match=r"residua\.Scheme, got <class"):
        check_scheme(Residual)


@pytest.mark.nightly
@pytest.mark.compiler
def test_compile_is_checked_on_request():
    assert "compiles" not in checks()
    checks(compiled=True)["compiles"](scheme_of(Scaled))

    class Breaks(Scaled):
        def write(self, y, carry):
            torch._dynamo.graph_break()
            return super().write(y, carry)

    with pytest.raises(Exception, match="graph"):
        checks(compiled=True)["compiles"](scheme_of(Breaks))


def test_the_random_state_of_the_caller_is_unchanged(monkeypatch):
    """This includes that of a GPU, which `torch.manual_seed` would seed."""
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    check_scheme(Residual())
    assert torch.equal(torch.rand(2), expected)
    assert seeds == []


@pytest.mark.parametrize("defaults", ["dtype", "device", "autocast"])
def test_the_defaults_of_the_caller_change_no_check(defaults):
    """A script for a GPU often sets the device or the dtype of new tensors. The meta device stands for the GPU."""
    dtype = torch.bfloat16 if defaults == "dtype" else torch.float32
    device = torch.device("meta" if defaults == "device" else "cpu")
    torch.set_default_dtype(dtype)
    try:
        with device, torch.autocast("cpu", torch.bfloat16, enabled=defaults == "autocast"):
            check_scheme(resolve("mhc"))
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_plugin_makes_a_test_for_each_check(pytester, monkeypatch):
    for table in ("SCHEMES", "PRESETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    register("wrong-for-the-plugin", scheme_of(LooksAhead))
    pytester.makepyfile(
        """
        import pytest
        from residua import Residual
        from residua.connections import resolve

        @pytest.mark.residua_scheme(Residual())
        def test_contract(residua_check):
            residua_check()

        @pytest.mark.residua_scheme(resolve("wrong-for-the-plugin"), Residual(expand="conv"), dim=12)
        def test_two(residua_check):
            residua_check()
        """
    )
    result = pytester.runpytest_inprocess("-p", "residua.testing.plugin", "--strict-markers", "-rs", "-v")
    outcomes = result.parseoutcomes()
    assert sum(outcomes[key] for key in ("passed", "failed", "skipped")) == 3 * len(CONTRACT)
    result.stdout.fnmatch_lines(["*::test_contract?Residual-causal? PASSED*", "*::test_two?Wrong1-causal? FAILED*"])
    result.stdout.fnmatch_lines(["*the scheme has no start*"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mark", "words"),
    [
        ("residua_scheme()", "the mark must be residua_scheme(*schemes, expected_failures, dim)"),
        ("residua_module(adapters=[1])", "the mark must be residua_module(*adapters, expected_failures)"),
        ("residua_scheme('mhc')", "needs an instance of a residua.Scheme, got 'mhc'"),
        ("residua_module([1])", "needs a ConnectionAdapter or a StreamAdapter, got [[]1[]]"),
        ("residua_scheme(residua.Residual(), expected_failures={'nothing': 'x'})", "got 'nothing'"),
        (
            "residua_scheme(residua.Residual(), expected_failures=['causal'])",
            "expected_failures must map names of checks to reasons, got [[]'causal'[]]",
        ),
    ],
)
def test_a_mark_without_anything_to_check_is_an_error(pytester, mark, words):
    pytester.makepyfile(f"import pytest, residua\n@pytest.mark.{mark}\ndef test(residua_check): residua_check()")
    result = pytester.runpytest_inprocess("-p", "residua.testing.plugin")
    assert result.ret != 0
    result.stdout.fnmatch_lines([f"*{words.replace('*', '[*]')}*"])


@pytest.mark.slow
def test_the_fixture_without_a_mark_lists_the_marks(pytester):
    pytester.makepyfile("def test_contract(residua_check): residua_check()")
    result = pytester.runpytest_inprocess("-p", "residua.testing.plugin")
    result.stdout.fnmatch_lines(["*residua_check needs one of the marks*residua_scheme*"])


def test_only_finite_numbers_agree():
    infinite = torch.tensor([float("inf"), 1.0])
    for actual, expected in [(torch.tensor([0.0, 5.0]), infinite), (infinite, torch.tensor([0.0, 5.0]))]:
        with pytest.raises(AssertionError, match="not finite"):
            assert_close(actual, expected)
