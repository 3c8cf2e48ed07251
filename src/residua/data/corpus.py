"""Where text comes from: the documentation inside every CPython, or the user's files; and which of it is held out.

A corpus is read as a stream of documents, in a fixed order, as often as needed; memory does not grow with its size.
"""

import ast
import hashlib
import importlib
import inspect
import json
import os
import platform
import re
import sys
import sysconfig
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TextIO

from residua.errors import InputError, extra

Split = Literal["train", "validation"]

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PIECE = 8192
"""Characters after which a text file is cut into a further document, at the last blank line (or line) before."""


class Document(NamedTuple):
    text: str
    size: int
    """The share of `Corpus.size` that is behind us once this document is read."""


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again; those without a visible character are left out.

    `size` is the number of bytes to read, the unit of progress (an estimate for parquet); `facts` go into the records.
    """

    name: str
    size: int
    read: Callable[[], Iterable[Document]]
    facts: dict[str, Any] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Document]:
        return (document for document in self.read() if document.text and not document.text.isspace())


def open_corpus(source: str | os.PathLike[str]) -> Corpus:
    """The corpus named by `source`: "stdlib", a file, or a folder of .txt, .md, .jsonl and .parquet files.

    A folder is read recursively in sorted order; names that begin with a dot and other suffixes are skipped. JSON lines
    are objects with a string "text", parquet files have a string column "text". Text files are UTF-8; a long one is cut
    into documents of about `PIECE` characters.
    Raises InputError when there is nothing to read; reading raises it for text that cannot be used, with file and line.
    """
    return _stdlib() if source == "stdlib" else _files(Path(source))


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[tuple[Split, Document]]:
    """Send each document to "train" or "validation" by a hash of its text alone.

    So the choice does not depend on the other documents, and copies of a text are on the same side. Where chance
    leaves validation empty (few documents), the document with the smallest hash goes there, with its copies.
    """
    threshold = validation_fraction * 2**64
    have_validation = False
    smallest, waiting = 2**64, []  # what validation gets if it stays empty; train otherwise
    for document in documents:
        key = int.from_bytes(hashlib.blake2b(document.text.encode(), digest_size=8).digest(), "big")
        released = []
        if key < threshold:
            yield "validation", document
            have_validation = True
            released, waiting = waiting, []
        elif have_validation or key > smallest:
            released = [document]
        elif key == smallest:
            waiting.append(document)
        else:
            released, smallest, waiting = waiting, key, [document]
        for other in released:
            yield "train", other
    for document in waiting:
        yield "validation", document


_LEFT_OUT = {"idlelib", "lib2to3", "turtledemo", "test"}
_TESTS = {"test", "tests"}
# Modules that every build of CPython has and whose docs do not depend on the platform.
_C_MODULES = (
    *("_bisect", "_codecs", "_collections", "_csv", "_datetime", "_decimal", "_functools", "_heapq", "_io"),
    *("_operator", "_pickle", "_random", "_signal", "_struct", "_thread", "_weakref", "array", "binascii", "builtins"),
    *("cmath", "gc", "itertools", "marshal", "math", "sys", "time", "unicodedata", "zlib"),
)
_C_MEMBERS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
)
_SHORTEST = 40


def _stdlib() -> Corpus:
    """pydoc's topics, the docstrings in the standard library's sources, and the docs of modules written in C.

    The same for every environment of one CPython build: nothing is taken from site-packages, and sources are parsed,
    not imported, so that -OO changes nothing.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    try:
        topics = importlib.import_module("pydoc_data.topics").topics
    except ModuleNotFoundError:
        topics = {}
    docstrings = list(_source_docs(folder))
    if not topics or not docstrings:
        missing = f"the sources of the standard library in {folder}" if topics else "pydoc_data.topics"
        raise InputError(f"source stdlib: this Python was installed without {missing}; give a file or folder of text")

    texts = [*_sections(topics), *docstrings, *_c_docs()]
    # An address in a C doc could differ from process to process, and its digits teach nothing.
    texts = [re.sub(r"\bat 0x[0-9A-Fa-f]+", "at 0x...", text) for text in texts]
    documents = [Document(text, len(text.encode())) for text in dict.fromkeys(texts) if len(text) > _SHORTEST]
    return Corpus(
        name="stdlib",
        size=sum(document.size for document in documents),
        read=lambda: documents,
        facts={"python": f"{platform.python_implementation()} {platform.python_version()}"},
    )


def _sections(topics: dict[str, str]) -> Iterable[str]:
    """The sections of pydoc's topics, each once: many topics are parts of others, with other underlines."""
    heading = re.compile(r"\n\n+(?=[^\n]+\n([*=~^-])\1{2,}\n)")
    sections: dict[str, str] = {}
    for _, topic in sorted(topics.items()):
        # The pattern's one group makes re.split return the underline's character between sections.
        for section in heading.split(topic.strip())[::2]:
            _title, _, body = section.partition("\n")
            _underline, _, body = body.partition("\n")
            sections.setdefault(body.strip(), section)
    return sections.values()


