"""Where text comes from: the documentation inside every CPython, the user's files or the hub; what is held out of it.

A corpus is read as a stream of documents, in a fixed order, as often as needed and from any place that an earlier
reading has reached; memory does not grow with its size.
"""

import ast
import base64
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, NoReturn, Protocol, TextIO, TypeVar

from residua.data.encode import text_key
from residua.data.hub import open_hub
from residua.errors import InputError, extra

Split = Literal["train", "validation"]

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
PIECE = 8192
"""Characters after which a text file is cut into a further document, at the last blank line (or line) before."""


class Document(NamedTuple):
    text: str
    size: int
    """The share of `Corpus.size` that is behind us once this document is read."""


class Reading(Protocol):
    """One pass over documents, blank ones included. `state()` is a JSON object from which a later pass goes on."""

    def __iter__(self) -> Iterator[Document]: ...

    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again; those without a visible character are left out.

    `size` is the number of bytes to read, the unit of progress (an estimate for parquet and the hub, 0 if unknown);
    `read` begins a pass, at the place of a state or at the start; `identity` changes with the text; `facts` go into the
    records; `local` is False where reading is downloading.
    """

    name: str
    size: int
    read: Callable[[dict[str, Any] | None], Reading]
    identity: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)
    local: bool = True

    def __iter__(self) -> Iterator[Document]:
        return filter(has_text, self.read(None))


def has_text(document: Document) -> bool:
    """Whether a document has a visible character."""
    return bool(document.text) and not document.text.isspace()


def open_corpus(source: str | os.PathLike[str], *, text_column: str = "text", sample: str | None = None) -> Corpus:
    """The corpus named by `source`.

    - "stdlib": the documentation inside this Python;
    - a file, or a folder of .txt, .md, .jsonl and .parquet files. A folder is read recursively in sorted order; names
      that begin with a dot and other suffixes are skipped. JSON lines are objects with a string `text_column`, parquet
      files have a string column of that name. Text files are UTF-8; a long one is cut into documents of about `PIECE`
      characters;
    - "fineweb-edu" (the part that `sample` names) or "hf:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]": see `open_hub`.

    Raises InputError when there is nothing to read; reading raises it for text that cannot be used, with file and line.
    """
    if isinstance(source, str) and (source == "fineweb-edu" or source.startswith("hf:")):
        hub = open_hub(source, text_column=text_column, sample=sample)
        return Corpus(hub.name, hub.size, partial(_HubReading, hub), hub.identity, hub.identity, local=False)
    if sample is not None:
        raise InputError(f"sample: expected it with source fineweb-edu alone, got it with {source}")
    return _stdlib() if source == "stdlib" else _files(Path(source), text_column)


class _PartReading:
    """A pass over parts (files), each a function that yields its documents from the n-th on."""

    def __init__(self, parts: Sequence[Callable[[int], Iterator[Document]]], state: dict[str, Any] | None):
        self._parts = parts
        self._part, self._row = (state["part"], state["row"]) if state else (0, 0)

    def __iter__(self) -> Iterator[Document]:
        while self._part < len(self._parts):
            for document in self._parts[self._part](self._row):
                self._row += 1
                yield document
            self._part, self._row = self._part + 1, 0

    def state(self) -> dict[str, Any]:
        return {"part": self._part, "row": self._row}


class _HubReading:
    """A pass over the rows of a data set on the hub."""

    def __init__(self, hub: Any, state: dict[str, Any] | None):
        self._rows = hub.rows(state)

    def __iter__(self) -> Iterator[Document]:
        return (Document(text, len(text.encode())) for text in self._rows)

    def state(self) -> dict[str, Any]:
        return self._rows.state()


Item = TypeVar("Item")


class HashSplit(Generic[Item]):
    """Sends each document to "train" or "validation" by `text_key` of its text alone, about `fraction` to the latter.

    So the choice does not depend on the other documents, and copies of a text are on the same side. Where chance
    leaves validation empty (few documents), the document with the smallest key goes there, with its copies.
    """

    def __init__(self, fraction: float, state: dict[str, Any] | None = None):
        self._fraction = fraction
        self.settled = state is not None
        """Whether validation has a document: then nothing waits, and no choice depends on what came before."""
        self._smallest = 2**64
        self._waiting: list[Item] = []  # what validation gets if it stays empty; train otherwise

    def add(self, key: int, item: Item, tokens: int = 0) -> list[tuple[Split, Item]]:
        """The items that have their place now that this one is known; `tokens` does not matter here."""
        released: list[Item] = []
        found: list[tuple[Split, Item]] = []
        if key < self._fraction * 2**64:
            found = [("validation", item)]
            self.settled = True
            released, self._waiting = self._waiting, []
        elif self.settled or key > self._smallest:
            released = [item]
        elif key == self._smallest:
            self._waiting.append(item)
        else:
            released, self._smallest, self._waiting = self._waiting, key, [item]
        return found + [("train", other) for other in released]

    def end(self) -> list[tuple[Split, Item]]:
        waiting, self._waiting = self._waiting, []
        return [("validation", item) for item in waiting]

    def state(self) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {"validation_fraction": self._fraction}


class LeadingSplit(Generic[Item]):
    """Sends the first documents to "validation", as many as have at most `tokens` tokens, and the others to "train".

    Copies of a text that is held out are left out of training. Memory grows with the number of documents held out, not
    with those that follow.
    """

    settled = True

    def __init__(self, tokens: int, state: dict[str, Any] | None = None):
        state = state or {"left": tokens, "full": False, "copies": 0, "keys": ""}
        self._left, self._full, self._copies = state["left"], state["full"], state["copies"]
        self._encoded: str | None = state["keys"]
        keys = base64.b64decode(state["keys"])
        self._keys = {int.from_bytes(keys[at : at + 8], "big") for at in range(0, len(keys), 8)}

    def add(self, key: int, item: Item, tokens: int) -> list[tuple[Split, Item]]:
        if not self._full and tokens <= self._left:
            self._left -= tokens
            self._keys.add(key)
            self._encoded = None
            return [("validation", item)]
        self._full = True
        if key in self._keys:
            self._copies += 1
            return []
        return [("train", item)]

    def end(self) -> list[tuple[Split, Item]]:
        return []

    def state(self) -> dict[str, Any]:
        if self._encoded is None:
            keys = b"".join(key.to_bytes(8, "big") for key in sorted(self._keys))
            self._encoded = base64.b64encode(keys).decode()
        return {"left": self._left, "full": self._full, "copies": self._copies, "keys": self._encoded}

    def facts(self) -> dict[str, Any]:
        return {"copies_left_out": self._copies}


def split_documents(documents: Iterable[Document], validation_fraction: float) -> Iterator[tuple[Split, Document]]:
    """Send each document to "train" or "validation": see `HashSplit`."""
    split: HashSplit[Document] = HashSplit(validation_fraction)
    for document in documents:
        yield from split.add(text_key(document.text.encode()), document)
    yield from split.end()


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
    python = {"python": f"{platform.python_implementation()} {platform.python_version()}"}
    return Corpus(
        name="stdlib",
        size=sum(document.size for document in documents),
        read=partial(_PartReading, [lambda first: islice(documents, first, None)]),
        identity=python,
        facts=python,
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


def _files(path: Path, text_column: str) -> Corpus:
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
        raise InputError(
            f"{path}: no such file or folder; expected a path, stdlib for the embedded corpus, fineweb-edu or "
            "hf:OWNER/NAME"
        )
    sizes = [_size(file, text_column) for file in files]
    return Corpus(
        name=path.resolve().name,
        size=sum(sizes),
        read=partial(_PartReading, [partial(_documents, file, text_column) for file in files]),
        identity={"files": _listing_hash(path, files), "text_column": text_column},
        facts={"files": len(files), "skipped_files": len(found) - len(files)},
    )


def _listing_hash(path: Path, files: list[Path]) -> str:
    """A sha256 of names, sizes and times of change: it differs when a file does, without reading any."""
    digest = hashlib.sha256()
    for file in files:
        status = file.stat()
        digest.update(f"{file.relative_to(path)}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _walk(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = (name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _size(file: Path, text_column: str) -> int:
    if file.suffix.lower() != ".parquet":
        try:
            return file.stat().st_size
        except OSError as error:
            _refuse(error)
    with _parquet(file, text_column) as parquet:
        groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
        columns = (group.column(index) for group in groups for index in range(group.num_columns))
        return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_column)


def _documents(file: Path, text_column: str, first: int) -> Iterator[Document]:
    """The documents of a file from number `first` on."""
    suffix = file.suffix.lower()
    if suffix == ".parquet":
        yield from _parquet_documents(file, text_column, first)
        return
    try:
        # Prose is read with any line ending; lines of JSON end at "\n" alone.
        with file.open(encoding="utf-8-sig", newline="\n" if suffix == ".jsonl" else None) as stream:
            if suffix == ".jsonl":
                yield from _json_documents(file, stream, text_column, first)
            else:
                yield from islice(_text_documents(file, stream), first, None)
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


def _json_documents(file: Path, stream: TextIO, column: str, first: int) -> Iterator[Document]:
    lines = ((number, line) for number, line in enumerate(stream, start=1) if not line.isspace())
    for number, line in islice(lines, first, None):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{file}:{number}: expected one JSON object on each line: {error}") from None
        text = entry.get(column) if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise InputError(f'{file}:{number}: expected a JSON object with a string "{column}"')
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InputError(
                f'{file}:{number}: "{column}" is not Unicode: it holds one half of a surrogate pair'
            ) from None
        yield Document(text, len(line.encode()))


def _parquet_documents(file: Path, column: str, first: int) -> Iterator[Document]:
    with _parquet(file, column) as parquet:
        group = 0
        while group < parquet.num_row_groups and first >= parquet.metadata.row_group(group).num_rows:
            first -= parquet.metadata.row_group(group).num_rows
            group += 1
        # One row group after the other: memory is that of the largest.
        for number in range(group, parquet.num_row_groups):
            for rows in parquet.iter_batches(batch_size=256, row_groups=[number], columns=[column]):
                texts = rows.column(0).to_pylist()
                for text in texts[first:]:
                    yield Document(text or "", len(text.encode()) if text else 0)
                first = max(0, first - len(texts))


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
                raise InputError(f"{file}: expected a column {column} of strings, got columns {columns}")
            yield parquet
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{file}: not a readable parquet file: {str(error).splitlines()[0]}") from error
