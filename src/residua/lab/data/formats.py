"""Read the documents of one file: prose, or rows of JSON, CSV, Arrow or Parquet; text may be in gzip or Zstandard."""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from residua.errors import InputError, extra, first_line, shown
from residua.files.reading import regular
from residua.lab.data.corpus import Document

PIECE = 8192
"""The default length of documents in a text file, in characters. Longer files are cut at blank lines or line ends."""
COMPRESSED = (".gz", ".zst")
BLOCK = 2**20
"""The number of characters to read at once."""
EXPANSION = 4
"""Roughly how many bytes of text a compressed byte holds, for the progress display."""
ABSENT = object()
"""Stands for the value of a missing key."""


class TextRow(NamedTuple):
    """A row of a file: its place for errors, its value, and its size in the file in bytes (None: that of its text)."""

    place: str
    value: Any
    size: int | None = None


def kind(file: Path) -> str:
    """Return the suffix of a file's format, without the suffix of its compression."""
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower()
    return inner if suffix in COMPRESSED and inner in TEXTS else suffix


def file_size(file: Path, column: str) -> int:
    """Return how many bytes of text there are to read in a file, estimated if compressed. Raises InputError."""
    with reading(file):
        size = regular(file).stat().st_size
        if kind(file) == ".parquet":
            with _parquet(file, column) as parquet:
                groups = map(parquet.metadata.row_group, range(parquet.num_row_groups))
                columns = (group.column(index) for group in groups for index in range(group.num_columns))
                return sum(part.total_uncompressed_size for part in columns if part.path_in_schema == column)
        return size * (EXPANSION if file.suffix.lower() in COMPRESSED else 1)


def file_documents(file: Path, column: str, longest: int = PIECE) -> Iterator[Document]:
    """Yield the documents of a file, with an empty one for each row without text.

    column: the key of the text in a row; "meta.text" is the key "text" inside "meta".
    longest: the longest document of prose, in characters; 0 for whole files.

    Raises InputError if the file does not fit its suffix, or no row has the key.
    """
    with reading(file):
        if (suffix := kind(file)) in BINARY:
            yield from _row_documents(file, BINARY[suffix](file, column), column)
            return
        # Prose may have any line ending; JSON lines end only at "\n"; the module csv handles line endings itself.
        with _opened(file, None if suffix in PROSE else "" if suffix in TABLES else "\n") as stream:
            if suffix in PROSE:
                yield from _prose(file, stream, longest)
            else:
                yield from _row_documents(file, ROWS[suffix](file, stream), column)


def has_column(file: Path, column: str) -> bool:
    """Return whether a file can be read and one of its rows has a text under the key `column`."""
    try:
        return any(document.text for document in file_documents(file, column))
    except InputError:
        return False


def is_text(file: Path) -> bool:
    """Return whether a file is UTF-8 text without zero bytes. Raises InputError if it cannot be read."""
    with reading(file):
        try:
            with _opened(file, None) as stream:
                return all("\0" not in block for block in iter(partial(stream.read, BLOCK), ""))
        except UnicodeDecodeError:
            return False


def pieces(stream: TextIO, longest: int) -> Iterator[str]:
    """Yield a text in pieces of at most `longest` characters, cut at a blank line, else at a line end, else inside
    a line; 0 for one piece.
    """
    text = ""
    while block := stream.read(longest or -1):
        text += block
        while longest and len(text) > longest:
            end = _last_end(text[:longest])
            yield text[:end]
            text = text[end:]
    if text:
        yield text


def field(row: Any, column: str) -> Any:
    """Return the value of a key in a row; "a.b" is the key "b" inside "a". ABSENT if it is missing."""
    if not isinstance(row, dict):
        return ABSENT
    if column in row:
        return row[column]
    outer, dot, inner = column.partition(".")
    return field(row.get(outer), inner) if dot else ABSENT


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn errors from reading a file or decoding its text in the `with` block into InputError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{file} must be UTF-8 text: {error.reason}; convert or remove it") from None
    except (EOFError, zlib.error) as error:
        raise InputError(f"{file}: a damaged or cut {file.suffix} file: {first_line(error)}") from error
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror or first_line(error)}") from error


@contextmanager
def _opened(file: Path, newline: str | None) -> Iterator[TextIO]:
    if file.suffix.lower() == ".gz":
        with gzip.open(file, "rt", encoding="utf-8-sig", newline=newline) as stream:
            yield stream
    elif file.suffix.lower() == ".zst":
        with extra("lab"):
            import pyarrow
        with pyarrow.input_stream(pyarrow.OSFile(str(file)), compression="zstd") as raw:
            yield io.TextIOWrapper(io.BufferedReader(raw), encoding="utf-8-sig", newline=newline)
    else:
        with file.open(encoding="utf-8-sig", newline=newline) as stream:
            yield stream


def _prose(file: Path, stream: TextIO, longest: int) -> Iterator[Document]:
    for piece in pieces(stream, longest):
        if "\0" in piece:
            raise InputError(f"{file} must be text, got a binary file (it has a zero byte); convert or remove it")
        yield Document(piece, len(piece.encode()))


def _last_end(text: str) -> int:
    """Return the place after the last blank line of a text, else after its last line, else its end."""
    for end in ("\n\n", "\n"):
        if end in text:
            return text.rindex(end) + len(end)
    return len(text)


def _row_documents(file: Path, rows: Iterable[TextRow], column: str) -> Iterator[Document]:
    row, absent = None, True
    for row in rows:
        text = row.value if isinstance(row.value, str) else field(row.value, column)
        absent = absent and text is ABSENT
        if text is ABSENT or text is None:
            yield Document("", row.size or 0)
            continue
        try:
            size = len(text.encode())  # raises for half of a surrogate pair
        except (AttributeError, UnicodeEncodeError):
            raise _no_text(row, column) from None
        yield Document(text, size if row.size is None else row.size)
    if row is not None and absent:
        raise InputError(
            f"{file} must have text under the key {json.dumps(column)} of its rows, got {shown(row.value)}; "
            "name the key of the text with --text-column"
        )


