"""The contract of a scheme: the properties on which callers that know only `read` and `write` rely.

    from residua.testing import check_scheme
    check_scheme(MyScheme())

Each check is a function of a scheme: it returns, or raises AssertionError with the mistake. Parameters are perturbed,
because a gate that starts at zero hides mistakes in the term that it multiplies.
"""

import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError, gradcheck
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import checkpoint

from residua.connections import Carry, Residual, Scheme, Stream, StreamMemory
from residua.connections.base import as_inputs
from residua.connections.parts.memory import memory_of, window_of
from residua.connections.registry import written
from residua.testing.agreement import assert_close
from residua.testing.checks import (
    CheckFailed,
    CheckFunction,
    NotChecked,
    Report,
    Suite,
    equal,
    expect,
    require,
    run,
    seeded,
    tensors,
)
from residua.testing.inputs import bare_sublayers, normal, perturbed, recorded
from residua.testing.starts import SEEDS, different_draws, drawn

DIM, SUBLAYERS = 8, 4

CONTRACT = Suite()
"""The checks of a scheme by name, in order."""


def checks(*, compiled: bool = False, dim: int = DIM) -> dict[str, CheckFunction]:
    """Return the checks of a scheme of width `dim` by name; `compiled` adds those that call a compiler."""
    suite = CONTRACT | ({"compiles": seeded(compiles)} if compiled else {})
    return {name: partial(check, dim=dim) for name, check in suite.items()}


def check_scheme(scheme: Scheme, *, compiled: bool = False, dim: int = DIM) -> Report:
    """Check that `scheme` keeps the contract of `residua.Scheme`, and return the report.

    Also check your scheme with options other than the defaults: a check covers only the parts that these options use.
    compiled: also check under torch.compile, which takes a minute.
    dim: the width of the streams, another if the options exclude 8: a multiple of 12 for 12 heads.

    Raises:
        TypeError: `scheme` is not an instance of `residua.Scheme`.
        AssertionError: checks failed; the message has a line for each reason.
    """
    expect_scheme(scheme)
    title = f"{type(scheme).__name__} breaks the contract of a scheme"
    return require(run(checks(compiled=compiled, dim=dim), scheme), title)


def expect_scheme(scheme: Any) -> None:
    """Raise TypeError unless `scheme` is an instance of a scheme."""
    if not isinstance(scheme, Scheme):
        raise TypeError(f"check_scheme needs an instance of a residua.Scheme, got {scheme!r}")


def build(scheme: Scheme, dim: int, dtype: torch.dtype = torch.float64, *, count: int = SUBLAYERS) -> Stream:
    """Build the stream of a scheme with perturbed parameters, in evaluation mode (training may be random)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # gates in bfloat16 are intended here, and would warn
        stream = scheme.build(dim, count)
        lazy = [name for name, value in stream.named_parameters() if isinstance(value, UninitializedParameter)]
        expect(not lazy, f"parameters must exist after build, these wait for an input: {', '.join(lazy)}")
        return perturbed(stream).to(dtype).eval()


def outputs(stream: Stream, x: Tensor) -> Tensor:
    """Return the outputs of the stream around sublayers without parameters."""
    return stream(x, bare_sublayers(x.shape[-1], len(stream.connections)))


def matches(state: Any, spec: Any, batch: tuple[int, ...]) -> bool:
    """Return whether a state has the structure of `spec` and the leading axes `batch`."""
    specs, structure = tree_flatten(spec)
    leaves, built = tree_flatten(state)
    return structure == built and [(*batch, *leaf.shape) for leaf in specs] == [tuple(leaf.shape) for leaf in leaves]


def expect_causal(scheme: Scheme) -> None:
    """Raise NotChecked for a scheme that sees later tokens, because its sequences never arrive in pieces."""
    if not scheme.causal:
        raise NotChecked("the scheme says that it is not causal")


def toy(x: Any) -> Tensor:
    """Return the output of a sublayer for the inputs that `read` returned."""
    return sum(torch.tanh((1 + i) * part) for i, part in enumerate(as_inputs(x)))  # type: ignore[return-value]


def walked(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a module and its submodules by path, including values inside containers and objects."""
    visited: set[int] = set()

    def inside(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        yield path, value
        if id(value) in visited:
            return
        visited.add(id(value))
        if isinstance(value, nn.Module):
            registers = ("_parameters", "_buffers", "_modules")
            parts: dict[Any, Any] = {key: part for key, part in vars(value).items() if key not in registers}
            parts |= {**value._parameters, **value._buffers, **value._modules}
        elif isinstance(value, dict):
            parts = dict(value)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            parts = dict(enumerate(value))
        elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType, FunctionType, Tensor)):
            parts = dict(vars(value))
        else:
            return
        for key, part in parts.items():
            yield from inside(f"{path}.{key}".lstrip("."), part)

    return inside("", module)


