import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import residua
from residua.errors import InputError
from residua.lab.training.optimizer import (
    hidden_matrices,
    learning_rate_factor,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)
from residua.models import ResiduaForCausalLM
from support.tiny_models import tiny_config
from support.toy_language_model import ToyModel, toy_config


class Everything(ToyModel):
    """Each kind of parameter that a connection may have besides linear maps."""

    def __init__(self):
        super().__init__()
        self.read = nn.Parameter(torch.ones(4, 8))
        self.conv = nn.Conv1d(8, 8, 4, groups=8, bias=True)
        self.norm = nn.LayerNorm(8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)


def test_decay_applies_to_the_weights_of_linear_maps_and_embeddings():
    model = Everything()
    decayed, others = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert [names[id(p)] for p in decayed["params"]] == ["embedding.weight", "hidden.weight"], "tied ones once"
    expected = {"gain", "read", "hidden.bias", "conv.weight", "conv.bias", "norm.weight", "norm.bias"}
    assert {names[id(p)] for p in others["params"]} == expected


def test_linear_maps_that_start_as_the_identity_decay_as_in_the_published_code():
    model = ResiduaForCausalLM(tiny_config("edelta"))
    maps = [parameter for name, parameter in model.named_parameters() if "h_pre" in name or "h_post" in name]
    assert len(maps) == 8
    assert all(torch.equal(weight, torch.eye(16)) for weight in maps)
    decayed = {id(parameter) for parameter in parameter_groups(model, 0.1)[0]["params"]}
    assert decayed.issuperset(map(id, maps))


