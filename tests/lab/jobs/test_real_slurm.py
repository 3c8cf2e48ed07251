"""The executor for Slurm with a real one on this machine, whose daemons the tests stop and kill: `make slurm`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from residua.commands.cli import main
from residua.errors import RunError
from residua.lab.jobs import slurm
from residua.lab.jobs.pool import Job, Work, open_runs, run_jobs
from residua.lab.jobs.slurm import Slurm
from residua.lab.records import jsonlines
from support.planted_study import SMALLEST, repeatable
from support.tiny_runs import prepare_texts

pytestmark = [
    pytest.mark.skipif("RESIDUA_SLURM" not in os.environ, reason="needs a Slurm that it may stop: make slurm"),
    pytest.mark.timeout(900),
]
ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "tools" / "slurm_cluster.py"


def counts(seconds, *, place, report):
    """Count seconds in a file."""
    counted = int(place.read_text()) if place.exists() else 0
    begun = counted
    while counted < seconds:
        time.sleep(1)
        counted += 1
        place.write_text(str(counted))
    return {"key": place.name, "counted": counted, "begun": begun}


def refuses(*, place, report):
    raise ValueError("the data are not on this node")


START = """
import json, sys
from pathlib import Path
from residua.lab.jobs import slurm
from tests.lab.jobs.test_real_slurm import Job, Slurm, counts, run
slurm.POLL_SECONDS, slurm.QUEUE_SECONDS, slurm.SETTLE_SECONDS = 1.0, 2.0, 8.0
out, most, *seconds = sys.argv[1:]
runs = [Job(f"r{n}", counts, (int(s),)) for n, s in enumerate(seconds)]
try:
    print(json.dumps(run(Path(out), runs, executor=Slurm.of(["time=20"], int(most)))))
except ValueError as error:
    sys.exit(f"refused: {error}")
