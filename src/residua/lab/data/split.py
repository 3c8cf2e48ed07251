"""Hold out documents: assign each document of a corpus to training or to validation."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from residua.errors import extra
from residua.lab.data.corpus import Document
from residua.lab.data.encode import text_key

with extra("lab"):
    import numpy as np

Split = Literal["train", "validation"]
Splitting = Literal["documents", "share"]
"""How documents are held out: each by its own key, or those with the smallest keys up to a share of the bytes."""
MOST_KEYS = 1_000_000
"""The largest number of documents for which a share is computed; if there are more, each is assigned by its key."""
CLOSE_SHARE = 0.25
"""Documents are assigned by their own keys if the result is within this relative distance of the requested share."""
UNCUT = 0.05
"""No document is cut if whole documents come within this relative distance of the requested share."""
Item = TypeVar("Item")


def split_documents(
    documents: Iterable[Item],
    fraction: float,
    *,
    key: Callable[[Any], int] = lambda document: text_key(document.text.encode()),
    settled: bool = False,
    share: "HeldOutShare | None" = None,
) -> Iterator[tuple[Split, Item]]:
    """Assign each document to "train" or "validation" by the `text_key` of its text, about `fraction` to validation.

    The choice does not depend on the other documents, and copies of a text land on the same side. If few documents
    leave validation empty by chance, the document with the smallest key goes there, with its copies. Until validation
    has a document, the documents with the smallest key so far are therefore held back.

    settled: validation has documents from an earlier call, so none is held back.
    share: the documents to hold out, in place of the fraction.
    """
    if share is not None:
        yield from ((share.side(key(document)), document) for document in documents)
        return
    smallest, waiting = 2**64, list[Item]()
    for document in documents:
        number = key(document)
        if number < fraction * 2**64:
            yield from (("train", earlier) for earlier in waiting)
            yield "validation", document
            waiting, settled = [], True
        elif settled or number > smallest:
            yield "train", document
        elif number == smallest:
            waiting.append(document)
        else:
            yield from (("train", earlier) for earlier in waiting)
            smallest, waiting = number, [document]
    yield from (("validation", document) for document in waiting)


SHORTEST_TAIL = 64
"""The shortest tail of a document that is held out, in bytes, unless there is no other document to hold out."""


class Cut(NamedTuple):
    """A document that is cut in two: its key, the number of characters before the cut, and the keys of both parts."""

    key: int
    position: int
    head: int
    tail: int


@dataclass(frozen=True)
class HeldOutShare:
    """The documents to hold out for a share of all bytes: those with a key below `below`, and the tail of `cut`.

    A document that would exceed the share is cut, and its tail is held out. Copies of a text stay on one side.
    """

    below: int
    cut: Cut | None = None

    def side(self, key: int) -> Split:
        if self.cut is not None and key in (self.cut.head, self.cut.tail):
            return "train" if key == self.cut.head else "validation"
        return "validation" if key < self.below else "train"

    def documents(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents; the document that is cut is replaced by its two parts."""
        for document in documents:
            if self.cut is not None and _key(document) == self.cut.key:
                head, tail = document.text[: self.cut.position], document.text[self.cut.position :]
                size = len(tail.encode())
                yield Document(head, document.size - size)
                yield Document(tail, size)
            else:
                yield document


def share_of(
    documents: Callable[[], Iterable[Document]], fraction: float, *, always: bool = False
) -> HeldOutShare | None:
    """Return the documents to hold out for a share of the bytes.

    Return None if there are more than MOST_KEYS documents, or if assigning each document by its own key comes close to
    the share, unless `always` is set.

    documents: a function that starts a pass over the documents; it is called at most twice.
    """
    keys, sizes = array("Q"), array("q")
    for document in documents():
        if len(keys) == MOST_KEYS:
            return None
        keys.append(_key(document))
        sizes.append(len(document.text.encode()))
    texts, places, copies = np.unique(np.array(keys, np.uint64), return_inverse=True, return_counts=True)
    length = np.bincount(places, np.array(sizes))
    by_key = length[texts < fraction * 2**64].sum() / max(1, length.sum())
    if not always and abs(by_key - fraction) <= CLOSE_SHARE * min(fraction, 1 - fraction):
        return None
    wanted = fraction * length.sum()
    number = int(np.searchsorted(length.cumsum(), wanted))
    missing = wanted - length[:number].sum()
    if missing <= UNCUT * wanted and number:
        return HeldOutShare(int(texts[number]))
    key, further = int(texts[number]), number + 1 < len(texts)
    if further and (length[number] - missing <= UNCUT * wanted or (missing < SHORTEST_TAIL and not number)):
        return HeldOutShare(key + 1)
    if missing < SHORTEST_TAIL and number:
        return HeldOutShare(key)
    if copies[number] > 1:
        more = further and (number == 0 or 2 * missing > length[number])
        return HeldOutShare(key + more)
    text = next(document.text for document in documents() if _key(document) == key)
    position = _cut_position(text, int(missing))
    return HeldOutShare(
        key, Cut(key, position, *(text_key(part.encode()) for part in (text[:position], text[position:])))
    )


def _cut_position(text: str, tail: int) -> int:
    """Return the index at which to cut off about `tail` bytes, after a blank line, a line or a word if possible."""
    position = len(text.encode()[:-tail].decode(errors="ignore")) if tail else len(text)
    near = min(position, len(text) - position) // 20
    for end in ("\n\n", "\n", " "):
        around = text.rfind(end, position - near, position), text.find(end, position, position + near)
        if places := [place + len(end) for place in around if place >= 0]:
            return min(places, key=lambda place: abs(place - position))
    return position


def _key(document: Document) -> int:
    return text_key(document.text.encode())
