"""Hold documents out: send each document of a corpus to training or to validation."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar

from residua.lab.data.corpus import Document
from residua.lab.data.encode import text_key

Split = Literal["train", "validation"]
Item = TypeVar("Item")
NOTHING: Mapping[str, Any] = MappingProxyType({})
"""The state of a split before its first document."""


class HashSplit(Generic[Item]):
    """Send each document to "train" or "validation" by the `text_key` of its text, about `fraction` to validation.

    The choice does not depend on the other documents, and copies of a text land on the same side. If chance leaves
    validation empty (few documents), the document with the smallest key goes there, with its copies.
    """

    def __init__(self, fraction: float, state: Mapping[str, Any] = NOTHING):
        self._fraction = fraction
        self.settled = state.get("settled", False)
        """Whether validation has a document; then no item waits, and no choice depends on earlier documents."""
        self._smallest = 2**64
        self._waiting: list[Item] = []  # for validation if it stays empty, otherwise for train

    def add(self, key: int, item: Item, tokens: int = 0) -> list[tuple[Split, Item]]:
        """Add an item; return all items whose split this decides. `tokens` is ignored here."""
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

    def state(self) -> dict[str, Any]:
        return {"settled": self.settled}

    def facts(self) -> dict[str, Any]:
        return {"validation_fraction": self._fraction}


class LeadingSplit(Generic[Item]):
    """Send the first documents to "validation", at most `tokens` tokens of them, and the others to "train".

    Copies of a held-out text are left out of training. Memory grows with the number of held-out documents only.
    """

    settled = True

    def __init__(self, tokens: int, state: Mapping[str, Any] = NOTHING):
        self._budget, self._full = state.get("left", tokens), state.get("full", False)
        self._copies, self._keys = state.get("copies", 0), set(state.get("keys", []))

    def add(self, key: int, item: Item, tokens: int) -> list[tuple[Split, Item]]:
        """Return the item with its split, or nothing for a copy of a held-out text."""
        if not self._full and tokens <= self._budget:
            self._budget -= tokens
            self._keys.add(key)
            return [("validation", item)]
        self._full = True
        if key in self._keys:
            self._copies += 1
            return []
        return [("train", item)]

    def end(self) -> list[tuple[Split, Item]]:
        """Return nothing: no item waits here."""
        return []

    def state(self) -> dict[str, Any]:
        return {"left": self._budget, "full": self._full, "copies": self._copies, "keys": sorted(self._keys)}

    def facts(self) -> dict[str, Any]:
        return {"copies_left_out": self._copies}


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[tuple[Split, Document]]:
    """Send each document to "train" or "validation" as `HashSplit` does."""
    split: HashSplit[Document] = HashSplit(validation_fraction)
    for document in documents:
        yield from split.add(text_key(document.text.encode()), document)
    yield from split.end()
