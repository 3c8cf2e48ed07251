"""One experiment, put together from its parts.

`run` prepares the folder, the data, the model, the batches and the evaluation, in this order, and then trains.
`open_run` opens the trained model later, for `evaluate`, `trace_model` and everything else that reads a run.
"""

import copy
import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from residua.connections import describe
from residua.conversion.configuration import ConvertedConfig
from residua.errors import InputError, extra, require
from residua.files.durable import remove, unfinished
from residua.lab.data import Batches, HeldOutBatches, PreparedData, prepare
from residua.lab.data.model_text import Text
from residua.lab.data.tokenizer import (
    load_tokenizer,
    same_tokens,
    save_tokenizer,
    saved_tokenizer,
    vocabulary,
    without_additions,
)
from residua.lab.evaluation.loss import document_losses, held_out_loss, shard_batches
from residua.lab.inspection import Trace, gate_quantiles, has_gates, logit_lens, pieces, trace
from residua.lab.inspection.subject import Subject
from residua.lab.jobs.pool import threads
from residua.lab.opening import context_of, fill_no_cache, first_tokens, prompt_tokens, read_model
from residua.lab.records.folder import not_a_run, read_facts, writable
from residua.lab.records.progress import say
from residua.lab.training import (
    BaseModelConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    RunFolder,
    TrainConfig,
    claim,
    load_checkpoint,
    load_config,
    pick_device,
    train,
)
from residua.lab.training.base_model import (
    base_connection,
    base_sha256,
    expect_digest,
    expect_documents_apart,
    freeze_base,
    is_run,
    open_base,
    rebuild_base,
)
from residua.lab.training.checkpoint import Checkpoint, find_checkpoint, saved_steps
from residua.lab.training.distributed import ALONE, BatchShard, Ranks, join
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.models.cache import documents_apart

with extra("lab"):
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

