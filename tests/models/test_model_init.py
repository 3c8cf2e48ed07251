"""What a whole model starts from: nothing that a module declares is overwritten by what is built around it."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from residua import DeepDelta
from residua.models import ResiduaForCausalLM
from support.tiny_models import prompt, tiny_config
from support.tolerances import assert_close
from support.variants import ALL

DEEP_DELTA = {name: scheme for name, scheme in ALL.items() if isinstance(scheme, DeepDelta)}


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


def betas(model: ResiduaForCausalLM) -> list[torch.Tensor]:
    """beta of every sublayer for every token of a text, as it is used."""
    found = []

    def keep(gate: nn.Module, args, beta: torch.Tensor) -> None:
        found.append(beta)

    hooks = [connection.beta.register_forward_hook(keep) for connection in model.model.stream.connections]
    model(prompt(2, 6))
    for hook in hooks:
        hook.remove()
    return found


@torch.no_grad()
@pytest.mark.parametrize(("asked", "got"), [(0.5, 0.5), (0.01, 0.01), (1.9, 1.9), (0, 2e-6), (2, 2 - 2e-6)])
def test_beta_through_every_door(asked, got, tmp_path):
    config = tiny_config(connection={"preset": "ddl-tc", "beta_init": asked})
    for door, model in doors(config, tmp_path).items():
        for beta in betas(model.eval()):
            assert (beta == beta[0, 0]).all(), door
            assert beta[0, 0].item() == pytest.approx(got, rel=1e-6), door


@torch.no_grad()
@pytest.mark.parametrize(
    "name", ["ddl-tc", "ddl-ec", "ddl-cc", "ddl-cc-ec", "channel-dv3-direct", "channel-dv5-k3-causal"]
)
def test_compressors_average_and_expansion_repeats_through_every_door(name, tmp_path):
    streams = DEEP_DELTA[name].value_channels
    state = torch.randn(2, 5, streams, 16, generator=torch.Generator().manual_seed(0))
    for door, model in doors(tiny_config(name), tmp_path).items():
        stream = model.model.stream
        mean = state.mean(-2)
        for connection in stream.connections:
            assert_close(connection.read(state)[0], nn.functional.rms_norm(mean, (16,), eps=1e-5))
        assert_close(stream.collapse(state), mean)
        assert torch.equal(stream.expand(mean), mean.unsqueeze(-2).expand_as(state)), door


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-cc"])
def test_the_first_norm_is_not_starved(name):
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
@pytest.mark.parametrize("name", ["residual", "ddl-cc-ec", "authors-token"])
def test_the_backbone_starts_as_declared(name, tmp_path):
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
    )
    std = factor / math.sqrt(d)
    torch.manual_seed(0)
    for model in doors(config, tmp_path).values():
        assert model.lm_head.weight is model.model.embed_tokens.weight
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


@torch.no_grad()
def test_a_head_of_its_own_starts_like_the_embedding():
    torch.manual_seed(0)
    model = ResiduaForCausalLM(tiny_config(hidden_size=128, vocab_size=512, tie_word_embeddings=False))
    spread(model.lm_head.weight, 0.02)
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@torch.no_grad()
@pytest.mark.parametrize("name", ["authors-token", "authors-channel"])
def test_the_authors_draws_survive(name, tmp_path):
    """`init="authors"`, in a whole model: random compressors and gates, and still the identity where they reset it."""
    config = tiny_config(name, hidden_size=256)
    std = 0.5 / 16
    torch.manual_seed(0)
    for model in doors(config, tmp_path).values():
        stream = model.model.stream
        for compressor in (stream.connections[2].compress, stream.collapse.compress):
            spread(compressor.taps, std)
            assert (compressor.read == 0.25).all()
        for connection in stream.connections:
            spread(connection.value.project.weight, std)
            assert (connection.beta.out.weight != 0).all()
            assert connection.beta.out.bias.item() == 0
        if DEEP_DELTA[name].expand == "conv":
            assert (stream.expand.taps[0] == 1).all()
            assert (stream.expand.taps[1:] == 0).all()


@torch.no_grad()
def test_output_projections_do_not_start_at_zero():
    """In the k-Map the sublayer's output is the direction: at zero its gradient is 1 / eps."""
    model = ResiduaForCausalLM(tiny_config("ddl"))
    for layer in model.model.layers:
        assert layer.attention.o_proj.weight.abs().min() > 0
        assert layer.mlp.down_proj.weight.abs().min() > 0


def test_the_seed_decides():
    torch.manual_seed(3)
    first = ResiduaForCausalLM(tiny_config("ddl-tc-v")).state_dict()
    torch.manual_seed(3)
    second = ResiduaForCausalLM(tiny_config("ddl-tc-v")).state_dict()
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())
