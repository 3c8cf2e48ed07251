"""The executor for Slurm, with submitit's processes of this machine in place of jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residua.commands.pool import Pool
from residua.errors import InputError, RunError
from residua.lab.jobs import slurm
from residua.lab.jobs.pool import Job, open_runs, run_jobs
from residua.lab.jobs.slurm import Slurm
from residua.lab.records import jsonlines
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
from residua.lab.records import folder, slurm
from tests.lab.jobs.test_slurm import LOCAL, Job, run, waits
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


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Commands of Slurm that only say what they were asked."""
    commands = {
        "srun": "",
        "sbatch": f'cat "$1" > {tmp_path}/sbatch.log; echo Submitted batch job 12',
        "sacct": 'echo "JobID|State|NodeList"; echo "12_0|CANCELLED by 5|n"; echo "12_1|SUSPENDED|n"',
        "scancel": f'echo "$@" >> {tmp_path}/scancel.log',
        "scontrol": f'[ "$2" = config ] && echo "ClusterName             = here" || cat {tmp_path}/jobs/"$3"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return Pool(executor="slurm", slurm=("time=60",)).executor_of_jobs()


def begun(out, *rows, jobs=(), prints_into=None):
    """Write a folder whose jobs.jsonl has `rows`. Let Slurm have `jobs`, which print into a folder, `out` for None."""
    with open_runs(out, {}):
        (out / "slurm").mkdir()
    (out / "slurm" / "jobs.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for number in jobs:
        text = f"JobId={number} JobName=residua\n   StdOut={prints_into or out}/slurm/%A_%a_0_log.out\n"
        (out.parent / "jobs" / number).write_text(text)


@pytest.mark.parametrize(
    "row",
    [
        *({"run": "1", "job": job} for job in ("--me", "-u root", "12 13", "12_0,13", "12_", "", "１２", 12, [12])),
        *({"run": "1"}, {"job": "12"}, {"run": ["1"], "job": "12"}, {"run": "1", "job": "12", "cluster": 1}),
    ],
    ids=str,
)
def test_what_a_folder_has_for_a_job_number_does_not_reach_slurm(row, cluster, tmp_path):
    begun(tmp_path / "out", row)
    with pytest.raises(InputError, match=r"jobs\.jsonl must be a run and the number"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "scancel.log").exists()


@pytest.mark.parametrize(("elsewhere", "name"), [("", "there"), ("original", "here"), ("original", None)])
def test_a_copied_folder_neither_waits_for_nor_cancels_the_jobs_of_another(elsewhere, name, cluster, tmp_path):
    out, row = tmp_path / "out", {"run": "1", "job": "11"}
    begun(out, row | ({"cluster": name} if name else {}), jobs=["11"], prints_into=elsewhere and tmp_path / elsewhere)
    (tmp_path / "sacct").write_text('#!/bin/sh\necho "JobID|State"; echo "12|CANCELLED"; echo "11|RUNNING"\n')
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(out, [Job("1", square, (1,))], executor=cluster)
    assert (tmp_path / "scancel.log").read_text().split() == ["12"]
    assert jsonlines.read(out / "slurm" / "jobs.jsonl")[1] == {"run": "1", "job": "12", "cluster": "here"}


@pytest.mark.parametrize("row", [{}, {"cluster": "here"}], ids=["of an earlier version", "of this one"])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_job_of_the_folder_is_taken_up_and_forgotten_only_if_slurm_cancelled_it(row, refuses, cluster, tmp_path):
    out = tmp_path / "out"
    begun(out, {"run": "1", "job": "12_0"} | row, jobs=["12"])
    if refuses:
        (tmp_path / "scancel").write_text("#!/bin/sh\necho Socket timed out >&2\nexit 1\n")
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED by 5"):
        run(out, [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "sbatch.log").exists()
    assert len(jsonlines.read(out / "slurm" / "jobs.jsonl")) == (1 if refuses else 2)


def test_a_run_begins_no_second_time_while_slurm_does_not_say_if_its_job_runs(cluster, tmp_path):
    begun(tmp_path / "out", {"run": "1", "job": "12"})
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2\nexit 1\n")
    with pytest.raises(RunError, match=r"12 .* Unable to contact slurm controller"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "sbatch.log").exists()


def test_the_record_of_a_job_that_ended_long_ago_is_taken(cluster, tmp_path):
    out = tmp_path / "out"
    begun(out, {"run": "1", "job": "12"})
    (out / "slurm" / "1.json").write_text('{"key": "1", "square": 1}')
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho slurm_load_jobs error: Invalid job id specified >&2\nexit 1\n")
    assert run(out, [Job("1", square, (1,))], executor=cluster) == [{"key": "1", "square": 1}]


def test_slurm_gets_the_options_and_a_cancelled_job_ends_and_cancels_all(cluster, tmp_path):
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