def _source_docs(folder: Path) -> Iterator[str]:
    for name in sorted(sys.stdlib_module_names - _LEFT_OUT):
        for source in [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]:
            if source.is_file() and _TESTS.isdisjoint(source.relative_to(folder).parts):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # the standard library's own invalid escapes
                    tree = ast.parse(source.read_bytes())
                yield from _docstrings(tree)


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield ast.get_docstring(node) or ""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from _docstrings(child)


def _c_docs() -> Iterator[str]:
    for name in _C_MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        yield _doc(module)
        for _, member in sorted(vars(module).items()):
            # Programs may add names to these modules, and functions of Python lose their docstrings under -OO.
            if isinstance(member, (type, *_C_MEMBERS)) and (member.__module__ or "").lstrip("_") == name.lstrip("_"):
                yield _doc(member)
                if isinstance(member, type):
                    yield from (_doc(part) for _, part in sorted(vars(member).items()) if isinstance(part, _C_MEMBERS))


def _doc(thing: object) -> str:
    return inspect.cleandoc(thing.__doc__) if isinstance(thing.__doc__, str) else ""


def _files(path: Path) -> Corpus:
    if path.is_dir():
        found = sorted(_walk(path), key=lambda file: file.relative_to(path).parts)
        files = [file for file in found if file.suffix.lower() in SUFFIXES]
        if not files:
            others = ", ".join(sorted({file.suffix or file.name for file in found})) or "no files"
            raise InputError(f"{path}: expected files ending in {' '.join(SUFFIXES)}, found {others}")
    elif path.is_file():
        found = files = [path]
        if path.suffix.lower() not in SUFFIXES:
            raise InputError(f"{path}: expected a file ending in one of {' '.join(SUFFIXES)}; rename or convert it")
    else:
        raise InputError(f"{path}: no such file or folder; expected a path, or stdlib for the embedded corpus")
    return Corpus(
        name=path.resolve().name,
        size=sum(map(_size, files)),
        read=lambda: (document for file in files for document in _documents(file)),
        facts={"files": len(files), "skipped_files": len(found) - len(files)},
    )


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _size(file: Path) -> int:
    if file.suffix.lower() != ".parquet":
        try:
            return file.stat().st_size
        except OSError as error:
            _refuse(error)
    with _parquet(file) as parquet:
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        columns = (group.column(index) for group in groups for index in range(group.num_columns))
        return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == "text")


def _documents(file: Path) -> Iterator[Document]:
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_documents(file)
        return
    try:
        # Prose is read with any line ending; lines of JSON end at "\n" alone.
        with file.open(encoding="utf-8-sig", newline="\n" if suffix == ".jsonl" else None) as stream:
            yield from _json_documents(file, stream) if suffix == ".jsonl" else _text_documents(file, stream)
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: expected UTF-8 text: {error.reason}; convert or remove it") from None
    except OSError as error:
        _refuse(error)


def _text_documents(file: Path, stream: TextIO) -> Iterator[Document]:
    text = ""
    while block := stream.read(PIECE):
        if "\0" in block:
            raise InputError(f"{file}: expected text, got a binary file (it holds a zero byte); convert or remove it")
        text += block
        if len(text) > PIECE:
            piece, text = _cut(text)
            yield Document(piece, len(piece.encode()))
    if text:
        yield Document(text, len(text.encode()))


def _cut(text: str) -> tuple[str, str]:
    for end in ("\n\n", "\n"):
        head, found, tail = text.rpartition(end)
        if found:
            return head + found, tail
    return text, ""


def _json_documents(file: Path, stream: TextIO) -> Iterator[Document]:
    for number, line in enumerate(stream, start=1):
        if line.isspace():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}:{number}: expected one JSON object on each line: {error}") from None
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise InputError(f'{file}:{number}: expected a JSON object with a string "text"')
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(f'{file}:{number}: "text" is not Unicode: it holds one half of a surrogate pair') from None
        yield Document(text, len(line.encode()))


def _parquet_documents(file: Path) -> Iterator[Document]:
    with _parquet(file) as parquet:
        for rows in parquet.iter_batches(batch_size=256, columns=["text"]):
            for text in rows.column(0).to_pylist():
                if text is not None:
                    yield Document(text, len(text.encode()))


@contextmanager
def _parquet(file: Path) -> Iterator[Any]:
    with extra("data"):
        import pyarrow
        from pyarrow.parquet import ParquetFile
    try:
        with ParquetFile(file) as parquet:
            kinds = {column.name: column.type for column in parquet.schema_arrow}
            if kinds.get("text") not in (pyarrow.string(), pyarrow.large_string()):
                columns = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
                raise InputError(f"{file}: expected a column text of strings, got columns {columns}")
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable parquet file: {str(error).splitlines()[0]}") from error
