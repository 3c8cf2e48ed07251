"""The configuration of a converted model: the model's own, and in a file one of a type that transformers alone refuses.

In memory a converted Llama has the attributes of a `LlamaConfig`. Saved, `model_type` is "residua-converted" and the
Llama's configuration is an entry of another: without residua no plain Llama is built from its weights.
"""

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from residua.connections import Scheme, describe, resolve
from residua.conversion.anatomy import Anatomy, Sublayer
from residua.conversion.flow import KEY, Swapped, swapped_class
from residua.errors import InputError, extra, first_line, shown
from residua.models.configuration import usable

with extra("lab"):
    from transformers import CONFIG_MAPPING, PreTrainedConfig

MODEL_TYPE = "residua-converted"
BASE = "base"
"""The entry beside how the model was converted: its own configuration."""
REFUSAL = {"transformers_weights": "converted by residua; open it with residua.load(folder)"}
"""What a file has besides. The classes of single models, such as `LlamaForCausalLM`, open a configuration of any type,
but no weights from a file of this name, which the error shows."""


@dataclass(frozen=True)
class Conversion:
    """How a model was converted: its scheme, the name of its list of layers in the base model, and their anatomy."""

    scheme: Scheme
    stack: str
    anatomy: Anatomy

    def as_json(self) -> dict[str, Any]:
        """Return plain values, from which `from_json` builds the same."""
        layers = [[asdict(sublayer) for sublayer in layer] for layer in self.anatomy]
        return {"connection": describe(self.scheme), "stack": self.stack, "layers": layers}

    @classmethod
    def from_json(cls, found: Any, source: object) -> "Conversion":
        """Read what `as_json` returned. Raises InputError for anything else, or if the scheme is not installed."""
        try:
            anatomy = tuple(
                tuple(
                    Sublayer(tuple(map(_text, item["readers"])), _bool(item["normed"]), _bool(item.get("cast", False)))
                    for item in layer
                )
                for layer in found["layers"]
            )
            return cls(resolve(found["connection"]), _text(found["stack"]), anatomy)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"{source} must hold the configuration of a converted model, got {shown(found)}"
            ) from error
        except ValueError as error:
            raise InputError(f"{source}: {first_line(error)}") from error


def base_in(found: Any) -> dict[str, Any]:
    """Return the configuration of the model itself in a value of `KEY`; none in any other value."""
    base = found.get(BASE) if isinstance(found, dict) else None
    return base if isinstance(base, dict) else {}


class SavedAsConverted(Swapped):
    """What is mixed into the class of a converted model's configuration: another form in files."""

    prefix = "Converted"  # by the plain name AutoModel.from_config would build a plain model

    @classmethod
    def from_pretrained(cls, folder: Any, **kwargs: Any) -> Any:
        """Return the configuration in the folder of a converted model, or of a plain one, as every class does."""
        settings, _ = PreTrainedConfig.get_config_dict(folder, **kwargs)
        if settings.get("model_type") != MODEL_TYPE:
            return cls.__bases__[1].from_pretrained(folder, **kwargs)  # type: ignore[attr-defined]
        opened, unused = ConvertedConfig.from_pretrained(folder, **{**kwargs, "return_unused_kwargs": True})
        how = {name: x for name, x in opened.residua.items() if name != BASE}
        config = _told(opened.base_config, how)
        return (config, unused) if kwargs.get("return_unused_kwargs") else config

    def to_json_string(self, use_diff: bool = True) -> str:
        base = json.loads(super().to_json_string(use_diff=use_diff))  # type: ignore[misc]
        kept = {name: base[name] for name in ("architectures", "dtype", "transformers_version") if name in base}
        whole = {"model_type": MODEL_TYPE, **kept, **REFUSAL, KEY: {**base.pop(KEY), BASE: base}}
        return json.dumps(whole, indent=2, sort_keys=True) + "\n"


