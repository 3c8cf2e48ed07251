"""`Flow`, the residual on its way through the layers of a transformers model, and the converted layers.

A converted layer runs its own code, which gets a `Flow` in place of `hidden_states`. Calling a module with the flow
reads from the state, and adding an output to the flow writes to it.

    residual = hidden_states                             the flow
    hidden_states = self.input_layernorm(hidden_states)  x, carry = connection.read(state)
    hidden_states = self.self_attn(hidden_states)        y, from the tensor x
    hidden_states = residual + hidden_states             the flow with state = connection.write(y, carry)

A layer may also reshape the token axes, scale the whole residual by one number after a write, and keep the residual in
a dtype other than that of its sublayers' inputs, as Mamba does. Any other use of the residual, such as normalising it,
raises an error.
"""

import inspect
import math
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from residua.connections import Carry, Connection, Memory
from residua.connections.base import State, WideParts
from residua.connections.families.convolved import BranchCoefficients
from residua.connections.schemes.residual import ResidualCoefficients
from residua.errors import InputError, extra
from residua.ops.precision import under_autocast
from residua.ops.recompute import cut

with extra("lab"):
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache

MEMORY = "residua_memory"
"""The keyword argument by which the trunk passes the memories of all parts of the stream to its layers."""

Memories = Mapping[nn.Module, Memory | None]
"""The memory of every part of a stream; empty if no part needs one."""

STREAM = "stream"
"""The attribute of a converted layer that holds its part of the stream."""

KEY = "residua"
"""The attribute of a converted model's configuration that says how it was converted."""

ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
PRODUCTS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__)


SCALES = "scales, subtracts, divides or slices its residual"


class UnknownUse(TypeError):
    """A layer does something to its residual other than reading it with a module and adding to it.

    use: the predicate of the message, such as "adds to its residual before it reads it". hint: the remedy if code
    between the layers does this, such as a hook.
    """

    def __str__(self) -> str:
        return "".join(map(str, self.args))

    @property
    def use(self) -> str:
        return self.args[0]


BETWEEN_LAYERS = (
    "; between its layers a converted model passes the state of its scheme, not a tensor (batch, seq, dim): put hooks "
    "that read or change such a tensor on the modules of residua.lab.inspection.boundaries(model)"
)


