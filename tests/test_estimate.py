"""The estimate against what is counted or measured: parameters, memory, and the byte model's own figures."""

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from residua import PRESETS
from residua.cli import main
from residua.connections import resolve
from residua.errors import InputError
from residua.estimate import estimate
from residua.estimate.counts import bytes_per_token, flops_per_token, parameters
from residua.estimate.memory import activation_memory
from residua.estimate.speed import GPUS
from residua.models import SIZES, ResiduaConfig, ResiduaForCausalLM
from residua.training import load_config

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
# Ratios of the time of a training step to the plain residual's, both at the ceilings of an H200 and fully fused.
RATIOS = [
    ("ddl", "small", 2, 1.013),
    ("ddl", "medium", 4, 1.045),
    ("ddl-cc", "small", 2, 1.111),
    ("ddl-cc", "small", 4, 1.241),
    ("ddl-cc", "medium", 4, 1.239),
    ("ddl-tc", "small", 2, 1.137),
    ("ddl-tc", "medium", 4, 1.271),
]


def kept(name):
    """A preset that keeps every state, as the figures below assume."""
    scheme = PRESETS[name]
    return resolve({"preset": name, "recompute": "none"}) if hasattr(scheme, "recompute") else scheme


@pytest.mark.parametrize(
    ("name", "state_bytes", "expected"),
    [
        ("residual", 2, (8, 8)),
        ("ddl", 2, (8, 12)),
        ("ddl", 4, (12, 18)),
        ("ddl-cc", 2, (20, 30)),
        ("ddl-cc", 4, (36, 54)),
        ("ddl-tc", 2, (23, 35)),
        ("ddl-tc", 4, (40, 60)),
    ],
)
def test_bytes_of_a_boundary(name, state_bytes, expected):
    assert kept(name).traffic(1, state_bytes=state_bytes) == expected


def test_bytes_of_recomputing_and_of_separate_kernels():
    assert PRESETS["ddl-cc"].traffic(1, state_bytes=2) == (20, 33)
    assert PRESETS["ddl-tc"].traffic(1, state_bytes=4) == (40, 63)
    assert kept("ddl-cc").traffic(1, state_bytes=2, fused=False) == (30, 58)
    assert kept("ddl-cc").traffic(1, state_bytes=4, fused=False) == (54, 106)


@pytest.mark.parametrize(
    ("name", "boundary", "separate"),
    [
        ("residual", 1, (10, 8)),  # the sum is written, then read by the norm; its gradient needs no kernel
        ("denseformer", 1, (10, 8)),
        ("denseformer", 2, (14, 16)),
        ("attnres", 2, (14, 24)),
        ("delta-attnres:block_size=1", 2, (20, 30)),
        ("delta-attnres:block_size=2", 1, (16, 24)),  # nothing reads the sum of a block that is not complete
        ("lambdas:r=null,z=null,p=0.0,backout=null", 1, (10, 12)),
        ("lambdas:r=1.0,z=null,backout=null", 1, (12, 14)),
        ("lambdas", 1, (14, 16)),
        ("ddl", 1, (10, 18)),
    ],
)
def test_separate_kernels_read_back_what_the_first_wrote(name, boundary, separate):
    assert resolve(name).traffic(boundary, state_bytes=2, fused=False) == separate


@pytest.mark.parametrize(("state_bytes", "halo"), [(2, 0.25), (4, 0.5)])
def test_a_convolution_over_tokens_has_one_price(state_bytes, halo):
    """Of one vector: P / 8, and x_in, which is kept, under every scheme and in one kernel or two."""
    for name in ("residual", "lambdas", "gated-orthogonal", "gated-delta"):
        for fused in (True, False):
            plain, convolved = (
                resolve(name + given).traffic(1, state_bytes=state_bytes, fused=fused)
                for given in ("", ":compress=token")
            )
            assert convolved.forward - plain.forward == halo + 2
            assert convolved.backward - plain.backward == halo + 4


def test_separate_kernels_keep_what_is_read_from_several_channels_anyway():
    assert kept("ddl-tc").traffic(1, state_bytes=2, fused=False) == (30 + 1, 58 + 1)
    assert kept("ddl-tc").traffic(1, state_bytes=4, fused=False) == (54 + 2, 106 + 2)


@pytest.mark.parametrize("name", PRESETS)
def test_the_traffic_of_a_model_is_the_sum_of_its_boundaries(name):
    config = ResiduaConfig(connection=name, **SMALL)
    found = bytes_per_token(config, state_bytes=2, fused=False)["connections"]
    each = [sum(PRESETS[name].traffic(i, state_bytes=2, fused=False)) for i in range(1, 2 * 3 + 1)]
    assert found == 32 * sum(each)
    grows = name in ("attnres", "mhar", "delta-attnres", "denseformer", "mudd")
    assert (each[1] < each[-1]) == grows, "it grows with depth where the state does"


