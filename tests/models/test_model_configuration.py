"""Configurations: what is derived, what is kept, and one clear line for what cannot be."""

import pytest
import torch

from residua import DeepDelta
from residua.connections import describe
from residua.connections.explained import PAPER_SIZES
from residua.models import SIZES, ResiduaConfig, ResiduaForCausalLM
from support.tiny_models import prompt, tiny_config
from support.variants import NON_CAUSAL, PRESETS


def test_sizes_follow_from_the_width():
    config = ResiduaConfig(hidden_size=768, num_attention_heads=6)
    assert (config.head_dim, config.intermediate_size) == (128, 2048)
    assert ResiduaConfig(hidden_size=1024, num_attention_heads=8).intermediate_size == 2730
    assert ResiduaConfig(hidden_size=32, num_attention_heads=2).intermediate_size == 85
    given = ResiduaConfig(hidden_size=32, num_attention_heads=3, head_dim=16, intermediate_size=7)
    assert (given.head_dim, given.intermediate_size) == (16, 7)


def test_named_sizes_are_those_of_the_papers_models():
    assert SIZES["small"] | {"max_position_embeddings": 1024} == {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 6,
        "head_dim": 128,
        "max_position_embeddings": 1024,
    }
    assert (SIZES["medium"]["num_hidden_layers"], SIZES["medium"]["num_attention_heads"]) == (24, 8)
    for name, shape in PAPER_SIZES.items():
        assert shape == (SIZES[name]["hidden_size"], 2 * SIZES[name]["num_hidden_layers"])
    for size in SIZES.values():
        ResiduaConfig(**size)


@pytest.mark.parametrize("name", PRESETS)
def test_a_configuration_stores_every_option_of_the_connection(name):
    """The result does not depend on how it was named; a configuration made from a configuration is the same."""
    expected = describe(PRESETS[name])
    for given in (name, {"preset": name}, PRESETS[name], expected):
        config = ResiduaConfig(connection=given)
        assert config.connection == expected
        assert config.scheme == PRESETS[name]
    assert ResiduaConfig(**config.to_dict()).to_dict() == config.to_dict()


@torch.no_grad()
@pytest.mark.parametrize("change", ["set", "made from", "loaded"])
def test_a_saved_configuration_can_be_opened_with_another_scheme(change, tmp_path):
    config = tiny_config("ddl-cc-ec")
    if change == "set":
        config.connection = "ddl-tc"
    elif change == "made from":
        config = ResiduaConfig(**(config.to_dict() | {"connection": "ddl-tc"}))
    else:
        config.save_pretrained(tmp_path)
        config = ResiduaConfig.from_pretrained(tmp_path, connection="ddl-tc")
    assert config.connection == tiny_config("ddl-tc").connection
    model = ResiduaForCausalLM(config).eval()
    assert model.generate(prompt(1, 3), max_new_tokens=2, eos_token_id=-1).shape == (1, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 0}, ["vocab_size", "at least 1", "0"]),
        ({"vocab_size": None}, ["vocab_size", "at least 1", "None"]),
        ({"hidden_size": 16.0}, ["hidden_size", "whole number", "16.0"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1"]),
        ({"hidden_size": 16, "num_attention_heads": 3}, ["num_attention_heads", "divisor of hidden_size (16)", "3"]),
        ({"hidden_size": 18, "num_attention_heads": 2}, ["head_dim", "even", "9"]),
        ({"head_dim": 7}, ["head_dim", "even", "7"]),
        ({"intermediate_size": 0}, ["intermediate_size", "at least 1"]),
        ({"max_position_embeddings": -1}, ["max_position_embeddings", "at least 1"]),
        ({"qk_norm": "both"}, ["qk_norm", "one of post_rope, pre_rope or null", "'both'"]),
        ({"rope_theta": 0}, ["rope_theta", "positive"]),
        ({"rope_ratio": 1.5}, ["rope_ratio", "[0, 1]", "1.5"]),
        ({"rms_norm_eps": "1e-5"}, ["rms_norm_eps", "a number", "'1e-5'"]),
        ({"embedding_init_std": -1.0}, ["embedding_init_std", "0 or more"]),
        *(
            ({"state_dtype": x}, ["state_dtype", "one of float32, bfloat16 or null"])
            for x in ("float16", torch.bfloat16)
        ),
        ({"mup": "yes"}, ["mup", "true or false", "'yes'"]),
        ({"connection": "ddl-cc-e"}, ["'ddl-cc-e'", "did you mean 'ddl-cc-ec'"]),
        ({"connection": None}, ["connection", "None"]),
        ({"connection": "frac", "hidden_size": 62, "head_dim": 16}, ["num_fractions", "divisor", "62"]),
    ],
)
def test_a_wrong_value_gives_a_one_line_error(options, words):
    with pytest.raises(ValueError) as raised:
        ResiduaConfig(**options)
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["hiden_size", "num_key_value_heads", "attention_bias", "hidden_act"])
def test_an_unknown_argument_is_refused(name):
    with pytest.raises(TypeError, match=f"ResiduaConfig takes no argument '{name}'"):
        ResiduaConfig(**{name: 4})
    with pytest.raises(TypeError, match="did you mean connection"):
        ResiduaConfig(conection="ddl-cc")


def test_arguments_common_to_all_configurations_are_accepted():
    given = {"eos_token_id": 5, "num_labels": 3, "attn_implementation": "eager", "torch_dtype": "bfloat16"}
    given |= {"name_or_path": "here", "output_attentions": False, "return_dict": False, "temperature": 0.5}
    config = ResiduaConfig(**given)
    assert (config.eos_token_id, config.num_labels, config.dtype) == (5, 3, torch.bfloat16)


def test_a_saved_configuration_may_have_keys_of_another_version_of_transformers(tmp_path):
    config = tiny_config()
    config.of_later = 1
    config.save_pretrained(tmp_path)
    assert ResiduaConfig.from_pretrained(tmp_path).of_later == 1


def test_a_wrong_scheme_set_later_is_refused():
    config = tiny_config()
    with pytest.raises(ValueError, match="did you mean 'ddl-tc'"):
        config.connection = "ddl-tcc"
    with pytest.raises(ValueError, match="num_fractions must be a divisor"):
        config.connection = {"preset": "frac", "num_fractions": 5}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("qk_norm", "postrope"), ("rope_theta", -1.0), ("rope_theta", 10**400), ("vocab_size", None)],
)
def test_a_wrong_value_set_later_is_refused(name, wrong):
    """`from_pretrained(folder, qk_norm=...)` sets values in this way."""
    config = tiny_config()
    assert config.base_model_tp_plan is not None
    config.key_value_kernel = 4
    assert config.base_model_tp_plan is None
    with pytest.raises(ValueError, match=f"{name} must be"):
        setattr(config, name, wrong)


def test_integers_are_accepted_for_floats():
    config = ResiduaConfig(rope_theta=10000, rope_ratio=1, connection=DeepDelta(beta_init=1))
    assert config.rope_theta == 10000


@pytest.mark.parametrize("name", NON_CAUSAL)
def test_schemes_that_see_later_tokens_are_refused(name):
    """The error comes when the model is configured, not after a training run on its own future."""
    with pytest.raises(ValueError, match=r"must be a causal scheme.*context='token'"):
        ResiduaConfig(connection=NON_CAUSAL[name])
    config = ResiduaConfig(connection="edelta")
    with pytest.raises(ValueError, match="must be a causal scheme"):
        config.connection = {"preset": "edelta", "context": "sequence"}
