"""Open converted models, by the Auto classes of transformers, and save and open the connections alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch

from residua.conversion.configuration import (
    KEY,
    Conversion,
    ConvertedConfig,
    conversion_of,
    mark,
)
from residua.conversion.convert_model import (
    attach_streams,
    find_anatomy,
    new_streams,
    rebuild,
    small_inputs,
    streams_of,
)
from residua.conversion.flow import STREAM, ConvertedLayer, Swapped, swapped_class
from residua.errors import InputError, extra, shown
from residua.records.durable import write_text
from residua.records.reading import read_json
from residua.records.tensors import read_tensors, write_tensors

with extra("lab"):
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        PreTrainedModel,
    )

WEIGHTS, DESCRIPTION = "connection.safetensors", "connection.json"
BASE_WEIGHTS = "base_weights"
"""The tensor beside the connections that tells the weights of their model from all others."""
PLACES, SAME, LOST = 16, 0.01, 1e-6
"""How many numbers of each weight it holds, by which share of one another dtype may change it, and what float16
may lose of numbers that are next to nothing.
"""


class BuiltConverted(Swapped):
    """What is mixed into the class of a model while it is loaded: it is rebuilt as it gets its layers."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [STREAM]

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        conversion = Conversion.from_json(getattr(config, KEY), "config.json")
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        try:
            rebuild(self, conversion)  # type: ignore[arg-type]
        except (AttributeError, IndexError, ValueError) as error:
            raise InputError(f"config.json: the layers of {type(self).__name__} are not as it says: {error}") from error


