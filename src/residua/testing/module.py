"""Check your module against a scheme of this library. docs/testing.md has adapters for modules of several packages.

The adapter computes your parameters from ours, so gradients with respect to our parameters can be compared.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from residua.connections import Scheme
from residua.connections.parts.memory import window_of
from residua.testing import diagnosis
from residua.testing.adapter import (
    NARROW_ROUNDINGS,
    ROUNDINGS,
    Adapter,
    ConnectionAdapter,
    Ours,
    Pair,
    StreamAdapter,
    SublayerFunction,
    built,
    holding,
    is_of_dtypes,
    named_once,
    named_parameters,
    placed,
    version_in_words,
    versions,
    with_attributes,
)
from residua.testing.agreement import TOLERANCES, agree, disagreement
from residua.testing.checks import (
    CheckFailed,
    CheckFunction,
    NotChecked,
    Report,
    Suite,
    apart_from_caller,
    equal,
    expect,
    expect_names,
    require,
    run,
    seeded,
    tensors,
)
from residua.testing.inputs import normal, recorded
from residua.testing.starts import SEEDS, different_draws, drawn


def check_module(
    adapter: Adapter, *, compiled: bool = False, expected_failures: Mapping[str, str] | None = None
) -> Report:
    """Check that a module computes the same as one of our schemes, and return the report.

    The two are compared with random parameters and different streams, because equal streams hide a transposed mixing
    matrix. If a scheme has several published versions, the one nearest to the module is used; the report names it. A
    module with dropout is checked in evaluation mode only, and the report says so.

    compiled: also check your module under torch.compile.
    expected_failures: the reason for each check that fails today; it is an error if one of these checks passes.

    Raises:
        TypeError: `adapter` is not an adapter, its `scheme` is not a scheme, or `expected_failures` is not a mapping.
        ValueError: there is no sublayer `index`, or no check with the name of an expected failure.
        AssertionError: checks failed; the message has a line for each reason, which names the mistake.
    """
    expect_adapter(adapter)
    expect_names(expected_failures or {}, checks(compiled=True))
    adapter, compared = nearest(settled(adapter))
    subject = f"{type(adapter).__name__}, compared with {version_in_words(adapter.scheme)}"
    if adapter.evaluation_only:
        subject += ", in evaluation mode only: in training mode every call gives other numbers"
    return require(replace(run(_suite(compiled, compared), adapter, expected_failures), subject=subject), subject)


def expect_adapter(adapter: Any) -> None:
    """Raise TypeError unless `adapter` is an adapter to a scheme, and ValueError if its index is no sublayer."""
    if not isinstance(adapter, (ConnectionAdapter, StreamAdapter)):
        raise TypeError(f"check_module needs a ConnectionAdapter or a StreamAdapter, got {adapter!r}")
    scheme = getattr(adapter, "scheme", None)
    if not isinstance(scheme, Scheme):
        raise TypeError(f"scheme must be a residua.Scheme, such as residua.resolve('mhc'), got {scheme!r}")
    if not 0 <= adapter.index < adapter.num_sublayers:
        raise ValueError(f"index must be 0 to {adapter.num_sublayers - 1}, a sublayer, got {adapter.index}")


CHECKS = Suite()
"""The checks of a module by name, in order."""


def checks(*, compiled: bool = False) -> dict[str, CheckFunction]:
    """Return the checks of a module by name; `compiled` adds the one that calls a compiler.

    If the scheme has several published versions, each check takes the one nearest to the module.
    """
    return {name: _of_nearest(name, check) for name, check in _suite(compiled).items()}


def _suite(compiled: bool, compared: "PairedPass | None" = None) -> dict[str, CheckFunction]:
    """Return the checks. If `compared` is given, the check `forward` judges this pass, so that it is diagnosed once."""
    suite = CHECKS | ({"compiles": seeded(compiles)} if compiled else {})
    return suite | ({"forward": seeded(lambda _: compared.judge())} if compared is not None else {})


def _of_nearest(name: str, check: CheckFunction) -> CheckFunction:
    @wraps(check)
    def judge(adapter: Adapter) -> None:
        adapter, compared = nearest(settled(adapter))
        _suite(True, compared)[name](adapter)

    return judge


def settled(adapter: Adapter) -> Adapter:
    """Return the adapter, with `evaluation_only` if its module draws random numbers in training mode alone."""
    with apart_from_caller(), suppress(Exception):  # the checks report an error
        pair = Pair(adapter)

        def repeats(seeds: tuple[int, int]) -> bool:
            results = []
            for seed in seeds:
                torch.default_generator.manual_seed(seed)
                results.append(pair.result(pair.state()))
            return equal(*results)

        pair.train(True)
        if not repeats((0, 1)) and repeats((0, 0)):
            pair.train(False)
            if repeats((0, 1)):
                return with_attributes(adapter, evaluation_only=True)
    return adapter


def nearest(adapter: Adapter) -> "tuple[Adapter, PairedPass | None]":
    """Return the adapter with the published version of its scheme that is nearest to its module, and its forward pass.

    A version is nearer if fewer differences are left unexplained by known mistakes, and among equals if the results are
    closer. If there is one version, or the module cannot be called, the scheme stays unchanged and no pass is returned;
    the checks report an error.
    """
    candidates = versions(adapter.scheme)
    if len(candidates) == 1:
        return adapter, None
    with apart_from_caller(), suppress(Exception):
        passes = []
        for scheme in candidates:
            torch.default_generator.manual_seed(0)
            passes.append(PairedPass.of(with_attributes(adapter, scheme=scheme)))
        agreeing = (one for one in passes if one.agrees)
        # A generator, so that passes after the first explained one are not diagnosed.
        explained = (one for one in passes if not diagnosis.unexplained(one.findings))
        one = next(agreeing, None) or next(explained, None) or min(passes, key=_gap)
        return one.pair.adapter, one
    return adapter, None


def _gap(compared: "PairedPass") -> tuple[int, float]:
    """Return the number of unexplained differences, and the size of the whole difference."""
    size = sum(rms(a - b) for a, b in zip(tensors(compared.result), tensors(compared.reference)))
    return diagnosis.unexplained(compared.findings), size if math.isfinite(size) else math.inf


@CHECKS.add
def parameters(adapter: Adapter) -> None:
    """Each of your parameters gets a value of the right shape, and all of ours are used.

    A parameter of yours that is computed from ours is not frozen.
    """
    pair = Pair(adapter)
    theirs = adapter.parameters(pair.ours)
    given = placed(pair.module, theirs)
    params = named_parameters(pair.module)
    for name, value in theirs.items():
        frozen = "a parameter with requires_grad=False" if name in params else "a buffer"
        trained = name in params and params[name].requires_grad
        expect(trained or not value.requires_grad, f"{name} is {frozen}: it stays frozen at its initial value")
    missing = sorted(name for name, parameter in named_once(pair.module).items() if id(parameter) not in given)
    expect(not missing, f"parameters(): no value for {', '.join(missing)}, which would keep the initial values")
    start = torch.zeros((), requires_grad=True)  # so that backward works even if nothing else needs a gradient
    total = sum((value.sum() for value in theirs.values() if value.requires_grad), start)
    _, *grads = torch.autograd.grad(total, [start, *pair.ours.values()], allow_unused=True)
    unused = [name for name, grad in zip(pair.ours, grads) if grad is None]
    expect(not unused, f"parameters(): our {', '.join(unused)} is not used")


@contextmanager
def _uninitialised_memory_is_nan():
    """Let torch.empty return NaN while the `with` block runs, which shows parameters that were never initialised."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory (torch.utils.deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


