"""Read the user's text: a file, or a folder of files, of the formats in `formats`."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NoReturn

from residua.errors import InputError, require
from residua.files.reading import read_json
from residua.lab.data.corpus import Corpus
from residua.lab.data.formats import PIECE, PROSE, SUFFIXES, file_documents, file_size, has_column, is_text, kind

SIDE_FILES = (".json", ".csv", ".tsv", ".arrow")
"""Formats that often hold data other than texts; in a folder, such a file is left out if it lacks `text_column`."""
MOST_SUFFIXES = 20
"""The largest number of unreadable suffixes that an error lists."""


def open_files(path: Path, text_column: str = "text", longest_document: int = PIECE) -> Corpus:
    """Open a file, or a folder of files.

    A folder is read recursively in sorted order, without names that begin with a dot. Text files are UTF-8; a long one
    is cut into documents of at most `longest_document` characters (0: not at all). Rows of the other formats hold
    their text under the key `text_column`, which may be nested ("meta.text"). Text, JSON and CSV may be compressed
    (.gz, .zst).

    A file of a folder is left out, and named in `left_out`, if its suffix is not known, if it is one of `SIDE_FILES`
    without the column, if it is a text file that is not UTF-8, if it is a cache that `datasets` wrote beside its data,
    or if it is a pipe, a device or a link to a folder. If no file is left then, none is left out for its column or
    encoding.
    """
    if not path.exists():
        raise InputError(
            f"{path}: no such file or folder; give a path, stdlib for the embedded corpus, fineweb-edu or hf:OWNER/NAME"
        )
    paths = sorted(_walk(path), key=lambda file: file.relative_to(path).parts) if path.is_dir() else [path]
    # A pipe is read only if the user names it: reading could wait for ever, and a device may have no end.
    irregular = {file for file in paths if path.is_dir() and file.exists() and not file.is_file()}
    caches = set(_caches(paths)) if path.is_dir() else set()
    files = [file for file in paths if kind(file) in SUFFIXES and file not in irregular | caches]
    if len(files) > 1:
        files = [file for file in files if _is_usable(file, text_column)] or files
    if not files:
        suffixes = sorted({file.suffix or file.name for file in paths}) or ["no files"]
        more = f" and {len(suffixes) - MOST_SUFFIXES:,} more" if len(suffixes) > MOST_SUFFIXES else ""
        raise InputError(
            f"{path} must be a file, or hold files, ending in {' '.join(SUFFIXES)} (text, JSON and CSV also with .gz "
            f"or .zst), found {', '.join(suffixes[:MOST_SUFFIXES])}{more}"
        )
    rows = any(kind(file) not in PROSE for file in files)
    require(rows or text_column == "text", "text_column", f"left out, since {path} has no rows", text_column)
    sizes = [file_size(file, text_column) for file in files]
    read = set(files)
    return Corpus(
        name=path.resolve().name.encode(errors="backslashreplace").decode(),
        size=sum(sizes),
        read=lambda: chain.from_iterable(file_documents(file, text_column, longest_document) for file in files),
        identity={"files": _listing_hash(path, files), "text_column": text_column},
        facts={"files": len(files), "skipped_files": len(paths) - len(files)},
        left_out=tuple(
            _name(file.relative_to(path)) + _why_left_out(file, irregular, caches) for file in paths if file not in read
        ),
    )


def _is_usable(file: Path, text_column: str) -> bool:
    if kind(file) in SIDE_FILES:
        return has_column(file, text_column)
    return kind(file) not in PROSE or is_text(file)


def _caches(paths: list[Path]) -> Iterator[Path]:
    """Yield the Arrow files that are no data of the `datasets` folder that they are in, such as results of `map`."""
    for state in (file for file in paths if file.name == "state.json" and file.is_file()):
        with suppress(InputError, KeyError, TypeError):
            data = {entry["filename"] for entry in read_json(state)["_data_files"]}
            beside = (file for file in paths if file.parent == state.parent and file.suffix == ".arrow")
            yield from (file for file in beside if file.name not in data)


def _why_left_out(file: Path, irregular: set[Path], caches: set[Path]) -> str:
    if file in caches:
        return " (a cache of datasets)"
    if file in irregular:
        return " (a link to a folder)" if file.is_dir() else " (a pipe or a device)"
    return " (not UTF-8 text)" if kind(file) in PROSE else ""


def _name(path: Path) -> str:
    return str(path).encode(errors="backslashreplace").decode()


def _listing_hash(path: Path, files: list[Path]) -> str:
    """Hash the names, sizes and modification times of files, without reading them."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(
            f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape")
        )
    return digest.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, and the links to folders, which are not followed: they may lead anywhere."""
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (path for name in folders if (path := Path(parent, name)).is_symlink())
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error