@dataclass(init=False, eq=False, repr=False)
class Flow:
    """The residual stream between and inside converted layers.

    Inside a layer, `ahead` holds the connections that are still to come. Between layers there is only the state, and
    `ahead` is None. The class is a dataclass and a pytree because FSDP2 looks for tensors only in these.
    """

    state: State

    def __init__(
        self,
        state: State,
        ahead: Sequence[tuple[Connection, Memory | None]] | None = None,
        written: tuple[Connection, Carry, Tensor] | None = None,
        lead: tuple[int, ...] | None = None,
    ):
        self.state = state
        self.ahead: Any = ahead  # the connections that are still to come, with their memories
        self.written = written  # connection, carry and y of the last write, for a layer that adds twice
        self.lead = lead  # the axes before dim that the layer sees; None: (batch, seq)
        self.x: Tensor | None = None
        self.carry: Carry | None = None
        self.read_dtype: torch.dtype | None = None  # the dtype that the layer wants for x; None: that of the state
        self.end: nn.Module | None = None  # the collapse, if the last layers may be skipped

    def read(self) -> Tensor:
        """Return the input of the next sublayer, (batch, seq, dim), which is the same for all readers until a write."""
        if self.carry is None:
            if not self.ahead:
                self._refuse("reads the residual once more than when it was converted")
            connection, memory = self.ahead[0]
            x, self.carry = connection.read(self.state, memory)
            if not isinstance(x, Tensor):
                raise UnknownUse("takes one input, and this scheme reads several for every sublayer")
            first = self.state if isinstance(self.state, Tensor) else self._leaf
            dtype = self.read_dtype or first.dtype  # a scheme may read in float32 in a model of half precision too
            self.x = x if x.dtype == dtype or under_autocast(x.device) else x.to(dtype)
        assert self.x is not None
        return self.x if self.lead is None else self.x.reshape(self.shape)

    def read_out(self, collapse: Any, memory: Memory | None = None) -> Tensor:
        """Return the residual as a tensor, in the shape and dtype that the first layer received."""
        x = collapse(self.state, memory).to(self.dtype)
        return x if self.lead is None else x.reshape(self.shape)

    def reshape(self, *shape: Any) -> "Flow":
        """Return the flow with its token axes reshaped; the width must stay the last axis."""
        batch, seq, dim = self._sizes
        sizes = tuple(shape[0]) if len(shape) == 1 else shape
        known = math.prod(size for size in sizes[:-1] if size != -1)
        lead = tuple(batch * seq // known if size == -1 else size for size in sizes[:-1])
        if sizes[-1] != dim or sizes.count(-1) > 1 or math.prod(lead) != batch * seq:
            self._refuse("reshapes its residual across its width")
        other = copy(self)
        other.lead = None if lead == (batch, seq) else lead
        return other

    view = reshape

    def __add__(self, y: Any) -> "Flow":
        if not isinstance(y, Tensor):
            self._refuse(f"adds {'its residual to itself' if isinstance(y, Flow) else type(y).__name__}")
        if self.lead is not None:
            y = y.expand(self.shape).reshape(self._sizes)
        if self.carry is not None:
            (connection, _), *ahead = self.ahead
            return Flow(connection.write(y, self.carry), ahead, (connection, self.carry, y), self.lead)
        if self.written is None:
            self._refuse("adds to its residual before it reads it")
        # Attention and MLP in parallel, x + a + m, are one sublayer: its output a + m takes the place of a.
        connection, carry, before = self.written
        if isinstance(carry.coefficients, BranchCoefficients):  # the memory has stored the first output
            raise UnknownUse("adds two outputs one after the other, and this scheme convolves them as one")
        if isinstance(carry.coefficients, ResidualCoefficients):  # (x + a) + m has other bits than x + (a + m)
            state = connection.write(y, carry._replace(residual=self.state))
        else:
            state = connection.write(before + y, carry)
        return Flow(state, self.ahead, (connection, carry, before + y), self.lead)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "Flow":
        """Scale the state by one number, as the layer's code scales the plain residual."""
        number = isinstance(factor, (int, float)) or (isinstance(factor, Tensor) and factor.numel() == 1)
        if not number or self.carry is not None or self.written is None:
            self._refuse(SCALES)
        state = tree_map(lambda x: (x * factor).to(x.dtype), self.state)
        return Flow(state, self.ahead, lead=self.lead)

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Add to the flow or scale it, for `tensor + flow` and torch functions. torch.compile sends + and * here."""
        if func in (*ADDITIONS, *PRODUCTS) and len(args) == 2 and not kwargs:
            flow, y = args if isinstance(args[0], Flow) else (args[1], args[0])
            return flow.__add__(y) if func in ADDITIONS else flow.__mul__(y)  # `flow + y` would recurse
        if func is checkpoint:  # torch.compile comes here too, and needs tensors as arguments
            leaves, form = tree_flatten(args[1:])
            return checkpoint(lambda *leaves: args[0](*tree_unflatten(leaves, form)), *leaves, **(kwargs or {}))
        if func is Tensor.expand_as:
            return args[0].expand(args[1].shape)
        flow = next((x for x in tree_leaves((args, kwargs or {}), is_leaf=is_flow) if is_flow(x)), None)
        hint = BETWEEN_LAYERS if flow is not None and flow.ahead is None else ""
        raise UnknownUse(f"passes its residual to {getattr(func, '__name__', func)}", hint)

    def to(self, *where: Any, **options: Any) -> "Flow":
        """Return the flow in another dtype, or on another device; a device may change only between layers."""
        flow, here = self, self.device
        for item in (*where, *options.values()):
            if isinstance(item, torch.dtype):
                flow = flow.cast(item)
            elif item is not None and not isinstance(item, bool):
                device = torch.device(item)
                if device.type != here.type or device.index not in (None, here.index):
                    if self.ahead or self.carry is not None:
                        raise UnknownUse(f"moves its residual to {device}")
                    return Flow(tree_map(lambda x, device=device: x.to(device), self.state), lead=self.lead)
        return flow

    def cast(self, dtype: torch.dtype) -> "Flow":
        """Return the flow after a cast by a layer that keeps its residual and its sublayers' inputs in two dtypes.

        A cast to a narrower dtype before the read sets the dtype of x; `Borrowed` casts its input likewise. Any other
        cast concerns the residual: it becomes wider, or is rounded to a narrower dtype before a wider output is added.
        """
        wider = dtype != self.dtype and torch.promote_types(dtype, self.dtype) == dtype
        if self.carry is None and not wider:
            self.read_dtype = dtype
        if not wider and (self.carry is None or dtype == self.dtype):
            return self

        def moved(x: Tensor) -> Tensor:
            return x.to(dtype) if wider else x.to(dtype).to(x.dtype)

        other = copy(self)
        other.state = tree_map(moved, self.state)
        if self.carry is not None:
            other.carry = self.carry._replace(residual=tree_map(moved, self.carry.residual))
        return other

    @property
    def _leaf(self) -> Tensor:
        first = self.state
        while isinstance(first, tuple) and first:
            first = first[0]
        return first if isinstance(first, Tensor) else tree_leaves(self.state)[0]

    @property
    def shape(self) -> torch.Size:
        """The shape of the plain residual that the layer's code expects, such as (batch, seq, dim)."""
        sizes = self._sizes
        return torch.Size(sizes if self.lead is None else (*self.lead, sizes[2]))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        shape = self._leaf.shape
        return shape[0], shape[1], shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        return self._leaf.dtype

    @property
    def device(self) -> torch.device:
        return self._leaf.device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._refuse(f"uses its residual as a tensor (.{name})")

    def _refuse(self, use: str) -> NoReturn:
        raise UnknownUse(use, BETWEEN_LAYERS if self.ahead is None else "")

    def _scale(self, *_: Any) -> NoReturn:
        self._refuse(SCALES)

    __truediv__ = __sub__ = __rsub__ = __getitem__ = __neg__ = __matmul__ = _scale


def _unflatten(children: Iterable[Any], context: tuple[tuple[int, ...] | None, nn.Module | None]) -> Flow:
    """Rebuild a flow from its leaf. Some versions of torch pass placeholders for the state, so it is not inspected."""
    (state,) = children
    flow = Flow(state, lead=context[0])
    flow.end = context[1]
    return flow


def is_flow(x: Any) -> bool:
    return isinstance(x, Flow)


register_pytree_node(Flow, lambda flow: ([flow.state], (flow.lead, flow.end)), _unflatten)


class LayerStream(WideParts):
    """The part of the stream that a layer owns: its connections, and expand in the first layer, collapse in the last.

    keywords: the argument names of the layer and of its submodules; looks_back: whether the scheme reads earlier
    tokens; ends: expand and collapse of the scheme if any layer may be skipped, otherwise (None, None).
    """

    def __init__(
        self,
        layer: nn.Module,
        connections: Iterable[Connection],
        expand: nn.Module | None,
        collapse: nn.Module | None,
        *,
        looks_back: bool,
        ends: tuple[nn.Module | None, nn.Module | None],
    ):
        super().__init__()
        self.keywords = keywords_of(layer)
        self.ends = ends  # a tuple registers no submodule
        self.looks_back = looks_back
        self.expand = expand
        self.connections = nn.ModuleList(connections)
        self.collapse = collapse

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules as `nn.Module` does, but raise InputError if a partly converted model is being saved.

        `save_pretrained` calls this method, through accelerate, before it writes.
        """
        if self.expand is not None:
            refuse_saving_in_part()
        return super().named_modules(*args, **options)

    @property
    def itself(self) -> "LayerStream":
        """This stream. An adapter around several copies forwards the attribute to the copy that runs."""
        return self

    @property
    def parts(self) -> list[nn.Module]:
        """The modules of the stream that this layer owns, in order."""
        return [part for part in (self.expand, *self.connections, self.collapse) if part is not None]

    def flow_of(self, incoming: Any, memories: Memories, *, checkpointed: bool) -> Flow:
        """Return the flow for the layer's code, made from the layer's input."""
        expand = self.ends[0] if self.expand is None else self.expand  # for a layer whose predecessors were skipped
        if isinstance(incoming, Flow) and self.expand is None:
            lead = incoming.lead
            # Recomputing a layer must not recompute the previous layer, whose weights may be offloaded.
            state = cut(incoming.state) if checkpointed else incoming.state
        elif isinstance(incoming, Flow) or expand is None:
            raise UnknownUse("got the residual in a form that only another layer expects; were layers skipped?")
        else:
            lead = lead_of(incoming)
            state = expand(rows_of(incoming), memories.get(expand))
        connections: Any = self.connections._modules.values()
        return Flow(state, list(zip(connections, map(memories.get, connections))), lead=lead)

    def output_of(self, output: Any, memories: Memories) -> Any:
        """Return the layer's output, with each flow reduced to its state; the last layer reads the state out."""
        if isinstance(output, tuple):
            return tuple([self.output_of(item, memories) for item in output])
        if not isinstance(output, Flow):
            return output
        if output.carry is not None or output.ahead:
            raise UnknownUse("returned after fewer additions to its residual than when it was converted")
        if self.collapse is None:
            output.written = output.ahead = None
            output.end = self.ends[1]
            return output
        return output.read_out(self.collapse, memories.get(self.collapse))


def rows_of(x: Tensor) -> Tensor:
    """Return the residual as (batch, seq, dim): (seq, dim) becomes one row, an image's positions one sequence."""
    return x if x.dim() == 3 else x.reshape(1 if x.dim() == 2 else x.shape[0], -1, x.shape[-1])


def lead_of(x: Tensor) -> tuple[int, ...] | None:
    """Return the sizes of the residual's axes before its width; None for (batch, seq)."""
    return None if x.dim() == 3 else tuple(x.shape[:-1])


def refuse_saving_in_part() -> None:
    """Raise InputError if a model that is converted only in part is being saved by `save_pretrained`.

    The outer model's class and configuration know nothing of the connections, and `convert` changes neither. Its
    `save_pretrained` can therefore be detected only on the call stack.
    """
    if (saved := being_saved()) is not None:
        expect_converted_whole(saved["self"])


def being_saved() -> Mapping[str, Any] | None:
    """Return the local variables of a `PreTrainedModel.save_pretrained` on the call stack; None if there is none."""
    if torch.compiler.is_compiling():
        return None
    asking, saving = expect_converted_whole.__code__, PreTrainedModel.save_pretrained.__code__
    frames = (frame for frame, _ in traceback.walk_stack(None) if frame.f_code in (asking, saving))
    frame = next(frames, None)
    return None if frame is None or frame.f_code is asking else frame.f_locals


def expect_converted_whole(model: PreTrainedModel) -> None:
    """Raise InputError for a model that is converted only in part, because it would be opened as a plain model."""
    for name, part in model.named_modules():
        config = vars(part).get("config")
        if getattr(config, KEY, None) != getattr(model.config, KEY, None) and hasattr(config, KEY):
            raise InputError(
                f"{type(model).__name__} must be converted whole to be saved by save_pretrained, got a model "
                f"with a converted part; save only the part: residua.save_connection(model.{name}, FOLDER)"
            )


def layer_in(module: nn.Module) -> "ConvertedLayer | None":
    """Return the converted layer that a module is or wraps; None if there is none, or several.

    Wrappers of torch, accelerate and PEFT forward attributes to the layer that runs. The submodules of other wrappers
    are searched.
    """
    layer = module if isinstance(module, ConvertedLayer) else getattr(module, "itself", None)
    if isinstance(layer, ConvertedLayer):
        return layer
    inside = [part for part in module.modules() if isinstance(part, ConvertedLayer)]
    return inside[0] if len(inside) == 1 else None


def layers_in(stack: nn.Module) -> list[Any]:
    """Return the converted layers in a list of layers, without their wrappers; [] for any other module."""
    found = [layer_in(child) for child in stack.children()]  # `:=` inside a comprehension breaks the compiled graph
    return [layer for layer in found if layer is not None]


def layer_streams(model: nn.Module) -> list[LayerStream]:
    """Return the parts of the stream that the layers of a model own, in order; [] if the model is not converted."""
    stacks = (module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential)))
    layers = {id(layer): layer for stack in stacks for layer in layers_in(stack)}
    return [getattr(layer, STREAM).itself for layer in layers.values()]


