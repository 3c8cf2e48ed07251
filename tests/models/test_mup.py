"""muP: which parameters learn at another rate at another width, and that the first steps move activations alike."""

import pytest
import torch

from residua.models import ResiduaForCausalLM
from residua.models.mup import learning_rate_factors
from support.tiny_models import tiny_config
from support.variants import ALL


def model(connection="ddl-tc", **options):
    with torch.device("meta"):
        return ResiduaForCausalLM(
            tiny_config(**{"mup": True, "mup_base_width": 1024, "connection": connection, **options})
        )


def test_without_mup_every_parameter_learns_at_the_same_rate():
    assert set(learning_rate_factors(model(mup=False)).values()) == {1.0}


def test_mup_is_the_identity_at_the_base_width():
    built = model()
    assert set(learning_rate_factors(model(mup_base_width=built.config.hidden_size)).values()) == {1.0}


@pytest.mark.parametrize("tied", [True, False])
def test_only_matrices_that_read_the_width_are_scaled(tied):
    built = model({"preset": "ddl-tc", "beta_head": "mlp"}, tie_word_embeddings=tied)
    factors = learning_rate_factors(built)
    assert factors.keys() == dict(built.named_parameters()).keys()
    scaled = {name for name, factor in factors.items() if factor != 1}
    assert {factors[name] for name in scaled} == {1024 / built.config.hidden_size}
    roles = {name.removesuffix(".weight").rpartition(".")[2] for name in scaled}
    assert roles >= {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "model.embed_tokens.weight" not in scaled
    assert "lm_head.weight" not in scaled, "the width is in the factor on the logits"
    gate = [name for name in factors if ".beta." in name and name.endswith("weight")]
    # The second layer of a gate has as many inputs at every width.
    assert {built.get_parameter(name).shape[1] for name in gate if name not in scaled} == {128}
    assert {built.get_parameter(name).shape[1] for name in gate if name in scaled} == {built.config.hidden_size}


@pytest.mark.parametrize("name", ALL)
def test_every_scheme_has_a_learning_rate_rule(name):
    built = model(ALL[name], num_hidden_layers=1)
    factors = learning_rate_factors(built)
    for parameter, factor in factors.items():
        assert factor == 1 or built.get_parameter(parameter).dim() == 2


def test_logits_shrink_with_the_width():
    ids = torch.arange(6).unsqueeze(0)
    torch.manual_seed(0)
    plain = ResiduaForCausalLM(tiny_config("ddl")).eval()
    scaled = ResiduaForCausalLM(tiny_config("ddl", mup=True, mup_base_width=8)).eval()
    scaled.load_state_dict(plain.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(scaled(ids).logits, plain(ids).logits * 8 / plain.config.hidden_size)
