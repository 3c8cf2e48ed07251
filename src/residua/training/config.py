"""The configuration of a run: frozen dataclasses, read from a recipe or a YAML file and from dotted overrides."""

import argparse
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields, make_dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from residua.errors import InputError, extra
from residua.models.configuration import MODEL_FIELDS, ResiduaConfig
from residua.runs.reading import parse_yaml, read_text

with extra("train"):
    import jsonargparse
    import yaml


def _model_fields() -> list[tuple[str, Any, Any]]:
    """The fields of `ResiduaConfig`, declared there alone; the vocabulary is the tokenizer's unless it is given."""
    own = {"vocab_size": (int | None, None)}
    return [(name, *own.get(name, (kind, default))) for name, kind, default in MODEL_FIELDS]


def _model_help(documentation: str | None) -> dict[str, str]:
    """What the lines `name, name  explanation; explanation` of ResiduaConfig's documentation say of each name."""
    found = {
        "tie_word_embeddings": "the head's weights are the embedding's",
        "use_cache": "keep keys and values while generating",
    }
    blocks = re.findall(r"^ +(\w+(?:, \w+)*)  +(\S.*(?:\n {20,}\S.*)*)", documentation or "", re.MULTILINE)
    for names, block in blocks:
        text = " ".join(block.split()).replace("None", "null")
        each = text.split("; ")
        apart = len(each) > 1 and len(each) == names.count(", ") + 1
        names = names.split(", ")
        found |= dict(zip(names, each if apart else [text] * len(names)))
    if "vocab_size" in found:
        found["vocab_size"] += "; the tokenizer's, rounded up, where null"
    return found


_MODEL_HELP = _model_help(ResiduaConfig.__doc__)
ModelConfig = make_dataclass(
    "ModelConfig",
    [
        # Python -OO keeps no documentation.
        (name, kind, field(default=default, metadata={"help": _MODEL_HELP.get(name, "see ResiduaConfig")}))
        for name, kind, default in _model_fields()
    ],
    frozen=True,
    namespace={
        "__module__": __name__,
        "__doc__": "The fields of `residua.models.ResiduaConfig`; vocab_size None is the tokenizer's, rounded up.",
    },
)


def _setting(default: Any, explanation: str) -> Any:
    return field(default=default, metadata={"help": explanation})


