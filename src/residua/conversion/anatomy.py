"""Find out how the layers of a transformers model use their residual, by watching them run on a small input.

Each layer runs its own code with a `Flow` in place of `hidden_states`, as later when it is converted. Its connections
are the plain residual, and note which modules read it and when something is added to it. Nothing about a family is
written down here: a layer that does anything else with its residual is refused, and so is a model whose output changes
in a single bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn

from residua.connections import Carry, Scheme, describe, resolve
from residua.connections.residual import ResidualCoefficients
from residua.conversion.flow import INPUTS, Flow, UnknownUse, reads, rows_of
from residua.conversion.probe import Situation
from residua.errors import InputError, check_types, extra, first_line, shown

with extra("lab"):
    from transformers import PreTrainedModel

MOST_SUBLAYERS = 64
"""Of a layer."""

STACKS = ("layers", "h", "blocks", "layer", "block")
"""The names of the list of layers in the models of transformers."""


@dataclass(frozen=True)
class Sublayer:
    """One connection of a layer: the names of the modules that read for it, and whether the only one is its norm.

    cast: whether the layer casts the residual to the dtype of that norm before it reads.
    """

    readers: tuple[str, ...]
    normed: bool
    cast: bool = False

    def __post_init__(self):
        check_types(self)


Anatomy = tuple[tuple[Sublayer, ...], ...]
"""The sublayers of every layer of a stack."""


@dataclass(frozen=True)
class Conversion:
    """How a model was converted: its scheme, the name of its list of layers in the base model, and their anatomy."""

    scheme: Scheme
    stack: str
    anatomy: Anatomy

    def __post_init__(self):
        check_types(self)

    def as_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` builds the same."""
        layers = [[asdict(sublayer) for sublayer in layer] for layer in self.anatomy]
        return {"connection": describe(self.scheme), "stack": self.stack, "layers": layers}

    @classmethod
    def from_json(cls, values: Any, source: object) -> "Conversion":
        """Read what `as_json` returned. Raises InputError for anything else, or if the scheme is not installed."""
        try:
            layers = [
                tuple(Sublayer(**{**sublayer, "readers": tuple(sublayer["readers"])}) for sublayer in layer)
                for layer in values["layers"]
            ]
            return cls(resolve(values["connection"]), values["stack"], tuple(layers))
        except (KeyError, TypeError) as error:
            raise InputError(
                f"{source} must hold the configuration of a converted model, got {shown(values)}"
            ) from error
        except ValueError as error:
            raise InputError(f"{source}: {first_line(error)}") from error


class Observed:
    """What one layer does with its residual: every connection of its flow in turn, each with the plain residual.

    readers: the names of the modules that read before each addition; casts: those for which the layer casts the
    residual to the dtype of their weights; additions: how many there were.
    """

    def __init__(self) -> None:
        self.readers: list[list[str]] = []
        self.casts: set[str] = set()
        self.additions = 0

    def flow(self, incoming: Tensor) -> Flow:
        lead = None if incoming.dim() == 3 else tuple(incoming.shape[:-1])
        connections: list[Any] = [self] * MOST_SUBLAYERS
        return Flow(rows_of(incoming), connections, [None] * MOST_SUBLAYERS, lead=lead)

    def note(self, name: str, flow: Flow, reader: nn.Module) -> None:
        """Note that a module reads a flow."""
        index = MOST_SUBLAYERS - len(flow.connections)
        if index == len(self.readers):
            self.readers.append([])
        self.readers[index].append(name)
        if flow.read_dtype is not None and flow.read_dtype == next((p.dtype for p in reader.parameters()), None):
            self.casts.add(name)

    def read(self, state: Tensor, memory: None) -> tuple[Tensor, Carry]:
        return state, Carry(state, ResidualCoefficients())

    def write(self, y: Tensor, carry: Carry) -> Tensor:
        self.additions += 1
        return carry.residual + y


