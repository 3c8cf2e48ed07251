"""Naming a scheme, spelling it out, and the errors of wrong names, types and values."""

import json
import re
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from residua import (
    AttentionResiduals,
    DeepDelta,
    DeepSeekHyperConnections,
    GatedDelta,
    GatedOrthogonal,
    Residual,
)
from residua.connections import PRESETS, SCHEMES, describe, resolve
from support.variants import ALL


@pytest.mark.parametrize("name", ["ddl", "ddl-tc"])
def test_the_v_map_adds_a_map_through_a_quarter_of_the_width(name):
    """To every sublayer; tests/models/test_parameter_counts.py counts all else."""
    k_map, v_map = (PRESETS[preset].build(12, 6).parameters() for preset in (name, f"{name}-v"))
    assert sum(p.numel() for p in v_map) - sum(p.numel() for p in k_map) == 6 * 2 * 12 * 3


def test_the_presets_are_the_papers_variants():
    assert PRESETS["residual"] == Residual()
    assert PRESETS["ddl"] == DeepDelta(value_channels=1, map="k", compress=None)
    assert PRESETS["ddl-v"] == DeepDelta(value_channels=1, map="v", compress=None)
    assert PRESETS["ddl-tc"] == DeepDelta(value_channels=4, compress="token", compress_kernel=4, expand="repeat")
    assert PRESETS["ddl-tc-v"] == replace(PRESETS["ddl-tc"], map="v")
    assert PRESETS["ddl-ec"] == replace(PRESETS["ddl-tc"], expand="conv", expand_kernel=4)
    assert PRESETS["ddl-cc"] == DeepDelta(value_channels=4, compress="channel", compress_kernel=4)
    assert PRESETS["ddl-cc-ec"] == replace(PRESETS["ddl-cc"], expand="conv", expand_kernel=4)
    assert PRESETS["gated-delta"] == GatedDelta(erase="signed", scale=2.0, write_gate=False, heads=1, k_eps=1e-5)
    assert PRESETS["gated-orthogonal"] == GatedOrthogonal(gate="token", scale=1.0, heads=1, sublayers="all", eps=1e-6)
    assert PRESETS["orthogonal"] == GatedOrthogonal(gate="one")
    assert PRESETS["attnres"] == AttentionResiduals(block_size=1)
    assert PRESETS["attnres-block"] == AttentionResiduals(block_size=12), "six layers"
    assert PRESETS["mhc-glm"] == DeepSeekHyperConnections(head="mean")
    assert PRESETS["mhc-deepseek"] == DeepSeekHyperConnections(head="sigmoid")


@pytest.mark.parametrize("name", ["residual", "ddl-tc", "mhc", "mudd-trimmed"])
def test_a_description_has_every_option_and_is_restored_from_json(name):
    """Its JSON resolves to the same scheme. The contract tests that every scheme lists all its options."""
    scheme = ALL[name]
    described = describe(scheme)
    assert described.keys() == {"scheme", *(field.name for field in fields(scheme))}
    assert resolve(json.loads(json.dumps(described))) == scheme
    assert describe(resolve(described)) == described


@pytest.mark.parametrize(
    "text",
    [
        *(
            "mhc:iterations=",
            "mhc-deepseek:iterations=",
            "jpmhc:iterations=",
            "hc:num_streams=",
            "ddl-tc:value_channels=",
        ),
        *(
            "ddl-tc:compress_kernel=",
            "ddl-ec:expand_kernel=",
            "residual:compress=token,compress_kernel=",
            "frac:num_fractions=",
        ),
    ],
)
def test_a_size_that_would_exhaust_time_or_memory_is_refused(text):
    with pytest.raises(ValueError, match=rf": {re.split('[:,]', text)[-1][:-1]} must be at most \d+, got 1000000$"):
        resolve(f"{text}1000000")


def test_a_scheme_can_be_named_in_three_ways():
    cc = DeepDelta(value_channels=4, compress="channel")
    assert resolve("ddl-cc") == cc
    assert resolve({"preset": "ddl-cc"}) == cc
    assert resolve({"scheme": "deep_delta", "value_channels": 4, "compress": "channel"}) == cc
    assert resolve(cc) is cc
    assert resolve({"preset": "ddl-cc", "beta_init": 0.5, "v_activation": "linear"}) == replace(
        cc, beta_init=0.5, v_activation="linear"
    )