class Swapped:
    """Base of the mixins that are added to the class of a module.

    Pickling and copying store the mixin and the plain class, because the combined class cannot be imported.

    prefix: the prefix of the new class's name; empty if tools look the class up by the original name.
    """

    prefix: ClassVar[str] = ""

    def __reduce_ex__(self, protocol: Any) -> Any:
        if "swapped_from" not in vars(type(self)):  # a subclass that a tool made
            return super().__reduce_ex__(protocol)
        return _blank, type(self).__bases__, self.__dict__


class Holder(Swapped):
    """Mixin for a module that holds readers. A module that replaces one, such as a wrapper, becomes a reader.

    residua_readers: for each reader, by the name of the child, whether it is a connection's norm.
    """

    residua_readers: Mapping[str, bool] = {}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.residua_readers and isinstance(value, nn.Module):
            become_reader(value, is_norm=self.residua_readers[name])
        super().__setattr__(name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        super().add_module(name, module)  # type: ignore[misc]
        setattr(self, name, module)


class ConvertedLayer(Holder):
    """Mixin for a layer: it runs its own code on a `Flow`."""

    @property
    def itself(self) -> "ConvertedLayer":
        """This layer. Wrappers forward the attribute to the layer inside, and adapters to the copy that runs."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stream: LayerStream = getattr(self, STREAM)
        memories = kwargs.pop(MEMORY, {})
        expect_known_keywords(stream.keywords, kwargs)
        if stream.looks_back and not memories:
            raise UnknownUse("gets no padding and no cache from its model, but this scheme reads earlier tokens")
        checkpointed = self.training and getattr(self, "gradient_checkpointing", False)  # type: ignore[attr-defined]
        name = "" if args else next((name for name in INPUTS if name in kwargs), None)
        if name is None:
            raise UnknownUse(
                f"must get its residual as the first argument or under one of the names {', '.join(INPUTS)}, got "
                "neither"
            )
        incoming = args[0] if args else kwargs[name]
        expect_no_reentrant_checkpoint(incoming)
        flow = stream.flow_of(incoming, memories, checkpointed=checkpointed)
        if args:
            args = (flow, *args[1:])
        else:
            kwargs[name] = flow
        return stream.output_of(super().forward(*args, **kwargs), memories)  # type: ignore[misc]


def expect_no_reentrant_checkpoint(incoming: Tensor | Flow) -> None:
    """Raise ValueError for a layer inside a reentrant checkpoint, which passes no gradient to a state.

    A model's own checkpoints are refused earlier; those in a training loop are only seen here.
    """
    first = incoming._leaf if isinstance(incoming, Flow) else incoming
    if torch.is_grad_enabled() or not first.requires_grad or torch.compiler.is_compiling():
        return
    checkpointing = CheckpointFunction.forward.__code__
    if any(frame.f_code is checkpointing for frame, _ in traceback.walk_stack(None)):
        raise ValueError(
            "checkpoint must get use_reentrant=False around a layer of a converted model, got True: only the last "
            "layer would get a gradient"
        )


def keywords_of(layer: nn.Module) -> frozenset[str]:
    """Return the argument names of the forward passes of a layer and of its submodules."""
    return frozenset(name for module in layer.modules() for name in inspect.signature(module.forward).parameters)


def expect_known_keywords(keywords: frozenset[str], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError if a cache or a mask is passed under a name that the layer would silently ignore."""
    for name, item in kwargs.items():
        if item is not None and name not in keywords and ("mask" in name or isinstance(item, Cache)):
            raise TypeError(f"a layer of this model takes no {name!r}, and would silently ignore it")


def reads(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Flow | None:
    """Return the flow that a module reads: its first argument among tensors and flows, if this is a flow; else None."""
    first = next((item for item in (*args, *kwargs.values()) if isinstance(item, (Flow, Tensor))), None)
    return first if isinstance(first, Flow) else None


class Reader(Swapped):
    """Mixin for a module of a layer that reads the residual.

    If the module is called with a flow, it runs on the tensor x read from the flow. If it is the norm of a connection
    (`residua_is_norm`), it returns x, because the connection has already applied the norm. Hooks on the module
    therefore run once, on tensors.
    """

    residua_is_norm = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        flow = args[0] if args and isinstance(args[0], (Tensor, Flow)) else reads(args, kwargs)
        if not isinstance(flow, Flow):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        x = flow.read()
        if self.residua_is_norm:
            return x
        args = tuple(x if item is flow else item for item in args)
        kwargs = {name: x if item is flow else item for name, item in kwargs.items()}
        return super().__call__(*args, **kwargs)  # type: ignore[misc]


def let_read(holder: Any, name: str, *, is_norm: bool) -> None:
    """Make a child of a module a reader of the residual, and any module that replaces it later."""
    if not isinstance(holder, Holder):
        swap(holder, Holder)
    vars(holder)["residua_readers"] = {**holder.residua_readers, name: is_norm}
    become_reader(getattr(holder, name), is_norm=is_norm)


def become_reader(module: Any, *, is_norm: bool) -> None:
    """Make a module a reader of the residual; is_norm: whether it is the norm of its connection."""
    if not isinstance(module, Reader):
        swap(module, Reader)
        vars(module)["residua_is_norm"] = is_norm


INPUTS = ("hidden_states", "x", "inputs_embeds", "inputs", "hidden_state")
"""The keywords by which trunks pass the residual to their layers, if not by position."""


@cache
def swapped_class(mixin: Any, plain: type) -> type:
    """Return the class (mixin, plain), whose name is that of `plain` with the mixin's prefix; mixin: a `Swapped`."""
    names = {"__module__": plain.__module__, "__qualname__": f"{mixin.prefix}{plain.__qualname__}"}
    return type(f"{mixin.prefix}{plain.__name__}", (mixin, plain), {**names, "swapped_from": plain})


def swap(module: Any, mixin: Any) -> None:
    """Add `mixin` to the class of a module.

    torch makes a class for a parametrised module; the mixin is added to the base of that class.
    """
    plain: Any = type(module)
    # The name is checked too, because a wrapper forwards the attribute that `is_parametrized` looks for.
    if is_parametrized(module) and plain.__name__.startswith("Parametrized"):
        _move(module, _rebased(plain, swapped_class(mixin, *plain.__bases__)))
    else:
        _move(module, swapped_class(mixin, plain))


def _move(module: Any, cls: type) -> None:
    """Set the class of a module. Plain assignment to a compiled module would change the module inside it."""
    object.__setattr__(module, "__class__", cls)


def swap_back(module: Any) -> None:
    """Remove the mixins from the class of a module; subclasses that tools have made since are kept."""
    _move(module, _swapped_back(type(module)))


def _swapped_back(cls: type) -> type:
    if not issubclass(cls, Swapped):
        return cls
    if plain := vars(cls).get("swapped_from"):
        return _swapped_back(plain)
    return _rebased(cls, *map(_swapped_back, cls.__bases__))


def _rebased(cls: type, *bases: type) -> type:
    """Return a copy of `cls` with other bases; `cls` was made at run time, for example by FSDP2."""
    own = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    wrapped = getattr(own.get("forward"), "__wrapped__", None)
    if wrapped is not None and wrapped is getattr(super(cls, cls), "forward", None):
        del own["forward"]  # transformers wraps the inherited one again in each subclass of a layer
    return type(cls)(cls.__name__, bases, own)


def release(model: nn.Module) -> None:
    """Turn the converted layers in a model, and the readers in them, back into plain modules."""
    for module in list(model.modules()):
        if isinstance(module, ConvertedLayer):
            delattr(module, STREAM)
        if isinstance(module, (Holder, Reader)):
            swap_back(module)
            for name in ("residua_is_norm", "residua_readers"):
                vars(module).pop(name, None)


def _blank(mixin: Any, plain: type) -> Any:
    return object.__new__(swapped_class(mixin, plain))
