"""Turn text into tokens on disk: `prepare` writes the folder that `PreparedData` opens.

A large text is written shard by shard. After each shard, progress.json records the shards that are safely on disk, and
the next call with the same arguments continues there.
"""

import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

from residua.errors import InputError, extra, require
from residua.files.durable import write_text
from residua.lab.data import writer
from residua.lab.data.corpus import Corpus, Document
from residua.lab.data.shards import DATA_VERSION, FORMAT, TOKEN_DTYPES, PreparedData, SplitFiles
from residua.lab.data.sources import open_corpus
from residua.lab.data.split import MOST_KEYS, HeldOutShare, Split, Splitting, share_of, split_documents
from residua.lab.data.tokenizer import (
    byte_tokenizer,
    check_vocab_size,
    load_tokenizer,
    save_tokenizer,
    special_tokens,
    tokenizer_hash,
    train_bpe,
    vocabulary,
)
from residua.lab.data.writer import staging, text_progress
from residua.lab.records.folder import LOSSLESS, new_folder
from residua.lab.records.progress import say

with extra("lab"):
    from transformers import PreTrainedTokenizerFast

BPE_TEXT = 100_000_000
"""The approximate size of the text to train a BPE on, in bytes.

From a larger local corpus, every n-th document is taken; from a larger corpus on the hub, the first documents.
"""

DEFAULT_ENTRIES = 2048
MOST_NAMED = 20
"""The largest number of left-out files that are printed; index.json lists all."""
NOTABLE = 0.1
"""A line reports a held-out fraction that differs from the requested one by more than this share of the latter."""


def prepare(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    tokenizer: str = "bpe",
    validation_fraction: float | None = None,
    shard_tokens: int = 100_000_000,
    text_column: str = "text",
    sample: str | None = None,
    split: Splitting | None = None,
    longest_document: int | None = None,
    progress: bool = True,
) -> PreparedData:
    """Tokenize the text of `source` into the new folder `out`.

    The same arguments and text give the same bytes. A new `out` appears only when it is complete. If a long preparation
    ends early, even by a kill, complete shards stay in a folder next to `out`, and the same call continues from there:
    it reads the text again from the start (a data set of the hub is downloaded again) and tokenizes the rest. Memory
    does not grow with the text.

    Args:
        source: "stdlib" (the documentation inside this Python, about 2 MB), a path, "fineweb-edu" or a data set of the
            hub, see `open_corpus`.
        out: a new or empty folder.
        vocab_size: entries of a trained BPE, by default 2048; a short text gives fewer, with a warning.
        tokenizer: "bpe", trained on the training part; "byte", the 256 bytes and the end of text; a folder with a
            tokenizer saved by transformers; "gpt2" or "hf:OWNER/NAME" from the hub.
        validation_fraction: the approximate fraction of the text to hold out, chosen by a hash of each document, so
            that copies of a text stay together. By default 0.05; of fineweb-edu about 100 million tokens.
        shard_tokens: tokens in a shard; the last shard of a split has fewer.
        text_column: the column or key of rows and data sets that holds the text; "meta.text" is nested.
        sample: the sample of a named data set; of fineweb-edu "10BT" (default), "100BT" or "350BT".
        split: "documents" assigns each document by its own hash. "share" holds out the documents with the smallest
            hashes until their bytes are the requested fraction to within 5 %, and cuts a document if need be. The
            default is "documents" for the hub, for more than a million documents, and if the held-out part comes within
            a quarter of the fraction; otherwise "share".
        longest_document: the longest document, in characters; a longer one is cut at a blank line, else at a line end,
            else inside a line. 0 cuts none. By default 8192 in text files, and 0 elsewhere.
        progress: report progress on standard error.

    Raises:
        InputError: the arguments or the text cannot be used, or `out` is not empty.
        RunError: writing failed, or the hub cannot be read.
    """
    out = Path(out).resolve()
    between = validation_fraction is None or 0 < validation_fraction < 1
    require(between, "validation_fraction", "a number between 0 and 1", validation_fraction)
    require(
        vocab_size is None or tokenizer == "bpe", "vocab_size", f"left out with the tokenizer {tokenizer}", vocab_size
    )
    entries = DEFAULT_ENTRIES if vocab_size is None else vocab_size
    check_vocab_size(entries)
    require(shard_tokens >= 1, "shard_tokens", "at least 1", shard_tokens)
    new_folder(out)
    codec = None if tokenizer == "bpe" else byte_tokenizer() if tokenizer == "byte" else load_tokenizer(tokenizer)
    corpus = open_corpus(source, text_column=text_column, sample=sample, longest_document=longest_document)
    if next(iter(corpus), None) is None:
        raise InputError(f"{source} must hold documents, found nothing or white space")
    validation_fraction = validation_fraction or corpus.validation_fraction
    share = _share(corpus, validation_fraction, split)
    if share is not None:
        corpus = replace(corpus, read=_cut(corpus, share), identity=corpus.identity | {"split": "share"})

    plan = {
        "version": DATA_VERSION,
        "source": corpus.name,
        **corpus.identity,
        "tokenizer": f"bpe {entries}" if codec is None else _content_hash(codec),
        "validation_fraction": validation_fraction,
        "shard_tokens": shard_tokens,
    }
    with staging(out, plan) as stage:
        if stage.saved:
            codec = load_tokenizer(stage.folder / "tokenizer")
        else:
            codec = codec or _train(corpus, entries, validation_fraction, progress, share)
            save_tokenizer(codec, stage.folder / "tokenizer")
        dtype = TOKEN_DTYPES[_dtype(codec)]
        lossless = tokenizer in LOSSLESS
        splits, text = writer.write_shards(
            corpus, codec, dtype, stage, validation_fraction, shard_tokens, progress, share, lossless
        )
        facts = {
            "validation_fraction": validation_fraction,
            "split": "documents" if share is None else "share",
            "tokenizer": _tokenizer_name(tokenizer),
        }
        index = _index(corpus, codec, tokenizer_hash(stage.folder / "tokenizer"), splits, text, facts)
        write_text(stage.folder / "index.json", json.dumps(index, indent=2) + "\n")
    data = PreparedData.open(out)
    if progress:
        for remark in _remarks(data, corpus):
            say(f"prepare: {remark}")
    if tokenizer == "bpe" and data.vocab_size < entries:
        warnings.warn(
            f"{corpus.name}: the vocabulary has {data.vocab_size} entries, not {entries}, because the text has too few "
            "repetitions; give more text, or a smaller vocab_size",
            stacklevel=2,
        )
    return data


