import json

import pytest
import torch

from residua.errors import InputError
from residua.lab.geometry.operators import OPERATORS, Hybrid, SkewCayley, operator
from residua.lab.geometry.study import OperatorSettings, train_operator

CONTROLS = [name for name, row in OPERATORS.items() if row.is_control]
FEW = OperatorSettings(steps=60, num_train=100, evaluate_every=30)


def build(name):
    row = operator(name)
    return row.build(**row.options)


def predict(model, x):
    return model(x, coefficients=[])


def without_clock(record):
    return {key: value for key, value in record.items() if key != "seconds"}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("householder", 25_025), ("hybrid", 58_242), ("jpmhc", 536_704), ("mlp", 16_576), ("linear", 4_160)],
)
def test_the_operators_have_the_published_parameters(name, parameters):
    assert sum(parameter.numel() for parameter in build(name).parameters()) == parameters


@pytest.mark.parametrize("name", OPERATORS)
def test_every_parameter_of_an_operator_gets_a_gradient(name):
    torch.manual_seed(0)
    model = build(name)
    x = torch.randn(8, 64)
    (predict(model, x) + x).square().mean().backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", ["cayley", "jpmhc-exact", "hybrid", "householder"])
def test_orthogonal_operators_preserve_norms(name):
    torch.manual_seed(0)
    model = build(name).double()
    x = torch.randn(8, 64, dtype=torch.float64)
    kept = torch.allclose(predict(model, x).norm(dim=-1), x.norm(dim=-1), rtol=1e-3)
    assert kept == (name in ("cayley", "jpmhc-exact"))


def test_the_truncated_map_from_the_identity_cannot_negate():
    """Its eigenvalues 1 - t^2/2 + i t keep |lambda + 1|^2 >= 3, whatever the network says."""
    for scale in (0.1, 1.0, 10.0, 100.0):
        torch.manual_seed(0)
        model = SkewCayley().double()
        torch.nn.init.normal_(model.s[-1].weight, std=scale)
        x = torch.randn(20, 64, dtype=torch.float64)
        missed = (predict(model, x) + x).square().sum(-1) / x.square().sum(-1)
        assert missed.min() >= 3 - 1e-9


@pytest.mark.parametrize("name", CONTROLS)
def test_controls_start_at_their_requested_gate(name):
    controls, coefficients = OPERATORS[name].options, []
    model = build(name)
    model(torch.randn(5, 64), coefficients=coefficients)
    ((_, gamma),) = coefficients
    assert torch.allclose(gamma, torch.tensor(controls["gate_bias"]).sigmoid().expand(5))
    penalty = model.penalty(coefficients)
    if controls["penalty"]:
        assert penalty.item() == pytest.approx(controls["penalty"] * (4 * gamma * (1 - gamma)).mean().item())
    else:
        assert penalty is None


def test_the_published_gate_is_a_row_and_the_other_five_are_controls():
    assert len(CONTROLS) == 5
    assert Hybrid().gate.bias.item() == -1.5
    assert Hybrid().gate_penalty == 0.5


@pytest.mark.slow
def test_a_record_is_complete_and_the_same_every_time():
    record = train_operator("hybrid", 42, FEW)
    assert without_clock(train_operator("hybrid", 42, FEW)) == without_clock(record)
    assert train_operator("hybrid", 43, FEW)["loss"] != record["loss"]
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert [step for step, _ in record["curve"]] == [0, 30, 60]
    assert record["curve"][-1][1] == record["loss"]
    assert record["gates"].keys() == {"beta", "gamma"}
    assert record["gates"]["gamma"][0][1] == pytest.approx(0.182, abs=1e-3)
    assert (record["num_train"], record["controls"], record["diverged"]) == (100, {}, False)
    assert train_operator("hybrid:gate_bias=0,penalty=0", 1, FEW)["model"] == "hybrid"


def test_training_does_not_touch_the_random_numbers_of_the_caller():
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    train_operator("linear", 42, FEW)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_a_linear_map_learns_the_reflection_and_householder_finds_its_direction():
    record = train_operator("linear", 42, OperatorSettings(steps=600))
    assert record["cosine"] > 0.85
    record = train_operator("householder", 42, OperatorSettings(steps=400))
    assert record["beta"] > 1.9


def test_a_diverged_run_is_reported():
    record = train_operator("linear", 42, OperatorSettings(steps=40, lr=1e38, evaluate_every=10))
    assert record["diverged"] is True
    assert record["loss"] is record["cosine"] is None
    json.dumps(record, allow_nan=False)


def test_an_unknown_operator_is_refused_with_all_names():
    with pytest.raises(InputError, match="an operator must be one of householder, hybrid, "):
        operator("housholder")
