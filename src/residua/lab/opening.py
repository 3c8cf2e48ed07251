"""Open the language model and the tokenizer in a transformers folder, without executing code from the folder."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from residua.conversion.configuration import (  # registers converted models
    AutoModelForCausalLM,
    expect_stored,
    expect_weights,
)
from residua.errors import InputError, extra, first_line, shown, without_panics
from residua.files.reading import expect_regular, read_json
from residua.files.tensors import undamaged_weights
from residua.models.configuration import usable

with extra("lab"):
    from transformers import (
        CONFIG_MAPPING,
        AutoTokenizer,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.utils import logging


def read_model(
    folder: str | Path, *, dtype: torch.dtype | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the language model and the tokenizer in a transformers folder, on the CPU.

    dtype: the dtype of the weights; None for the dtype in the folder. No code in the folder is executed, and nothing is
    downloaded.

    Raises:
        InputError: the folder has no language model, its weights do not fit the model, or the model needs remote code.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() and (folder / "config.yaml").is_file():
        raise InputError(
            f"{folder} must be a Hugging Face folder, got a run of residua; export the run first: "
            f"residua export {shlex.quote(str(folder))} DIR"
        )
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} must be a Hugging Face folder with a model, found no config.json")
    if (folder / "adapter_config.json").is_file():
        raise InputError(f"{folder} must be a whole model, found an adapter (adapter_config.json); merge it first")
    expect_regular(folder)
    content = read_json(folder / "config.json")
    try:
        settings = usable(content, folder / "config.json")
        config = None if settings == content else CONFIG_MAPPING[settings["model_type"]].from_dict(settings)
        with quiet(), undamaged_weights(folder), without_panics():
            expect_stored(folder, AutoModelForCausalLM, config)
            opened: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `expect_weights` names them
                dtype="auto" if dtype is None else dtype,
            )
            model, info = opened
            tokenizer = _read_tokenizer(folder, config)
    except InputError:
        raise
    except Exception as error:  # transformers and tokenizers raise many kinds
        raise InputError(f"{folder} cannot be read as a transformers model: {first_line(error)}") from error
    expect_weights(folder, info, *info)
    return model, tokenizer


def _read_tokenizer(folder: Path, config: PreTrainedConfig | None) -> PreTrainedTokenizerBase:
    try:
        with without_panics():
            tokenizer = AutoTokenizer.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False
            )
            tokenizer("text")
    except Exception as error:
        raise InputError(
            f"{folder} must have the model's tokenizer, found none that opens ({first_line(error).rstrip(': ')}); copy "
            "the files of the tokenizer, such as tokenizer.json, into the folder"
        ) from error
    return tokenizer


def new_model(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a language model of residua or a converted one, with new weights in float32. Code that `config` names is
    not run.

    options: passed to `from_config`.
    """
    with quiet():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False, **options)


def fill_no_cache(config: PreTrainedConfig) -> None:
    """Let calls of a model leave its cache empty unless they ask for it; a converted one would fill it in training."""
    config.get_text_config(decoder=True).use_cache = False


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Return the tokens of a prompt, after those that the tokenizer puts before a text; end-of-text if there are none.

    Raises InputError if the prompt is not Unicode text, or is empty and there is no token to start from.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # bytes that are not UTF-8 arrive as halves of surrogate pairs
        raise InputError(f"prompt must be Unicode text, in UTF-8, got {shown(prompt)}") from error
    tokens = [*first_tokens(tokenizer), *tokenizer.encode(prompt, add_special_tokens=False)]
    if not tokens and tokenizer.eos_token_id is None:
        raise InputError("prompt must not be empty, since this tokenizer has no end-of-text token to start from")
    return tokens or [tokenizer.eos_token_id]


def first_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens that a tokenizer puts before a text, such as the one for its beginning; most put none."""
    plain, whole = (tokenizer.encode("text", add_special_tokens=added) for added in (False, True))
    places = range(1 + len(whole) - len(plain))
    return whole[: next((place for place in places if whole[place : place + len(plain)] == plain), 0)]


CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""The names that configurations use for the number of positions."""


def context_of(model: PreTrainedModel) -> int | None:
    """Return the longest sequence that a language model takes, in tokens; None if its configuration has no limit."""
    config = model.config.get_text_config(decoder=True)
    found = (getattr(config, name, None) for name in CONTEXTS)
    return next((number for number in found if isinstance(number, int) and number > 0), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence messages and progress bars of transformers; `expect_weights` raises the errors that matter."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
