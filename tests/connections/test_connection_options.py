"""Naming a scheme, spelling it out, and the errors of wrong names, types and values."""

import json
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from residua import DeepDelta, Residual
from residua.connections import PRESETS, SCHEMES, describe, resolve
from support.variants import ALL

# What each variant adds to the plain residual, at width d, L blocks and d_v = m, for kernels k and k_e.
CLOSED_FORMS = {
    "residual": lambda d, L: 0,
    "ddl": lambda d, L: 2 * L * ((d + 1) + (d + 1)),
    "ddl-tc": lambda d, L: 2 * L * ((d + 1) + 4 * (d + 1)) + (L + 1) * (d * 4 * 4 + 4),
    "ddl-ec": lambda d, L: 2 * L * ((d + 1) + 4 * (d + 1)) + (L + 1) * (d * 4 * 4 + 4) + d * 4 * 4,
    "ddl-cc": lambda d, L: 2 * L * ((d + 1) + 4 * (d + 1)) + (L + 1) * (d * 4 + 4),
    "ddl-cc-ec": lambda d, L: 2 * L * ((d + 1) + 4 * (d + 1)) + (L + 1) * (d * 4 + 4) + d * 4 * 4,
    # The v-Map adds phi_k, d -> d / 4 -> d, to every sublayer.
    "ddl-v": lambda d, L: 2 * L * ((d + 1) + (d + 1) + d * d // 2),
    "ddl-tc-v": lambda d, L: 2 * L * ((d + 1) + 4 * (d + 1) + d * d // 2) + (L + 1) * (d * 4 * 4 + 4),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize(("dim", "blocks"), [(8, 1), (12, 3)])
def test_parameters_follow_the_closed_forms(name, dim, blocks):
    stream = PRESETS[name].build(dim, 2 * blocks)
    norms = 2 * blocks * dim
    assert sum(p.numel() for p in stream.parameters()) - norms == CLOSED_FORMS[name](dim, blocks)


def test_the_presets_are_the_papers_variants():
    assert PRESETS["residual"] == Residual()
    assert PRESETS["ddl"] == DeepDelta(value_channels=1, map="k", compress=None)
    assert PRESETS["ddl-v"] == DeepDelta(value_channels=1, map="v", compress=None)
    assert PRESETS["ddl-tc"] == DeepDelta(value_channels=4, compress="token", compress_kernel=4, expand="repeat")
    assert PRESETS["ddl-tc-v"] == replace(PRESETS["ddl-tc"], map="v")
    assert PRESETS["ddl-ec"] == replace(PRESETS["ddl-tc"], expand="conv", expand_kernel=4)
    assert PRESETS["ddl-cc"] == DeepDelta(value_channels=4, compress="channel", compress_kernel=4)
    assert PRESETS["ddl-cc-ec"] == replace(PRESETS["ddl-cc"], expand="conv", expand_kernel=4)


@pytest.mark.parametrize("name", ALL)
def test_spelt_out_and_read_again(name):
    """Every option is in the description, which survives JSON and describes the same scheme."""
    scheme = ALL[name]
    described = describe(scheme)
    assert described.keys() == {"scheme", *(field.name for field in fields(scheme))}
    assert resolve(json.loads(json.dumps(described))) == scheme
    assert describe(resolve(described)) == described


@pytest.mark.parametrize(
    "text",
    [
        *("mhc:iterations=", "mhc-deepseek:iterations=", "jpmhc:steps=", "hc:num_streams=", "ddl-tc:value_channels="),
        *(
            "ddl-tc:compress_kernel=",
            "ddl-ec:expand_kernel=",
            "residual:compress=token,compress_kernel=",
            "frac:num_fractions=",
        ),
    ],
)
def test_a_size_that_would_loop_or_allocate_without_end_is_refused(text):
    with pytest.raises(ValueError, match=rf": {re.split('[:,]', text)[-1][:-1]} must be at most \d+, got 1000000$"):
        resolve(f"{text}1000000")


def test_three_ways_to_name_a_scheme():
    cc = DeepDelta(value_channels=4, compress="channel")
    assert resolve("ddl-cc") == cc
    assert resolve({"preset": "ddl-cc"}) == cc
    assert resolve({"scheme": "deep_delta", "value_channels": 4, "compress": "channel"}) == cc
    assert resolve(cc) is cc
    assert resolve({"preset": "ddl-cc", "beta_init": 0.5, "v_activation": "linear"}) == replace(
        cc, beta_init=0.5, v_activation="linear"
    )


def test_derived_options_follow_an_override():
    """The channel kernel is d_v unless it is given; the compression follows d_v unless it is given."""
    assert resolve({"preset": "ddl-cc", "value_channels": 3}).compress_kernel == 3
    assert resolve({"preset": "ddl-cc", "value_channels": 3, "compress_kernel": 2}).compress_kernel == 2
    assert resolve({"preset": "ddl-tc", "value_channels": 2}).compress_kernel == 4
    assert resolve({"preset": "ddl-tc", "compress": "channel"}).compress_kernel == 4
    assert resolve({"preset": "ddl-cc", "compress": "token", "value_channels": 2}).compress_kernel == 4
    assert resolve({"preset": "ddl-tc", "compress_kernel": 2, "beta_init": 0.5}).compress_kernel == 2
    assert DeepDelta(value_channels=2).compress == "token"
    assert DeepDelta(value_channels=1).compress is None


def test_schemes_are_values():
    """Equal options make equal schemes; nobody changes one behind another's back."""
    assert DeepDelta(value_channels=2) == DeepDelta(value_channels=2, compress="token", compress_kernel=4)
    assert len({DeepDelta(), DeepDelta(), Residual()}) == 2
    with pytest.raises(FrozenInstanceError):
        DeepDelta().beta_init = 0.5
    for name, scheme in SCHEMES.items():
        assert describe(scheme())["scheme"] == name
        assert scheme.equation
        assert scheme.paper.startswith(("arXiv ", "transformers, models/", "github.com/")), "a publication, or its code"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"value_channels": 0}, ["value_channels", "at least 1", "0"]),
        ({"value_channels": -2}, ["value_channels", "at least 1"]),
        ({"value_channels": 2.0}, ["value_channels", "a whole number", "2.0"]),
        ({"value_channels": True}, ["value_channels", "a whole number", "True"]),
        ({"value_channels": "4"}, ["value_channels", "a whole number", "'4'"]),
        ({"map": "kv"}, ["map", "k, v", "'kv'"]),
        ({"compress": "both"}, ["compress", "token, channel or null", "'both'"]),
        ({"value_channels": 4, "compress_kernel": 0}, ["compress_kernel", "at least 1", "0"]),
        ({"value_channels": 3, "compress": "channel", "compress_kernel": 4}, ["compress_kernel", "at most", "3", "4"]),
        ({"value_channels": 3, "compress_form": "direct"}, ["compress_form", "'direct'", "channel"]),
        ({"expand_kernel": 0}, ["expand_kernel", "at least 1"]),
        ({"k_norm": "l2"}, ["k_norm", "rms, add, clamp, rms_d", "'l2'"]),
        ({"k_eps": 0}, ["k_eps", "positive", "0"]),
        ({"k_eps": "tiny"}, ["k_eps", "a number", "'tiny'"]),
        ({"operator": "v2"}, ["operator", "unit, v1_eps"]),
        ({"beta_init": 3}, ["beta_init", "[0, 2]", "3"]),
        ({"beta_init": -0.1}, ["beta_init", "[0, 2]"]),
        ({"beta_init": float("nan")}, ["beta_init", "[0, 2]", "nan"]),
        ({"beta_hidden": 0}, ["beta_hidden", "at least 1"]),
        ({"beta_input": "mean"}, ["beta_input", "pool_mean", "'mean'"]),
        ({"k_proj": 1}, ["k_proj", "true or false", "1"]),
        ({"v_activation": "relu"}, ["v_activation", "scaled_sigmoid", "'relu'"]),
        ({"phi_k_rank": 0}, ["phi_k_rank", "at least 1"]),
        ({"map": "v", "k_proj": True}, ["k_proj", "v-Map"]),
        ({"v_scale": float("inf")}, ["v_scale", "finite", "inf"]),
        ({"v_activation": "constant", "v_constant": float("nan")}, ["v_constant", "finite", "nan"]),
        ({"map": "v", "v_activation": "constant"}, ["v_activation", "v-Map", "'constant'"]),
        ({"init": "zeros"}, ["init", "average, authors"]),
    ],
)
def test_a_wrong_option_is_one_clear_line(options, words):
    with pytest.raises(ValueError) as raised:
        DeepDelta(**options)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message
    assert "must" in message
    assert "got" in message


