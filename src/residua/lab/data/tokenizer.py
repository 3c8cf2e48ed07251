"""Tokenizers: a byte-level BPE trained on the corpus, plain bytes, or the user's own tokenizer.

Each is a `PreTrainedTokenizerFast` with one special token, the end of a text, which also pads (on the left). The
trained and the byte tokenizer reproduce every Unicode text exactly.
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from residua.errors import InputError, extra, first_line, require, without_panics
from residua.files.durable import file_sha256
from residua.files.reading import expect_regular, read_json, regular
from residua.lab.data.hub import download_tokenizer

with extra("lab"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257
"""256 bytes and the end of text."""
LARGEST_BPE = 1_000_000
"""The largest vocabulary to train, larger than that of any tokenizer in use.

The trainer allocates the whole vocabulary, and aborts the process if it cannot."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` entries, including the end of text (id 0) and the 256 bytes.

    The same texts in the same order give the same tokenizer. A text with few repetitions gives fewer entries. Raises
    InputError for a `vocab_size` that a BPE cannot have.
    """
    check_vocab_size(vocab_size)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _with_end_of_text(tokenizer, END_OF_TEXT)


def check_vocab_size(vocab_size: int) -> None:
    expected = f"{SMALLEST_BPE} (bytes and end of text) to {LARGEST_BPE:,}"
    require(SMALLEST_BPE <= vocab_size <= LARGEST_BPE, "vocab_size", expected, vocab_size)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of UTF-8 bytes: the id of a token is the byte itself, 256 is the end of text."""
    # ByteLevel maps a printable byte to the character with its code, and the n-th other byte to character 256 + n.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(unprintable)}
    tokenizer = _byte_level(models.BPE(vocab=vocab | {END_OF_TEXT: 256}, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _with_end_of_text(tokenizer, END_OF_TEXT)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """Load the tokenizer that transformers saved in `folder`, or "gpt2" or "hf:OWNER/NAME[@REVISION]" from the hub.

    The tokenizer must have an end-of-text (eos) token, which then also pads. A tokenizer of the hub is downloaded once.
    Raises InputError if the tokenizer does not exist or cannot be used, RunError if the hub does not answer.
    """
    if isinstance(folder, str) and (folder == "gpt2" or folder.startswith("hf:")):
        folder = download_tokenizer(folder)
    from residua.lab.opening import quiet

    folder = Path(folder)
    try:
        if not folder.is_dir():
            raise InputError("no such folder")
        expect_regular(folder)
        with quiet(), without_panics():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            with suppress(Exception):  # the vocabulary may lack these letters; a panic is no Exception
                tokenizer("text")
        _ = tokenizer.backend_tokenizer.to_str()
    except Exception as error:  # transformers and tokenizers raise exceptions of many kinds
        needed = (folder / "tokenizer.model").is_file() and find_spec("sentencepiece") is None
        reason = "its tokenizer.model needs: pip install sentencepiece" if needed else first_line(error)
        raise InputError(
            f"tokenizer must be bpe, byte or a folder with tokenizer.json, got {folder}: {reason} "
            "(or with other files that AutoTokenizer opens as a fast tokenizer; from the hub: gpt2 or hf:OWNER/NAME)"
        ) from error
    if tokenizer.eos_token_id is None:  # also for an empty one
        raise InputError(f"tokenizer {folder}: no eos_token to separate documents; set one and save it again")
    return _with_end_of_text(tokenizer.backend_tokenizer, tokenizer.eos_token)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a folder that AutoTokenizer opens. Its bytes do not depend on the version of transformers."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokenizer.eos_token,
        "pad_token": tokenizer.pad_token,
        "padding_side": tokenizer.padding_side,
        "clean_up_tokenization_spaces": False,
    }
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str(pretty=True), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def tokenizer_hash(folder: Path) -> str:
    """Return the sha256 of a saved tokenizer. Raises OSError, and InputError for a file of an impossible size."""
    expect_regular(folder)
    return file_sha256(folder / "tokenizer.json")


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the largest id plus one. If there are gaps between ids, this exceeds the number of entries."""
    return max(tokenizer.get_vocab().values()) + 1


def saved_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer that `save_tokenizer` wrote.

    Reads only tokenizer.json and the name of the end-of-text token, so it ignores any class that the files name.
    Raises InputError if the tokenizer is damaged or has no end-of-text token.
    """
    try:
        # Pass the content, because tokenizers accepts only paths in UTF-8.
        with without_panics():
            backend = Tokenizer.from_buffer(regular(folder / "tokenizer.json").read_bytes())
        end_of_text = read_json(folder / "tokenizer_config.json")["eos_token"]
        _ = backend.get_vocab()[end_of_text]
    except Exception as error:  # tokenizers raises plain Exception for invalid content
        raise InputError(f"{folder}: not a readable tokenizer ({first_line(error)}); prepare the data again") from None
    return _with_end_of_text(backend, end_of_text)


def expect_documents(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Raise InputError unless the tokenizer in `folder` is a fast one with an end-of-text token, as documents need."""
    fast = getattr(tokenizer, "backend_tokenizer", None) is not None
    if not fast or tokenizer.eos_token_id is None:
        missing = "eos_token" if fast else "tokenizer.json"
        raise InputError(f"{folder} must have a fast tokenizer with an eos_token to read documents, got no {missing}")


def without_additions(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return a tokenizer that adds no tokens to a text, such as one for its beginning, as in training from scratch."""
    if not tokenizer.backend_tokenizer.num_special_tokens_to_add(is_pair=False):
        return tokenizer
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.post_processor = None
    return _with_end_of_text(backend, tokenizer.eos_token)


def special_tokens(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the special tokens as text, such as "<|im_start|>". In a text to train on they are read as plain text."""
    return [token.content for token in tokenizer.backend_tokenizer.get_added_tokens_decoder().values() if token.special]


def same_tokens(one: PreTrainedTokenizerFast, other: PreTrainedTokenizerFast) -> bool:
    """Return whether two tokenizers read a text as the same tokens, and end it with the same one.

    What they add to a text, such as a token for its beginning, does not count: preparation leaves it out.
    """
    rules = [json.loads(each.backend_tokenizer.to_str()) | {"post_processor": None} for each in (one, other)]
    return rules[0] == rules[1] and one.eos_token == other.eos_token


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_end_of_text(tokenizer: Tokenizer, end_of_text: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end_of_text,
        pad_token=end_of_text,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