class ConvertedConfig(PreTrainedConfig):
    """The configuration in the folder of a converted model, as `AutoConfig` opens it.

    residua   how the model was converted: the connection, what its layers read, and its own configuration

    Sizes are attributes of `base_config`, and of this configuration too.
    """

    model_type = MODEL_TYPE

    residua: dict | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class does; what is given beside the file is for the model's own configuration.

        Raises:
            ValueError: the file names code to download, or more layers than any machine holds.
        """
        config_dict = usable(config_dict, "config.json")
        found: Any = config_dict.get(KEY)
        base = base_in(found)
        taken: dict[str, Any] = {}
        kind = base.get("model_type")
        if isinstance(kind, str) and kind in CONFIG_MAPPING:
            about = ("return_unused_kwargs", "name_or_path", "_from_auto", "_from_pipeline")
            given = {name: x for name, x in kwargs.items() if name not in about}
            _, unused = CONFIG_MAPPING[kind].from_dict(_own(base), return_unused_kwargs=True, **given)
            taken = {name: x for name, x in given.items() if name not in unused}
            found = {**found, BASE: {**base, **{name: _merged(base.get(name), x) for name, x in taken.items()}}}
        own = {name: x for name, x in config_dict.items() if name not in REFUSAL}
        config, unused = super().from_dict({**own, KEY: found}, **{**kwargs, "return_unused_kwargs": True})
        unused = {name: x for name, x in unused.items() if name not in taken}
        return (config, unused) if kwargs.get("return_unused_kwargs") else config

    def to_json_string(self, use_diff: bool = True) -> str:
        own = json.loads(super().to_json_string(use_diff=use_diff))
        return json.dumps({**own, **REFUSAL}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Do nothing, where a folder with remote code asks for it: a saved model takes no code along."""

    @property
    def base_config(self) -> Any:
        """The configuration of the model that was converted. Raises InputError for a type that transformers lacks."""
        base = base_in(vars(self).get(KEY))
        kind = base.get("model_type")
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind == MODEL_TYPE:
            raise InputError(f"config.json must have a model type of transformers in base, got {shown(kind)}")
        for refused in ("auto_map", "quantization_config"):
            if base.get(refused):
                raise InputError(f"config.json must have no {refused} in base, which only plain models have")
        return CONFIG_MAPPING[kind].from_dict(_own(base))

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_config.get_text_config(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        base = {} if name.startswith("_") else base_in(vars(self).get(KEY))
        if name not in base:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return base[name]


def mark(model: nn.Module, conversion: Conversion) -> None:
    """Give a model a configuration of its own that says how it was converted."""
    before: Any = model.config
    _replace(model, before, _told(before, conversion.as_json()))


def unmark(model: nn.Module) -> None:
    """Undo `mark`."""
    before: Any = model.config
    if isinstance(before, SavedAsConverted):
        after: Any = copy(before)
        after.__class__ = type(before).__bases__[1]
        delattr(after, KEY)
        _replace(model, before, after)


def conversion_of(model: nn.Module) -> Conversion:
    """Return how a model was converted. Raises InputError for one that was not."""
    config: Any = model.config
    if not isinstance(config, SavedAsConverted):
        raise InputError(f"the model must be a converted one, got {type(model).__name__}; residua.convert makes one")
    return Conversion.from_json(getattr(config, KEY), "model.config")


def _replace(model: nn.Module, before: Any, after: Any) -> None:
    for module in model.modules():
        if vars(module).get("config") is before:
            module.config = after


def _own(base: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in base.items() if name not in ("model_type", KEY)}


def _merged(before: Any, given: Any) -> Any:
    return {**before, **given} if isinstance(before, dict) and isinstance(given, dict) else given


def _told(config: Any, how: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration that says how its model was converted."""
    other: Any = copy(config)
    if not isinstance(config, SavedAsConverted):
        plain: Any = type(config)
        other.__class__ = swapped_class(SavedAsConverted, plain)
    setattr(other, KEY, how)
    return other


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value
