"""The configuration of a run: frozen dataclasses, read from recipes, YAML files and dotted overrides."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, FrozenInstanceError, asdict, dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from residua.connections.names import canonical
from residua.errors import (
    Count,
    InputError,
    Natural,
    NotNegative,
    Positive,
    Range,
    Share,
    at_most,
    check_types,
    decoded,
    did_you_mean,
    fits,
    mapping,
    refusal,
    require,
    shown,
    types_of,
    words,
)
from residua.files.reading import parse_yaml, read_text, readings, write_yaml
from residua.lab.records.progress import say_once
from residua.model_fields import ModelFields, setting

if TYPE_CHECKING:
    from residua.connections import Scheme
    from residua.models import ResiduaConfig

STEPS = "train.steps"
SHARES = {"train.warmup_steps": 0, "train.evaluate_every": 1, "train.checkpoint_every": 1}
"""The keys whose values in a recipe scale with the number of steps, and their smallest values."""
Decay = Annotated[float, Range("a number in [0, 1)", lambda x: 0 <= x < 1)]


@dataclass
class ModelConfig(ModelFields):
    """The section `model` of a run from scratch. It becomes immutable when it is part of a `RunConfig`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _name_preset(self)

    @cached_property
    def architecture(self) -> "ResiduaConfig":
        """The model's configuration, with the connection resolved. Raises InputError if it is invalid."""
        from residua.models import ResiduaConfig  # imported here so that `--help` does not load transformers

        settings = {name: value for name, value in asdict(self).items() if (name, value) != ("vocab_size", None)}
        try:
            return ResiduaConfig(**settings)
        except ValueError as error:
            raise _about_connection(error) from error

    def __setattr__(self, name: str, value: Any) -> None:
        if "architecture" in vars(self):
            raise FrozenInstanceError(f"cannot assign to field {name!r}")
        super().__setattr__(name, value)


def _name_preset(section: "ModelConfig | BaseModelConfig") -> None:
    """Replace the connection's name by the form in files, such as "lambdas:compress=token" for "Lambdas+TC"."""
    if isinstance(section.connection, str):
        object.__setattr__(section, "connection", canonical(section.connection))


def _about_connection(error: ValueError) -> InputError:
    text = str(error)
    return InputError(f"model.{text}" if text.startswith("connection") else f"model.connection: {text}")


@dataclass(frozen=True)
class BaseModelConfig:
    """The section `model` of a run with the key `base`, which trains from the weights of an existing model.

    Sizes, vocabulary and attention come from the base, so the keys of `ModelConfig` do not apply.
    """

    base: str = field(
        metadata={"help": "folder of the model to train on: a transformers model (plain or converted), export or run"}
    )
    base_sha256: str | None = setting(
        None, "digest of the base's weights and config.json; null to accept the base as it is, and record its digest"
    )
    connection: str | dict | None = setting(
        None, "the residual scheme that a plain base is converted to; null to keep the base's own scheme"
    )
    start: Literal["preserve", "fresh"] = setting(
        "preserve", "the start of a plain base's connections: preserve its outputs, or fresh as in a new model"
    )
    freeze_base: bool = setting(False, "train only the connections; checkpoints then hold only these and need the base")

    @cached_property
    def scheme(self) -> "Scheme | None":
        """The residual scheme of `connection`; None for the base's own. Raises InputError for an unknown scheme."""
        from residua.connections import resolve  # imported here so that `--help` does not load torch

        try:
            return None if self.connection is None else resolve(self.connection)
        except ValueError as error:
            raise _about_connection(error) from error

    def __post_init__(self) -> None:
        check_types(self)
        _name_preset(self)


