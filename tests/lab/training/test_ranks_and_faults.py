"""Failures of several processes: they end together and lose nothing, and any number of processes can resume."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from residua.lab.experiment import run
from residua.lab.training import latest_checkpoint, train
from support.lanes import some
from support.ranks import (
    assert_same_run,
    break_loss,
    fail_in_save,
    fail_to_build,
    kill_before,
    mislead,
    run_ranks,
    stop_before,
    trained_windows,
    windows_alone,
)
from support.tiny_runs import options, run_config
from support.toy_language_model import ToyBatches, ToyModel, toy_config

SIX = {"gradient_accumulation": 6, "batch_size": 1, "steps": 9, "checkpoint_every": 100}


def assert_nothing_unfinished(folder):
    assert not list(folder.rglob(".*.partial"))


def test_a_run_resumes_on_another_number_of_ranks(data, alone, tmp_path, start, rows):
    """A signal to one rank stops all after the same step; another number of ranks continues with the next window."""
    folder, arguments = tmp_path / "run", options(data, **SIX)
    jobs = [
        run_ranks(start, 2, folder, arguments, {1: [(stop_before, 15)]}),
        run_ranks(start, 1, folder, arguments, {0: [(stop_before, 33)]}, resume=True),
        run_ranks(start, 3, folder, arguments, resume=True),
    ]
    assert [job.statuses for job in jobs] == [[143, 143], [143], [0, 0, 0]], [job.out for job in jobs]
    assert "stopped after step 3, which is saved" in jobs[0].out[0]
    assert jobs[0].out[1] == ""
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-6", "step-9"]
    assert trained_windows(jobs, 6) == windows_alone(data, 9, 6, 1)
    assert_same_run(folder, alone(**SIX), rows, exact=False)


def test_ranks_open_a_checkpoint_of_one_process(data, alone, tmp_path, start, rows):
    """The reverse is tested, too: one process reads the checkpoint of two, with Muon for some parameters and AdamW for
    the others."""
    folder = tmp_path / "run"
    arguments = options(data, optimizer="muon", keep_checkpoints=3)
    run(run_config(arguments), folder, progress=False)
    for step in (4, 6):
        (folder / "checkpoints" / f"step-{step}" / "model.safetensors").unlink()
    job = run_ranks(start, 2, folder, arguments, {0: [(stop_before, 6)]}, resume=True)
    assert job.statuses == [143, 143], job.out
    assert job.windows[0][0]["index"] == 4, "it goes on from step 2"
    run(run_config(arguments), folder, resume=True, progress=False)
    assert_same_run(folder, alone(optimizer="muon"), rows, exact=True)


@pytest.mark.parametrize(("victim", "index"), some([(0, 2), (1, 7)], [(1, 7)].__contains__))
def test_a_rank_that_dies_ends_the_job(victim, index, data, alone, tmp_path, start, rows):
    """Between two saves or before the first; the others say that a rank is gone, at once."""
    folder, arguments = tmp_path / "run", options(data)
    job = run_ranks(start, 2, folder, arguments, {victim: [(kill_before, index)]})
    alive = 1 - victim
    assert job.statuses[victim] == -signal.SIGKILL
    assert job.statuses[alive] == 1
    assert len(job.errors) == 1
    assert job.errors[0].startswith(f"residua: rank {alive} of 2: another rank ended")
    again = run_ranks(start, 2, folder, arguments, resume=True)
    assert again.statuses == [0, 0], again.out
    assert trained_windows([job, again], 2) == windows_alone(data)
    assert_same_run(folder, alone(), rows, exact=True)


@pytest.mark.parametrize(
    ("name", "call", "newest"),
    some([("file_sha256", 4, 2), ("publish", 3, 2), ("drop_old", 2, 4)], lambda case: case[0] == "publish"),
)
def test_a_full_disk_in_a_save_is_reported_once(name, call, newest, data, tmp_path, start):
    """In the save of step 4, in which the first rank hashes its two files. Neither rank waits for the other."""
    folder = tmp_path / "run"
    job = run_ranks(start, 2, folder, options(data), {0: [(fail_in_save, name, call, OSError("no such luck"))]})
    assert job.statuses == [1, 1], job.out
    (line,) = job.errors
    assert line.startswith("residua: step 4: cannot write into ")
    assert f"no such luck; last good checkpoint: {folder}/checkpoints/step-{newest}; " in line
    assert latest_checkpoint(folder).step == newest
    assert_nothing_unfinished(folder)


@pytest.mark.parametrize(
    ("rank", "name", "newest", "line"),
    [
        (1, "snapshot", 4, "rank 0 of 2: another rank ended"),
        (0, "write_checkpoint", 4, None),
    ],
)
def test_an_error_of_one_rank_in_the_last_save_fails_the_run(rank, name, newest, line, data, tmp_path, start):
    """An unexpected error is raised with its traceback; the other rank neither waits nor exits with status 0."""
    folder = tmp_path / "run"
    job = run_ranks(start, 2, folder, options(data), {rank: [(fail_in_save, name, 3, ValueError("no such thing"))]})
    assert job.statuses == [3 if rank == 0 else 1, 3 if rank == 1 else 1], job.out
    assert job.out[rank].splitlines()[-1] == "ValueError: no such thing"
    assert len(job.errors) == (line is not None)
    assert line is None or job.errors[0].startswith(f"residua: {line}")
    assert latest_checkpoint(folder).step == newest


def test_an_error_of_one_rank_before_the_first_step_ends_the_other_silently(data, tmp_path, start):
    job = run_ranks(start, 2, tmp_path / "run", options(data), {1: [(fail_to_build, ZeroDivisionError())]})
    assert job.statuses == [1, 3], job.out
    assert job.out[0] == ""
    assert job.out[1].splitlines()[-1] == "ZeroDivisionError"


def test_a_loss_that_is_not_finite_on_one_rank_ends_all_with_one_line(data, tmp_path, start):
    folder = tmp_path / "run"
    job = run_ranks(start, 2, folder, options(data), {1: [(break_loss, 4)]})
    assert job.statuses == [1, 1]
    assert len(job.errors) == 1
    assert job.errors[0].startswith("residua: step 4: loss and gradient must be finite, got loss nan; ")
    assert f"last good checkpoint: {folder}/checkpoints/step-2" in job.errors[0]


def test_the_best_checkpoint_is_kept(tmp_path):
    losses = iter([3.0, 1.0, 2.0, 4.0])
    settings = toy_config(evaluate_every=3, keep_checkpoints=1, keep_best=True)
    train(ToyModel(), ToyBatches(), settings, tmp_path, evaluate=lambda m: {"val_loss": next(losses)}, progress=False)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-12", "step-6"]


KILLED_ONCE = """
import os, signal, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
from residua.commands.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.nightly
@pytest.mark.processes
def test_torchrun_starts_again_after_a_rank_was_killed(data, alone, tmp_path, rows):
    """Without --resume, the second attempt resumes by itself. One rank is enough, as torchrun restarts all of them."""
    folder, script, file = tmp_path / "run", tmp_path / "killed.py", tmp_path / "config.yaml"
    shutil.copytree(alone(), folder)
    shutil.rmtree(folder / "checkpoints" / "step-6")
    script.write_text(KILLED_ONCE)
    file.write_text(run_config(options(data)).to_yaml())
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    done = subprocess.run(
        [*launch, "--", script, "train", "--config", file, "--run", folder],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr
    assert "exitcode: -9" in done.stderr
    assert_same_run(folder, alone(), rows, exact=True)


@pytest.mark.parametrize(
    ("wrong", "reason"), [({"GLOO_SOCKET_IFNAME": "nosuch0"}, "nosuch0"), ({"MASTER_PORT": "abc"}, "'abc'")]
)
def test_ranks_that_cannot_connect_name_the_address_in_one_line(wrong, reason, data, tmp_path, start):
    job = run_ranks(start, 1, tmp_path / "run", options(data), {0: [(mislead, wrong)]})
    assert job.statuses == [1]
    (line,) = job.out[0].splitlines()
    assert line.startswith("residua: rank 0 of 1: cannot reach the other ranks at 127.0.0.1:")
    assert reason in line
    assert not (tmp_path / "run").exists()