@CONTRACT.add
def declares_itself(scheme: Scheme, dim: int = DIM) -> None:
    """A scheme is a frozen dataclass with an equation and a source. It can be hashed, and rebuilt from a file."""
    kind = type(scheme)
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    expect(frozen and "__dataclass_fields__" in vars(kind), f"{kind.__name__} must itself be a frozen dataclass")
    for name in ("equation", "paper"):
        text = getattr(scheme, name, None)
        expect(
            isinstance(text, str) and text, f"{name} must be a class attribute with a text, not a field, got {text!r}"
        )
    try:
        hash(scheme)
    except TypeError as error:
        raise CheckFailed(f"the scheme cannot be hashed: {error}; use tuples in place of lists") from error
    try:
        written(scheme)
    except ValueError as error:
        raise CheckFailed(str(error)) from error


@CONTRACT.add
def shapes(scheme: Scheme, dim: int = DIM) -> None:
    """States have the shapes in `state_spec`; the inputs of a sublayer and the readout are (batch, seq, dim)."""
    stream = build(scheme, dim)
    x = normal(2, 5, dim)
    expect(len(stream.connections) == SUBLAYERS, f"{len(stream.connections)} connections for {SUBLAYERS} sublayers")

    state = stream.expand(x)
    expect(matches(state, scheme.state_spec(0, dim), (2, 5)), "state_spec(0) does not describe the result of expand")
    for boundary, connection in enumerate(stream.connections, start=1):
        inputs, carry = connection.read(state)
        for part in as_inputs(inputs):
            expect(part.shape == x.shape, f"read gives {tuple(part.shape)} for x of (batch, seq, dim) {tuple(x.shape)}")
        expect(isinstance(carry, Carry), f"read gives {type(carry).__name__} as its second result, expected a Carry")
        expect(hasattr(carry.coefficients, "_fields"), "coefficients must be a NamedTuple of the paper's symbols")
        state = connection.write(toy(inputs), carry)
        actual = [tuple(leaf.shape) for leaf in tensors(state)]
        described = scheme.state_spec(boundary, dim)
        expect(matches(state, described, (2, 5)), f"state_spec({boundary}) is {described}, the state has {actual}")
        size = sum(leaf[0, 0].numel() for leaf in tensors(state))
        expect(scheme.state_size(boundary, dim) == size, f"state_size({boundary}) differs from the state's {size}")
    actual = stream.collapse(state).shape
    expect(actual == x.shape, f"collapse gives {tuple(actual)}, expected (batch, seq, dim) {tuple(x.shape)}")


@CONTRACT.add
def any_number_of_sublayers(scheme: Scheme, dim: int = DIM) -> None:
    """A stack of one sublayer, or of an odd number, computes finite numbers, and states are as in `state_spec`."""
    for count in (1, 3):
        stream = build(scheme, dim, count=count)
        state = stream.expand(normal(2, 5, dim))
        expect(len(stream.connections) == count, f"{len(stream.connections)} connections for {count} sublayers")
        for boundary, connection in enumerate(stream.connections, start=1):
            state = connection(state, lambda *x: toy(x))
            leaves = [tuple(leaf.shape) for leaf in tensors(state)]
            right = matches(state, scheme.state_spec(boundary, dim), (2, 5))
            expect(right, f"of {count} sublayers: state_spec({boundary}) does not describe the state {leaves}")
        expect(stream.collapse(state).isfinite().all(), f"of {count} sublayers: not finite")


@CONTRACT.add
@torch.no_grad()
def shapes_without_numbers(scheme: Scheme, dim: int = DIM) -> None:
    """The stream runs on the meta device, where parameters and memory are estimated."""
    with torch.device("meta"):
        stream = scheme.build(dim, SUBLAYERS).eval()
        out = stream(torch.empty(2, 5, dim), [lambda *x: toy(x)] * SUBLAYERS)
    expect(out.is_meta and out.shape == (2, 5, dim), f"on the meta device: got {tuple(out.shape)}, {out.device}")


@CONTRACT.add
@torch.no_grad()
def the_norm_is_the_one_given(scheme: Scheme, dim: int = DIM) -> None:
    """Sublayer i uses `norm(i)` of `build(..., norm=norm)`: the outputs change if the gain of this norm changes."""
    norms = [perturbed(nn.RMSNorm(dim, eps=1e-5)) for _ in range(SUBLAYERS)]
    stream = perturbed(scheme.build(dim, SUBLAYERS, norm=norms.__getitem__)).double().eval()
    before = outputs(stream, normal(2, 5, dim))
    for i, norm in enumerate(norms):
        norm.weight[0] *= 2
        after = outputs(stream, normal(2, 5, dim))
        expect(not torch.equal(before, after), f"the norm that build() was given for sublayer {i} is not used")
        before = after