@dataclass(frozen=True)
class DataConfig:
    """What is trained on. A prepared folder, or else a source that is prepared into the run folder."""

    path: str | None = _setting(None, "folder written by `residua prepare`")
    source: str | None = _setting("stdlib", "where path is null: stdlib, a text file or a folder of text")
    tokenizer: str = _setting("bpe", "bpe, byte, or a tokenizer's folder")
    vocab_size: int = _setting(2048, "entries of a trained BPE tokenizer")
    validation_fraction: float = _setting(0.05, "share of the text held out")

    def __post_init__(self) -> None:
        _require(self, "data", "vocab_size", self.vocab_size >= 1, "at least 1")
        fraction = self.validation_fraction
        _require(self, "data", "validation_fraction", 0 < fraction < 1, "a number between 0 and 1")


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. Tokens per step, those of all processes: batch_size * gradient_accumulation *
    sequence_length. Several processes share the micro-batches of a step, and the rows of a micro-batch where there are
    fewer micro-batches than processes (`distributed.Share`): the same tokens in the same steps for any number of them.

    Raises:
        InputError: a value is outside its range.
    """

    steps: int = _setting(400, "optimizer steps")
    batch_size: int = _setting(16, "sequences per micro-batch")
    sequence_length: int = _setting(128, "tokens per sequence")
    gradient_accumulation: int = _setting(1, "micro-batches per step")
    lr: float = _setting(1e-3, "peak learning rate")
    min_lr_ratio: float = _setting(0.05, "last learning rate as a share of the peak")
    warmup_steps: int = _setting(0, "steps of linear warmup")
    weight_decay: float = _setting(0.1, "AdamW's, on matrices only")
    beta1: float = _setting(0.9, "AdamW's first")
    beta2: float = _setting(0.95, "AdamW's second")
    adam_eps: float = _setting(1e-8, "AdamW's epsilon")
    clip: float = _setting(1.0, "largest gradient norm; 0 for no clipping")
    seed: int = _setting(0, "of the initial weights and the order of the data")
    precision: Literal["float32", "bfloat16"] = _setting("float32", "bfloat16 runs under autocast, weights in float32")
    compile: bool = _setting(False, "torch.compile the model; each layer by itself where several processes train")
    activation_checkpointing: bool = _setting(False, "keep the inputs of layers alone, compute the rest again")
    parallel: Literal["auto", "ddp", "fsdp", "none"] = _setting(
        "auto", "under torchrun: whole models (ddp, which is auto) or models in shards (fsdp)"
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("auto", "auto is cuda where there is one")
    log_every: int = _setting(1, "steps between two rows of metrics")
    evaluate_every: int = _setting(100, "steps between two evaluations; the last step has one")
    checkpoint_every: int = _setting(100, "steps between two checkpoints; the last step has one")
    keep_checkpoints: int = _setting(2, "newest checkpoints to keep")
    keep_best: bool = _setting(False, "keep the checkpoint with the lowest validation loss too")
    tensorboard: bool = _setting(True, "write TensorBoard events too")
    wandb: str | None = _setting(None, "project at Weights & Biases that gets the rows too; needs the package wandb")
    connections_every: int = _setting(
        0, "steps between two rows of connections.jsonl, the gates of schemes with beta or gamma; 0 for none"
    )

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "sequence_length", "gradient_accumulation", "log_every", "evaluate_every")
        for name in (*counts, "checkpoint_every", "keep_checkpoints"):
            _require(self, "train", name, getattr(self, name) >= 1, "at least 1")
        _require(self, "train", "connections_every", self.connections_every >= 0, "at least 0")
        for name in ("lr", "adam_eps"):
            _require(self, "train", name, 0 < getattr(self, name) < math.inf, "a positive number")
        for name in ("weight_decay", "clip"):
            _require(self, "train", name, 0 <= getattr(self, name) < math.inf, "a number of at least 0")
        for name in ("beta1", "beta2"):
            _require(self, "train", name, 0 <= getattr(self, name) < 1, "a number in [0, 1)")
        _require(self, "train", "min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "a number in [0, 1]")
        warmup = 0 <= self.warmup_steps <= self.steps
        _require(self, "train", "warmup_steps", warmup, f"0 to train.steps ({self.steps})")
        _require(self, "train", "seed", 0 <= self.seed < 2**63, "a whole number of at least 0")
        for name in ("precision", "device", "parallel"):
            choices = get_args(type(self).__annotations__[name])
            _require(self, "train", name, getattr(self, name) in choices, f"one of {', '.join(choices)}")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run: `model` for ResiduaConfig, `data` for the corpus, `train` for the loop.

    Raises:
        InputError: a value is out of range, or two of them do not fit together.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        longest = self.model.max_position_embeddings
        given = {name: value for name, value in asdict(self.model).items() if (name, value) != ("vocab_size", None)}
        try:
            ResiduaConfig(**given)
        except ValueError as error:
            own = str(error).startswith(tuple(given))  # otherwise a scheme speaks of its options
            raise InputError(f"model.{error}" if own else f"model.connection: {error}") from error
        if self.train.sequence_length > longest:
            raise InputError(
                f"train.sequence_length: expected at most model.max_position_embeddings ({longest}), "
                f"got {self.train.sequence_length}"
            )

    def to_yaml(self) -> str:
        """The resolved configuration; `load_config` of a file with this text gives an equal object."""
        return yaml.safe_dump(asdict(self), sort_keys=False)


SECTIONS = {section.name: section.type for section in fields(RunConfig)}
KEYS = {f"{name}.{item.name}": item for name, section in SECTIONS.items() for item in fields(section)}


def recipe_names() -> list[str]:
    """The recipes that come with the package, by name."""
    files = (resources.files("residua") / "recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_config(name_or_file: str | None = None, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe of the package or a YAML file, then the overrides; what neither names keeps its default.

    Args:
        name_or_file: a name out of `recipe_names()`, the path of a YAML file, or None. Where a document has the key
            `base`, another such name or path, it holds only what differs from that one.
        overrides: arguments as on a command line, `--train.lr=3e-4` or `--train.lr 3e-4` in two; later ones win.

    Raises:
        InputError: the recipe, a key or a value is wrong; one line with the key, what was expected and what came.
    """
    values = _values(name_or_file) if name_or_file is not None else {}
    values.update(_pairs(overrides))
    for key in values:
        if key not in KEYS:
            raise InputError(f"unknown key {key}{_nearest(key)}")
    typed: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in values.items():
        section, _, name = key.partition(".")
        typed[section][name] = _typed(key, value)
    return RunConfig(**{name: SECTIONS[name](**keys) for name, keys in typed.items()})


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a command `--config`, `--print_config` and one option per key, the keys with their help and default.

    The parser must have `allow_abbrev=False` and be read by `parse_known_args`; then
    `load_config(arguments.config, [*arguments.overrides, *unknown])` is the configuration, and names an unknown key.
    """
    names = ", ".join(recipe_names())
    parser.add_argument("--config", metavar="NAME|FILE.yaml", help=f"a recipe ({names}) or a YAML file")
    parser.add_argument("--print_config", action="store_true", help="print the resolved configuration and stop")
    group = parser.add_argument_group("configuration")
    for key, item in KEYS.items():
        group.add_argument(
            f"--{key}",
            dest="overrides",
            action="append",
            default=[],
            type=f"--{key}={{}}".format,
            metavar="|".join(_choices(item)) or key.rpartition(".")[2].upper(),
            help=f"{item.metadata['help']} (default: {_written(item.default)})".replace("%", "%%"),
        )


def _choices(item: Field) -> list[str]:
    """The values of a key that takes one of a few, as they are written; none for another key."""
    if item.type is bool:
        return ["true", "false"]
    if get_origin(item.type) is Literal:
        return list(get_args(item.type))
    # ResiduaConfig checks these itself; its documentation quotes them.
    quoted = re.findall(r'"(\w+)"', item.metadata["help"]) if item.type == str | None else []
    return [*quoted, "null"] if quoted else []


def _written(value: Any) -> str:
    """A value as it is written in YAML and as an override."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _values(name_or_file: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a recipe or file under dotted keys, over those of its base."""
    if name_or_file in above:
        raise InputError(f"base: {' -> '.join([*above, name_or_file])} leads back to where it began")
    document = _read(name_or_file)
    base = document.get("base") if isinstance(document, Mapping) else None
    if base is None:
        return dict(_flat(document))
    if not isinstance(base, str):
        raise InputError(f"base: expected a recipe's name or a YAML file, got {base!r}")
    own = {name: section for name, section in document.items() if name != "base"}
    return _values(base, (*above, name_or_file)) | dict(_flat(own))


