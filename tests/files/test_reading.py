"""Untrusted files: plain data is read; anything else gives a one-line error that names the file."""

import json
import os

import pytest

from residua.errors import InputError
from residua.files import reading
from residua.files.durable import file_sha256
from residua.files.reading import (
    expect_regular,
    inside,
    parse_json,
    parse_yaml,
    read_json,
    read_text,
    read_yaml,
    readings,
    write_yaml,
)
from residua.lab.records.jsonlines import JsonLines
from residua.lab.records.jsonlines import read as read_lines


def refused(read, *arguments):
    with pytest.raises(InputError) as error:
        read(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("text", ["", "{", "nan", "{'a': 1}"])
def test_invalid_json_is_refused(text):
    assert refused(parse_json, text, "some/file").startswith("some/file must be JSON, got: ")


def test_valid_json_is_read():
    text = '{"a": [1, -2.5, 18446744073709551615, null, true, "\\ud83d\\ude00"], "b": {"c": NaN}}'
    value = parse_json(text, "file")
    assert value["a"] == [1, -2.5, 2**64 - 1, None, True, "\U0001f600"]
    assert value["b"]["c"] != value["b"]["c"]


@pytest.mark.parametrize(
    "text",
    [
        '!!python/object/apply:os.system ["touch ran"]',
        "? [a]\n: b",
        "a: b: c",
        "a: 1\n---\nb: 2",
    ],
)
def test_invalid_yaml_is_refused(text):
    assert refused(parse_yaml, text, "some/file").startswith("some/file must be YAML, got: ")


def test_a_tab_in_yaml_is_named():
    with pytest.raises(InputError, match=r"line 2; .*spaces.*tabs"):
        parse_yaml("set:\n\ttrain.steps: 8", "study.yaml")


@pytest.mark.parametrize(
    "text", ["1e3", ".5e3", "+1e5", "12e4567", "1:30", "0x1f", "~", "no", "2020-01-01", "#a", "a: b"]
)
def test_a_text_is_written_so_that_it_is_read_as_text(text):
    assert parse_yaml(write_yaml({"key": text, "list": [text, 3e-4, None]}), "file") == {
        "key": text, "list": [text, 3e-4, None]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3", [3, "3"]), ("null", [None, "null"]), ("#a", ["#a"]), ("", [""]), ("a", ["a"]), ("*a", ["*a"]), ("@", ["@"])],
)
def test_a_typed_text_may_mean_its_value_or_itself(text, expected):
    assert readings(text, "--key") == expected


def test_valid_yaml_is_read():
    text = "a: 3e-4\nb: [1, 0x1f, -7, 1_000]\nc: {d: null, e: 'x'}\nf: true\ng: 1.5e3\n'h': |\n  two\n  lines\n"
    assert parse_yaml(text, "file") == {
        "a": 3e-4, "b": [1, 31, -7, 1000], "c": {"d": None, "e": "x"}, "f": True, "g": 1500.0, "h": "two\nlines\n"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["1:30", "1:30:00", "1:30.5", "-1:30", "010", "0o10", "2001-01-01", "2001-99-99"])
def test_number_forms_of_yaml_1_1_only_are_read_as_text(text):
    """YAML 1.1 reads 1:30 as 90, 010 as 8, and 2001-01-01 as a date, which JSON lacks."""
    assert parse_yaml(text, "file") == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1e-3", 1e-3), ("3E4", 3e4), ("-2e+5", -2e5), ("1.", 1.0), (".5", 0.5), ("1.0e-3", 1e-3), ("+7", 7)),
        *(("0", 0), ("-0", 0), ("1_000", 1000), ("0.01", 0.01), ("00.5", 0.5), (".inf", float("inf")), ("0b11", 3)),
    ],
)
def test_numbers_are_read_in_common_notations(text, number):
    value = parse_yaml(f"[{text}]", "file")[0]
    assert value == number
    assert type(value) is type(number)


def test_anchors_and_merged_mappings_are_read():
    text = "a: &x {lr: 1, steps: 2}\nb: &y\n  <<: *x\n  lr: 3\nc: {<<: *y, lr: 4}\nd: *x\n"
    x = {"lr": 1, "steps": 2}
    assert parse_yaml(text, "file") == {"a": x, "b": {"lr": 3, "steps": 2}, "c": {"lr": 4, "steps": 2}, "d": x}


def test_a_key_is_text_as_it_is_written():
    """A study names its sizes and schemes by keys; 10 and 1e3 would else be numbers, and no a truth value."""
    text = "10: &x {1e3: 1, 0.10: 2}\nno: {<<: *x, ~: 10}\n"
    assert parse_yaml(text, "file") == {"10": {"1e3": 1, "0.10": 2}, "no": {"1e3": 1, "0.10": 2, "~": 10}}