def stack_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the list of the layers of a model and its name inside the base model.

    It is the outermost list of layers, the longest if there are several.

    Raises:
        InputError: there is none, or it is not clear which.
    """
    found: list[tuple[str, nn.ModuleList]] = []
    for name, module in model.base_model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer, _ in found)
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in STACKS and len(module) and not inside:
            found.append((name, module))
    decoder = getattr(model, "get_decoder", lambda: None)()
    if isinstance(decoder, nn.Module) and len(found) > 1:
        kept = {id(module) for module in decoder.modules()}
        found = [(name, stack) for name, stack in found if id(stack) in kept] or found
    if not found:
        raise InputError(f"{type(model).__name__} must have a list of layers called {', '.join(STACKS)}, found none")
    order = {name: (name.count("."), -len(stack)) for name, stack in found}
    found.sort(key=lambda item: order[item[0]])
    if len(found) > 1 and order[found[0][0]] == order[found[1][0]]:
        names = " and ".join(name for name, _ in found[:2])
        raise InputError(f"{type(model).__name__} must have one stack of layers, found {names}; convert one of them")
    return found[0]


def observe(model: PreTrainedModel, stack: nn.ModuleList, run: Situation) -> tuple[Anatomy, list[Tensor]]:
    """Return the anatomy of every layer of `stack`, and what `run` returns if its layers change nothing.

    A module that gets the residual reads it. Where a layer does not fit so, the modules in it that read and have parts
    of their own are opened: their parts read, as in blocks that add inside.

    Raises:
        InputError: a layer runs twice or not at all, or uses its residual in a way that no connection can replace.
    """
    if len({id(layer) for layer in stack}) < len(stack):
        raise InputError(
            f"{type(model).__name__} must have layers of their own, found one that stands in several places"
        )
    opened: set[tuple[int, str]] = set()
    while True:
        watch = Watch(model, stack, opened)
        try:
            return watch.run(run)
        except InputError:
            closed = watch.compound() - opened
            if not closed:
                raise
            opened |= closed


class Watch:
    """One pass in which the layers of `stack` run on an `Observed`; the modules in `opened` are seen through."""

    def __init__(self, model: PreTrainedModel, stack: nn.ModuleList, opened: set[tuple[int, str]]):
        self.model = model
        self.stack = stack
        self.opened = opened
        self.seen: dict[int, Observed] = {}
        self.incoming: dict[int, Tensor] = {}

    def run(self, run: Situation) -> tuple[Anatomy, list[Tensor]]:
        name = type(self.model).__name__
        try:
            with self._hooks():
                unchanged = run()
        except UnknownUse as error:
            where = self._place(list(self.seen)[-1]) if self.seen else "a layer"
            raise InputError(f"{name}: {where} {first_line(error)}") from error
        except Exception as error:  # whatever code of a layer raises that meets no tensor
            raise InputError(f"{name}: a layer needs its residual as a tensor: {first_line(error)}") from error
        missing = [i for i in range(len(self.stack)) if i not in self.seen]
        if missing:
            raise InputError(f"{name}: {self._place(missing[0])} did not run")
        return tuple(self._sublayers(i) for i in range(len(self.stack))), unchanged

    def compound(self) -> set[tuple[int, str]]:
        """Return the modules that read and have parts of their own, other than norms, in the layer that ran last."""
        return {
            (i, name)
            for i in list(self.seen)[-1:]
            for name in chain(*self.seen[i].readers)
            if any(self._module(i, name).children()) and not _is_norm(self._module(i, name))
        }

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        for i, layer in enumerate(self.stack):
            handles.append(layer.register_forward_pre_hook(partial(self._open, i), with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(self._close, i)))
            for name, child in list(layer.named_modules())[1:]:
                if (i, name) not in self.opened:
                    handles.append(
                        child.register_forward_pre_hook(partial(self._note, i, name), prepend=True, with_kwargs=True)
                    )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _open(self, i: int, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if i in self.seen:
            raise UnknownUse("runs twice in one pass")
        self.seen[i] = Observed()
        name = next((name for name in INPUTS if name in kwargs), None)
        incoming = args[0] if args else kwargs.get(name)
        if not isinstance(incoming, Tensor) or not 2 <= incoming.dim() <= 5:
            raise UnknownUse("does not get its residual as one tensor (batch, seq, dim)")
        self.incoming[i] = incoming
        flow = self.seen[i].flow(incoming)
        return ((flow, *args[1:]), kwargs) if args else (args, {**kwargs, name: flow})

    def _close(self, i: int, layer: nn.Module, args: Any, out: Any) -> Any:
        """Check that a layer returns its residual, and return instead the one that it got."""
        items = out if isinstance(out, tuple) else (out,)
        seen = self.seen[i]
        if sum(isinstance(item, Flow) for item in items) != 1:
            last = next(iter(seen.readers[-1:]), [""])[-1]
            if seen.additions and _is_norm(self._module(i, last)):
                raise UnknownUse(
                    f"normalises its residual after an addition ({last}): a stream would not pass the norm"
                )
            raise UnknownUse("does not return its residual")
        if any(item.shape != self.incoming[i].shape for item in items if isinstance(item, Flow)):
            raise UnknownUse("changes the shape of its residual")
        plain = tuple(self.incoming[i].to(item.dtype) if isinstance(item, Flow) else item for item in items)
        if not seen.readers or any(isinstance(item, Flow) and item.carry is not None for item in items):
            raise UnknownUse("reads its residual and does not add to it")
        return plain if isinstance(out, tuple) else plain[0]

    def _note(self, i: int, name: str, child: nn.Module, args: Any, kwargs: Any) -> Any:
        """Note that `child` reads the residual, and give it the tensor."""
        flow = reads(args, kwargs)
        if flow is None:
            return None
        self.seen[i].note(name, flow, child)
        x = flow.read()
        args = tuple(x if isinstance(item, Flow) else item for item in args)
        return args, {key: x if isinstance(item, Flow) else item for key, item in kwargs.items()}

    def _sublayers(self, i: int) -> tuple[Sublayer, ...]:
        sublayers = []
        for names in self.seen[i].readers:
            readers = tuple(dict.fromkeys(names))
            normed = len(readers) == 1 and _is_norm(self._module(i, readers[0]))
            sublayers.append(Sublayer(readers, normed, normed and readers[0] in self.seen[i].casts))
        return tuple(sublayers)

    def _module(self, i: int, name: str) -> nn.Module:
        return self.stack[i].get_submodule(name)

    def _place(self, i: int) -> str:
        return f"layer {i} ({type(self.stack[i]).__name__})"


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and all(x.dim() < 2 for x in module.parameters())
