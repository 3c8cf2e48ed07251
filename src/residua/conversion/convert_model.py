"""Give a transformers model another residual connection: `convert`, and back: `unconvert`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from residua.connections import Readout, Scheme, Stream, resolve
from residua.connections.memory import window_of
from residua.connections.residual import Residual
from residua.conversion.anatomy import observe, stack_of
from residua.conversion.configuration import Conversion, conversion_of, mark, unmark
from residua.conversion.flow import (
    INPUTS,
    STREAM,
    Borrowed,
    ConvertedLayer,
    LayerStream,
    Reader,
    UnknownUse,
    keywords_of,
    layer_streams,
    swap,
    swap_back,
)
from residua.conversion.memory import attach, detach
from residua.conversion.probe import (
    Situation,
    outputs,
    probe,
    same_bits,
    same_numbers,
    situations,
    uneven,
)
from residua.errors import InputError, extra, first_line, require
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3}
"""How much an output may change, relative to the largest, where a scheme preserves the model; 0.1 in half precision."""


@torch.inference_mode(False)  # in which connections would be made that cannot be trained
def convert(
    model: PreTrainedModel,
    connection: str | Mapping[str, Any] | Scheme,
    *,
    start: Literal["preserve", "fresh"] = "preserve",
    inputs: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """`residua.convert`, which documents it."""
    require(start in ("preserve", "fresh"), "start", "'preserve' or 'fresh'", start)
    try:
        scheme = resolve(connection)
    except ValueError as error:
        raise InputError(str(error)) from error
    if start == "preserve":
        try:
            scheme = scheme.preserving()
        except ValueError as error:
            raise InputError(f"{first_line(error)}; start='fresh' converts the model all the same") from error
    inputs = small_inputs(model, inputs)
    with evaluating(model):
        conversion = find_anatomy(model, scheme, inputs)
        before = outputs(model, inputs)
        _expect_same_direction(model, conversion, inputs)
        rebuild(model, conversion)
        try:
            after = _run(model, partial(outputs, model, inputs))
            if start == "preserve":
                _expect_preserved(model, before, after)
        except BaseException:
            restore(model, conversion.stack)
            raise
    mark(model, conversion)
    return model


def find_anatomy(model: PreTrainedModel, scheme: Scheme, inputs: Mapping[str, Any]) -> Conversion:
    """Return how a model can be converted to `scheme`, found with the plain residual; the model is left as it was.

    inputs: the model's `small_inputs`.

    Raises:
        InputError: it cannot be converted.
    """
    path, stack = stack_of(model)
    changed = uneven(model)
    with evaluating(model):
        ways = situations(model, inputs, changed)
        before = _outputs_of(model, ways)
        anatomy, unchanged = observe(model, stack, partial(outputs, model, inputs, changed))
        name = type(model).__name__
        if same_bits(before[next(iter(ways))], unchanged):
            raise InputError(f"{name} must have layers that matter, got the same outputs without them")
        rebuild(model, Conversion(Residual(), path, anatomy))
        try:
            after = {way: _run(model, ways[way]) for way in before}
        finally:
            restore(model, path)
    for way, found in after.items():
        if not same_bits(before[way], found):
            raise InputError(
                f"{name}: its layers were rebuilt with the plain residual, and {way} its outputs changed by up to "
                f"{_change(before[way], found):.1e}: they use their residual in a way that is not seen"
            )
    return Conversion(scheme, path, anatomy)


def _outputs_of(model: PreTrainedModel, ways: Mapping[str, Situation]) -> dict[str, list[Tensor]]:
    """Return the outputs in every situation in which the model runs; the first must be one, and say the same twice."""
    name, results = type(model).__name__, {}
    first = next(iter(ways))
    for way, run in ways.items():
        with suppress(Exception):  # a model without a cache, or without padding
            results[way] = run()
    if first not in results or not same_bits(results[first], ways[first]()):
        raise InputError(f"{name} must give equal outputs for equal inputs, got different ones")
    if not any(x.isfinite().any() for x in results[first]):
        raise InputError(f"{name} must give finite numbers for a small input, got none")
    return results


def unconvert(
    model: PreTrainedModel, *, lossy: bool = False, inputs: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """`residua.unconvert`, which documents it."""
    conversion = conversion_of(model)
    inputs = None if lossy else probe(model, inputs)
    with evaluating(model):
        before = [] if inputs is None else outputs(model, inputs)
        streams = streams_of(model, conversion)
        restore(model, conversion.stack)
        after = [] if inputs is None else outputs(model, inputs)
        change, bound = _change(before, after), _bound(model, before)
        if change > bound:
            attach_streams(model, conversion, streams)
            raise InputError(
                f"{type(model).__name__}: without its connections its outputs would change by {change:.1e} of the "
                f"largest one, more than {bound:.0e}: it is no plain model any more; lossy=True drops what they learnt"
            )
    unmark(model)
    return model


def rebuild(model: nn.Module, conversion: Conversion) -> None:
    """Give the layers of a model the connections of the conversion's scheme, initialised."""
    attach_streams(model, conversion, new_streams(model, conversion))


