import json
import math
from dataclasses import replace

import pytest
import torch

from residua import DeepDelta, EDelta, GatedDelta, JacobianHyperConnections, ManifoldHyperConnections
from residua.connections import GatedOrthogonal, Lambdas
from residua.lab.inspection import overview, sublayer_statistics, summary, trace, warnings
from support.tiny_models import prompt, tiny_model
from support.variants import PRESETS, perturbed


def planted(name="ddl-cc", *, facts=None, **values):
    """A trace of a perturbed model with some of its values replaced."""
    found = trace(tiny_model(name), prompt(12))
    return replace(found, values=found.values | values, facts=found.facts | (facts or {}))


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_a_table_and_figures(name):
    found = trace(tiny_model(name), prompt(12))
    table = summary(found)
    assert [row[0] for row in table.rows] == found.facts["sublayers"]
    assert all(len(row) == len(table.header) for row in table.rows)
    assert {"sublayer", "|X|", "|change|", "|y|"} <= set(table.header)
    shown = {"beta": "beta", "gamma": "gamma", "h_res": "|H - I|", "erase_norm": "erase", "h_pre": "h_pre"}
    for key, title in shown.items():
        assert (key in found.values) == (title in table.header)
    assert ("rows off" in table.header) == (PRESETS[name].constraint == "doubly stochastic")
    json.dumps(sublayer_statistics(found), allow_nan=False)
    first, *others, legend = overview(found)
    assert first.startswith(f"{name}, 12 tokens, loss ")
    has_product = any(line.startswith("product of all shortcuts") for line in others)
    assert has_product == (found.facts["shortcut"] is not None)
    assert ("erase beta |k^T X|" in legend) == ("erase" in table.header)


def test_figures_are_means_and_quantiles_over_the_tokens():
    found = trace(tiny_model("ddl-cc"), prompt(12))
    beta = found.values["beta"]
    for i, row in enumerate(sublayer_statistics(found)):
        assert row["beta"] == pytest.approx(beta[i].mean().item())
        for level, share in (("q05", 0.05), ("q50", 0.5), ("q95", 0.95)):
            assert row[f"beta_{level}"] == pytest.approx(beta[i].quantile(share).item())
        assert row["identity"] + row["projection"] + row["reflection"] == pytest.approx(1)
        assert row["state_norm"] == pytest.approx(found.values["state_norm"][i].mean().item())
        assert row["singular_min"] == pytest.approx(found.values["singular_min"][i].median().item())
    pairs = found.values["alignment"][torch.triu_indices(4, 4, offset=1).unbind()].mean()
    rank, low, high = (found.values[name] for name in ("effective_rank", "singular_min", "singular_max"))
    lines = overview(found)
    assert f"directions: mean |cos(k_i, k_j)| {pairs:.3f}, effective rank {rank.mean():.2f} of 4" in lines
    values = f"{low[-1].median():.4g} to {high[-1].median():.4g}"
    assert f"product of all shortcuts: singular values {values} (median token)" in lines


def test_the_distance_of_a_mixing_matrix_from_the_identity_is_that_of_its_farthest_entry():
    found = trace(tiny_model("hc"), prompt(12))
    distance = (found.values["h_res"] - torch.eye(4)).abs().flatten(-2).max(-1).values.mean(1)
    rows = sublayer_statistics(found)
    assert [row["distance_from_identity"] for row in rows] == pytest.approx(distance.tolist())


# What is still at its start in an untrained model. mhc-deepseek and mhc-glm start by averaging.
STARTS = dict.fromkeys(PRESETS) | {
    **dict.fromkeys(("edelta", "edelta-stream"), "gamma"),
    **dict.fromkeys(("hc", "frac", "mhc", "krom", "jpmhc"), "the mixing matrix"),
    **{name: "beta" for name in PRESETS if name.partition("-")[0] == "ddl" or name == "pooled-householder"},
    "gated-orthogonal": "gate",
}


@pytest.mark.parametrize("name", PRESETS)
def test_an_untrained_model_is_reported_at_its_start(name):
    found = warnings(trace(tiny_model(name, torch.float32, scale=0.0), prompt(12)))
    copies = [warning for warning in found if warning.startswith("the streams are copies")]
    assert len(copies) == (name in ("hc", "mhc", "ihc", "wide")), "they write (nearly) the same into all streams"
    found = [warning for warning in found if warning not in copies]
    assert [warning.partition(" is still ")[0] for warning in found] == [STARTS[name]] * (STARTS[name] is not None)
    if name == "mhc":
        assert found[0].endswith(": 1 mlp, 2 attention"), "the first and the last sublayer do not mix"
    else:
        assert all(warning.endswith("all sublayers") for warning in found)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_far_from_its_start_has_no_warning(name):
    """Gates and mappings are far enough from their start. Those of mHC and KromHC must stay near the identity; JPmHC is
    orthogonal only near it."""
    scale = {"mhc": 1.0, "krom": 3.0, "jpmhc": 0.1}.get(name, 0.2)
    model = perturbed(tiny_model(name, scale=0.0), scale=scale, seed=3)
    assert warnings(trace(model, prompt(12))) == []


def test_a_gate_that_moved_for_some_tokens_is_not_stuck():
    start = torch.ones(4, 12)
    assert "beta is still at its start, 1: all sublayers" in warnings(planted(beta=start))
    some = start.clone()
    some[1, :3] = 1.2
    assert "beta is still at its start, 1: 1 attention, 2 attention, 2 mlp" in warnings(planted(beta=some))


