"""Documents: which text is found, in which order, how it is split, and what is refused."""

import csv
import gzip
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import residua
from residua.errors import InputError
from residua.lab.data import prepare
from residua.lab.data.corpus import Document
from residua.lab.data.formats import PIECE
from residua.lab.data.sources import open_corpus
from residua.lab.data.split import HeldOutShare, share_of, split_documents


def texts(source):
    return [document.text for document in open_corpus(source)]


def documents(*texts):
    return [Document(text, len(text.encode())) for text in texts]


@pytest.fixture(scope="module")
def stdlib():
    return open_corpus("stdlib")


@pytest.mark.nightly
def test_stdlib_has_each_english_document_once(stdlib):
    found = [document.text for document in stdlib]
    assert 1.7e6 < stdlib.size == sum(len(text.encode()) for text in found) < 2.6e6
    assert len(set(found)) == len(found)
    assert min(map(len, found)) > 40
    whole = "\n".join(found)
    assert "Assert statements are a convenient way to insert debugging assertions" in whole  # pydoc's topics
    assert "Return a new list containing all items from the iterable in ascending order" in whole  # builtins, in C
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in whole  # textwrap, in Python
    assert "Base class for fixers" not in whole  # lib2to3 is left out


@pytest.mark.slow
def test_stdlib_contains_no_path_or_address_of_the_machine(stdlib):
    whole = "\n".join(document.text for document in stdlib)
    assert " at 0x7" not in whole
    for place in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.expanduser("~") + "/"):
        assert place not in whole


@pytest.mark.slow
def test_topics_of_stdlib_do_not_repeat_their_sections(stdlib):
    assert sum("parameter_list_starargs" in document.text for document in stdlib) == 1


@pytest.mark.nightly
@pytest.mark.processes
def test_stdlib_does_not_depend_on_the_process(stdlib, tmp_path):
    (tmp_path / "pydoc_data.py").write_text("raise RuntimeError('taken from the working folder')")
    # The module alone, without the packages above it, because they import torch.
    program = (
        "import hashlib, sys, types\n"
        "for name in ('residua', 'residua.lab', 'residua.lab.data'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    sys.modules[name].__path__ = [sys.argv[1] + name.removeprefix('residua').replace('.', '/')]\n"
        "from residua.lab.data.sources import open_corpus\n"
        "print(hashlib.sha256(repr([d.text for d in open_corpus('stdlib')]).encode()).hexdigest())"
    )
    environment = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONHASHSEED": "7", "PYTHONUTF8": "0"}
    command = [sys.executable, "-OO", "-I", "-c", program, str(Path(residua.__file__).parent)]
    there = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert there.strip() == hashlib.sha256(repr([document.text for document in stdlib]).encode()).hexdigest()


def test_a_folder_is_read_in_sorted_order_and_other_files_are_skipped(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "one.md").write_text("three")
    (tmp_path / "b.TXT").write_text("four")
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n{"text": "two \\ud83d\\ude00", "id": 1}')
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".hidden" / "x.txt").write_text("hidden")
    (tmp_path / "white.txt").write_text(" \n\t")
    large = pa.array(["five", None, "", "six"], pa.large_string())
    pq.write_table(pa.table({"text": large, "id": [1, 2, 3, 4]}), tmp_path / "c.parquet")

    corpus = open_corpus(tmp_path)
    assert texts(tmp_path) == ["one", "two 😀", "three", "four", "five", "six"]
    assert texts(tmp_path) == [document.text for document in corpus]  # a corpus can be read again
    assert corpus.facts == {"files": 5, "skipped_files": 1}
    assert corpus.name == tmp_path.name


@pytest.mark.parametrize("paragraph", ["word " * 300 + "\n\n", "word " * 300 + "\n", "word " * 300])
def test_a_long_text_is_cut_between_lines_and_loses_nothing(tmp_path, paragraph):
    text = paragraph * 200
    (tmp_path / "long.txt").write_text(text)
    pieces = texts(tmp_path / "long.txt")
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= PIECE
    assert min(map(len, pieces[:-1])) > PIECE - len(paragraph)
    end = paragraph.removeprefix("word " * 300)
    assert all(piece.endswith(end) for piece in pieces)