@CONTRACT.add
def forward_is_read_then_write(scheme: Scheme, dim: int = DIM) -> None:
    """`connection(state, sublayer)` and `stream(x, sublayers)` equal read, sublayer and write one after the other."""
    stream = build(scheme, dim)
    sublayers = bare_sublayers(dim, SUBLAYERS)
    state = stream.expand(normal(2, 5, dim))
    for connection, sublayer in zip(stream.connections, sublayers):
        x, carry = connection.read(state)
        expected = connection.write(sublayer(*as_inputs(x)), carry)
        state = connection(state, sublayer)
        expect(equal(state, expected), "connection(state, sublayer) differs from read and write")
    out = stream.collapse(state)
    expect(torch.equal(out, outputs(stream, normal(2, 5, dim))), "stream(x, sublayers) differs from its parts")


def penalties(stream: Stream, x: Tensor, mask: Tensor | None = None) -> list[Tensor | None]:
    """Return the penalty of each connection. mask: (batch, seq), 0 at padding."""
    found: list[Tensor | None] = []
    state = stream.expand(x, memory_of(stream.expand, None, mask, None))
    for connection, sublayer in zip(stream.connections, bare_sublayers(x.shape[-1], len(stream.connections))):
        inputs, carry = connection.read(state, memory_of(connection, None, mask, None))
        found.append(connection.penalty(carry.coefficients))
        state = connection.write(sublayer(*as_inputs(inputs)), carry)
    return found


@CONTRACT.add
def penalty_is_of_each_token_or_none(scheme: Scheme, dim: int = DIM) -> None:
    """An auxiliary loss is a finite number for each token, for each row or for all, and has a gradient.

    Neither padding nor, in a causal scheme, a later token changes the numbers of tokens.
    """
    stream = build(scheme, dim)
    x = normal(2, 3, dim)
    later = x.index_fill(1, torch.tensor([2]), 3.0)
    for penalty, another in zip(*(penalties(stream, x.requires_grad_()) for x in (x, later))):
        if penalty is not None:
            shape, shapes = tuple(penalty.shape), ((2, 3), (2, 1), ())
            expect(shape in shapes, f"penalty must be (batch, seq), (batch, 1) or a scalar, {shapes}, got {shape}")
            expect(penalty.isfinite().all(), f"penalty must be finite numbers, got {penalty}")
            expect(penalty.requires_grad, "penalty: no gradient reaches the parameters or the state")
            words = "penalty: a scalar that depends on the tokens counts padding; return (batch, seq)"
            expect(shape or torch.equal(penalty, another), words)
            earlier, same = (each.expand(2, 3)[:, :2] for each in (penalty, another))
            right = not scheme.causal or torch.equal(earlier, same)
            expect(right, "penalty: a later token changes the penalty of earlier ones")
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    try:
        padded = penalties(stream, x, mask)
    except ValueError:  # the scheme takes no padding
        return
    for i, start in enumerate((1, 0)):
        for penalty, alone in zip(padded, penalties(stream, x[i : i + 1, start:])):
            if penalty is not None and alone is not None:
                tokens, expected = penalty.expand(2, 3)[i, start:], alone.expand(1, 3 - start)[0]
                assert_close(tokens, expected, what="penalty: padding changes the penalty of tokens")


@CONTRACT.add
def telemetry_has_its_shapes(scheme: Scheme, dim: int = DIM) -> None:
    """Streams are (batch, seq, n, dim); weights over depth have a column for every source and a row for every read."""
    stream = build(scheme, dim)
    state = stream.expand(normal(2, 5, dim))
    for i, (connection, sublayer) in enumerate(zip(stream.connections, bare_sublayers(dim, SUBLAYERS))):
        x, carry = connection.read(state)
        after = connection.write(sublayer(*as_inputs(x)), carry)
        for streams in filter(lambda x: x is not None, map(connection.streams, (state, after))):
            shape = tuple(streams.shape)
            right = len(shape) == 4 and (*shape[:2], shape[3]) == (2, 5, dim)
            expect(right, f"streams of connection {i} must be (batch, seq, n, dim), got {shape}")
        depth, state = connection.depth_weights(carry), after
        if depth is not None:
            shape, sizes = tuple(depth.weights.shape), (max(1, len(depth.reads)), len(depth.sources))
            right = shape[-2:] == sizes and all(n in (1, whole) for n, whole in zip(shape[-3::-1], (5, 2)))
            expect(right, f"depth_weights of connection {i} must be (batch, seq, reads, sources) {sizes}, got {shape}")
            earlier = all(source is None or -1 <= source.start < source.stop <= i for source in depth.sources)
            expect(earlier, f"depth_weights of connection {i}: sources {depth.sources} are not before sublayer {i}")


