"""Maintainers' scripts: their records say what ran."""

import subprocess
from types import SimpleNamespace

import pytest

from support.pages import TOOLS, script


def test_an_engine_without_tests_is_refused_before_pytest_runs(monkeypatch, capsys):
    monkeypatch.delattr(subprocess, "run")
    with pytest.raises(SystemExit, match="2"):
        script("engine_tests", TOOLS).main(["torchtitn"])
    assert "torchtitn" in capsys.readouterr().err


def test_no_record_is_made_if_no_test_of_an_engine_ran(monkeypatch, tmp_path):
    engine_tests = script("engine_tests", TOOLS)
    (tmp_path / "experiments").mkdir()
    monkeypatch.setattr(engine_tests, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=4))
    assert engine_tests.main(["vllm"]) == 4
    assert not list((tmp_path / "experiments").iterdir())


def test_the_tests_of_both_calls_of_pytest_in_a_lane_are_counted(monkeypatch):
    printed = "3 passed, 1 skipped in 2s\n2 passed in 1s\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0, stdout=printed))
    counts = script("house", TOOLS).lane("nightly")
    assert (counts["passed"], counts["skipped"]) == (5, 1)


def test_the_table_of_a_lane_names_the_python_of_its_environment(monkeypatch, tmp_path):
    versions = script("versions", TOOLS)
    (tmp_path / "python").write_text("#!/bin/sh\necho Python 3.99.1\n")
    (tmp_path / "python").chmod(0o755)
    lane = SimpleNamespace(
        python=tmp_path / "python",
        resolve=lambda *_, **__: "torch==2.13.0  # via residua (pyproject.toml)\n",
        install=lambda pins: None,
        test=lambda arguments: versions.Outcome(0, 1, []),
    )
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "Lane", lambda *_: lane)
    assert versions.compare(None, "newest", None, []) == 0
    assert "\nPython 3.99.1: 1 tests" in (tmp_path / "runs/versions/newest.md").read_text(encoding="utf-8")