def new_streams(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Build the part of the stream of every layer, with the norms that the layers have."""
    _, stack = _trunk(model, conversion.stack)
    anatomy = conversion.anatomy
    sublayers = [(layer, sublayer) for layer, found in zip(stack, anatomy, strict=True) for sublayer in found]
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


def streams_of(model: nn.Module, conversion: Conversion) -> list[LayerStream]:
    """Return the part of the stream of every layer of a converted model."""
    return [getattr(layer, STREAM) for layer in _trunk(model, conversion.stack)[1]]


def restore(model: nn.Module, path: str) -> None:
    """Undo `rebuild` for the layers at `path` inside the base model."""
    trunk, stack = _trunk(model, path)
    detach(model, trunk)
    for layer in stack:
        if isinstance(layer, ConvertedLayer):
            swap_back(layer)
            delattr(layer, STREAM)
        for child in layer.modules():
            if isinstance(child, Reader):
                swap_back(child)
                del child.residua_is_norm


def is_converted(model: nn.Module) -> bool:
    """Return whether the layers of a model run over connections that `convert` gave them."""
    return bool(layer_streams(model))


@contextmanager
def replaced(model: nn.Module, watch: Callable[[list[Any]], Sequence[Any]]) -> Iterator[None]:
    """Let `watch` replace the connections of a converted model, as the argument of that name in a model of ours does.

    watch: maps the list of connections and readout to a list of replacements; the readout stays what it is.
    """
    stream = stream_of(model)
    parts = layer_streams(model)
    connections: list[Any] = [*stream.connections, Readout(stream.collapse)]
    watched = watch(connections)
    try:
        for part in parts:
            part.watched = watched[part.first : part.first + len(part.connections)]
        yield
    finally:
        for part in parts:
            part.watched = None


def stream_of(model: nn.Module) -> Stream:
    """Return the whole stream of a converted model, made of the parts that its layers own."""
    parts = layer_streams(model)
    connections: list[Any] = [connection for part in parts for connection in part.connections]
    assert parts[0].expand is not None
    assert parts[-1].collapse is not None
    return Stream(parts[0].expand, connections, parts[-1].collapse)


def _trunk(model: Any, path: str) -> tuple[nn.Module, nn.ModuleList]:
    """Return the module that runs the layers, and the list of them at `path` inside the base model."""
    stack = model.base_model.get_submodule(path)
    if not isinstance(stack, nn.ModuleList):
        raise AttributeError(f"{path} is no list of layers")
    return model.base_model.get_submodule(path.rpartition(".")[0]), stack


def attach_streams(model: nn.Module, conversion: Conversion, streams: Sequence[LayerStream]) -> None:
    """Give every layer of a model its part of the stream, and let it run on that."""
    trunk, stack = _trunk(model, conversion.stack)
    attach(model, trunk)
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


def small_inputs(model: Any, inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return small inputs that a model runs on, those given if they are. Raises InputError for one whose kind cannot be
    converted.
    """
    require(isinstance(inputs, Mapping | None), "inputs", "arguments of the model by their names", inputs)
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model must be a model of transformers, got {type(model).__name__}")
    name = type(model).__name__
    if any(isinstance(module, (ConvertedLayer, LayerStream)) for module in model.modules()):
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
        raise InputError(f"{name} must have its weights in memory, found some that are not loaded or offloaded")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(f"{name} must have weights that can be trained, got some made in torch.inference_mode()")
    for where in (model.config, *model.modules()):
        for option in ("layerdrop", "speech_encoder_layerdrop"):
            if getattr(where, option, 0):
                raise InputError(
                    f"{name} must run every layer, got {option} in {type(where).__name__}; set it to 0 first"
                )
    stack_of(model)  # says more than why a model does not run
    return probe(model, inputs)


def _run(model: PreTrainedModel, run: Situation) -> list[Tensor]:
    try:
        return run()
    except UnknownUse as error:
        raise InputError(f"{type(model).__name__}: a layer {first_line(error)}") from error
    except Exception as error:  # a keyword for the layers that the model hands to something else, and the like
        raise InputError(f"{type(model).__name__}: a layer cannot run rebuilt: {first_line(error)}") from error


def _expect_same_direction(model: PreTrainedModel, conversion: Conversion, inputs: Mapping[str, Any]) -> None:
    """Raise InputError for a scheme that looks along the sequence in another way than the model does."""
    scheme = conversion.scheme
    if scheme.causal and not any(stream.looks_back for stream in new_streams(model, conversion)):
        return
    if _is_causal(model, conversion.stack, inputs):
        if not scheme.causal:
            raise InputError(
                "connection must be a causal scheme, got one whose coefficients depend on the whole sequence, so "
                "that every token would see later ones; use context='token' or 'cumulative'"
            )
        return
    if scheme.causal:
        raise InputError(
            f"connection must be a scheme that reads single tokens, got one that reads earlier ones; "
            f"{type(model).__name__} reads in both directions"
        )
    if not all(isinstance(x, Tensor) and x.dim() > 3 for x in inputs.values()):
        raise InputError(
            f"connection must have coefficients of single tokens, got ones of the whole sequence, padding included; "
            f"{type(model).__name__} takes more than images of one size; use context='token'"
        )


def _is_causal(model: nn.Module, path: str, inputs: Mapping[str, Any]) -> bool:
    """Return whether the layers' result before the last token ignores the last token.

    Its gradient says so exactly; the numbers do not where tokens are computed in groups, as by experts.
    """
    _, stack = _trunk(model, path)
    first: list[Tensor] = []
    last: list[Tensor] = []

    def begin(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        name = next((name for name in INPUTS if name in kwargs), "")
        first.append((args[0] if args else kwargs[name]).detach().requires_grad_())
        return ((first[0], *args[1:]), kwargs) if args else (args, {**kwargs, name: first[0]})

    def end(layer: nn.Module, args: Any, out: Any) -> None:
        last.append(out[0] if isinstance(out, tuple) else out)

    hooks = [stack[0].register_forward_pre_hook(begin, with_kwargs=True), stack[-1].register_forward_hook(end)]
    try:
        with torch.enable_grad():
            model(**inputs)
            if first[0].dim() != 3 or last[0].dim() != 3:
                return False
            weights = torch.randn(last[0][:, :-1].shape, generator=torch.Generator().manual_seed(0)).to(last[0])
            (gradient,) = torch.autograd.grad((last[0][:, :-1] * weights).sum(), first)
    finally:
        for hook in hooks:
            hook.remove()
    return not gradient[:, -1].any()


def _expect_preserved(model: PreTrainedModel, before: list[Tensor], after: list[Tensor]) -> None:
    change, bound = _change(before, after), _bound(model, before)
    if not change <= bound:
        raise InputError(
            f"{type(model).__name__}: with this scheme's preserving start its outputs change by {change:.1e} of the "
            f"largest one, more than {bound:.0e}; start='fresh' converts it all the same"
        )


def _change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest change of an output, relative to the largest output."""
    if [x.shape for x in before] != [x.shape for x in after]:
        return math.inf
    largest = 0.0
    for x, y in zip(before, after, strict=True):
        x, y = x.double(), y.double()
        scale = x.abs().where(x.isfinite(), 0).max().clamp_min(1e-30)
        change = float((x - y).abs().masked_fill(same_numbers(x, y), 0).max() / scale)
        largest = math.inf if math.isnan(change) else max(largest, change)
    return largest


def _bound(model: nn.Module, before: list[Tensor]) -> float:
    """Return the tolerance of the narrowest dtype: Mamba in half precision returns logits in float32."""
    return max(TOLERANCE.get(x.dtype, 0.1) for x in (*before, *model.parameters()) if x.is_floating_point())


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