@CONTRACT.add
def forward_writes_nothing_to_self(scheme: Scheme, dim: int = DIM) -> None:
    """`forward` stores nothing on modules: stored state breaks compilation, checkpointing, and concurrent passes."""
    stream = build(scheme, dim).train()

    def snapshot() -> dict[str, tuple[Any, int]]:
        return {path: (value, value._version if isinstance(value, Tensor) else 0) for path, value in walked(stream)}

    before = snapshot()
    outputs(stream, normal(2, 5, dim).requires_grad_()).sum().backward()
    stream.zero_grad(set_to_none=True)
    after = snapshot()
    changed = before.keys() ^ after.keys()
    for path in before.keys() & after.keys():
        (old, version), (new, now) = before[path], after[path]
        if old is not new:
            changed.add(path)
        elif version != now:
            changed.add(f"{path} in place")
    expect(not changed, f"forward writes to the module: {', '.join(sorted(changed))}")


@CONTRACT.add
def modules_register_what_they_learn(scheme: Scheme, dim: int = DIM) -> None:
    """All modules and tensors are registered; a module in a list, or a plain tensor, is not trained, moved or saved."""
    stream = build(scheme, dim)
    registered = {*map(id, stream.modules()), *map(id, stream.parameters())}
    hidden = [
        name
        for name, value in walked(stream)
        if id(value) not in registered
        and (isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad))
    ]
    expect(not hidden, f"not registered: {', '.join(hidden)}; take nn.Parameter, nn.ParameterList or nn.ModuleList")


@CONTRACT.add
def inputs_are_left_alone(scheme: Scheme, dim: int = DIM) -> None:
    """Neither read nor write changes a state in place."""
    stream = build(scheme, dim)
    x = normal(2, 5, dim)
    state = stream.expand(x)
    for connection in stream.connections:
        copies = tree_map(torch.clone, state)
        inputs, carry = connection.read(state)
        residual = tree_map(torch.clone, carry.residual)
        after = connection.write(toy(inputs), carry)
        expect(equal(state, copies), "read or write changes the state in place")
        expect(equal(carry.residual, residual), "write changes the carry in place")
        state = after
    expect(torch.equal(x, normal(2, 5, dim)), "the embedding is changed in place")


@CONTRACT.add
def causal(scheme: Scheme, dim: int = DIM) -> None:
    """A change at token 3 leaves the outputs of tokens 0 to 2 the same to the last bit."""
    expect_causal(scheme)
    stream = build(scheme, dim)
    x = normal(2, 6, dim)
    other = x.clone()
    other[:, 3] += 1.0
    for mode in ("evaluation", "training"):
        stream.train(mode == "training")
        before, again, after = outputs(stream, x), outputs(stream, x), outputs(stream, other)
        if not torch.equal(before, again):
            continue  # random in training
        words = f"not causal in {mode} mode: a later token changes the outputs of earlier ones"
        expect(torch.equal(before[:, :3], after[:, :3]), words)
        expect(not torch.equal(before[:, 3], after[:, 3]), "a token has no influence on its own output")


@CONTRACT.add
@torch.no_grad()
def batch_entries_do_not_mix(scheme: Scheme, dim: int = DIM) -> None:
    stream = build(scheme, dim)
    x = normal(3, 5, dim)
    entries = torch.cat([outputs(stream, row[None]) for row in x])
    assert_close(entries, outputs(stream, x), what="a batch differs from its entries one by one")


@CONTRACT.add
@torch.no_grad()
def streaming_equals_the_full_pass(scheme: Scheme, dim: int = DIM) -> None:
    """A sequence in pieces gives the same numbers as in one call, even if the pieces are shorter than any kernel."""
    expect_causal(scheme)
    stream = build(scheme, dim)
    length = max(7, max(map(window_of, stream.parts)) + 6)  # a part may read further back than it says
    x = normal(2, length, dim)
    sublayers = bare_sublayers(dim, SUBLAYERS)
    full = outputs(stream, x)
    for split in [(1,) * length, (3, length - 3), (1, length - 1), (2, 1, length - 3)]:
        memory = StreamMemory()
        pieces = [stream(piece, sublayers, memory=memory) for piece in x.split(split, 1)]
        assert_close(torch.cat(pieces, 1), full, what=f"pieces of {split} tokens with one memory differ from the whole")


