"""Give a transformers model another residual connection (`convert`), or its plain residual back (`unconvert`).

Both use a `Trial`, which compares the outputs of the model before and after the change.
"""

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from residua.connections import Scheme
from residua.connections.schemes.residual import Residual
from residua.conversion.anatomy import Anatomy, Conversion, Observed, stack_of
from residua.conversion.configuration import conversion_of, mark, unmark
from residua.conversion.flow import LayerStream, UnknownUse, layers_in, release
from residua.conversion.memory import around
from residua.conversion.probe import Situation, change, outputs, situations, small_inputs
from residua.conversion.rebuild import (
    exchange,
    is_converted,
    leaves_out_penalty,
    new_streams,
    rebuild,
    restore,
    stack_in,
    streams_of,
)
from residua.errors import InputError, extra, first_line, keywords, require
from residua.models.configuration import causal_scheme
from residua.models.dialects import DIALECTS
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

VISION = ("visual", "vision", "deepstack")
"""Prefixes of the arguments by which a trunk receives image features that it adds between its layers."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""The largest change allowed in preserved outputs, by dtype, relative to the largest output; 0.1 for other dtypes."""

PLAIN = (
    "its layers were rebuilt with the plain residual, and {way} its outputs changed by up to {amount:.1e}: they use "
    "their residual in a way that is not seen{dialect}"
)
PRESERVING = (
    "with this scheme's preserving start its outputs change by {amount:.1e} of the largest one, more than {most:.0e}; "
    "start='fresh' converts it all the same"
)
BACK = (
    "without its connections its outputs would change by {amount:.1e} of the largest one; lossy=True drops them all "
    "the same"
)

Model = TypeVar("Model", bound=PreTrainedModel)