@CHECKS.add
def initial_values(adapter: Adapter) -> None:
    """A new module starts as the scheme does: equal constants, draws of equal spread, nothing uninitialised."""
    modules, expected = [], []
    for seed in SEEDS:
        torch.default_generator.manual_seed(seed)
        with _uninitialised_memory_is_nan():
            modules.append(built(adapter))
        part: nn.Module = adapter.reference()
        if isinstance(adapter, ConnectionAdapter):
            part = part.connections[adapter.index]  # type: ignore[union-attr,index,assignment]
        expected.append(adapter.parameters(Ours(named_once(part))))
    fresh = modules[0]
    lost = [name for name, p in named_once(fresh).items() if not p.isfinite().all()]
    expect(not lost, f"never initialised: {', '.join(lost)} (torch.empty, and nobody draws)")
    placed(fresh, expected[0])  # raises for an adapter with other names or shapes
    starts = [named_parameters(module) for module in modules]
    with torch.no_grad():
        for name, start in expected[0].items():
            if name not in starts[0] or not start.requires_grad:
                continue  # a parameter without influence, for which the adapter may return anything
            ours, theirs = ([values[name].detach().double() for values in each] for each in (starts, expected))
            value, wanted, fixed = ours[0], theirs[0], ~drawn(theirs)
            if fixed.any() and not agree(value[fixed], wanted[fixed], dtype=torch.float32):
                differ = fixed & ((value - wanted).abs() > 1e-5)
                few = differ.sum() <= SHOWN
                start, wanted = (in_words(x[differ if few else fixed]) for x in (value, wanted))
                where = f" in connection {adapter.index}" if few and isinstance(adapter, ConnectionAdapter) else ""
                counts = f"({differ.sum().item()} of {fixed.sum().item()} entries differ)"
                raise CheckFailed(f"{name} starts {start}; the scheme starts it {wanted}{where} {counts}")
            words = different_draws(ours, theirs)
            expect(words is None, f"{name} {words}")


