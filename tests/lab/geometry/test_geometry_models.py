import pytest
import torch
from torch import nn

from residua.connections import PRESETS, EDelta
from residua.errors import InputError
from residua.lab.geometry.measure import causality, stream_norms
from residua.lab.geometry.models import MODELS, Architecture, match, own_name, row
from support.variants import perturbed

NAMES = [*MODELS, "attnres", "attnres-block", "mudd"]
MATCHED = [name for name in NAMES if name != "zero-layer"]
PUBLISHED = {"dim": 128, "layers": 9, "heads": 4}
QUICK = {"dim": 64, "layers": 3, "heads": 4}


def architecture(name, **changes):
    return match(name, **{"features": 6, "length": 5, "dim": 32, "layers": 2, "heads": 4, **changes})


def test_the_plain_residual_has_the_published_parameters():
    # 12 d^2 + 2 d in each layer, the last norm, and the wrapper: in, 255 positions, out.
    expected = 9 * (12 * 128**2 + 2 * 128) + 128 + (16 * 128 + 128) + 255 * 128 + (128 * 16 + 16)
    assert match("residual", features=16, length=255, **PUBLISHED).parameters == expected == 1_808_784


@pytest.mark.parametrize("name", MATCHED)
@pytest.mark.parametrize("features", [16, 64])
def test_models_match_the_parameters_of_the_plain_residual_with_their_wrapper(name, features):
    found = match(name, features=features, length=32, **QUICK)
    assert abs(found.ratio - 1) <= 0.03
    model = found.build()
    assert sum(parameter.numel() for parameter in model.parameters()) == found.parameters


@pytest.mark.parametrize(
    ("name", "layers", "width"),
    [
        ("residual", 9, 128),
        ("pooled-householder-sequence", 8, 128),
        ("mhc-split", 9, 128),
        ("jpmhc", 7, 512),
        ("edelta-sequence", 6, 128),
        ("edelta-stream", 6, 512),
    ],
)
def test_published_models_have_the_published_layers_and_width(name, layers, width):
    found = match(name, features=16, length=255, **PUBLISHED)
    assert (found.layers, found.width) == (layers, width)
    assert abs(found.ratio - 1) <= 0.01


@pytest.mark.parametrize("name", NAMES)
def test_models_are_causal_unless_their_name_ends_in_sequence(name):
    # An EDelta-Stream sees its context as its preset says: each token.
    torch.manual_seed(0)
    model = perturbed(match(name, features=6, length=5, **QUICK).build(), scale=0.1)
    assert causality(model, 6, 5).causal == (not name.endswith("-sequence"))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name):
    torch.manual_seed(0)
    model = perturbed(match(name, features=6, length=5, **QUICK).build(), scale=0.1)
    coefficients = []
    loss = model(torch.randn(3, 5, 6), coefficients=coefficients).square().mean()
    penalty = model.penalty(coefficients)
    (loss if penalty is None else loss + penalty).backward()
    assert [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_the_start_is_as_published():
    torch.manual_seed(0)
    model = Architecture("residual", MODELS["residual"], 64, 50, dim=128, layers=4, heads=4, hidden=512).build()
    attention, (up, _, down) = model.sublayers[:2]
    for weight in (model.input.weight, model.positions.weight, attention.qkv.weight, up.weight, model.output.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (attention.out.weight, down.weight):
        assert weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert not model.input.bias.any()
    assert not model.output.bias.any()
    assert [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)] == ["norm"]


def test_states_and_coefficients_are_collected():
    model = architecture("edelta-token").build()
    states, coefficients = [], []
    x = torch.randn(2, 5, 6)
    assert torch.equal(model(x, states=states, coefficients=coefficients), model(x))
    sublayers = len(model.sublayers)
    assert len(states) == sublayers + 1
    assert len(coefficients) == sublayers
    parts = [connection.penalty(one).mean() for connection, one in zip(model.connections, coefficients)]
    assert model.penalty(coefficients).item() == pytest.approx(sum(parts).item())
    plain = architecture("residual").build()
    coefficients = []
    plain(x, coefficients=coefficients)
    assert plain.penalty(coefficients) is None


def test_states_that_grow_with_depth_are_collected():
    """Sequences of one token are complete, so no memory is required for them."""
    for name in ("attnres", "attnres:block_size=2", "pooled-householder"):
        model, states = perturbed(architecture(name).build(), scale=0.1), []
        x = torch.randn(2, 5, 6)
        y = model(x, states=states)
        assert torch.allclose(model(x[:, :1]), y[:, :1], atol=1e-5)
        norms = stream_norms(states)
        assert norms[0] == 1
        assert len(norms) == len(model.sublayers) + 1


def test_a_wide_model_writes_and_reads_every_row_of_the_state():
    found = match("jpmhc", features=6, length=5, **QUICK)
    model, states = found.build(), []
    model(torch.randn(2, 5, 6), states=states)
    assert states[0].shape == (2, 5, 4, 64)
    assert not torch.equal(states[0][..., 0, :], states[0][..., 1, :])
    assert model.output.in_features == model.norm.weight.numel() == found.width == 256


def test_the_zero_layer_network_has_no_layers():
    assert match("zero-layer", features=64, length=128, **PUBLISHED).parameters == 33_088


def test_every_preset_and_option_can_be_named():
    assert all(row(name).connection == {"preset": name} for name in PRESETS if name not in MODELS)
    named = row("edelta-token:num_streams=8,penalty=0.0")
    assert named.connection == {"preset": "edelta", "context": "token", "num_streams": 8, "penalty": 0.0}
    assert [row(name) for name in ("JPmHC", "edelta_stream")] == [row(name) for name in ("jpmhc", "edelta-stream")]
    assert row("ddl-cc:v_activation=linear,k_proj=true").connection["v_activation"] == "linear"
    model = architecture("edelta-token:num_streams=8").build()
    assert model.connections[0].scheme == EDelta(num_streams=8)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("edelta-tokn", "did you mean edelta-token?"),
        ("nothing-like-it", "`residua schemes` lists all"),
        ("ddl:beta_int=1", "beta_init"),
        ("ddl:", "OPTION=VALUE"),
        ("edelta-token:num_streams=1", "num_streams"),
        ("edelta-token:num_streams=5", "divisor"),
    ],
)
def test_invalid_sizes_are_an_error(name, expected):
    with pytest.raises(InputError, match="model") as raised:
        architecture(name)
    assert expected in str(raised.value)


def test_sizes_that_do_not_fit_are_an_error():
    with pytest.raises(InputError, match="larger width"):
        architecture("jpmhc", dim=8, layers=1)


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        (["ddl", "DDL", "_ddl"], "ddl"),
        (["Residual", "residual"], "residual"),
        (["ddl:beta_init=0.50", "DDL:beta_init=0.5"], "ddl:beta_init=0.5"),
        (["Edelta_Token", "edelta-token"], "edelta-token"),
        (["Edelta-Token:gamma_init=0.50"], "edelta-token:gamma_init=0.5"),
        (["lambdas+tc", "lambdas:compress=token"], "lambdas+tc"),
    ],
)
def test_one_model_has_one_name(spellings, name):
    assert {own_name(spelling) for spelling in spellings} == {name}
    assert row(name) == row(spellings[0])


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match=r"^model ddll: "):
        own_name("ddll")
