"""Build connections into the layers of a model, find them there, and take them out again."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from residua.connections import Connection, Scheme, Stream
from residua.connections.families.convolved import BranchConnection
from residua.connections.parts.memory import window_of
from residua.conversion.anatomy import Conversion
from residua.conversion.flow import (
    STREAM,
    ConvertedLayer,
    LayerStream,
    Reader,
    UnknownUse,
    layer_streams,
    let_read,
    release,
    swap,
)
from residua.conversion.memory import attach, detach
from residua.errors import InputError, first_line


def new_streams(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Build each layer's part of the stream, with the norms of the layers as the norms of the connections."""
    expect_depth(model, conversion)
    stack, anatomy = stack_in(model, conversion), conversion.anatomy
    norms = [
        Borrowed(layer, sublayer.readers[0], cast=sublayer.cast) if sublayer.normed else nn.Identity()
        for layer, sublayers in zip(stack, anatomy)
        for sublayer in sublayers
    ]
    owners = [norm.owner for norm in norms if isinstance(norm, Borrowed)]
    width = _width(model, owners)
    try:
        whole = conversion.scheme.build(width, len(norms), norm_eps=_eps(owners), norm=norms.__getitem__)
    except ValueError as error:
        raise InputError(f"the scheme cannot be built at width {width}: {first_line(error)}") from error
    expect_one_input(whole)
    lend(whole)
    looks_back = any(map(window_of, whole.parts))
    states = [conversion.scheme.state_spec(boundary, width) for boundary in range(len(norms) + 1)]
    fixed = not any((*part.parameters(), *part.buffers()) for part in (whole.expand, whole.collapse))
    skips = fixed and not looks_back and all(state == states[0] for state in states)
    connections: Any = iter(whole.connections)
    streams = []
    for i, (layer, sublayers) in enumerate(zip(stack, anatomy)):
        ends = whole.expand if i == 0 else None, whole.collapse if i == len(stack) - 1 else None
        stream = LayerStream(
            layer,
            islice(connections, len(sublayers)),
            *ends,
            looks_back=looks_back,
            ends=(whole.expand, whole.collapse) if skips else (None, None),
        )
        dtype = next(layer.parameters()).dtype
        streams.append(stream.to(_device_of(layer), torch.promote_types(dtype, torch.float32)))
    return streams


def expect_one_input(stream: Stream) -> None:
    """Raise InputError for a stream with several inputs per sublayer, because transformers layers take one."""
    several = [connection for connection in stream.connections if getattr(connection, "inputs", 1) > 1]
    if several:
        remedy = f"; give the scheme the option {several[0].single_input}"
        raise InputError(
            "connection must be a scheme with one input for a sublayer, as transformers layers take, got a scheme "
            f"that reads several for a sublayer: {stream.scheme!r}{remedy}"
        )


def expect_depth(model: nn.Module, conversion: Conversion) -> None:
    """Raise InputError unless a model has the number of layers that its connections were made for."""
    found, expected = len(stack_in(model, conversion)), len(conversion.anatomy)
    if found != expected:
        raise InputError(
            f"the connections are for {expected} layers, the model has {found}; add or remove layers of the plain "
            "model, before residua.convert"
        )


def _device_of(layer: nn.Module) -> torch.device:
    """Return the device of most parameters of a layer. Some layers create a few parameters on the CPU."""
    devices = Counter(parameter.device for parameter in layer.parameters())
    return devices.most_common(1)[0][0]


class Borrowed(nn.Module):
    """A connection's norm, which calls the model's own norm, `owner`. The owner keeps its place and its names.

    A connection holds this module as a plain attribute (`lend`), so that no tool finds it among the submodules.
    `named_parameters` lists the owner's parameters, because a connection may recompute the norm in the backward pass.
    If another module, such as an adapter, takes the owner's place later, that module is called. A deep copy that
    includes the layer refers to the copied layer; any other copy refers to the original layer.

    cast: whether the input is cast to the dtype of the owner's weights.
    """

    def __init__(self, layer: nn.Module, name: str, *, cast: bool):
        super().__init__()
        layer.get_submodule(name)  # raises AttributeError if there is none
        self._layer = [layer]  # a list does not register a submodule
        self._path = name.split(".")
        self.cast = cast

    @property
    def owner(self) -> Any:
        module = self._layer[0]
        for name in self._path:
            child = module._modules.get(name)
            module = child_of(module, name) if child is None else child
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> "Borrowed":
        other = copy(self)
        other._layer = [memo.get(id(layer), layer) for layer in self._layer]
        return other

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if recurse:
            where = f"{prefix}.owner" if prefix else "owner"
            yield from self.owner.named_parameters(where, remove_duplicate=remove_duplicate)

    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner
        weight = next(owner.parameters(), None) if self.cast else None
        if not isinstance(owner, Reader):  # the layer would apply this norm again, to normalised values
            name = ".".join(self._path)
            raise UnknownUse(f"has another module in the place of {name}; put it there with setattr, or before convert")
        return owner(x if weight is None else x.to(weight.dtype))

    __call__ = forward  # hooks run on the owner