@pytest.mark.parametrize(
    "options",
    [
        {"compress_kernel": 3},
        {"value_channels": 3, "compress": "channel", "compress_form": "direct", "compress_kernel": 2},
        {"value_channels": 3, "compress": "channel", "compress_form": "direct", "compress_causal": True},
        {"value_channels": 3, "compress": "token", "compress_causal": True},
        {"compress_sharing": "separate"},
        {"expand_kernel": 3},
        {"operator": "v1_eps", "k_norm": "add"},
        {"beta_hidden": 7},
        {"v_activation": "linear", "v_scale": 2.0},
        {"v_activation": "constant", "v_bias": False},
        {"v_constant": 1.0},
        {"map": "v", "v_input": "context"},
        {"v_activation": "constant", "v_input": "context"},
        {"phi_k": "linear"},
        {"phi_k_input": "x_in"},
        {"map": "v", "phi_k": "attention", "phi_k_input": "x_in"},
        {"phi_k_rank": 3},
        {"map": "v", "phi_k": "linear", "phi_k_rank": 3},
    ],
)
def test_an_option_without_effect_is_refused(options):
    with pytest.raises(ValueError, match=f"DeepDelta: {list(options)[-1]} must be .* unless "):
        DeepDelta(**options)


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        ("ddl-tcc", ["'ddl-tcc'", "did you mean 'ddl-tc'", "ddl-cc-ec"]),
        ("DXL", ["'DXL'", "known: residual, ", " ddl,"]),
        ("zzz", ["'zzz'", "known: residual"]),
        ({"preset": "ddl-cc-e"}, ["did you mean 'ddl-cc-ec'"]),
        ({"preset": "ddl", "beta_int": 0.5}, ["'beta_int'", "did you mean 'beta_init'"]),
        ({"preset": "residual", "beta_init": 0.5}, ["'residual'", "'beta_init'"]),
        ({"preset": "ddl", "beta_init": "1"}, ["beta_init", "must be a number", "'1'"]),
        ({"preset": "ddl", "value_channels": 0}, ["value_channels", "at least 1"]),
        ({"scheme": "deepdelta"}, ["'deepdelta'", "did you mean 'deep_delta'"]),
        ({"scheme": "deep_delta", "bta_init": 1.0}, ["did you mean 'beta_init'"]),
        ({"preset": "ddl", "scheme": "deep_delta"}, ["'preset' or 'scheme'"]),
        ({"value_channels": 4}, ["'preset' or 'scheme'", "value_channels"]),
        ({}, ["'preset' or 'scheme'"]),
        (None, ["must be a preset's name", "None"]),
        (4, ["must be a preset's name", "4"]),
        (["ddl"], ["must be a preset's name", "['ddl']"]),
        ({"preset": None}, ["no preset is called None"]),
        ({"preset": ["ddl"]}, ["no preset is called ['ddl']"]),
    ],
)
def test_a_wrong_name_is_one_clear_line(connection, words):
    with pytest.raises(ValueError) as raised:
        resolve(connection)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(("connection", "DeepDelta"))
    assert all(word in message for word in words), message


def test_a_scheme_without_a_name_is_one_clear_line():
    class Mine(Residual):
        pass

    with pytest.raises(ValueError, match=r"Mine has no name: call residua\.register\(name, Mine\) first"):
        describe(Mine())


def test_an_option_given_twice_is_refused():
    with pytest.raises(ValueError, match="must have every option once, got num_streams twice"):
        resolve("ihc:num_streams=4,num_streams=2")
