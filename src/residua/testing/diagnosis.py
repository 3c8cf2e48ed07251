"""Explain why a module disagrees: put each known mistake into our module until the two agree.

A mistake is reported only if our module with this mistake agrees with yours, up to rounding. Otherwise the message
names the first part that differs.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from itertools import combinations
from typing import Any, Literal, NamedTuple, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from residua.connections import Carry, Connection, KroneckerHyperConnections, Mixing, RankOne
from residua.connections.base import as_inputs
from residua.connections.families.stream_logits import StreamLogits
from residua.connections.parts.norm import RMSNorm
from residua.errors import types_of
from residua.ops import rms_norm
from residua.testing.adapter import FLOAT32_HINT, Adapter, Pair, holding, named_once, with_attributes
from residua.testing.agreement import TOLERANCES, agree
from residua.testing.checks import tensors
from residua.testing.inputs import bare_sublayers, normal, recorded

Calls = list[tuple[Tensor, ...]]


class PartGap(NamedTuple):
    """A part whose difference no known mistake explains, and the size of that difference."""

    part: str
    gap: str


Findings = list[str | PartGap]
"""Known mistakes in words, and differences that none of them explains, in the order of the computation."""


def of(pair: Pair, state: Any, result: Any, reference: Any, actual: Calls, expected: Calls) -> Findings:
    """Return why a module differs from the reference.

    result, reference: the results; actual, expected: the inputs of its sublayers and of ours.
    """

    def agrees(part: nn.Module, ours: dict[str, Tensor]) -> bool:
        """Return whether the changed reference agrees with the module; False if the change has no effect."""
        sublayers, inputs = recorded(pair.sublayers())
        variant = tensors([pair.reference(ours, tree_map(torch.clone, state), sublayers, part), inputs])
        right, wrong = (tensors(tree) for tree in ([reference, expected], [result, actual]))
        return _close(pair, wrong, variant) and not _close(pair, right, variant)

    with torch.no_grad():
        variant = _variant(pair, agrees) or _left_out(pair, agrees)
        if variant is not None:
            return [variant]
        others = tree_map(lambda x: torch.cat([x[:1], x[1:] + 1]), pair.state())
        if not all(torch.equal(a[:1], b[:1]) for a, b in zip(tensors(result), tensors(pair.result(others)))):
            return ["the result for a sequence depends on the other sequences of the batch"]
        findings = (_of_stream if pair.whole else _of_connection)(pair, state, result, reference, actual, expected)
        if any(isinstance(finding, PartGap) for finding in findings):
            findings = next(([words] for words, ours in _constants(pair) if agrees(pair.part, ours)), findings)
        return findings


def unexplained(findings: Findings) -> int:
    """Return the number of differences that no known mistake explains."""
    return sum(isinstance(finding, PartGap) for finding in findings)


def in_words(findings: Findings) -> str:
    mistakes = [finding for finding in findings if isinstance(finding, str)]
    rest = [f"{finding.part} ({finding.gap})" for finding in findings if isinstance(finding, PartGap)]
    if mistakes:
        return "; ".join([*mistakes, *(f"also differs: {words}" for words in rest)])
    also = f", also differs: {', '.join(rest[1:])}" if rest[1:] else ""
    return f"not one of the known mistakes; the first difference is in {rest[0]}{also}"


def _variant(pair: Pair, agrees: Callable[[nn.Module, dict[str, Tensor]], bool]) -> str | None:
    """Return, in words, the option of our scheme or the swap of our parameters that explains all results, or None."""
    for words, adapter in _other_adapters(pair.adapter):
        try:
            stream = adapter.reference().to(pair.dtype)
            part: nn.Module = stream if pair.whole else stream.connections[adapter.index]  # type: ignore[assignment,index]
            shapes = {name: parameter.shape for name, parameter in named_once(part).items()}
            if shapes == {name: x.shape for name, x in pair.ours.items()} and agrees(part, pair.ours):
                return words
        except Exception:  # the width or the machine may exclude the option
            continue
    for words, ours in _swaps(pair):
        if agrees(pair.part, ours):
            return words
    return None


def _other_adapters(adapter: Adapter) -> Iterator[tuple[str, Adapter]]:
    """Yield the adapter with another eps or option, and the difference in words.

    An option takes all its choices; a number takes the values that a module without this factor would have.
    """
    for eps in {0.0, 1e-8, torch.finfo(torch.float32).eps, 1e-6, 1e-5, 1e-3} - {adapter.norm_eps}:
        yield (
            f"agrees with norm_eps={eps:.3g}, the adapter says {adapter.norm_eps:.3g}",
            with_attributes(adapter, norm_eps=eps),
        )
    scheme, hints = adapter.scheme, types_of(type(adapter.scheme))
    for option in (field.name for field in fields(scheme)):
        value, hint = getattr(scheme, option), hints[option]
        choices: tuple[Any, ...] = ()
        if get_origin(hint) is Literal:
            choices = get_args(hint)
        elif hint is bool:
            choices = (False, True)
        elif hint is float:
            choices = (0.0, 1.0, value / 2, value * 2)
        for choice in (choice for choice in choices if choice != value):
            with suppress(ValueError):  # the other options exclude this value
                other = replace(scheme, **{option: choice})
                yield (
                    f"agrees with our {type(scheme).__name__}({option}={choice!r})",
                    with_attributes(adapter, scheme=other),
                )


def _swaps(pair: Pair) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield our parameters with two scales exchanged, or with the rows of H_pre and H_post exchanged."""
    for name, value in pair.ours.items():
        if value.dim() == 1 and 2 <= len(value) <= 3:
            for i, j in combinations(range(len(value)), 2):
                order = list(range(len(value)))
                order[i], order[j] = j, i
                yield f"entries {i} and {j} of {name} are swapped", {**pair.ours, name: value[order]}
    n = getattr(pair.adapter.scheme, "num_streams", 0)
    swapped = _reordered(pair, [*range(n, 2 * n), *range(n), *range(2 * n, n * n + 2 * n)])
    if swapped:
        yield f"the rows of H_pre and H_post in {' and '.join(swapped)} are swapped", {**pair.ours, **swapped}
    pairs = [[n + 2 * k, n + 2 * k + 1] for k in range(max(1, n).bit_length() - 1)]  # identity and swap of each factor
    for words, rows in {
        "the factors of the Kronecker product are in the opposite order": [*pairs[::-1]],
        "the identity and the swap of each factor of the Kronecker product are exchanged": [p[::-1] for p in pairs],
    }.items():
        end = n + 2 * len(pairs)
        swapped = _reordered(pair, [*range(n), *(i for row in rows for i in row), *range(end, end + n)])
        if swapped and isinstance(pair.adapter.scheme, KroneckerHyperConnections):
            yield words, {**pair.ours, **swapped}