SHOWN = 8
"""The largest number of values that a message lists one by one."""


def in_words(values: Tensor) -> str:
    """Describe the values of a tensor in words."""
    if values.numel() == 0 or (values == values[0]).all():
        return f"at {values[0].item():.4g}" if values.numel() else "nowhere"
    if values.numel() <= SHOWN:
        return f"at [{', '.join(f'{value:.4g}' for value in values.tolist())}]"
    return f"with mean {values.mean().item():.3g} and standard deviation {values.std().item():.3g}"


@CHECKS.add
def forward(adapter: Adapter) -> None:
    """The sublayers' inputs and the new state equal ours, for random parameters and streams unlike each other."""
    PairedPass.of(adapter).judge()


@dataclass(frozen=True)
class PairedPass:
    """One forward pass of your module (`result`) and of ours (`reference`), both called with `state`.

    actual, expected: the inputs of the sublayers in your module and in ours.
    """

    pair: Pair
    state: Any
    result: Any
    reference: Any
    actual: diagnosis.Calls
    expected: diagnosis.Calls

    @classmethod
    def of(cls, adapter: Adapter) -> "PairedPass":
        """Call both modules. Raise CheckFailed for results that cannot be compared."""
        pair = Pair(adapter)
        state = pair.state()
        (ours, expected), (theirs, actual) = recorded(pair.sublayers()), recorded(pair.sublayers())
        with torch.no_grad():
            reference = pair.reference(pair.ours, state, ours)
            result = pair.candidate(pair.ours, state, theirs)
        if len(expected) != len(actual):
            raise CheckFailed(f"sublayers were called {len(actual)} times, expected {len(expected)}")
        for got, wanted in zip(tensors(actual), tensors(expected)):
            if got.shape != wanted.shape:
                raise CheckFailed(f"the sublayer got {tuple(got.shape)}, expected {tuple(wanted.shape)}")
        if not same_structure(result, reference):
            raise CheckFailed(f"the result must be {structure(reference)}, got {structure(result)}")
        return cls(pair, state, result, reference, actual, expected)

    def judge(self) -> None:
        """Raise CheckFailed if the two differ, in this call or in another one."""
        if not self.agrees:
            expect(_repeats(self.pair), "a second call gives other numbers")
            hint = diagnosis.dtype_hint(self.pair, self.result, self.reference)
            raise CheckFailed(diagnosis.in_words(self.findings) + hint)
        if _repeats(self.pair):  # otherwise the check `second_call` fails
            _agrees_in_other_calls(self.pair)

    @cached_property
    def agrees(self) -> bool:
        return len(tensors(self.actual)) == len(tensors(self.expected)) and all(
            map(self.pair.agree, tensors([self.actual, self.result]), tensors([self.expected, self.reference]))
        )

    @cached_property
    def findings(self) -> diagnosis.Findings:
        """The known mistakes and the unexplained differences between the two modules."""
        return diagnosis.of(self.pair, self.state, self.result, self.reference, self.actual, self.expected)


@dataclass(frozen=True)
class OtherCall:
    """A call in which a module may take a path of its own. factor: that of our parameters."""

    where: str
    state: Any
    training: bool = True
    grad: bool = False
    may_refuse: bool = False
    factor: float = 1.0


def _other_calls(pair: Pair) -> list[OtherCall]:
    """Return the calls in which both the results and the gradients are compared.

    A module often has separate code for inference, for training and for general shapes, so each can be wrong by itself.
    A module may refuse a state that is not contiguous, as those that call `view` do.
    """
    state = pair.state()
    several = any(map(window_of, pair.stream.parts))  # one token would need a memory
    tokens = "two tokens" if several else "one token"
    strided = tree_map(lambda x: x.mT.contiguous().mT, state)
    calls = [
        OtherCall("in evaluation mode", state, training=False),
        OtherCall("for a state that is not contiguous", strided, may_refuse=True),
        OtherCall(f"for one sequence of {tokens}", tree_map(lambda x: x[:1, : 1 + several], state)),
        OtherCall("for a token of zeros", with_zeros(state)),
    ]
    if pair.dtype.itemsize > 2:  # in 16 bits the tolerance is measured on `state` alone
        calls += [
            OtherCall("for a small state", tree_map(lambda x: 0.02 * x, state)),  # where an eps counts
            OtherCall("for three sequences of 36 tokens", tree_map(_longer, state)),
        ]
    return calls


