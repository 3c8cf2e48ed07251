"""Data sets and tokenizers from the Hugging Face hub. Data sets are streamed, not stored on disk."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from residua.errors import InputError, RunError, extra, first_line
from residua.lab.data.corpus import Corpus, Document
from residua.lab.data.formats import ABSENT, field

GPT2 = "openai-community/gpt2"
FINEWEB_EDU = "fineweb-edu"
SAMPLES = {f"{billions}BT": billions * 10**9 for billions in (10, 100, 350)}
"""The samples of FineWeb-Edu on the hub, and their sizes in tokens of GPT-2; the first is the default."""
BYTES_PER_TOKEN = 4.7
"""A rough value for FineWeb-Edu and GPT-2's tokenizer, to estimate progress and disk space."""
VALIDATION_TOKENS = 100_000_000
"""The approximate number of held-out tokens of FineWeb-Edu: 0.1B, as in arXiv 2601.00417."""


def open_hub(source: str, *, text_column: str, sample: str | None) -> Corpus:
    """Open "fineweb-edu" (`sample` picks a part), or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]".

    The revision (a commit, tag or branch; by default the newest) is resolved to a commit once, and every pass reads
    this commit. Raises InputError if the hub does not have the data set or the revision, RunError if the hub does
    not answer.
    """
    options: dict[str, Any] = {"size": 0}
    if source == FINEWEB_EDU:
        sample = sample or next(iter(SAMPLES))
        repository, revision, config, split = "HuggingFaceFW/fineweb-edu", None, f"sample-{sample}", "train"
        tokens = SAMPLES[sample]
        options = {"size": int(tokens * BYTES_PER_TOKEN), "validation_fraction": VALIDATION_TOKENS / tokens}
    else:
        match = re.fullmatch(r"hf:([^/@:]+/[^/@:]+)(?:@([^/:]+))?(?:/([^:]+))?(?::(.+))?", source)
        if not match:
            raise InputError(f"source must be hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT], got {source}")
        repository, revision, config, split = match.groups()
        split = split or "train"
    commit = _commit(repository, revision)
    identity = {"dataset": repository, "config": config, "split": split, "revision": commit, "column": text_column}
    read = partial(_rows, source, identity)
    return Corpus(source, read=read, identity=identity, facts=identity, local=False, **options)


def _rows(name: str, identity: dict[str, Any]) -> Iterator[Document]:
    """Yield the texts of a data set. `name` is the source, for errors; `identity` has the commit and the column."""
    with extra("lab"):
        import datasets
        from pyarrow import ArrowException

    column = identity["column"]
    place = f"{name}: column {column!r}"
    settings = {key: identity[key] for key in ("split", "revision")}
    with _asking(name, ArrowException):
        try:
            stream = datasets.load_dataset(identity["dataset"], identity["config"], streaming=True, **settings)
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{name}: {first_line(error)}") from error
        if stream.column_names is not None:
            outer = column if column in stream.column_names else column.partition(".")[0]
            if outer not in stream.column_names:
                raise InputError(
                    f"{name} must have a column {column!r}, got columns {', '.join(stream.column_names)}; "
                    "name the right one with --text-column"
                )
            stream = stream.select_columns([outer])
        try:
            for row in stream:
                text = field(row, column)
                text = "" if text is None or text is ABSENT else text
                if not isinstance(text, str):
                    raise InputError(f"{place} must hold strings, got {type(text).__name__}")
                yield Document(text, len(text.encode()))
        except UnicodeError as error:
            raise InputError(
                f"{place} must be UTF-8 text: {error.reason}; choose another data set or column"
            ) from error


def download_tokenizer(name: str) -> str:
    """Download a tokenizer of the hub, "gpt2" or "hf:OWNER/NAME[@REVISION]", if needed; return its local folder."""
    with extra("lab"):
        from huggingface_hub import snapshot_download

    repository, _, revision = (GPT2 if name == "gpt2" else name.removeprefix("hf:")).partition("@")
    files = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "config.json"]
    with _asking(f"tokenizer {name}", ValueError):
        return snapshot_download(repository, revision=revision or None, allow_patterns=files)


def _commit(repository: str, revision: str | None) -> str:
    with extra("lab"):
        from huggingface_hub import HfApi
    with _asking(repository, ValueError):
        return HfApi().dataset_info(repository, revision=revision).sha


@contextmanager
def _asking(name: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn errors of the hub into InputError for a wrong name or missing access, and into RunError for all others.

    errors: further exceptions that a call raises if the hub cannot be read.
    """
    with extra("lab"):
        from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        yield
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        advice = "the hub does not have it, or it needs a login (hf auth login)"
        raise InputError(f"{name}: {advice}: {first_line(error)}") from error
    except (HTTPError, OSError, *errors) as error:
        advice = "try again when it can be reached"
        raise RunError(f"{name}: the hub cannot be read: {first_line(error)}; {advice}") from error