@keywords
@torch.inference_mode(False)  # connections made in inference mode could not be trained
def convert(
    model: Model,
    connection: str | Mapping[str, Any] | Scheme,
    *,
    start: Literal["preserve", "fresh"] = "preserve",
    inputs: Mapping[str, Any] | None = None,
) -> Model:
    """Rebuild the layers of a transformers model over another residual connection, in place; return the model.

    The layers keep their own code, and all parameters their names. The modules that read the residual read through a
    connection, which writes their output. The norms of the model become the norms of the connections.

    Args:
        model: a transformers model with its weights, in any mode and precision.
        connection: a preset's name, a mapping with options or a `Scheme`, as everywhere in residua.
        start: "preserve": the converted model computes the same outputs as before (`Scheme.preserving`), and can be
            trained from there; "fresh": the connections start as in a new model.
        inputs: arguments of the model's forward pass, a small batch on which the model is observed. Required if the
            model reads anything but token ids: for images, `inputs={"pixel_values": images}`.

    Raises:
        InputError: the model cannot be converted, or the scheme has no start that preserves its outputs. The message
            gives the reason. The model is unchanged.

    The logger "residua" reports the result in one line, at level INFO and in the first rank. Warns if the scheme has a
    penalty, which the model's own loss leaves out.
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
    with Trial(model, inputs) as trial, evaluating(model):
        size = model.num_parameters()
        conversion = trial.find(scheme)
        trial.convert(preserving=start == "preserve")
    mark(model, conversion)
    if leaves_out_penalty(model, scheme):
        warnings.warn(
            f"the loss of a converted {type(model).__name__} leaves out the penalty of {scheme!r}; set its option "
            "penalty to 0 if you train without it",
            stacklevel=4,
        )
    if os.environ.get("RANK", "0") == "0":
        count = sum(map(len, conversion.anatomy))
        added = f"{count} connections, {model.num_parameters() - size:+,} parameters to {size:,}"
        equal = "equal outputs" if start == "preserve" else "new connections, to be trained"
        logging.getLogger("residua").info(f"{type(model).__name__}: {added}, {equal}")
    return model


@keywords
def unconvert(model: Model, *, lossy: bool = False, inputs: Mapping[str, Any] | None = None) -> Model:
    """Give a converted model its plain residual back, in place, and return it.

    inputs: as for `convert`; not needed with `lossy=True`, which compares no outputs.

    Raises:
        InputError: the model was not converted, or its connections were trained, so that its outputs would change. The
            message says by how much; `lossy=True` discards the training of the connections.
    """
    conversion = conversion_of(model)
    if lossy:
        restore(model, stack_in(model, conversion))
    else:
        with Trial(model, inputs, conversion) as trial, evaluating(model):
            trial.unconvert()
    unmark(model)
    return model


class Trial:
    """The conversion of a plain model, or its reversal. It either succeeds or leaves the model unchanged.

        with Trial(model, inputs) as trial, evaluating(model):
            conversion = trial.find(scheme)
            trial.convert(preserving=True)

    Each step stores its observations; `go_on` then raises an error if `refusal` returns a reason against the change.

    conversion: how the model was converted, to reverse it; None to convert a plain model.
    """

    def __init__(
        self, model: PreTrainedModel, inputs: Mapping[str, Any] | None = None, conversion: Conversion | None = None
    ):
        self.model = model
        self.conversion: Any = conversion
        self.streams: list[LayerStream] = []  # the new streams of the layers
        self.ways: dict[str, Situation]
        self.undo: Callable[[], None] = nothing  # reverts the changes of the model so far
        if conversion is None:
            self.path, self.stack = convertible_stack(model)
            self.images = "" if inputs is not None else image_argument(model, self.stack)
            self.ways = situations(model, small_inputs(model, inputs))
        else:
            self.images, self.stack = "", stack_in(model, conversion)
            self.ways = {"": partial(outputs, model, small_inputs(model, inputs))}
        self.way = next(iter(self.ways))  # every model must run in this way
        self.before: dict[str, list[Tensor]] = {}  # the outputs before the change, for each way that runs
        self.layers: list[Observed] = []
        self.error: Exception | None = None  # the error that the model or a layer raised
        self.rebuilt = False
        self.changed = ""  # the reason, if the outputs changed too much
        self.fits = True  # False if the scheme reads earlier tokens and the model is not causal

    def __enter__(self) -> "Trial":
        return self

    def __exit__(self, *_: Any) -> None:
        self.undo()
        for layer, stream in zip(self.stack, self.streams):
            stream.train(layer.training)  # it was built while the model was in evaluation mode

    def find(self, scheme: Scheme) -> Conversion:
        """Return how the model can be converted to `scheme`, and leave its layers rebuilt over the plain residual.

        Raises:
            InputError: the model cannot be converted.
        """
        self.run()
        conversion = Conversion(scheme, self.path, self.observe())
        plain = new_streams(self.model, replace(conversion, scheme=Residual()))
        self.streams = new_streams(self.model, conversion)
        self.undo = partial(restore, self.model, self.stack)
        rebuild(self.model, conversion, plain)
        self.compare(PLAIN, most=0)
        self.fits = not self.streams[0].looks_back or is_causal(plain, self.ways[self.way])
        self.go_on()
        return conversion

    def convert(self, *, preserving: bool) -> None:
        """Give the layers the connections of the scheme, in place of the plain residual.

        preserving: whether the outputs must stay the same, within `tolerance`.

        Raises:
            InputError: the layers do not run, or the outputs change although `preserving` is set.
        """
        exchange(self.stack, self.streams)
        self.compare(PRESERVING, most=self.tolerance if preserving else inf)
        self.undo = nothing

    def unconvert(self) -> None:
        """Give the layers of a converted model their own code back.

        Raises:
            InputError: the outputs change.
        """
        self.run()
        streams, layers = streams_of(self.model, self.conversion), layers_in(self.stack)
        self.undo = partial(rebuild, self.model, self.conversion, streams, layers)
        restore(self.model, self.stack)
        self.compare(BACK, most=self.tolerance)
        self.undo = nothing

    def run(self) -> None:
        """Run the unchanged model in every way that it supports: some models have no cache, or take no padding."""
        for way, run in self.ways.items():
            try:
                self.before[way] = run()
            except Exception as error:  # a model that needs other inputs may raise any exception
                if not self.before:
                    self.error = error
                    break
        self.go_on()

    def observe(self) -> Anatomy:
        """Run every layer over the plain residual, and return how each layer uses its residual.

        A module that receives the residual is a reader. If a layer fails, its readers that have submodules become
        compounds, whose submodules are readers instead: such a block may add to the residual itself.
        """
        compounds: list[set[str]] = [set() for _ in self.stack]
        while True:
            try:
                self.layers = [Observed(layer, names) for layer, names in zip(self.stack, compounds)]
                self.ways[self.way]()
                self.error = None
            except Exception as error:  # a layer's code may raise any exception if it gets a flow
                self.error = error
            finally:
                release(self.stack)
            last = max((i for i, layer in enumerate(self.layers) if layer.ran), default=0)
            compound = self.layers[last].compound() - compounds[last] if self.error else set()
            if not compound:
                break
            compounds[last] |= compound
        self.go_on()
        return tuple(layer.sublayers() for layer in self.layers)

    def compare(self, refusal: str, *, most: float) -> None:
        """Compare the outputs with those before the change: in every way if `most` is 0, otherwise only in the first.

        most: the largest allowed change, relative to the largest output; refusal: the message for a larger change.
        """
        self.rebuilt = True
        for way in list(self.before)[: 1 if most else None]:
            try:
                amount = change(self.before[way], self.ways[way]())
            except Exception as error:  # such as a keyword that the model does not pass to its layers
                self.error = error
                break
            if amount > most:
                self.changed = refusal.format(way=way, amount=amount, most=most, dialect=self._dialect)
                break
        self.go_on()

    @property
    def tolerance(self) -> float:
        """The allowed relative change of the outputs, by the narrowest dtype of the model's weights and outputs."""
        # Mamba in half precision returns logits in float32.
        tensors = (*self.before[self.way], *self.model.parameters())
        return max(TOLERANCE.get(x.dtype, 0.1) for x in tensors if x.is_floating_point())

    def go_on(self) -> None:
        """Raise InputError if there is a reason against this conversion."""
        if not (reason := self.refusal()):
            return
        self.undo()
        self.undo = nothing
        with suppress(Exception):
            if change(self.before[self.way], self.ways[self.way]()):
                reason = "must give equal outputs for equal inputs, got different ones"
        raise InputError(f"{type(self.model).__name__}: {reason}") from self.error

    def refusal(self) -> str:
        """Return the reason against this conversion and the remedy, from the observations so far; "" for none."""
        line = first_line(self.error) if self.error else ""
        if self.images:
            return (
                f"inputs must be given for a model whose layers take {self.images}, got none; give a small "
                "batch with an image, or one without (inputs={'input_ids': ...}) to use it on text only"
            )
        if not self.before:
            return f"could not run it on a small input: {line}"
        if not any(x.isfinite().any() for x in self.before[self.way]):
            return "must give finite numbers for a small input, got none"
        if len(set(map(id, self.stack))) < len(self.stack):
            return "must have layers of their own, found one that stands in several places"
        if self.error or not all(layer.ran for layer in self.layers):
            return f"{self._use(line)}{self._dialect}"
        if self.changed:
            return self.changed
        if not self.fits:
            return (
                "connection must be a scheme that reads single tokens, got a scheme that reads earlier tokens; this "
                "model reads in both directions"
            )
        return ""

    def _use(self, line: str) -> str:
        """Return which layer uses its residual in an unsupported way, and how; line: the first line of the error."""
        use = self.error.use if isinstance(self.error, UnknownUse) else ""
        if self.rebuilt:
            return f"a layer {use or f'cannot run rebuilt: {line}'}"
        if self.error and not use:
            return f"a layer needs its residual as a tensor: {line}"
        ran = [i for i, layer in enumerate(self.layers) if layer.ran]
        i = max(ran, default=0) if self.error else min(set(range(len(self.layers))) - {*ran})
        return f"layer {i} ({type(self.stack[i]).__name__}) {line or 'did not run'}"

    @property
    def _dialect(self) -> str:
        """A hint at `residua.models.dialects`, if it supports the model's type; otherwise ""."""
        kind = self.model.config.get_text_config().model_type.removesuffix("_text")
        return "; residua.models.dialects knows this residual and loads its parameters" if kind in DIALECTS else ""


