"""Data sets and tokenizers of the Hugging Face hub. Data sets are streamed: nothing of them stays on the disk."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

from residua.data.corpus import Corpus, Document
from residua.data.named import NAMED
from residua.errors import InputError, RunError, extra, first_line

GPT2 = "openai-community/gpt2"


def open_hub(source: str, *, text_column: str, sample: str | None) -> Corpus:
    """Open a data set: a name in `NAMED` (`sample` picks a part), or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]".

    The revision (a commit, tag or branch; by default the newest) is resolved to its commit, and every reading uses that
    commit. Raises InputError if the hub does not have it, RunError if the hub does not answer.
    """
    size = 0
    if source in NAMED:
        named = NAMED[source]
        sample = sample or next(iter(named.samples))
        if sample not in named.samples:
            raise InputError(f"sample: expected one of {', '.join(named.samples)}, got {sample}")
        repository, revision, split = named.repository, None, "train"
        config, size = named.samples[sample]
    else:
        found = re.fullmatch(r"hf:([^/@:]+/[^/@:]+)(?:@([^/:]+))?(?:/([^:]+))?(?::(.+))?", source)
        if not found:
            raise InputError(f"source: expected hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT], got {source}")
        repository, revision, config, split = found.groups()
        split = split or "train"
    commit = _commit(repository, revision)
    identity = {"dataset": repository, "config": config, "split": split, "revision": commit, "column": text_column}
    return Corpus(source, size, partial(Rows, source, identity), identity, identity, local=False)


class Rows:
    """One pass over the texts of a data set, from the place where `state` was taken.

    name: the source, for error messages.
    identity: the data set, down to its commit, and the column.
    """

    def __init__(self, name: str, identity: dict[str, Any], state: dict[str, Any] | None):
        with extra("lab"):
            import datasets
            from huggingface_hub.errors import HTTPError
            from pyarrow import ArrowException
        self._name, self._column = name, identity["column"]
        self._failures = HTTPError, ArrowException, OSError
        place = {key: identity[key] for key in ("split", "revision")}
        try:
            stream = datasets.load_dataset(identity["dataset"], identity["config"], streaming=True, **place)
        except (ValueError, FileNotFoundError) as error:
            raise InputError(f"{name}: {first_line(error)}") from error
        except self._failures as error:
            raise _unreachable(name, error) from error
        if stream.column_names is not None:
            if self._column not in stream.column_names:
                raise InputError(
                    f"{name}: expected a column {self._column}, got {', '.join(stream.column_names)}; "
                    "name the right one with --text-column"
                )
            stream = stream.select_columns([self._column])
        if state is not None:
            stream.load_state_dict(state)
        self._stream = stream

    def __iter__(self) -> Iterator[Document]:
        place = f"{self._name}: column {self._column}"
        rows = iter(self._stream)
        while True:
            try:
                text = next(rows).get(self._column)
                text = "" if text is None else text
                if not isinstance(text, str):
                    raise InputError(f"{place}: expected strings, got {type(text).__name__}")
                size = len(text.encode())
            except StopIteration:
                return
            except self._failures as error:
                raise _unreachable(self._name, error) from error
            except UnicodeError as error:
                raise InputError(f"{place}: expected UTF-8 text: {error.reason}; the data set needs mending") from error
            yield Document(text, size)

    def state(self) -> dict[str, Any]:
        return self._stream.state_dict()


def download_tokenizer(name: str) -> str:
    """Return the folder of a tokenizer of the hub, "gpt2" or "hf:OWNER/NAME[@REVISION]", from the cache if possible."""
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
    """Classify an error: a wrong name or missing access is the user's to fix, anything else may pass."""
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError)):
        return InputError(f"{name}: the hub does not have it, or it needs a login (hf auth login): {first_line(error)}")
    return _unreachable(name, error)


def _unreachable(name: str, error: Exception) -> RunError:
    return RunError(f"{name}: the hub cannot be read: {first_line(error)}; try again when it can be reached")
