"""The engine of sweeps. That kills and resumes change no number is tested where runs have numbers: tests/lab/study."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from residua.errors import InputError, RunError
from residua.lab.jobs.pool import Job, Records, open_runs, run_jobs
from residua.lab.records import jsonlines
from support.waiting import wait_for


def double(number, *, place, report):
    report(1)
    return {"number": number, "double": 2 * number}


def refuses(error, *, place, report):
    raise error


def leaves_state(*, place, report):
    place.mkdir()
    (place / "state").write_text("x")
    return {"place": place.name}


def endless(*, place, report):
    """Leaves the number of its process where its state would be, and never asks whether its parent listens."""
    place.with_suffix(".pid").write_text(str(os.getpid()))
    while True:
        time.sleep(0.01)


def dies(*, place, report):
    os._exit(3)


def number(row):
    return row["number"]


def with_key(job, record):
    return {"key": job.key, **record}


def chain(done):
    """Two numbers that are doubled until 20 is passed: eight runs."""
    chains = [1], [3]
    for numbers in chains:
        while numbers[-1] in done and done[numbers[-1]]["double"] < 20:
            numbers.append(done[numbers[-1]]["double"])
    return [Job(n, double, (n,), title=f"number {n}") for numbers in chains for n in numbers]


def test_records_are_returned_in_the_order_of_the_jobs_and_saved(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"number": 2, "double": "old"}\n')
    jobs = [Job(n, double, (n,), cost=n) for n in (1, 2, 3)]
    with Records(path, number) as records:
        found = run_jobs(jobs, records, progress=False)
    assert [row["double"] for row in found] == [2, "old", 6]
    assert {row["number"]: row["double"] for row in jsonlines.read(path)} == {1: 2, 2: "old", 3: 6}


def test_jobs_with_a_smaller_order_begin_first_and_then_the_longest(tmp_path):
    jobs = [Job(1, double, (1,), order=(1,)), Job(2, double, (2,), order=(0,)), Job(3, double, (3,), 5, order=(0,))]
    with Records(tmp_path / "records.jsonl", number) as records:
        run_jobs(jobs, records, progress=False)
    assert [row["number"] for row in jsonlines.read(tmp_path / "records.jsonl")] == [3, 2, 1]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.processes)])
def test_wanted_jobs_may_depend_on_finished_jobs(processes, tmp_path, request):
    """No run is made twice, and the last answer of the plan is returned."""
    if processes > 1:
        request.getfixturevalue("quick_pool")
    with Records(tmp_path / "records.jsonl", number) as records:
        found = run_jobs(chain, records, processes=processes, progress=False)
    assert [row["number"] for row in found] == [1, 2, 4, 8, 16, 3, 6, 12]
    assert len(jsonlines.read(tmp_path / "records.jsonl")) == 8


def test_progress_counts_the_runs_of_earlier_calls_and_those_that_may_come(tmp_path, capsys):
    """A study was stopped after two runs: they count as done, and the total does not change."""
    (tmp_path / "records.jsonl").write_text('{"number": 1, "double": 2}\n{"number": 3, "double": 6}\n')
    with Records(tmp_path / "records.jsonl", number) as records:
        run_jobs(chain, records, most=10)
    lines = [line.partition("  ")[0] for line in capsys.readouterr().err.splitlines() if "finished" in line]
    assert lines[0] == "3/10 runs at most, number 2 finished"
    assert lines[-1] == "8/8 runs, number 12 finished"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.processes)])
@pytest.mark.parametrize("error", [InputError("wrong key"), RunError("lost"), OSError(28, "disk full")], ids=repr)
def test_an_input_error_of_a_run_is_the_error_of_the_sweep(processes, error, tmp_path, request):
    if processes > 1:
        request.getfixturevalue("quick_pool")
    said = re.escape(str(error))
    with Records(tmp_path / "records.jsonl", lambda row: None) as records, pytest.raises(type(error), match=said):
        run_jobs(lambda finished: [Job("bad", refuses, (error,))], records, processes=processes, progress=False)


@pytest.mark.processes
def test_a_process_that_dies_is_reported_and_finished_runs_are_kept(tmp_path):
    jobs = [Job(1, double, (1,)), Job("bad", dies, ())]
    path = tmp_path / "records.jsonl"
    with Records(path, number) as records, pytest.raises(RunError, match=r"bad .*exit status 3"):
        run_jobs(lambda finished: jobs[: len(finished) + 1], records, processes=2, progress=False)
    assert jsonlines.read(path) == [{"number": 1, "double": 2}]


WORKERS = """
import sys
from tests.lab.jobs.test_pool import Job, endless, open_runs, run_jobs
with open_runs(sys.argv[1], {}) as made:
    run_jobs([Job(name, endless, ()) for name in ("a", "b", "c")], made, processes=2)
