import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from residua.files import durable
from residua.lab.records import jsonlines
from residua.lab.training import checkpoint as checkpoint_module
from residua.lab.training import train
from residua.lab.training.loop import STOPPING
from support.lanes import some
from support.ranks import at_call, die
from support.toy_language_model import ToyBatches, ToyModel, evaluate, toy_config

STEPS = 40


def _child(folder, resume, pause):
    torch.set_num_threads(1)
    config = toy_config(steps=STEPS, gradient_accumulation=2)
    train(ToyModel(), ToyBatches(pause), config, folder, evaluate=evaluate, resume=resume, progress=False)


def _last_step(folder):
    rows = jsonlines.read(folder / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def _half_weights(tensors, path, metadata=None):
    path.write_bytes(b"\x00" * 100)
    die()


def _half_removed(path, ignore_errors=False):
    next(path.glob("*.safetensors")).unlink()
    die()


# Where in the third save (step 9, which also drops the checkpoint of step 3) the process dies.
DEATHS = {
    "weights half written": (checkpoint_module, "save_file", 5, _half_weights),
    "before the optimizer": (checkpoint_module, "save_file", 6, die),
    "before the manifest": (checkpoint_module, "file_sha256", 6, die),
    "before the name is given": (durable, "publish", 3, die),
    "before the oldest is dropped": (checkpoint_module, "_remove", 1, die),
    "while the oldest is dropped": (shutil, "rmtree", 1, _half_removed),
}


def _child_dying_in_a_save(folder, death):
    torch.set_num_threads(1)
    module, name, number, fatal = DEATHS[death]
    setattr(module, name, at_call(number, fatal, getattr(module, name)))
    train(ToyModel(), ToyBatches(), toy_config(), folder, evaluate=evaluate, progress=False)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    _child(folder, False, 0.0)
    return folder


def test_a_run_killed_at_random_moments_ends_with_the_same_result(undisturbed, tmp_path, start, rows):
    chance = random.Random(0)
    folder = tmp_path / "run"
    exits = []
    while 0 not in exits:
        # Every second kill may come before the first step; the others come late enough to have saved something new.
        progress = _last_step(folder) + chance.randint(4, 12) if len(exits) % 2 else 0
        process = start(_child, folder, (folder / "config.yaml").exists(), 0.002)
        while process.is_alive() and _last_step(folder) < progress:
            time.sleep(0.001)
        process.join(chance.uniform(0.0, 0.05))
        process.kill()
        process.join()
        exits.append(process.exitcode)
    assert len(exits) > 2
    assert set(exits) == {0, -signal.SIGKILL}
    assert rows(folder) == rows(undisturbed)
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    mine, theirs = (load_file(f / "checkpoints" / f"step-{STEPS}" / "model.safetensors") for f in (folder, undisturbed))
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("death", some(DEATHS, lambda death: not death.startswith("before")))
def test_a_run_killed_in_a_save_resumes_from_a_whole_checkpoint(death, tmp_path, start, fit, rows, capsys):
    fit(tmp_path / "undisturbed")
    folder = tmp_path / "run"
    process = start(_child_dying_in_a_save, folder, death)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    whole = "step-9" if "oldest" in death else "step-6"
    assert whole in {path.name for path in (folder / "checkpoints").iterdir()}

    model = ToyModel()
    fit(folder, resume=True, model=model)
    assert model.calls == 12 - int(whole.removeprefix("step-"))
    assert "damaged" not in capsys.readouterr().err
    assert rows(folder) == rows(tmp_path / "undisturbed")
    assert not list(folder.rglob(".*.partial"))


@pytest.mark.parametrize("number", [getattr(signal, name) for name in STOPPING if hasattr(signal, name)])
def test_a_signal_finishes_the_step_saves_and_prints_how_to_resume(number, tmp_path, fit, rows, capsys):
    fit(tmp_path / "undisturbed", log_every=2)
    folder = tmp_path / "run"
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(number)
    result = fit(folder, batches=ToyBatches(signals={6: number}), log_every=2)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(number)) == handlers
    assert (result["interrupted"], result["signal"]) == (True, number)
    assert result["step"] == 7
    assert result["checkpoint"] == str(folder / "checkpoints" / "step-7")
    assert f"residua train --run {folder} --resume" in capsys.readouterr().err
    result = fit(folder, resume=True, log_every=2)
    assert result["interrupted"] is False
    assert rows(folder) == rows(tmp_path / "undisturbed")


def test_a_first_sigterm_after_another_signal_does_not_lose_the_checkpoint(tmp_path, fit):
    """Slurm warns by SIGUSR1 and sends SIGTERM at the limit; a lost terminal sends SIGHUP first."""
    for first in (signal.SIGUSR1, signal.SIGHUP):
        folder = tmp_path / first.name
        batches = ToyBatches(signals={12: first, 13: signal.SIGTERM})
        result = fit(folder, batches=batches, gradient_accumulation=2)
        assert (result["step"], result["checkpoint"]) == (7, str(folder / "checkpoints" / "step-7"))


def test_a_signal_in_the_last_step_interrupts_nothing_and_is_told(tmp_path, fit, capsys):
    result = fit(tmp_path / "run", batches=ToyBatches(signals={11: signal.SIGTERM}))
    assert (result["step"], result["interrupted"], result["signal"]) == (12, False, signal.SIGTERM)
    assert "--resume" not in capsys.readouterr().err


def test_an_interrupted_run_with_a_callback_prints_no_advice(tmp_path, fit, capsys):
    steps = []
    result = fit(tmp_path / "run", batches=ToyBatches(signals={6: signal.SIGINT}), progress=steps.append)
    assert result["interrupted"] is True
    assert steps
    assert capsys.readouterr().err == ""


def test_a_signal_that_is_ignored_stays_ignored(tmp_path, fit):
    """nohup ignores SIGHUP, and the shell SIGINT of what runs in the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = fit(tmp_path / "run", batches=ToyBatches(signals={6: signal.SIGHUP}))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result["step"], result["interrupted"]) == (12, False)


def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path, fit):
    batches = ToyBatches(signals={6: signal.SIGINT, 7: signal.SIGINT})
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", batches=batches, gradient_accumulation=2)
    assert (tmp_path / "run" / "checkpoints" / "step-3").exists()
    assert fit(tmp_path / "run", resume=True, gradient_accumulation=2)["step"] == 12
