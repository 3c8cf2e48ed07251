"""Data sets and tokenizers of the Hugging Face hub. Data sets are streamed: nothing of them is kept on the disk."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from residua.errors import InputError, RunError, extra

FINEWEB_EDU = "HuggingFaceFW/fineweb-edu"
SAMPLES = {"10BT": 10, "100BT": 100, "350BT": 350}
"""Billions of GPT-2 tokens in the samples of FineWeb-Edu."""
BYTES_PER_TOKEN = 4.7
"""Of FineWeb-Edu's text in GPT-2 tokens, about: for progress and the disk need."""
GPT2 = "openai-community/gpt2"


@dataclass(frozen=True)
class HubText:
    """The text of one split of a data set. `identity` names it to the commit; `size` is in bytes, 0 if unknown."""

    name: str
    size: int
    identity: dict[str, Any]

    def rows(self, state: dict[str, Any] | None) -> "Rows":
        return Rows(self, state)


def open_hub(source: str, *, text_column: str, sample: str | None) -> HubText:
    """A data set: "fineweb-edu", of which `sample` names a part, or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]".

    The revision (a commit, tag or branch; the default is the newest) is resolved to its commit, which a later reading
    of the same `identity` uses too. Raises InputError for what the hub does not have, RunError if it does not answer.
    """
    size = 0
    if source == "fineweb-edu":
        sample = sample or "10BT"
        if sample not in SAMPLES:
            raise InputError(f"sample: expected one of {', '.join(SAMPLES)}, got {sample}")
        repository, revision, config, split = FINEWEB_EDU, None, f"sample-{sample}", "train"
        size = int(SAMPLES[sample] * 1e9 * BYTES_PER_TOKEN)
    else:
        if sample is not None:
            raise InputError(f"sample: expected it with source fineweb-edu alone, got it with {source}")
        found = re.fullmatch(r"hf:([^/@:]+/[^/@:]+)(?:@([^/:]+))?(?:/([^:]+))?(?::(.+))?", source)
        if not found:
            raise InputError(f"source: expected hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT], got {source}")
        repository, revision, config, split = found.groups()
        split = split or "train"
    commit = _commit(repository, revision)
    identity = {"dataset": repository, "config": config, "split": split, "revision": commit, "column": text_column}
    return HubText(source, size, identity)


class Rows:
    """One pass over the texts of a data set, which goes on where `state` was taken."""

    def __init__(self, text: HubText, state: dict[str, Any] | None):
        with extra("lab"):
            import datasets
            from huggingface_hub.errors import HTTPError
            from pyarrow import ArrowException
        self._text = text
        self._failures = HTTPError, ArrowException, OSError
        where = text.identity
        try:
            stream = datasets.load_dataset(
                where["dataset"], where["config"], split=where["split"], revision=where["revision"], streaming=True
            )
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{text.name}: {_first_line(error)}") from error
        except self._failures as error:
            raise _unreachable(text.name, error) from error
        column = where["column"]
        if stream.column_names is not None:
            if column not in stream.column_names:
                raise InputError(
                    f"{text.name}: expected a column {column}, got {', '.join(stream.column_names)}; "
                    "say which with --text-column"
                )
            stream = stream.select_columns([column])
        if state is not None:
            stream.load_state_dict(state)
        self._stream = stream

    def __iter__(self) -> Iterator[str]:
        column = self._text.identity["column"]
        rows = iter(self._stream)
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except self._failures as error:
                raise _unreachable(self._text.name, error) from error
            text = row.get(column)
            if text is not None and not isinstance(text, str):
                raise InputError(f"{self._text.name}: column {column}: expected strings, got {type(text).__name__}")
            yield text or ""

    def state(self) -> dict[str, Any]:
        return self._stream.state_dict()


def download_tokenizer(name: str) -> str:
    """The folder of a tokenizer of the hub, "gpt2" or "hf:OWNER/NAME[@REVISION]"; from the cache if it is there."""
    with extra("lab"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HTTPError

    repository, _, revision = (GPT2 if name == "gpt2" else name.removeprefix("hf:")).partition("@")
    files = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "config.json"]
    try:
        return snapshot_download(repository, revision=revision or None, allow_patterns=files)
    except (HTTPError, OSError, ValueError) as error:
        raise _hub_error(f"tokenizer {name}", error) from error


def _commit(repository: str, revision: str | None) -> str:
    with extra("lab"):
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HTTPError
    try:
        return HfApi().dataset_info(repository, revision=revision).sha
    except (HTTPError, OSError, ValueError) as error:
        raise _hub_error(repository, error) from error


def _hub_error(name: str, error: Exception) -> InputError | RunError:
    """A mistake in the name or the access is the user's to mend; anything else may pass."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)):
        return InputError(
            f"{name}: the hub does not have it, or it needs a login (hf auth login): {_first_line(error)}"
        )
    return _unreachable(name, error)


def _unreachable(name: str, error: Exception) -> RunError:
    return RunError(f"{name}: the hub cannot be read: {_first_line(error)}; try again when it can be reached")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
