"""The executor for Slurm, with submitit's processes of this machine in place of jobs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residua.commands.pool import PoolOptions
from residua.errors import InputError, RunError
from residua.lab.jobs import slurm
from residua.lab.jobs.pool import Job, open_runs, run_jobs
from residua.lab.jobs.slurm import Slurm
from residua.lab.records import jsonlines
from residua.lab.records.progress import say_once
from support.lanes import some
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
from residua.lab.jobs import slurm
from residua.lab.records import folder
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
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 0.2)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(slurm, "AWAY_SECONDS", 0.5)


def run(folder, jobs, **options):
    with open_runs(folder, {}) as made:
        return run_jobs(jobs, made, progress=False, **options)


def test_records_of_jobs_equal_those_of_local_processes(tmp_path):
    def plan(finished):
        return [Job(n, square, (n,)) for n in ((1, 2, 3) if 1 in finished else (1,))]

    assert run(tmp_path / "jobs", plan, executor=LOCAL) == run(tmp_path / "here", plan)
    files = [tmp_path / name / "records.jsonl" for name in ("jobs", "here")]
    assert sorted(files[0].read_text().splitlines()) == sorted(files[1].read_text().splitlines())
    assert not list((tmp_path / "jobs" / "slurm").glob("[123].json"))


@pytest.mark.nightly
def test_the_named_log_contains_the_error_of_a_run(tmp_path):
    with pytest.raises(RunError, match=r"the job of a ended as FINISHED; see .*_log\.err") as failure:
        run(tmp_path / "out", [Job("a", refuses, (InputError("wrong key"),))], executor=LOCAL)
    assert "wrong key" in Path(str(failure.value).rpartition(" ")[2]).read_text()


@pytest.mark.parametrize("number", some([signal.SIGKILL, signal.SIGUSR2], lambda number: number == signal.SIGUSR2))
def test_a_run_resumes_after_its_job_was_killed_or_preempted(number, tmp_path):
    found = run(tmp_path / "out", [Job("count", counts, ([number],))], executor=LOCAL)
    assert found == [{"key": "count", "counted": 3}]
    # A preempted job is requeued under its number.
    assert len(jobs_in(tmp_path / "out")) == (2 if number == signal.SIGKILL else 1)


@pytest.mark.nightly
def test_a_run_that_is_always_killed_is_no_longer_repeated(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "KILLS", 2)
    with pytest.raises(RunError, match=r"the job of dies ended as FINISHED; see .*_log\.err"):
        run(tmp_path / "out", [Job("dies", dies, ())], executor=LOCAL)
    assert len(jobs_in(tmp_path / "out")) == slurm.KILLS


def test_only_one_of_two_commands_on_two_machines_performs_the_runs(tmp_path):
    out = tmp_path / "out"
    starts = [start(out, tmp_path / "go"), start(out, tmp_path / "go", ELSEWHERE)]
    wait_for(lambda: any(one.poll() is not None for one in starts))
    assert any("refused" in file.read_text() for file in tmp_path.glob("*.err"))
    wait_for(lambda: jobs_in(out))
    (tmp_path / "go").touch()
    assert sorted(one.wait(timeout=200) for one in starts) == [0, 1]
    assert len(jobs_in(out)) == len(jsonlines.read(out / "records.jsonl")) == 1


def test_jobs_continue_after_their_command_is_killed_and_the_next_command_waits_for_them(tmp_path, monkeypatch):
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
    """Commands of Slurm that only write down their arguments."""
    commands = {
        "srun": "",
        "sbatch": f'cat "$1" > {tmp_path}/sbatch.log; echo Submitted batch job 12',
        "squeue": 'echo "12_0|CANCELLED|None|x"; echo "12_1|SUSPENDED|None|x"; echo "12|CANCELLED|None|x"',
        "sacct": "echo Slurm accounting storage is disabled >&2; exit 1",
        "scancel": f'echo "$@" >> {tmp_path}/scancel.log',
        "scontrol": f'[ "$2" = config ] && cat {tmp_path}/config || cat {tmp_path}/jobs/"$3"',
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "config").write_text("ClusterName             = here\nMaxArraySize            = 1001\n")
    (tmp_path / "jobs").mkdir()
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 0.02)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 0.1)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    return PoolOptions(executor="slurm", slurm=("time=60",)).executor_of_jobs()


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
def test_a_forged_job_number_does_not_reach_slurm(row, cluster, tmp_path):
    begun(tmp_path / "out", row)
    with pytest.raises(InputError, match=r"jobs\.jsonl must be "):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "scancel.log").exists()


@pytest.mark.parametrize(("elsewhere", "name"), [("", "there"), ("original", "here"), ("original", None)])
def test_a_copied_folder_neither_waits_for_nor_cancels_the_jobs_of_the_original(elsewhere, name, cluster, tmp_path):
    out, row = tmp_path / "out", {"run": "1", "job": "11"}
    begun(out, row | ({"cluster": name} if name else {}), jobs=["11"], prints_into=elsewhere and tmp_path / elsewhere)
    (tmp_path / "squeue").write_text('#!/bin/sh\necho "12|CANCELLED|None|x"; echo "11|RUNNING|None|x"\n')
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(out, [Job("1", square, (1,))], executor=cluster)
    assert (tmp_path / "scancel.log").read_text().split() == ["12"]
    assert jsonlines.read(out / "slurm" / "jobs.jsonl")[1] == {"run": "1", "job": "12", "cluster": "here"}


@pytest.mark.parametrize("row", [{}, {"cluster": "here"}], ids=["of an earlier version", "of this one"])
@pytest.mark.parametrize("refuses", [False, True])
def test_an_earlier_job_is_waited_for_and_leaves_the_log_only_if_slurm_cancelled_it(row, refuses, cluster, tmp_path):
    out = tmp_path / "out"
    begun(out, {"run": "1", "job": "12_0"} | row, jobs=["12"])
    if refuses:
        (tmp_path / "scancel").write_text("#!/bin/sh\necho Socket timed out >&2\nexit 1\n")
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(out, [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "sbatch.log").exists()
    assert len(jsonlines.read(out / "slurm" / "jobs.jsonl")) == (1 if refuses else 2)


def test_a_run_is_not_started_again_while_the_state_of_its_job_is_unknown(cluster, tmp_path):
    begun(tmp_path / "out", {"run": "1", "job": "12"})
    script = '#!/bin/sh\n[ "$2" = config ] && exit 0; echo Unable to contact slurm controller >&2; exit 1\n'
    (tmp_path / "scontrol").write_text(script)
    with pytest.raises(RunError, match=r"12 .* Unable to contact slurm controller"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert not (tmp_path / "sbatch.log").exists()


def test_the_record_of_a_job_that_ended_long_ago_is_used(cluster, tmp_path):
    out = tmp_path / "out"
    begun(out, {"run": "1", "job": "12"})
    (out / "slurm" / "1.json").write_text('{"key": "1", "square": 1}')
    script = (
        '#!/bin/sh\n[ "$2" = config ] && exit 0; echo slurm_load_jobs error: Invalid job id specified >&2; exit 1\n'
    )
    (tmp_path / "scontrol").write_text(script)
    assert run(out, [Job("1", square, (1,))], executor=cluster) == [{"key": "1", "square": 1}]


@pytest.mark.parametrize("lacks", [["scontrol"], ["squeue"], ["scontrol", "squeue"]], ids="-".join)
def test_squeue_or_scontrol_may_be_unavailable_to_users(lacks, cluster, tmp_path, monkeypatch, capsys):
    """The command waits for an earlier job if squeue or scontrol shows that it belongs to this folder."""
    out = tmp_path / "out"
    script(tmp_path / "squeue", f"echo '12|FAILED|None|x'; echo '11_0|'$(cat {tmp_path}/state)'|None|{out}/slurm/a.sh';"
           f"echo FAILED > {tmp_path}/state")  # fmt: skip
    (tmp_path / "cat").symlink_to(str(shutil.which("cat")))
    for name in lacks:
        (tmp_path / name).unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    cluster = PoolOptions(executor="slurm", slurm=("time=60",)).executor_of_jobs()
    say_once.cache_clear()
    for folder, number in ((out, "11_0" if len(lacks) == 1 else "12"), (tmp_path / "copy", "12")):
        (tmp_path / "state").write_text("RUNNING")
        begun(folder, {"run": "1", "job": "11_0"}, jobs=["11"], prints_into=out)
        (folder / "slurm" / f"{number}_0_result.pkl").touch()
        with pytest.raises(RunError, match=rf"the job of 1 ended as FAILED; see .*/{number}_0_log\.err"):
            run(folder, [Job("1", square, (1,))], executor=cluster)
        assert (tmp_path / "scancel.log").read_text().split()[-1] == number
    said = capsys.readouterr().err
    assert [said.count(f"no {name} on this machine") for name in ("scontrol", "squeue")] == [
        int(name in lacks) for name in ("scontrol", "squeue")
    ]


def script(path, body):
    path.write_text(f"#!/bin/sh\n{body}\n")


def queue_of(path, *lines):
    script(path / "squeue", "\n".join(f"echo '{line}|None|x'" for line in lines))


@pytest.mark.parametrize("lines", [["12|FAILED"], ["12|COMPLETING"], []], ids=["failed", "completing", "forgotten"])
def test_an_error_is_noticed_without_accounting_by_the_files_of_submitit(lines, cluster, tmp_path, capsys):
    begun(tmp_path / "out", {"run": "1", "job": "12"}, jobs=["12"])
    (tmp_path / "out" / "slurm" / "12_0_result.pkl").touch()
    queue_of(tmp_path, *lines)
    with pytest.raises(RunError, match=r"the job of 1 ended as FAILED; see .*12_0_log\.err"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert capsys.readouterr().out == ""


def test_a_job_that_slurm_requeued_after_an_error_continues(cluster, tmp_path, monkeypatch):
    begun(tmp_path / "out", {"run": "1", "job": "12"}, jobs=["12"])
    (tmp_path / "out" / "slurm" / "12_0_result.pkl").touch()
    record = tmp_path / "out" / "slurm" / "1.json"
    script(tmp_path / "squeue", f"echo '12|RUNNING|None|x'; echo >> {tmp_path}/asked; "
           f"[ $(wc -l < {tmp_path}/asked) -gt 8 ] && echo '{{\"key\": \"1\"}}' > {record}; true")  # fmt: skip
    assert run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster) == [{"key": "1"}]


def test_a_job_that_slurm_has_forgotten_is_submitted_again_and_sacct_is_named_once(cluster, tmp_path, capsys):
    begun(tmp_path / "out", {"run": "1", "job": "11"}, jobs=["11"])
    queue_of(tmp_path, "12|CANCELLED")
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert jobs_in(tmp_path / "out") == ["11", "12"]
    assert capsys.readouterr().err.count("sacct does not answer") <= 1  # once in a process


def test_submissions_are_repeated_during_an_outage_of_the_controller(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "AWAY_SECONDS", 60.0)
    away = "echo 'sbatch: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    script(tmp_path / "sbatch", f"echo >> {tmp_path}/tried; [ $(wc -l < {tmp_path}/tried) -lt 3 ] && {{ {away}; }}\n"
           "echo Submitted batch job 12")  # fmt: skip
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(tmp_path / "out", [Job("1", square, (1,))], executor=cluster)
    assert jobs_in(tmp_path / "out") == ["12"]
    script(tmp_path / "sbatch", away)
    monkeypatch.setattr(slurm, "AWAY_SECONDS", 0.5)
    with pytest.raises(RunError, match="Unable to contact slurm controller"):
        run(tmp_path / "other", [Job("1", square, (1,))], executor=cluster)


def test_a_job_of_the_folder_that_the_log_does_not_know_is_cancelled(cluster, tmp_path):
    out = tmp_path / "out"
    begun(out, {"run": "2", "job": "9"}, {"run": "2", "job": None})
    lines = [f"7_0|RUNNING|None|{out}/slurm/.submission_file_a.sh", f"8|RUNNING|None|{tmp_path}/slurm/b.sh"]
    lines += [f"9|RUNNING|None|{out}/slurm/.submission_file_c.sh", "12|CANCELLED|None|x"]
    script(tmp_path / "squeue", "\n".join(f"echo '{line}'" for line in lines))
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(out, [Job("1", square, (1,))], executor=cluster)
    assert (tmp_path / "scancel.log").read_text().split() == ["7", "12"]


def test_arrays_are_as_large_as_the_cluster_allows(cluster, tmp_path):
    (tmp_path / "config").write_text("ClusterName = here\nMaxArraySize = 2\n")
    script(tmp_path / "sbatch", f'grep -h -e --array "$1" >> {tmp_path}/arrays; echo >> {tmp_path}/n; '
           f"echo Submitted batch job 1$(($(wc -l < {tmp_path}/n)))")  # fmt: skip
    queue_of(tmp_path, "13|CANCELLED")
    with pytest.raises(RunError, match="the job of 5 ended as CANCELLED"):
        run(tmp_path / "out", [Job(n, square, (n,)) for n in range(1, 6)], executor=cluster)
    assert jobs_in(tmp_path / "out") == ["11_0", "11_1", "12_0", "12_1", "13"]
    assert (tmp_path / "arrays").read_text().split() == ["#SBATCH", "--array=0-1%2"] * 2


def test_the_status_line_shows_counts_and_why_jobs_wait(cluster, tmp_path, capsys):
    lines = [*(f"12_{n}|PENDING|PartitionDown|x" for n in (0, 1, 3)), "12_2|RUNNING|None|x", "12_4|CANCELLED|None|x"]
    script(tmp_path / "squeue", "\n".join(f"echo '{line}'" for line in lines))
    jobs = [Job(n, square, (n,)) for n in range(5)]
    with pytest.raises(RunError, match="CANCELLED"), open_runs(tmp_path / "out", {}) as made:
        run_jobs(jobs, made, executor=cluster)
    status = "0/5 runs, 1 cancelled 12_4; 1 running 12_2; 3 waiting (PartitionDown) 12_0-1, 12_3"
    assert status in capsys.readouterr().err


def test_the_numbers_of_jobs_are_abbreviated():
    numbers = ["12_2", "12_1", "9", "12_10", "13", "12_11", ""]
    assert slurm._spans(numbers) == "9, 12_1-2, 12_10-11, 13"
    assert slurm._spans(f"{n}" for n in range(0, 20, 2)) == "0, 2, 4, 6, 8, 10, and 4 more"


def test_slurm_gets_the_options_and_one_cancelled_job_cancels_all(cluster, tmp_path):
    options = ("time=60", "partition=gpu", "exclusive=true", "mem=16G", "setup=[module load x]")
    executor = PoolOptions(executor="slurm", slurm=options).executor_of_jobs()
    with pytest.raises(RunError, match=r"the job of 1 ended as CANCELLED; see .*12_0_0_log\.err"):
        run(tmp_path / "out", [Job(n, square, (n,)) for n in (1, 2)], executor=executor)
    script = (tmp_path / "sbatch.log").read_text().splitlines()
    assert {"--time=60", "--partition=gpu", "--exclusive", "--mem=16G", "--array=0-1%2"} <= {
        line.removeprefix("#SBATCH ") for line in script
    }
    assert "module load x" in script
    assert (tmp_path / "scancel.log").read_text().split() == ["12_0", "12_1"]


def test_a_run_that_finished_before_another_ended_the_command_keeps_its_record(cluster, tmp_path):
    out, queue = tmp_path / "out", (tmp_path / "squeue").read_text()
    (tmp_path / "squeue").write_text(queue + f"""echo '{{"squared": 4}}' > {out}/slurm/2.json\n""")
    with pytest.raises(RunError, match="the job of 1 ended as CANCELLED"):
        run(out, [Job(n, square, (n,)) for n in (1, 2)], executor=cluster)
    assert jsonlines.read(out / "records.jsonl") == [{"squared": 4}]
    assert (tmp_path / "scancel.log").read_text().split() == ["12_0"]