def test_derived_options_follow_an_override():
    """The channel kernel and the compression follow d_v unless they are given."""
    assert resolve({"preset": "ddl-cc", "value_channels": 3}).compress_kernel == 3
    assert resolve({"preset": "ddl-cc", "value_channels": 3, "compress_kernel": 2}).compress_kernel == 2
    assert resolve({"preset": "ddl-tc", "value_channels": 2}).compress_kernel == 4
    assert resolve({"preset": "ddl-tc", "compress": "channel"}).compress_kernel == 4
    assert resolve({"preset": "ddl-cc", "compress": "token", "value_channels": 2}).compress_kernel == 4
    assert resolve({"preset": "ddl-tc", "compress_kernel": 2, "beta_init": 0.5}).compress_kernel == 2
    assert DeepDelta(value_channels=2).compress == "token"
    assert DeepDelta(value_channels=1).compress is None


def test_schemes_compare_by_value_and_are_immutable():
    assert DeepDelta(value_channels=2) == DeepDelta(value_channels=2, compress="token", compress_kernel=4)
    assert len({DeepDelta(), DeepDelta(), Residual()}) == 2
    with pytest.raises(FrozenInstanceError):
        DeepDelta().beta_init = 0.5
    for name, scheme in SCHEMES.items():
        assert describe(scheme())["scheme"] == name
        assert scheme.equation
        assert scheme.paper.startswith(("arXiv ", "transformers, models/", "github.com/")), "a publication, or its code"


