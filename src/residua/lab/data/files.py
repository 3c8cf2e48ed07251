"""Read the user's text: .txt, .md, .jsonl and .parquet files."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn, TextIO

from residua.errors import InputError, extra, first_line, shown
from residua.files.reading import regular
from residua.lab.data.corpus import Corpus, Document

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PIECE = 8192
"""Characters of a document: a longer text file is cut at the last blank line, or line, before this length."""


def open_files(path: Path, text_column: str) -> Corpus:
    """Open a file, or a folder of files.

    A folder is read recursively in sorted order; names that begin with a dot and other suffixes are skipped. Text files
    are UTF-8; a long one is cut into documents of about `PIECE` characters. JSON lines are objects with a string
    `text_column`; parquet files have a string column of that name.
    """
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder; give a path, stdlib for the embedded corpus, fineweb-edu or hf:OWNER/NAME"
        )
    paths = sorted(_walk(path), key=lambda file: file.relative_to(path).parts) if path.is_dir() else [path]
    files = [file for file in paths if file.suffix.lower() in SUFFIXES]
    if not files:
        suffixes = ", ".join(sorted({file.suffix or file.name for file in paths})) or "no files"
        raise InputError(f"{path} must be or hold files ending in {' '.join(SUFFIXES)}, found {suffixes}")
    sizes = [_size(file, text_column) for file in files]
    return Corpus(
        name=path.resolve().name.encode(errors="backslashreplace").decode(),
        size=sum(sizes),
        read=lambda: chain.from_iterable(_documents(file, text_column) for file in files),
        identity={"files": _listing_hash(path, files), "text_column": text_column},
        facts={"files": len(files), "skipped_files": len(paths) - len(files)},
    )


def _listing_hash(path: Path, files: list[Path]) -> str:
    """Hash names, sizes and modification times: the hash changes with the files, and no file is read."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(
            f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _size(file: Path, text_column: str) -> int:
    with _reading(file):
        if regular(file).suffix.lower() != ".parquet":
            return file.stat().st_size
        with _parquet(file, text_column) as parquet:
            groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
            columns = (group.column(index) for group in groups for index in range(group.num_columns))
            return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_column)


def _documents(file: Path, text_column: str) -> Iterator[Document]:
    suffix = file.suffix.lower()
    with _reading(file):
        if suffix == ".parquet":
            yield from _parquet_documents(file, text_column)
            return
        # Prose may have any line ending; JSON lines end at "\n" only.
        with file.open(encoding="utf-8-sig", newline="\n" if suffix == ".jsonl" else None) as stream:
            if suffix == ".jsonl":
                yield from _json_documents(file, stream, text_column)
            else:
                yield from _text_documents(file, stream)


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Raise InputError for a file that cannot be read, or not as text."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{file} must be UTF-8 text: {error.reason}; convert or remove it") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or first_line(error)}") from error


def _text_documents(file: Path, stream: TextIO) -> Iterator[Document]:
    text = ""
    while block := stream.read(PIECE):
        if "\0" in block:
            raise InputError(f"{file} must be text, got a binary file (it has a zero byte); convert or remove it")
        text += block
        if len(text) > PIECE:
            piece, text = _cut(text)
            yield Document(piece, len(piece.encode()))
    if text:
        yield Document(text, len(text.encode()))


def _cut(text: str) -> tuple[str, str]:
    for end in ("\n\n", "\n"):
        head, separator, tail = text.rpartition(end)
        if separator:
            return head + separator, tail
    return text, ""


def _json_documents(file: Path, stream: TextIO, column: str) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            text = json.loads(line)[column]
            text.encode()  # fails for half of a surrogate pair
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            expected = f'one JSON object with Unicode text as its "{column}"'
            raise InputError(f"{file}:{number} must be {expected}, got {shown(line.strip())}") from error
        yield Document(text, len(line.encode()))


def _parquet_documents(file: Path, column: str) -> Iterator[Document]:
    with _parquet(file, column) as parquet:
        # One row group at a time, so that memory is bounded by the largest.
        for number in range(parquet.num_row_groups):
            for rows in parquet.iter_batches(batch_size=256, row_groups=[number], columns=[column]):
                for text in rows.column(0).to_pylist():
                    yield Document(text or "", len(text.encode()) if text else 0)


@contextmanager
def _parquet(file: Path, column: str) -> Iterator[Any]:
    with extra("lab"):
        import pyarrow
        from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(file) as parquet:
            kinds = {field.name: field.type for field in parquet.schema_arrow}
            if kinds.get(column) not in (pyarrow.string(), pyarrow.large_string()):
                columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
                raise InputError(f"{file} must have a column {column} of strings, got columns {columns}")
            yield parquet
    except pyarrow.ArrowException as error:
        raise InputError(f"{file}: not a readable parquet file: {first_line(error)}") from error
