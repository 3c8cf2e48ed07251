"""Which checkpoints are kept, what is said where the disk refuses, and the thread that saves behind the training."""

import errno
import json
import shutil
import signal
import threading

import pytest

from residua.errors import RunError
from residua.lab.training import saving, train
from support.toy_language_model import ToyBatches, ToyModel, toy_config


def steps(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_where_old_checkpoints_cannot_be_dropped_the_new_one_is_named(tmp_path, fit, monkeypatch):
    """It is whole, and with `keep_checkpoints` 1 the one before it may be half gone."""

    def refuse(path, ignore_errors=False):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(RunError, match=r"^step 6: cannot write .*Permission denied; last good .*checkpoints/step-6;"):
        fit(tmp_path / "run", keep_checkpoints=1)
    monkeypatch.undo()
    assert fit(tmp_path / "run", resume=True, keep_checkpoints=1)["step"] == 12
    assert steps(tmp_path / "run") == [12]


@pytest.mark.parametrize("keep_best", [False, True])
def test_a_damaged_checkpoint_that_the_run_has_passed_pushes_out_no_whole_one(keep_best, tmp_path, fit):
    """It was saved after step 6, with the best loss of all; the run goes on from step 3 and saves every four steps."""
    folder = tmp_path / "run"
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    newest = folder / "checkpoints" / "step-6"
    (newest / "optimizer.safetensors").unlink()
    manifest = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps(manifest | {"val_loss": 0.5}))

    losses = iter([1.0, 2.0])
    kept = {"keep_checkpoints": 1, "keep_best": True} if keep_best else {"keep_checkpoints": 2}
    train(
        ToyModel(),
        ToyBatches(signals={7: signal.SIGINT}),
        toy_config(checkpoint_every=4, **kept),
        folder,
        evaluate=lambda model: {"val_loss": next(losses)},
        resume=True,
        progress=False,
    )
    assert steps(folder) == [4, 8]


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), SystemExit(3)])
def test_whatever_ends_the_thread_is_raised_where_it_is_waited_for(error):
    def fail():
        raise error

    future = saving._in_background(fail)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            future.result(timeout=10)
        assert raised.value is error


def _leave_a_save_unfinished():
    saving._in_background(threading.Event().wait)


def test_a_save_that_never_ends_does_not_hold_the_process(start):
    process = start(_leave_a_save_unfinished)
    process.join(60)
    assert process.exitcode == 0