WRONG = """
altup edelta edelta-stream gated-residual ihc jpmhc mhc mhc-deepseek wide:num_streams=1 | num_streams must be at least 2
altup:active=4 | active must be 0 to 3, a stream
altup:laurel_rank=-1 | laurel_rank must be 0 or more
altup:weight_std=0.0 | weight_std must be a positive number
ihc:magnitude=1.004,start=mirrored | magnitude must be above 1.005 with start='mirrored'
mhc-deepseek:gate_eps=0.01,start=residual | gate_eps must be at most 1e-5 with start='residual'
attnres attnres-inkling delta-attnres:block_size=0 | block_size must be at least 1
attnres delta-attnres gated-delta gated-orthogonal:heads=0 | heads must be at least 1
attnres-inkling:separate_every=-1 | separate_every must be 0 or more
ddl:value_channels=0 | value_channels must be at least 1
ddl:value_channels=2.0 | value_channels must be a whole number
ddl:map=kv | map must be one of k, v
ddl:compress=both | compress must be one of token, channel or null
ddl:value_channels=4,compress_kernel=0 | compress_kernel must be at least 1
ddl:value_channels=3,compress=channel,compress_kernel=4 | compress_kernel must be at most value_channels (3) taps
ddl:value_channels=3,compress_form=direct | compress_form must be 'read' unless compress is 'channel'
ddl:expand_kernel=0 | expand_kernel must be at least 1
ddl:k_norm=l2 | k_norm must be one of rms, add, clamp, rms_d
ddl:k_eps=0 | k_eps must be a positive number
ddl:operator=v2 | operator must be one of unit, v1_eps
ddl:beta_init=3 | beta_init must be a number in [0, 2]
ddl:beta_init=-0.1 | beta_init must be a number in [0, 2]
ddl:beta_hidden=0 | beta_hidden must be at least 1
ddl:beta_input=mean | beta_input must be one of context, pool_mean, flatten, conv, sublayer_out
ddl:k_proj=1 | k_proj must be true or false
ddl:v_activation=relu | v_activation must be one of scaled_sigmoid, linear, constant
ddl:phi_k_hidden=0 | phi_k_hidden must be at least 1
ddl:map=v,k_proj=true | k_proj must be False unless map is 'k'
ddl:map=v,v_activation=constant | v_activation must be 'scaled_sigmoid' or 'linear' with the v-Map
ddl:start=zeros | start must be one of average, authors
ddl:compress_kernel=3 | compress_kernel must be None unless compress convolves
ddl:value_channels=3,compress=channel,compress_form=direct,compress_kernel=2 | compress_kernel must be None
ddl:value_channels=3,compress=channel,compress_form=direct,compress_causal=true | compress_causal must be False
ddl:value_channels=3,compress=token,compress_causal=true | compress_causal must be False
ddl gated-orthogonal residual:expand_kernel=3 | expand_kernel must be 4 unless expand is 'conv'
ddl:operator=v1_eps,k_norm=add | k_norm must be 'rms' unless operator is 'unit'
ddl:beta_hidden=7 | beta_hidden must be 128 unless beta_head is 'mlp'
ddl:v_activation=linear,v_scale=2.0 | v_scale must be 4.0 unless v_activation is 'scaled_sigmoid'
ddl:v_activation=constant,v_bias=false | v_bias must be True unless v_activation is 'scaled_sigmoid' or 'linear'
ddl:v_constant=1.0 | v_constant must be 2.0 unless v_activation is 'constant'
ddl:map=v,v_input=context | v_input must be 'x_in' unless map is 'k' and v_activation is 'scaled_sigmoid' or 'linear'
ddl:v_activation=constant,v_input=context | v_input must be 'x_in' unless map is 'k' and v_activation is
ddl:phi_k=linear | phi_k must be 'mlp' unless map is 'v'
ddl:phi_k_input=x_in | phi_k_input must be 'context' unless map is 'v' and phi_k is 'linear' or 'mlp'
ddl:map=v,phi_k=attention,phi_k_input=x_in | phi_k_input must be 'context' unless map is 'v' and phi_k is 'linear'
ddl:phi_k_hidden=3 | phi_k_hidden must be None unless map is 'v' and phi_k is 'mlp' or
ddl:map=v,phi_k=linear,phi_k_hidden=3 | phi_k_hidden must be None unless map is 'v' and phi_k is 'mlp' or
denseformer:dilation=0 | dilation must be at least 1
denseformer:period=0 | period must be at least 1
edelta:hidden=0 | hidden must be at least 1
edelta:gamma_init=1.0 | gamma_init must be a number above 0 and below 1
edelta:cayley_init=0.0 | cayley_init must be a positive number
edelta edelta-stream:penalty=-0.1 | penalty must be 0 or more
edelta-stream:gamma_init=0 | gamma_init must be
frac:num_fractions=0 | num_fractions must be at least 1
frac hc ihc krom:scale_init=0.0 | scale_init must be a finite number other than 0
gated-delta:erase=both | erase must be one of signed, positive, none, coupled
gated-delta:scale=0.0 | scale must be a number above 0, at most 2
gated-delta:scale=2.1 | scale must be a number above 0, at most 2
gated-delta:erase=none,scale=1.0 | scale must be 2.0 unless erase is 'signed' or 'positive'
gated-delta:erase=none,heads=2 | heads must be 1 unless there is a gate
gated-delta:k_eps=0.0 | k_eps must be a positive number
gated-delta:rank=0 | rank must be at least 1
gated-residual:gate_rank=0 | gate_rank must be at least 1
gated-delta:erase=coupled | erase must be another choice unless write is 'value'
gated-delta:value_channels=4 | value_channels must be 1 unless write_gate, channel_gates
gated-delta:channel_gates=true | channel_gates must be False unless something is erased from several value channels
gated-delta:write=value,write_gate=true | write_gate must be False unless write is 'output'
gated-delta:v_activation=linear | v_activation must be 'scaled_sigmoid' unless write is 'value'
gated-delta:erase=coupled,write=value,scale=1.0 | scale must be 2.0 unless erase is 'signed' or 'positive'
gated-orthogonal:scale=0.0 | scale must be a positive number
gated-orthogonal:gate=one,scale=2.0 | scale must be 1.0 unless gate is 'token' or 'static'
gated-orthogonal:eps=0.0 | eps must be a positive number
gated-residual ihc mhc-deepseek:weight_std=-1.0 | weight_std must be 0 or more
gated-residual mhc-deepseek:weight_std=0.1,start=residual | weight_std must be 0.02 unless start is 'published'
hc:num_streams=0 | num_streams must be at least 1
ihc:magnitude=1.0 | magnitude must be a number above 1
ihc mhc-deepseek:gate_eps=-1e-06 | gate_eps must be 0 or more, far below 1 / num_streams
ihc mhc-deepseek:gate_eps=0.125 | gate_eps must be 0 or more, far below 1 / num_streams
ihc:weight_std=0.1,start=residual | weight_std must be 0.006 unless start is 'published'
jpmhc:alpha=0.0 | alpha must be a positive number
jpmhc:iterations=0 | iterations must be at least 1
jpmhc:cayley=exact,iterations=3 | iterations must be 2 unless cayley is 'iterative'
mhc:mixing=permutations,iterations=5 | iterations must be 20 unless mixing is 'sinkhorn'
frac hc:dynamic=false,tanh=false | tanh must be True unless dynamic is True
frac hc:dynamic=false,scale_init=0.1 | scale_init must be 0.01 unless dynamic is True
wide:max_forget=0.2 | max_forget must be 0.1 unless retention is a number
ddl hc:recompute=none,recompute_every=8 | recompute_every must be 4 unless recompute is 'replay'
krom:num_streams=1 | num_streams must be a power of 2, at least 2
krom:num_streams=6 | num_streams must be a power of 2, at least 2
lambdas:r=null,r_last=1.0 | r_last must be None unless r is a number
lambdas:z=null,z_every=sublayer | z_every must be 'block' unless z is a number
lambdas:r=null,z=null,when=write | when must be 'read' unless r or z is a number
lambdas:when=write,gate=token | gate must be 'none' with norm='post' or when='write'
lambdas:r=null,z=null,per_feature=true | per_feature must be False unless there is a scale
lambdas:bias=true | bias must be False unless r and p are numbers, r_every='sublayer' and when='write'
lambdas:norm=post | r must be None with norm='post'
lambdas:norm=post,r=null | z must be None with norm='post'
mhc:num_streams=6,mixing=permutations | num_streams must be at most 5 with mixing='permutations'
mhc mhc-deepseek:iterations=0 | iterations must be at least 1
mhc:scale_init=0.0 | scale_init must be a finite number other than 0
mhc-glm:pre=previous | head must be 'sigmoid' with pre='previous'
mudd:layers=0 | layers must be at least 1
mudd:prepost_norm=true,layers=2 | layers must be None unless prepost_norm is False
mudd:hidden_multiple=0 | hidden_multiple must be at least 1
mudd:readout_multiple=0 | readout_multiple must be at least 1
ddl:k_eps=1000000000000000000000000000000 | k_eps must be a number
pooled-householder:beta_init=2.5 | beta_init must be a number in [0, 2]
residual:branch_kernel=3 | branch_kernel must be 4 unless branch is 'conv'
residual:branch=conv,branch_kernel=0 | branch_kernel must be at least 1
residual:expand=conv,expand_kernel=0 | expand_kernel must be at least 1
residual:compress=token,compress_kernel=0 | compress_kernel must be at least 1
residual:compress_kernel=3 | compress_kernel must be 4 unless compress is 'token'
ddl residual:compress_sharing=separate | compress_sharing must be 'block' unless compress is not null
wide:spread=-0.1 | spread must be 0 or more
wide:retention=1.0 | retention must be a number above 0 and below 1
wide:retention=0.8 | retention must be above 1 - max_forget, 0.9, or null
wide:max_forget=0.0 | max_forget must be a number above 0 and below 1
"""
# Each range, and each option that another one rules out. Types have one check, that of DeepDelta's rows.


