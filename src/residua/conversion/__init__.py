"""Another residual connection for a transformers model: what `residua.convert` and its companions are.

These functions load transformers only when they are called.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from residua.connections import Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    Model = TypeVar("Model", bound=PreTrainedModel)
else:
    Model = TypeVar("Model")


def convert(
    model: Model,
    connection: str | Mapping[str, Any] | Scheme,
    *,
    start: Literal["preserve", "fresh"] = "preserve",
    inputs: Mapping[str, Any] | None = None,
) -> Model:
    """Rebuild the layers of a transformers model over another residual connection, in place; return the model.

    The layers keep their own code, and all parameters their names. What reads the residual reads through a connection,
    and what is added to it is written by one. The norms of the model become the norms of the connections.

    Args:
        model: a model of transformers with its weights, in any mode and precision.
        connection: a preset's name, a mapping with options or a `Scheme`, as everywhere in residua.
        start: "preserve": the converted model computes what it computed before (`Scheme.preserving`) and can learn
            from there; "fresh": the connections start as in a new model.
        inputs: arguments of the model's forward pass, a small batch on which it is watched; needed by a model that
            reads anything but token ids, such as `inputs={"pixel_values": images}`.

    Raises:
        InputError: the model cannot be converted, or the scheme has no start that preserves it. The message has the
            reason; the model is left as it was.

    The logger "residua" says in one line, at level INFO and in the first rank, what was done.
    """
    from residua.conversion import convert_model
    from residua.conversion.flow import layer_streams

    size = model.num_parameters() if hasattr(model, "num_parameters") else 0  # without, it is refused
    convert_model.convert(model, connection, start, inputs)
    if os.environ.get("RANK", "0") == "0":
        count = sum(len(stream.connections) for stream in layer_streams(model))
        added = f"{count} connections, {model.num_parameters() - size:+,} parameters to {size:,}"
        outputs = "equal outputs" if start == "preserve" else "new connections, to be trained"
        logging.getLogger("residua").info(f"{type(model).__name__}: {added}, {outputs}")
    return model


def unconvert(model: Model, *, lossy: bool = False, inputs: Mapping[str, Any] | None = None) -> Model:
    """Give a converted model its plain residual back, in place, and return it.

    inputs: as of `convert`; not needed with `lossy=True`, which compares nothing.

    Raises:
        InputError: it was not converted, or its connections have learnt, so that it would compute something else. The
            message says by how much; `lossy=True` drops what they learnt.
    """
    from residua.conversion import convert_model

    convert_model.unconvert(model, lossy, inputs)
    return model


def save_connection(model: "PreTrainedModel", folder: str | Path) -> None:
    """Write the connections of a converted model, without the model, into a folder: safetensors and JSON.

    Raises:
        InputError: the model was not converted, or holds adapters of PEFT.
    """
    from residua.conversion import saving

    saving.save_connection(model, folder)


def load_connection(model: Model, folder: str | Path) -> Model:
    """Give a model the connections in a folder that `save_connection` wrote, in place, and return it.

    model: the plain model that they were trained with, or one that was converted to the same connection. Nothing in the
    folder is executed.

    Raises:
        InputError: the folder has no connections, or they belong to a model with other layers, another scheme or other
            weights.
    """
    from residua.conversion import saving

    saving.load_connection(model, folder)
    return model


def load(folder: str | Path, **options: Any) -> "PreTrainedModel":
    """Open a language model that was converted, or one of ours, saved by `save_pretrained`, and return it.

    It is `AutoModelForCausalLM.from_pretrained`, which knows such models once this was called or a model was converted,
    and at once where transformers was imported before residua.

    Args:
        folder: the folder, or the name of a repository on the hub.
        options: of `AutoModelForCausalLM.from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        InputError: weights are missing, or others are there.
    """
    from residua.conversion import saving

    return saving.load(folder, **options)