def test_byte_order_marks_are_dropped_and_line_endings_unified(tmp_path):
    (tmp_path / "dos.txt").write_bytes("\ufeffüber\r\nall".encode())
    assert texts(tmp_path / "dos.txt") == ["über\nall"]


def test_sizes_add_up_to_the_size_of_the_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("grüße " * 5000)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"número {n}"}) for n in range(100)) + "\n")
    corpus = open_corpus(tmp_path)
    assert sum(document.size for document in corpus) == corpus.size


def test_texts_of_a_folder_that_are_not_utf8_are_left_out_and_named(tmp_path):
    (tmp_path / "a.txt").write_text("grün")
    (tmp_path / "b.txt").write_bytes("grün".encode("latin-1"))
    (tmp_path / "c.md.gz").write_bytes(gzip.compress("grün".encode("utf-16"), mtime=0))
    (tmp_path / "d.md").write_bytes(b"with\0zero")
    corpus = open_corpus(tmp_path)
    assert [document.text for document in corpus] == ["grün"]
    assert corpus.left_out == ("b.txt (not UTF-8 text)", "c.md.gz (not UTF-8 text)", "d.md (not UTF-8 text)")
    (tmp_path / "e.txt.gz").write_bytes(b"not compressed")
    with pytest.raises(InputError, match=r"e\.txt\.gz: cannot be read"):
        open_corpus(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes with names")
def test_a_pipe_and_a_device_in_a_folder_are_left_out_and_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    (tmp_path / "c.jsonl").symlink_to("/dev/zero")
    corpus = open_corpus(str(tmp_path))
    assert [document.text for document in corpus] == ["text"]
    assert corpus.left_out == ("b.txt (a pipe or a device)", "c.jsonl (a pipe or a device)")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match="must be a file, or hold files, ending in"):
        open_corpus(str(tmp_path))


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_link_to_a_folder_is_left_out_and_named(tmp_path):
    (tmp_path / "here" / "sub").mkdir(parents=True)
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "a.txt").write_text("one")
    (tmp_path / "there" / "b.txt").write_text("two")
    (tmp_path / "here" / "sub" / "more").symlink_to(tmp_path / "there")
    corpus = open_corpus(tmp_path / "here")
    assert texts(tmp_path / "here") == ["one"]
    assert corpus.left_out == ("sub/more (a link to a folder)",)


def test_one_line_names_some_of_many_unreadable_files(tmp_path):
    for number in range(100):
        (tmp_path / f"CHAPTER-{number:03d}").write_text("text")
    with pytest.raises(InputError, match=r"found CHAPTER-000, .*CHAPTER-019 and 80 more$"):
        open_corpus(tmp_path)


