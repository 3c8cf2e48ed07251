"""The connections in the layers of a model: built into them, found there, and taken out again."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from residua.connections import Stream
from residua.connections.parts.memory import window_of
from residua.conversion.anatomy import Conversion
from residua.conversion.flow import (
    STREAM,
    Borrowed,
    ConvertedLayer,
    LayerStream,
    keywords_of,
    layer_streams,
    layers_in,
    lend,
    let_read,
    release,
    swap,
)
from residua.conversion.memory import attach, detach
from residua.errors import InputError, first_line


def new_streams(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Build the part of the stream of every layer, with the norms that the layers have."""
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
        raise InputError(f"no stream of width {width}: {first_line(error)}") from error
    expect_one_input(whole)
    lend(whole)
    looks_back = any(map(window_of, whole.parts))
    connections: Any = iter(whole.connections)
    streams = []
    for i, (layer, sublayers) in enumerate(zip(stack, anatomy)):
        ends = whole.expand if i == 0 else None, whole.collapse if i == len(stack) - 1 else None
        part, keywords = islice(connections, len(sublayers)), keywords_of(layer)
        stream = LayerStream(part, *ends, keywords=keywords, looks_back=looks_back)
        dtype = next(layer.parameters()).dtype
        streams.append(stream.to(_device_of(layer), torch.promote_types(dtype, torch.float32)))
    return streams


def expect_one_input(stream: Stream) -> None:
    """Raise InputError for a stream that reads several inputs for a sublayer: layers of transformers take one."""
    if any(getattr(connection, "inputs", 1) > 1 for connection in stream.connections):
        raise InputError(
            "connection must be a scheme with one input for a sublayer, as the layers of transformers take, got one "
            f"that reads several for every sublayer: {stream.scheme!r}"
        )


def expect_depth(model: nn.Module, conversion: Conversion) -> None:
    """Raise InputError unless a model has as many layers as the connections are of."""
    found, expected = len(stack_in(model, conversion)), len(conversion.anatomy)
    if found != expected:
        raise InputError(
            f"the connections are of {expected} layers, the model has {found}; add or remove layers of the plain "
            "model, before residua.convert"
        )


def _device_of(layer: nn.Module) -> torch.device:
    """Return the device of most parameters of a layer: one that is built on another may make some on the CPU."""
    devices = Counter(parameter.device for parameter in layer.parameters())
    return devices.most_common(1)[0][0]


def rebuild(
    model: Any,
    conversion: Conversion,
    streams: Sequence[LayerStream] | None = None,
    layers: Sequence[Any] | None = None,
) -> None:
    """Give every layer of a model its part of the stream, and let it run on that.

    streams: by default new ones; layers: if they are not what stands in the list of layers, but inside.
    """
    streams = new_streams(model, conversion) if streams is None else streams
    stack = stack_in(model, conversion)
    attach(model, stack)
    for layer, sublayers, stream in zip(layers or stack, conversion.anatomy, streams, strict=True):
        stream.train(layer.training)
        setattr(layer, STREAM, stream)
        swap(layer, ConvertedLayer)
        for sublayer in sublayers:
            for name in sublayer.readers:
                parent, _, own_name = name.rpartition(".")
                let_read(layer.get_submodule(parent), own_name, is_norm=sublayer.normed)


def restore(model: nn.Module, conversion: Conversion) -> None:
    """Undo `rebuild`."""
    stack = stack_in(model, conversion)
    detach(model, stack)
    release(stack)


def streams_of(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Return the part of the stream of every layer of a converted model."""
    return layer_streams(stack_in(model, conversion))


def layers_of(model: nn.Module, conversion: Conversion) -> list[Any]:
    """Return the layers of a converted model, in order, in whatever wrappers they stand."""
    return layers_in(stack_in(model, conversion))


def is_converted(model: nn.Module) -> bool:
    """Return whether the layers of a model run over connections that `convert` gave them."""
    return bool(layer_streams(model))


def stream_of(model: nn.Module) -> Stream:
    """Return the whole stream of a converted model, made of the parts that its layers own."""
    parts: list[Any] = layer_streams(model)
    connections = [connection for part in parts for connection in part.connections]
    return Stream(parts[0].expand, connections, parts[-1].collapse)


def stack_in(model: Any, conversion: Conversion) -> nn.ModuleList:
    """Return the list of the layers of a model. Raises InputError if it has none of this name."""
    try:
        return model.base_model.get_submodule(conversion.stack)
    except AttributeError as error:
        raise InputError(
            f"{type(model).__name__} must have its layers in {conversion.stack!r}, and has not: the connections are of "
            "another model or of a part of one; load them into that with residua.load_connection"
        ) from error


def _width(model: Any, norms: Sequence[nn.Module]) -> int:
    """Return the width of the residual: of the norms that read it, else as the configuration says."""
    widths = (parameter.shape[-1] for norm in norms for parameter in norm.parameters())
    return next(widths, None) or model.config.get_text_config().hidden_size


def _eps(norms: Sequence[nn.Module]) -> float:
    """Return the eps of the model's norms, 1e-5 where they have none."""
    names = ("eps", "variance_epsilon", "norm_eps", "epsilon")
    values = (getattr(norm, name, None) for norm in norms for name in names)
    return next((value for value in values if isinstance(value, float)), 1e-5)
