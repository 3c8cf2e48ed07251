"""A converted model in a folder of transformers: its configuration there, and the Auto classes that open it.

In memory a converted Llama has a `LlamaConfig` that says how it was converted. In a file `model_type` is
"residua-converted" and the Llama's configuration is an entry of another: without residua no plain Llama is built from
its weights.
"""

import json
from copy import copy
from functools import cache
from typing import Any, ClassVar

from torch import nn

from residua.conversion.anatomy import Conversion
from residua.conversion.flow import KEY, STREAM, Swapped, swap_back, swapped_class
from residua.conversion.rebuild import rebuild
from residua.errors import InputError, extra, require, shown
from residua.models.configuration import usable

with extra("lab"):
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        PreTrainedConfig,
    )

MODEL_TYPE = "residua-converted"
BASE = "base"
"""The entry beside how the model was converted: its own configuration."""
ARCHITECTURE = "ResiduaConverted"
"""The beginning of the architecture in a file: by the plain one other engines would build a plain model."""
REFUSAL = "converted by residua; open it with residua.load(folder)"


class ConvertedConfig(Swapped):
    """Mixed into the class of a converted model's configuration; `AutoConfig` opens the file of one by it.

    residua: how the model was converted, as `Conversion.as_json`.
    """

    prefix = "Converted"  # by the plain name AutoModel.from_config would build a plain model
    transformers_weights: str | None = REFUSAL
    """The file of the weights: the classes of single models, such as `LlamaForCausalLM`, open a configuration of any
    type, but no weights from a file of this name, which the error shows."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the plain class, so that the Auto classes of another process take the configuration too."""
        return _blank, type(self).__bases__[1:], self.__dict__

    @classmethod
    def from_pretrained(cls, folder: Any, **options: Any) -> Any:
        """Return the configuration in the folder of a converted model, or of a plain one, as every class does."""
        settings, options = PreTrainedConfig.get_config_dict(folder, **options)
        if settings.get("model_type") == MODEL_TYPE:
            return cls.from_dict(settings, **options)
        return cls.__bases__[1].from_dict(settings, **options)  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, settings: dict[str, Any], **options: Any) -> Any:
        """Return the configuration in the file of a converted model; `options` are for the model's own.

        Raises:
            ValueError: the file names code to download, or a type that transformers lacks.
        """
        settings = usable(settings, "config.json")
        conversion = settings[KEY]
        base = conversion.pop(BASE)
        kind = base["model_type"]
        require(kind in CONFIG_MAPPING, f"config.json: {KEY}.{BASE}.model_type", "a model type of transformers", kind)
        for refused in ("auto_map", "quantization_config"):
            if base.get(refused):
                raise InputError(f"config.json must have no {refused} in base, which only plain models have")
        config, unused = CONFIG_MAPPING[kind].from_dict(base, **{**options, "return_unused_kwargs": True})
        opened = with_conversion(config, conversion)
        opened.architectures = settings.get("architectures")
        return (opened, unused) if options.get("return_unused_kwargs") else opened

    def to_json_string(self, use_diff: bool = True) -> str:
        base = json.loads(super().to_json_string(use_diff=use_diff))  # type: ignore[misc]
        base.pop("plain_name", None)
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
        language_model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(self).__bases__[1], None)
        return ARCHITECTURE + ("ForCausalLM" if name == getattr(language_model, "__name__", None) else "Model")

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing when a folder with remote code asks for it: a saved model takes no code along."""


class BuiltConverted(Swapped):
    """Mixed into the class of a model while an Auto class builds it: it is rebuilt as it gets its layers."""

    _keep_in_fp32_modules_strict: ClassVar[list[str]] = [STREAM]

    def __init__(self, config: Any, *args: Any, **options: Any):
        super().__init__(config, *args, **options)  # type: ignore[call-arg]
        rebuild(self, conversion_of(self))  # type: ignore[arg-type]

    @classmethod
    def from_pretrained(cls, folder: Any, *args: Any, config: Any, **options: Any) -> Any:
        """Return the converted model in a folder, as the method of every model does.

        Raises:
            InputError: weights are missing, or others are there.
        """
        config = copy(config)
        config.transformers_weights = None
        with_info = options.pop("output_loading_info", False)
        model, info = super().from_pretrained(folder, *args, config=config, output_loading_info=True, **options)  # type: ignore[misc]
        expect_weights(folder, info, "missing_keys", "mismatched_keys")
        expect_weights(folder, info, "unexpected_keys", only=f".{STREAM}.")  # a trunk leaves the head out
        del model.config.transformers_weights
        swap_back(model)
        return (model, info) if with_info else model

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        model = super()._from_config(config, **options)  # type: ignore[misc]
        swap_back(model)
        return model


def expect_weights(folder: Any, info: Any, *problems: str, only: str = "") -> None:
    """Raise InputError if a folder had other weights than its model, as transformers says; `only`: in their names."""
    for problem in problems:
        names = [name for name in sorted(map(str, info.get(problem) or ())) if only in name]
        if names:
            raise InputError(f"{folder} must hold the weights of the model in config.json, {problem}: {shown(names)}")


AutoConfig.register(MODEL_TYPE, ConvertedConfig)


@cache
def converted_class(plain: type) -> type:
    """Return the class of the configurations of converted models of a family; from now on Auto classes take it."""
    converted = swapped_class(ConvertedConfig, plain)
    converted.__module__ = __name__  # Auto classes register no configuration of a module of transformers
    for auto, models in ((AutoModel, MODEL_MAPPING), (AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING)):
        if plain in models:
            model = swapped_class(BuiltConverted, models[plain])
            model.config_class = converted  # type: ignore[attr-defined]
            auto.register(converted, model)
    return converted


def _blank(plain: type) -> Any:
    return object.__new__(converted_class(plain))


def with_conversion(config: Any, conversion: dict[str, Any]) -> Any:
    """Return a copy of a configuration that says how its model was converted."""
    other: Any = copy(config)
    plain: Any = type(config)
    if not isinstance(config, ConvertedConfig):
        other.__class__ = converted_class(plain)
    setattr(other, KEY, conversion)
    return other


NAME = "converted by residua: save_pretrained gives it a folder, residua.load opens it"
"""The name of a model that was converted in memory, in the place of the plain model's, by which a tool would open that.

It is no name on the hub and no path, and whatever is asked to open it shows it in the error.
"""


def mark(model: nn.Module, conversion: Conversion) -> None:
    """Give a model a configuration of its own that says how it was converted, and no name of the plain model."""
    config = with_conversion(model.config, conversion.as_json())
    config.plain_name = config._name_or_path
    _configure(model, config, NAME)


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    plain: Any = copy(model.config)
    swap_back(plain)
    delattr(plain, KEY)
    _configure(model, plain, vars(plain).pop("plain_name", ""))


def conversion_of(model: nn.Module) -> Conversion:
    """Return how a model was converted. Raises InputError for one that was not."""
    config: Any = model.config
    if not isinstance(config, ConvertedConfig):
        raise InputError(f"the model must be a converted one, got {type(model).__name__}; residua.convert makes one")
    return Conversion.from_json(getattr(config, KEY), "model.config")


def _configure(model: nn.Module, config: Any, name: str) -> None:
    """Give a model another configuration and another name, and the modules in it that share its own."""
    before = model.config
    config._name_or_path = name
    for module in model.modules():
        if vars(module).get("config") is before:
            module.config = config
            if "name_or_path" in vars(module):
                vars(module)["name_or_path"] = name
