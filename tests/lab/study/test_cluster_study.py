"""Studies whose runs are jobs: submitit's processes of this machine stand for those of Slurm."""

import os
import signal
import sys

import pytest

from residua.commands.cli import main
from residua.lab.data import prepare
from residua.lab.study.engine import measure_costs, run_study, train_run
from residua.lab.study.plan import Plan
from residua.lab.study.results import results
from residua.records import jsonlines, slurm
from residua.records.jobs import Job, open_runs, run_jobs
from residua.records.slurm import Slurm
from support.planted_study import DOCUMENT, costs, records, study

SMALLEST = {
    **DOCUMENT,
    "tokens_per_parameter": 0.015,
    "tuning": {"over": {"train.lr": [0.008]}, "runs": 1, "baseline_runs": 1, "length": 0.5},
    "seeds": [1, 2],
    "longer": [],
}
LOCAL = Slurm({"time": 5}, cluster="local")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i:02d}.txt").write_text(" ".join(f"word{(i * j) % 97} is {(i + j) % 13}," for j in range(60)))
    return str(prepare(str(folder), folder / "data", vocab_size=300, progress=False).folder)


@pytest.mark.slow
@pytest.mark.processes
def test_a_study_of_jobs_has_the_losses_of_one_on_this_machine(data, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    for name, executor in (("jobs", LOCAL), ("here", None)):
        run_study(study(**SMALLEST), tmp_path / name, data=data, costs=False, executor=executor, progress=False)
    rows = [{row["key"]: row for row in jsonlines.read(tmp_path / name / "records.jsonl")} for name in ("jobs", "here")]
    assert len(rows[0]) == 6
    assert rows[0].keys() == rows[1].keys()
    for key, row in rows[0].items():
        same = [
            {name: one[name] for name in one if name not in ("seconds", "tokens_per_second", "facts")}
            for one in (row, rows[1][key])
        ]
        assert same[0] == same[1]


def preempted_once(run, *, place, report):
    """Train a run; at its first report of a step Slurm announces that the job has to go."""

    def report_step(step):
        report(step)
        if step and not (mark := place.with_suffix(".mark")).exists():
            mark.write_text(str(step))
            os.kill(os.getpid(), signal.SIGUSR2)

    return train_run(run, place=place, report=report_step)


@pytest.mark.slow
@pytest.mark.processes
def test_a_preempted_job_saves_its_state_and_goes_on_with_the_same_numbers(data, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the job imports this module
    document = {
        **SMALLEST,
        "tokens_per_parameter": 0.1,
        "set": {**SMALLEST["set"], "train.checkpoint_every": 1000, "train.log_every": 1},
    }
    trained = next(iter(Plan(study(**document), data).runs({})))
    with open_runs(tmp_path / "out", {}) as made:
        (record,) = run_jobs([Job(trained.key, preempted_once, (trained,))], made, executor=LOCAL, progress=False)
    (resumed,) = record["facts"]["resumed"]
    assert resumed["step"] >= 1
    here = train_run(trained, place=tmp_path / "here", report=lambda step: None)
    assert [record[name] for name in ("val_loss", "loss", "curve")] == [here[n] for n in ("val_loss", "loss", "curve")]


@pytest.mark.slow
@pytest.mark.processes
def test_steps_are_timed_in_one_job(data, tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "POLL_SECONDS", 0.2)
    measure_costs(Plan(study(**SMALLEST), data), tmp_path, rounds=1, executor=LOCAL, progress=False)
    timed = jsonlines.read(tmp_path / "costs.jsonl")
    assert [cost["scheme"] for cost in timed] == ["residual", "ddl"]
    assert len({(cost["date"], cost["cpu"]) for cost in timed}) == 1
    assert len([row for row in jsonlines.read(tmp_path / "slurm" / "jobs.jsonl") if row["job"]]) == 1


@pytest.mark.parametrize("cpu", ["planted", "another"])
def test_seconds_are_compared_on_one_processor_alone(cpu):
    timed = [{**cost, "cpu": processor} for cost, processor in zip(costs(), ("planted", cpu))]
    row = results(study(), records(), timed).row("small", "ddl")
    assert (row.difference("residual", "seconds") is not None) == (cpu == "planted")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--slurm", "partition=gpu"],
            "--slurm must be at least time=MINUTES, the limit of a job, got ['partition=gpu']",
        ),
        (["--slurm", "time=1:00:00"], "--slurm time must be a whole number, got '1:00:00'"),
        (
            ["--slurm", "time=5", "partion=gpu"],
            "--slurm has no option 'partion'; did you mean partition?",
        ),
        (["--slurm", "time=5", "nodes=2"], "--slurm has no option 'nodes'; did you mean nodelist?"),
    ],
)
def test_a_wrong_option_of_sbatch_is_one_line(options, said, data, tmp_path, monkeypatch, capsys):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(submitit.SlurmExecutor, "affinity", lambda: 2)
    argv = ["study", "run", "resbench", "--data", data, "--out", str(tmp_path / "out"), "--executor", "slurm"]
    assert main([*argv, *options]) == 2
    assert capsys.readouterr().err == f"residua: {said}\n"
    assert not (tmp_path / "out").exists()


def test_a_missing_package_and_a_machine_without_slurm_are_one_line(data, tmp_path, monkeypatch, capsys):
    argv = ["study", "run", "resbench", "--data", data, "--out", str(tmp_path / "out"), "--executor", "slurm"]
    monkeypatch.setenv("PATH", "")
    assert main([*argv, "--slurm", "time=5"]) == 2
    said = "residua: --executor slurm must run on a machine of the cluster, found no srun here\n"
    assert capsys.readouterr().err == said
    assert main([*argv[:-2], "--slurm", "time=5"]) == 2
    assert "--slurm must be given with --executor slurm" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main([*argv, "--slurm", "time=5"]) != 0
    assert "it comes with: pip install 'residua[slurm]'\n" in capsys.readouterr().err
