"""Save a converted model in the format of transformers, and open it: its configuration and its Auto classes.

In memory a converted Llama has a subclass of `LlamaConfig` that says how it was converted. In config.json `model_type`
is "residua-converted", and the Llama's own configuration is a nested entry, so that a program without residua cannot
build a plain Llama from the weights.
"""

import inspect
import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from residua.conversion.anatomy import Conversion
from residua.conversion.flow import KEY, STREAM, Swapped, being_saved, expect_converted_whole, swap_back, swapped_class
from residua.conversion.rebuild import expect_depth, rebuild
from residua.errors import InputError, extra, first_line, require, shown
from residua.models.configuration import usable

with extra("lab"):
    from transformers import (
        CONFIG_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForPreTraining,
        PreTrainedConfig,
        PreTrainedModel,
    )
    from transformers.models.auto import modeling_auto

MODEL_TYPE = "residua-converted"
BASE = "base"
"""The key of the model's own configuration, inside the entry that describes the conversion."""
ARCHITECTURE = "ResiduaConverted"
"""The prefix of the name of the architecture in a file. By the plain name, other engines would build a plain model."""
REFUSAL = "converted by residua; open it with residua.load(folder)"


def _auto_classes() -> dict[str, Any]:
    """Return the Auto classes by the suffix of their name, such as "ForCausalLM"; "Model" for `AutoModel`."""
    found = [x for name, x in vars(modeling_auto).items() if name.startswith("AutoModel") and isinstance(x, type)]
    ordered = dict.fromkeys([AutoModelForCausalLM, AutoModel, *found])  # the first class that can open a model opens it
    ordered[AutoModelForPreTraining] = ordered.pop(AutoModelForPreTraining)
    return {auto.__name__.removeprefix("AutoModel") or "Model": auto for auto in ordered}


AUTO_CLASSES = _auto_classes()
"""The Auto classes by the part of an architecture's name after `ARCHITECTURE`."""