@CONTRACT.add
@torch.no_grad()
def padding_changes_no_token(scheme: Scheme, dim: int = DIM) -> None:
    """Tokens of rows with different padding, on the left or right, get the same numbers as each row without padding."""
    stream = build(scheme, dim)
    x, far = normal(2, 7, dim), 3 * normal(2, 7, dim, seed=3)
    sublayers = bare_sublayers(dim, SUBLAYERS)
    for side, ends in {"left": [(3, 7), (1, 7)], "right": [(0, 4), (0, 6)]}.items():
        mask = torch.tensor([[start <= i < stop for i in range(7)] for start, stop in ends])
        alone = torch.cat([outputs(stream, row[None, start:stop])[0] for row, (start, stop) in zip(x, ends)])
        try:
            result = stream(torch.where(mask.unsqueeze(-1), x, far), sublayers, attention_mask=mask.long())
        except ValueError as error:
            raise NotChecked(f"the scheme does not take padding: {error}") from error
        assert_close(result[mask], alone, what=f"padding on the {side} changes the outputs of tokens")


@CONTRACT.add
@torch.no_grad()
def pieces_with_padding_equal_the_rows_alone(scheme: Scheme, dim: int = DIM) -> None:
    """Padded rows in pieces give the same numbers as without padding: a memory must not count padding as tokens."""
    expect_causal(scheme)
    stream = build(scheme, dim)
    sublayers = bare_sublayers(dim, SUBLAYERS)
    x, ends = normal(3, 7, dim), [(3, 7), (0, 7), (1, 5)]
    mask = torch.tensor([[start <= i < stop for i in range(7)] for start, stop in ends]).long()
    alone = torch.cat([outputs(stream, row[None, start:stop])[0] for row, (start, stop) in zip(x, ends)])
    for split in [(1, 1, 1, 1, 1, 1, 1), (5, 1, 1), (2, 1, 4)]:
        memory, pieces = StreamMemory(), zip(x.split(split, 1), mask.split(split, 1))
        try:
            results = [stream(piece, sublayers, memory=memory, attention_mask=part) for piece, part in pieces]
        except ValueError as error:
            raise NotChecked(f"the scheme does not take padding in pieces: {error}") from error
        tokens = torch.cat(results, 1)[mask > 0]
        assert_close(tokens, alone, what=f"padding changes the outputs of tokens in pieces of {split}")


@CONTRACT.add
def packed_documents_equal_documents_alone(scheme: Scheme, dim: int = DIM) -> None:
    """Documents packed into rows, which differ in them, give the same outputs and gradients as one row for each."""
    expect_causal(scheme)
    stream = build(scheme, dim)
    x = normal(2, 7, dim).requires_grad_()
    lengths = [(3, 1, 3), (2, 4, 1)]
    documents = torch.tensor([[4, 4, 4, 2, 7, 7, 7], [5, 5, 1, 1, 1, 1, 3]])
    sublayers = bare_sublayers(dim, SUBLAYERS)
    leaves = [x, *stream.parameters()]
    pieces = [row.split(each, 1) for row, each in zip(x.split(1), lengths)]
    alone = torch.cat(
        [torch.cat([stream(piece, sublayers, memory=StreamMemory()) for piece in row], 1) for row in pieces]
    )
    try:
        packed = stream(x, sublayers, documents=documents)
    except ValueError as error:
        raise NotChecked(f"the scheme does not take packed documents: {error}") from error
    assert_close(packed, alone, what="a row of packed documents differs from the documents one by one")
    grad = normal(2, 7, dim, seed=3)
    ours, theirs = (torch.autograd.grad(out, leaves, grad, allow_unused=True) for out in (packed, alone))
    for actual, expected in zip(ours, theirs, strict=True):
        if expected is not None:
            assert_close(actual, expected, what="a gradient of packed documents differs from the documents one by one")


@CONTRACT.add
@torch.no_grad()
def a_part_without_a_window_reads_its_own_token(scheme: Scheme, dim: int = DIM) -> None:
    """A part with `window` 0 reads no earlier token, because generation gives it no memory."""
    expect_causal(scheme)
    stream = build(scheme, dim)
    x = normal(1, 5, dim)
    state = stream.expand(x)
    words = "has no window and reads other tokens: set `window`, and use the memory"
    if not window_of(stream.expand):
        for alone, full in zip(tensors(stream.expand(x[:, -1:])), tensors(state), strict=True):
            assert_close(alone, full[:, -1:], what=f"expand {words}")
    for i, (connection, sublayer) in enumerate(zip(stream.connections, bare_sublayers(dim, SUBLAYERS))):
        last = tree_map(lambda leaf: leaf[:, -1:], state)
        if not window_of(connection):
            for alone, full in zip(as_inputs(connection.read(last)[0]), as_inputs(connection.read(state)[0])):
                assert_close(alone, full[:, -1:], what=f"connection {i} {words}")
        state = connection(state, sublayer)
    last = tree_map(lambda leaf: leaf[:, -1:], state)
    if not window_of(stream.collapse):
        assert_close(stream.collapse(last), stream.collapse(state)[:, -1:], what=f"collapse {words}")


