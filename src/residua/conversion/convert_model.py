"""Give a transformers model another residual connection: `convert`, and back: `unconvert`."""

import inspect
import logging
import os
from collections.abc import Mapping
from math import inf
from typing import Any, Literal, TypeVar

import torch

from residua.connections import Scheme
from residua.conversion.anatomy import stack_of
from residua.conversion.configuration import conversion_of, mark, unmark
from residua.conversion.probe import change, outputs, probe
from residua.conversion.rebuild import is_converted, layers_of, rebuild, restore, streams_of
from residua.conversion.trial import Trial, tolerance
from residua.errors import InputError, extra, first_line, require
from residua.models.configuration import causal_scheme
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

VISION = ("visual", "vision", "deepstack")
"""How the names of arguments begin by which a trunk takes features of images for between its layers."""

Model = TypeVar("Model", bound=PreTrainedModel)


@torch.inference_mode(False)  # in which connections would be made that cannot be trained
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
    require(start in ("preserve", "fresh"), "start", "'preserve' or 'fresh'", start)
    try:
        scheme = causal_scheme(connection)
    except ValueError as error:
        raise InputError(str(error)) from error
    if start == "preserve":
        try:
            scheme = scheme.preserving()
        except ValueError as error:
            raise InputError(f"{first_line(error)}; or start='fresh', to train from scratch") from error
    expect_convertible(model)
    if inputs is None:
        expect_text(model)
    size = model.num_parameters()
    with evaluating(model), Trial(model, inputs) as trial:
        conversion = trial.find(scheme)
        trial.rebuild(conversion, most=tolerance(model, trial.outputs) if start == "preserve" else inf)
    for layer, stream in zip(trial.stack, streams_of(model, conversion)):
        stream.train(layer.training)  # it was made while the model was in evaluation mode
    mark(model, conversion)
    if os.environ.get("RANK", "0") == "0":
        count = sum(map(len, conversion.anatomy))
        added = f"{count} connections, {model.num_parameters() - size:+,} parameters to {size:,}"
        equal = "equal outputs" if start == "preserve" else "new connections, to be trained"
        logging.getLogger("residua").info(f"{type(model).__name__}: {added}, {equal}")
    return model


def unconvert(model: Model, *, lossy: bool = False, inputs: Mapping[str, Any] | None = None) -> Model:
    """Give a converted model its plain residual back, in place, and return it.

    inputs: as of `convert`; not needed with `lossy=True`, which compares nothing.

    Raises:
        InputError: it was not converted, or its connections have learnt, so that it would compute something else. The
            message says by how much; `lossy=True` drops what they learnt.
    """
    conversion = conversion_of(model)
    inputs, before = ({}, []) if lossy else probe(model, inputs)
    with evaluating(model):
        layers, streams = layers_of(model, conversion), streams_of(model, conversion)
        restore(model, conversion)
        after = [] if lossy else outputs(model, inputs)
        if not lossy and (difference := change(before, after)) > tolerance(model, before):
            rebuild(model, conversion, streams, layers)
            raise InputError(
                f"{type(model).__name__}: without its connections its outputs would change by {difference:.1e} of the "
                "largest one; lossy=True drops them all the same"
            )
    unmark(model)
    return model


def expect_convertible(model: Any) -> None:
    """Raise InputError for a model whose kind cannot be converted."""
    if not isinstance(model, PreTrainedModel):
        hint = "; open a folder with from_pretrained" if isinstance(model, (str, os.PathLike)) else ""
        hint = "; convert a model before PEFT wraps it" if hasattr(model, "get_base_model") else hint
        raise InputError(f"model must be a model of transformers, got {type(model).__name__}{hint}")
    name = type(model).__name__
    if is_converted(model):
        raise InputError(f"{name}: this model is converted already; residua.unconvert(model) first")
    if getattr(model.config, "model_type", None) == "residua":
        raise InputError(f"{name}: choose the connection in its ResiduaConfig; convert is for models without one")
    halves = (model.get_encoder(), model.get_decoder()) if getattr(model.config, "is_encoder_decoder", False) else ()
    if len({id(half) for half in (*halves, model)}) == 3:
        raise InputError(
            f"{name} must have one stack of layers, got an encoder and a decoder; convert one of them, "
            "residua.convert(model.get_encoder(), ...)"
        )
    quantised = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    if quantised or not all(p.is_floating_point() or p.is_complex() for p in model.parameters()):
        raise InputError(
            f"{name} must have weights in floating point, got a quantised model; load it without quantisation"
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise InputError(
            f"{name} must have its weights in memory, got some on the meta device: not loaded, or offloaded"
        )
    if any("forward" in vars(layer) for layer in stack_of(model)[1]):  # they would run as if they had no connections
        raise InputError(
            f"{name} must have layers that run the code of their class, got others, such as a hook of accelerate; "
            "convert the model before it is dispatched to devices"
        )


def expect_text(model: PreTrainedModel) -> None:
    """Raise InputError for a model that adds features of images between its layers, which token ids would not show."""
    _, stack = stack_of(model)
    trunk = next(module for module in model.modules() if stack in module.children())
    names = [name for name in inspect.signature(trunk.forward).parameters if name.startswith(VISION)]
    if names and "pixel_values" in inspect.signature(model.forward).parameters:
        raise InputError(
            f"{type(model).__name__}: inputs must be given for a model whose layers take {names[0]}, got none; "
            "give a small batch with an image, or one without (inputs={'input_ids': ...}) to use it on text alone"
        )