def _read(name_or_file: str) -> Any:
    if name_or_file in recipe_names():
        text = (resources.files("residua") / "recipes" / f"{name_or_file}.yaml").read_text(encoding="utf-8")
    elif Path(name_or_file).is_file():
        text = read_text(name_or_file, "YAML")
    else:
        close = difflib.get_close_matches(name_or_file, recipe_names(), n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise InputError(
            f"--config: expected a recipe ({', '.join(recipe_names())}) or a YAML file, got {name_or_file!r}{hint}"
        )
    return parse_yaml(text, name_or_file)


def _flat(document: Any) -> Iterator[tuple[str, Any]]:
    """The values of a document under dotted keys. A section left empty has none; an unknown one stands for itself."""
    if not isinstance(document, Mapping):
        raise InputError(f"configuration: expected the sections {', '.join(SECTIONS)}, got {document!r}")
    for name, section in document.items():
        if name not in SECTIONS:
            yield str(name), section
        elif isinstance(section, Mapping):
            yield from ((f"{name}.{key}", value) for key, value in section.items())
        elif section is not None:
            raise InputError(f"{name}: expected a mapping of keys to values, got {section!r}")


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    remaining = iter(overrides)
    for argument in remaining:
        key, equals, value = argument.removeprefix("--").partition("=")
        if not equals:
            if not argument.startswith("--"):
                raise InputError(f"unexpected argument {argument!r}; an override reads --train.lr=3e-4")
            value = next(remaining, None)
            if value is None and key in KEYS:
                raise InputError(f"{key}: expected {_description(KEYS[key].type)}, got nothing")
        yield key, value


def _nearest(key: str) -> str:
    """The valid key that was perhaps meant, by its full name or by the part behind the dot."""
    if key in SECTIONS:
        return f": expected one with a dot, such as {key}.{fields(SECTIONS[key])[0].name}"
    known = {name.rpartition(".")[2]: name for name in KEYS} | {name: name for name in (*SECTIONS, *KEYS)}
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {known[close[0]]}?" if close else "; --print_config shows every key"


@cache
def _parser(key: str) -> jsonargparse.ArgumentParser:
    """Reads one key: an error is then that key's, and a parser for all of them costs fifty times as much per value."""
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=KEYS[key].type)
    return parser


def _typed(key: str, value: Any) -> Any:
    """One value, which may still be text, in the type of its field."""
    kind = KEYS[key].type
    if NoneType in get_args(kind) and value in (None, "null"):
        return None
    try:
        typed = _parser(key).parse_object({"value": value})["value"]
    except jsonargparse.ArgumentError:
        typed = None
    if typed is None:
        raise InputError(f"{key}: expected {_description(kind)}, got {value!r}")
    return typed


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    dict: "a mapping",
    NoneType: "null",
}


def _description(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_description, get_args(kind)))
    return _WORDS.get(get_origin(kind) or kind, str(kind))


def _require(config: Any, section: str, name: str, condition: bool, expected: str) -> None:
    if not condition:
        raise InputError(f"{section}.{name}: expected {expected}, got {getattr(config, name)!r}")
