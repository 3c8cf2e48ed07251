"""Texts, their tokens, and the options of training runs that take a second."""

from pathlib import Path

from tokenizers.processors import TemplateProcessing

from residua.lab.data import PreparedData, prepare
from residua.lab.training import RunConfig, load_config

MODEL = {"connection": "ddl-tc", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
TRAIN = {"steps": 6, "batch_size": 2, "gradient_accumulation": 2, "sequence_length": 16, "evaluate_every": 3,
         "checkpoint_every": 2, "device": "cpu", "tensorboard": "false", "clip": 0}  # fmt: skip


def write_texts(folder: Path, line: str = "Text number {0} tells of {1} things.") -> Path:
    """Write forty short texts into a new folder, which is returned: three times a line with a number and its square."""
    folder.mkdir()
    for number in range(40):
        text = line.format(number, number * number) + "\n"
        (folder / f"{number:02d}.txt").write_text(text * 3)
    return folder


def prepare_texts(place: Path, tokenizer: str = "byte") -> PreparedData:
    """These texts in place/text as tokens in place/data."""
    return prepare(write_texts(place / "text"), place / "data", tokenizer=tokenizer, progress=False)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def options(data: PreparedData | Path | None, *, model=(), **train) -> list[str]:
    """Arguments of `residua train`: a model of two layers and six steps on prepared data, but for what is given."""
    folder = data.folder if isinstance(data, PreparedData) else data
    model = {**MODEL, "max_position_embeddings": 32, **dict(model)}
    sections = {"model": model, "data": {"path": folder or "null"}, "train": TRAIN | train}
    return [f"--{section}.{key}={value}" for section, keys in sections.items() for key, value in keys.items()]


def run_config(arguments: list[str]) -> RunConfig:
    return load_config(None, arguments)


def beginning(tokenizer):
    """The tokenizer, which now adds the end-of-text token before each text, as that of Llama adds one of its own."""
    end = tokenizer.eos_token
    added = [(end, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{end} $A", special_tokens=added)
    return tokenizer