def _agrees_in_other_calls(pair: Pair) -> list[str]:
    """Raise CheckFailed unless the results also equal ours in evaluation, with gradients, and for other inputs.

    Return the calls that the module refuses, of those that it may refuse.
    """
    state, refused = pair.state(), []
    second = tree_map(lambda x: x.roll(1, -1), state)
    for call in [
        OtherCall("with gradients", state, grad=True),
        *_other_calls(pair),
        OtherCall("in evaluation mode, for a second state,", second, training=False),
        OtherCall("in evaluation mode, with other parameters,", state, training=False, factor=1.1),
    ]:
        pair.train(call.training)
        parameters = {name: call.factor * value for name, value in pair.ours.items()}
        with torch.no_grad():
            expected = pair.reference(parameters, call.state, pair.sublayers())
        if not all(x.isfinite().all() for x in tensors(expected)):
            continue
        try:
            with torch.set_grad_enabled(call.grad):
                result = pair.candidate(parameters, tree_map(torch.clone, call.state), pair.sublayers())
        except Exception as error:
            if call.may_refuse:
                refused.append(call.where)
                continue
            raise CheckFailed(f"{call.where}: {type(error).__name__}: {error}") from error
        expect(same_structure(result, expected), f"{call.where} the result is {structure(result)}")
        for theirs, ours in zip(tensors(result), tensors(expected)):
            wrong = pair.disagreement(theirs.detach(), ours)
            expect(wrong is None, f"{call.where} the result differs from ours, which it equals otherwise: {wrong}")
    return refused


def with_zeros(state: Any) -> Any:
    """Return a state whose third token is zero, as padding often is."""
    return tree_map(lambda x: x.index_fill(1, torch.tensor([2]), 0), state)


def _longer(x: Tensor) -> Tensor:
    """Return three sequences of 36 tokens, all different, from two sequences of six."""
    rows = torch.cat([x, x.flip(0)[:1].roll(1, -1)])
    return torch.cat([rows.roll(shift, -1) for shift in range(6)], 1)


def structure(tree: Any) -> list[Any]:
    """Return the shapes of the tensors of a state, and the classes of its other leaves."""
    return [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__ for x in tree_leaves(tree)]


def same_structure(a: Any, b: Any) -> bool:
    return structure(a) == structure(b)


def _repeats(pair: Pair) -> bool:
    """Return whether a second call of the module gives the same bits; if not, the check `second_call` reports it."""
    return equal(pair.result(pair.state()), pair.result(pair.state()))


def expect_repeatable(pair: Pair) -> None:
    """Raise NotChecked for a module that returns different numbers in a second call."""
    if not _repeats(pair):
        raise NotChecked("a second call gives other numbers")


def agrees_forward(pair: Pair, *, dtype: torch.dtype | None = None) -> None:
    """Raise NotChecked unless the outputs agree to the rounding of `dtype`; the check `forward` reports them."""
    with torch.no_grad():
        state = pair.state()
        result, reference = (call(pair.ours, state, pair.sublayers()) for call in (pair.candidate, pair.reference))
    if not same_structure(result, reference) or not all(
        pair.agree(a, b) or (dtype is not None and agree(a, b, dtype=dtype))
        for a, b in zip(tensors(result), tensors(reference))
    ):
        raise NotChecked("the forward pass already differs")
    expect_repeatable(pair)