@functools.cache
def seconds(name, size, state_bytes):
    config = ResiduaConfig(connection=kept(name), **SIZES[size])
    flops = flops_per_token(config, sequence_length=1024)
    traffic = bytes_per_token(config, state_bytes=state_bytes)
    return (flops["matrices"] + flops["attention"]) / 790e12 + sum(traffic.values()) / 4.3e12


@pytest.mark.slow
def test_the_plain_residual_at_the_ceilings():
    assert seconds("residual", "small", 2) == pytest.approx(1.319e-6, rel=2e-3)
    assert seconds("residual", "medium", 2) == pytest.approx(3.542e-6, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "state_bytes", "ratio"), RATIOS)
def test_ratios_at_the_ceilings(name, size, state_bytes, ratio):
    assert seconds(name, size, state_bytes) / seconds("residual", size, 2) == pytest.approx(ratio, abs=3e-3)


@pytest.mark.parametrize("options", [{}, {"attention_output_gate": True, "head_dim": 24, "tie_word_embeddings": False}])
def test_the_products_are_six_for_each_weight_and_the_causal_half_of_attention(options):
    """Of the plain residual, whose matrices are all linear maps: 2 forward and 4 backward, the head among them."""
    config = ResiduaConfig(connection="residual", **SMALL | options)
    weights = sum(m.weight.numel() for m in ResiduaForCausalLM(config).modules() if isinstance(m, nn.Linear))
    width = config.num_attention_heads * config.head_dim
    found = flops_per_token(config, sequence_length=16)
    assert found == {"matrices": 6 * weights, "attention": 7 * 16 * width * 3, "connections": 0}


@functools.cache
def plain_flops():
    return flops_per_token(ResiduaConfig(connection="residual", **SMALL), sequence_length=16)


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_the_products_of_the_connections_are_those_of_their_linear_maps_at_least(name):
    config = ResiduaConfig(connection=name, **SMALL)
    linear = [
        module.weight.numel()
        for name, module in ResiduaForCausalLM(config).named_modules()
        if isinstance(module, nn.Linear) and ".stream." in name
    ]
    found, plain = flops_per_token(config, sequence_length=16), plain_flops()
    assert found["connections"] >= 6 * sum(linear)
    assert (found["matrices"], found["attention"]) == (plain["matrices"], plain["attention"])


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_those_of_the_model(name):
    config = ResiduaConfig(connection=name, **SMALL)
    model = ResiduaForCausalLM(config)
    parts = parameters(config)
    assert parts["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert parts["embedding"] == 96 * 32
    assert parts["total"] == parts["embedding"] + parts["sublayers"] + parts["connections"]


@pytest.mark.parametrize(
    ("recipe", "connection", "count"),
    [
        ("small", "residual", 123_590_400),
        ("small", "ddl-tc", 123_842_476),
        pytest.param("medium", "ddl-cc-ec", 353_873_236, marks=pytest.mark.slow),
    ],
)
def test_parameters_of_the_papers_models(recipe, connection, count):
    model = load_config(recipe, [f"--model.connection={connection}"]).model
    given = {name: getattr(model, name) for name in (*SIZES["small"], "connection")}
    assert parameters(ResiduaConfig(vocab_size=50304, **given))["total"] == count


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["residual", "ddl", "ddl-ec", "ddl-cc", "mhc", "attnres", "attnres-block"])
def test_memory_counted_without_data_is_that_of_a_real_step(name, autocast):
    config = ResiduaConfig(connection=name, **SMALL)
    size = {"batch_size": 3, "sequence_length": 16, "autocast": autocast}
    found = activation_memory(config, **size)
    assert found == activation_memory(config, **size, fake=False)
    again = activation_memory(config, **size, recompute=True)
    assert again == activation_memory(config, **size, recompute=True, fake=False)
    assert 0 < again.kept < found.kept


@pytest.mark.slow
@pytest.mark.parametrize("name", ["residual", "ddl-tc", "ddl-cc", "attnres"])
def test_what_is_kept_is_what_autograd_saves(name):
    """An independent count: the storages that autograd is handed, and the logits, which the caller holds."""
    config = ResiduaConfig(connection=name, **SMALL)
    torch.manual_seed(0)
    model = ResiduaForCausalLM(config).train()
    known = {tensor.untyped_storage().data_ptr() for tensor in model.parameters()}
    ids = torch.zeros(4, 32, dtype=torch.long)
    storages = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known and x.dtype.is_floating_point:
            storages[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(input_ids=ids, labels=ids, shift_labels=ids)
    counted = activation_memory(config, batch_size=4, sequence_length=32, autocast=False)
    saved = sum(storage.nbytes() for storage in storages.values())
    assert counted.kept + counted.logits == pytest.approx(saved, rel=0.02)
    assert counted.casts == 0


@pytest.mark.slow
def test_memory_grows_with_the_batch_and_autocast_copies_weights():
    config = ResiduaConfig(connection="ddl-tc", **SMALL)
    one, three = (activation_memory(config, batch_size=b, sequence_length=32, autocast=True) for b in (1, 3))
    assert three.kept == pytest.approx(3 * one.kept, rel=0.05)
    assert three.logits == pytest.approx(3 * one.logits, rel=0.01)
    linear = [m.weight.numel() for m in ResiduaForCausalLM(config).modules() if isinstance(m, nn.Linear)]
    assert one.casts == three.casts == 2 * sum(linear)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("attnres", 2), ("attnres", 6), ("attnres:block_size=4", 6)])
