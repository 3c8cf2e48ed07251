"""Find out how the layers of a transformers model use their residual, by watching them run on a small input.

Each layer runs as if it were already converted. Its connections are the plain residual, and every module in the layer
reports when it reads the residual. Nothing here depends on the model family: a layer that uses its residual in a way
that `Flow` does not support is refused, and so is a model whose output changes in a single bit.
"""

from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn

from residua.connections import Carry, Scheme, describe, resolve
from residua.connections.schemes.residual import ResidualCoefficients
from residua.conversion.flow import (
    STREAM,
    ConvertedLayer,
    Flow,
    Reader,
    UnknownUse,
    keywords_of,
    lead_of,
    reads,
    rows_of,
    swap,
)
from residua.errors import InputError, check_types, decoded, extra, first_line

with extra("lab"):
    from transformers import PreTrainedModel

MOST_SUBLAYERS = 64
"""The largest number of sublayers that a layer may have."""

STACKS = ("layers", "h", "blocks", "layer", "block")
"""The attribute names that transformers models use for their list of layers."""


@dataclass(frozen=True)
class Sublayer:
    """One connection of a layer.

    readers: the names of the modules that read the residual; normed: whether the only reader is the sublayer's norm;
    cast: whether the layer casts the residual to the dtype of this norm before the read.
    """

    readers: tuple[str, ...]
    normed: bool
    cast: bool = False

    def __post_init__(self):
        check_types(self)


Anatomy = tuple[tuple[Sublayer, ...], ...]
"""The sublayers of each layer of a stack."""


@dataclass(frozen=True)
class Conversion:
    """How a model was converted: its scheme, the name of its list of layers in the base model, and their anatomy."""

    scheme: Scheme
    stack: str
    anatomy: Anatomy

    def as_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` builds an equal `Conversion`."""
        layers = [[asdict(sublayer) for sublayer in layer] for layer in self.anatomy]
        return {"connection": describe(self.scheme), "stack": self.stack, "layers": layers}

    @classmethod
    def from_json(cls, values: Any, source: object) -> "Conversion":
        """Read the values that `as_json` returned. Raises InputError for invalid values and for an unknown scheme."""
        try:
            layers = [tuple(decoded(sublayer, Sublayer) for sublayer in layer) for layer in values["layers"]]
            return cls(resolve(values["connection"]), values["stack"], tuple(layers))
        except ValueError as error:
            raise InputError(f"{source}: {first_line(error)}") from error
        except (LookupError, TypeError) as error:
            raise InputError(f"{source} must say how a model was converted, got: {first_line(error)}") from error


def stack_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of a model's list of layers inside the base model, and the list.

    Of several lists, the outermost is chosen; of several outermost ones, the longest.

    Raises:
        InputError: there is no list of layers, or the choice is ambiguous.
    """
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.base_model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in STACKS and len(module) and not inside:
            stacks[name] = module
    decoder = getattr(model, "get_decoder", lambda: None)()
    if isinstance(decoder, nn.Module):
        stacks = {name: stack for name, stack in stacks.items() if stack in decoder.modules()} or stacks
    if not stacks:
        raise InputError(f"{type(model).__name__} must have a list of layers called {', '.join(STACKS)}, found none")
    ranks = {name: (name.count("."), -len(stack)) for name, stack in stacks.items()}
    first, *rest = sorted(stacks, key=ranks.__getitem__)
    if rest and ranks[first] == ranks[rest[0]]:
        names = f"{first} and {rest[0]}"
        raise InputError(f"{type(model).__name__} must have one stack of layers, found {names}; convert one of them")
    return first, stacks[first]


class Observed:
    """Takes the place of a layer's stream until `release`, and records how the layer uses its residual.

    Each connection of the layer is the plain residual. ran: whether the layer was called; readers: for each addition,
    the names of the modules that read before it; casts: the names of the readers for which the layer casts the residual
    to the dtype of their weights.
    """

    looks_back = False

    def __init__(self, layer: nn.Module, compounds: set[str]):
        self.layer = layer
        self.keywords = keywords_of(layer)
        self.names = {id(part): name for name, part in layer.named_modules() if name not in compounds}
        self.ran = False
        self.readers: list[list[str]] = []
        self.casts: set[str] = set()
        self.additions = 0
        setattr(layer, STREAM, self)
        swap(layer, ConvertedLayer)
        for name, part in layer.named_modules():
            if name and name not in compounds and not isinstance(part, Reader):
                swap(part, WatchedReader)

    def flow_of(self, incoming: Any, memories: None, *, checkpointed: bool) -> Flow:
        self.ran = True
        ahead: list[Any] = [(self, None)] * MOST_SUBLAYERS
        return Flow(rows_of(incoming), ahead, lead=lead_of(incoming))

    def note(self, flow: Flow, reader: nn.Module) -> None:
        """Record that the module `reader` reads `flow`."""
        name, index = self.names[id(reader)], MOST_SUBLAYERS - len(flow.ahead)
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

    def output_of(self, output: Any, memories: None) -> Any:
        items = output if isinstance(output, tuple) else (output,)
        flows = [item for item in items if isinstance(item, Flow)]
        if len(flows) != 1:
            last = self.readers[-1][-1] if self.readers else ""
            if self.additions and self._is_norm(last):
                raise UnknownUse(
                    f"normalises its residual after adding to it ({last}): post-norm layers cannot be converted"
                )
            raise UnknownUse("does not return its residual")
        if not self.readers or flows[0].carry is not None:
            raise UnknownUse("reads its residual and does not add to it")
        state = flows[0].state.reshape(flows[0].shape)
        plain = tuple([state if isinstance(x, Flow) else x for x in items])
        return plain if isinstance(output, tuple) else plain[0]

    def sublayers(self) -> tuple[Sublayer, ...]:
        sublayers = []
        for names in self.readers:
            readers = tuple(dict.fromkeys(names))
            normed = len(readers) == 1 and self._is_norm(readers[0])
            sublayers.append(Sublayer(readers, normed, normed and readers[0] in self.casts))
        return tuple(sublayers)

    def compound(self) -> set[str]:
        """Return the names of readers that have submodules and are not norms."""
        readers = set(chain(*self.readers))
        return {name for name in readers if any(self.layer.get_submodule(name).children()) and not self._is_norm(name)}

    def _is_norm(self, name: str) -> bool:
        module = self.layer.get_submodule(name)
        return "norm" in type(module).__name__.lower() and all(x.dim() < 2 for x in module.parameters())


class WatchedReader(Reader):
    """A module inside an `Observed` layer; it reports when it reads the residual."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow: Any = reads(args, kwargs)
        if flow is not None:
            flow.ahead[0][0].note(flow, self)
        return super().__call__(*args, **kwargs)