@dataclass(frozen=True)
class DataConfig:
    """The training data: a prepared folder, or a source that is prepared into the run folder."""

    path: str | None = setting(None, "folder written by `residua prepare`")
    source: str | None = setting("stdlib", "used if path is null: stdlib, a text file or a folder of text")
    tokenizer: str = setting("bpe", "bpe, byte, or a tokenizer's folder")
    vocab_size: Annotated[Count, at_most(2**24)] = setting(2048, "entries of a trained BPE tokenizer")
    validation_fraction: Annotated[float, Range("a number between 0 and 1", lambda x: 0 < x < 1)] = setting(
        0.05, "fraction of the text that is held out"
    )
    further_validation: str | None = setting(
        None, "folder written by `residua prepare` with the same tokenizer; its held-out text is evaluated too"
    )

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained.

    Several processes share the micro-batches of a step, and also the rows of a micro-batch if there are fewer
    micro-batches than processes (`distributed.BatchShard`). The steps are the same for any number of processes.

    Raises:
        InputError: a value has the wrong type or is outside its range.
    """

    steps: Count = setting(
        400, "optimizer steps; a recipe's warmup, evaluations and checkpoints keep their shares of them"
    )
    batch_size: Annotated[Count, at_most(2**20)] = setting(16, "sequences per micro-batch")
    sequence_length: Count = setting(128, "tokens per sequence")
    document_masks: bool = setting(False, "nothing in a model reads across the documents of a sequence")
    gradient_accumulation: Annotated[Count, at_most(2**20)] = setting(1, "micro-batches per step")
    lr: Positive = setting(1e-3, "peak learning rate")
    connection_lr_factor: Positive = setting(
        1.0, "factor on the learning rate of the connections' own parameters, norms left out"
    )
    min_lr_ratio: Share = setting(0.05, "last learning rate as a fraction of the peak")
    warmup_steps: Natural = setting(0, "steps of linear warmup")
    optimizer: Literal["adamw", "muon"] = setting(
        "adamw", "muon for the matrices of attention and MLP, at the same learning rate, and adamw for the rest"
    )
    weight_decay: NotNegative = setting(0.1, "decoupled weight decay, on matrices only")
    beta1: Decay = setting(0.9, "AdamW's first")
    beta2: Decay = setting(0.95, "AdamW's second")
    adam_eps: Positive = setting(1e-8, "AdamW's epsilon")
    clip: NotNegative = setting(1.0, "largest gradient norm; 0 for no clipping")
    seed: Natural = setting(0, "seed of the initial weights and the order of the data")
    precision: Literal["float32", "bfloat16"] = setting("float32", "bfloat16 runs under autocast, weights in float32")
    compile: bool = setting(False, "torch.compile the model; layer by layer if several processes train")
    activation_checkpointing: bool = setting(False, "keep only the inputs of layers and recompute the rest")
    threads: Annotated[Count, at_most(1024)] | None = setting(
        None, "threads of PyTorch on the CPU; null for PyTorch's choice"
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto picks cuda if available")
    log_every: Count = setting(1, "steps between two rows of metrics")
    evaluate_every: Count = setting(100, "steps between two evaluations; the last step has one")
    checkpoint_every: Count = setting(100, "steps between two checkpoints; the last step has one")
    keep_checkpoints: Count = setting(2, "newest checkpoints to keep")
    keep_best: bool = setting(False, "keep the checkpoint with the lowest validation loss too")
    tensorboard: bool = setting(True, "write TensorBoard events too")
    wandb: str | None = setting(None, "Weights & Biases project that also gets the rows; needs the package wandb")
    connections_every: Natural = setting(
        0, "steps between two rows of gates in connections.jsonl, for schemes with gates; 0 for no rows"
    )

    def __post_init__(self) -> None:
        check_types(self)
        require(self.warmup_steps <= self.steps, "warmup_steps", f"0 to train.steps ({self.steps})", self.warmup_steps)

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step, over all processes."""
        return self.batch_size * self.gradient_accumulation * self.sequence_length


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run: `model` for a model from scratch or from a base, `data` for the corpus, `train` for the
    loop.

    Raises:
        InputError: a value is out of range, or two values do not fit together.
    """

    model: ModelConfig | BaseModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        if isinstance(self.model, BaseModelConfig):
            self._check_base(self.model)
        else:
            self._check_model(self.model)

    def _check_base(self, model: BaseModelConfig) -> None:
        _ = model.scheme  # raises for an unknown scheme
        is_new = self.data.path is None and self.data.tokenizer in ("bpe", "byte")
        require(not is_new, "data.tokenizer", "the folder of model.base, for its tokenizer", self.data.tokenizer)

    def _check_model(self, model: ModelConfig) -> None:
        longest = model.max_position_embeddings
        muon = self.train.optimizer == "muon"
        require(not (model.mup and muon), "train.optimizer", "adamw with model.mup, whose rates are for Adam", "muon")
        expected = f"at most model.max_position_embeddings ({longest})"
        length = self.train.sequence_length
        require(length <= longest, "train.sequence_length", expected, length)
        _ = model.architecture  # raises for an invalid model

    @property
    def from_scratch(self) -> ModelConfig:
        """The section `model`, for code that needs a model from scratch. Raises InputError if the model has a base."""
        if isinstance(self.model, BaseModelConfig):
            raise InputError(f"model.base must be left out for a model from scratch, got {shown(self.model.base)}")
        return self.model

    @property
    def freezes_base(self) -> bool:
        """Whether only the connections of a base are trained."""
        return isinstance(self.model, BaseModelConfig) and self.model.freeze_base

    def to_yaml(self) -> str:
        """Return the resolved configuration; `load_config` of a file with this text gives an equal object."""
        return write_yaml(asdict(self))


SECTIONS: dict[str, type] = {"model": ModelConfig, "data": DataConfig, "train": TrainConfig}
BASE_SECTIONS = SECTIONS | {"model": BaseModelConfig}
"""The sections of a configuration with `model.base`."""


def _keys(sections: Mapping[str, type]) -> dict[str, Field]:
    return {f"{name}.{item.name}": item for name, section in sections.items() for item in fields(section)}


KEYS: dict[str, Field] = _keys(BASE_SECTIONS) | _keys(SECTIONS)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    files = (resources.files("residua.lab") / "recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_values(name: str) -> dict[str, Any]:
    """Return the values of a recipe, including those of its bases, by dotted key."""
    return _stacked(name, ())[0]


def load_config(
    sources: str | Sequence[str] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    *,
    begun: Mapping[str, Any] = MappingProxyType({}),
) -> RunConfig:
    """Read recipes and YAML files in order, then the overrides. Later values win; other keys keep their defaults.

    A recipe scales with `train.steps`: if another source changes the steps, the recipe's warmup, evaluations and
    checkpoints keep their shares of the run, and a line with the new values is printed. Values that a file or an
    override sets do not scale.

    Args:
        sources: a name from `recipe_names()`, the path of a YAML file, or several of these. A document with the key
            `base`, another name or path, lists only its differences from that base.
        overrides: values by dotted key, or texts as on a command line, `--train.lr=3e-4`; later ones win.
        begun: the settings, by dotted key, of a run that resumes. It keeps its warmup, evaluations and checkpoints.

    Raises:
        InputError: a source, a key or a value is wrong; the message names the key, the expected value and the actual.
    """
    values, shares = _stacked(sources, overrides)
    if values.get("model.base", "") is None:
        del values["model.base"]
    has_base = "model.base" in values
    if has_base and values.get("data.path") is None:
        values.setdefault("data.tokenizer", values["model.base"])
    sections = BASE_SECTIONS if has_base else SECTIONS
    keys = _keys(sections)
    nested: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for key, value in values.items():
        check_keys([key])
        if key not in keys:
            with_base = "with model.base, which decides it; leave it out (the recipe retrofit has none of these)"
            raise InputError(f"{key} must not be set {with_base if has_base else 'without model.base'}")
        section, _, name = key.partition(".")
        nested[section][name] = _typed(key, value, types_of(sections[section])[name])
    _fit(nested["train"], shares, begun)
    return RunConfig(**{name: decoded(nested[name], section, name) for name, section in sections.items()})


def _stacked(
    sources: str | Sequence[str] | None, overrides: Sequence[str] | Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the winning values by dotted key, and for each key of `SHARES` set by a recipe, that recipe's steps."""
    documents = [pair for name in ([sources] if isinstance(sources, str) else sources or ()) for pair in _chain(name)]
    given = dict(overrides if isinstance(overrides, Mapping) else parse_overrides(overrides))
    for key in ("model.base", "data.path"):  # the keys whose absence decides which others are allowed
        if isinstance(text := given.get(key), str) and readings(text, key)[0] is None:
            given[key] = None
    values: dict[str, Any] = {}
    wholes: dict[str, int] = {}
    for source, document in documents:
        if source not in recipe_names():
            typed_values(document, source)
    for source, document in [*documents, (None, given)]:
        if document.get("model.base") is not None:
            _drop_model(values)
        values.update(document)
        for key in SHARES.keys() & document.keys():
            wholes.pop(key, None)
            if source in recipe_names():
                wholes[key] = values[STEPS]
    return values, wholes