# An embedding with a multiple of 64 rows is faster on accelerators. The additional rows are never labels.
VOCABULARY_MULTIPLE = 64
GPT2_VOCABULARY = 50257
LONGEST_WINDOW = 1024
"""The longest window in tokens for the loss of a model whose training is unknown. A shorter context shortens it."""


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """An opened model, in evaluation mode, and the tokenizer that made its training tokens.

    folder: the folder of the run, or a transformers folder. step: the step of the checkpoint; None for a transformers
    folder. bfloat16: whether the model was trained under autocast; it then computes in the same precision here.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    step: int | None = None
    bfloat16: bool = False

    @property
    def window(self) -> int | None:
        """The number of tokens in a training window; None if it is unknown or not the same for all windows."""
        return None

    @property
    def evaluation(self) -> tuple[int, int, bool]:
        """The settings for the loss on a text: tokens per window, rows per batch, and whether documents are masked."""
        return min(context_of(self.model) or LONGEST_WINDOW, LONGEST_WINDOW) - len(self.first), 8, False

    @property
    def first(self) -> list[int]:
        """The tokens that each window of a text begins with, as in training: for most models there are none."""
        return first_tokens(self.tokenizer)

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder

    @property
    def trained_on(self) -> Mapping[str, Any]:
        """The facts of the training data; empty if unknown."""
        return {}

    def excerpt(self, tokens: int | None) -> list[int]:
        """Return the ids of the first held-out tokens. Raises InputError for a model without held-out data."""
        raise InputError(f"{self.folder}: this model has no validation text of its own")

    def precision(self) -> torch.autocast:
        """Return the autocast context with the precision of the training."""
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self.bfloat16)


@dataclass(frozen=True, kw_only=True)
class OpenRun(OpenModel):
    """An opened run: `model` has the weights of `checkpoint`, after step `step`."""

    step: int
    config: RunConfig
    checkpoint: Checkpoint
    place: Path
    """The present folder of the training data, which may have moved since the training."""

    @property
    def window(self) -> int | None:
        return None if isinstance(self.config.model, BaseModelConfig) else self.config.train.sequence_length

    @property
    def evaluation(self) -> tuple[int, int, bool]:
        train = self.config.train
        return train.sequence_length, train.batch_size, train.document_masks

    @property
    def first(self) -> list[int]:
        return []

    @property
    def tokenizer_folder(self) -> Path:
        return RunFolder(self.folder).tokenizer

    @property
    def trained_on(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = read_facts(RunFolder(self.folder).facts).get("data", {})
        return facts

    def is_own(self, place: str | Path) -> bool:
        """Return whether a folder holds the training data of the model."""
        if not (Path(place) / "index.json").is_file():
            return not Path(place).exists()  # a missing folder counts, so that opening it raises the error
        found = PreparedData.open(place).fingerprint
        return self.checkpoint.settings.get("data.fingerprint", found) == found

    @cached_property
    def data(self) -> PreparedData:
        """The training data of the model. Raises InputError if they are missing, damaged or different."""
        try:
            data = PreparedData.open(self.place)
        except InputError as error:
            message = f"{error}; if the data of {self.folder} have moved, give their folder with --data DIR"
            raise InputError(message) from error
        expected = self.checkpoint.settings.get("data.fingerprint", data.fingerprint)
        if data.fingerprint != expected:
            raise InputError(
                f"{data.folder} must be the data that {self.folder} was trained on (fingerprint {str(expected)[:12]}), "
                f"found other data ({data.fingerprint[:12]}); prepare the same text again there, with the same settings"
            )
        return data

    def excerpt(self, tokens: int | None) -> list[int]:
        """Return the ids of the first held-out tokens; with document masks, only those of the first document.

        tokens: their number; None for `train.sequence_length`.
        """
        held_out, end_of_text = self.data.validation, _end_of_text(self.config, self.data)
        length = self.config.train.sequence_length if tokens is None else tokens
        ids: list[int] = held_out.window(0, min(length, len(held_out))).tolist()
        return ids[: ids.index(end_of_text) + 1] if end_of_text in ids else ids


def run(
    config: RunConfig,
    folder: str | Path,
    *,
    resume: bool = False,
    progress: bool | Callable[[int], None] = True,
) -> dict[str, Any]:
    """Train one model into a run folder: prepare or open the data, build the model, train and evaluate it.

    Under torchrun all processes train one model, in a folder that all of them can access.

    Args:
        config: all settings of the run.
        folder: a new or empty folder; with `resume`, the folder of a run, which continues at its newest checkpoint.
        progress: whether to show the progress, or a function that is called with each logged step instead.

    Returns:
        The row of the last step from `residua.lab.training.train`: `val_loss`, `interrupted` and others.

    Raises:
        InputError: the folder, the data and the configuration do not fit together.
        RunError: training or writing failed; older checkpoints stay.
    """
    with ExitStack() as stack:
        stack.enter_context(threads(config.train.threads))
        ranks = stack.enter_context(join(config.train.device))
        has_digest = getattr(config.model, "base_sha256", None) is not None  # otherwise `resolved` computes it
        begun = None
        with ranks.raise_together():
            shard = BatchShard.of(config.train, ranks)
            if ranks.first:
                config = resolved(config)
                again = ranks.restarts > 0 and (Path(folder) / "config.yaml").is_file()  # after a restart by torchrun
                run_folder = stack.enter_context(claim(folder, asdict(config), resume=resume or again))
                begun = config, run_folder, _prepare_data(config.data, run_folder, progress=progress is True)
        config, run_folder, data = ranks.gather(begun)[0]
        with ranks.raise_together():
            further = _further_validation(config.data, data)
            model = _model_to_train(config, data.tokenizer(), run_folder, ranks, verify=ranks.first and has_digest)
            length, seed = config.train.sequence_length, config.train.seed
            batches = Batches(data.train, shard.rows_here, length, seed, rank=shard.member, world_size=shard.members)
        if ranks.first and progress is True:
            _say_epochs(config, data)
        subject, end_of_text = Subject.of(model), _end_of_text(config, data)

        def observe(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
            return gate_quantiles(model, tokens, **documents_apart(tokens, end_of_text))

        facts = {**data.facts, "place": _relative_place(run_folder.path, data.folder)}
        return train(
            model,
            batches,
            config.train,
            run_folder,
            evaluate=_evaluator(config, {"": data} | further, ranks),
            observe=observe if has_gates(subject.stream, subject.dim) else None,
            end_of_text=end_of_text,
            parent=None if saved_steps(run_folder.path) else _parent(config),
            facts=facts | {f"{prefix}validation": text.facts for prefix, text in further.items()},
            progress=progress,
            ranks=ranks,
        )


def _say_epochs(config: RunConfig, data: PreparedData) -> None:
    """Print a line if a run will see its text more than once."""
    tokens = config.train.steps * config.train.tokens_per_step
    if tokens > len(data.train):
        say(f"the run reads its text {tokens / len(data.train):.1f} times: {tokens:,} of {len(data.train):,} tokens")


def _end_of_text(config: RunConfig, data: PreparedData) -> int | None:
    """Return the token that precedes each document, if document masks separate documents; otherwise None."""
    return data.eos_token_id if config.train.document_masks else None


def resolved(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths and the values that a base determines. Raises InputError."""
    model, data = config.model, config.data
    if data.path is not None:  # so that the run can be opened from any working directory
        data = replace(data, path=str(Path(data.path).resolve()))
    if data.further_validation is not None:
        data = replace(data, further_validation=str(Path(data.further_validation).resolve()))
    if isinstance(model, BaseModelConfig):
        base = Path(model.base).resolve()
        from_base = data.tokenizer == model.base
        place = RunFolder(base).tokenizer if is_run(base) else base
        data = replace(data, tokenizer=str(place)) if from_base else data
        sha256 = base_sha256(base) if model.base_sha256 is None else model.base_sha256
        connection = base_connection(base) if model.connection is None else model.connection
        model = replace(model, base=str(base), base_sha256=sha256, connection=connection)
        description = describe(model.scheme)
    else:
        description = model.architecture.connection
    if "package" in description:  # config.yaml then names the package that opening the run needs
        model = replace(model, connection=description)
    return replace(config, model=model, data=data)