class Converted:
    """What the Auto classes find for a `ConvertedConfig`. Its methods return a model of transformers, converted."""

    config_class = ConvertedConfig
    models: ClassVar[Any]

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: ConvertedConfig, **kwargs: Any) -> Any:
        """Return the converted model in a folder, as the method of every model does.

        Raises:
            InputError: weights are missing, or others are there.
        """
        wanted = kwargs.pop("output_loading_info", False)
        base = cls._base(config)
        kind = swapped_class(BuiltConverted, cls.models[type(base)])
        model, found = kind.from_pretrained(folder, *args, config=base, output_loading_info=True, **kwargs)  # type: ignore[attr-defined]
        for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            names = sorted(map(str, found.get(problem) or ()))
            if problem == "unexpected_keys":  # a trunk opened from a whole model leaves the head out
                names = [name for name in names if f".{STREAM}." in name]
            if names:
                raise InputError(f"{folder} must hold the weights of the converted model, {problem}: {shown(names)}")
        _settle(model)
        return (model, found) if wanted else model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing, as the method of `ConvertedConfig`."""

    @classmethod
    def _from_config(cls, config: ConvertedConfig, **kwargs: Any) -> Any:
        base = cls._base(config)
        return _settle(swapped_class(BuiltConverted, cls.models[type(base)])._from_config(base, **kwargs))  # type: ignore[attr-defined]

    @classmethod
    def _base(cls, config: ConvertedConfig) -> Any:
        base = config.base_config
        if type(base) not in cls.models:
            raise InputError(f"config.json: {cls.__name__} has no model of type {base.model_type}")
        setattr(base, KEY, config.residua)
        return base


class ConvertedModel(Converted):
    models = MODEL_MAPPING


class ConvertedForCausalLM(Converted):
    models = MODEL_FOR_CAUSAL_LM_MAPPING


# Whoever has imported this module opens converted models by these Auto classes.
AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig)
AutoModel.register(ConvertedConfig, ConvertedModel)
AutoModelForCausalLM.register(ConvertedConfig, ConvertedForCausalLM)


def save_connection(model: PreTrainedModel, folder: str | Path) -> None:
    """`residua.save_connection`, which documents it."""
    if not isinstance(model, PreTrainedModel) or any(".base_layer." in name for name in model.state_dict()):
        raise InputError(
            f"the model must be of transformers without adapters, got {type(model).__name__}; merge them into it first "
            "(merge_and_unload), or save all of it with save_pretrained"
        )
    conversion = conversion_of(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: x.detach().clone() for name, x in model.state_dict().items() if f".{STREAM}." in f".{name}"}
    write_tensors(folder / WEIGHTS, {**tensors, BASE_WEIGHTS: _sample_of_base(model)}, {"format": "pt"})
    write_text(folder / DESCRIPTION, json.dumps(conversion.as_json(), indent=2) + "\n")


@torch.inference_mode(False)
def load_connection(
    model: PreTrainedModel, folder: str | Path, *, inputs: Mapping[str, Any] | None = None
) -> PreTrainedModel:
    """`residua.load_connection`, which documents it."""
    folder = Path(folder)
    if not (folder / DESCRIPTION).is_file() or not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} must hold {DESCRIPTION} and {WEIGHTS}; residua.save_connection writes them")
    conversion = Conversion.from_json(read_json(folder / DESCRIPTION), folder / DESCRIPTION)
    tensors, _ = read_tensors(folder / WEIGHTS, "the weights of connections", "save them again")
    saved_beside = tensors.pop(BASE_WEIGHTS, torch.empty(0))
    plain = not any(isinstance(module, ConvertedLayer) for module in model.modules())
    here = find_anatomy(model, conversion.scheme, small_inputs(model, inputs)) if plain else conversion_of(model)
    if here != conversion:
        what = "its layers" if here.scheme == conversion.scheme else "its connection"
        raise InputError(
            f"{folder}: these connections are another model's: {what} differ from {type(model).__name__}'s"
        )
    streams = new_streams(model, conversion) if plain else streams_of(model, conversion)
    stack = model.base_model.get_submodule(conversion.stack)
    prefix = next(name for name, module in model.named_modules() if module is stack)
    own = {
        f"{prefix}.{i}.{STREAM}.{name}": tensor
        for i, stream in enumerate(streams)
        for name, tensor in stream.state_dict().items()
    }
    shapes, found = ({name: tuple(x.shape) for name, x in some.items()} for some in (own, tensors))
    if shapes != found:
        wrong = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise InputError(
            f"{folder / WEIGHTS} must hold the parameters of the connections, these differ: {shown(wrong)}"
        )
    loaded = {name: tensors[name].to(tensor.dtype) for name, tensor in own.items()}
    wrong = sorted(
        name
        for name, tensor in own.items()
        if tensors[name].is_floating_point() != tensor.is_floating_point() or not loaded[name].isfinite().all()
    )
    if wrong:
        raise InputError(
            f"{folder / WEIGHTS}: parameters must be finite numbers in floating point, got others in {shown(wrong)}; "
            "save the connections again"
        )
    sample = _sample_of_base(model)
    if saved_beside.shape != sample.shape or not saved_beside.to(sample).allclose(sample, SAME, LOST):
        raise InputError(
            f"{folder}: these connections are another model's: they were saved beside other weights than those of "
            f"{type(model).__name__}; load the model that they were trained with, or save it whole, by save_pretrained"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(loaded[name])
    if plain:
        attach_streams(model, conversion, streams)
        mark(model, conversion)
    return model


def _sample_of_base(model: Any) -> torch.Tensor:
    """Return some numbers of each weight, spread evenly, without the head and the connections.

    A model opened in another precision has nearly the same ones, and one that learnt has others.
    """
    weights = [x for name, x in model.base_model.named_parameters() if f".{STREAM}." not in f".{name}"]
    samples = [x.detach().flatten()[:: x.numel() // PLACES + 1] for x in weights]
    return torch.cat([sample.to("cpu", torch.float32) for sample in samples])


def _settle(model: Any) -> Any:
    """Move a model that was built converted to its plain class, as `convert` leaves it."""
    model.__class__ = type(model).__bases__[1]
    conversion = Conversion.from_json(getattr(model.config, KEY), "config.json")
    delattr(model.config, KEY)
    mark(model, conversion)
    return model
