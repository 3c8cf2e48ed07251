import json
import pickle
from dataclasses import replace

import pytest
import torch

from residua.lab.geometry.study import FULL, Settings, job, train
from residua.lab.training.optimizer import parameter_groups

TINY = Settings(
    steps=30,
    batch_size=4,
    warmup=5,
    dim=32,
    layers=2,
    length=6,
    num_train=40,
    num_val=10,
    evaluate_every=10,
    online_trajectories=4,
    online_stride=1,
)
CPU = torch.device("cpu")


def trained(model, task, seed=0, settings=TINY):
    """The record of a job, without what a clock decides. Its arguments are sent to another process, as by a pool."""
    record = train(*pickle.loads(pickle.dumps(job(model, task, seed, settings, CPU).arguments)))
    return {key: value for key, value in record.items() if key not in ("seconds", "circumstances")}


def test_the_recipe_is_the_published_one():
    assert (FULL.steps, FULL.batch_size, FULL.clip, FULL.weight_decay) == (2000, 64, 1.0, 0.1)
    rates = [FULL.learning_rate(step) for step in (1, 50, 100, 1050, 2000)]
    assert rates == pytest.approx([1e-5, 5e-4, 1e-3, 5.5e-4, 1e-4])
    assert FULL.task("gyroscope").length == 255
    model = job("residual", "gyroscope", 0, TINY, CPU).arguments[0].build()
    groups = parameter_groups(model, TINY.weight_decay)
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert all(parameter.dim() == 2 for parameter in groups[0]["params"])
    assert all(parameter.dim() == 1 for parameter in groups[1]["params"])


@pytest.mark.slow
def test_a_record_is_complete():
    record = trained("edelta-token", "gyroscope")
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert (record["task"], record["model"], record["seed"]) == ("gyroscope", "edelta-token", 0)
    assert [step for step, _ in record["curve"]] == [10, 20, 30]
    assert record["curve"][-1][1] == pytest.approx(record["loss"], rel=1e-5)
    assert record["best_loss"] == min(loss for _, loss in record["curve"])
    assert record["online_loss"] == pytest.approx(record["loss"], rel=1e-4)
    assert record["causal"] is True
    assert len(record["by_position"]) == len(record["online_by_position"]) == 6
    assert len(record["stream_norms"]) == 2 * record["architecture"]["layers"] + 1
    assert record["stream_norms"][0] == 1.0
    assert record["gates"].keys() == {"gamma", "beta"}
    assert record["position0_leak"] in (True, False)
    assert record["settings"]["lr"] == TINY.lr


@pytest.mark.slow
def test_only_the_seed_determines_the_numbers():
    record = trained("residual", "near-pi")
    assert "position0_leak" not in record
    assert record["gates"] == {}
    torch.manual_seed(99)
    assert trained("residual", "near-pi") == record
    assert trained("residual", "near-pi", seed=1)["loss"] != record["loss"]


def test_a_run_that_diverges_is_recorded_without_numbers():
    record = trained("residual", "stability", settings=replace(TINY, lr=1e30, final_lr=1e30))
    assert record["diverged"] is True
    assert record["loss"] is record["online_loss"] is record["stream_norms"] is None
    assert record["steps_done"] < TINY.steps


@pytest.mark.slow
def test_the_reflection_is_a_single_position_and_has_a_cosine():
    """With one position there is no causality to measure, and a cosine replaces the scores by position."""
    settings = replace(TINY, features=16)
    chosen = settings.task("reflection")
    assert (chosen.length, chosen.dim, chosen.num_train, chosen.num_val) == (1, 16, 500, 500)
    record = trained("edelta-sequence", "reflection", settings=settings)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert -1 <= record["cosine"] <= 1
    assert record["num_train"] == 500
    assert record["gamma"] == record["gates"]["gamma"][-1][1]
    assert record["causal"] is None
    assert record["online_loss"] is None