@CHECKS.add
def gradients(adapter: Adapter) -> None:
    """The gradients with respect to the state and to each of our parameters are the same."""
    pair = Pair(adapter)
    agrees_forward(pair)
    reference, result = (grads_of(pair, call) for call in (pair.reference, pair.candidate))
    beyond_rounding = _rounding_of(pair, pair.state(), reference)
    exact, allowed = _exact_gradients(pair) if pair.dtype.itemsize == 2 else ({}, {})

    def is_far(name: str, theirs: Tensor, ours: Tensor) -> bool:
        return name in allowed and distance(theirs, ours) > allowed[name]

    wrong = []
    for name, ours in reference.items():
        theirs = result[name]
        if ours is None or not ours.any():
            continue
        if theirs is None or not theirs.any():
            wrong.append(f"no gradient reaches {name}, though the output depends on it: detached or frozen")
        elif not theirs.isfinite().all():
            wrong.append(f"the gradient of {name} is not finite")
        elif is_far(name, theirs, exact.get(name, ours)) or beyond_rounding(name, theirs):
            ratio = (theirs * ours).sum() / ours.square().sum()
            near = disagreement(theirs, ratio * ours, dtype=pair.dtype, factor=10) is None
            near = near and not is_far(name, theirs, ratio * ours)
            words = f"is {ratio.item():.4g} times ours" if near else "differs by up to " + relative(theirs, ours)
            wrong.append(f"the gradient of {name} {words}")

    def agrees(call: Callable) -> bool:
        try:
            other = grads_of(pair, call)
        except CheckFailed:  # no gradient is left in this version
            return False
        for name, ours in reference.items():
            if ours is not None:
                value, theirs = (torch.zeros_like(ours) if x is None else x for x in (other[name], result[name]))
                if disagreement(value, theirs, factor=10) is not None or is_far(name, theirs, value):
                    return False
        return True

    if wrong:
        raise CheckFailed(diagnosis.frozen(pair, agrees) or "; ".join(wrong))
    _finite_at_zeros(pair)
    if pair.dtype.itemsize > 2:  # in 16 bits the tolerance is measured on `state` alone
        _gradients_agree_in_other_calls(pair)


def _rounding_of(pair: Pair, state: Any, reference: Mapping[str, Tensor | None]) -> Callable[[str, Tensor], bool]:
    """Return a function of a name and a gradient: whether it differs from our gradient there by more than rounding."""
    moved = cache(lambda: grads_of(pair, pair.reference, pair.moved(state)))

    def beyond(name: str, theirs: Tensor) -> bool:
        ours = reference[name]
        if ours is None or disagreement(theirs, ours, dtype=pair.dtype, factor=10) is None:  # sums over all tokens
            return False
        return _exceeds_rounding(theirs, ours, moved()[name])  # type: ignore[arg-type]

    return beyond


def _exceeds_rounding(theirs: Tensor, ours: Tensor, moved: Tensor) -> bool:
    """Return whether `theirs` is further from `ours` than rounding explains; moved: ours at a rounded state."""
    return not (theirs - ours).abs().max() <= ROUNDINGS * (moved - ours).abs().max()  # NaN exceeds it


def _gradients_agree_in_other_calls(pair: Pair) -> None:
    """Raise CheckFailed if gradients differ from ours in a call whose result agrees: a kernel has its own backward."""
    try:
        refused = _agrees_in_other_calls(pair)
    except CheckFailed:  # the check `forward` reports it
        return
    for call in _other_calls(pair):
        if call.where in refused:
            continue
        pair.train(call.training)
        reference = grads_of(pair, pair.reference, call.state)
        if not all(x is None or x.isfinite().all() for x in reference.values()):
            continue
        try:
            result = grads_of(pair, pair.candidate, call.state)
        except Exception as error:
            if not call.training:  # code for inference alone may have no backward pass
                continue
            raise CheckFailed(f"{call.where} the backward pass fails: {type(error).__name__}: {error}") from error
        beyond_rounding = _rounding_of(pair, call.state, reference)
        for name, ours in reference.items():
            if ours is not None:
                theirs = torch.zeros_like(ours) if (grad := result[name]) is None else grad
                expect(
                    not beyond_rounding(name, theirs),
                    f"{call.where} the gradient of {name}, right otherwise, differs by up to {relative(theirs, ours)}",
                )


def _finite_at_zeros(pair: Pair) -> None:
    """Raise CheckFailed if a token of zeros makes gradients that are not finite, though ours are."""

    def lost(call: Callable) -> list[str]:
        grads = grads_of(pair, call, with_zeros(pair.state()))
        return [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()]

    if not lost(pair.reference):
        names = ", ".join(lost(pair.candidate))
        expect(
            not names, f"for a token of zeros the gradient of {names} is not finite: most often a root or a norm of 0"
        )