class OnlyFloat64(TorchDispatchMode):
    """Fail at the first operation that makes floating-point numbers of another dtype."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tensors(out):
            expect(not leaf.is_floating_point() or leaf.dtype == torch.float64, f"{func} made {leaf.dtype}")
        return out


@CONTRACT.add
def float64_from_end_to_end(scheme: Scheme, dim: int = DIM) -> None:
    """A float64 stream computes in float64 throughout, because one float32 step would cost nine digits."""
    stream = build(scheme, dim)
    x = normal(2, 5, dim).requires_grad_()
    with OnlyFloat64():
        outputs(stream, x).square().sum().backward()


@CONTRACT.add
def narrow_dtypes_come_back_in_their_dtype(scheme: Scheme, dim: int = DIM) -> None:
    """A bfloat16 or float16 model has states, inputs of sublayers and outputs of that dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        stream = build(scheme, dim, dtype)
        state = stream.expand(normal(2, 5, dim, dtype=dtype))
        expect(all(leaf.dtype == dtype for leaf in tensors(state)), f"expand changes the dtype {dtype}")
        for connection, sublayer in zip(stream.connections, bare_sublayers(dim, SUBLAYERS)):
            x, carry = connection.read(state)
            inputs = as_inputs(x)
            expect(all(part.dtype == dtype for part in inputs), f"read gives {inputs[0].dtype} in a model of {dtype}")
            state = connection.write(sublayer(*inputs), carry)
            expect(all(leaf.dtype == dtype for leaf in tensors(state)), f"write changes the dtype {dtype} of the state")
        out = stream.collapse(state)
        expect(out.dtype == dtype, f"collapse gives {out.dtype} in a model of {dtype}")
        expect(out.isfinite().all(), f"not finite in {dtype}")


@CONTRACT.add
def autocast_leaves_the_coefficients_in_float32(scheme: Scheme, dim: int = DIM) -> None:
    """Autocast changes neither the dtype of the state nor any bit of a coefficient, except those in `activations`."""
    stream = build(scheme, dim, torch.float32)
    state = stream.expand(normal(2, 5, dim, dtype=torch.float32))
    for i, connection in enumerate(stream.connections):
        expected, plain = connection.read(state)
        with torch.autocast("cpu", torch.bfloat16):
            x, carry = connection.read(state)
            after = connection.write(toy(x).to(torch.bfloat16), carry)
        for actual, exact in zip(as_inputs(x), as_inputs(expected), strict=True):
            assert_close(actual.float(), exact, dtype=torch.bfloat16, what=f"the input of sublayer {i} under autocast")
        expect(all(leaf.dtype == torch.float32 for leaf in tensors(after)), "autocast changes the dtype of the state")
        for symbol, value in plain.coefficients._asdict().items():
            if value is not None and symbol not in scheme.activations:
                cast = getattr(carry.coefficients, symbol)
                words = f"{symbol} of connection {i} is computed in bfloat16 under autocast; keep mappings in float32"
                expect(equal(cast, value), words)
        state = connection.write(toy(expected), plain)


@CONTRACT.add
@torch.no_grad()
def a_bfloat16_state_leaves_the_coefficients_in_float32(scheme: Scheme, dim: int = DIM) -> None:
    """With float32 parameters and a bfloat16 state, no coefficient except `activations` is rounded to 16 bits."""
    stream = build(scheme, dim, torch.float32)
    state = tree_map(lambda leaf: leaf.bfloat16(), stream.expand(normal(2, 5, dim, dtype=torch.float32)))
    for i, connection in enumerate(stream.connections):
        x, carry = connection.read(state)
        _, exact = connection.read(tree_map(lambda leaf: leaf.float(), state))
        for symbol, value in carry.coefficients._asdict().items():
            for leaf, wide in zip(tensors(value), tensors(getattr(exact.coefficients, symbol))):
                rounded = leaf.is_floating_point() and leaf.dtype.itemsize < 4 and not torch.equal(leaf.float(), wide)
                remedy = "compute mappings in float32, and name other coefficients in `activations`"
                words = f"{symbol} of connection {i} is {leaf.dtype} for a bfloat16 state; {remedy}"
                expect(not rounded or symbol in scheme.activations, words)
        state = connection.write(toy(x), carry)


