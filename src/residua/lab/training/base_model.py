"""The base of a run: the model in the folder that `model.base` names in a training configuration.

The base is a transformers model, plain or converted, or one of our models: an export, or the newest checkpoint of a
run.
"""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from residua.connections import Scheme, describe, resolve
from residua.connections.names import PRESETS
from residua.connections.parts.memory import positions_in
from residua.conversion.anatomy import Conversion
from residua.conversion.configuration import KEY, MODEL_TYPE, ConvertedConfig, conversion_of
from residua.conversion.convert_model import convert
from residua.conversion.flow import layer_streams
from residua.conversion.probe import probe
from residua.conversion.rebuild import leaves_out_penalty
from residua.errors import InputError, extra, first_line, require
from residua.files.durable import file_sha256
from residua.lab.opening import new_model, read_model
from residua.lab.records.folder import read_object
from residua.lab.training.checkpoint import find_checkpoint
from residua.lab.training.config import load_config
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

IGNORED_LABEL = -100


def base_sha256(folder: Path) -> str:
    """Return a digest of the configuration and the weights in a folder. Raises InputError if they cannot be read."""
    if is_run(folder):
        files = [folder / "config.yaml", find_checkpoint(folder, None).path / "model.safetensors"]
    else:
        files = [folder / "config.json", *sorted(folder.glob("*.safetensors"))]
    try:
        found = [(file.name, file_sha256(file)) for file in files]
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"model.base: {folder} cannot be read: {reason}; give a transformers model, an export or a run"
        ) from error
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run, and not a transformers folder."""
    return (folder / "config.yaml").is_file() and not (folder / "config.json").is_file()


def expect_digest(folder: Path, sha256: str) -> None:
    """Raise InputError unless the model in a folder has this digest."""
    digest = base_sha256(folder)
    if digest != sha256:
        raise InputError(
            f"model.base must be the base that this run was begun with (sha256 {sha256[:12]}), got other weights in "
            f"{folder} ({digest[:12]})"
        )


class HasConnection(InputError):
    """The base has a connection already, and another is asked for."""


def base_connection(folder: Path) -> str | dict[str, Any]:
    """Return the residual scheme of the model in a folder; "residual" if it is a plain transformers model."""
    if is_run(folder):
        connection = load_config(str(folder / "config.yaml")).model.connection
        return "residual" if connection is None else connection
    config = read_object(folder / "config.json")
    if config.get("model_type") == ResiduaConfig.model_type:
        scheme = ResiduaConfig.from_dict(config).scheme
        return next((name for name in PRESETS if resolve(name) == scheme), describe(scheme))
    if config.get("model_type") != MODEL_TYPE:
        return "residual"
    return describe(Conversion.from_json(config.get(KEY), folder / "config.json").scheme)


def open_base(
    folder: Path,
    connection: str | dict[str, Any],
    start: Literal["preserve", "fresh"],
    model: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Return the model in a folder in float32, converted to `connection` unless it already has this connection.

    model: the opened model, if the folder is a run.

    Raises:
        InputError: the folder has no model, or the model cannot be converted, or cannot be trained here.
        HasConnection: the model was converted to another scheme.
    """
    if model is None:
        model, _ = read_model(folder, dtype=torch.float32)
    ours = isinstance(model, ResiduaForCausalLM)
    if not ours and not isinstance(model.config, ConvertedConfig):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*leaves out the penalty")  # an error below
                convert(model, connection, start=start)
        except InputError as error:
            raise InputError(f"model.base: {folder}: {error}") from error
    scheme = model.config.scheme if ours else conversion_of(model).scheme
    if scheme not in _starts(connection):
        raise HasConnection(
            f"model.connection must be null, since the base already has the connection {json.dumps(describe(scheme))}, "
            f"got {connection!r}; leave it out, or give the plain model as model.base"
        )
    if ours:  # the loss of our models takes aligned labels and includes the penalty
        return model
    _expect_mean_loss(model, folder)
    if leaves_out_penalty(model, scheme):
        option = "; set its option penalty to 0" if hasattr(scheme, "penalty") else ""
        raise InputError(
            "model.connection must be a scheme without a penalty, which the loss of a converted model leaves out"
            + option
        )
    return model