def _no_text(row: TextRow, column: str) -> InputError:
    expected = f"one JSON object with Unicode text under the key {json.dumps(column)}"
    return InputError(f"{row.place} must be {expected}, got {shown(row.value)}")


def _json_lines(file: Path, stream: TextIO) -> Iterator[TextRow]:
    for number, line in enumerate(stream, start=1):
        if not line.isspace():
            value = _json(f"{file}:{number}", line)
            if not isinstance(value, dict):
                raise InputError(f"{file}:{number} must be one JSON object, got {shown(line.strip())}")
            yield TextRow(f"{file}:{number}", value, len(line.encode()))


def _json_array(file: Path, stream: TextIO) -> Iterator[TextRow]:
    """Yield the objects or texts of an array, a single object, or JSON lines, which many programs name .json."""
    text = stream.read()
    try:
        value = json.loads(text or "[]")
    except (ValueError, RecursionError) as error:
        if "Extra data" not in str(error):
            raise InputError(f"{file} must be an array of JSON objects, got {first_line(error)}") from error
        yield from _json_lines(file, io.StringIO(text, newline="\n"))
        return
    for number, row in enumerate(value if isinstance(value, list) else [value], start=1):
        yield TextRow(f"{file}: row {number}", row)


def _json(place: str, line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} must be one JSON object with its text, got {shown(line.strip())}") from error


def _table(delimiter: str) -> Callable[[Path, TextIO], Iterator[TextRow]]:
    def rows(file: Path, stream: TextIO) -> Iterator[TextRow]:
        table = csv.reader(stream, delimiter=delimiter, strict=True)
        names = None
        try:
            while (cells := _next(table)) is not None:
                if names is None:
                    names = cells
                elif cells:
                    place = f"{file}:{table.line_num}"
                    if any(cells[len(names) :]):
                        expected = f"the {len(names)} cells of the header, with quotes around cells that contain"
                        raise InputError(f"{place} must have {expected} {delimiter!r}, got {len(cells)} cells")
                    yield TextRow(place, dict(zip(names, cells)))
        except csv.Error as error:
            raise InputError(f"{file}:{table.line_num}: not a readable table: {first_line(error)}") from error

    return rows


def _next(table: Any) -> list[str] | None:
    """Return the next row of a table, with cells of any length. csv's limit is global, so it is increased only here."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        return next(table, None)
    finally:
        csv.field_size_limit(limit)


def _parquet_rows(file: Path, column: str) -> Iterator[TextRow]:
    with _parquet(file, column) as parquet:
        # One row group at a time, so that memory is bounded by the largest row group.
        for number in range(parquet.num_row_groups):
            for rows in parquet.iter_batches(batch_size=256, row_groups=[number], columns=[column]):
                yield from (TextRow(f"{file}", row) for row in rows.to_pylist())


def _arrow_rows(file: Path, column: str) -> Iterator[TextRow]:
    with extra("lab"):
        import pyarrow
    with _arrow(file), pyarrow.memory_map(str(file)) as source:
        try:
            batches = pyarrow.ipc.open_stream(source)  # the format that `datasets` writes
            schema = batches.schema
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source)
            batches, schema = map(table.get_batch, range(table.num_record_batches)), table.schema
        _expect_strings(file, schema, column)
        outer = column if column in schema.names else column.partition(".")[0]
        for batch in batches:
            for start in range(0, batch.num_rows, 256):
                rows = batch.select([outer]).slice(start, 256)
                yield from (TextRow(str(file), row) for row in rows.to_pylist())


@contextmanager
def _parquet(file: Path, column: str) -> Iterator[Any]:
    with extra("lab"):
        from pyarrow.parquet import ParquetFile
    with _arrow(file), ParquetFile(file) as parquet:
        _expect_strings(file, parquet.schema_arrow, column)
        yield parquet


@contextmanager
def _arrow(file: Path) -> Iterator[None]:
    with extra("lab"):
        from pyarrow import ArrowException
    try:
        yield
    except ArrowException as error:
        raise InputError(f"{file}: not a readable {file.suffix[1:]} file: {first_line(error)}") from error


def _expect_strings(file: Path, schema: Any, column: str) -> None:
    """Raise InputError unless a column holds strings, in any of Arrow's string types."""
    import pyarrow

    types = {name: part.type for name, part in _leaves(schema)}
    found = types.get(column)
    if found is None or _value_type(found) not in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()):
        columns = ", ".join(f"{name} ({type_})" for name, type_ in types.items())
        raise InputError(
            f"{file} must have strings in a column {column!r}, got columns {columns}; "
            "name the column of the text with --text-column"
        )


def _leaves(fields: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    import pyarrow

    for part in fields:
        name = f"{prefix}{part.name}"
        yield from _leaves(part.type, f"{name}.") if pyarrow.types.is_struct(part.type) else [(name, part)]


def _value_type(type_: Any) -> Any:
    import pyarrow

    return type_.value_type if pyarrow.types.is_dictionary(type_) else type_


PROSE = (".txt", ".md")
TABLES = {".csv": _table(","), ".tsv": _table("\t")}
ROWS = {".jsonl": _json_lines, ".json": _json_array, **TABLES}
BINARY = {".parquet": _parquet_rows, ".arrow": _arrow_rows}
TEXTS = (*PROSE, *ROWS)
SUFFIXES = (*TEXTS, *BINARY)