def _reordered(pair: Pair, order: list[int]) -> dict[str, Tensor]:
    """Return our parameters after reordering the rows for the logits of H_pre, H_post and H_res."""
    return {name: value[order] for name, value in pair.ours.items() if value.shape[:1] == (len(order),)}


def _constants(pair: Pair) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield our parameters with one bias, scale or gain left out: set to 0 or 1 in all connections."""
    kinds: dict[str, list[str]] = {}
    for name in pair.ours:
        kinds.setdefault(re.sub(r"^connections\.\d+\.", "", name), []).append(name)
    for kind, names in kinds.items():
        for value in (0, 1):
            constants = {name: torch.full_like(pair.ours[name], value) for name in names}
            yield f"{kind} has no influence: agrees with {kind} = {value}", {**pair.ours, **constants}


def _left_out(pair: Pair, agrees: Callable[[nn.Module, dict[str, Tensor]], bool]) -> str | None:
    """Return the norm in our module without which the modules agree, in words; None if there is none."""
    for kind, modules in _kinds(pair.part).items():
        hook = next((hook for norm, hook in WITHOUT_NORM.items() if isinstance(modules[0], norm)), None)
        if hook is None:
            continue
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_hook(hook))  # type: ignore[arg-type]
            if agrees(pair.part, pair.ours):
                return f"a norm is left out: agrees with {kind} of an input that is not normalised"
    return None


def _kinds(part: nn.Module) -> dict[str, list[nn.Module]]:
    """Map paths to the modules inside a connection or a stack; the same module in all connections has one path."""
    kinds: dict[str, list[nn.Module]] = {}
    for path, module in part.named_modules():
        kinds.setdefault(re.sub(r"^connections(\.\d+)?\.?", "", path), []).append(module)
    return kinds


def _bare_gain(norm: RMSNorm, inputs: tuple, output: Tensor) -> Tensor:
    """Hook: return the input of an RMSNorm times its gain, without normalising."""
    return (inputs[0] if norm.weight is None else inputs[0] * norm.weight).to(output.dtype)


def _bare_logits(mappings: StreamLogits, inputs: tuple, logits: list[Tensor]) -> list[Tensor]:
    """Hook: return the logits of the streams without normalising them."""
    factor = (inputs[0].square().mean((-2, -1)).unsqueeze(-1) + mappings.eps).sqrt()
    return [bias + (z - bias) * factor for z, bias in zip(logits, mappings.bias.split(mappings.sizes))]


WITHOUT_NORM: dict[type[nn.Module], Callable] = {RMSNorm: _bare_gain, StreamLogits: _bare_logits}


def _of_stream(pair: Pair, x: Tensor, result: Tensor, reference: Tensor, actual: Calls, expected: Calls) -> Findings:
    for words, mistaken in _mistaken_stacks(pair):
        if pair.agree(result, mistaken(x)):
            return [words]
    states = _states(pair, x)
    first = next((i for i, (a, b) in enumerate(zip(actual, expected)) if not _close(pair, a, b)), None)
    if first is None:
        head = _head(pair, states[-1], result)
        return [head or PartGap("the last write or the head", _gap(pair, result, reference))]
    finding = _read(pair, pair.stream.connections[first], states[first], actual[first], expected[first])  # type: ignore[arg-type]
    if isinstance(finding, str):
        return [f"the read of connection {first} differs: {finding}"]
    before = "the expansion" if first == 0 else f"the write of connection {first - 1}"
    return [finding._replace(part=f"{before} or the read of connection {first}")]


def _states(pair: Pair, x: Tensor) -> list[Any]:
    """Return our state before every connection, and after the last."""
    states = [pair.stream.expand(x)]
    sublayers = bare_sublayers(pair.adapter.dim, pair.adapter.num_sublayers)
    for connection, sublayer in zip(pair.stream.connections, sublayers):
        states.append(connection(states[-1], sublayer))
    return states


def _head(pair: Pair, state: Any, result: Tensor) -> str | None:
    """Return the known mistake that explains the output of the head; None if there is none."""
    if not _alike(state):
        return None
    if isinstance(state, tuple):
        rows = torch.stack(state, -2)
    elif state.dim() == result.dim() + 1:
        rows = state
    else:
        return None
    for words, mistaken in {
        "the mean": rows.mean(-2),
        "the sum": rows.sum(-2),
        "the first": rows[..., 0, :],
        "the last": rows[..., -1, :],
    }.items():
        if pair.agree(result, mistaken):
            return f"the head reads {words} of the {'sources' if isinstance(state, tuple) else 'streams'}"
    return None


def _mistaken_stacks(pair: Pair) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yield stacks with one mistake each: the mistake in words, and the stack as a function of the embedding."""
    stream = pair.stream

    def run(write: Callable[[Connection, Any, Any, Tensor], Any] | None, every: int | None = None):
        def call(x: Tensor) -> Tensor:
            state = stream.expand(x)
            for i, (connection, sublayer) in enumerate(zip(stream.connections, pair.sublayers()), start=1):
                inputs, carry = connection.read(state)  # type: ignore[operator]
                y = sublayer(*as_inputs(inputs))
                state = connection.write(y, carry) if write is None else write(connection, state, carry, y)  # type: ignore[operator]
                if every is not None and i % every == 0:
                    state = stream.expand(stream.collapse(state))
            return stream.collapse(state)

        return call

    if all(isinstance(state, Tensor) and state.dim() == 4 for state in _states(pair, pair.state())):
        for every, words in ((1, "sublayer"), (2, "block")):
            description = f"the streams are collapsed and expanded again after every {words}: they do not persist"
            yield description, run(None, every)
    for words in _mistakes_of_all(pair):

        def write(connection: Connection, state: Tensor, carry: Any, y: Tensor, words=words) -> Tensor:
            return _mistaken_writes(pair, connection, state, carry, y)[words]

        yield words, run(write)


