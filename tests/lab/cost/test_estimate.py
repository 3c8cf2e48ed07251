"""The estimate against what is counted or measured: parameters, arithmetic and memory."""

import functools
import itertools
import json
import re
from dataclasses import replace

import pytest
import torch

from residua.commands.cli import main
from residua.connections import PRESETS
from residua.connections.parts.projection import LINEAR_MAPS
from residua.errors import InputError
from residua.lab.cost.counts import _Elements, flops_per_token, parameters, products_per_token
from residua.lab.cost.estimate import GPU_MEMORY, estimate
from residua.lab.cost.measured_memory import storages_kept
from residua.lab.cost.step_memory import activation_memory
from residua.lab.experiment import model_config
from residua.lab.training import load_config
from residua.models import ResiduaConfig, ResiduaForCausalLM
from support.lanes import some

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}


@pytest.mark.parametrize("options", [{}, {"attention_output_gate": True, "head_dim": 24, "tie_word_embeddings": False}])
def test_flops_are_six_for_each_weight_plus_the_causal_half_of_attention(options):
    """All matrices of the plain residual are linear maps, the head included: 2 forward and 4 backward."""
    config = ResiduaConfig(connection="residual", **SMALL | options)
    weights = sum(m.weight.numel() for m in ResiduaForCausalLM(config).modules() if isinstance(m, LINEAR_MAPS))
    width = config.num_attention_heads * config.head_dim
    found = flops_per_token(config, sequence_length=16)
    assert found == {"matrices": 6 * weights, "attention": 7 * 16 * width * 2, "connections": 0}


@functools.cache
def products(connection):
    return products_per_token(ResiduaConfig(connection=connection, **SMALL), sequence_length=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_flops_of_the_connections_are_at_least_those_of_their_linear_maps(name):
    linear = [
        module.weight.numel()
        for name, module in ResiduaForCausalLM(ResiduaConfig(connection=name, **SMALL)).named_modules()
        if isinstance(module, LINEAR_MAPS) and ".stream." in name
    ]
    assert products(name) - products("residual") >= 6 * sum(linear)


def test_other_arithmetic_is_the_largest_tensor_of_each_operation_that_is_no_product_and_no_view():
    x, weight, bias = (torch.zeros(*shape, device="meta") for shape in ((4, 3), (3, 5), (5,)))
    with _Elements() as counted:
        (x @ weight + bias).t().sum().sqrt()
    assert counted.total == 20 + 20 + 1


def test_a_scheme_with_a_kernel_is_counted_as_its_definition():
    """The rest of the count is that of the plain residual."""
    definition, kernel = (
        flops_per_token(ResiduaConfig(connection=f"mhc:implementation={how}", **SMALL), sequence_length=16)
        for how in ("reference", "triton")
    )
    assert kernel == definition
    assert kernel["matrices"] + kernel["attention"] == products("residual")
    assert kernel["connections"] == products("mhc") - products("residual")


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_model(name):
    config = ResiduaConfig(connection=name, **SMALL)
    model = ResiduaForCausalLM(config)
    parts = parameters(config)
    assert parts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert parts["embedding"] == 96 * 32
    assert parts["total"] == parts["embedding"] + parts["sublayers"] + parts["connections"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "autocast"),
    some(
        itertools.product(["residual", "ddl", "ddl-ec", "ddl-cc", "mhc", "attnres", "attnres-block"], [False, True]),
        {("residual", False), ("ddl-cc", True), ("mhc", False), ("attnres-block", True)}.__contains__,
    ),
)
def test_memory_counted_without_data_is_that_of_a_real_step(name, autocast):
    config = ResiduaConfig(connection=name, **SMALL)
    size = {"batch_size": 3, "sequence_length": 16, "autocast": autocast}
    found = activation_memory(config, **size)
    assert found == activation_memory(config, **size, fake=False)
    again = activation_memory(config, **size, recompute=True)
    assert again == activation_memory(config, **size, recompute=True, fake=False)
    assert 0 < again.kept < found.kept


@pytest.mark.parametrize("name", ["mhc-deepseek", "mhc-glm", "wide"])
def test_memory_of_a_scheme_that_computes_its_start_is_counted(name):
    config = ResiduaConfig(connection=name, **SMALL)
    assert activation_memory(config, batch_size=1, sequence_length=8, autocast=False).kept > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "ddl-tc", "ddl-cc", "attnres"])
