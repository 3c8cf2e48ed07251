"""Read and change the state of a model between its sublayers.

The readout of a scheme makes one tensor (batch, seq, dim) from any state, as at the end of the model. `boundaries`
passes this tensor to hooks at every boundary, and writes the values that they return back into the state.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from residua.connections import Carry, Memory
from residua.connections.base import State
from residua.connections.parts.ends import Collapse, Same
from residua.connections.parts.memory import whole_sequence, window_of
from residua.conversion.flow import Flow, layer_streams
from residua.errors import InputError, require
from residua.lab.inspection.subject import Subject
from residua.lab.inspection.watch import StandIn, as_written, replaced, swapped
from residua.models.cache import CACHE_NAMES, attention_mask_of, documents_of, padding_of
from residua.models.evaluating import evaluating

LOGITS = 2**26
"""The largest number of logits that are computed at a time."""
STEPS, ITERATIONS = 10, 100
"""The largest numbers of Newton steps for a nonlinear readout, and of iterations for the linear equations of a step."""
READ_TOLERANCE = 1e-6
"""The largest difference between the wanted readout and that of the new state, relative to the wanted readout."""


@contextmanager
def boundaries(model: nn.Module) -> Iterator[nn.ModuleDict]:
    """Yield a module for each boundary of a residua model or a converted model, on which to register forward hooks.

    The first module is named "embedding", the others after the sublayer that wrote last, such as "1 attention". In
    every forward pass, the output of a module is the readout of the state at its boundary, (batch, seq, dim), before
    the last norm of the model. If a hook returns another value, the state gets the smallest change in the Euclidean
    norm such that its readout is this value. For a linear readout, this is the pseudo-inverse times the difference; for
    other readouts, it is found by Newton steps of this kind. If no hook returns another value, the state stays the
    same, bit for bit. A module without hooks costs nothing.

    Values can be written back under `torch.no_grad()`; with gradients only if the state itself is the readout. While
    the `with` block runs, the modules are also the submodule `boundaries` of the model. A block inside another one for
    the same model yields the same modules, so that `logit_lens` reads what hooks have written.

    Raises:
        InputError: the model is neither a residua model nor converted. In a forward pass: the readout reads earlier
            tokens and rows are padded, packed or continued from a cache; or no state near the current one has the
            wanted readout.
    """
    active = model._modules.get("boundaries")
    if isinstance(active, _Points):
        yield active
        return
    subject = Subject.of(model)
    names = [name.replace(".", " ") for name in ("embedding", *subject.sublayers)]
    points = _Points({name: nn.Identity() for name in names})
    collapse = subject.stream.collapse

    def check(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        names = inspect.signature(model.forward).parameters
        if window_of(collapse) and not _whole_rows(dict(zip(names, arguments)) | keywords):
            raise InputError(
                "boundaries needs whole rows, without padding, packed documents or earlier tokens in a cache, because "
                "the readout looks at earlier tokens"
            )

    places, layers = list(points.values()), layer_streams(model)
    ends = list(accumulate(len(layer.connections) for layer in layers))
    with ExitStack() as stack:
        stack.enter_context(as_written(model))
        stack.enter_context(replaced(_stand_ins(subject.stream.connections, places, ends, collapse)))
        for layer, end in zip(layers, ends):
            output_of = partial(_output_of, layer.output_of, places[end], collapse)
            stack.enter_context(swapped(vars(layer), output_of=output_of))
        stack.callback(model.register_forward_pre_hook(check, with_kwargs=True).remove)
        stack.enter_context(swapped(model._modules, boundaries=points))
        yield points


class _Points(nn.ModuleDict):
    """The modules that `boundaries` yields."""


def _whole_rows(given: dict[str, Any]) -> bool:
    """Return whether every row of a forward pass is one text from its first token on; given: the arguments by name."""
    if any(cache.get_seq_length() for name in CACHE_NAMES if (cache := given.get(name)) is not None):
        return False
    tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
    mask = attention_mask_of(given.get("attention_mask"))
    documents = documents_of(tokens, None, given.get("position_ids"), given, cached=False)
    padding = padding_of(tokens, mask, None, documents)
    return (documents is None or not documents.any()) and (padding is None or bool(padding.all()))


class _Passed(StandIn):
    """A stand-in that visits the boundaries `before` the connection's read and `after` its write; None to skip one."""

    def __init__(self, connection: Any, before: nn.Module | None, after: nn.Module | None, collapse: nn.Module):
        super().__init__(connection)
        self.before, self.after, self.collapse = before, after, collapse

    def read(self, state: State, memory: Memory | None = None) -> tuple[Any, Carry]:
        return self.inner_read(_visit(self.before, self.collapse, state), memory)

    def write(self, y: Tensor, carry: Carry) -> State:
        return _visit(self.after, self.collapse, self.inner_write(y, carry))


