"""Foreign files: plain data is read, everything else is one line that names the file."""

import pytest

from residua.errors import InputError
from residua.records.reading import parse_json, parse_yaml, read_json, read_text, read_yaml


def refused(read, *arguments):
    with pytest.raises(InputError) as error:
        read(*arguments)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


@pytest.mark.parametrize("text", ["", "{", "nan", "{'a': 1}"])
def test_refused_json(text):
    assert refused(parse_json, text, "some/file").startswith("some/file must be JSON, got: ")


def test_plain_json():
    text = '{"a": [1, -2.5, 18446744073709551615, null, true, "\\ud83d\\ude00"], "b": {"c": NaN}}'
    value = parse_json(text, "file")
    assert value["a"] == [1, -2.5, 2**64 - 1, None, True, "\U0001f600"]
    assert value["b"]["c"] != value["b"]["c"]


@pytest.mark.parametrize(
    "text",
    [
        '!!python/object/apply:os.system ["touch ran"]',
        "2001-99-99",
        "? [a]\n: b",
        "a: b: c",
        "a: 1\n---\nb: 2",
    ],
)
def test_refused_yaml(text):
    assert refused(parse_yaml, text, "some/file").startswith("some/file must be YAML, got: ")


def test_plain_yaml():
    text = "a: 3e-4\nb: [1, 0x1f, -7, 1_000]\nc: {d: null, e: 'x'}\nf: true\ng: 1.5e3\n'h': |\n  two\n  lines\n"
    assert parse_yaml(text, "file") == {
        "a": 3e-4, "b": [1, 31, -7, 1000], "c": {"d": None, "e": "x"}, "f": True, "g": 1500.0, "h": "two\nlines\n"
    }  # fmt: skip


@pytest.mark.parametrize("text", ["1:30", "1:30:00", "1:30.5", "-1:30", "010", "0o10"])
def test_what_another_version_of_yaml_takes_for_a_number_is_text(text):
    """YAML 1.1 reads 1:30 as 90 and 010 as 8."""
    assert parse_yaml(text, "file") == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("1e-3", 1e-3), ("3E4", 3e4), ("-2e+5", -2e5), ("1.", 1.0), (".5", 0.5), ("1.0e-3", 1e-3), ("+7", 7)),
        *(("0", 0), ("-0", 0), ("1_000", 1000), ("0.01", 0.01), ("00.5", 0.5), (".inf", float("inf")), ("0b11", 3)),
    ],
)
def test_numbers_as_people_write_them(text, number):
    value = parse_yaml(f"[{text}]", "file")[0]
    assert value == number
    assert type(value) is type(number)


def test_anchors_and_merged_mappings():
    text = "a: &x {lr: 1, steps: 2}\nb: &y\n  <<: *x\n  lr: 3\nc: {<<: *y, lr: 4}\nd: *x\n"
    x = {"lr": 1, "steps": 2}
    assert parse_yaml(text, "file") == {"a": x, "b": {"lr": 3, "steps": 2}, "c": {"lr": 4, "steps": 2}, "d": x}


def test_files_that_are_not_there_or_no_text(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}")
    for name in ("bytes", "none", "."):
        for read in (read_text, read_json, read_yaml):
            assert refused(read, tmp_path / name).startswith(f"{tmp_path / name} must be ")


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a: {b: 1, c: 2, b: 3}", "- {x: 1, x: 1}"])
def test_a_key_that_stands_twice_is_refused(text):
    """One of the two values would be lost silently."""
    with pytest.raises(InputError, match="twice in a mapping"):
        parse_yaml(text, "mine.yaml")
