"""Give a transformers model another residual connection: `convert`, and back: `unconvert`."""

import inspect
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from residua.connections import Scheme
from residua.connections.schemes.residual import Residual
from residua.conversion.anatomy import Conversion, observe, stack_of
from residua.conversion.configuration import conversion_of, mark, unmark
from residua.conversion.flow import UnknownUse
from residua.conversion.probe import Situation, change, outputs, probe, situations, uneven
from residua.conversion.rebuild import is_converted, layers_of, new_streams, rebuild, restore, stack_in, streams_of
from residua.errors import InputError, extra, first_line, require
from residua.models.configuration import causal_scheme
from residua.models.dialects import DIALECTS
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

VISION = ("visual", "vision", "deepstack")
"""How the names of arguments begin by which a trunk takes features of images for between its layers."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How much an output may change, relative to the largest, where a scheme preserves the model; 0.1 in half precision."""


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
    inputs, before = probe(model, inputs)
    size = model.num_parameters()
    with evaluating(model):
        try:
            conversion = find_anatomy(model, scheme, inputs)
        except InputError as error:
            raise InputError(f"{error}{_known(model)}") from error
        rebuild(model, conversion)
        try:
            after = _run(model, partial(outputs, model, inputs))
            if start == "preserve" and (words := _change(model, before, after)):
                raise InputError(
                    f"{type(model).__name__}: with this scheme's preserving start its outputs change by {words}; "
                    "start='fresh' converts it all the same"
                )
        except BaseException:
            restore(model, conversion)
            raise
    for layer, stream in zip(stack_in(model, conversion), streams_of(model, conversion)):
        stream.train(layer.training)  # it was made while the model was in evaluation mode
    mark(model, conversion)
    if os.environ.get("RANK", "0") == "0":
        count = sum(map(len, conversion.anatomy))
        added = f"{count} connections, {model.num_parameters() - size:+,} parameters to {size:,}"
        equal = "equal outputs" if start == "preserve" else "new connections, to be trained"
        logging.getLogger("residua").info(f"{type(model).__name__}: {added}, {equal}")
    return model


def find_anatomy(model: PreTrainedModel, scheme: Scheme, inputs: Mapping[str, Any]) -> Conversion:
    """Return how a model can be converted to `scheme`, found with the plain residual; the model is left as it was.

    model: in evaluation mode, as `evaluating` puts it; inputs: small ones that it runs on, as from `probe`.

    Raises:
        InputError: it cannot be converted.
    """
    name, (path, stack) = type(model).__name__, stack_of(model)
    changed = uneven(model)
    ways = situations(model, inputs, changed)
    before = _outputs_of(model, ways)
    anatomy = observe(model, stack, partial(outputs, model, inputs, changed))
    conversion = Conversion(scheme, path, anatomy)
    looks_back = any(stream.looks_back for stream in new_streams(model, conversion))
    plain = replace(conversion, scheme=Residual())
    rebuild(model, plain)
    try:
        after = {way: _run(model, ways[way]) for way in before}
        fits = not looks_back or _is_causal(streams_of(model, plain), next(iter(ways.values())))
    finally:
        restore(model, plain)
    for way in before:
        if difference := change(before[way], after[way]):
            raise InputError(
                f"{name}: its layers were rebuilt with the plain residual, and {way} its outputs changed by up to "
                f"{difference:.1e}: they use their residual in a way that is not seen"
            )
    if not fits:
        raise InputError(
            f"connection must be a scheme that reads single tokens, got one that reads earlier ones; {name} reads in "
            "both directions"
        )
    return conversion


def _outputs_of(model: PreTrainedModel, ways: Mapping[str, Situation]) -> dict[str, list[Tensor]]:
    """Return the outputs in every situation in which the model runs; the first must be one, and say the same twice."""
    name, results = type(model).__name__, {}
    first = next(iter(ways))
    for way, run in ways.items():
        with suppress(Exception):  # a model without a cache, or without padding
            results[way] = run()
    if first not in results or change(results[first], ways[first]()):
        raise InputError(f"{name} must give equal outputs for equal inputs, got different ones")
    if not any(x.isfinite().any() for x in results[first]):
        raise InputError(f"{name} must give finite numbers for a small input, got none")
    return results


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
        if words := _change(model, before, after):
            rebuild(model, conversion, streams, layers)
            raise InputError(
                f"{type(model).__name__}: without its connections its outputs would change by {words}; lossy=True "
                "drops them all the same"
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


def _known(model: PreTrainedModel) -> str:
    """Return where to look for a residual of a released model that is not the plain one."""
    kind = model.config.get_text_config().model_type.removesuffix("_text")
    return "; residua.models.dialects knows this residual and loads its parameters" if kind in DIALECTS else ""


def _run(model: PreTrainedModel, run: Situation) -> list[Tensor]:
    try:
        return run()
    except UnknownUse as error:
        raise InputError(f"{type(model).__name__}: a layer {error.use}") from error
    except Exception as error:  # a keyword for the layers that the model hands to something else, and the like
        raise InputError(f"{type(model).__name__}: a layer cannot run rebuilt: {first_line(error)}") from error


def _is_causal(streams: Sequence[Any], run: Situation) -> bool:
    """Return whether the residual before the last token ignores the last token, in a model over the plain residual.

    Its gradient says so exactly; the numbers do not where tokens are computed in groups, as by experts.
    """
    ends: list[Tensor] = []

    def begin(_: nn.Module, args: Any) -> Any:
        ends.append(args[0].detach().requires_grad_())
        return (ends[0], *args[1:])

    hooks = [
        streams[0].expand.register_forward_pre_hook(begin),
        streams[-1].collapse.register_forward_hook(lambda module, args, x: ends.append(x)),
    ]
    try:
        with torch.enable_grad():
            run()
            x = ends[-1][:, :-1]
            weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            (gradient,) = torch.autograd.grad((x * weights).sum(), ends[0])
    finally:
        for hook in hooks:
            hook.remove()
    return not gradient[:, -1].any()


def _change(model: nn.Module, before: list[Tensor], after: list[Tensor]) -> str:
    """Return by how much the outputs of a model changed; nothing for no more than its precision allows."""
    # The narrowest dtype counts: Mamba in half precision returns logits in float32.
    bound = max(TOLERANCE.get(x.dtype, 0.1) for x in (*before, *model.parameters()) if x.is_floating_point())
    difference = change(before, after)
    return f"{difference:.1e} of the largest one, more than {bound:.0e}" if difference > bound else ""