@pytest.mark.parametrize(("gate", "bound"), [("beta", 0.0), ("beta", 2.0), ("gamma", 0.0), ("gamma", 1.0)])
def test_saturated_gates_give_a_warning(gate, bound):
    values = torch.full((4, 12), 0.7)
    values[2] = bound
    values[3, :6] = bound
    found = warnings(planted("edelta" if gate == "gamma" else "ddl", **{gate: values}))
    sentence = f"{gate} is saturated at {bound:g}, where it has nearly no gradient, for most tokens: 2 attention"
    assert found == [sentence]


def test_a_gate_that_can_be_negative_is_not_saturated_at_zero():
    values = torch.full((4, 12), 0.7)
    values[1], values[2], values[3] = 0.0, -1.0, -1.999
    (found,) = warnings(planted("gated-delta", beta=values))
    assert found == "beta is saturated at -2, where it has nearly no gradient, for most tokens: 2 mlp"
    ranges = [GatedDelta(erase=erase, scale=1.5).gates["beta"].range for erase in ("signed", "positive")]
    assert ranges == [(-1.5, 1.5), (0.0, 1.5)], "where the fact comes from"


@pytest.mark.parametrize(
    ("scheme", "names"),
    [
        (GatedOrthogonal(), ["gate"]),
        (GatedOrthogonal(heads=2, scale=0.5), ["gate_0", "gate_1"]),
        (Lambdas(gate="token"), ["gate"]),
    ],
)
def test_a_signed_gate_is_described_and_gives_a_warning(scheme, names):
    untrained = warnings(trace(tiny_model(scheme, torch.float32, scale=0.0), prompt(12)))
    assert [f"{name} is still at its start, 0: all sublayers" for name in names] == [
        warning for warning in untrained if warning.startswith("gate")
    ]
    found = trace(tiny_model(scheme, scale=0.8), prompt(12))
    assert list(found.facts["gates"]) == names
    top = found.facts["gates"][names[0]]["range"][1]
    values = torch.full((4, 12), 0.2)
    values[1], values[2] = -top, top
    found = replace(found, values=found.values | dict.fromkeys(names, values))
    closed = [warning for warning in warnings(found) if "saturated" in warning]
    assert [warning.partition(", where")[0] for warning in closed] == [
        f"{name} is saturated at {bound:g}" for name in names for bound in (-top, top)
    ]
    row, header = sublayer_statistics(found)[1], summary(found).header
    for name in names:
        assert name in header
        assert [row[f"{name}_{level}"] for level in ("q05", "q50", "q95")] == pytest.approx([-top] * 3)


def test_a_sublayer_without_a_gate_gives_no_warning():
    untrained = trace(tiny_model(GatedOrthogonal(sublayers="attention"), torch.float32, scale=0.0), prompt(12))
    assert untrained.facts["left_out"] == {"gate": [1, 3]}
    assert "gate is still at its start, 0: 1 attention, 2 attention" in warnings(untrained)


def test_gates_that_stay_at_a_bound_are_reported_as_stuck_and_saturated():
    found = warnings(trace(tiny_model(DeepDelta(beta_init=2.0), scale=0.0), prompt(8)))
    assert [warning.partition(":")[0] for warning in found] == [
        "beta is still at its start, 2",
        "beta is saturated at 2, where it has nearly no gradient, for most tokens",
    ]


def test_a_context_that_is_not_causal_gives_a_warning():
    (found,) = warnings(planted("edelta", facts={"causal": False}))
    assert found.startswith("not causal: the coefficients of a token depend on later tokens")
    assert not EDelta(context="sequence").causal, "where the fact comes from"


def test_a_compressor_that_reads_one_channel_gives_a_warning():
    assert warnings(planted()) == []
    model = tiny_model("ddl-cc")
    with torch.no_grad():
        compress = model.model.stream.connections[2].compress
        compress.taps.zero_()
        compress.taps[1] = 1.0
        compress.read.copy_(torch.tensor([0.0, 0.0, 1.0, 0.01]))
    (found,) = warnings(trace(model, prompt(8)))
    assert found == "the compressor reads only channel 2: 2 attention, 2 mlp"


@pytest.mark.parametrize(
    ("scheme", "name", "words_of_it"),
    [
        (ManifoldHyperConnections(iterations=1, scale_init=3.0), "row_error", "not doubly stochastic: row_error"),
        (
            JacobianHyperConnections(alpha=3.0, iterations=1),
            "orthogonality_error",
            "not orthogonal: orthogonality_error",
        ),
    ],
)
def test_a_mixing_matrix_that_breaks_its_constraint_gives_a_warning(scheme, name, words_of_it):
    found = trace(tiny_model(scheme, scale=0.8), prompt(12))
    assert found.values[name].mean(1).max() > 0.05
    assert any(words_of_it in warning for warning in warnings(found))


def test_the_warning_of_non_finite_numbers_comes_first():
    model = tiny_model("ddl-cc")
    with torch.no_grad():
        model.model.stream.connections[1].value.project.weight[0, 0] = math.nan
    found = trace(model, prompt(8))
    first = warnings(found)[0]
    assert first.startswith("not finite: ")
    assert first.endswith("; the state after 1 mlp")
    assert found.facts["loss"] is None
    json.dumps(sublayer_statistics(found), allow_nan=False)
    assert any("nan" in row for row in summary(found).rows)
    overview(found)


def test_many_sublayers_are_not_all_named():
    model = tiny_model("ddl", num_hidden_layers=4)
    beta = torch.ones(8, 6)
    beta[7] = 0.5
    found = trace(model, prompt(6))
    found = replace(found, values=found.values | {"beta": beta})
    assert warnings(found) == ["beta is still at its start, 1: 1 attention, 1 mlp, 2 attention, 2 mlp and 3 more"]