def test_attention_over_depth_keeps_one_vector_for_each_sublayer_and_numbers(name, layers):
    """Beside the plain residual: the source that the sublayer wrote (in a block: the running sum), and two numbers for
    each source of each read. What is read is derived again, so neither it nor its norm is kept, as the plain residual
    keeps both. A stack of the sources for each read would be 13 vectors for the last one alone."""

    def vectors(connection):
        config = ResiduaConfig(connection=connection, **SMALL | {"num_hidden_layers": layers})
        kept = activation_memory(config, batch_size=2, sequence_length=32, autocast=False).kept
        return kept / (2 * 32 * 32 * 4)

    scheme = resolve(name)
    read = sum(len(scheme.state_spec(boundary, 32)) for boundary in range(1, 2 * layers + 1))
    assert vectors(name) - vectors("residual") == pytest.approx((1 - 2) * 2 * layers + 2 * read / 32, abs=0.25)


@pytest.mark.slow
def test_an_estimate_adds_up():
    config = load_config("tiny", ["--model.connection=ddl-tc", "--train.precision=bfloat16"])
    found = estimate(config, vocab_size=2048, gpu="h100", gpus=4)
    assert set(found.memory) == {"replay", "none"}
    for parts in found.memory.values():
        own = dict(parts)
        assert own.pop("total") == sum(own.values())
        assert parts["weights"] == parts["gradients"] == parts["optimizer"] / 2 == 4 * found.parameters["total"]
    assert found.memory["replay"]["activations"] < found.memory["none"]["activations"]
    assert found.tokens == config.train.steps * 16 * 128
    speed = found.tokens_per_second
    assert speed["ceiling"] > speed["expected"] > speed["unfused"]
    assert found.days["expected"] == pytest.approx(found.tokens / speed["expected"] / 86400)
    assert any("whether it exists or not" in line for line in found.assumptions), "fused is no claim that a kernel is"
    config = replace(config, train=replace(config.train, parallel="fsdp"))
    sharded = estimate(config, vocab_size=2048, gpu="h100", gpus=4)
    assert sharded.memory["replay"]["optimizer"] == found.memory["replay"]["optimizer"] / 4


def test_muon_keeps_one_moment_of_the_matrices_of_attention_and_mlp():
    adamw, muon = (load_config("tiny", [f"--train.optimizer={name}"]) for name in ("adamw", "muon"))
    adamw, muon = (estimate(config, vocab_size=2048) for config in (adamw, muon))
    gains = 4 * 2 * 64  # of the norms of queries and keys, in four layers
    for name, parts in muon.memory.items():
        assert adamw.memory[name]["optimizer"] - parts["optimizer"] == 4 * (adamw.parameters["sublayers"] - gains)
    assert muon.assumptions[-1].startswith("train.optimizer=muon")


@pytest.mark.slow
def test_more_gpus_are_faster_but_not_beyond_their_number():
    config = load_config("tiny", ["--train.gradient_accumulation=8", "--model.connection=residual"])
    one, four = (estimate(config, vocab_size=2048, gpus=n).tokens_per_second["expected"] for n in (1, 4))
    assert one < four <= 4 * one


def test_what_cannot_be_estimated_is_refused():
    config = load_config("tiny")
    with pytest.raises(InputError, match=f"expected one of {', '.join(GPUS)}"):
        estimate(config, vocab_size=2048, gpu="h20")
    with pytest.raises(InputError, match="at least 1"):
        estimate(config, vocab_size=2048, gpus=0)
    with pytest.raises(InputError, match=r"^--gpus: expected a number of processes that divides the step evenly"):
        estimate(config, vocab_size=2048, gpus=3)


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys):
    argv = ["estimate", "--config", "tiny-ddl", "--gpus", "2", "--gpu", "a100"]
    assert main([*argv, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"]["total"] == 1_051_792, "the model of the demo"
    assert main(argv) == 0
    table = capsys.readouterr().out
    assert "1,051,792" in table
    assert "tokens/s" in table
    assert "a100: " in table


@pytest.mark.slow
@pytest.mark.parametrize("name", GPUS)
def test_the_figures_of_a_gpu_are_called_assumed(name):
    """No record holds a measurement of any."""
    said = "\n".join(estimate(load_config("tiny"), vocab_size=2048, gpu=name).assumptions)
    assert f"{name}: {GPUS[name].compute / 1e12:.0f} TFLOP/s" in said
    assert "80% and 90% of the vendor's figures for arithmetic and memory; no GPU was measured" in said


def test_the_h200_is_the_one_of_the_ratios():
    assert GPUS["h200"].compute == pytest.approx(790e12, rel=2e-3)
    assert GPUS["h200"].bandwidth == pytest.approx(4.3e12, rel=5e-3)
