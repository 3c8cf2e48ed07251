"""One experiment, put together from the parts: data, a model, the training loop, and what is measured on the way."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from residua.analysis import Trace, gate_quantiles, has_gates, pieces, trace
from residua.connections import describe, resolve
from residua.data import Batches, HeldOutBatches, PreparedData, prepare
from residua.errors import InputError, extra, first_line
from residua.evaluation.loss import dealt, held_out_loss
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.models.configuration import refuse_fetched_attention
from residua.runs.reading import file_name, read_json_files
from residua.training import (
    DataConfig,
    RunConfig,
    RunFolder,
    claim,
    latest_checkpoint,
    load_checkpoint,
    load_config,
    pick_device,
    train,
)
from residua.training.checkpoint import best_checkpoint, saved_steps
from residua.training.distributed import ALONE, Ranks, Share, join

with extra("lab"):
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        PreTrainedTokenizerFast,
    )
    from transformers.utils import logging

# An embedding with a multiple of 64 rows is faster on accelerators; the rows beyond the tokenizer's are never labels.
VOCABULARY_MULTIPLE = 64
GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class OpenRun:
    """A run folder opened to work with its model: `model` is in evaluation mode, as it was after step `step`."""

    model: ResiduaForCausalLM
    tokenizer: PreTrainedTokenizerFast
    data: PreparedData
    config: RunConfig
    step: int
    folder: Path

    def precision(self) -> torch.autocast:
        """The context in which the model computes as it did in training."""
        bfloat16 = self.config.train.precision == "bfloat16"
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=bfloat16)


def run(config: RunConfig, folder: str | Path, *, resume: bool = False, progress: bool = True) -> dict[str, Any]:
    """Train one model into a run folder: prepare or open its data, build it, train it, evaluate it on the way.

    Under torchrun all processes train the one model together, in a folder that all of them see.

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
    described = describe(resolve(config.model.connection))
    if "package" in described:  # its name says what to install where the run is opened without it
        config = replace(config, model=replace(config.model, connection=described))
    with join(config.train.device) as ranks, _held(config, folder, resume, ranks) as held:
        with ranks.together():
            share = Share.of(config.train, ranks)
            if ranks.first:
                data = _data(config.data, held.path, fresh=not held.resume, progress=progress)
        with ranks.together():
            if not ranks.first:
                data = _data(config.data, held.path, fresh=False, progress=False)
            model = build_model(config, data)
            batches = Batches(
                data.train,
                share.rows_here,
                config.train.sequence_length,
                config.train.seed,
                rank=share.member,
                world_size=share.members,
            )
        evaluator = _evaluator(config, data, ranks)
        return train(
            model,
            batches,
            config.train,
            held,
            evaluate=evaluator,
            observe=gate_quantiles if has_gates(model.model.stream, model.config.hidden_size) else None,
            facts=data.facts,
            progress=progress,
            ranks=ranks,
        )


@contextmanager
def _held(config: RunConfig, folder: str | Path, resume: bool, ranks: Ranks) -> Iterator[RunFolder]:
    """The run folder, which the first rank claims for all. torchrun's second attempt goes on with its first."""
    resume = resume or (ranks.restarts > 0 and (Path(folder) / "config.yaml").is_file())
    held = RunFolder(Path(folder), asdict(config), resume)
    with ExitStack() as stack:
        with ranks.together():
            if ranks.first:
                held = stack.enter_context(claim(folder, asdict(config), resume=resume))
        yield held


def build_model(config: RunConfig, data: PreparedData) -> ResiduaForCausalLM:
    """The untrained model of a run; its weights depend on `train.seed` alone, and no global random state changes.

    Without `model.vocab_size` the vocabulary is that of the data, rounded up to a multiple of 64.

    Raises:
        InputError: the model's vocabulary is smaller than the data's.
    """
    settings = asdict(config.model)
    if settings["vocab_size"] is None:
        settings["vocab_size"] = _rounded_up(data.vocab_size)
    if settings["vocab_size"] < data.vocab_size:
        raise InputError(
            f"model.vocab_size: expected at least the {data.vocab_size} tokens of the data in {data.folder}, "
            f"got {settings['vocab_size']}; leave it out to take the data's"
        )
    special = {"eos_token_id": data.eos_token_id, "pad_token_id": data.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.train.seed)
        return ResiduaForCausalLM(ResiduaConfig(**settings, **special))


def expected_vocabulary(config: RunConfig) -> int:
    """The rows of the embedding that `build_model` will make, as far as they can be known before there are data.

    Those of prepared data where `data.path` is given; of a trained tokenizer, all that it may have; else GPT-2's.
    """
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    if config.data.path is not None:
        return _rounded_up(PreparedData.open(config.data.path).vocab_size)
    known = {"bpe": config.data.vocab_size, "byte": 257}
    trained = config.data.source is not None and config.data.tokenizer in known
    return _rounded_up(known[config.data.tokenizer] if trained else GPT2_VOCABULARY)