"""


def running(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see which processes run")
def test_workers_end_when_their_parent_is_killed(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WORKERS, str(tmp_path / "out")]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def workers():
        return [path.read_text() for path in (tmp_path / "out" / "runs").glob("*.pid")]

    wait_for(lambda: len(workers()) == 2 and all(workers()))
    assert all(running(worker) for worker in workers())
    process.kill()
    process.wait()
    wait_for(lambda: not any(running(worker) for worker in workers()))


def test_keys_may_be_tuples_and_the_last_record_of_a_key_counts(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"a": 1, "b": "x", "n": 1}\n{"a": 1, "b": "x", "n": 2}\n')
    with Records(path, lambda row: (row["a"], row["b"])) as records:
        assert records.finished == {(1, "x"): {"a": 1, "b": "x", "n": 2}}
        assert Job((1, "x"), double, ()).name == "1 x"


@pytest.mark.parametrize("keep", [False, True])
def test_the_state_of_a_finished_run_is_dropped_unless_it_is_wanted(keep, tmp_path):
    with open_runs(tmp_path / "out", {}, keep=keep) as made:
        (record,) = run_jobs([Job("a b/../c", leaves_state, ())], made, finish=with_key, progress=False)
        assert list((tmp_path / "out" / "runs").iterdir()) == ([made.place("a b/../c")] if keep else [])
    assert Path(record["place"]).name == record["place"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        ".lock", "records.jsonl", "runs", "settings.json",
    ]  # fmt: skip


def test_state_that_a_kill_left_of_a_finished_run_is_dropped(tmp_path):
    folder = tmp_path / "out"
    with open_runs(folder, {}) as made:
        run_jobs([Job("done", leaves_state, ())], made, finish=with_key, progress=False)
        for key in ("done", "under way"):
            made.place(key).mkdir()
    with open_runs(folder, {}) as made:
        assert [path.name for path in (folder / "runs").iterdir()] == [made.place("under way").name]


def test_different_keys_have_different_folders(tmp_path):
    with open_runs(tmp_path / "out", {}) as made:
        keys = ["a b", "a_b", "a/b", "x" * 300, "x" * 301, "ü", "..", "a:b"]
        places = [made.place(key) for key in keys]
    assert len(set(places)) == len(keys)
    assert all(place.parent == tmp_path / "out" / "runs" for place in places)
    assert all(len(place.name) < 120 and place.name not in ("..", ".") for place in places)


def test_a_record_with_an_empty_key_drops_no_state_of_others(tmp_path):
    with open_runs(tmp_path, {}):
        (tmp_path / "runs" / "unfinished").mkdir()
    (tmp_path / "records.jsonl").write_text('{"key": ""}\n')
    with open_runs(tmp_path, {}):
        assert (tmp_path / "runs" / "unfinished").is_dir()


def test_only_free_settings_may_change(tmp_path):
    with open_runs(tmp_path / "out", {"lr": 1, "device": "cpu"}):
        pass
    with open_runs(tmp_path / "out", {"lr": 1, "device": "cuda"}, free={"device"}):
        pass
    with pytest.raises(InputError, match="lr was 1, is 2"), open_runs(tmp_path / "out", {"lr": 2, "device": "cuda"}):
        pass


def test_records_without_their_settings_are_refused(tmp_path):
    (tmp_path / "records.jsonl").write_text('{"key": "a"}\n')
    with pytest.raises(InputError, match=r"no settings\.json beside them"), open_runs(tmp_path, {}):
        pass


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot limit the size of a file")
def test_a_result_that_cannot_be_written_is_reported_and_earlier_ones_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "records.jsonl"
    with Records(path, number) as records:
        run_jobs([Job(1, double, (1,))], records, progress=False)
        monkeypatch.setattr(records, "sync", Mock(side_effect=OSError(28, "No space left")))
        with pytest.raises(RunError, match=r"records\.jsonl: .*No space left"):
            run_jobs([Job(2, double, (2,))], records, progress=False)
        assert list(records.finished) == [1]
    assert jsonlines.read(path)[0] == {"number": 1, "double": 2}


@pytest.mark.parametrize("key", [[1], {}])
def test_a_record_whose_key_is_none_is_refused(key, tmp_path):
    with open_runs(tmp_path / "out", {}):
        pass
    (tmp_path / "out" / "records.jsonl").write_text(json.dumps({"key": key}) + "\n")
    with pytest.raises(InputError, match=r"records\.jsonl: key must be"), open_runs(tmp_path / "out", {}):
        pass
