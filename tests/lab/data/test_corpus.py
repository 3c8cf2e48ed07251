"""Documents: which text is found, in which order, how it is split, and what is refused."""

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
from residua.lab.data.corpus import Document
from residua.lab.data.files import PIECE
from residua.lab.data.sources import open_corpus
from residua.lab.data.split import split_documents


def texts(source):
    return [document.text for document in open_corpus(source)]


def documents(*texts):
    return [Document(text, len(text.encode())) for text in texts]


@pytest.fixture(scope="module")
def stdlib():
    return open_corpus("stdlib")


@pytest.mark.slow
def test_stdlib_is_english_documentation_each_once(stdlib):
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
def test_stdlib_names_no_machine(stdlib):
    whole = "\n".join(document.text for document in stdlib)
    assert " at 0x7" not in whole
    for place in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), os.path.expanduser("~") + "/"):
        assert place not in whole


@pytest.mark.slow
def test_stdlib_topics_do_not_repeat_their_sections(stdlib):
    assert sum("parameter_list_starargs" in document.text for document in stdlib) == 1


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


def test_folder_is_read_in_sorted_order_and_other_files_are_skipped(tmp_path):
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
def test_long_text_is_cut_between_lines_and_loses_nothing(tmp_path, paragraph):
    text = paragraph * 200
    (tmp_path / "long.txt").write_text(text)
    pieces = texts(tmp_path / "long.txt")
    assert "".join(pieces) == text
    assert all(len(piece) <= 2 * PIECE for piece in pieces)
    assert len(pieces) > len(text) / (2 * PIECE)
    end = paragraph.removeprefix("word " * 300)
    assert all(piece.endswith(end) for piece in pieces)


def test_byte_order_mark_and_line_endings_of_text_files(tmp_path):
    (tmp_path / "dos.txt").write_bytes("\ufeffüber\r\nall".encode())
    assert texts(tmp_path / "dos.txt") == ["über\nall"]


def test_sizes_add_up_to_the_size_of_the_corpus(tmp_path):
    (tmp_path / "a.txt").write_text("grüße " * 5000)
    (tmp_path / "b.jsonl").write_text("\n".join(json.dumps({"text": f"número {n}"}) for n in range(100)) + "\n")
    corpus = open_corpus(tmp_path)
    assert sum(document.size for document in corpus) == corpus.size


NOT_UTF8 = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 3, 6], "<i4")), pa.py_buffer(b"one\xff\xfe!"))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", b"text \xff\xfe", "a.txt must be UTF-8"),
        ("a.md", b"\x00\x01\x02", "a.md must be text, got a binary file"),
        ("a.jsonl", b'{"text": "one"}\n{"text": "tw', "a.jsonl:2 must be one JSON object with .*, got"),
        ("a.jsonl", b'{"text": "one"}\n{"content": "two"}\n', 'a.jsonl:2 must be .* with Unicode text as its "text"'),
        ("a.jsonl", b'"one"\n', "a.jsonl:1 must be one JSON object"),
        ("a.jsonl", b'{"text": 5}\n', "a.jsonl:1 must be one JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a.jsonl:1 must be .* Unicode .*\\ud800"),
        ("a.parquet", b"not parquet at all", "a.parquet: not a readable parquet file"),
        ("a.txt", "UTF-16".encode("utf-16"), "a.txt must be UTF-8"),
        (
            "a.parquet",
            pa.table({"content": ["one"], "text": [1]}),
            r"column text of strings, got columns content \(string\), text \(int64\)",
        ),
        (
            "a.parquet",
            pa.table({"text": NOT_UTF8}),
            "a.parquet must be UTF-8 text: invalid start byte",
        ),
        ("a.csv", b"text\none\n", r"a.csv must be or hold files ending in .txt .md .jsonl .parquet, found \.csv"),
    ],
)
def test_unusable_files_are_refused_by_name_and_line(tmp_path, name, content, expected):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        pq.write_table(content, tmp_path / name)
    with pytest.raises(InputError, match=expected) as error:
        texts(tmp_path / name)
    assert "\n" not in str(error.value)


def test_empty_files_have_no_documents(tmp_path):
    for name in ("a.txt", "b.md", "c.jsonl"):
        (tmp_path / name).write_bytes(b"")
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "d.parquet")
    assert texts(tmp_path) == []
    (tmp_path / "e.txt").write_text("one")
    assert texts(tmp_path) == ["one"]


def test_folder_without_text_lists_what_it_holds(tmp_path):
    with pytest.raises(InputError, match="found no files"):
        open_corpus(tmp_path)
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "b.csv").write_bytes(b"")
    (tmp_path / "Makefile").write_bytes(b"")
    with pytest.raises(InputError, match=r"found \.csv, \.png, Makefile"):
        open_corpus(tmp_path)


some_texts = st.lists(st.sampled_from([f"text {n}" for n in range(30)]), min_size=1, max_size=60)


@given(some_texts, st.floats(0.01, 0.9))
def test_split_keeps_all_and_separates_copies(found, fraction):
    parts = {"train": [], "validation": []}
    for split, document in split_documents(documents(*found), fraction):
        parts[split].append(document.text)
    assert sorted(parts["train"] + parts["validation"]) == sorted(found)
    assert not set(parts["train"]) & set(parts["validation"])
    assert parts["validation"]


def test_split_of_a_document_does_not_depend_on_the_others():
    few, more = [f"text {n}" for n in range(500)], [f"text {n}" for n in range(0, 5000, 2)]
    sides = [{d.text: split for split, d in split_documents(documents(*t), 0.05)} for t in (few, more)]
    common = set(few) & set(more)
    assert {text: sides[0][text] for text in common} == {text: sides[1][text] for text in common}


def test_split_gives_about_the_fraction():
    sides = [split for split, _ in split_documents(documents(*(f"text {n}" for n in range(20_000))), 0.05)]
    assert sides.count("validation") == pytest.approx(1000, abs=100)
