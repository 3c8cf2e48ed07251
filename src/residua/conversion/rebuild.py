"""The connections in the layers of a model: built into them, found there, and taken out again."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from residua.connections import Stream
from residua.connections.memory import window_of
from residua.conversion.anatomy import Conversion
from residua.conversion.flow import (
    STREAM,
    Borrowed,
    ConvertedLayer,
    LayerStream,
    Reader,
    keywords_of,
    layer_streams,
    release,
    swap,
)
from residua.conversion.memory import attach, detach
from residua.errors import InputError, first_line


def rebuild(model: nn.Module, conversion: Conversion) -> None:
    """Give the layers of a model the connections of the conversion's scheme, initialised."""
    attach_streams(model, conversion, new_streams(model, conversion))


def new_streams(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Build the part of the stream of every layer, with the norms that the layers have."""
    _, stack = trunk(model, conversion.stack)
    anatomy = conversion.anatomy
    if len(stack) != len(anatomy):
        raise InputError(f"the connections are of {len(anatomy)} layers, the model has {len(stack)}")
    sublayers = [(layer, sublayer) for layer, found in zip(stack, anatomy) for sublayer in found]
    borrowed = [
        Borrowed(layer, found.readers[0], cast=found.cast) if found.normed else nn.Identity()
        for layer, found in sublayers
    ]
    norms: list[Any] = [norm.owner if isinstance(norm, Borrowed) else None for norm in borrowed]
    width = _width(model, norms)
    try:
        whole = conversion.scheme.build(width, len(sublayers), norm_eps=_eps(norms), norm=lambda i: borrowed[i])
    except ValueError as error:
        raise InputError(f"no stream of width {width}: {first_line(error)}") from error
    looks_back = any(map(window_of, whole.parts))
    connections: list[Any] = list(whole.connections)
    streams, first = [], 0
    for i, (layer, found) in enumerate(zip(stack, anatomy)):
        last = first + len(found)
        ends = whole.expand if i == 0 else None, whole.collapse if i == len(stack) - 1 else None
        own = LayerStream(connections[first:last], first, *ends, looks_back=looks_back)
        parameter = next(layer.parameters())
        streams.append(own.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32)))
        first = last
    return streams


def attach_streams(model: nn.Module, conversion: Conversion, streams: Sequence[LayerStream]) -> None:
    """Give every layer of a model its part of the stream, and let it run on that."""
    runs_layers, stack = trunk(model, conversion.stack)
    attach(model, runs_layers)
    for layer, found, stream in zip(stack, conversion.anatomy, streams, strict=True):
        stream.train(layer.training)
        stream.keywords = keywords_of(layer)
        setattr(layer, STREAM, stream)
        swap(layer, ConvertedLayer)
        for sublayer in found:
            for name in sublayer.readers:
                child: Any = layer.get_submodule(name)
                if not isinstance(child, Reader):
                    swap(child, Reader)
                    child.residua_is_norm = sublayer.normed


def restore(model: nn.Module, path: str) -> None:
    """Undo `rebuild` for the layers at `path` inside the base model."""
    runs_layers, stack = trunk(model, path)
    detach(model, runs_layers)
    for layer in stack:
        release(layer)


def streams_of(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Return the part of the stream of every layer of a converted model."""
    return [getattr(layer, STREAM) for layer in trunk(model, conversion.stack)[1]]


def is_converted(model: nn.Module) -> bool:
    """Return whether the layers of a model run over connections that `convert` gave them."""
    return bool(layer_streams(model))


def stream_of(model: nn.Module) -> Stream:
    """Return the whole stream of a converted model, made of the parts that its layers own."""
    parts = layer_streams(model)
    connections: list[Any] = [connection for part in parts for connection in part.connections]
    assert parts[0].expand is not None
    assert parts[-1].collapse is not None
    return Stream(parts[0].expand, connections, parts[-1].collapse)


def trunk(model: Any, path: str) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that runs the layers, and the list of them at `path` inside the base model."""
    return model.base_model.get_submodule(path.rpartition(".")[0]), model.base_model.get_submodule(path)


def _width(model: Any, norms: Sequence[Any]) -> int:
    """Return the width of the residual: of the norms that read it, else as the configuration says."""
    for norm in norms:
        for parameter in () if norm is None else norm.parameters():
            return int(parameter.shape[-1])
    return int(model.config.get_text_config().hidden_size)


def _eps(norms: Sequence[Any]) -> float:
    """Return the eps of the model's norms, 1e-5 where they have none."""
    for norm in norms:
        for name in ("eps", "variance_epsilon", "norm_eps", "epsilon"):
            if isinstance(found := getattr(norm, name, None), float):
                return found
    return 1e-5
