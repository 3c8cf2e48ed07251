"""connections.jsonl: the gates that are logged during training, and that logging them changes nothing."""

import itertools
import json
import signal
from types import SimpleNamespace

import pytest
import torch

from residua.lab.experiment import open_run, run
from residua.lab.records import jsonlines
from residua.lab.training import train
from support.ranks import run_ranks
from support.tiny_runs import options, run_config
from support.toy_language_model import ToyBatches, ToyModel, toy_config

EVERY = {"connections_every": 2}


def looked(folder):
    return [json.loads(line) for line in (folder / "connections.jsonl").read_text().splitlines()]


def observe(model, inputs):
    """Draws random numbers and calls the model, which must not reach the training."""
    torch.rand(3)
    assert not model.training
    assert not torch.is_grad_enabled()
    model(inputs)
    return {"beta": {"mean": [float(inputs.sum()), float("nan")]}}


def test_observing_does_not_change_the_training_by_a_bit(tmp_path, fit, rows):
    """Dropout, clipping and two micro-batches; the row is of the first sequence of its step."""
    settings = toy_config(gradient_accumulation=2, connections_every=3)
    model, batches = ToyModel(), ToyBatches()
    train(model, batches, settings, tmp_path / "seen", observe=observe, progress=False)
    plain = ToyModel()
    fit(tmp_path / "plain", model=plain, gradient_accumulation=2, evaluate_every=12)
    strip = [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows(tmp_path / "plain")]
    assert [{key: row[key] for key in ("step", "loss", "grad_norm")} for row in rows(tmp_path / "seen")] == strip
    for a, b in zip(model.state_dict().values(), plain.state_dict().values()):
        assert torch.equal(a, b)
    first = {step: float(ToyBatches().at(2 * (step - 1))[0][0].sum()) for step in (3, 6, 9, 12)}
    expected = [{"step": step, "beta": {"mean": [number, None]}} for step, number in first.items()]
    assert looked(tmp_path / "seen") == expected
    assert not (tmp_path / "plain" / "connections.jsonl").exists()


def test_the_time_of_observing_is_not_training_time(tmp_path, monkeypatch):
    """The clock advances by a second at each reading, and by 1000 while the model is observed."""
    readings, waited = itertools.count(), []
    clock = SimpleNamespace(perf_counter=lambda: next(readings) + 1000.0 * len(waited))
    monkeypatch.setattr("residua.lab.training.loop.time", clock)

    def slowly(model, inputs):
        waited.append(model)
        return observe(model, inputs)

    train(ToyModel(), ToyBatches(), toy_config(connections_every=1), tmp_path, observe=slowly, progress=False)
    seen = jsonlines.read(tmp_path / "metrics.jsonl")
    assert len(waited) == len(seen) == 12
    assert seen[-1]["seconds"] < 1000
    assert min(row["tokens_per_second"] for row in seen) > seen[0]["tokens"] / 1000
    assert len({row["tokens_per_second"] for row in seen}) == 1, "of the steps since the last row"


@pytest.mark.parametrize("log_every", [1, 5])
def test_a_resumed_run_logs_every_row_once(tmp_path, log_every):
    """It stops after step 8 and is killed after resuming from step 6, from whose checkpoint it then continues."""
    settings = toy_config(connections_every=2, log_every=log_every, checkpoint_every=3)

    def go(folder, resume=False, batches=None):
        batches = batches or ToyBatches()
        return train(ToyModel(), batches, settings, folder, observe=observe, resume=resume, progress=False)

    go(tmp_path / "whole")
    folder = tmp_path / "run"
    go(folder, batches=ToyBatches(signals={7: signal.SIGINT}))
    assert [row["step"] for row in looked(folder)] == [2, 4, 6, 8]
    for step in (7, 8):  # as a kill would leave it
        with_rows = folder / "checkpoints" / f"step-{step}"
        if with_rows.exists():
            (with_rows / "model.safetensors").unlink()
    go(folder, resume=True)
    assert looked(folder) == looked(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("connection", ["ddl-tc", "edelta", "residual"])
def test_a_run_writes_the_gates_of_its_scheme(connection, data, alone, tmp_path, rows):
    """The losses are those of a run without observation; a scheme without gates writes no rows."""
    folder = tmp_path / "run"
    arguments = options(data, model={"connection": connection}, **EVERY)
    run(run_config(arguments), folder, progress=False)
    assert rows(folder) == rows(alone(connection))
    if connection == "residual":
        assert not (folder / "connections.jsonl").exists()
        return
    names = ["gamma", "cayley_beta", "angle"] if connection == "edelta" else ["beta"]
    seen = looked(folder)
    assert [row["step"] for row in seen] == [2, 4, 6]
    assert all(list(row) == ["step", *names] for row in seen)
    assert all(len(column) == 4 for row in seen for name in names for column in row[name].values())
    assert open_run(folder).step == 6


def test_all_ranks_observe_and_the_first_writes(data, alone, tmp_path, start, rows):
    """Two ranks share a micro-batch of two rows, of which the first has row 0."""
    folder = tmp_path / "run"
    job = run_ranks(start, 2, folder, options(data, gradient_accumulation=1, **EVERY))
    assert job.statuses == [0, 0], job.out
    run(run_config(options(data, gradient_accumulation=1, **EVERY)), tmp_path / "alone", progress=False)
    ours, theirs = looked(folder), looked(tmp_path / "alone")
    assert [row["step"] for row in ours] == [2, 4, 6]
    for a, b in zip(ours, theirs):
        assert a["beta"]["mean"] == pytest.approx(b["beta"]["mean"], rel=1e-4)
