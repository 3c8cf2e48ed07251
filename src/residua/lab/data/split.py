"""Hold documents out: send each document of a corpus to training or to validation."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from residua.lab.data.encode import text_key

Split = Literal["train", "validation"]
Item = TypeVar("Item")


def split_documents(
    documents: Iterable[Item],
    fraction: float,
    *,
    key: Callable[[Any], int] = lambda document: text_key(document.text.encode()),
    settled: bool = False,
) -> Iterator[tuple[Split, Item]]:
    """Send each document to "train" or "validation" by the `text_key` of its text, about `fraction` to validation.

    The choice does not depend on the other documents, and copies of a text land on the same side. If chance leaves
    validation empty (few documents), the document with the smallest key goes there, with its copies: until validation
    has a document, those with the smallest key so far wait.

    settled: validation has documents of an earlier call, so that none waits.
    """
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
