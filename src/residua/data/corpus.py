"""What a corpus is: a stream of documents in a fixed order, which can be read again from any place already reached.

Memory does not grow with the text. `stdlib`, `files` and `hub` make corpora; `sources.open_corpus` picks one by name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol


class Document(NamedTuple):
    text: str
    size: int
    """The share of `Corpus.size` that reading this document completes."""


class Reading(Protocol):
    """One pass over documents, blank ones included. `state()` is a JSON object from which a later pass continues."""

    def __iter__(self) -> Iterator[Document]: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read repeatedly. Iterating skips documents without a visible character.

    `size` is the number of bytes to read, the unit of progress (estimated for parquet and the hub, 0 if unknown).
    `read` starts a pass at a saved state, or at the beginning. `identity` changes when the text does; `facts` go into
    the records. `local` is False if reading means downloading.
    """

    name: str
    size: int
    read: Callable[[dict[str, Any] | None], Reading]
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    local: bool = True

    def __iter__(self) -> Iterator[Document]:
        return filter(has_text, self.read(None))


def has_text(document: Document) -> bool:
    """Return whether a document has a visible character."""
    return bool(document.text) and not document.text.isspace()


class PartReading:
    """A pass over parts, such as files. Each part is a function that yields its documents from number n on."""

    def __init__(self, parts: Sequence[Callable[[int], Iterator[Document]]], state: dict[str, Any] | None):
        self._parts = parts
        self._part, self._row = (state["part"], state["row"]) if state else (0, 0)

    def __iter__(self) -> Iterator[Document]:
        while self._part < len(self._parts):
            for document in self._parts[self._part](self._row):
                self._row += 1
                yield document
            self._part, self._row = self._part + 1, 0

    def state(self) -> dict[str, Any]:
        return {"part": self._part, "row": self._row}