class ConvertedConfig(Swapped):
    """Mixin for the configuration of a converted model. `AutoConfig` opens config.json of a converted model with it.

    residua: how the model was converted, as from `Conversion.as_json`.
    """

    prefix = "Converted"  # AutoModel.from_config goes by the name of the class
    auto_map: ClassVar[Mapping[str, str]] = {}  # some trainers read it if they do not know the architecture
    transformers_weights: str | None = REFUSAL
    """The name of a file that does not exist, in place of the weights file. Model classes such as `LlamaForCausalLM`
    accept a configuration of any type; opening a converted model then fails with an error that shows this text."""

    @property
    def name_or_path(self) -> Any:
        """The name of the model, as in every configuration. A model that is being built reads it first.

        Raises:
            InputError: the model that is being built has the plain class, which would leave the connections out.
        """
        asking = sys._getframe(1)
        # Skip the configuration's own `__getattribute__`, through which its attributes are read.
        while asking.f_back is not None and asking.f_code.co_name == "__getattribute__":
            asking = asking.f_back
        if asking.f_code is PreTrainedModel.__init__.__code__:
            raise InputError(
                f"config must describe a plain model for {type(asking.f_locals['self']).__name__}(config), got the "
                "configuration of a converted model; residua.load opens a folder, and from_config of an Auto class "
                "builds a new model"
            )
        return self._name_or_path

    @name_or_path.setter
    def name_or_path(self, name: Any) -> None:
        self._name_or_path = str(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the plain class and the attributes. Unpickling makes the converted class and registers it."""
        return _blank, type(self).__bases__[1:], self.__dict__

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> Any:
        """Return the configuration in a folder, as `PreTrainedConfig` does; the model may be converted or plain."""
        settings, options = PreTrainedConfig.get_config_dict(folder, **options)
        if settings.get("model_type") == MODEL_TYPE:
            return cls.from_dict(settings, **options)
        return cls.__bases__[1].from_dict(settings, **options)  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, settings: dict[str, Any], **options: Any) -> Any:
        """Return the configuration from the content of a converted model's config.json.

        options: passed to the configuration of the plain model.

        Raises:
            InputError: transformers lacks the plain model's type, the model is quantised, or it has too many layers.
        """
        settings = PreTrainedConfig._decode_special_floats(usable(settings, "config.json"))
        conversion = settings[KEY]
        base = conversion.pop(BASE)
        kind = base["model_type"]
        require(kind in CONFIG_MAPPING, f"config.json: {KEY}.{BASE}.model_type", "a model type of transformers", kind)
        base.pop("auto_map", None)  # remote code is not needed: transformers has this type
        if base.get("quantization_config"):
            raise InputError(
                "config.json must have no quantization_config in base, because a quantised model cannot be converted, "
                "nor a converted one saved when it is quantised; save it before, and open its folder with "
                "quantization_config=..."
            )
        config, unused = CONFIG_MAPPING[kind].from_dict(base, **{**options, "return_unused_kwargs": True})
        converted = with_conversion(config, conversion)
        converted.architectures = settings.get("architectures")
        return (converted, unused) if options.get("return_unused_kwargs") else converted

    def to_json_string(self, use_diff: bool = True) -> str:
        base = json.loads(super().to_json_string(use_diff=use_diff))  # type: ignore[misc]
        base.pop("plain_name", None)
        base.pop("auto_map", None)
        settings = {
            "model_type": MODEL_TYPE,
            "architectures": [self._architecture(name) for name in base.get("architectures") or ()],
            "transformers_weights": REFUSAL,
            KEY: {**base.pop(KEY), BASE: base},
        }
        return json.dumps(settings, indent=2, sort_keys=True) + "\n"

    def _architecture(self, name: str) -> str:
        if name.startswith(ARCHITECTURE):
            return name
        kinds = auto_classes_of(type(self).__bases__[1])
        return ARCHITECTURE + next((kind for kind, _, plain in kinds if plain.__name__ == name), "Model")

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """Write config.json. If a whole model is being saved, record the Auto class that opens it.

        Raises:
            InputError: the saved model could not be opened; nothing is written.
        """
        saved = being_saved()
        written: Any = copy(self)
        if saved is not None and saved["model_to_save"].config is self:
            written.architectures = [ARCHITECTURE + expect_openable(saved["model_to_save"], saved["state_dict"])]
        super(ConvertedConfig, written).save_pretrained(save_directory, *args, **options)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing: a saved model carries no code."""


class BuiltConverted(Swapped):
    """Mixin for the class of a model while an Auto class builds it: `__init__` rebuilds the layers at its end."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [STREAM]

    def __init__(self, config: Any, *args: Any, **options: Any):
        # With the converted configuration a model with a head would get a trunk from AutoModel that is already rebuilt.
        super().__init__(_plain(config), *args, **options)  # type: ignore[call-arg]
        model: Any = self
        _configure(model, with_conversion(model.config, getattr(config, KEY)), config._name_or_path)
        rebuild(model, conversion_of(model))
        # Loading in a narrow dtype matches substrings of names; quantizers match a pattern from the start of a name.
        model._keep_in_fp32_modules = {*(model._keep_in_fp32_modules or ()), rf".*\.{STREAM}"}

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any, **options: Any) -> Any:
        """Load the converted model in a folder, as `PreTrainedModel.from_pretrained` does.

        If the model in the folder has no head of this class, the head starts untrained, and transformers warns. The
        head of a language model must be in the folder.

        Raises:
            InputError: weights are missing, or the folder holds weights of connections that the model lacks.
        """
        config = copy(config)
        config.transformers_weights = None
        with_info = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(folder, *args, config=config, output_loading_info=True, **options)  # type: ignore[misc]
        own = cls.__bases__[1].__name__
        same = config._architecture(own) in (config.architectures or ())
        trunk = "" if same or model.can_generate() or model.base_model is model else f"{model.base_model_prefix}."
        expect_weights(folder, info, "missing_keys", "mismatched_keys", only=trunk)
        expect_weights(folder, info, "unexpected_keys", only=f".{STREAM}.")  # a trunk ignores the head's weights
        del model.config.transformers_weights
        swap_back(model)
        return (model, info) if with_info else model

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        model = super()._from_config(config, **options)  # type: ignore[misc]
        swap_back(model)
        return model


ROOM, NARROWEST = 10**7, 8
"""The parameters that may be missing in any folder, and the most that a byte of quantised weights can hold."""


def expect_stored(folder: str | Path, auto: Any, config: Any = None, **options: Any) -> None:
    """Raise InputError if the model of a folder's configuration is far larger than the files of weights.

    transformers would fill as much memory with new numbers before it says which weights are missing.

    folder: only a local folder is checked. auto: the Auto class. config: None for the one in the folder. options: of
    `from_pretrained`.
    """
    if not Path(folder).is_dir() or options.get("subfolder"):
        return
    stored = sum(path.stat().st_size for path in Path(folder).iterdir() if path.suffix in (".safetensors", ".bin"))
    try:
        config = config or AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            parameters = auto.from_config(config, trust_remote_code=False).parameters()
    except Exception:  # `from_pretrained` reports it
        return
    needed = sum(parameter.numel() for parameter in parameters)
    if needed > ROOM + NARROWEST * stored:
        raise InputError(
            f"{folder} must hold the weights of the model in config.json, which has {needed:,} parameters, got "
            f"{stored:,} bytes"
        )


def expect_weights(folder: Any, info: Any, *problems: str, only: str = "") -> None:
    """Raise InputError if `info`, the loading info of transformers, reports weights that do not fit the model.

    problems: the keys of `info` to look at, such as "missing_keys". only: consider only names that contain this text.
    """
    for problem in problems:
        names = [name for name in sorted(map(str, info.get(problem) or ())) if only in name]
        if names:
            raise InputError(f"{folder} must hold the weights of the model in config.json, {problem}: {shown(names)}")


def expect_openable(model: Any, weights: Mapping[str, Any] | None = None) -> str:
    """Return the key of `AUTO_CLASSES` whose class opens a converted model after `save_pretrained`.

    weights: the weights to be saved; None for the model's `state_dict`.

    Raises:
        InputError: no Auto class opens the model, or its weights differ from those that its configuration describes.
    """
    name, config = type(model).__name__, model.config
    kinds = auto_classes_of(type(config).__bases__[1])
    kind = next((kind for kind, _, plain in kinds if isinstance(model, plain)), None)
    if kind is None:
        raise InputError(
            f"{name} cannot be saved by save_pretrained, because no Auto class of transformers would open it; save its "
            "connections: residua.save_connection(model, FOLDER)"
        )
    expect_depth(model, conversion_of(model))
    expect_converted_whole(model)
    found = weights or model.state_dict()  # trainers of sharded models pass none, and save shards themselves
    try:
        built = (_as_opened(kind, config, flag) for flag in _flags(type(model)))
        differences = [_differences(other, found) or _moved(other, model) for other in built]
    except Exception as error:  # the model's own code may raise any exception
        raise InputError(f"{name} cannot be saved, since nothing would open it: {first_line(error)}") from error
    if all(differences):
        raise InputError(
            f"{name} cannot be saved by save_pretrained, because its weights are not those that its configuration "
            f"describes: {shown(differences[0])} differs; change modules and sizes before residua.convert, or change "
            "the configuration too"
        )
    return kind


def _flags(model: type) -> Iterator[dict[str, bool]]:
    """Yield the arguments to try for building a model: none, then one flag each, such as `add_pooling_layer=False`."""
    yield {}
    for name, parameter in inspect.signature(model).parameters.items():
        if isinstance(parameter.default, bool):
            yield {name: not parameter.default}


def _as_opened(kind: str, config: "ConvertedConfig", options: Mapping[str, bool]) -> Any:
    """Build the model that the Auto class `kind` would build from the saved configuration, on the meta device."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        warnings.simplefilter("ignore")
        written = ConvertedConfig.from_dict(json.loads(config.to_json_string()))
        return AUTO_CLASSES[kind].from_config(written, **options)


def _differences(model: Any, weights: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors in which `weights` differs from the weights of `model`.

    These are missing in `weights`, have a shape other than in `model`, or belong to connections that `model` lacks.
    Shapes of empty tensors are not compared: a process that holds only shards has such tensors.
    """
    expected = model.state_dict()
    missing = expected.keys() - weights.keys() - model.all_tied_weights_keys.keys()
    added = {name for name in weights.keys() - expected.keys() if f".{STREAM}." in f".{name}"}
    both = expected.keys() & weights.keys()
    changed = {name for name in both if weights[name].numel() and weights[name].shape != expected[name].shape}
    return sorted(missing | added | changed)


def _moved(built: nn.Module, model: nn.Module) -> list[str]:
    """Return the settings of connections that differ between two models, for example because layers were reordered."""
    expected, found = _settings(built), _settings(model)
    return sorted(name for name, value in found.items() if name in expected and expected[name] != value)


def _settings(model: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        if f".{STREAM}." in f".{name}."
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and key != "training"
    }


AutoConfig.register(MODEL_TYPE, ConvertedConfig)


def auto_classes_of(plain: type) -> Iterator[tuple[str, Any, type]]:
    """Yield (kind, Auto class, model class) for each Auto class that opens models with the configuration `plain`."""
    for kind, auto in AUTO_CLASSES.items():
        if plain in auto._model_mapping:
            models = auto._model_mapping[plain]
            yield kind, auto, models[0] if isinstance(models, (list, tuple)) else models


@cache
def converted_class(plain: type) -> type:
    """Return the class `plain` as a configuration of converted models, and register it with its Auto classes."""
    converted = swapped_class(ConvertedConfig, plain)
    converted.__module__ = __name__  # Auto classes refuse classes whose module is in transformers
    for _, auto, plain_model in auto_classes_of(plain):
        model = swapped_class(BuiltConverted, plain_model)
        model.config_class = converted  # type: ignore[attr-defined]
        auto.register(converted, model)
    return converted


def _blank(plain: type) -> Any:
    return object.__new__(converted_class(plain))


def with_conversion(config: Any, conversion: dict[str, Any]) -> Any:
    """Return a copy of a configuration that also records how the model was converted."""
    other: Any = copy(config)
    plain: Any = type(config)
    if not isinstance(config, ConvertedConfig):
        other.__class__ = converted_class(plain)
    setattr(other, KEY, conversion)
    return other


NAME = "converted by residua: save_pretrained gives it a folder, residua.load opens it"
"""The `name_or_path` of a model that was converted in memory. With the plain name, a tool would open the plain model.

The text is neither a repository on the hub nor a path, so a tool that tries to open it shows it in an error.
"""


def mark(model: nn.Module, conversion: Conversion) -> None:
    """Give a model its own configuration that records how it was converted, and `NAME` in place of its name."""
    config = with_conversion(model.config, conversion.as_json())
    config.plain_name = config._name_or_path
    _configure(model, config, NAME)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    plain = _plain(model.config)
    _configure(model, plain, vars(plain).pop("plain_name", ""))


def _plain(config: Any) -> Any:
    """Return a copy of a converted model's configuration without the record of the conversion."""
    plain = copy(config)
    swap_back(plain)
    delattr(plain, KEY)
    return plain


def conversion_of(model: nn.Module) -> Conversion:
    """Return how a model was converted. Raises InputError for a model that was not converted."""
    config: Any = model.config
    if not isinstance(config, ConvertedConfig):
        raise InputError(f"the model must be converted, got {type(model).__name__}; residua.convert makes one")
    return Conversion.from_json(getattr(config, KEY), "model.config")


def _configure(model: nn.Module, config: Any, name: str) -> None:
    """Give a model, and all modules that share its configuration, the configuration `config` with the name `name`."""
    before = model.config
    config._name_or_path = name
    for module in model.modules():
        if vars(module).get("config") is before:
            module.config = config
            if "name_or_path" in vars(module):
                vars(module)["name_or_path"] = name