NOT_UTF8 = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 3, 6], "<i4")), pa.py_buffer(b"one\xff\xfe!"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"text \xff\xfe", "a.txt must be UTF-8"),
        ("a.md", b"\x00\x01\x02", "a.md must be text, got a binary file"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "tw', "a.jsonl:2 must be one JSON object with .*, got"),
        (
            "a.jsonl",
            b'{"content": "one"}\n{"content": "two"}\n',
            'a.jsonl must have .* "text" .*, got .*content',
        ),
        ("a.jsonl", b'"one"\n', "a.jsonl:1 must be one JSON object"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1 must be one JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1 must be .* Unicode .*\\ud800"),
        ("a.parquet", b"not parquet at all", "a.parquet: not a readable parquet file"),
        ("a.txt", "UTF-16".encode("utf-16"), "a.txt must be UTF-8"),
        (
            "a.parquet",
            pa.table({"content": ["one"], "text": [1]}),
            r"column 'text', got columns content \(string\), text \(int64\)",
        ),
        (
            "a.parquet",
            pa.table({"text": NOT_UTF8}),
            "a.parquet must be UTF-8 text: invalid start byte",
        ),
        ("a.docx", b"text\none\n", r"a.docx must be a file, or hold files, ending in .txt .md .jsonl .*, found \.docx"),
        ("a.csv", b'text\n"one\n', "a.csv:2: not a readable table"),
        ("a.csv", b"content\none\n", 'a.csv must have .* "text" .*, got .*content'),
        ("a.csv", b"id,text\n1,one\n2,two, or three\n", "a.csv:3 must have the 2 cells .* quotes .*',', got 3 cells"),
        ("a.tsv", b"text\none\ttwo\n", "a.tsv:2 must have the 1 cells .*, got 2 cells"),
        ("a.json", b'[{"text": "one"}', "a.json must be an array of JSON objects"),
        ("a.json", b'[{"text": 5}]', "a.json: row 1 must be one JSON object"),
        ("a.arrow", b"not arrow at all", "a.arrow: not a readable arrow file"),
        ("a.txt.gz", b"not compressed", "a.txt.gz: cannot be read: Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"one" * 9, mtime=0)[:-9], "a.txt.gz: a damaged or cut .gz file"),
        ("a.txt.zst", b"not compressed", "a.txt.zst: cannot be read"),
    ],
)
def test_unusable_files_are_refused_with_name_and_line(tmp_path, name, content, expected):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(InputError, match=expected) as error:
        texts(tmp_path / name)
    assert "\n" not in str(error.value)


ROWS = [{"text": "one\n\u2028two", "meta": {"text": "ONE"}}, {"text": "three", "meta": {"text": "THREE"}}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def arrow(new, table):
    sink = pa.BufferOutputStream()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def parquet(column):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": column, "meta": [row["meta"] for row in ROWS]}), sink)
    return sink.getvalue().to_pybytes()


WORDS = [row["text"] for row in ROWS]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl.gz", gzip.compress(LINES[:30], mtime=0) + gzip.compress(LINES[30:], mtime=0)),
        ("a.jsonl.zst", bytes(pa.Codec("zstd").compress(LINES[:9])) + bytes(pa.Codec("zstd").compress(LINES[9:]))),
        ("a.json", json.dumps(ROWS).encode()),
        ("lines.json", LINES),
        ("a.json.GZ", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.arrow", arrow(pa.ipc.new_stream, pa.Table.from_pylist(ROWS))),
        ("file.arrow", arrow(pa.ipc.new_file, pa.Table.from_pylist(ROWS))),
        ("category.parquet", parquet(pa.array(WORDS).dictionary_encode())),
        ("view.parquet", parquet(pa.array(WORDS, pa.string_view()))),
    ],
)
def test_texts_are_read_from_every_format_and_from_nested_columns(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert texts(tmp_path / name) == WORDS
    nested = open_corpus(tmp_path / name, text_column="meta.text")
    assert [document.text for document in nested] == ["ONE", "THREE"]


def test_cells_of_tables_may_be_long_and_contain_line_ends(tmp_path):
    cells = ["a\n\n b", "c, " * 100_000]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(cells), (2,)])
    limit = csv.field_size_limit()
    assert texts(tmp_path) == cells
    assert csv.field_size_limit() == limit
    (tmp_path / "a.csv").rename(tmp_path / "b.tsv")
    with pytest.raises(InputError, match='"text" of its rows, got'):
        texts(tmp_path)


def test_an_array_may_hold_texts(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(WORDS))
    assert texts(tmp_path) == WORDS


def test_files_left_out_of_a_folder_are_named_and_the_rest_is_read(tmp_path, capsys):
    half = [json.dumps({"text": f"document {n}"}) + "\n" for n in range(100)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part-0.jsonl").write_text("".join(half[:50]))
    (tmp_path / "in" / "part-1.jsonl.gz").write_bytes(gzip.compress("".join(half[50:]).encode()))
    for name, content in (("package.json", "{}"), ("notes.json", "// no JSON"), ("a.csv", "x,y\n1,2\n"), ("b.gz", "")):
        (tmp_path / "in" / name).write_text(content)
    data = prepare(tmp_path / "in", tmp_path / "out", tokenizer="byte")
    assert data.facts["documents"] == 100
    assert "left out 4 files: a.csv, b.gz, notes.json, package.json" in capsys.readouterr().err
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["left_out"] == ["a.csv", "b.gz", "notes.json", "package.json"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_without_text_are_skipped_and_counted(tmp_path, suffix, capsys):
    rows = [{"text": f"document {n}"} for n in range(100)] + [{"text": None}, {"text": " "}]
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist([*rows, {}]), tmp_path / "a.parquet")
    else:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"other": 1}]))
    facts = prepare(tmp_path, tmp_path / "out", tokenizer="byte").facts
    assert (facts["documents"], facts["blank_documents"]) == (100, 3)
    assert "left out 3 rows or documents without text" in capsys.readouterr().err


