import json
import math
import os

import pytest

from residua.errors import InputError
from residua.lab.records import jsonlines
from residua.lab.records.jsonlines import JsonLines, finite, read_metrics
from support.full_disk import room


@pytest.mark.parametrize(
    "torn", ["", '{"step": 3, "lo', "{", "\0\0\0", '{"name": "\\ud8'], ids=["none", "cut", "brace", "zeros", "escape"]
)
def test_a_torn_last_line_is_left_out(torn, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn)
    assert jsonlines.read(path) == [{"step": 1}, {"step": 2}]


def test_a_complete_last_line_without_a_newline_counts_and_is_not_joined_with_the_next(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"step":  2}')
    with JsonLines(path) as lines:
        lines.write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step":  2}\n{"step": 3}\n'


def test_a_row_that_does_not_fit_on_the_disk_leaves_no_part_of_itself(tmp_path):
    path = tmp_path / "rows.jsonl"
    with JsonLines(path) as lines:
        lines.write({"step": 1})
        with room(30), pytest.raises(OSError, match="File too large") as failure:
            lines.write({"text": 30 * "x"})
        assert failure.value.filename == str(path)
        lines.write({"step": 2})
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    ("content", "number"),
    [
        (b'{"a": 1}\n{"b" 2}\n{"c": 3}\n', 2),
        (b'{"a": 1}\n{"b" 2}\n', 2),  # a line with its newline was not torn
        (b"[1]\n", 1),
        (b"3", 1),
        (b"\n{}\n", 1),
        (b"text of somebody", 1),
        (b'{"a": "\xff"}\n', 1),
        (b"9" * 5000 + b"\n", 1),
        (b'{"a": 1}\r{"b": 2}\r', 1),  # not a torn line, although no newline ends it
    ],
    ids=["middle", "last", "list", "number", "empty", "text", "bytes", "digits", "returns"],
)
def test_damage_gives_a_one_line_error_and_changes_nothing(content, number, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    for use in (jsonlines.read, JsonLines):
        with pytest.raises(InputError, match=f"must .* in line {number}, got") as error:
            use(path)
        assert "\n" not in str(error.value)
    assert path.read_bytes() == content


def test_a_missing_file_has_no_rows_and_a_folder_is_refused(tmp_path):
    assert jsonlines.read(tmp_path / "none") == []
    with pytest.raises(InputError, match="Is a directory"):
        jsonlines.read(tmp_path)
    with pytest.raises(InputError, match=r"cannot be used as a file .*: Is a directory"):
        JsonLines(tmp_path)


def test_numbers_that_are_not_finite_become_null(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5, 2), "e": "x"}
    with JsonLines(path) as lines:
        lines.write(row)
        lines.sync()
    assert jsonlines.read(path) == [finite(row)] == [{"a": None, "b": [None, {"c": None}], "d": [1.5, 2], "e": "x"}]
    json.dumps(finite(row), allow_nan=False)


def test_opening_drops_rows_that_are_not_kept_and_leaves_the_others_unchanged(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step":1}\n{"step": 2, "ü": NaN}\n{"step": 3}\n{"st')
    with JsonLines(path, keep=lambda row: row["step"] <= 2) as lines:
        assert [row["step"] for row in lines.rows] == [1, 2]
        lines.write({"step": 3})
    assert path.read_text() == '{"step":1}\n{"step": 2, "ü": NaN}\n{"step": 3}\n'
    before = path.stat().st_ino
    with JsonLines(path):
        pass
    assert path.stat().st_ino == before, "a whole file is not written again"


def test_appending_leaves_the_other_links_of_a_file_unchanged(tmp_path):
    path, other = tmp_path / "rows.jsonl", tmp_path / "copy.jsonl"
    path.write_text('{"step": 1}\n')
    other.hardlink_to(path)
    with JsonLines(path) as lines:
        lines.write({"step": 2})
        lines.sync()
    assert other.read_text() == '{"step": 1}\n'
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.mark.parametrize(
    "row",
    [
        *({"step": step} for step in ("1", 1.5, None, True, 10**400)),
        {},
        *({"step": 1, "loss": x} for x in ("1", [1], {}, True, -1e200)),
    ],
    ids=str,
)
def test_rows_of_a_run_must_be_numbers(row, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": None, "lr": 1e-3}) + "\n")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl: (step|loss) must be"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_rows_of_a_run_follow_each_other(tmp_path):
    """Otherwise the last row would not be the end of the run, and curves could not be interpolated."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 2, "val_loss": 3}\n{"step": 1, "val_loss": 4}\n')
    with pytest.raises(InputError, match=r"metrics\.jsonl: step must be at least 2, that of the row before, got 1"):
        read_metrics(tmp_path / "metrics.jsonl")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_pipe_is_refused_without_waiting_for_a_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe cannot be used as a file"):
        JsonLines(tmp_path / "pipe")


def test_a_perplexity_that_overflows_is_read_as_null_and_any_other_number_is_refused(tmp_path):
    """Earlier versions wrote it for a loss above 88 nats, as in a sweep with a rate that is too high."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 4, "val_loss": 98.6, "perplexity": 6.33e+42, "further_perplexity": 1e39}\n')
    assert read_metrics(path) == [{"step": 4, "val_loss": 98.6, "perplexity": None, "further_perplexity": None}]
    path.write_text('{"step": 4, "val_loss": 1e39}\n')
    with pytest.raises(InputError, match="val_loss must be below 2"):
        read_metrics(path)
