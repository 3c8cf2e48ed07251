"""One experiment, put together from the parts: data, a model, the training loop, and what is measured on the way."""

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from residua.data import Batches, PreparedData, held_out_batches, prepare
from residua.errors import InputError, extra
from residua.evaluation.loss import held_out_loss
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.training import (
    DataConfig,
    RunConfig,
    claim,
    latest_checkpoint,
    load_checkpoint,
    load_config,
    pick_device,
    train,
)

with extra("models"):
    from transformers import PreTrainedTokenizerFast

# An embedding with a multiple of 64 rows is faster on accelerators; the rows beyond the tokenizer's are never labels.
VOCABULARY_MULTIPLE = 64


@dataclass(frozen=True)
class OpenRun:
    """A run folder opened to work with its model: `model` is in evaluation mode, as it was after step `step`."""

    model: ResiduaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    data: PreparedData
    config: RunConfig
    step: int


def run(config: RunConfig, folder: str | Path, *, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Train one model into a run folder: prepare or open its data, build it, train it, evaluate it on the way.

    Args:
        config: everything that decides the numbers.
        folder: a new or empty folder; with `resume`, the folder of a run, which goes on at its newest checkpoint.
        progress: show how far it is.

    Returns:
        The row of the last step, as `residua.training.train` does: `val_loss`, `interrupted` and the rest.

    Raises:
        InputError: the folder, the data and the configuration do not fit together.
        RunError: training or writing failed; the older checkpoints stay.
    """
    if config.data.path is not None:
        # The run shall find its data again from wherever it is opened.
        config = replace(config, data=replace(config.data, path=str(Path(config.data.path).resolve())))
    with claim(folder, asdict(config), resume=resume) as held:
        data = _data(config.data, held.path, fresh=not resume, progress=progress)
        model = build_model(config, data)
        batches = Batches(data.train, config.train.batch_size, config.train.sequence_length, config.train.seed)
        return train(
            model, batches, config.train, held, evaluate=_evaluator(config, data), facts=data.facts, progress=progress
        )


def build_model(config: RunConfig, data: PreparedData) -> ResiduaForCausalLM:
    """The untrained model of a run; its weights depend on `train.seed` alone, and no global random state changes.

    Without `model.vocab_size` the vocabulary is that of the data, rounded up to a multiple of 64.

    Raises:
        InputError: the model's vocabulary is smaller than the data's.
    """
    settings = asdict(config.model)
    if settings["vocab_size"] is None:
        settings["vocab_size"] = -(-data.vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    if settings["vocab_size"] < data.vocab_size:
        raise InputError(
            f"model.vocab_size: expected at least the {data.vocab_size} tokens of the data in {data.folder}, "
            f"got {settings['vocab_size']}; leave it out to take the data's"
        )
    special = {"eos_token_id": data.eos_token_id, "pad_token_id": data.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return ResiduaForCausalLM(ResiduaConfig(**settings, **special))


def open_run(folder: str | Path, checkpoint: int | None = None, *, device: str = "auto") -> OpenRun:
    """Open the model of a run, at the checkpoint of step `checkpoint` or else at its newest whole one.

    Raises:
        InputError: the folder is no run, it has no such checkpoint, or its data are gone or changed.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise InputError(f"{folder}: expected a run folder, found no config.yaml; residua train --run makes one")
    config = load_config(str(folder / "config.yaml"))
    found = _checkpoint(folder, checkpoint)
    data = PreparedData.open(folder / "data" if config.data.path is None else config.data.path)
    model = build_model(config, data)
    step = load_checkpoint(found, model).step
    return OpenRun(model.to(pick_device(device)).eval(), data.tokenizer(), data, config, step)


def evaluate(opened: OpenRun) -> dict[str, float]:
    """Validation loss, perplexity and bits per byte of an opened run, measured just as during its training."""
    precision = torch.autocast(
        opened.model.device.type, dtype=torch.bfloat16, enabled=opened.config.train.precision == "bfloat16"
    )
    with precision:
        return _evaluator(opened.config, opened.data)(opened.model)


def _evaluator(config: RunConfig, data: PreparedData) -> Callable[[torch.nn.Module], dict[str, float]]:
    batches = held_out_batches(data.validation, config.train.batch_size, config.train.sequence_length)
    return lambda model: held_out_loss(model, batches, bytes=data.validation_bytes)


def _data(config: DataConfig, folder: Path, *, fresh: bool, progress: bool) -> PreparedData:
    if config.path is not None:
        return PreparedData.open(config.path)
    own = folder / "data"
    if own.exists() and fresh:
        shutil.rmtree(own)  # of a run that ended before its first step, perhaps with other settings
    if own.exists():
        return PreparedData.open(own)
    if config.source is None:
        raise InputError("data.path: expected a folder written by residua prepare (or data.source: text), got neither")
    return prepare(
        config.source,
        own,
        vocab_size=config.vocab_size,
        tokenizer=config.tokenizer,
        validation_fraction=config.validation_fraction,
        progress=progress,
    )


def _checkpoint(folder: Path, step: int | None) -> Any:
    if step is None:
        found = latest_checkpoint(folder)
        if found is None:
            raise InputError(f"{folder}: expected a checkpoint in this run, found none; train it first")
        return found
    path = folder / "checkpoints" / f"step-{step}"
    if not path.is_dir():
        there = sorted(int(other.name.removeprefix("step-")) for other in path.parent.glob("step-*"))
        have = f"there are {', '.join(map(str, there))}" if there else "there is none"
        raise InputError(f"{folder}: expected a checkpoint of step {step}; {have}")
    return path