def _prepare_data(config: DataConfig, run: RunFolder, *, progress: bool) -> PreparedData:
    """Open the data of a run, or prepare them in its folder. Save the tokenizer in the folder before the first step."""
    if config.path is not None:
        data = PreparedData.open(_place_of_data(config, run.path))
    else:
        if not run.resume and (run.path / "data" / "index.json").is_file():
            remove(run.path / "data")  # left by an attempt that ended before its first step, maybe with other settings
        data = open_or_prepare(config, run.path / "data", progress=progress)
    if not saved_steps(run.path):
        with writable(run.tokenizer, "a place for the tokenizer of the run"):
            remove(run.tokenizer)
            with unfinished(run.tokenizer) as tokenizer_folder:
                save_tokenizer(data.tokenizer(), tokenizer_folder)
    return data


def open_or_prepare(config: DataConfig, folder: Path, *, progress: bool) -> PreparedData:
    """Open the data in `folder`, or prepare `config.source` into a missing folder. Raises InputError without either."""
    if folder.exists():
        return PreparedData.open(folder)
    if config.source is None:
        raise InputError("data.path must be a folder written by residua prepare (or data.source: text), got neither")
    return prepare(
        config.source,
        folder,
        vocab_size=config.vocab_size if config.tokenizer == "bpe" else None,
        tokenizer=config.tokenizer,
        validation_fraction=config.validation_fraction,
        progress=progress,
    )


def _further_validation(config: DataConfig, data: PreparedData) -> dict[str, PreparedData]:
    """Open the second held-out text of a run, if any, keyed by the prefix of its results.

    Raises InputError if its tokenizer differs from that of `data`.
    """
    if config.further_validation is None:
        return {}
    further = PreparedData.open(config.further_validation)
    if further.facts["tokenizer_fingerprint"] != data.facts["tokenizer_fingerprint"]:
        raise InputError(
            f"data.further_validation must be tokenized like {data.folder}, got tokens of another tokenizer in "
            f"{further.folder}; prepare its text with: residua prepare --tokenizer {data.folder / 'tokenizer'}"
        )
    return {"further_": further}


def _model_to_train(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, run: RunFolder, ranks: Ranks, *, verify: bool
) -> ResiduaForCausalLM | PreTrainedModel:
    """Build the model of a run; write the configuration of a converted model into the folder before the first step."""
    begun = bool(saved_steps(run.path))
    model = build_model(config, tokenizer, run.model if begun else None, verify_base=verify)
    if not isinstance(config.model, BaseModelConfig):
        return model
    if ranks.first and not begun:
        with writable(run.model, "a place for the model's configuration"):
            remove(run.model)
            with unfinished(run.model) as model_folder:
                model.config.save_pretrained(model_folder)
    fill_no_cache(model.config)
    return model