def test_missing_files_and_files_that_are_not_text_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    for name in ("bytes", "none", "."):
        for read in (read_text, read_json, read_yaml):
            assert refused(read, tmp_path / name).startswith(f"{tmp_path / name} cannot be read as ")


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: {b: 1, c: 2, b: 3}", "- {x: 1, x: 1}"])
def test_a_duplicate_key_is_refused(text):
    """Otherwise one of the two values would be lost silently."""
    with pytest.raises(InputError, match="twice in a mapping"):
        parse_yaml(text, "mine.yaml")


def aliases(item, depth, *, merged=False):
    """Return a document of `depth` lines, each of which holds the line before it nine times."""
    lines = [f"a0: &a0 {item}"]
    for level in range(1, depth):
        nine = f"[{', '.join([f'*a{level - 1}'] * 9)}]"
        lines.append(f"a{level}: &a{level} {f'{{<<: {nine}, b{level}: 1}}' if merged else nine}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        *(aliases("[x, x]", 9), aliases("{x: 1}", 9, merged=True), aliases(f"'{'x' * 1000}'", 5)),
        *("a: &a [*a]", "a: &a {b: [*a]}", "&a [&b [*a], *b]"),
        "\n".join(["a0: &a0 []", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 2000))]),
        *(f"0x{'f' * 5000}", f"!!int '0x{'f' * 5000}'", f"- {'x' * 2**20}"),
        *("!!set {a}", "!!binary aGk=", "!!omap [a: 1]", "!!pairs [a: 1]", "!!timestamp 2001-01-01"),
    ],
    ids=range(15),
)
def test_yaml_that_expands_without_bound_is_refused(text):
    assert refused(parse_yaml, text, "some/file").startswith("some/file must be YAML, got: ")


def test_a_mapping_of_many_keys_is_read_once():
    """It takes one pass over the keys, not one for each."""
    text = "\n".join(f"k{number}: 1" for number in range(20_000))
    assert len(parse_yaml(text, "file")) == 20_000
    assert "the key k0 " in refused(parse_yaml, f"{text}\nk0: 2", "file")


def test_documents_nested_too_deep_are_refused():
    deep = "[" * 101 + "]" * 101
    assert "levels deep" in refused(parse_json, deep, "file")
    assert "levels" in refused(parse_yaml, deep, "file")
    assert parse_json(deep[1:-1], "file") == parse_yaml(deep[1:-1], "file")
    assert len(parse_json(f"[{'[1], ' * 1000}1]", "file")) == 1001


def test_a_text_above_the_size_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "LARGEST", 10)
    (tmp_path / "file").write_text(" " * 9 + "12")
    assert "at most 10 characters" in refused(read_json, tmp_path / "file")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_in_place_of_a_file_is_refused_before_it_is_opened(tmp_path):
    """Nobody writes into it, so opening it would wait for ever."""
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for read in (read_text, read_json, read_yaml, read_lines):
        assert "a pipe or a device" in refused(read, pipe)
    assert "a pipe or a device" in refused(expect_regular, tmp_path)
    with pytest.raises(OSError, match="a pipe or a device"):
        file_sha256(pipe)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_among_the_chat_templates_of_a_model_is_refused(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates" / "tool.jinja")
    assert "a pipe or a device" in refused(expect_regular, tmp_path)


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "folder/pipe", 3, None])
def test_an_index_of_weights_names_only_files_of_its_folder(name, tmp_path):
    """Transformers would open them wherever they are, also a pipe, and wait for ever."""
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    expect_regular(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": name}}))
    assert "in this folder" in refused(expect_regular, tmp_path)


@pytest.mark.parametrize("content", ["[1]", "{}", '{"weight_map": ["x"]}'])
def test_an_index_of_weights_must_be_a_mapping(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "a mapping" in refused(expect_regular, tmp_path)


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path):
    """Editors on Windows write one."""
    path = tmp_path / "file"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n')
    assert read_json(path) == read_yaml(path) == {"a": 1}


def test_a_user_may_name_a_pipe(tmp_path):
    reader, writer = os.pipe()
    os.write(writer, b"text")
    os.close(writer)
    if os.path.exists(f"/dev/fd/{reader}"):
        assert read_text(f"/dev/fd/{reader}", pipe=True) == "text"
    os.close(reader)


@pytest.mark.parametrize("name", ["../x", "/x", "x/y", "..", ".", "", "x\0", "..\\x", 3, None, ["x"]])
def test_a_name_that_leaves_the_folder_is_refused(name, tmp_path):
    assert "in this folder" in refused(inside, tmp_path, name)
    assert inside(tmp_path, "x..y") == tmp_path / "x..y"


def test_a_line_above_the_length_limit_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"a": 1}\n')
        file.truncate(2**36)  # zeros that take no room on the disk
    for read in (read_lines, JsonLines):
        assert "in line 2" in refused(read, path)