def _exact_gradients(pair: Pair) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the exact gradients of our module, and the relative error of each that rounding allows, both by name.

    The exact gradients are computed in float64 at the rounded state and parameters. The allowed error is several times
    the largest error that our module has in 16 bits over a few states.
    """
    ours = {name: x.detach().double().requires_grad_() for name, x in pair.ours.items()}
    exact: dict[str, Tensor] = {}
    errors: dict[str, float] = {}
    for shift in range(STATES):
        state = tree_map(lambda x: x.roll(shift, -1), pair.state())  # noqa: B023
        narrow = grads_of(pair, pair.reference, state)
        wide = grads_of(pair, pair.reference, tree_map(torch.Tensor.double, state), ours)
        for name, x in wide.items():
            if x is not None and (value := narrow[name]) is not None:
                exact.setdefault(name, x)
                errors[name] = max(errors.get(name, 0.0), distance(value, x))
    relative = TOLERANCES[pair.dtype][0]
    return exact, {name: relative + NARROW_ROUNDINGS * error for name, error in errors.items()}


STATES = 3
"""States over which the error of a gradient in 16 bits is measured: that of a small tensor can be small by chance."""


def distance(result: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference of whole tensors, relative to that of the reference."""
    return ((result.double() - reference.double()).norm() / reference.double().norm()).item()


def grads_of(
    pair: Pair, call: Callable, state: Any = None, ours: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor | None]:
    """Return the gradients of a weighted sum of the result of `call`, by the name of the tensor that each belongs to.

    The tensors are the leaves of `state` and our parameters `ours`. Both arguments default to those of `pair`. A
    gradient is None if the result does not depend on the tensor.
    """
    ours = pair.ours if ours is None else ours
    state = tree_map(lambda x: x.clone().requires_grad_(), pair.state() if state is None else state)
    names = [*(f"the state, leaf {i}" for i in range(len(tensors(state)))), *ours]
    # A module that recomputes itself in the backward pass reads its parameters there.
    with holding(pair.module, pair.adapter.parameters(pair.ours)), holding(pair.part, ours):
        loss = weighted(call(ours, state, pair.sublayers()))
        expect(loss.requires_grad, "the output has no gradient at all")
        return dict(zip(names, torch.autograd.grad(loss, [*tensors(state), *ours.values()], allow_unused=True)))


def relative(result: Tensor, reference: Tensor) -> str:
    return f"{((result - reference).abs().max() / reference.abs().max()).item():.2g} of its largest entry"


def weighted(result: Any) -> Tensor:
    """Return a weighted sum of all entries of a result, with random weights."""
    parts = [(leaf * normal(*leaf.shape, seed=40 + i).to(leaf)).sum() for i, leaf in enumerate(tensors(result))]
    return torch.stack(parts).sum()


def rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


@CHECKS.add
def float32_mappings(adapter: Adapter) -> None:
    """Gates and mappings are computed in float32: under autocast, and with a bfloat16 state and float32 parameters.

    The error is measured against the module's own result in the adapter's dtype, or in float32 if that has 16 bits, and
    compared with the error of our module. The check `forward` reports any other difference.
    """
    agrees_forward(Pair(adapter), dtype=torch.bfloat16)
    exact = Pair(adapter, dtype=adapter.dtype if adapter.dtype.itemsize > 2 else torch.float32, scale=0.5)
    if adapter.dtype.itemsize == 2:
        try:
            exact.result(exact.state())
        except RuntimeError as error:
            raise NotChecked(f"the module computes only in {adapter.dtype}: {error}") from error
    expect(
        not _in_steps(exact), "the mapping, the mixing or the result is rounded to 16 bits, whatever the state's dtype"
    )
    pair = Pair(adapter, dtype=torch.float32, scale=0.5)
    for narrow, where in ((False, "under autocast"), (True, "with a bfloat16 state")):
        ours, theirs = (_exact_and_narrow(side, exact, pair, narrow) for side in ("reference", "candidate"))
        for (our_truth, our), (truth, result) in zip(zip(*ours), zip(*theirs)):
            if narrow and result.dtype != our.dtype:
                raise CheckFailed(f"{where} the result is {result.dtype}, expected {our.dtype}")
            error, usual = rms(result.double() - truth), rms(our.double() - our_truth)
            # Results in bfloat16 are rounded once more than the mappings. With a bfloat16 state both sides have that
            # rounding, under autocast only a norm that returns the dtype of autocast.
            rounding = 2e-3 * rms(truth) if result.dtype == torch.bfloat16 and not narrow else 0.0
            times = 2 if narrow else 3
            if error > times * usual + rounding + 2e-6 * rms(truth):
                raise CheckFailed(
                    f"the mapping or the mixing is computed in bfloat16 {where}: error {error:.2g}, "
                    f"ours {usual:.2g}; keep gates and mappings in float32, weights and inputs"
                )


