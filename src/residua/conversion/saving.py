"""Save and load the connections of a converted model without its other weights; open a saved converted model."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from residua.conversion.anatomy import Conversion
from residua.conversion.configuration import (
    ARCHITECTURE,
    AUTO_CLASSES,
    MODEL_TYPE,
    conversion_of,
    expect_stored,
    expect_weights,
    mark,
)
from residua.conversion.convert_model import Model, convertible_stack
from residua.conversion.flow import STREAM
from residua.conversion.rebuild import is_converted, new_streams, rebuild, streams_of
from residua.errors import InputError, extra, first_line, require, shown
from residua.files.durable import replacing
from residua.files.reading import expect_regular, read_json
from residua.files.tensors import read_tensors, undamaged_weights, write_tensors

with extra("lab"):
    from transformers import AutoModel, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

WEIGHTS, DESCRIPTION = "connection.safetensors", "connection.json"
BASE_WEIGHTS = "base_weights"
"""The name of the tensor that identifies the model that the connections were trained with: a sample of its weights."""
PLACES, SAME, LOST = 16, 0.01, 1e-6
"""The most numbers that the sample has of one weight, and the relative and absolute tolerances of its comparison.

The model may be opened in another dtype: the relative tolerance allows rounding to bfloat16, the absolute tolerance the
loss of tiny numbers in float16.
"""


def save_connection(model: PreTrainedModel, folder: str | Path) -> None:
    """Write the connections of a converted model, without the model, into a folder: safetensors and JSON.

    Raises:
        InputError: the model was not converted, or has PEFT adapters.
    """
    if not isinstance(model, PreTrainedModel) or any(".base_layer." in name for name in model.state_dict()):
        raise InputError(
            f"the model must be a transformers model without adapters, got {type(model).__name__}; merge adapters "
            "into it first (merge_and_unload), or save all of it with save_pretrained"
        )
    conversion = conversion_of(model)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = nn.ModuleList(streams_of(model, conversion)).state_dict()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # some may share memory
    tensors[BASE_WEIGHTS] = _sample_of_base(model)
    description = conversion.as_json()
    with replacing(folder / DESCRIPTION) as file:
        file.write((json.dumps(description, indent=2) + "\n").encode())
        file.flush()  # if the disk is full, fail before the weights are replaced
        write_tensors(folder / WEIGHTS, tensors, {"format": "pt", "connection": json.dumps(description)})


@torch.inference_mode(False)
def load_connection(model: Model, folder: str | Path) -> Model:
    """Give a model the connections in a folder that `save_connection` wrote, in place, and return it.

    model: the plain model that the connections were trained with, or a model that is already converted to the same
    connection. Nothing in the folder is executed.

    Raises:
        InputError: the folder has no connections, or they belong to a model with other layers, another scheme or other
            weights.
    """
    folder = Path(folder)
    if not (folder / DESCRIPTION).is_file() or not (folder / WEIGHTS).is_file():
        raise InputError(f"{folder} must hold {DESCRIPTION} and {WEIGHTS}; residua.save_connection writes them")
    description = read_json(folder / DESCRIPTION)
    conversion = Conversion.from_json(description, folder / DESCRIPTION)
    tensors, metadata = read_tensors(folder / WEIGHTS, "the weights of connections", "save them again")
    if metadata.get("connection") not in (None, json.dumps(description)):  # saving was killed between the two files
        raise InputError(
            f"{folder}: {DESCRIPTION} and {WEIGHTS} must be of one connection, got two; save the connections again"
        )
    sample_of_saved = tensors.pop(BASE_WEIGHTS, torch.empty(0))
    plain = not is_converted(model)
    another = f"{folder}: these connections are another model's"
    if plain:
        convertible_stack(model)
        try:
            streams = new_streams(model, conversion)
        except (AttributeError, KeyError, ValueError) as error:
            raise InputError(
                f"{another}: its layers differ from {type(model).__name__}'s: {first_line(error)}"
            ) from error
    else:
        if conversion_of(model) != conversion:
            raise InputError(f"{another}: its connection differs from {type(model).__name__}'s")
        streams = streams_of(model, conversion)
    sample = _sample_of_base(model)
    if sample_of_saved.shape != sample.shape or not sample_of_saved.to(sample).allclose(sample, SAME, LOST):
        raise InputError(
            f"{another}: the weights of {type(model).__name__} differ from those of the model they were trained with; "
            "load that model, or save that model whole, with save_pretrained"
        )
    modules = nn.ModuleList(streams)
    saved, expected = (
        {name: (x.shape, x.is_floating_point()) for name, x in part.items()} for part in (tensors, modules.state_dict())
    )
    if different := sorted(name for name, _ in saved.items() ^ expected.items()):
        raise InputError(
            f"{folder / WEIGHTS} must have the parameters that {DESCRIPTION} describes, in name, shape and kind of "
            f"dtype, but {shown(different[0])} differs; save the connections again"
        )
    modules.load_state_dict(tensors)
    if plain:
        rebuild(model, conversion, streams)
        mark(model, conversion)
    return model


def _sample_of_base(model: Any) -> torch.Tensor:
    """Return evenly spaced numbers of each weight of the base model, without the connections, in float32.

    A copy of the model in another precision has nearly the same sample; a model that was trained further does not.
    """
    weights = [x for name, x in model.base_model.named_parameters() if f".{STREAM}." not in f".{name}"]
    samples = [x.detach().flatten()[:: x.numel() // PLACES + 1] for x in weights]
    return torch.cat([sample.to("cpu", torch.float32) for sample in samples])


def load(folder: str | Path, **options: Any) -> PreTrainedModel:
    """Open a converted model, or a language model of residua, that was saved by `save_pretrained`, and return it.

    This calls `from_pretrained` of the Auto class for the saved model, such as `AutoModelForCausalLM` or
    `AutoModelForSequenceClassification`. You may call the Auto class yourself once this function or `convert` has been
    called, or after `import residua` if transformers was imported before.

    Args:
        folder: the folder, or the name of a repository on the hub.
        options: passed to `from_pretrained`, such as `dtype` and `device_map`.

    Raises:
        InputError: the folder does not exist, lacks weights, has a damaged file of weights, or holds weights of
            connections that the model lacks.
    """
    if not os.path.exists(folder) and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(folder)):
        raise InputError(f"{folder} must be a folder, or OWNER/NAME on the Hugging Face hub; found no such folder")
    require(not Path(folder).is_file(), "folder", "a folder that save_pretrained wrote", str(folder))
    expect_regular(Path(folder))
    auto = _auto_class(folder, options)
    expect_stored(folder, auto, **options)
    options = {**options, "output_loading_info": True, "ignore_mismatched_sizes": True}  # `expect_weights` names them
    with undamaged_weights(folder):
        opened: Any = auto.from_pretrained(folder, **options)
    model, info = opened
    expect_weights(folder, info, "missing_keys", "mismatched_keys")
    expect_weights(folder, info, "unexpected_keys", only=f".{STREAM}.")
    heads = sorted(info.get("unexpected_keys") or ())
    if auto is AutoModel and heads:  # an earlier version recorded only language models and trunks
        raise InputError(
            f"{folder} holds more than a trunk, {shown(heads)}; open it with the Auto class of its head, such as "
            "AutoModelForSequenceClassification"
        )
    return model


HUB = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""The options of `from_pretrained` that locate a file."""


def _auto_class(folder: str | Path, options: Mapping[str, Any]) -> Any:
    """Return the Auto class for the architecture in a folder's configuration; `AutoModelForCausalLM` if unknown."""
    place = {name: options[name] for name in HUB if name in options}
    try:
        settings, _ = PreTrainedConfig.get_config_dict(folder, **place)
    except OSError:  # an adapter, or no model: `from_pretrained` raises the error
        settings = {}
    names = settings.get("architectures") or [""]
    kind = str(names[0]).removeprefix(ARCHITECTURE) if settings.get("model_type") == MODEL_TYPE else ""
    return AUTO_CLASSES.get(kind, AutoModelForCausalLM)
