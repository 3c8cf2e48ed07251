"""A corpus: documents in a fixed order that can be read repeatedly.

Memory does not grow with the text. `stdlib`, `files` and `hub` make corpora; `sources.open_corpus` picks one by name.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Document(NamedTuple):
    text: str
    size: int
    """The share of `Corpus.size` that reading this document completes."""


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read repeatedly. Iterating skips documents without a visible character.

    size: the number of bytes to read, the unit of progress (estimated if compressed or on the hub, 0 if unknown).
    read: starts a pass over all documents, including blank ones. identity: changes whenever the text changes.
    facts: recorded with a run. local: False if reading means downloading. validation_fraction: the default fraction to
    hold out.
    """

    name: str
    size: int
    read: Callable[[], Iterator[Document]]
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    local: bool = True
    validation_fraction: float = 0.05
    left_out: tuple[str, ...] = ()
    """The files of a folder that are not read."""

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.read() if document.text.strip())


def hashed(documents: Iterable[Document], digest: Any) -> Iterator[Document]:
    """Yield documents, and update `digest`, from `hashlib`, with each text in UTF-8 and a zero byte after it."""
    for document in documents:
        digest.update(document.text.encode() + b"\0")
        yield document