def _stand_ins(
    connections: Iterable[Any], points: Sequence[nn.Module], ends: Sequence[int], collapse: nn.Module
) -> list[_Passed]:
    """Return the stand-ins of the connections. In a residua model, a write visits the boundary after its connection.

    ends: the last connections of the layers of a converted model; empty for a residua model. A converted layer may add
    attention and MLP after a single read. A boundary inside the layer is therefore visited at the next read, and the
    boundary at its end after the layer.
    """
    if not ends:
        return [_Passed(c, None if i else points[0], points[i + 1], collapse) for i, c in enumerate(connections)]
    return [_Passed(c, None if i in ends else points[i], None, collapse) for i, c in enumerate(connections)]


def _output_of(method: Callable[..., Any], point: nn.Module, collapse: nn.Module, output: Any, memories: Any) -> Any:
    """Return the outputs of a layer, after the hooks of its last boundary."""
    if isinstance(output, Flow) and output.carry is None and not output.ahead:  # otherwise the layer raises an error
        output.state = _visit(point, collapse, output.state)
    return method(output, memories)


def _visit(point: nn.Module | None, collapse: nn.Module, state: State) -> State:
    """Run the hooks of a boundary on the readout of `state`; return the resulting state."""
    if point is None or not (point._forward_hooks or point._forward_pre_hooks):
        return state
    x = collapse(state, whole_sequence(collapse))
    value = point(x)
    if value is x:
        return state
    require(value.shape == x.shape, "the value that a hook returns", str(list(x.shape)), list(value.shape))
    return written(collapse, state, value)


def written(collapse: nn.Module, state: State, value: Tensor) -> State:
    """Return the state nearest to `state` whose readout is `value`, see `boundaries`. Raises InputError."""
    if isinstance(collapse.compress if type(collapse) is Collapse else collapse, Same):
        return value
    if torch.is_grad_enabled() and any(part.requires_grad for part in [value, *tree_leaves(state)]):
        raise InputError("boundaries writes a value back into this scheme's state only under torch.no_grad()")
    with torch.no_grad():
        if torch.equal(collapse(state, whole_sequence(collapse)), value):
            return state
        exact = copy.deepcopy(collapse).double()
        flat, form = tree_flatten(state)
        shapes = [part.shape for part in flat]

        def read(point: Tensor) -> Tensor:
            parts = point.split([shape.numel() for shape in shapes])
            return exact(
                tree_unflatten([part.reshape(s) for part, s in zip(parts, shapes)], form), whole_sequence(exact)
            )

        start = torch.cat([part.reshape(-1) for part in flat]).double()
        point, target = start, value.double()
        for _ in range(STEPS):
            missing = target - read(point)
            if missing.norm() <= 1e-2 * torch.finfo(value.dtype).eps * target.norm():
                break
            point = point + _least_change(read, point, missing)
        changes = (point - start).split([shape.numel() for shape in shapes])
        state = tree_unflatten([(p.double() + c.reshape(p.shape)).to(p.dtype) for p, c in zip(flat, changes)], form)
        if not (target - read(point)).norm() <= READ_TOLERANCE * target.norm():
            raise InputError(
                "boundaries needs a value from the hook that is the readout of a state near the current one; found no "
                "such state; return a value closer to the one that the hook got"
            )
        return state


