"""The script that makes missing runs: it begins none that would not end in time, and commits the others."""

import json
import time
from types import SimpleNamespace

import pytest

from residua.lab.study import verify
from support.pages import RESBENCH, script


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setattr(verify, "circumstances_here", lambda device: {"device": "here"})
    return script("runs", RESBENCH)


@pytest.fixture
def folder(tmp_path):
    """The folder of a study whose runs took 3 to 9 seconds a step."""
    made = [("hc", "1M", 3, "here"), ("hc", "1M", 4, "here"), ("hc", "3M", 90, "here"), ("mhc", "1M", 9, "elsewhere")]
    rows = [
        {"scheme": scheme, "size": size, "steps": 10, "seconds": 10 * seconds, "facts": {"device": device}}
        for scheme, size, seconds, device in (*made, ("mudd", "1M", 6, "here"))
    ]
    (tmp_path / "a").mkdir()
    diverged = {"scheme": "hc", "size": "1M", "steps": 10, "val_loss": None}
    (tmp_path / "a" / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, diverged]))
    return tmp_path


def run(scheme, size="1M", steps=5):
    train = SimpleNamespace(steps=steps, seed=1, lr=0.008, device="auto")
    return SimpleNamespace(scheme=scheme, size=size, kind="report", config=SimpleNamespace(train=train))


@pytest.mark.parametrize(("scheme", "size", "seconds"), [("hc", "1M", 20), ("mhc", "1M", 30), ("hc", "10M", None)])
def test_a_run_is_expected_to_take_as_long_as_the_slowest_of_its_scheme_or_size(runs, folder, scheme, size, seconds):
    assert runs.seconds(run(scheme, size), folder) == seconds


def test_no_run_starts_that_would_not_finish_in_time(runs, folder, monkeypatch):
    committed, finished = [], []
    monkeypatch.setattr(runs, "commit", lambda out, subject: committed.append(subject))
    waiting = [
        SimpleNamespace(name=scheme, key=scheme, arguments=(run(scheme),), function=lambda run, **_: run.scheme)
        for scheme in ("hc", "mhc")
    ]
    work = SimpleNamespace(
        next=lambda: waiting.pop(0) if waiting else None,
        records=SimpleNamespace(place=lambda key: folder),
        finished=lambda job, record: finished.append(record),
    )
    with pytest.raises(TimeoutError, match="mhc takes"):
        runs.until(time.monotonic() + 25, folder / "a")(work)
    assert finished == ["hc"]
    assert committed == ["Record hc of a: rate 0.008, seed 1"]


def test_outside_a_clone_git_says_why_in_one_line(runs, tmp_path, monkeypatch, capsys):
    (tmp_path / "resbench").mkdir()
    (tmp_path / "resbench" / "commit").write_text("a" * 40)
    monkeypatch.setattr(runs, "HERE", tmp_path / "resbench")
    monkeypatch.setattr("sys.argv", ["runs.py", "rates-1M"])
    assert runs.main() == 1
    assert "not a git repository" in capsys.readouterr().err
