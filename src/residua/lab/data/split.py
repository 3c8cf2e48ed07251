"""Hold documents out: send each document of a corpus to training or to validation."""

from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeVar

from residua.lab.data.corpus import Document
from residua.lab.data.encode import text_key

Split = Literal["train", "validation"]
Item = TypeVar("Item")


class HashSplit(Generic[Item]):
    """Send each document to "train" or "validation" by the `text_key` of its text, about `fraction` to validation.

    The choice does not depend on the other documents, and copies of a text land on the same side. If chance leaves
    validation empty (few documents), the document with the smallest key goes there, with its copies.

    settled: whether validation has a document; then no item waits, and no choice depends on earlier documents.
    """

    def __init__(self, fraction: float, *, settled: bool = False):
        self._fraction, self.settled = fraction, settled
        self._smallest = 2**64
        self._waiting: list[Item] = []  # for validation if it stays empty, otherwise for train

    def add(self, key: int, item: Item) -> list[tuple[Split, Item]]:
        """Add an item; return all items whose split this decides."""
        training: list[Item] = []
        validation: list[tuple[Split, Item]] = []
        if key < self._fraction * 2**64:
            validation = [("validation", item)]
            self.settled = True
            training, self._waiting = self._waiting, []
        elif self.settled or key > self._smallest:
            training = [item]
        elif key == self._smallest:
            self._waiting.append(item)
        else:
            training, self._smallest, self._waiting = self._waiting, key, [item]
        return validation + [("train", earlier) for earlier in training]

    def end(self) -> list[tuple[Split, Item]]:
        """Return the items that still wait after the last document."""
        waiting, self._waiting = self._waiting, []
        return [("validation", item) for item in waiting]


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[tuple[Split, Document]]:
    """Send each document to "train" or "validation" as `HashSplit` does."""
    split: HashSplit[Document] = HashSplit(validation_fraction)
    for document in documents:
        yield from split.add(text_key(document.text.encode()), document)
    yield from split.end()