def open_run(folder: str | Path, checkpoint: int | Literal["best"] | None = None, *, device: str = "auto") -> OpenRun:
    """Open the model of a run, at the checkpoint of step `checkpoint` or else at its newest whole one.

    "best" is, of the checkpoints that are kept, the one with the lowest validation loss.

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
    return OpenRun(model.to(pick_device(device)).eval(), data.tokenizer(), data, config, step, folder)


def open_model(folder: str | Path, *, device: str = "auto") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open the language model and the tokenizer of a folder of transformers; the model is in evaluation mode.

    Nothing in the folder is executed, and nothing is downloaded for it.

    Raises:
        InputError: the folder has no such model, its weights are not the model's, or it needs code of its own.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder}: expected a run folder or one with a model of transformers, found no config.json")
    files = read_json_files(folder)
    try:
        _refuse_what_leads_elsewhere(folder, files)
        with _quiet():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except InputError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise InputError(f"{folder}: expected a model of transformers, got: {first_line(error)}") from error
    differences = [f"{kind.replace('_', ' ')} {sorted(map(str, names))[:5]}" for kind, names in found.items() if names]
    if differences:
        raise InputError(f"{folder}: expected the weights of the model in config.json, found {'; '.join(differences)}")
    return model.to(pick_device(device)).eval(), tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing what it finds in the files: it becomes one error here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _refuse_what_leads_elsewhere(folder: Path, files: Mapping[str, Any]) -> None:
    """Check the JSON files of a model folder for what would make transformers read or fetch something outside it.

    Raises:
        InputError, ValueError: weights in another folder, an adapter on another model, attention to be downloaded.
    """
    refuse_fetched_attention(files["config.json"], folder / "config.json")
    if "adapter_config.json" in files:
        raise InputError(f"{folder}: expected a whole model, found an adapter (adapter_config.json); merge it first")
    for name, index in files.items():
        if name.endswith(".index.json"):
            for file in index["weight_map"].values():
                file_name(folder, file)


def evaluate(opened: OpenRun) -> dict[str, float]:
    """Validation loss, perplexity and bits per byte of an opened run, measured just as during its training."""
    with opened.precision():
        return _evaluator(opened.config, opened.data)(opened.model)


def trace_run(opened: OpenRun, prompt: str | None = None, *, tokens: int | None = None) -> Trace:
    """What the connections of an opened run do, in the precision of its training.

    Args:
        prompt: the text they do it to; by default the beginning of the validation data.
        tokens: at most so many of it; None is `train.sequence_length`, or the whole of a prompt.

    Raises:
        InputError: these are no tokens, or more than the model's context holds.
    """
    if tokens is not None and tokens < 1:
        raise InputError(f"expected at least 1 token, got {tokens}")
    facts = {"run": opened.folder.resolve().name, "checkpoint": opened.step}
    if prompt is not None:
        with opened.precision():
            return trace_prompt(opened.model, opened.tokenizer, prompt, tokens=tokens, facts=facts)
    length = opened.config.train.sequence_length if tokens is None else tokens
    ids = opened.data.validation.window(0, min(length, len(opened.data.validation))).tolist()
    read = f"the first {len(ids)} tokens of the validation data"
    with opened.precision():
        return trace(opened.model, ids, text=pieces(opened.tokenizer, ids), facts={**facts, "read": read})


def trace_prompt(
    model: ResiduaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Trace:
    """What the connections of a model do to a text, or to an end-of-text token where it is empty.

    tokens: at most so many of it. Raises InputError where they do not fit into the model's context.
    """
    ids = (tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id])[:tokens]
    read = f"{len(ids)} tokens of a prompt"
    return trace(model, ids, text=pieces(tokenizer, ids), facts={**(facts or {}), "read": read})


def _evaluator(
    config: RunConfig, data: PreparedData, ranks: Ranks = ALONE
) -> Callable[[torch.nn.Module], dict[str, float]]:
    batches = HeldOutBatches(data.validation, config.train.batch_size, config.train.sequence_length)
    return lambda model: held_out_loss(
        model, dealt(batches, ranks.rank, ranks.world_size), bytes=data.validation_bytes, gather=ranks.gather
    )


def _data(config: DataConfig, folder: Path, *, fresh: bool, progress: bool) -> PreparedData:
    if config.path is not None:
        return PreparedData.open(config.path)
    own = folder / "data"
    if own.exists() and fresh:
        shutil.rmtree(own)  # of a run that ended before its first step, perhaps with other settings
    return open_or_prepare(config, own, progress=progress)


def open_or_prepare(config: DataConfig, folder: Path, *, progress: bool) -> PreparedData:
    """Open `folder`, or prepare the source of a configuration there first. Raises InputError where there is none."""
    if folder.exists():
        return PreparedData.open(folder)
    if config.source is None:
        raise InputError("data.path: expected a folder written by residua prepare (or data.source: text), got neither")
    return prepare(
        config.source,
        folder,
        vocab_size=config.vocab_size,
        tokenizer=config.tokenizer,
        validation_fraction=config.validation_fraction,
        progress=progress,
    )


def _checkpoint(folder: Path, step: int | Literal["best"] | None) -> Any:
    if step is None:
        found = latest_checkpoint(folder)
        if found is None:
            raise InputError(f"{folder}: expected a checkpoint in this run, found none; train it first")
        return found
    if step == "best":
        found = best_checkpoint(folder / "checkpoints")
        if found is None:
            raise InputError(
                f"{folder}: expected a checkpoint with a validation loss, found none; they have one where "
                "train.evaluate_every and train.checkpoint_every meet"
            )
        return found
    path = folder / "checkpoints" / f"step-{step}"
    if not path.is_dir():
        there = saved_steps(folder)
        have = f"there are {', '.join(map(str, there))}" if there else "there is none"
        raise InputError(f"{folder}: expected a checkpoint of step {step}; {have}")
    return path


def _rounded_up(vocab_size: int) -> int:
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
