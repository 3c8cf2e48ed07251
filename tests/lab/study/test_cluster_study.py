"""Studies whose runs are jobs: submitit's processes of this machine stand for those of Slurm."""

import os
import signal
import sys

import pytest

from residua.commands.cli import main
from residua.errors import installing
from residua.lab.jobs import slurm
from residua.lab.jobs.slurm import Slurm
from residua.lab.records import jsonlines
from residua.lab.study import engine
from residua.lab.study.engine import measure_costs, run_study, train_run
from residua.lab.study.plan import Plan
from support.planted_study import SMALLEST, costs, planted, repeatable, study

LOCAL = Slurm({"time": 5}, cluster="local")


def error_in(capsys):
    """The one line of an error, after the line that says what is read."""
    reading, error = capsys.readouterr().err.splitlines()
    assert reading.startswith("study: reading ")
    return error


def preempted_once(run, *, place, report):
    """Train a run. At the first report of a step of seed 1, Slurm announces that the job has to go."""

    def report_step(step):
        report(step)
        if step and run.config.train.seed == 1 and not (mark := place.with_suffix(".mark")).exists():
            mark.write_text(str(step))
            os.kill(os.getpid(), signal.SIGUSR2)

    return train_run(run, place=place, report=report_step)


@pytest.mark.nightly
@pytest.mark.processes
def test_a_study_of_jobs_with_a_preemption_has_the_losses_of_a_local_study(data, tmp_path, monkeypatch):
    """The preempted job saves its state and goes on."""
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the job imports this module
    settings = {**SMALLEST["set"], "train.checkpoint_every": 1000, "train.log_every": 1}
    alone = study(**{**SMALLEST, "schemes": {"residual": {}}, "tokens_per_parameter": 0.1, "set": settings})
    rows = []
    for executor, function in ((LOCAL, preempted_once), (None, train_run)):
        monkeypatch.setattr(engine, "train_run", function)
        folder = tmp_path / f"out{len(rows)}"
        run_study(alone, folder, data=data, costs=False, executor=executor, progress=False)
        rows.append({row["key"]: row for row in jsonlines.read(folder / "records.jsonl")})
    assert len(rows[0]) == 3
    (resumed,) = [row["facts"]["resumed"] for row in rows[0].values() if "resumed" in row["facts"]]
    assert resumed[0]["step"] >= 1
    assert repeatable(tmp_path / "out0" / "records.jsonl") == repeatable(tmp_path / "out1" / "records.jsonl")


@pytest.mark.nightly
@pytest.mark.processes
def test_steps_are_timed_in_one_job(data, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    measure_costs(Plan(study(**SMALLEST), data), tmp_path, rounds=1, executor=LOCAL, progress=False)
    timed = jsonlines.read(tmp_path / "costs.jsonl")
    assert [cost["scheme"] for cost in timed] == ["residual", "ddl"]
    assert len({(cost["date"], cost["cpu"]) for cost in timed}) == 1
    assert len([row for row in jsonlines.read(tmp_path / "slurm" / "jobs.jsonl") if row["job"]]) == 1


@pytest.mark.parametrize("cpu", ["planted", "another"])
def test_seconds_are_compared_only_on_the_same_processor(cpu):
    timed = [{**cost, "cpu": processor} for cost, processor in zip(costs(), ("planted", cpu))]
    row = planted(timed=timed).row("small", "ddl")
    assert (row.difference("residual", "seconds") is not None) == (cpu == "planted")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--slurm", "partition=gpu"],
            "--slurm must be at least time=MINUTES, the limit of a job, got ['partition=gpu']",
        ),
        (["--slurm", "time=1"], "--slurm time must be 0 (no limit) or at least 3 minutes"),
        (["--slurm", "time=5", "signal_delay_s=300"], "--slurm time must be 0 (no limit) or at least 7 minutes"),
        (["--slurm", "time=1:00:00"], "--slurm time must be a whole number, got '1:00:00'"),
        (
            ["--slurm", "time=5", "partion=gpu"],
            "--slurm has no option 'partion'; did you mean partition?",
        ),
        (["--slurm", "time=5", "nodes=2"], "--slurm has no option 'nodes'; did you mean nodelist?"),
    ],
)
def test_a_wrong_option_of_sbatch_gives_a_one_line_error(options, said, data, tmp_path, capsys):
    argv = ["study", "run", "resbench", "--data", str(data), "--out", str(tmp_path / "out"), "--executor", "slurm"]
    assert main([*argv, *options]) == 2
    assert error_in(capsys).startswith(f"residua: {said}")
    assert not (tmp_path / "out").exists()


def test_a_missing_package_or_slurm_gives_a_one_line_error(data, tmp_path, monkeypatch, capsys):
    argv = ["study", "run", "resbench", "--data", str(data), "--out", str(tmp_path / "out"), "--executor", "slurm"]
    monkeypatch.setenv("PATH", "")
    said = "residua: --executor slurm must run on a machine of the cluster, found no srun here"
    for texts in ([], ["wckey=*team", "comment=a: b: c", "account=%x", "qos=#12"]):  # options of sbatch, not YAML
        assert main([*argv, "--slurm", "time=5", *texts]) == 2
        assert error_in(capsys) == said
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([*argv, "--slurm", "time=5"]) == 2
    assert error_in(capsys) == said.replace("srun", "sbatch")
    assert main([*argv[:-2], "--slurm", "time=5"]) == 2
    assert "--slurm must be given with --executor slurm" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main([*argv, "--slurm", "time=5"]) != 0
    assert f"it comes with: {installing('slurm')}\n" in capsys.readouterr().err