def _mistakes_of_all(pair: Pair) -> list[str]:
    """Return, in words, the mistakes in the write that are possible in every connection of a stack."""
    states = _states(pair, pair.state())
    words: list[dict[str, Tensor]] = []
    for connection, sublayer, state in zip(pair.stream.connections, pair.sublayers(), states):
        inputs, carry = connection.read(state)  # type: ignore[operator]
        words.append(_mistaken_writes(pair, connection, state, carry, sublayer(*as_inputs(inputs))))  # type: ignore[arg-type]
    return [mistake for mistake in words[0] if all(mistake in other for other in words)] if words else []


def _mistaken_writes(pair: Pair, connection: Connection, state: Any, carry: Any, y: Tensor) -> dict[str, Tensor]:
    """Map mistakes to the state after our write with this mistake; {} if the shortcut does not describe the write."""
    shortcut, after = connection.shortcut(state, carry, y), connection.write(y, carry)
    if _is_mixing(shortcut, state):
        wide = shortcut, *(x.to(shortcut.h_res.dtype) for x in (state, y))  # gates may be wider than a state
        if pair.agree(_mix(*wide), after):
            return {words: change(*wide).to(state.dtype) for words, change in MIXING.items()}
    if isinstance(shortcut, RankOne) and isinstance(state, Tensor):
        delta = Delta(pair, connection, state, carry, y, shortcut)
        if delta.describes(after):
            return delta.mistakes()
    return {}