@torch.no_grad()
def _exact_and_narrow(side: str, exact: Pair, pair: Pair, narrow: bool) -> list[list[Tensor]]:
    """Return the results and sublayer inputs of one module twice: in the dtype of `exact`, and in lower precision.

    side: "candidate" for your module, "reference" for ours. narrow: whether the lower precision is a bfloat16 state, in
    place of autocast; the parameters are those of `pair` in both cases.
    """
    dtype = torch.bfloat16 if narrow else torch.float32
    state = tree_map(lambda x: x.to(dtype), pair.state())
    runs = []
    for case, start_dtype, cast in (
        (exact, exact.dtype, nullcontext()),
        (pair, dtype, nullcontext() if narrow else torch.autocast("cpu", torch.bfloat16)),
    ):
        sublayers, inputs = recorded([quiet(i, start_dtype) for i in range(pair.adapter.num_sublayers)])
        sublayer = sublayers if pair.whole else sublayers[0]
        weights = {name: value.detach().to(case.dtype) for name, value in pair.ours.items()}
        start = tree_map(lambda x: x.clone().to(start_dtype), state)  # noqa: B023
        try:
            with cast:
                results = getattr(case, side)(weights, start, sublayer)
        except RuntimeError as error:
            if narrow and is_of_dtypes(error):
                raise NotChecked(f"the module takes no bfloat16 state with float32 parameters: {error}") from error
            raise
        runs.append(tensors([results, inputs]))
    return runs


@torch.no_grad()
def _in_steps(pair: Pair) -> bool:
    """Return whether the module's results change in steps, as after rounding, while ours change smoothly.

    The state moves along a line. The interval is halved repeatedly, and the half in which the results change more is
    kept, until float32 could not resolve the interval. By then the change of a smooth result is as small as that of
    ours, but a jump remains.
    """
    sublayers, inputs = recorded(pair.sublayers())

    def at(length: float, call: Callable = pair.candidate) -> list[Tensor]:
        inputs.clear()
        return tensors([call(pair.ours, _flipped(pair.state(), length), sublayers), inputs])

    def change(a: list[Tensor], b: list[Tensor]) -> float:
        return sum(rms(x - y) for x, y in zip(a, b))

    start, length = 0.0, 2.0**-6
    low, high = at(start), at(length)
    for _ in range(17):
        length /= 2
        middle = at(start + length)
        if change(low, middle) >= change(middle, high):
            high = middle
        else:
            start, low = start + length, middle
    smooth = change(*(at(x, pair.reference) for x in (start, start + length)))
    return change(low, high) > 10 * smooth


def _flipped(state: Any, length: float) -> Any:
    """Return the state moved by `length` in the direction of its copy with reversed features."""
    return tree_map(lambda x: x + length * x.flip(-1), state)


def quiet(i: int, dtype: torch.dtype) -> SublayerFunction:
    """Return sublayer `i` of a kind that rounds nothing: it returns the same vector for every input."""

    def call(x: Tensor, *others: Tensor) -> Tensor:
        return torch.linspace(-1, 1, x.shape[-1], dtype=torch.float64).roll(3 * i).repeat(*x.shape[:-1], 1).to(dtype)

    return call


@CHECKS.add
def causal(adapter: Adapter) -> None:
    """A change of a later token leaves the results at earlier tokens equal to the last bit."""
    if not adapter.scheme.causal:
        raise NotChecked("the scheme is not causal")
    pair = Pair(adapter)
    state = pair.state()
    later = tree_map(lambda x: torch.cat([x[:, :3], x[:, 3:] + 1], 1), state)
    expect_repeatable(pair)
    before, after = tensors(pair.result(state)), tensors(pair.result(later))
    same = all(torch.equal(a[:, :3], b[:, :3]) for a, b in zip(before, after))
    expect(same, "not causal: a later token changes the results of earlier ones")


@CHECKS.add
def streaming(adapter: Adapter) -> None:
    """A sequence token by token, as in generation, gives the same numbers as in one call."""
    if not adapter.scheme.causal:
        raise NotChecked("the scheme is not causal")
    if any(map(window_of, adapter.reference().parts)):
        raise NotChecked("the scheme reads earlier tokens, so your module needs a cache, which the adapter cannot pass")
    pair = Pair(adapter)
    expect_repeatable(pair)
    state = pair.state()
    whole = tensors(pair.result(state))
    for t in range(3):
        token = pair.result(tree_map(lambda x: x[:, t : t + 1], state))  # noqa: B023
        for part, expected in zip(tensors(token), whole):
            wrong = pair.disagreement(part, expected[:, t : t + 1])
            expect(wrong is None, f"token {t} alone differs from token {t} of the sequence: {wrong}")


