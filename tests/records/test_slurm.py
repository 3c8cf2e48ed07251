"""The executor for Slurm, with submitit's processes of this machine in place of jobs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residua.commands.pool import Pool
from residua.errors import InputError, RunError
from residua.records import jsonlines, slurm
from residua.records.jobs import Job, open_runs, run_jobs
from residua.records.slurm import Slurm
from support.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.skipif(os.name == "nt", reason="Slurm has no Windows")]
LOCAL = Slurm({"time": 5}, cluster="local")


def square(number, *, place, report):
    report(1)
    return {"key": number, "square": number**2, "third": number / 3, "lost": float("nan")}


def refuses(error, *, place, report):
    raise error


def counts(signals, *, place, report):
    """Count to 3 in a file. At the end of count n the process sends itself the n-th of `signals`."""
    counted = int(place.read_text()) if place.exists() else 0
    report(counted)
    while counted < 3:
        counted += 1
        place.write_text(str(counted))
        if counted <= len(signals):
            os.kill(os.getpid(), signals[counted - 1])
            time.sleep(0.1)
    return {"key": "count", "counted": counted}


def dies(*, place, report):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(path, *, place, report):
    while not path.exists():
        time.sleep(0.05)
    return {"key": "waits"}


START = """
import sys
from pathlib import Path
from residua.records import folder, slurm
from tests.records.test_slurm import LOCAL, Job, run, waits
slurm.POLL_SECONDS, folder.LEASE_SECONDS = 0.2, 3.0
try:
    run(Path(sys.argv[1]), [Job("waits", waits, (Path(sys.argv[2]),))], executor=LOCAL)
except ValueError as error:
    sys.exit(f"refused: {error}")
"""
ELSEWHERE = "import filelock, fcntl, socket; fcntl.flock, socket.gethostname = lambda *_: None, lambda: 'elsewhere'\n"


def start(out, path, before=""):
    """Start a process that makes the run `waits`."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", before + START, str(out), str(path)]
    with (out.parent / f"{bool(before)}.err").open("w") as file:  # a job would keep a pipe open
        return subprocess.Popen(command, env=environment, stderr=file)


def jobs_in(out):
    return [row["job"] for row in jsonlines.read(out / "slurm" / "jobs.jsonl") if row["job"]]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the jobs import this module
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 0.5)


def run(folder, jobs, **options):
    with open_runs(folder, {}) as made:
        return run_jobs(jobs, made, progress=False, **options)


def test_the_records_are_those_of_the_processes_of_this_machine(tmp_path):
    def plan(finished):
        return [Job(n, square, (n,)) for n in ((1, 2, 3) if 1 in finished else (1,))]

    assert run(tmp_path / "jobs", plan, executor=LOCAL) == run(tmp_path / "here", plan)
    files = [tmp_path / name / "records.jsonl" for name in ("jobs", "here")]
    assert sorted(files[0].read_text().splitlines()) == sorted(files[1].read_text().splitlines())
    assert not list((tmp_path / "jobs" / "slurm").glob("[123].json"))


def test_an_error_of_a_run_stands_in_the_log_that_is_named(tmp_path):
    with pytest.raises(RunError, match=r"the job of a ended as FINISHED; see .*_log\.err") as failure:
        run(tmp_path / "out", [Job("a", refuses, (InputError("wrong key"),))], executor=LOCAL)
    assert "wrong key" in Path(str(failure.value).rpartition(" ")[2]).read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGUSR2], ids=["killed", "preempted"])
def test_a_run_goes_on_when_its_job_is_killed_or_preempted(number, tmp_path):
    found = run(tmp_path / "out", [Job("count", counts, ([number],))], executor=LOCAL)
    assert found == [{"key": "count", "counted": 3}]
    # A preempted job is requeued under its number.
    assert len(jobs_in(tmp_path / "out")) == (2 if number == signal.SIGKILL else 1)


def test_a_run_that_is_always_killed_is_no_longer_repeated(tmp_path):
    with pytest.raises(RunError, match=r"the job of dies ended as FINISHED; see .*_log\.err"):
        run(tmp_path / "out", [Job("dies", dies, ())], executor=LOCAL)
    assert len(jobs_in(tmp_path / "out")) == slurm.KILLS


def test_of_two_starts_on_two_machines_one_makes_the_runs(tmp_path):
    out = tmp_path / "out"
    starts = [start(out, tmp_path / "go"), start(out, tmp_path / "go", ELSEWHERE)]
    wait_for(lambda: any(one.poll() is not None for one in starts))
    assert any("refused" in file.read_text() for file in tmp_path.glob("*.err"))
    wait_for(lambda: jobs_in(out))
    (tmp_path / "go").touch()
    assert sorted(one.wait(timeout=200) for one in starts) == [0, 1]
    assert len(jobs_in(out)) == len(jsonlines.read(out / "records.jsonl")) == 1


def test_the_jobs_of_a_killed_command_go_on_and_the_same_command_takes_them_up(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 60.0)
    out = tmp_path / "out"
    first = start(out, tmp_path / "go")
    wait_for(lambda: jobs_in(out))
    first.kill()
    first.wait()
    (tmp_path / "go").touch()
    assert run(out, [Job("waits", waits, (tmp_path / "go",))], executor=LOCAL) == [{"key": "waits"}]
    assert len(jobs_in(out)) == 1


def test_slurm_gets_the_options_and_a_cancelled_job_ends_and_cancels_all(tmp_path, monkeypatch):
    """With commands of Slurm that only say what they were asked."""
    commands = {
        "srun": "",
        "sbatch": f'cat "$1" > {tmp_path}/sbatch.log; echo Submitted batch job 12',
        "sacct": 'echo "JobID|State|NodeList"; echo "12_0|CANCELLED by 5|n"; echo "12_1|SUSPENDED|n"',
        "scancel": f'echo "$@" >> {tmp_path}/scancel.log',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = ("time=60", "partition=gpu", "exclusive=true", "mem=16G", "setup=[module load x]")
    executor = Pool(executor="slurm", slurm=options).executor_of_jobs()
    with pytest.raises(RunError, match=r"the job of 1 ended as CANCELLED by 5; see .*12_0_0_log\.err"):
        run(tmp_path / "out", [Job(n, square, (n,)) for n in (1, 2)], executor=executor)
    script = (tmp_path / "sbatch.log").read_text().splitlines()
    assert {"--time=60", "--partition=gpu", "--exclusive", "--mem=16G", "--array=0-1%2"} <= {
        line.removeprefix("#SBATCH ") for line in script
    }
    assert "module load x" in script
    assert (tmp_path / "scancel.log").read_text().split() == ["12_0", "12_1"]