def _is_mixing(shortcut: Any, state: Any) -> bool:
    return (
        isinstance(shortcut, Mixing)
        and isinstance(state, Tensor)
        and shortcut.h_post is not None
        and shortcut.h_res.shape[-1] == state.shape[-2]
    )


def _mix(m: Mixing, state: Tensor, y: Tensor) -> Tensor:
    assert m.h_post is not None
    return m.h_res @ state + m.h_post.unsqueeze(-1) * y.unsqueeze(-2)


MIXING: dict[str, Callable[[Mixing, Tensor, Tensor], Tensor]] = {
    "the mixer is transposed: agrees with H_res^T": lambda m, state, y: _mix(m._replace(h_res=m.h_res.mT), state, y),
    "the mixer is dropped: agrees with H_res = I, computed and thrown away or never applied": lambda m, state, y: (
        state + m.h_post.unsqueeze(-1) * y.unsqueeze(-2)
    ),
    "the mixer acts on the write too: agrees with H_res (X + h_post y)": lambda m, state, y: (
        m.h_res @ (state + m.h_post.unsqueeze(-1) * y.unsqueeze(-2))
    ),
    "H_pre takes the place of H_post in the write": lambda m, state, y: _mix(
        m._replace(h_post=m.h_post if m.h_pre is None else m.h_pre), state, y
    ),
}


def _of_connection(pair: Pair, state: Any, result: Any, reference: Any, actual: Calls, expected: Calls) -> Findings:
    connection = pair.connection
    inputs, carry = connection.read(state)
    y = pair.sublayers()(*as_inputs(inputs))
    shortcut = connection.shortcut(state, carry, y)
    wrong: Findings = []
    if not _close(pair, actual[0], expected[0]):
        wrong.append(_read(pair, connection, state, actual[0], expected[0]))
    # If sublayers return the same for every input, only the write can differ.
    after, still, truth, fixed = (
        call(pair.ours, state, lambda *_, value=value: value.clone())
        for value, call in (
            (y, pair.candidate),
            (torch.zeros_like(y), pair.candidate),
            (torch.zeros_like(y), pair.reference),
            (y, pair.reference),
        )
    )
    if not _close(pair, tensors(after), tensors(fixed)):
        if _close(pair, tensors(after), tensors(still)):
            wrong.append("the output of the sublayer is not written: the state is the same whatever it returns")
        elif _is_mixing(shortcut, state):
            wrong += _mixer(pair, shortcut, state, still, truth)
            wrong += _write(pair, shortcut, y, after - still)
        elif isinstance(shortcut, RankOne) and isinstance(state, Tensor):
            wrong.append(Delta(pair, connection, state, carry, y, shortcut).finding(after, fixed))
        else:
            wrong.append(PartGap("the write", _gap(pair, after, fixed)))
    if not wrong:  # each part is right, only the whole is wrong
        wrong.append(PartGap("the state", _gap(pair, result, reference)))
    return wrong


def _mixer(pair: Pair, m: Mixing, state: Tensor, still: Tensor, truth: Tensor) -> Findings:
    """Describe the mistake of a module in H_res X, which is its result if nothing is written."""
    if pair.agree(still, truth):
        return []
    state, still, truth = (x.to(m.h_res.dtype) for x in (state, still, truth))  # gates may be wider than a state
    mistake = _closest(pair, still, _mistaken_mixtures(pair, m, state, still))
    if mistake is not None:
        return [mistake]
    # With at least as many features as streams, the matrix can be computed from H X = result.
    measured = torch.linalg.lstsq(state.mT, still.mT).solution.mT
    if state.shape[-1] < state.shape[-2] or not pair.agree(measured @ state, still):
        return [PartGap("the mixing of the streams", _gap(pair, still, truth))]
    if pair.adapter.scheme.constraint == "doubly stochastic":
        rows, columns, *ours = (
            (x - 1).abs().max().item() for h_res in (measured, m.h_res) for x in (h_res.sum(-1), h_res.sum(-2))
        )
        if max(rows, columns) > max(4 * max(ours), TOLERANCES[pair.dtype][0]):
            return [f"the mixer is not doubly stochastic: rows sum to 1 up to {rows:.1g}, columns up to {columns:.1g}"]
    gap = (measured - m.h_res).abs().max().item()
    return [PartGap("the mixer", f"by up to {gap:.2g} in an entry of H_res")]