def build_model(
    config: RunConfig, tokenizer: PreTrainedTokenizerFast, kept: Path | None = None, *, verify_base: bool = True
) -> ResiduaForCausalLM | PreTrainedModel:
    """Build the model of a run in its state before the first step. No global random state changes.

    From scratch, the weights depend only on `train.seed`. If `model.vocab_size` is null, the size of the
    tokenizer's vocabulary is used, rounded up to a multiple of 64. With `model.base`, the weights are the base's.

    kept: the folder of the model's configuration in the run, if a checkpoint will be loaded. The base is then not
        needed, unless it is frozen and therefore not in the checkpoint.
    verify_base: read the weights of the base once more to compare their digest with `model.base_sha256`.

    Raises:
        InputError: the model's vocabulary is smaller than the tokenizer's, or the base cannot be used.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.train.seed)
        if isinstance(config.model, BaseModelConfig):
            return _built_on_base(config.model, config.train, tokenizer, kept, verify_base)
        return _built_from_scratch(config.model, tokenizer)


def _built_from_scratch(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> ResiduaForCausalLM:
    architecture, needed = copy.deepcopy(config.architecture), vocabulary(tokenizer)
    architecture.vocab_size = _rounded_up(needed) if config.vocab_size is None else config.vocab_size
    expected = f"at least the {needed} tokens of the data's tokenizer, or left out"
    require(architecture.vocab_size >= needed, "model.vocab_size", expected, architecture.vocab_size)
    architecture.eos_token_id = architecture.pad_token_id = tokenizer.eos_token_id
    architecture.bos_token_id = None
    return ResiduaForCausalLM(architecture)


def _built_on_base(
    config: BaseModelConfig, train: TrainConfig, tokenizer: PreTrainedTokenizerFast, kept: Path | None, verify: bool
) -> PreTrainedModel:
    if kept is not None and not config.freeze_base:
        return rebuild_base(kept)
    if verify:
        expect_digest(Path(config.base), config.base_sha256)
    model, base, place = _base_of(config)
    if not same_tokens(base, tokenizer):
        raise InputError(
            "the data must be tokens of the tokenizer in model.base, got tokens of another tokenizer; prepare them "
            f"with: residua prepare --tokenizer {place}"
        )
    length, longest = train.sequence_length, context_of(model) or train.sequence_length
    require(length <= longest, "train.sequence_length", f"at most the positions of the base ({longest})", length)
    if train.document_masks:
        expect_documents_apart(model)
    rows, needed = model.get_input_embeddings().weight.shape[0], vocabulary(tokenizer)
    require(rows >= needed, "model.base", f"a model with at least {needed} rows in its embedding", rows)
    if config.freeze_base:
        freeze_base(model)
    return model


def _base_of(config: BaseModelConfig) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, Path]:
    """Return the model and the tokenizer of a base, and the folder of the tokenizer."""
    folder = Path(config.base)
    if not is_run(folder):
        return open_base(folder, config.connection, config.start), load_tokenizer(folder), folder
    opened = open_run(folder, device="cpu")
    opened.model.requires_grad_(True)  # also parameters that were frozen in the base's run
    vars(opened.model).pop("kept_elsewhere", None)
    model = open_base(folder, config.connection, config.start, opened.model)
    return model, opened.tokenizer, RunFolder(folder).tokenizer


def _parent(config: RunConfig) -> dict[str, Any] | None:
    """Return the facts of a run's base, or None: the folder's name, the digest, and the step if the base is a run."""
    if not isinstance(config.model, BaseModelConfig):
        return None
    folder = Path(config.model.base)
    step = find_checkpoint(folder, None).step if is_run(folder) else None
    return {"folder": folder.resolve().name, "sha256": config.model.base_sha256, "step": step}


def model_config(config: RunConfig) -> PreTrainedConfig:
    """Return the configuration of the model that `build_model` will make, as far as known before data are prepared.

    Raises InputError if the base cannot be used.
    """
    if isinstance(config.model, BaseModelConfig):
        base = config.model
        if base.connection is None:
            base = replace(base, connection=base_connection(Path(base.base)))
        model, _, _ = _base_of(base)
        if isinstance(model, ResiduaForCausalLM):
            return model.config
        return ConvertedConfig.from_dict(json.loads(model.config.to_json_string()))  # also records the conversion
    return ResiduaConfig(**{**asdict(config.from_scratch), "vocab_size": expected_vocabulary(config)})


def expected_vocabulary(config: RunConfig) -> int:
    """Return the number of rows in the embedding that `build_model` will make, as far as known before preparation.

    This is the number for the prepared data in `data.path`, otherwise for the tokenizer to be trained, otherwise for
    GPT-2.
    """
    model = config.from_scratch
    if model.vocab_size is not None:
        return model.vocab_size
    if config.data.path is not None:
        return _rounded_up(PreparedData.open(config.data.path).vocab_size)
    sizes = {"bpe": config.data.vocab_size, "byte": 257}
    new_tokenizer = config.data.source is not None and config.data.tokenizer in sizes
    return _rounded_up(sizes[config.data.tokenizer] if new_tokenizer else GPT2_VOCABULARY)


def open_run(
    folder: str | Path,
    checkpoint: int | Literal["best"] | None = None,
    *,
    device: str = "auto",
    data: str | Path | None = None,
) -> OpenRun:
    """Open the model of a run at a checkpoint.

    checkpoint: its step; "best" for the lowest validation loss; None for the newest complete checkpoint. data: the
    folder of the training data, which are opened on first use; None for the folder in the configuration, or if it is
    missing, the folder with the same path relative to the run as during training.

    Raises:
        InputError: the folder is not a run, has no such checkpoint, or its tokenizer or its base cannot be used.
    """
    folder = Path(folder)
    if not (folder / "config.yaml").is_file():
        raise not_a_run(folder)
    config = load_config(str(folder / "config.yaml"))
    state = find_checkpoint(folder, checkpoint)
    place = _place_of_data(config.data, folder) if data is None else Path(data)
    tokenizer = saved_tokenizer(RunFolder(folder).tokenizer)
    if not isinstance(config.model, BaseModelConfig):
        tokenizer = without_additions(tokenizer)
    model = build_model(config, tokenizer, RunFolder(folder).model)
    if not state.path.exists():  # the run is still training, and has deleted it since
        state = find_checkpoint(folder, checkpoint)
    load_checkpoint(state, model)
    return OpenRun(
        model=model.to(pick_device(device)).eval(),
        tokenizer=tokenizer,
        folder=folder,
        step=state.step,
        bfloat16=config.train.precision == "bfloat16",
        config=config,
        checkpoint=state,
        place=place,
    )


def _relative_place(folder: Path, data: Path) -> str | None:
    """Return the relative path from a run's folder to its data, so that both can move together.

    None if they are on different Windows drives.
    """
    with suppress(ValueError):
        return Path(os.path.relpath(data.resolve(), folder.resolve())).as_posix()
    return None


def _place_of_data(config: DataConfig, folder: Path) -> Path:
    """Return the folder of a run's data: as configured, or relative to the run if the configured folder is missing."""
    configured = folder / "data" if config.path is None else Path(config.path)
    facts = RunFolder(folder).facts
    if configured.exists() or not facts.is_file():
        return configured
    place = read_facts(facts).get("data", {}).get("place")
    return configured if place is None or not (folder / place).is_dir() else folder / place