def test_long_rows_are_cut_like_prose_if_asked(tmp_path):
    text = "A line of a book.\n" * 4000
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": text}))
    assert texts(tmp_path / "b.jsonl") == [text]
    for length in (PIECE, 1000, 0):
        cut = [[x.text for x in open_corpus(tmp_path / name, longest_document=length)] for name in ("a.txt", "b.jsonl")]
        assert cut[0] == cut[1]
        assert "".join(cut[0]) == text
        assert len(cut[0]) > 5 or (length == 0 and len(cut[0]) == 1)


def test_options_without_effect_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for arguments in ({"tokenizer": "byte", "vocab_size": 600}, {"text_column": "body"}):
        with pytest.raises(InputError, match=r"(vocab_size|text_column) must be left out"):
            prepare(tmp_path, tmp_path / "out", **arguments)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("fraction", [0.01, 0.05, 0.3, 0.9])
def test_the_held_out_share_of_one_book_is_the_requested_one(tmp_path, suffix, fraction):
    text = "".join(f"Line {n} of a book, and no other.\n" for n in range(2500))
    (tmp_path / f"a{suffix}").write_text(text if suffix == ".txt" else json.dumps({"text": text}))
    data = prepare(tmp_path, tmp_path / "out", tokenizer="byte", validation_fraction=fraction, split="share")
    assert len(data.validation) / (len(data.train) + len(data.validation)) == pytest.approx(fraction, rel=0.1)
    kept = "".join(
        data.tokenizer().decode(part.window(0, len(part)).tolist()) for part in (data.train, data.validation)
    )
    assert sorted(kept.replace("<|endoftext|>", "")) == sorted(text)
    assert data.facts["split"] == "share"


@given(st.lists(st.text(max_size=300), min_size=2, max_size=40), st.floats(0.01, 0.9))
def test_a_share_loses_no_text_and_keeps_copies_together(found, fraction):
    share = share_of(lambda: documents(*found), fraction, always=True)
    parts = {"train": [], "validation": []}
    for split, document in split_documents(share.documents(documents(*found)), fraction, share=share):
        parts[split].append(document.text)
    assert sorted("".join(parts["train"] + parts["validation"])) == sorted("".join(found))
    assert not {*parts["train"]} & {*parts["validation"]} - {""}


def test_documents_are_split_by_their_own_keys_if_the_share_is_nearly_met():
    many = documents(*(f"text {n}" for n in range(20_000)))
    assert share_of(lambda: many, 0.05) is None
    assert isinstance(share_of(lambda: many, 0.05, always=True), HeldOutShare)


# Recorded before shares were measured, and before there were more formats.
BEFORE = {
    (0.1, "bpe"): "9e27f33cd3952235a746a97df827a0d2391f072459a9296e43c953353b1207a9",
    (0.1, "byte"): "9468590531e44b48fe3873a5f4d3c108a0aef58ee99c1e6951f18ed57ed440aa",
    (None, "bpe"): "c300f70718914cfcb7a2a57fa833a47f2953cf6705a18def6ec064ba04209483",
    (None, "byte"): "5a9cadc95a3d31af55aed184e5694a4f11277c5e45e00663b97983859256d6a2",
}


@pytest.mark.parametrize(("fraction", "tokenizer"), BEFORE)
def test_a_text_prepared_by_an_earlier_version_keeps_its_fingerprint(tmp_path, fraction, tokenizer):
    rows = [" ".join(f"w{i * j % 97}" for j in range(5 + i % 40)) + f" {i}." for i in range(400)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (tmp_path / "a.txt").write_text("\n\n".join(rows))
    size = {"vocab_size": 300} if tokenizer == "bpe" else {}
    data = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer, validation_fraction=fraction, **size)
    assert data.fingerprint == BEFORE[fraction, tokenizer]