def _mistaken_mixtures(pair: Pair, m: Mixing, state: Tensor, still: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in words, with H_res X of our connection with this mistake. still: H_res X of the module."""
    nothing = torch.zeros_like(state[..., 0, :])
    for words, change in MIXING.items():
        yield words, change(m, state, nothing)
    yield (
        "all streams leave the connection equal: they are collapsed and expanded again, and do not persist",
        still[..., :1, :].expand_as(still),
    )
    declared = getattr(pair.adapter.scheme, "iterations", None)
    if isinstance(declared, int):
        for count in range(1, max(101, declared + 1)):
            other = _reference_with(pair, pair.ours, iterations=count)
            for words, mixed in (("", other.h_res), (" of the transposed matrix", other.h_res.mT)):
                yield f"Sinkhorn makes {count} iterations{words}, expected {declared}", mixed @ state
        n = state.shape[-2]
        order = [*range(2 * n), *(2 * n + torch.arange(n * n).view(n, n).T.flatten()).tolist()]
        turned = _reference_with(pair, {**pair.ours, **_reordered(pair, order)}).h_res
        yield (
            "Sinkhorn divides in the other order: the sums that ours divides by first are exact",
            turned.mT @ state,
        )
        yield "the logits of H_res are transposed, before Sinkhorn", turned @ state


def _closest(pair: Pair, result: Tensor, mistakes: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the mistake that explains a result, in 16 bits the closest of those that agree with it; None if none does.

    mistakes: pairs of the words for a mistake and the result of our module with it.
    """
    agreeing = ((words, other) for words, other in mistakes if pair.agree(result, other))
    if pair.dtype.itemsize > 2:  # one at most agrees
        return next((words for words, _ in agreeing), None)
    return min(agreeing, key=lambda one: (result - one[1]).norm().item(), default=(None,))[0]


def _reference_with(pair: Pair, ours: Mapping[str, Tensor], **options: Any) -> Mixing:
    """Return the coefficients of our connection with other options or other parameters."""
    other = with_attributes(pair.adapter, scheme=replace(pair.adapter.scheme, **options))
    stream = other.reference().to(pair.dtype)
    connection = stream.connections[pair.adapter.index]  # type: ignore[attr-defined]
    state = pair.state()
    with holding(connection, ours):
        return connection.shortcut(state, connection.read(state)[1], state[..., 0, :])  # type: ignore[operator,union-attr]


def _write(pair: Pair, m: Mixing, y: Tensor, written: Tensor) -> Findings:
    """Describe the mistake of a module in the write h_post y."""
    assert m.h_post is not None
    y, written = (x.to(m.h_res.dtype) for x in (y, written))
    expected = m.h_post.unsqueeze(-1) * y.unsqueeze(-2)
    if pair.agree(written, expected):
        return []
    ratio = ((written * expected).sum() / expected.square().sum()).item()
    if pair.agree(written, ratio * expected):
        return [f"the write is {ratio:.4g} times H_post y: look for a factor, such as the 2 of 2 sigmoid"]
    mistakes = {
        "H_pre takes the place of H_post in the write": m.h_pre,
        "H_post is dropped": torch.ones_like(m.h_post),
        "H_post is 1 + tanh(z), which is 2 sigmoid(2 z)": 1 + (m.h_post / (2 - m.h_post)).log().tanh(),
    }
    results = {
        words: weights.unsqueeze(-1) * y.unsqueeze(-2) for words, weights in mistakes.items() if weights is not None
    }
    results["the mixer acts on the write too: agrees with H_res (X + h_post y)"] = m.h_res @ expected
    mistake = _closest(pair, written, results.items())
    return [PartGap("the write", _gap(pair, written, expected)) if mistake is None else mistake]


def _read(pair: Pair, connection: Connection, state: Any, actual: tuple, expected: tuple) -> str | PartGap:
    """Describe the mistake of a module in the input of the sublayer."""
    if len(actual) != len(expected):
        return f"the sublayer gets {len(actual)} inputs, expected {len(expected)}"
    mistake = _known_read(pair, connection, state, actual, expected)
    if mistake is not None:
        return mistake
    part = next(i for i, (a, b) in enumerate(zip(actual, expected)) if not pair.agree(a, b))
    subject = f"input {part} of the sublayer" if len(actual) > 1 else "the read"
    return PartGap(subject, _gap(pair, actual[part], expected[part]))


def _known_read(pair: Pair, connection: Connection, state: Any, actual: tuple, expected: tuple) -> str | None:
    """Return the known mistake that explains the input of the sublayer; None if there is none."""
    if len(actual) != 1 or len(expected) != 1 or not _alike(state):
        return None
    inputs, carry = connection.read(state)
    (result,) = actual
    norm = getattr(connection, "norm", nn.Identity())
    mixtures: dict[str, Tensor] = {}
    if isinstance(state, tuple):
        rows = torch.stack(state, -2)
        mixtures["the depth weights are dropped: it reads the mean of the sources"] = rows.mean(-2)
        mixtures["the depth weights are dropped: it reads the sum of the sources"] = rows.sum(-2)
        mixtures["it reads only the last source"] = rows[..., -1, :]
        weights = getattr(carry.coefficients, "weights", None)
        if isinstance(weights, Tensor) and weights.shape == rows.shape[:-1]:
            for i, source in ((0, "first"), (-1, "last")):
                masked = weights.clone()
                masked[..., i] = 0
                read = ((masked / masked.sum(-1, keepdim=True)).unsqueeze(-1) * rows).sum(-2)
                mixtures[f"the {source} source is missing"] = read
            attend = getattr(connection, "attend", None)
            if attend is not None and getattr(attend, "heads", 0) == 1:
                for gain, mistake in (
                    (attend.gain, "the keys are not normalised"),
                    (1.0, "the keys have no norm and no gain"),
                ):
                    scores = (rows * gain * attend.query).sum(-1)
                    mixtures[mistake] = (scores.softmax(-1).unsqueeze(-1) * rows).sum(-2)
            unit = (weights.unsqueeze(-1) * rms_norm(rows, None, 1e-5)).sum(-2)
            mixtures["the values are normalised, not only the keys"] = unit
            scaled = (weights.log() / rows.shape[-1] ** 0.5).softmax(-1)
            mixtures["the logits are divided by sqrt(d)"] = (scaled.unsqueeze(-1) * rows).sum(-2)
    else:
        shortcut = connection.shortcut(state, carry, torch.zeros_like(as_inputs(inputs)[0]))
        if _is_mixing(shortcut, state):
            assert isinstance(shortcut, Mixing)
            assert shortcut.h_post is not None
            mixtures["H_pre is dropped: it reads the mean of the streams"] = state.mean(-2)
            for i in range(state.shape[-2]):
                mixtures[f"H_pre is dropped: it reads stream {i}"] = state[..., i, :]
            mixtures["H_post takes the place of H_pre in the read"] = (shortcut.h_post.unsqueeze(-1) * state).sum(-2)
            if shortcut.h_pre is not None:
                odds = shortcut.h_pre / (1 - shortcut.h_pre)
                shares = odds / odds.sum(-1, keepdim=True)
                mixtures["H_pre is a softmax over the streams, not a sigmoid"] = (shares.unsqueeze(-1) * state).sum(-2)
            if shortcut.h_pre is not None and pair.agree(result, (shortcut.h_pre.unsqueeze(-1) * state).sum(-2)):
                return "the norm before the sublayer is missing"
    return _closest(pair, result, ((words, norm(mixture)) for words, mixture in mixtures.items()))


class Delta:
    """The delta write X + beta k (v^T - k^T X) of one of our connections, for comparison with a module's write.

    wide: the state (batch, seq, rows, dim); gate: beta with an axis for the rows; k: (batch, seq, dim); v and the
    readout k^T X: (batch, seq, rows), as in `RankOne`.
    """

    def __init__(self, pair: Pair, connection: Connection, state: Tensor, carry: Any, y: Tensor, shortcut: RankOne):
        self.pair, self.connection, self.carry, self.y, self.state = pair, connection, carry, y, state
        beta, self.k, self.readout, self.v, _ = shortcut
        self.wide = state if state.dim() == self.k.dim() + 1 else state.unsqueeze(-2)
        self.gate = beta.unsqueeze(-1)

    def describes(self, after: Tensor) -> bool:
        """Return whether the write of our connection equals its shortcut."""
        return self.v is not None and self.pair.agree(self.moved(self.gate * (self.v - self.readout)), after)

    def moved(self, step: Tensor, direction: Tensor | None = None) -> Tensor:
        """Return the state after a step of size `step`, (batch, seq, rows), along k or along another direction."""
        direction = self.k if direction is None else direction
        return (self.wide + step.unsqueeze(-1) * direction.unsqueeze(-2)).view_as(self.state)

    def along(self, direction: Tensor) -> Tensor:
        """Return the state after our write with another direction in place of k."""
        return self.moved(self.gate * (self.v - (self.wide * direction.unsqueeze(-2)).sum(-1)), direction)

    def finding(self, after: Tensor, reference: Tensor) -> str | PartGap:
        """Describe the mistake of a module. after: its state after the write; reference: ours."""
        gap = _gap(self.pair, after, reference)
        if not self.describes(reference):
            return PartGap("the write", _gap(self.pair, after - self.state, reference - self.state))
        taken = after.view_as(self.wide) - self.wide
        step = (taken * self.k.unsqueeze(-2)).sum(-1)
        if not self.pair.agree(self.moved(step), after):
            return self.known(after) or PartGap("the write, which is not along k", gap)
        return self.measured(step) or self.known(after) or PartGap("the write, which is along k", gap)

    def known(self, after: Tensor) -> str | None:
        return next((words for words, other in self.mistakes().items() if self.pair.agree(after, other)), None)

    def measured(self, step: Tensor) -> str | None:
        """Fit step = a beta v - b beta k^T X by least squares, and describe a and b; None if the fit is not exact."""
        parts = torch.stack([(self.gate * part).expand_as(step).flatten() for part in (self.v, -self.readout)], -1)
        a, b = torch.linalg.lstsq(parts, step.flatten().unsqueeze(-1)).solution.flatten().tolist()
        if not self.pair.agree((parts @ parts.new_tensor([a, b])).view_as(step), step):
            return None
        return _factors(a, b, self.k.shape[-1])

    def mistakes(self) -> dict[str, Tensor]:
        """Return the states after our write with one mistake each, keyed by the mistake in words."""
        gate, v, readout, y = self.gate, self.v, self.readout, self.y
        assert v is not None
        step = gate * (v - readout)
        update = self.moved(step) - self.state
        dim = self.k.shape[-1]
        factors = [*FACTORS, *((size, size * size) for size in _roots(dim).values())]
        known = {_factors(a, b, dim): self.moved(gate * (a * v - b * readout)) for a, b in factors} | {
            "beta gates only what is written: agrees with X - k k^T X + beta k v^T": self.moved(gate * v - readout),
            "beta gates only what is erased: agrees with X - beta k k^T X + k v^T": self.moved(v - gate * readout),
            "beta is 1 + tanh(z), which is 2 sigmoid(2 z)": self.moved(
                (1 + (gate / (2 - gate)).log().tanh()) * (v - readout)
            ),
            "the update takes the place of the state: agrees with beta k (v - k^T X)": update,
            "the state is multiplied by the update, not added to it": self.state * update,
            "the sublayer's output is added as well: agrees with X + beta k (v - k^T X) + y": (
                self.wide + update.view_as(self.wide) + y.unsqueeze(-2)
            ).view_as(self.state),
        }
        raw = self.raw()
        length = raw.norm(dim=-1, keepdim=True)
        if self.pair.agree(raw, length * self.k):
            known["k is normalised in the erasure, not in the write"] = self.moved(gate * (length * v - readout))
            known["k is normalised in the write, not in the erasure"] = self.moved(gate * (v - length * readout))
        known |= {words: self.along(k) for words, k in self.directions(raw).items()}
        for source, x in self.inputs().items():
            for symbol, part in (("v", "value"), ("beta", "beta")):
                with suppress(Exception):  # the connection may lack this part, or have another width
                    value = getattr(self.connection, part)(x)
                    other = gate * (value - readout) if symbol == "v" else value.unsqueeze(-1) * (v - readout)
                    known[f"{symbol} is computed from {source}"] = self.moved(other)
        return known

    def inputs(self) -> dict[str, Tensor]:
        """Map words to the possible inputs of a gate or a value."""
        seen: list[Tensor] = []
        norm = getattr(self.connection, "norm", nn.Identity())
        with norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
            context, _ = self.connection.read(self.state)
        inputs = {"the sublayer's output": self.y, "the context, the norm of x_in": as_inputs(context)[0]}
        return inputs | ({"x_in, without the norm": seen[0]} if seen else {})

    def raw(self) -> Tensor:
        """Return the direction before normalisation, from the carry or from the sublayer's output."""
        raw = getattr(self.carry.coefficients, "k", None)
        return self.y if raw is None else raw

    def directions(self, raw: Tensor) -> dict[str, Tensor]:
        """Map mistakes, in words, to the directions that wrong normalisations give."""
        centred = raw - raw.mean(-1, keepdim=True)
        return {
            "k is not normalised": raw,
            "k is divided by its L1 norm": raw / raw.abs().sum(-1, keepdim=True),
            "k is divided by its largest entry": raw / raw.abs().amax(-1, keepdim=True),
            "k is divided by the square of its norm": raw / raw.square().sum(-1, keepdim=True),
            "k is normalised over the tokens, not over the features": raw / raw.norm(dim=1, keepdim=True),
            "k is normalised over the batch, the tokens and the features at once": raw / raw.norm(),
            "k is centred before it is normalised, as by a LayerNorm": centred / centred.norm(dim=-1, keepdim=True),
            "k is a softmax over the features": raw.softmax(-1),
        }


FACTORS = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (-1.0, -1.0), (1.0, -1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 2.0))
"""Factors on the written and the erased part to try for stacks, where they cannot be computed."""