@pytest.mark.parametrize(
    ("preset", "options", "words"),
    [
        (name, *row.partition(":")[2].split(" | "))
        for row in WRONG.split("\n")[1:-1]
        for name in row.partition(":")[0].split()
    ],
)
def test_a_wrong_option_gives_a_one_line_error(preset, options, words):
    with pytest.raises(ValueError) as raised:
        resolve(f"{preset}:{options}")
    message = str(raised.value)
    assert message.startswith(f"{type(PRESETS[preset]).__name__}: {words}")
    assert ", got " in message
    assert "\n" not in message


def test_a_class_refuses_wrong_options_when_called_directly():
    for scheme in SCHEMES.values():
        for field in fields(scheme):
            with pytest.raises(ValueError, match=f"^{scheme.__name__}: .* must be .*, got "):
                scheme(**{field.name: object()})


NOT_BUILT = """
residual:branch=conv,compress=token | branch must be null if reads are convolved over the tokens too, got 'conv'
ddl-tc:branch=conv | branch must be null if reads are convolved over the tokens too, got 'conv'
ddl:beta_input=conv,branch=conv | branch must be null if reads are convolved over the tokens too, got 'conv'
attnres:heads=3 | heads must be a divisor of the width dim = 8, got 3
delta-attnres:heads=3 | heads must be a divisor of the width dim = 8, got 3
edelta:num_streams=3 | num_streams must be a divisor of the width dim = 8.*, got 3
frac:num_fractions=3 | FracConnections: num_fractions must be a divisor of the width dim = 8, got 3
gated-delta:heads=3 | heads must be a divisor of the width dim = 8, got 3
gated-delta:heads=4,rank=3 | rank must be at most the 2 features of a head, got 3
gated-orthogonal:heads=3 | heads must be a divisor of the width dim = 8, got 3
mhc:num_streams=3,layout=split | num_streams must be a divisor of the width dim = 8, got 3
"""


