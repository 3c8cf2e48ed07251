"""Records of geometry runs in a folder that somebody sent: a wrong field is one line, before anything is drawn."""

import json

import pytest

from residua.commands.cli import main
from residua.errors import InputError, types_of
from residua.lab.geometry.forms import RunRecord, expect_runs
from residua.lab.geometry.pictures import draw
from residua.lab.geometry.report import write_tables
from support.pages import EXPERIMENTS

FOLDERS = sorted(path.parent for path in EXPERIMENTS.glob("geometry/*/records.jsonl"))
WRONG = (
    "x",
    -1,
    1e39,
    float("nan"),
    [1],
    [[0, "x"]],
    [[1, 1], [0, 1]],
    [[0]],
    {"a": []},
    {"a": [[0]]},
    {"a": {}},
    None,
)


def records(folder):
    return list(map(json.loads, (folder / "records.jsonl").read_text(encoding="utf-8").splitlines()))


@pytest.fixture(scope="module")
def record():
    """A record with all fields: of a model that is not causal, with the scores of a reflection too."""
    rows = records(EXPERIMENTS / "geometry/quick")
    found = next(row for row in rows if (row["task"], row["model"]) == ("gyroscope", "jpmhc"))
    return {"cosine": 0.5, "cosines": [[1, 0.5]], "beta": 1.0, "gamma": 0.5, "gates": {"beta": [[1, 1.0]]}, **found}


def refused(row, path):
    try:
        expect_runs([row], path)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_the_records_of_this_repository_fit(folder):
    expect_runs(records(folder), folder / "records.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", types_of(RunRecord))
def test_a_field_is_refused_by_its_name_or_can_be_shown(record, name, tmp_path):
    messages = []
    for value in WRONG:
        row = {**record, "online_by_position": [[0, 1.0, 1.0]], name: value}
        if error := refused(row, tmp_path / "records.jsonl"):
            messages.append(error)
        else:
            write_tables([row], tmp_path)
            draw([row], tmp_path)
    assert len(messages) >= len(WRONG) - 4
    assert all(name in message.removeprefix(str(tmp_path)) and "\n" not in message for message in messages)


@pytest.mark.parametrize("missing", sorted(RunRecord.__required_keys__))
def test_a_record_without_a_field_that_all_have_is_refused(record, missing, tmp_path):
    row = {name: value for name, value in record.items() if name != missing}
    with pytest.raises(InputError, match=f"records of runs, each with .*{missing}"):
        expect_runs([row], tmp_path)


def test_the_command_refuses_a_folder_with_a_wrong_record_and_leaves_it(capsys, tmp_path):
    argv = ["study", "geometry", "reflection", "--models", "linear", "--seeds", "1", "--steps", "1", "--processes", "1"]
    assert main([*argv, "--out", str(tmp_path)]) == 0
    made = tmp_path / "records.jsonl"
    made.write_text(json.dumps(json.loads(made.read_text()) | {"curve": [[0]]}) + "\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert main([*argv, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert (
        "curve of 'reflection+linear+500+seed1' must be a list of [step, number or null], by step, got [[0]]" in error
    )
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before