def _factors(a: float, b: float, dim: int) -> str:
    """Explain in words the factors a and b in the delta write a beta v - b beta k^T X."""

    def near(x: float, y: float) -> bool:
        return abs(x - y) <= 1e-4 * max(abs(x), abs(y), 1e-2)

    if near(a, 1) and near(b, 0):
        return "nothing is erased: agrees with X + beta k v^T"
    if near(a, 0) and near(b, 1):
        return "nothing is written: agrees with X - beta k k^T X"
    if near(a, b) and near(a, 0.5):
        return "beta lacks its factor 2: agrees with half the step"
    if near(a, b) and near(a, -1):
        return "the delta has the wrong sign"
    words = f"writes {a:.4g} beta v and erases {b:.4g} beta k^T X"
    if near(b, -1) and near(a, 1):
        return f"{words}: the part to erase is added"
    if near(a, b):
        return f"{words}: the step is {a:.4g} times ours"
    if near(b, a * a) and a > 0:
        size = next((f" = {root}" for root, value in _roots(dim).items() if near(a, value)), "")
        return f"{words}: |k| is {a:.4g}{size} and must be 1"
    if near(b, 1):
        return f"{words}: v is {a:.4g} times ours"
    return f"{words}: k^T X is {b:.4g} times ours" if near(a, 1) else words


