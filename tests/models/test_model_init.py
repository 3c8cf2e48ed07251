"""What a whole model starts from: nothing that a module declares is overwritten by what is built around it."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from residua.models import ResiduaForCausalLM
from support.tiny_models import prompt, tiny_config
from support.variants import ALL, PRESETS


def doors(config, tmp_path) -> dict[str, ResiduaForCausalLM]:
    """A new model through every door: built, from a configuration, saved and loaded, made on the meta device."""
    built = ResiduaForCausalLM(config)
    built.save_pretrained(tmp_path)
    with torch.device("meta"):
        empty = ResiduaForCausalLM(config)
    empty.to_empty(device="cpu")
    empty.init_weights()
    return {
        "built": built,
        "configured": AutoModelForCausalLM.from_config(config),
        "loaded": AutoModelForCausalLM.from_pretrained(tmp_path),
        "started": empty,
    }


@torch.no_grad()
@pytest.mark.parametrize("name", [*PRESETS, "authors-token", "authors-channel", "beta-mlp", "v-context", "hc-mirrored"])
def test_a_stream_starts_equally_however_its_model_is_built(name, tmp_path):
    """Constants are equal to the last bit, and drawn values have the same spread."""
    torch.manual_seed(0)
    alone, again = (ALL[name].build(64, 4) for _ in range(2))
    for door, model in doors(tiny_config(name, hidden_size=64), tmp_path).items():
        found = zip(alone.named_parameters(), again.parameters(), model.model.stream.parameters(), strict=True)
        for (key, expected), other, parameter in found:
            if torch.equal(expected, other):
                assert torch.equal(parameter, expected), f"{door}: {key}"
            elif parameter.numel() > 100:
                assert parameter.std().item() == pytest.approx(expected.std().item(), rel=0.4), f"{door}: {key}"


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-cc"])
def test_the_input_of_the_first_norm_is_not_tiny(name):
    """Compressors that draw small random weights end far below the norm's eps, and the first sublayers see a tenth of
    what they should. An average passes the embedding on at its own size."""
    torch.manual_seed(0)
    model = ResiduaForCausalLM(tiny_config(name, hidden_size=64))
    stream = model.model.stream
    x, _ = stream.connections[0].read(stream.expand(model.model.embed_tokens(prompt(2, 8))))
    assert x.square().mean().sqrt() > 0.9


def spread(parameter: torch.Tensor, std: float) -> None:
    """Looks drawn from N(0, std^2): within five standard errors."""
    n = parameter.numel()
    assert parameter.std().item() == pytest.approx(std, rel=5 / (2 * n) ** 0.5)
    assert abs(parameter.mean().item()) < 5 * std / n**0.5


@torch.no_grad()
@pytest.mark.parametrize("name", ["residual", "ddl-cc:start=rewrite"])
def test_the_backbone_starts_as_in_the_authors_current_code(name, tmp_path):
    """Under every scheme: 0.5 / sqrt(n_in) min(1, sqrt(n_out / n_in)), and maps into the residual divided by L."""
    d, layers, factor = 128, 3, 0.7
    config = tiny_config(
        name,
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=1,
        head_dim=32,
        intermediate_size=300,
        hidden_init_std_factor=factor,
        output_init="depth",
        attention_output_gate=True,
    )
    torch.manual_seed(0)
    for model in doors(config, tmp_path).values():
        for layer in model.model.layers:
            for part in ("q_proj", "k_proj", "v_proj", "g_proj"):
                spread(getattr(layer.attention, part).weight, factor / math.sqrt(d) * math.sqrt(32 / d))
            spread(layer.attention.o_proj.weight, factor / math.sqrt(32) / layers)
            spread(layer.mlp.gate_proj.weight, factor / math.sqrt(d))
            spread(layer.mlp.up_proj.weight, factor / math.sqrt(d))
            spread(layer.mlp.down_proj.weight, factor / math.sqrt(300) * math.sqrt(d / 300) / layers)


def test_configurations_of_earlier_versions_start_as_before(tmp_path):
    config = tiny_config("residual").to_dict()
    del config["output_init"]
    assert type(tiny_config("residual")).from_dict(config).output_init == "sqrt_depth"


@torch.no_grad()
@pytest.mark.parametrize(("name", "tied"), [("residual", True), ("ddl-cc-ec", False)])
def test_the_backbone_starts_as_declared(name, tied, tmp_path):
    """Embedding, projections, those that write into the residual with 1 / sqrt(L) more, and norms at one."""
    d, layers, factor = 128, 3, 0.7
    config = tiny_config(
        name,
        hidden_size=d,
        num_hidden_layers=layers,
        vocab_size=512,
        embedding_init_std=0.05,
        hidden_init_std_factor=factor,
        attention_output_gate=True,
        tie_word_embeddings=tied,
    )
    std = factor / math.sqrt(d)
    torch.manual_seed(0)
    for model in doors(config, tmp_path).values():
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) == tied
        spread(model.lm_head.weight, 0.05)
        spread(model.model.embed_tokens.weight, 0.05)
        for layer in model.model.layers:
            for part in ("q_proj", "k_proj", "v_proj", "g_proj"):
                spread(getattr(layer.attention, part).weight, std)
            spread(layer.attention.o_proj.weight, std / math.sqrt(layers))
            spread(layer.mlp.gate_proj.weight, std)
            spread(layer.mlp.up_proj.weight, std)
            spread(layer.mlp.down_proj.weight, std / math.sqrt(layers))
        norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
        assert len(norms) == 2 * layers + 1 + 3 * layers
        assert all((norm.weight == 1).all() for norm in norms)