@CONTRACT.add
def every_parameter_matters_and_gets_a_gradient(scheme: Scheme, dim: int = DIM) -> None:
    """Every parameter has a gradient other than 0, and changes the output by more than rounding noise."""
    stream = build(scheme, dim)
    x = normal(2, 6, dim)
    weights = normal(2, 6, dim, seed=3)
    before = outputs(stream, x)
    (before * weights).sum().backward()
    for name, parameter in stream.named_parameters():
        expect(parameter.grad is not None, f"{name} is not used, or detached: it gets no gradient")
        expect(parameter.grad.abs().max() > 1e-8, f"{name} has no influence: its gradient is 0")
        with torch.no_grad():
            value = parameter.clone()
            parameter.mul_(1.1).add_(0.05)
            change = (outputs(stream, x) - before).abs().max()
            expect(change > 1e-8, f"{name} does not change the output")
            parameter.copy_(value)


@CONTRACT.add
def gradients_are_those_of_finite_differences(scheme: Scheme, dim: int = DIM) -> None:
    stream = build(scheme, dim, count=3)
    sublayers = bare_sublayers(dim, 3)
    x = normal(1, 5, dim).requires_grad_()
    leaves = {"the embedding": x, **dict(stream.named_parameters())}

    def differ(*inputs: Tensor) -> bool:
        try:
            return not gradcheck(lambda *_: stream(x, sublayers), inputs, fast_mode=True, atol=1e-6, rtol=1e-5)
        except GradcheckError:
            return True

    if differ(*leaves.values()):
        names = [name for name, leaf in leaves.items() if differ(leaf)]
        raise CheckFailed(f"gradients differ from finite differences: {', '.join(names or leaves)}")


@CONTRACT.add
def gradient_checkpointing_changes_no_bit(scheme: Scheme, dim: int = DIM) -> None:
    """If a connection and its sublayer are recomputed in the backward pass, gradients are equal to the last bit."""
    stream = build(scheme, dim, torch.float32)
    x = normal(2, 5, dim, dtype=torch.float32).requires_grad_()
    leaves = [x, *stream.parameters()]
    expected = torch.autograd.grad(outputs(stream, x).square().sum(), leaves)
    state = stream.expand(x)
    for connection, sublayer in zip(stream.connections, bare_sublayers(dim, SUBLAYERS)):
        state = checkpoint(connection, state, sublayer, use_reentrant=False)
    recomputed = torch.autograd.grad(stream.collapse(state).square().sum(), leaves)
    expect(equal(expected, recomputed), "gradients change under activation checkpointing of each connection")


@CONTRACT.add
def a_sublayer_must_return_a_tensor_of_its_inputs_shape(scheme: Scheme, dim: int = DIM) -> None:
    stream = build(scheme, dim)
    connection = stream.connections[0]
    state = stream.expand(normal(2, 5, dim))
    for sublayer, error in ((lambda *x: (x, None), TypeError), (lambda *x: x[0][..., :1], ValueError)):
        try:
            connection(state, sublayer)
        except error:
            continue
        raise CheckFailed("a sublayer that returns a tuple or a wrong shape is taken without an error")


@CONTRACT.add
def weights_and_state_may_differ_in_dtype(scheme: Scheme, dim: int = DIM) -> None:
    """The state keeps its dtype if parameters have a different dtype, as in a bfloat16 model with a float32 state."""
    start = build(scheme, dim).expand(normal(2, 5, dim))
    for weights, dtype in [(torch.float64, torch.float32), (torch.float32, torch.float64)]:
        state = tree_map(lambda leaf: leaf.to(dtype), start)  # noqa: B023
        for connection in build(scheme, dim, weights).connections:
            state = connection(state, lambda *x: sum(x))
            dtypes = {leaf.dtype for leaf in tensors(state)}
            expect(dtypes == {dtype}, f"a state of {dtype} becomes {dtypes} with parameters of {weights}")


@CONTRACT.add
def modules_initialise_themselves(scheme: Scheme, dim: int = DIM) -> None:
    """`reset_parameters` of the modules initialises every parameter, for models that are made on the meta device.

    It also fills every buffer that is not saved, because loading a saved model does not fill these.
    """

    def contents(stream: Stream) -> dict[str, Tensor]:
        saved = stream.state_dict().keys() - dict(stream.named_parameters()).keys()
        buffers = {name: buffer for name, buffer in stream.named_buffers() if name not in saved}
        return {**dict(stream.named_parameters()), **buffers}

    def started() -> Stream:
        with torch.device("meta"):
            stream = scheme.build(dim, SUBLAYERS)
        stream.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in contents(stream).values():
                tensor.fill_(torch.nan if tensor.is_floating_point() else -77)
        for module in stream.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return stream

    ours, theirs = [], []
    for seed in SEEDS:
        torch.default_generator.manual_seed(seed)
        ours.append(contents(started()))
        theirs.append(contents(scheme.build(dim, SUBLAYERS)))
    parted = sorted(ours[0].keys() - theirs[0].keys())
    expect(not parted, f"to_empty() parts {', '.join(parted)} from the parameter that build() shares: share modules")
    for name, start in ours[0].items():
        expect(start.isfinite().all() and not (start == -77).all(), f"no reset_parameters() draws {name}")
        expected = [values[name] for values in theirs]
        right = drawn(expected).any() or torch.equal(start, expected[0])  # a draw may give the same entry twice
        expect(right, f"reset_parameters() and build() start {name} differently")
        words = different_draws([values[name] for values in ours], expected) if start.is_floating_point() else None
        expect(words is None, f"after reset_parameters() on the meta device {name} {words}")