def _roots(dim: int) -> dict[str, float]:
    return {"1/sqrt(d)": dim**-0.5, "sqrt(d)": dim**0.5, "1/d": 1 / dim, "d": float(dim)}


class Detached(nn.Module):
    """Our connection or stack with one coefficient detached from autograd; "y" means the sublayer's output."""

    def __init__(self, part: nn.Module, symbol: str):
        super().__init__()
        self.part, self.symbol = part, symbol

    def connect(self, connection: Connection, state: Any, sublayer: Callable[..., Tensor]) -> Any:
        x, (residual, coefficients) = connection.read(state)
        y = sublayer(*as_inputs(x))
        if self.symbol == "y":
            y = y.detach()
        elif (value := getattr(coefficients, self.symbol, None)) is not None:
            coefficients = coefficients._replace(**{self.symbol: value.detach()})
        return connection.write(y, Carry(residual, coefficients))

    def forward(self, state: Any, sublayer: Any) -> Any:
        if isinstance(self.part, Connection):
            return self.connect(self.part, state, sublayer)
        state = self.part.expand(state)  # type: ignore[operator]
        for connection, function in zip(self.part.connections, sublayer):  # type: ignore[arg-type]
            state = self.connect(connection, state, function)
        return self.part.collapse(state)  # type: ignore[operator]