def test_the_earlier_split_of_a_text_with_few_documents_is_available_on_request(tmp_path):
    rows = [" ".join(f"w{i * j % 97}" for j in range(5 + i % 40)) + f" {i}." for i in range(400)]
    few = ["\n\n".join(rows[start : start + 100]) for start in range(0, 400, 100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in few))
    data = prepare(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="byte", split="documents")
    assert data.fingerprint == "5247639a6d08322937a80ddf6a21dcc58cea33fb14e0a563428f952ca4e90064"


def test_empty_files_have_no_documents(tmp_path):
    for name in ("a.txt", "b.md", "c.jsonl"):
        (tmp_path / name).write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "d.parquet")
    assert texts(tmp_path) == []
    (tmp_path / "e.txt").write_text("one")
    assert texts(tmp_path) == ["one"]


def test_the_error_for_a_folder_without_text_lists_its_files(tmp_path):
    with pytest.raises(InputError, match="found no files"):
        open_corpus(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.docx").write_bytes(b"")
    (tmp_path / "Makefile").write_bytes(b"")
    with pytest.raises(InputError, match=r"found \.docx, \.png, Makefile"):
        open_corpus(tmp_path)


some_texts = st.lists(st.sampled_from([f"text {n}" for n in range(30)]), min_size=1, max_size=60)


@given(some_texts, st.floats(0.01, 0.9))
def test_a_split_loses_no_document_and_keeps_copies_together(found, fraction):
    parts = {"train": [], "validation": []}
    for split, document in split_documents(documents(*found), fraction):
        parts[split].append(document.text)
    assert sorted(parts["train"] + parts["validation"]) == sorted(found)
    assert not set(parts["train"]) & set(parts["validation"])
    assert parts["validation"]


def test_the_split_of_a_document_does_not_depend_on_the_others():
    few, more = [f"text {n}" for n in range(500)], [f"text {n}" for n in range(0, 5000, 2)]
    sides = [{d.text: split for split, d in split_documents(documents(*t), 0.05)} for t in (few, more)]
    common = set(few) & set(more)
    assert {text: sides[0][text] for text in common} == {text: sides[1][text] for text in common}


def test_a_split_holds_out_about_the_requested_fraction():
    sides = [split for split, _ in split_documents(documents(*(f"text {n}" for n in range(20_000))), 0.05)]
    assert sides.count("validation") == pytest.approx(1000, abs=100)


def test_caches_that_datasets_writes_beside_its_data_are_left_out_and_named(tmp_path):
    """Results of `map`: near-copies of the texts would get into both splits."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["One", "Two"]}).save_to_disk(tmp_path / "set")
    datasets.load_from_disk(tmp_path / "set").map(lambda row: {"text": row["text"].lower()})
    (cache,) = (tmp_path / "set").glob("cache-*.arrow")
    corpus = open_corpus(tmp_path / "set")
    assert [document.text for document in corpus.read()] == ["One", "Two"]
    assert f"{cache.name} (a cache of datasets)" in corpus.left_out
    for state in ("{", "[]", '{"_data_files": [1]}', "{}"):  # of something else
        (tmp_path / "set" / "state.json").write_text(state)
        assert len(list(open_corpus(tmp_path / "set").read())) == 4


def test_empty_cells_at_the_end_of_a_row_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_text("id,text\n1,one,,\n2,two\n")
    assert texts(tmp_path / "a.csv") == ["one", "two"]


def test_documents_with_special_tokens_in_their_text_are_counted_and_told(tmp_path, capsys):
    texts = [f"<|endoftext|>user {n}" if n % 4 == 0 else f"user {n} <|endoftext" for n in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    data = prepare(tmp_path, tmp_path / "out", tokenizer="byte")
    assert data.facts["documents_with_special_tokens"] == 25
    said = "25 documents hold the text of a special token (<|endoftext|>, ...), which is read as plain text"
    assert said in capsys.readouterr().err
