import json
from unittest.mock import Mock

import pytest

from residua.commands import geometry
from residua.commands.cli import main
from residua.lab.geometry.models import MODELS


def output(capsys, argv):
    """What a command that must succeed prints."""
    capsys.readouterr()
    status = main(["study", "geometry", *map(str, argv)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


@pytest.mark.slow
def test_reflection_writes_records_tables_and_a_picture(capsys, tmp_path):
    argv = ["reflection", "--models", "linear", "householder", "--seeds", 1, 2, "--steps", 20, "--processes", 1]
    text = output(capsys, [*argv, "--out", tmp_path / "out"])
    assert "1.995" in text  # published
    assert "one linear map" in text
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"records.jsonl", "settings.json", "tables.md", "tables.json", "reflection.png"} <= names
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 4
    printed = json.loads(output(capsys, [*argv, "--out", tmp_path / "out", "--json"]))
    assert printed == json.loads((tmp_path / "out" / "tables.json").read_text())
    assert main(["study", "geometry", *map(str, argv), "--steps", "30", "--out", str(tmp_path / "out")]) == 2
    assert "steps was 20, is 30" in capsys.readouterr().err


@pytest.mark.slow
def test_each_number_of_vectors_has_its_own_row(capsys, tmp_path):
    argv = ["reflection", "--models", "linear", "--seeds", 1, "--steps", 20, "--processes", 1, "--vectors", 10, 500]
    output(capsys, [*argv, "--out", tmp_path])
    found = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert {row["num_train"]: row["label"] for row in found} == {
        10: "one linear map, 10 vectors",
        500: "one linear map",
    }
    assert found[0]["loss"] != found[1]["loss"]


@pytest.mark.slow
def test_quick_writes_records_tables_and_pictures(capsys, tmp_path):
    argv = ["quick", "--models", "zero-layer", "--seeds", 1, "--steps", 110, "--processes", 1, "--device", "cpu"]
    text = output(capsys, [*argv, "--tasks", "gyroscope", "--out", tmp_path / "out"])
    assert all(word in text for word in ("reference", "zero-layer", "published"))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"records.jsonl", "tables.md", "tables.json", "loss.png", "positions.png"} <= names
    # A second task joins the first in the tables.
    text = output(capsys, [*argv, "--tasks", "stability", "--out", tmp_path / "out"])
    assert "gyroscope:" in text
    assert "stability:" in text


def test_an_interruption_prints_how_to_resume(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("residua.lab.geometry.experiment.run_jobs", Mock(side_effect=KeyboardInterrupt))
    assert main(["study", "geometry", "reflection", "--out", str(tmp_path / "out")]) == 130
    assert "the same command resumes there" in capsys.readouterr().err


def test_full_sizes_begin_with_the_first_seed_of_every_model(tmp_path, monkeypatch):
    """So a run that is cut short leaves whole tables of fewer seeds, with the most wanted models first."""
    asked = Mock(return_value=({}, []))
    monkeypatch.setattr("residua.lab.geometry.experiment.run_experiment", asked)
    geometry.quick(full=True, device="cpu", out=str(tmp_path))
    jobs = sorted(asked.call_args.args[2], key=lambda job: job.order)
    names = [job.name.split("+") for job in jobs]
    seeds = [seed for *_, seed in names]
    assert seeds == [seed for seed in ("seed42", "seed123", "seed456") for _ in range(len(jobs) // 3)]
    assert list(dict.fromkeys(model for _, model, _ in names)) == list(geometry.FULL_MODELS)
    assert {task for task, *_ in names} == {"gyroscope", "stability", "near-pi", "near-pi-multi"}
    assert asked.call_args.args[1]["steps"] == 2000


def test_the_models_left_out_of_quick_runs_exist():
    assert {*geometry.NOT_QUICK, *geometry.FULL_MODELS} <= set(MODELS)