def test_a_group_without_parameters_is_left_out():
    assert len(parameter_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_the_parameters_of_connections_may_have_their_own_learning_rate():
    """It applies to gates, maps and filters, but not to gains of norms or sublayers. muP's factors are kept."""
    model = ResiduaForCausalLM(tiny_config("ddl-ec", mup=True))
    rates = [
        {id(p): group["factor"] for group in parameter_groups(model, 0.1, factor) for p in group["params"]}
        for factor in (1.0, 0.25)
    ]
    for name, parameter in model.named_parameters():
        own = "stream" in name and not name.endswith("norm.weight")
        assert rates[1][id(parameter)] == rates[0][id(parameter)] * (0.25 if own else 1.0), name
    assert len(set(rates[0].values())) > 1


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_schedule_is_positive_at_its_first_and_last_step(warmup):
    config = toy_config(steps=5, warmup_steps=warmup)
    factors = [learning_rate_factor(step, config) for step in range(1, 6)]
    assert all(0 < factor <= 1 for factor in factors)
    assert (factors[-1] == 1) == (warmup == 5)


def test_under_mup_matrices_have_their_own_learning_rate_also_in_a_wrapped_model():
    model = ResiduaForCausalLM(tiny_config("ddl-cc", mup=True, mup_base_width=64))
    for outer in (model, nn.Sequential(model)):
        optimizer = make_optimizer(outer, toy_config(lr=0.01, weight_decay=0.1, connection_lr_factor=0.5))
        rates = {id(p): (g["initial_lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
        assert rates[id(model.model.layers[0].mlp.up_proj.weight)] == pytest.approx((0.04, 0.025))
        assert rates[id(model.model.embed_tokens.weight)] == pytest.approx((0.01, 0.1))
        assert rates[id(model.model.norm.weight)] == pytest.approx((0.01, 0.0))
        assert rates[id(model.model.stream.collapse.compress.read)] == pytest.approx((0.005, 0.0))
        set_learning_rate(optimizer, 0.5)
        assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([0.0025, 0.005, 0.01, 0.02])


@pytest.mark.parametrize("connection_lr_factor", [1.0, 0.25])
def test_under_mup_a_step_shrinks_matrices_by_the_same_share_at_every_width(connection_lr_factor):
    """The learning rate times the decay, as in the muTransfer package; connections have their own learning rate."""
    shares = []
    for width in (16, 32, 64):
        config = tiny_config("ddl-cc", hidden_size=width, head_dim=width // 2, mup=True, mup_base_width=32)
        model = ResiduaForCausalLM(config)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        groups = parameter_groups(model, 0.1, connection_lr_factor)
        shares.append({names[id(p)]: g["factor"] * g["weight_decay"] for g in groups for p in g["params"]})
    first, *others = shares
    assert first["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.1)
    assert first["model.norm.weight"] == 0
    for other in others:
        assert other == pytest.approx(first)


def names_of(model, parameters):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for parameter in parameters}


def test_muon_takes_the_matrices_of_attention_and_mlp_and_adamw_the_rest():
    """Not the embedding, the head, the gates and maps of a scheme, or anything that is frozen."""
    model = ResiduaForCausalLM(tiny_config("ddl-tc", num_hidden_layers=1, tie_word_embeddings=False))
    model.model.layers[0].mlp.down_proj.weight.requires_grad_(False)
    layer = "model.layers.0."
    expected = {f"{layer}attention.{name}_proj.weight" for name in ("q", "k", "v", "o")}
    expected |= {f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")}
    for outer in (model, nn.Sequential(model)):
        assert names_of(model, hidden_matrices(outer)) == expected
    optimizer = make_optimizer(model, toy_config(optimizer="muon", lr=0.01))
    groups = [(x, group) for group in optimizer.param_groups for x in group["params"]]
    assert len(groups) == len([x for x in model.parameters() if x.requires_grad]), "each once"
    assert names_of(model, [x for x, group in groups if "ns_steps" in group]) == expected
    assert {group["initial_lr"] for _, group in groups} == {0.01}


def test_muon_takes_only_the_own_matrices_of_a_converted_model():
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32, n_positions=16))
    expected = {f"transformer.h.0.{x}.weight" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
    assert names_of(model, hidden_matrices(model)) == expected
    converted = residua.convert(model, "hc")
    assert len(hidden_matrices(converted)) == len(expected), "nothing of the scheme"


def test_muon_is_refused_for_a_model_whose_rates_are_for_adam():
    model = ResiduaForCausalLM(tiny_config("residual", mup=True, mup_base_width=8))
    with pytest.raises(InputError, match=r"^train.optimizer must be adamw with model.mup, .*, got 'muon'"):
        make_optimizer(nn.Sequential(model), toy_config(optimizer="muon"))
    make_optimizer(model, toy_config(optimizer="adamw"))


def test_an_update_of_muon_is_as_large_as_one_of_adamw():
    """Newton-Schulz leaves singular values between 0.5 and 1.5, so the size is met to a factor of about that."""
    model = ToyModel()
    optimizer = make_optimizer(model, toy_config(optimizer="muon", lr=0.01, weight_decay=0.0))
    before = model.hidden.weight.detach().clone()
    model.hidden.weight.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    rms = (model.hidden.weight - before).square().mean().sqrt() / 0.01
    assert 0.2 * 0.5 < rms < 0.2 * 1.5


def test_a_weight_with_gaps_in_memory_is_refused():
    """A fused optimizer would write into the gaps, which belong to the rest of a larger tensor."""
    model = ToyModel()
    model.hidden.weight = nn.Parameter(torch.randn(8, 16)[:, :8])
    with pytest.raises(InputError, match=r"^the parameter hidden.weight must be without gaps .*, got \[16, 1\]"):
        make_optimizer(model, toy_config())
    model.hidden.weight.requires_grad_(False)
    make_optimizer(model, toy_config())


def test_the_matrices_of_torchs_own_attention_decay_and_go_to_muon():
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    matrices = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"}
    assert names_of(layer, hidden_matrices(layer)) == matrices
    assert names_of(layer, parameter_groups(layer, 0.1)[0]["params"]) == matrices
    apart = nn.MultiheadAttention(8, 2, kdim=4, vdim=4)
    assert names_of(apart, hidden_matrices(apart)) == {f"{x}_proj_weight" for x in "qkv"} | {"out_proj.weight"}