def _share(corpus: Corpus, fraction: float, split: Splitting | None) -> HeldOutShare | None:
    """Return the share of a corpus to hold out, or None if each document is assigned by its own key."""
    if not corpus.local:
        require(split != "share", "split", f"documents for {corpus.name}, which is downloaded in one pass", split)
    if split == "documents" or not corpus.local:
        return None
    share = share_of(lambda: iter(corpus), fraction, always=split == "share")
    many = f"documents for more than {MOST_KEYS:,} documents"
    require(split != "share" or share is not None, "split", many, split)
    return share


def _cut(corpus: Corpus, share: HeldOutShare) -> Callable[[], Iterator[Document]]:
    return lambda: share.documents(corpus.read())


def _remarks(data: PreparedData, corpus: Corpus) -> Iterator[str]:
    """Yield a line for each fact about the prepared data that the user may not expect."""
    facts = data.facts
    if corpus.left_out:
        listed = ", ".join(corpus.left_out[:MOST_NAMED])
        more = f" and {len(corpus.left_out) - MOST_NAMED:,} more, all in {data.folder / 'index.json'}"
        yield f"left out {len(corpus.left_out):,} files: {listed}{more if len(corpus.left_out) > MOST_NAMED else ''}"
    if blank := facts.get("blank_documents"):
        yield f"left out {blank:,} rows or documents without text"
    if written := facts.get("documents_with_special_tokens"):
        found = ", ".join(special_tokens(data.tokenizer())[:3])
        yield f"{written:,} documents hold the text of a special token ({found}, ...), which is read as plain text"
    asked, held_out = facts["validation_fraction"], facts["validation_tokens"] / facts["tokens"]
    if abs(held_out - asked) > NOTABLE * asked:
        advice = "; --split share comes closer" if facts["split"] == "documents" and corpus.local else ""
        yield f"{held_out:.3g} of the tokens are held out, {asked:.3g} were asked for{advice}"
    if lost := facts["lost_share"]:
        yield f"the tokenizer loses {max(lost, 1e-4):.2%} of the text, so its bits per byte mean nothing"


def _content_hash(tokenizer: PreTrainedTokenizerFast) -> str:
    return hashlib.sha256(f"{tokenizer.backend_tokenizer.to_str()}\0{tokenizer.eos_token}".encode()).hexdigest()


def _tokenizer_name(tokenizer: str) -> str:
    if tokenizer in ("bpe", "byte", "gpt2") or tokenizer.startswith("hf:"):
        return tokenizer
    return Path(tokenizer).resolve().name


def _train(
    corpus: Corpus, vocab_size: int, validation_fraction: float, progress: bool, share: HeldOutShare | None
) -> PreTrainedTokenizerFast:
    began = time.monotonic()

    def read(sample: Iterable[str]) -> Iterator[str]:
        yield from sample
        if progress and time.monotonic() - began >= writer.UPDATE_SECONDS:
            say("prepare: tokenizer: learning it from the text")

    with text_progress("tokenizer", corpus, corpus.size, 0, progress, time_left=False) as documents:
        sides = split_documents(documents, validation_fraction, share=share)
        training = (document.text for side, document in sides if side == "train")
        if corpus.local:
            sample = islice(training, 0, None, -(-corpus.size // BPE_TEXT))
        else:
            sample = _leading(training, BPE_TEXT)
        return train_bpe(read(sample), vocab_size)


def _dtype(tokenizer: PreTrainedTokenizerFast) -> str:
    return "uint16" if vocabulary(tokenizer) <= 65536 else "uint32"


def _index(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    tokenizer_sha256: str,
    splits: Mapping[Split, SplitFiles],
    text: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    parts = splits.values()
    documents = sum(part.documents for part in parts)
    for split, part in splits.items():
        if part.tokens < 2:
            raise InputError(
                f"{corpus.name} must have text for training and for validation, but its {documents} document(s) leave "
                f"nothing for {split}; give more text, or cut long documents with --longest-document"
            )
    return {
        "format": FORMAT,
        "version": DATA_VERSION,
        "dtype": _dtype(tokenizer),
        "vocab_size": vocabulary(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "splits": {split: asdict(part) for split, part in splits.items()},
        "facts": {
            "source": corpus.name,
            **corpus.facts,
            **text,
            "documents": documents,
            "bytes": sum(part.bytes for part in parts),
            "tokens": sum(part.tokens for part in parts),
            "train_tokens": splits["train"].tokens,
            "validation_tokens": splits["validation"].tokens,
            "vocab_size": vocabulary(tokenizer),
            **facts,
        },
        "tokenizer_sha256": tokenizer_sha256,
        **({"left_out": corpus.left_out} if corpus.left_out else {}),
    }


def _leading(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield the first texts, up to a total of `size` bytes."""
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return
