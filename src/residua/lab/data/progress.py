"""Progress of a preparation in bytes of text, on standard error."""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from residua.errors import extra
from residua.lab.data.corpus import Document
from residua.records.progress import Progress

with extra("lab"):
    from rich.filesize import decimal

UPDATE_SECONDS = 1.0
"""Time between two updates; a shorter preparation shows nothing."""


@contextmanager
def text_progress(
    title: str, documents: Iterable[Document], total: int, done: int, enabled: bool
) -> Iterator[Iterator[Document]]:
    """Show how much of `total` bytes of text (0 if unknown) is read, after `done` bytes of an earlier call.

    Yields an iterator over the documents.
    """
    start = last_update = time.monotonic()
    earlier_bytes = done

    def reading() -> Iterator[Document]:
        nonlocal done, last_update
        for document in documents:
            yield document
            done += document.size
            now = time.monotonic()
            if now - last_update >= UPDATE_SECONDS:
                last_update = now
                share = f" of {decimal(total)} ({done / total:.1%})" if total else ""
                speed = decimal(int((done - earlier_bytes) / (now - start)))
                bar.update(done, f"prepare: {title}: {decimal(done)} of text{share}, {speed}/s")

    with Progress("", total, done=done, enabled=enabled) as bar:
        yield reading()