def child_of(module: Any, name: str) -> Any:
    """Return a child of a module that may be inside a wrapper. Raises UnknownUse if the child no longer exists."""
    if isinstance(child := getattr(module, name, None), nn.Module):  # wrappers of torch and PEFT forward attributes
        return child
    child = next((part._modules[name] for part in module.modules() if part._modules.get(name) is not None), None)
    if child is None:
        raise UnknownUse(f"no longer has the module {name}, which read its residual when the model was converted")
    return child


def lend(stream: nn.Module) -> None:
    """Turn the borrowed norms in a stream from submodules into plain attributes of the modules that call them."""
    for part in list(stream.modules()):
        for name, child in list(part._modules.items()):
            if isinstance(child, Borrowed):
                del part._modules[name]
                vars(part)[name] = child


def rebuild(
    model: Any,
    conversion: Conversion,
    streams: Sequence[LayerStream] | None = None,
    layers: Sequence[Any] | None = None,
) -> None:
    """Give every layer of a model its part of the stream, and convert the layer to run on it.

    streams: the parts; None to build them. layers: the layers to convert, if the model's list holds wrappers around
    them; None for the entries of the list.
    """
    stack = stack_in(model, conversion)
    found: list[Any] = list(layers or stack)
    exchange(found, new_streams(model, conversion) if streams is None else streams)
    attach(model, stack)
    for layer, sublayers in zip(found, conversion.anatomy):
        swap(layer, ConvertedLayer)
        for sublayer in sublayers:
            for name in sublayer.readers:
                parent, _, own_name = name.rpartition(".")
                let_read(layer.get_submodule(parent), own_name, is_norm=sublayer.normed)


def exchange(layers: Iterable[Any], streams: Iterable[LayerStream]) -> None:
    """Put parts of a stream into the layers, in place of their previous parts."""
    for layer, stream in zip(layers, streams, strict=True):
        setattr(layer, STREAM, stream.train(layer.training))


def restore(model: nn.Module, stack: nn.ModuleList) -> None:
    """Undo `rebuild`: give the layers their own code back."""
    detach(model, stack)
    release(stack)


def streams_of(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Return the part of the stream in each layer of a converted model."""
    return layer_streams(stack_in(model, conversion))


def is_converted(model: nn.Module) -> bool:
    """Return whether the layers of a model run over connections that `convert` gave them."""
    return bool(layer_streams(model))


def stream_of(model: nn.Module) -> Stream:
    """Return the whole stream of a converted model, made of the parts that its layers own."""
    parts: list[Any] = layer_streams(model)
    connections = [connection for part in parts for connection in part.connections]
    return Stream(parts[0].expand, connections, parts[-1].collapse)


def leaves_out_penalty(model: nn.Module, scheme: Scheme) -> bool:
    """Return whether `scheme`, that of a converted model, has a penalty, which the model's loss leaves out."""
    parts = chain.from_iterable(stream.modules() for stream in layer_streams(model))
    penalties = {type(part).penalty for part in parts if isinstance(part, Connection)}
    penalties -= {Connection.penalty, BranchConnection.penalty}  # none, and that of the connection inside
    return bool(penalties) and bool(getattr(scheme, "penalty", True))


def stack_in(model: Any, conversion: Conversion) -> nn.ModuleList:
    """Return the model's list of layers that `conversion` names. Raises InputError if there is none."""
    try:
        return model.base_model.get_submodule(conversion.stack)
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} must have its layers in {conversion.stack!r}, found none: the connections belong "
            "to another model or to a part of one; load them into that model with residua.load_connection"
        ) from error


def _width(model: Any, norms: Sequence[nn.Module]) -> int:
    """Return the width of the residual: that of the norms that read it, or else the configuration's hidden_size."""
    widths = (parameter.shape[-1] for norm in norms for parameter in norm.parameters())
    return next(widths, None) or model.config.get_text_config().hidden_size


def _eps(norms: Sequence[nn.Module]) -> float:
    """Return the eps of the model's norms; 1e-5 if they have none."""
    names = ("eps", "variance_epsilon", "norm_eps", "epsilon")
    values = (getattr(norm, name, None) for norm in norms for name in names)
    return next((value for value in values if isinstance(value, float)), 1e-5)