def _least_change(read: Callable[[Tensor], Tensor], point: Tensor, missing: Tensor) -> Tensor:
    """Return the smallest change with J change = `missing`, where J is the Jacobian of `read` at `point`.

    It is J^T z with J J^T z = missing; z is found by conjugate gradients.
    """
    scale = 1e-4 * point.abs().max().clamp(min=1e-6)

    def transposed(z: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = point.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(read(leaf), leaf, z)
        return gradient

    def times(change: Tensor) -> Tensor:
        step = scale / change.abs().max().clamp(min=1e-300)
        return (read(point + step * change) - read(point - step * change)) / (2 * step)

    z, rest = torch.zeros_like(missing), missing.clone()
    direction, size = rest, rest.square().sum()
    first = size
    for _ in range(ITERATIONS):
        if size <= 1e-10 * first:
            break
        image = times(transposed(direction))
        length = size / (direction * image).sum()
        z, rest = z + length * direction, rest - length * image
        before, size = size, rest.square().sum()
        direction = rest + (size / before) * direction
    return transposed(z)


@dataclass(frozen=True)
class Lens:
    """The predictions that a model would make if it ended at a boundary. B boundaries, T tokens, k predictions.

    names        the names of the boundaries
    loss         (B, T): -log p of the next token, NaN at the last token
    tokens       (B, T, k): the k most probable next tokens, in descending order
    probability  (B, T, k): the probabilities of these
    """

    names: tuple[str, ...]
    loss: Tensor
    tokens: Tensor
    probability: Tensor


def logit_lens(model: nn.Module, tokens: Sequence[int] | Tensor, *, top: int = 5) -> Lens:
    """Return the logit lens of a text: the predictions of the model's last norm and head from every boundary's readout.

    At the last boundary these are the model's own predictions. Raises InputError for a model that is
    neither ours nor converted, or has no head; and for tokens that do not fit it.
    """
    subject = Subject.of(model)
    require(subject.head, "the model of a lens", "one with a language-model head", type(model).__name__)
    require(1 <= top <= subject.vocabulary, "top", f"1 to {subject.vocabulary}, the tokens of the vocabulary", top)
    ids = subject.token_ids(tokens)
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        points = stack.enter_context(boundaries(model))
        readouts: list[Tensor] = []
        for point in points.values():
            record = point.register_forward_hook(lambda module, arguments, x: readouts.append(x))
            stack.callback(record.remove)
        model(input_ids=ids[None], use_cache=False)
        for point in points.values():  # visits no boundary below, where the readout is replaced
            stack.enter_context(swapped(vars(point), _forward_hooks={}, _forward_pre_hooks={}))
        return _lens(subject, ids, tuple(points), torch.cat(readouts), top)


def _lens(subject: Subject, ids: Tensor, names: tuple[str, ...], readouts: Tensor, top: int) -> Lens:
    """Return the predictions from the readouts (B, T, dim), with as many at a time as `LOGITS` allows."""
    kept = []
    for some in readouts.split(max(1, LOGITS // (len(ids) * subject.vocabulary))):
        handle = subject.stream.collapse.register_forward_hook(lambda *_, some=some: some)
        try:
            with as_written(subject.model):
                logits = subject.model(input_ids=ids[None], use_cache=False).logits
        finally:
            handle.remove()
        chances = logits.float().log_softmax(-1)
        nan = chances.new_full((len(some), 1), torch.nan)
        following = ids[1:].expand(len(some), -1)[..., None]
        loss = torch.cat([-chances[:, :-1].gather(-1, following)[..., 0], nan], -1)
        kept.append((loss, *chances.topk(top)))
    loss, values, indices = map(torch.cat, zip(*kept))
    return Lens(names, loss.cpu(), indices.cpu(), values.exp().cpu())
