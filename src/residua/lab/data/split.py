"""Hold documents out: send each document of a corpus to training or to validation."""

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
"""How documents are held out: each by its own key, or so many that their bytes are the share that was asked."""
MOST_KEYS = 1_000_000
"""Documents whose keys are kept to find a share; of more than these, each goes by its own key."""
CLOSE_SHARE = 0.25
"""The relative distance from the asked share up to which documents go by their own keys."""
UNCUT = 0.05
"""The relative distance from the asked share up to which no document is cut to meet it."""
Item = TypeVar("Item")


def split_documents(
    documents: Iterable[Item],
    fraction: float,
    *,
    key: Callable[[Any], int] = lambda document: text_key(document.text.encode()),
    settled: bool = False,
    share: "HeldOutShare | None" = None,
) -> Iterator[tuple[Split, Item]]:
    """Send each document to "train" or "validation" by the `text_key` of its text, about `fraction` to validation.

    The choice does not depend on the other documents, and copies of a text land on the same side. If chance leaves
    validation empty (few documents), the document with the smallest key goes there, with its copies: until validation
    has a document, those with the smallest key so far wait.

    settled: validation has documents from an earlier call, so that none waits.
    share: decides in place of the fraction.
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
"""Bytes of the shortest part of a document to hold out, if whole documents can be in its place."""


class Cut(NamedTuple):
    """A document that is cut in two: its key, the characters before the cut, and the keys of both parts."""

    key: int
    position: int
    head: int
    tail: int


@dataclass(frozen=True)
class HeldOutShare:
    """The documents to hold out so that their bytes are a share of all: those with a key less than `below`.

    The document that is too long for this is cut, and its tail is held out. Copies of a text stay on one side.
    """

    below: int
    cut: Cut | None = None

    def side(self, key: int) -> Split:
        if self.cut is not None and key in (self.cut.head, self.cut.tail):
            return "train" if key == self.cut.head else "validation"
        return "validation" if key < self.below else "train"

    def documents(self, documents: Iterable[Document]) -> Iterator[Document]:
        """Yield the documents, the parts of the one that is cut in its place."""
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
    """Return the documents that hold out a share of the bytes.

    documents: begins a pass over them; there are two at most.
    always: also if holding each document out by its own key comes close to the share, for which None is returned.

    There are None for more than MOST_KEYS documents either.
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
    """Return the place to cut a text before about `tail` bytes, after a blank line, a line or a word if possible."""
    position = len(text.encode()[:-tail].decode(errors="ignore")) if tail else len(text)
    near = min(position, len(text) - position) // 20
    for end in ("\n\n", "\n", " "):
        around = text.rfind(end, position - near, position), text.find(end, position, position + near)
        if places := [place + len(end) for place in around if place >= 0]:
            return min(places, key=lambda place: abs(place - position))
    return position


def _key(document: Document) -> int:
    return text_key(document.text.encode())
