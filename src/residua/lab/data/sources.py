"""Open a corpus by the name of its source."""

import io
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from residua.errors import require
from residua.lab.data.corpus import Corpus, Document
from residua.lab.data.files import open_files
from residua.lab.data.formats import PIECE, pieces
from residua.lab.data.hub import FINEWEB_EDU, SAMPLES, open_hub
from residua.lab.data.stdlib import open_stdlib


def open_corpus(
    source: str | os.PathLike[str],
    *,
    text_column: str = "text",
    sample: str | None = None,
    longest_document: int | None = None,
) -> Corpus:
    """Open the corpus named by `source`.

    - "stdlib": the documentation inside this Python;
    - a file, or a folder of .txt, .md, .jsonl, .json, .csv, .tsv, .parquet and .arrow files: see `open_files`;
    - "fineweb-edu" (`sample` picks a part), or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]": see `open_hub`.

    Documents of more than `longest_document` characters are cut; 0 cuts none. By default only prose in files is cut.
    Raises InputError if there is nothing to read. Iterating over the corpus raises InputError, with file and line, for
    text that cannot be used.
    """
    require(source != "", "source", "the name of a source", source)
    samples = SAMPLES if source == FINEWEB_EDU else {}
    expected = f"one of {', '.join(samples)}" if samples else f"left out with {source}"
    require(sample is None or sample in samples, "sample", expected, sample)
    require(longest_document is None or longest_document >= 0, "longest_document", "at least 0", longest_document)
    length = PIECE if longest_document is None else longest_document
    if isinstance(source, str) and (source == FINEWEB_EDU or source.startswith("hf:")):
        corpus = open_hub(source, text_column=text_column, sample=sample)
    elif source == "stdlib":
        require(text_column == "text", "text_column", "left out with stdlib", text_column)
        corpus = open_stdlib()
    else:
        corpus = open_files(Path(source), text_column, length)
    if longest_document is None:
        return corpus
    new = {"longest_document": longest_document}
    read = _in_pieces(corpus.read, length) if length else corpus.read
    return replace(corpus, read=read, identity=corpus.identity | new, facts=corpus.facts | new)


def _in_pieces(read: Callable[[], Iterator[Document]], longest: int) -> Callable[[], Iterator[Document]]:
    def documents() -> Iterator[Document]:
        for document in read():
            if len(document.text) <= longest:
                yield document
                continue
            for piece in pieces(io.StringIO(document.text, newline=""), longest):
                yield Document(piece, len(piece.encode()))

    return documents