def is_model_folder(folder: str | Path) -> bool:
    """Return whether a folder holds a Hugging Face model and not a run."""
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / "config.yaml").is_file()


def open_model(
    folder: str | Path,
    checkpoint: int | Literal["best"] | None = None,
    *,
    device: str = "auto",
    data: str | Path | None = None,
) -> OpenModel:
    """Open the model of a run, as `open_run` does, or the model in a transformers folder, which has no checkpoints.

    Raises InputError as `open_run` and `opening.read_model` do.
    """
    if not is_model_folder(folder):
        return open_run(folder, checkpoint, device=device, data=data)
    if checkpoint is not None:
        raise InputError(f"--checkpoint needs a run, got the model in {folder}, which has no checkpoints")
    model, tokenizer = read_model(folder)
    model = model.to(pick_device(device)).eval()  # type: ignore[arg-type]
    return OpenModel(model=model, tokenizer=tokenizer, folder=Path(folder))


def _evaluator(
    config: RunConfig, texts: Mapping[str, PreparedData], ranks: Ranks = ALONE
) -> Callable[[torch.nn.Module], dict[str, float]]:
    """Return a function that evaluates a model on the held-out part of each text.

    texts: the data of each text, by the prefix of the names of its results.
    """
    size = config.train.batch_size, config.train.sequence_length
    batches = {prefix: HeldOutBatches(data.validation, *size) for prefix, data in texts.items()}

    def evaluated(model: torch.nn.Module) -> dict[str, float]:
        results = {}
        for prefix, data in texts.items():
            shard = shard_batches(batches[prefix], ranks.rank, ranks.world_size)
            length = None if data.facts.get("lost_share") else data.validation_bytes
            end_of_text = _end_of_text(config, data)
            losses = held_out_loss(model, shard, bytes=length, end_of_text=end_of_text, gather=ranks.gather)
            results |= {f"{prefix}{name}": value for name, value in losses.items()}
        return results

    return evaluated