def _drop_model(values: dict[str, Any]) -> None:
    """Remove the settings of a model from scratch and its tokenizer, because a later source sets a base."""
    model = {key for key in values if key.startswith("model.")}
    if model - _keys(BASE_SECTIONS).keys():
        for key in (model | {"data.tokenizer"}) & values.keys():
            del values[key]


def recipe_shares(sources: str | Sequence[str] | None, overrides: Sequence[str] | Mapping[str, Any]) -> dict[str, str]:
    """Return the keys whose values scale with `train.steps`, and their shares in the recipe, such as "40 of 400"."""
    values, wholes = _stacked(sources, overrides)
    return {key: f"{values[key]} of {steps}" for key, steps in wholes.items()}


def _fit(train: dict[str, Any], wholes: Mapping[str, int], begun: Mapping[str, Any]) -> None:
    """Scale the values of a recipe to the steps of the run, and print the results, unless the run has begun."""
    fitted = []
    for key, least in SHARES.items():
        name, whole = key.partition(".")[2], wholes.get(key)
        if whole is None:
            continue
        if begun.get(key) is not None:
            train[name] = begun[key]
        elif whole != train["steps"] >= 1:
            train[name] = max(least, train[name] * train["steps"] // whole)
            fitted.append(f"{name} {train[name]}")
    if fitted:
        of = ", ".join(dict.fromkeys(map(str, wholes.values())))
        say_once(f"train.steps is {train['steps']}, not {of} as in the recipe; scaled with it: {', '.join(fitted)}")


def _chain(source: str, chain: tuple[str, ...] = (), place: str = "--config") -> list[tuple[str, dict[str, Any]]]:
    """Return the bases of a recipe or file, then the recipe or file, each with its own values by dotted key."""
    if source in chain:
        raise InputError(f"base must not lead back to the same file, got {' -> '.join([*chain, source])}")
    document = parse_yaml(_source_text(source, place, pipe=not chain), source)
    base = document.pop("base", None) if isinstance(document, dict) else None
    bases = [] if base is None else _chain(str(base), (*chain, source), f"base in {source}")
    return [*bases, (source, dict(_flat(document)))]


def _source_text(source: str, place: str, *, pipe: bool) -> str:
    recipes = recipe_names()
    if source in recipes:
        return (resources.files("residua.lab") / "recipes" / f"{source}.yaml").read_text(encoding="utf-8")
    if source and "\0" not in source and Path(source).exists():
        return read_text(source, "YAML", pipe=pipe)
    expected = f"a recipe ({', '.join(recipes)}) or a YAML file, relative to the working directory"
    raise InputError(f"{place} must be {expected}, got {shown(source)}{did_you_mean(source, recipes)}")


def _flat(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a document by dotted key. Skip empty sections, and pass unknown sections through."""
    for name, section in mapping(document, "configuration").items():
        if name not in SECTIONS:
            yield name, section
        elif section is not None:
            yield from ((f"{name}.{key}", value) for key, value in mapping(section, name).items())


def parse_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Return the texts of overrides by dotted key; later ones win. Raises InputError."""
    values: dict[str, str] = {}
    for override in overrides:
        key, equals, values[key] = override.removeprefix("--").partition("=")
        require(bool(equals), "an override", "KEY=VALUE, such as --train.lr=3e-4", override)
    return values


def check_keys(keys: Iterable[str], place: str = "") -> None:
    """Raise InputError for the first key that no configuration has. place: the part of a study's file with the keys."""
    for key in keys:
        if key not in KEYS:
            raise InputError(f"{place}{': ' * bool(place)}unknown key {key}{_nearest(key)}")


def typed_values(values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the values of keys in the types of a configuration.

    Each value is checked alone, without the other values. place: the part of a study's file with the values.

    Raises InputError for the first key that no configuration has, or the first value that its key does not take.
    """
    typed = dict(values)
    for key, value in values.items():
        check_keys([key], place)
        section, _, name = key.partition(".")
        kind = next(sections[section] for sections in (SECTIONS, BASE_SECTIONS) if key in _keys(sections))
        if (key, value) == ("model.base", None):  # no base, whatever the recipe has
            continue
        try:
            typed[key] = _typed(key, value, types_of(kind)[name])
            wrong = refusal(kind, name, typed[key])
        except InputError as error:
            raise InputError(f"{place}: {error}") from error
        if wrong:
            raise InputError(f"{place}: {key} {wrong}")
    return typed


def _nearest(key: str) -> str:
    """Return a hint with the most similar key, by its full name or by the part after the dot."""
    if key in SECTIONS:
        return f": must have a dot, such as {key}.{fields(SECTIONS[key])[0].name}"
    names = {name.rpartition(".")[2]: name for name in KEYS} | {name: name for name in (*SECTIONS, *KEYS)}
    return did_you_mean(key, names, show=names) or "; --print-config shows every key"


def _typed(key: str, value: Any, kind: Any) -> Any:
    """Convert the value of a key to its type. Text is parsed as YAML; if that does not fit, it stays text."""
    for reading in readings(value, key) if isinstance(value, str) else [value]:
        if fits(reading, kind) and reading != "":
            return float(reading) if kind is float else reading
    raise InputError(f"{key} must be {words(kind)}, got {shown(value)}")
