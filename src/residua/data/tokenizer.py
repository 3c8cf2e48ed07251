"""Tokenizers: a byte-level BPE trained on the corpus, plain bytes, or the user's own.

All are `PreTrainedTokenizerFast` with one special token, the end of a text, which also pads (on the left). The trained
and the byte tokenizer reproduce every Unicode text exactly.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from residua.data.encode import text_backend
from residua.data.hub import download_tokenizer
from residua.errors import InputError, extra

with extra("data"):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
SMALLEST_BPE = 257
"""256 bytes and the end of text."""


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most `vocab_size` entries, the end of text (id 0) and the 256 bytes included.

    The same texts in the same order give the same tokenizer. A text with few repetitions gives fewer entries.
    """
    if vocab_size < SMALLEST_BPE:
        raise InputError(f"vocab_size: a BPE needs at least {SMALLEST_BPE} (bytes and end of text), got {vocab_size}")
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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """UTF-8 bytes: the id of a token is the byte itself, 256 is the end of text."""
    # ByteLevel writes a printable byte as the character of that code and the n-th other byte as character 256 + n.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    tokenizer = _byte_level(models.BPE(vocab=vocab | {END_OF_TEXT: 256}, merges=[]))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return _with_end_of_text(tokenizer, END_OF_TEXT)


def load_tokenizer(folder: str | os.PathLike[str]) -> PreTrainedTokenizerFast:
    """The tokenizer saved in `folder` by transformers; it needs an end-of-text (eos) token, which then also pads.

    "gpt2" and "hf:OWNER/NAME[@REVISION]" are those of the hub, downloaded once.
    """
    if isinstance(folder, str) and (folder == "gpt2" or folder.startswith("hf:")):
        folder = download_tokenizer(folder)
    folder = Path(folder)
    try:
        json.loads((folder / "tokenizer.json").read_bytes())
        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"tokenizer: expected bpe, byte or a folder with tokenizer.json, got {folder}: {reason} "
            "(those of the hub are gpt2 and hf:OWNER/NAME)"
        ) from error
    if loaded.eos_token is None:
        raise InputError(f"tokenizer {folder}: no eos_token to separate documents; set one and save it again")
    return _with_end_of_text(loaded.backend_tokenizer, loaded.eos_token)


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write what AutoTokenizer reads, byte for byte the same with every version of transformers."""
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
    """The sha256 of a saved tokenizer."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """One more than the largest id, which a tokenizer with gaps reaches beyond its number of entries."""
    return max(tokenizer.get_vocab().values()) + 1


def text_encoder(tokenizer: PreTrainedTokenizerFast) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to their ids. No special token comes out, not even where a text spells one."""
    backend = text_backend(tokenizer.backend_tokenizer.to_str())
    return lambda texts: [encoded.ids for encoded in backend.encode_batch_fast(texts, add_special_tokens=False)]


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