def saved(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module that its `state_dict` has; that may have other objects too."""
    places = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    own = {name: value.detach() for named in places for name, value in named}
    return {name: own[name] for name in module.state_dict() if name in own}


@CHECKS.add
def second_call(adapter: Adapter) -> None:
    """A second call gives the same bits, and no call changes the state or the module in place."""
    pair = Pair(adapter)
    state = pair.state()
    copies = tree_map(torch.clone, state)
    values, keys = tree_map(torch.clone, saved(pair.module)), pair.module.state_dict().keys()
    with torch.no_grad():
        first, second = (pair.candidate(pair.ours, state, pair.sublayers()) for _ in range(2))
    expect(equal(state, copies), "the state is changed in place")
    expect(equal(first, second), "a second call gives other numbers")
    after = saved(pair.module)
    changed = [name for name, value in after.items() if name in values and not torch.equal(value, values[name])]
    expect(not changed, f"forward changes {', '.join(changed)}")
    added = sorted(pair.module.state_dict().keys() ^ keys)
    words = "a new module could not load its checkpoint; make them in __init__, or with persistent=False"
    expect(not added, f"forward adds or removes {', '.join(added)} in state_dict: {words}")


@CHECKS.add
def gradient_checkpointing(adapter: Adapter) -> None:
    """The gradients are equal to the last bit if the module is recomputed in the backward pass."""
    pair = Pair(adapter)
    expect_repeatable(pair)
    kept, recomputed = (
        grads_of(pair, call).values()
        for call in (pair.candidate, partial(checkpoint, pair.candidate, use_reentrant=False))
    )
    same = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(kept, recomputed))
    expect(same, "gradients change under activation checkpointing")


@CHECKS.add
def large_logits(adapter: Adapter) -> None:
    """Values and gradients in float32 stay finite with parameters ten times as large, if ours do.

    In float64 the values are also ours: a logit must not be cut off.
    """
    pair = Pair(adapter, dtype=torch.float32)
    large = _ten_times(pair)
    finite = {}
    for side, call in (("ours", pair.reference), ("theirs", pair.candidate)):
        out = call(large, pair.state(), pair.sublayers())
        grads = torch.autograd.grad(weighted(out), list(large.values()), allow_unused=True) if large else ()
        finite[side] = all(x.isfinite().all() for x in [*tensors(out), *(grad for grad in grads if grad is not None)])
    if not finite["ours"]:
        raise NotChecked("the reference overflows too")
    words = "most often an exp overflows, or a sum underflows to 0 and divides; normalise in logarithms"
    expect(finite["theirs"], f"not finite with logits of about 100, where the reference is finite: {words}")
    pair = Pair(adapter)
    with suppress(NotChecked):  # the check `forward` reports a result that differs anyway
        if pair.dtype == torch.float64:
            agrees_forward(pair)
            _agrees_with_large_parameters(pair)


def _ten_times(pair: Pair) -> Ours:
    return Ours((name, (10 * value).detach().requires_grad_()) for name, value in pair.ours.items())


@torch.no_grad()
def _agrees_with_large_parameters(pair: Pair) -> None:
    large, state = _ten_times(pair), pair.state()
    reference, moved = (tensors(pair.reference(large, x, pair.sublayers())) for x in (state, pair.moved(state)))
    for theirs, ours, other in zip(tensors(pair.candidate(large, state, pair.sublayers())), reference, moved):
        wrong = disagreement(theirs, ours, dtype=pair.dtype)
        if wrong is not None and _exceeds_rounding(theirs, ours, other):
            raise CheckFailed(
                f"with logits of about 100 the result differs from ours, which it equals otherwise: {wrong}"
            )


def compiles(adapter: Adapter) -> None:
    """The compiled module has the results and the gradients of the eager module."""
    pair = Pair(adapter, dtype=torch.float32)
    call = pair.adapter.forward if pair.whole else pair.adapter.connect  # type: ignore[attr-defined]
    values = placed(pair.module, adapter.parameters(pair.ours))
    with torch.no_grad():
        for own in [*pair.module.buffers(), *named_once(pair.module).values()]:
            own.copy_(values.get(id(own), own))
    results = []
    for function in (call, torch.compile(call)):
        state = tree_map(lambda x: x.clone().requires_grad_(), pair.state())
        out = function(pair.module, state, pair.sublayers())
        leaves = [*tensors(state), *(p for p in pair.module.parameters() if p.requires_grad)]
        results.append([*tensors(out), *torch.autograd.grad(1e3 * weighted(out), leaves, allow_unused=True)])
    for eager, compiled in zip(*results):
        wrong = None if eager is None or compiled is None else disagreement(compiled, eager, factor=10)
        expect(wrong is None, f"torch.compile changes results or gradients: {wrong}")