@pytest.mark.parametrize("row", NOT_BUILT.strip().splitlines())
def test_an_invalid_build_gives_a_one_line_error(row):
    text, words = row.split(" | ")
    with pytest.raises(ValueError, match=words):
        resolve(text).build(8, 2)


NOT_PRESERVED = """
altup | no start preserves the plain residual: LAuReL divides
attnres-inkling | sources are normalised .* use attnres
ddl | gated-delta.* starts as x \\+ h
deepnorm | norm='post' normalises the state itself
gated-delta:write=value | no start preserves the plain residual: beta v does not depend
gated-orthogonal:gate=one | gate='one' removes the update along the state
ihc:magnitude=1.5 | no bias in float32 .* use magnitude=2\\.0 and
ihc:gate_eps=0.01 | no bias in float32 .* use magnitude=2\\.0 and
mhc-deepseek:head=mean | the mean of the streams, cannot undo
mhc-deepseek:gate_eps=0.01 | float32
"""


@pytest.mark.parametrize("row", NOT_PRESERVED.strip().splitlines())
def test_a_scheme_without_a_preserving_start_gives_the_reason(row):
    text, words = row.split(" | ")
    with pytest.raises(ValueError, match=words):
        resolve(text).preserving()


@pytest.mark.parametrize("options", [{"beta_init": float("nan")}, {"v_scale": float("inf")}, {"value_channels": "4"}])
def test_a_numeric_option_must_be_a_finite_number(options):
    with pytest.raises(ValueError, match=f"^DeepDelta: {next(iter(options))} must be "):
        DeepDelta(**options)


@pytest.mark.parametrize(
    ("connection", "words"),
    [
        ("ddl-tcc", ["'ddl-tcc'", "did you mean 'ddl-tc'"]),
        ("DXL", ["'DXL'", "did you mean 'ddl'"]),
        ("zzz", ["'zzz'", "`residua schemes` lists all"]),
        ({"preset": "ddl-cc-e"}, ["did you mean 'ddl-cc-ec'"]),
        ({"preset": "ddl", "beta_int": 0.5}, ["'beta_int'", "did you mean beta_init"]),
        ({"preset": "residual", "beta_init": 0.5}, ["'residual'", "'beta_init'"]),
        ({"preset": "ddl", "beta_init": "1"}, ["beta_init", "must be a number", "'1'"]),
        ({"preset": "ddl", "value_channels": 0}, ["value_channels", "at least 1"]),
        ({"scheme": "deepdelta"}, ["'deepdelta'", "did you mean 'deep_delta'"]),
        ({"scheme": "deep_delta", "bta_init": 1.0}, ["did you mean beta_init"]),
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
def test_a_wrong_name_gives_a_one_line_error(connection, words):
    with pytest.raises(ValueError) as raised:
        resolve(connection)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith(("connection", "DeepDelta"))
    assert all(word in message for word in words), message


def test_a_scheme_without_a_name_gives_a_one_line_error():
    class Mine(Residual):
        pass

    with pytest.raises(ValueError, match=r"Mine .*residua\.register\(name, Mine\)"):
        describe(Mine())


def test_an_option_given_twice_is_refused():
    with pytest.raises(ValueError, match="got num_streams twice"):
        resolve("ihc:num_streams=4,num_streams=2")