def evaluate(opened: OpenRun) -> dict[str, float]:
    """Return validation loss, perplexity and bits per byte of an opened run, measured as during its training."""
    with opened.precision():
        return _evaluator(opened.config, {"": opened.data})(opened.model)


def evaluate_on(opened: OpenModel, text: Text) -> dict[str, float]:
    """Return the losses of an opened model on a text, in windows of `opened.evaluation`, as `evaluate` does."""
    window, batch_size, masks = opened.evaluation
    batches = HeldOutBatches(text.tokens, batch_size, window, opened.first)
    end_of_text = opened.tokenizer.eos_token_id if masks else None
    with opened.precision():
        return held_out_loss(opened.model, batches, bytes=text.bytes, end_of_text=end_of_text)


def losses_by_document(opened: OpenRun) -> dict[str, dict[str, list[Any]]]:
    """Return the `document_losses` by text: "" is the run's held-out text, "further_" its second one, if any."""
    config = opened.config
    size, masked = (config.train.batch_size, config.train.sequence_length), config.train.document_masks
    texts = {"": opened.data} | _further_validation(config.data, opened.data)
    with opened.precision():
        return {
            prefix: document_losses(
                opened.model, HeldOutBatches(data.validation, *size), data.eos_token_id, masked=masked
            )
            for prefix, data in texts.items()
        }


def trace_model(opened: OpenModel, prompt: str | None = None, *, tokens: int | None = None) -> Trace:
    """Trace the connections of an opened model, with the logit lens after every sublayer if the model has a head.

    Args:
        prompt: the text to run; "" for an end-of-text token; None for the beginning of the run's validation data.
        tokens: the largest number of tokens; None for the whole prompt, or for `train.sequence_length` without a
            prompt.

    Raises:
        InputError: there are no tokens, or more than fit into the model's context.
    """
    require(tokens is None or tokens >= 1, "tokens", "at least 1", tokens)
    model, tokenizer = opened.model, opened.tokenizer
    if prompt is None:
        ids = opened.excerpt(tokens)
        excerpt = f"the first {len(ids)} tokens of the validation data"
    else:
        ids = prompt_tokens(tokenizer, prompt)[:tokens]
        excerpt = f"{len(ids)} tokens of a prompt"
    facts = {"run": opened.folder.resolve().name, "checkpoint": opened.step, "read": excerpt}
    with opened.precision():
        recorded = trace(model, ids, text=pieces(tokenizer, ids), facts=facts)
        if not Subject.of(model).head:
            return recorded
        lens = logit_lens(model, ids, top=1)
    likeliest = [pieces(tokenizer, tokens) for tokens in lens.tokens[1:, :, 0].tolist()]
    return replace(
        recorded,
        facts={**recorded.facts, "lens": likeliest},
        values={**recorded.values, "lens_loss": lens.loss[1:]},
    )


def _rounded_up(vocab_size: int) -> int:
    return -(-vocab_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