def nothing() -> None:
    """Do nothing: there is nothing to undo."""


def image_argument(model: PreTrainedModel, stack: nn.ModuleList) -> str:
    """Return the argument of the trunk for image features that are added between its layers; "" if it has none.

    Such features are not exercised by token ids.
    """
    *_, trunk = around(model, stack)
    names = [name for name in inspect.signature(trunk.forward).parameters if name.startswith(VISION)]
    return names[0] if names and "pixel_values" in inspect.signature(model.forward).parameters else ""


def is_causal(streams: Sequence[LayerStream], run: Situation) -> bool:
    """Return whether the residual at earlier tokens is independent of the last token.

    streams: those of the model, which must be rebuilt over the plain residual. Gradients show the independence exactly;
    values do not if the model computes tokens in groups, as a mixture of experts does.
    """
    ends: list[Tensor] = []

    def begin(_: nn.Module, args: Any) -> Any:
        ends.append(args[0].detach().requires_grad_())
        return (ends[0], *args[1:])

    parts: list[Any] = [streams[0].expand, streams[-1].collapse]
    hooks = [
        parts[0].register_forward_pre_hook(begin),
        parts[1].register_forward_hook(lambda module, args, x: ends.append(x)),
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


def convertible_stack(model: Any) -> tuple[str, nn.ModuleList]:
    """Check that a model is of a kind that can be converted; return what `stack_of` returns.

    Raises:
        InputError: models of this kind cannot be converted.
    """
    if not isinstance(model, PreTrainedModel):
        hint = "; open a folder with from_pretrained" if isinstance(model, (str, os.PathLike)) else ""
        hint = "; convert a model before PEFT wraps it" if hasattr(model, "get_base_model") else hint
        raise InputError(f"model must be a model of transformers, got {type(model).__name__}{hint}")
    config, parameters = model.config, list(model.parameters())
    halves = (model.get_encoder(), model.get_decoder()) if getattr(config, "is_encoder_decoder", False) else ()
    quantised = getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None
    reason = ""
    if is_converted(model):
        reason = "this model is converted already; residua.unconvert(model) first"
    elif getattr(config, "model_type", None) == "residua":
        reason = "choose the connection in its ResiduaConfig; convert is for models without one"
    elif len({id(half) for half in (*halves, model)}) == 3:
        reason = (
            "must have one stack of layers, got an encoder and a decoder; convert one of them, "
            "residua.convert(model.get_encoder(), ...)"
        )
    elif quantised or not all(p.is_floating_point() or p.is_complex() for p in parameters):
        reason = "must have weights in floating point, got a quantised model; load it without quantisation"
    elif any(p.device.type == "meta" for p in parameters):
        reason = "must have its weights in memory, got some on the meta device: not loaded, or offloaded"
    elif any("forward" in vars(layer) for layer in stack_of(model)[1]):  # such layers would bypass the connections
        reason = (
            "must have layers that run the code of their class, got others, such as a hook of accelerate; convert the "
            "model before it is dispatched to devices"
        )
    if reason:
        raise InputError(f"{type(model).__name__}: {reason}")
    return stack_of(model)