def frozen(pair: Pair, agrees: Callable[[Callable], bool]) -> str | None:
    """Return, in words, the part that is detached in the module, if this explains all gradients; otherwise None.

    agrees: a function that returns whether a changed version of our module has the gradients of the module under test.
    """
    with torch.no_grad():
        state = _states(pair, normal(1, 2, pair.adapter.dim).to(pair.dtype))[pair.adapter.index]
        coefficients = pair.connection.read(state)[1].coefficients
    symbols = [symbol for symbol, value in coefficients._asdict().items() if value is not None]
    for symbol in [*symbols, "y"]:
        part = Detached(pair.part, symbol)

        def call(ours, state, sublayer, part=part):
            return pair.reference({f"part.{name}": value for name, value in ours.items()}, state, sublayer, part)

        if agrees(call):
            if symbol == "y":
                return "no gradient passes through the sublayer: its input or its output is detached"
            return f"{symbol} is frozen: agrees with {symbol}.detach(), no gradient passes through it"
    for kind, modules in _kinds(pair.part).items():
        if not kind or isinstance(modules[0], nn.ModuleList):
            continue
        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(_detached_inputs))
            if agrees(pair.reference):
                return f"the input of {kind} is detached: no gradient passes through it to the state"
    return None


def _detached_inputs(module: nn.Module, inputs: tuple) -> tuple:
    return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, inputs)


def _alike(state: Any) -> bool:
    """Return whether all tensors of a state have the same shape, as sources do."""
    return len({leaf.shape for leaf in tensors(state)}) == 1


def _close(pair: Pair, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(pair.agree, actual, expected))


def _gap(pair: Pair, result: Any, reference: Any) -> str:
    """Describe the difference of two states by the first tensor that differs."""
    for a, b in zip(tensors(result), tensors(reference)):
        gap = pair.disagreement(a, b)
        if gap:
            ratio = (a * b).sum() / b.square().sum()
            return f"{gap}; it is {ratio:.4g} times ours" if pair.agree(a, ratio * b) and b.any() else gap
    return "it agrees"


def dtype_hint(pair: Pair, result: Any, reference: Any) -> str:
    """Return a hint about dtypes if the modules agree to float32 precision, otherwise ""."""
    close = pair.dtype == torch.float64 and all(
        agree(a, b, dtype=torch.float32, factor=0.1) for a, b in zip(tensors(result), tensors(reference))
    )
    return f"; it agrees to float32: {FLOAT32_HINT}" if close else ""