def test_kept_bytes_are_those_that_autograd_saves(name):
    """An independent count: the storages that autograd is handed, and the logits, which the caller holds."""
    config = ResiduaConfig(connection=name, **SMALL)
    torch.manual_seed(0)
    model = ResiduaForCausalLM(config).train()
    ids = torch.zeros(4, 32, dtype=torch.long)
    saved = storages_kept(lambda: model(input_ids=ids, labels=ids, shift_labels=ids), model.parameters())
    counted = activation_memory(config, batch_size=4, sequence_length=32, autocast=False)
    assert counted.kept + counted.logits == pytest.approx(saved, rel=0.02)
    assert counted.casts == 0


@pytest.mark.slow
def test_memory_grows_with_the_batch_and_with_the_weight_copies_of_autocast():
    config = ResiduaConfig(connection="ddl-tc", **SMALL)
    one, three = (activation_memory(config, batch_size=b, sequence_length=32, autocast=True) for b in (1, 3))
    assert three.kept == pytest.approx(3 * one.kept, rel=0.05)
    assert three.logits == pytest.approx(3 * one.logits, rel=0.01)
    linear = [m.weight.numel() for m in ResiduaForCausalLM(config).modules() if isinstance(m, LINEAR_MAPS)]
    assert one.casts == three.casts == 2 * sum(linear)


@pytest.mark.slow
def test_the_parts_of_an_estimate_add_up_to_the_total():
    config = load_config(
        "tiny", ["--model.connection=ddl-tc", "--model.num_hidden_layers=1", "--train.precision=bfloat16"]
    )
    found = estimate(config, model_config(config), gpu="h100", gpus=4)
    assert set(found.memory) == {"replay", "none"}
    for parts in found.memory.values():
        own = dict(parts)
        assert own.pop("total") == sum(own.values())
        assert parts["weights"] == parts["gradients"] == parts["optimizer"] / 2 == 4 * found.parameters["total"]
    assert found.memory["replay"]["activations"] < found.memory["none"]["activations"]
    assert found.tokens == config.train.steps * 16 * 128
    for name, most in found.largest_batch_size.items():  # over all four
        for rows, fits in ((most // 4 * 4, True), (most // 200 * 204, False)):
            larger = replace(config, train=replace(config.train, batch_size=rows))
            needed = estimate(larger, model_config(larger), gpu="h100", gpus=4).memory[name]["total"]
            assert (needed <= found.gpu_memory) == fits


@pytest.mark.slow
def test_muon_keeps_one_moment_of_the_matrices_of_attention_and_mlp():
    small = {"model.num_hidden_layers": 1}
    adamw, muon = (load_config("tiny", {**small, "train.optimizer": name}) for name in ("adamw", "muon"))
    adamw, muon = (estimate(config, model_config(config)) for config in (adamw, muon))
    gains = 2 * 64  # of the norms of queries and keys
    for name, parts in muon.memory.items():
        assert adamw.memory[name]["optimizer"] - parts["optimizer"] == 4 * (adamw.parameters["sublayers"] - gains)


def test_an_estimate_of_unsupported_input_is_refused():
    config = load_config("tiny")
    with pytest.raises(InputError, match=f"must be one of {', '.join(GPU_MEMORY)}"):
        estimate(config, model_config(config), gpu="h20")
    with pytest.raises(InputError, match=r"the number of processes, .*, got 3"):
        estimate(config, model_config(config), gpus=3)


@pytest.mark.nightly
def test_the_command_prints_a_table_or_json(capsys):
    argv = ["cost", "count", "--config", "tiny-ddl", "--gpus", "2", "--gpu", "a100"]
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"]["total"] == 1_051_792, "the model of the demo"
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert "1,051,792" in table
    assert "a100: 79 GiB" in table
    assert re.search(r"^[\d,]+ tokens, ", table, re.MULTILINE)
    (total,) = [float(line.split()[1]) for line in table.splitlines() if line.startswith("total   ") and "." in line]
    assert total == pytest.approx(next(iter(record["memory"].values()))["total"] / 2**20, abs=0.01)
    assert "MiB per GPU" in table