def expect_documents_apart(model: PreTrainedModel) -> None:
    """Raise InputError unless positions that start again keep a model from reading across documents in a row."""
    ids = probe(model)[0]["input_ids"]
    begin = ids.shape[1] // 2
    document = (torch.arange(ids.shape[1], device=ids.device) >= begin).long()
    try:
        with evaluating(model):
            together = model(input_ids=ids, position_ids=positions_in(document.expand_as(ids)), use_cache=False).logits
            apart = model(input_ids=ids[:, begin:], use_cache=False).logits
        same = torch.allclose(together[:, begin:], apart, rtol=0.0, atol=1e-3 * apart.abs().max().item())
        reason = "" if same else "it reads earlier documents"
    except Exception as error:  # the model's own code may raise any exception
        reason = first_line(error)
    require(not reason, "train.document_masks", f"false with a {type(model).__name__} as base ({reason})", True)


def rebuild_base(folder: Path) -> PreTrainedModel:
    """Return a model with new weights, from the configuration in a folder. Nothing in the folder is executed.

    Raises:
        InputError: the configuration is not that of a converted model or of one of our models.
    """
    file = folder / "config.json"
    try:
        content = read_object(file)
        kind = ResiduaConfig if content.get("model_type") == ResiduaConfig.model_type else ConvertedConfig
        return new_model(kind.from_dict(content))
    except Exception as error:  # transformers raises many kinds
        raise InputError(f"{file} must hold the configuration of a converted model: {first_line(error)}") from error


def freeze_base(model: PreTrainedModel) -> None:
    """Freeze all weights of a converted model outside its connections, and exclude the frozen ones from checkpoints.

    Raises:
        InputError: the connections have no parameters, or the model was not converted.
    """
    converted = isinstance(model.config, ConvertedConfig)
    require(converted, "model.freeze_base", "false, as the base was trained with its connection", True)
    model.requires_grad_(False)
    for stream in layer_streams(model):
        stream.requires_grad_(True)
    learns = any(parameter.requires_grad for parameter in model.parameters())
    require(learns, "model.freeze_base", "false, as the connection has no parameters to train", True)
    weights = {name: x for name, x in model.state_dict(keep_vars=True).items() if isinstance(x, nn.Parameter)}
    vars(model)["kept_elsewhere"] = frozenset(name for name, x in weights.items() if not x.requires_grad)


def _starts(connection: str | dict[str, Any]) -> list[Scheme]:
    """Return a scheme unchanged, and its `preserving` form if there is one."""
    scheme = resolve(connection)
    try:
        return [scheme, scheme.preserving()]
    except ValueError:
        return [scheme]


def _expect_mean_loss(model: Any, folder: Path) -> None:
    """Raise InputError unless the loss of a model is the mean cross-entropy over labels that are already aligned."""
    inputs = probe(model)[0]["input_ids"]
    labels = torch.full_like(inputs, IGNORED_LABEL)
    labels[:, 0] = inputs[:, 1]  # if the model shifted the labels again, none would be left
    with evaluating(model):
        try:
            output = model(input_ids=inputs, labels=labels, shift_labels=labels, use_cache=False)
        except TypeError as error:
            raise InputError(f"model.base: {folder}: its loss takes no aligned labels: {first_line(error)}") from error
    wanted = cross_entropy(output.logits[:, 0].float(), labels[:, 0])
    if not torch.isclose(output.loss.float(), wanted, rtol=1e-4):
        router = getattr(output, "aux_loss", None) is not None
        remedy = "; set output_router_logits to false in config.json to leave out the loss of its router"
        raise InputError(
            f"model.base: {folder} must have the mean cross-entropy of aligned labels as its loss, {wanted:.4f} on a "
            f"small input, got {output.loss:.4f}{remedy * router}"
        )