"""


def run(folder, jobs, **options):
    with open_runs(folder, {}) as made:
        return run_jobs(jobs, made, **options)


def start(out, *seconds, most=8):
    """Start a command with a run of each length."""
    with (out.parent / "command.err").open("a") as file:
        command = [sys.executable, "-c", START, str(out), str(most), *map(str, seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)


def asked(*command):
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def daemon(action, name):
    subprocess.run([sys.executable, CLUSTER, action, name], check=True)


def until(condition, seconds=600):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not after {seconds} seconds; {asked('squeue')}"
        time.sleep(0.5)
    return found


def jobs_in(out):
    path = out / "slurm" / "jobs.jsonl"
    return [row["job"] for row in jsonlines.read(path) if row["job"]] if path.exists() else []


def steps(out, name="r0"):
    place = out / "runs" / name
    return int(place.read_text() or 0) if place.exists() else 0


def queue():
    return [line.split("|") for line in asked("squeue", "--noheader", "--array", "--format=%i|%T|%r").splitlines()]


def said(out):
    return (out.parent / "command.err").read_text()


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the jobs import this module
    monkeypatch.setattr(slurm, "POLL_SECONDS", 1.0)
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 2.0)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 8.0)
    yield
    subprocess.run(["scancel", "--user=root"])


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def test_runs_on_slurm_equal_runs_on_this_machine(out, tmp_path, capfd):
    jobs = [Job(f"r{n}", counts, (n,)) for n in range(3)]
    assert run(out, jobs, executor=Slurm.of(["time=5"], None)) == run(tmp_path / "here", jobs)
    printed = capfd.readouterr()
    assert not printed.out
    assert "running" in printed.err


def test_a_study_on_slurm_equals_one_on_this_machine_bit_for_bit(out, tmp_path):
    """By the command, with its own waits: losses and curves of all runs."""
    data = prepare_texts(tmp_path).folder
    (tmp_path / "study.yaml").write_text(json.dumps({**SMALLEST, "tokens_per_parameter": 0.1}))
    argv = ["study", "run", str(tmp_path / "study.yaml"), "--data", str(data), "--no-costs", "--out"]
    assert main([*argv, str(out), "--executor", "slurm", "--slurm", "time=10", "mem=800M"]) == 0
    assert main([*argv, str(tmp_path / "here")]) == 0
    records = repeatable(out / "records.jsonl")
    assert len(records) == 6
    assert records == repeatable(tmp_path / "here" / "records.jsonl")
    assert len(set(jobs_in(out))) == 6


def test_an_error_is_noticed_within_two_minutes(out, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 10.0)
    monkeypatch.setattr(slurm, "QUEUE_SECONDS", 30.0)
    monkeypatch.setattr(slurm, "SETTLE_SECONDS", 60.0)
    with pytest.raises(RunError, match=r"the job of a ended as FAILED; see .*_log\.err") as failure:
        run(out, [Job("a", refuses, ())], executor=Slurm.of(["time=5"], None))
    log = Path(str(failure.value).rpartition(" ")[2])
    assert "the data are not on this node" in log.read_text()
    assert time.time() - log.stat().st_mtime < 120


def test_a_cancelled_job_ends_the_command(out):
    command = start(out, 600)
    until(lambda: steps(out))
    asked("scancel", jobs_in(out)[0])
    assert command.wait(timeout=120) == 1
    assert "RunError: the job of r0 ended as CANCELLED" in said(out)


def test_a_run_resumes_after_its_process_was_killed(out):
    command = start(out, 12)
    until(lambda: steps(out) > 3)
    asked("pkill", "-9", "-f", f"submitit.core._submit {out}")
    (record,) = json.loads(command.communicate(timeout=240)[0])
    assert record["begun"] >= 3
    assert len(jobs_in(out)) == 2


def test_a_requeued_job_continues_under_its_number(out):
    command = start(out, 15)
    until(lambda: steps(out) > 3)
    asked("scontrol", "requeue", jobs_in(out)[0])
    until(lambda: "1 waiting (BeginTime)" in said(out))  # Slurm lets it wait for two minutes
    until(lambda: asked("scontrol", "update", f"JobId={jobs_in(out)[0]}", "StartTime=now") or steps(out) > 8)
    (record,) = json.loads(command.communicate(timeout=240)[0])
    assert record["begun"] >= 3
    assert len(jobs_in(out)) == 1


def test_an_outage_of_the_controller_loses_no_work_and_duplicates_no_job(out):
    """A run ends during the outage, so that the next one cannot be submitted."""
    command = start(out, 95, 10, 1, most=2)
    until(lambda: steps(out) and steps(out, "r1"))
    daemon("stop", "slurmctld")
    time.sleep(70)
    assert command.poll() is None
    assert "Slurm does not answer" in said(out)
    daemon("start", "slurmctld")
    records = json.loads(command.communicate(timeout=300)[0])
    assert [record["begun"] for record in records] == [0, 0, 0]
    assert len(jobs_in(out)) == 3


def test_a_command_that_starts_during_an_outage_of_the_controller_finds_its_earlier_jobs(out):
    command = start(out, 40)
    until(lambda: steps(out))
    command.kill()
    command.wait()
    daemon("stop", "slurmctld")
    command = start(out, 40)
    until(lambda: "Slurm does not tell" in said(out))
    daemon("start", "slurmctld")
    (record,) = json.loads(command.communicate(timeout=240)[0])
    assert record["begun"] == 0
    assert len(jobs_in(out)) == 1


def test_only_jobs_that_slurm_cancelled_count_as_cancelled(out):
    """Ctrl-C during an outage of the controller leaves the job, and the next call of the command waits for it."""
    command = start(out, 30)
    until(lambda: steps(out))
    daemon("stop", "slurmctld")
    command.send_signal(signal.SIGINT)
    command.wait(timeout=120)
    daemon("start", "slurmctld")
    assert "could not be cancelled" in said(out)
    (record,) = json.loads(start(out, 30).communicate(timeout=240)[0])
    assert record["begun"] == 0
    assert len(jobs_in(out)) == 1


def test_ctrl_c_cancels_all_jobs(out):
    command = start(out, 600, 600)
    until(lambda: steps(out))
    command.send_signal(signal.SIGINT)
    command.wait(timeout=60)
    until(lambda: not queue(), 60)
    assert jsonlines.read(out / "slurm" / "jobs.jsonl")[-1]["job"] is None


def test_a_second_command_for_a_folder_is_refused(out):
    first = start(out, 600)
    until(lambda: jobs_in(out))
    assert start(out, 600).wait(timeout=240) == 1
    assert "another process is working in this folder" in said(out)
    assert first.poll() is None
    first.send_signal(signal.SIGINT)
    first.wait(timeout=120)


def test_a_run_resumes_after_its_node_went_down(out):
    command = start(out, 25)
    until(lambda: steps(out) > 3)
    node = asked("squeue", "--noheader", "--format=%N")
    daemon("stop", node)
    asked("scontrol", "update", f"NodeName={node}", "State=down", "Reason=test")
    asked("pkill", "-9", "-f", f"submitit.core._submit {out}")
    until(lambda: [row for row in queue() if row[1] == "PENDING"])
    time.sleep(5)  # the first process is still ending
    until(lambda: asked("scontrol", "update", f"JobId={jobs_in(out)[0]}", "StartTime=now") or steps(out) > 8)
    (record,) = json.loads(command.communicate(timeout=300)[0])
    daemon("start", node)
    assert record["begun"] >= 3
    assert len(jobs_in(out)) == 1


def test_a_job_that_sbatch_submitted_without_reporting_it_is_cancelled(out):
    """sbatch may time out after Slurm has taken the job. The job would fail in a minute: its run has no file."""
    (out / "slurm").mkdir(parents=True)
    (out / "records.jsonl").touch()
    script = out / "slurm" / ".submission_file_lost.sh"
    script.write_text("#!/bin/sh\nsleep 600\n")
    number = asked("sbatch", "--parsable", "--output=/dev/null", str(script))
    run(out, [Job("r0", counts, (1,))], executor=Slurm.of(["time=5"], None))
    assert asked("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T") == "CANCELLED"


def test_more_runs_than_an_array_allows_are_shown_as_waiting(out, capfd, monkeypatch):
    """1,002 runs in a partition that is down, of a cluster whose arrays have 101 jobs at most. Ctrl-C once all wait."""
    note = Work.note

    def interrupt(work, text):
        note(work, text)
        if "1002 waiting (PartitionDown)" in text:
            raise KeyboardInterrupt

    monkeypatch.setattr(Work, "note", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(
            out,
            [Job(f"r{n}", counts, (1,)) for n in range(1002)],
            executor=Slurm.of(["time=5", "partition=down"], None),
        )
    assert "0/1002 runs, 1002 waiting (PartitionDown)" in capfd.readouterr().err
    rows = jsonlines.read(out / "slurm" / "jobs.jsonl")
    assert len({row["job"] for row in rows if row["job"]}) == 1002
    assert len([row for row in rows if row["job"] is None]) == 1002
    assert not queue()