def preserving(scheme: Scheme) -> Scheme:
    """Return the scheme with a start as the plain residual. Raise NotChecked if it has none."""
    try:
        return scheme.preserving()
    except ValueError as reason:
        raise NotChecked(f"the scheme has no start as the plain residual: {reason}") from reason


@CONTRACT.add
def preserving_is_the_plain_residual(scheme: Scheme, dim: int = DIM) -> None:
    """A stream of the scheme from `preserving` computes the plain residual at the start, for any norms.

    The norms here are LayerNorms with random gains and biases, as in a pretrained model, and with an eps that matters.
    If a sublayer takes several inputs, the plain residual passes it the same input as often.
    """
    start = preserving(scheme)
    expect(isinstance(start, type(scheme)), f"preserving() gives a {type(start).__name__}")
    norms = [perturbed(nn.LayerNorm(dim, eps=0.1)) for _ in range(SUBLAYERS)]
    x, bare = normal(2, 5, dim), bare_sublayers(dim, SUBLAYERS)
    ours, plain = (kind.build(dim, SUBLAYERS, norm=norms.__getitem__).double().eval() for kind in (start, Residual()))
    wrapped, calls = zip(*map(recorded, bare))
    result = ours(x, list(wrapped))
    counts = [len(inputs) for [inputs] in calls]
    copied = [lambda x, f=f, n=n: f(*[x] * n) for f, n in zip(bare, counts, strict=True)]
    assert_close(result, plain(x, copied), what="preserving() does not start as the plain residual")


def stuck(stream: Stream, dim: int) -> list[str]:
    """Return the names of the parameters that get no gradient in three steps of Adam's size on a random linear loss.

    A gate whose weights are zero passes nothing to what lies before it until they have moved, and how streams are
    written may matter only after they are read unequally, so three steps. A start at the end of a sigmoid or on a
    saddle leaves parameters without a gradient for good.
    """
    parameters = dict(stream.named_parameters())
    sizes = []
    for _ in range(3):
        loss = (outputs(stream, normal(2, 5, dim)) * normal(2, 5, dim, seed=3)).sum()
        grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
        sizes.append([grad.abs().max().item() for grad in grads])
        with torch.no_grad():
            for parameter, grad in zip(parameters.values(), grads):
                parameter.sub_(0.01 * grad.sign())
    largest = max(sizes[0])
    return [name for name, *found in zip(parameters, *sizes) if max(found) < 1e-7 * largest]


@CONTRACT.add
def every_parameter_learns_from_the_preserving_start(scheme: Scheme, dim: int = DIM) -> None:
    """Every parameter of a stream of the scheme from `preserving` gets a gradient within three steps."""
    norms = [perturbed(nn.LayerNorm(dim, eps=0.1)) for _ in range(SUBLAYERS)]
    names = stuck(preserving(scheme).build(dim, SUBLAYERS, norm=norms.__getitem__).double().eval(), dim)
    expect(not names, f"preserving() starts where no gradient reaches {', '.join(names)}, which so never learn")


def compiles(scheme: Scheme, dim: int = DIM) -> None:
    """A stream compiled without graph breaks has the output and the gradients of the eager stream."""
    stream = build(scheme, dim, torch.float32)
    x = normal(2, 5, dim, dtype=torch.float32).requires_grad_()
    leaves = [x, *stream.parameters()]
    eager = outputs(stream, x)
    compiled = torch.compile(stream, fullgraph=True)(x, bare_sublayers(dim, SUBLAYERS))
    assert_close(compiled, eager, factor=10, what="torch.compile changes the output")  # other orders of summation
    for name, actual, expected in zip(
        ["x", *(name for name, _ in stream.named_parameters())],
        torch.autograd.grad(compiled.square().sum(), leaves),
        torch.autograd.grad(eager.square().sum(), leaves),
    ):
        assert_close(actual, expected, factor=10, what=f"torch.compile changes the gradient of {name}")
