import json

import pytest
import torch

from residua.errors import InputError
from residua.lab.geometry.reflection import CONTROLS, TOYS, HybridToy, ReflectionSettings, SkewToy, toy, train_toy

FEW = ReflectionSettings(steps=60, num_train=100, evaluate_every=30)


def without_clock(record):
    return {key: value for key, value in record.items() if key != "seconds"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("householder", 25_025), ("hybrid", 58_242), ("jpmhc", 536_704), ("mlp", 16_576), ("linear", 4_160)],
)
def test_the_operators_have_the_published_parameters(name, parameters):
    assert sum(parameter.numel() for parameter in toy(name).build().parameters()) == parameters


@pytest.mark.parametrize("name", TOYS)
def test_every_parameter_of_an_operator_gets_a_gradient(name):
    torch.manual_seed(0)
    model = toy(name).build()
    x = torch.randn(8, 64)
    (model(x).prediction + x).square().mean().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", ["cayley", "jpmhc-exact", "hybrid", "householder"])
def test_norms_are_kept_where_the_operator_is_orthogonal(name):
    torch.manual_seed(0)
    model = toy(name).build().double()
    x = torch.randn(8, 64, dtype=torch.float64)
    kept = torch.allclose(model(x).prediction.norm(dim=-1), x.norm(dim=-1), rtol=1e-3)
    assert kept == (name in ("cayley", "jpmhc-exact"))


def test_the_truncated_map_from_the_identity_cannot_negate():
    """Its eigenvalues 1 - t^2/2 + i t keep |lambda + 1|^2 >= 3, whatever the network says."""
    for scale in (0.1, 1.0, 10.0, 100.0):
        torch.manual_seed(0)
        model = SkewToy().double()
        torch.nn.init.normal_(model.s[-1].weight, std=scale)
        x = torch.randn(20, 64, dtype=torch.float64)
        missed = (model(x).prediction + x).square().sum(-1) / x.square().sum(-1)
        assert missed.min() >= 3 - 1e-9


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_start_at_their_gate(name):
    controls = CONTROLS[name].controls
    gamma = CONTROLS[name].build()(torch.randn(5, 64)).gamma
    assert torch.allclose(gamma, torch.tensor(controls["gate_bias"]).sigmoid().expand(5))
    assert CONTROLS[name].penalty == controls["penalty"]


def test_the_published_gate_is_a_row_and_the_other_five_are_controls():
    assert len(CONTROLS) == 5
    assert HybridToy().gate.bias.item() == -1.5
    assert TOYS["hybrid"].penalty == 0.5


@pytest.mark.slow
def test_a_record_is_complete_and_the_same_every_time():
    record = train_toy("hybrid", 42, FEW)
    assert without_clock(train_toy("hybrid", 42, FEW)) == without_clock(record)
    assert train_toy("hybrid", 43, FEW)["loss"] != record["loss"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [step for step, _ in record["curve"]] == [0, 30, 60]
    assert record["curve"][-1][1] == record["loss"]
    assert record["gates"].keys() == {"beta", "gamma"}
    assert record["gates"]["gamma"][0][1] == pytest.approx(0.182, abs=1e-3)
    assert (record["num_train"], record["controls"], record["diverged"]) == (100, {}, False)
    assert train_toy("hybrid:gate_bias=0,penalty=0", 1, FEW)["model"] == "hybrid"


def test_training_does_not_touch_the_random_numbers_of_the_caller():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    train_toy("linear", 42, FEW)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_a_linear_map_learns_it_and_householder_finds_its_reflection():
    record = train_toy("linear", 42, ReflectionSettings(steps=600))
    assert record["cosine"] > 0.85
    record = train_toy("householder", 42, ReflectionSettings(steps=400))
    assert record["beta"] > 1.9


def test_a_run_that_diverges_says_so():
    record = train_toy("linear", 42, ReflectionSettings(steps=40, lr=1e38, evaluate_every=10))
    assert record["diverged"] is True
    assert record["loss"] is record["cosine"] is None
    json.dumps(record, allow_nan=False)


def test_bad_input_is_refused():
    with pytest.raises(InputError, match=r"did you mean householder\?"):
        toy("housholder")
    with pytest.raises(InputError, match="steps must be at least 1"):
        ReflectionSettings(steps=0)
