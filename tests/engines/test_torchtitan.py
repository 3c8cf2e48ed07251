"""torchtitan trains our Llama as `residua train` does, on two processes and on one, and goes on where it stopped.

Needs torchtitan: `make titan`.
"""

import json
import re
import shlex
import shutil
import warnings
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import residua
from residua.lab.experiment import open_run, run
from residua.lab.training import BaseModelConfig, DataConfig, RunConfig, TrainConfig
from support import processes
from support.tiny_runs import prepare_texts

pytestmark = [
    pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed; make titan does it"),
    pytest.mark.timeout(3600),
]
together = partial(processes.together, seconds=3000)
SCHEMES = ("residual", "lambdas", "ddl-tc", "ddl-cc", "hc", "mhc", "attnres-block")
STEPS = 10


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of prepared bytes."""
    return prepare_texts(tmp_path_factory.mktemp("texts")).folder


def arguments(connection, data, out, *more, policy="none"):
    """The command line of a run of ten steps with a constant learning rate on four rows of 16 tokens."""
    return [
        *("--module", "residua.engines.torchtitan", "--config", "debug", "--connection", connection),
        *("--dataloader.dataset-path", str(data), "--dump-folder", str(out)),
        *("--training.steps", str(STEPS), "--training.seq-len", "16", "--training.global-batch-size", "4"),
        *("--training.mixed-precision-param", "float32", "--training.disable-cuda-graphs"),
        *("--lr-scheduler.warmup-steps", "0", "--lr-scheduler.min-lr-factor", "1"),
        *("--parallelism.spmd-backend", "partial_dtensor", "--metrics.log-freq", "1"),
        *more,
        f"activation-checkpoint:{policy}",
    ]


def train(rank, runs):
    """On each rank: the losses and the norms of the gradients of every run, by its name."""
    import torch.distributed as dist

    from engines import torchtitan_on_cpu

    torchtitan_on_cpu.install()
    from torchtitan.config import ConfigManager

    warnings.filterwarnings("error", "FSDP2-wrapped module")
    curves = {}
    for name, command in runs.items():
        trainer = ConfigManager().parse_args(command).build()
        curve = curves[name] = {}
        trainer.metrics_processor.log = lambda step, loss, *rest, curve=curve, **_: curve.update(
            {step: (loss, rest[1])}
        )
        trainer.train()
        trainer.close()
        dist.barrier()
    return curves


@pytest.fixture(scope="module")
def begun(data, tmp_path_factory):
    """The folder of a converted Llama of each scheme with fresh connections, as transformers saves it."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from residua.engines.torchtitan import SIZES

    sizes = SIZES["debug"]
    folder = tmp_path_factory.mktemp("begun")
    for name in SCHEMES:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=sizes["vocab"],
            hidden_size=sizes["dim"],
            intermediate_size=sizes["hidden_dim"],
            num_hidden_layers=sizes["layers"],
            num_attention_heads=sizes["heads"],
            num_key_value_heads=sizes["heads"],
            rms_norm_eps=1e-5,
            max_position_embeddings=64,
            tie_word_embeddings=True,
        )
        model = residua.convert(LlamaForCausalLM(config), name, start="fresh")
        model.save_pretrained(folder / name)
        AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(folder / name)
    return folder


def from_folder(folder):
    return ("--checkpoint.enable", "--checkpoint.initial-load-path", str(folder), "--checkpoint.initial-load-in-hf")


TO_FOLDER = ("--checkpoint.last-save-model-only", "--checkpoint.last-save-in-hf")


@pytest.fixture(scope="module")
def on_two(start, begun, data, tmp_path_factory):
    """The curves of all schemes on two processes, and the folder of their runs."""
    out = tmp_path_factory.mktemp("two")
    more = ("--training.local-batch-size", "2", "--checkpoint.interval", "5", *TO_FOLDER)
    runs = {name: arguments(name, data, out / name, *from_folder(begun / name), *more) for name in SCHEMES}
    first, second = together(start, tmp_path_factory.mktemp("ranks"), 2, train, runs)
    assert first == second
    return first, out


@pytest.mark.parametrize("name", SCHEMES)
def test_two_processes_train_as_one_process_of_residua_train(on_two, begun, data, tmp_path, name):
    """The losses of ten steps and the resulting folder are those of `residua train` from the same start."""
    curves, out = on_two
    training = TrainConfig(
        steps=STEPS, batch_size=4, sequence_length=16, min_lr_ratio=1.0, device="cpu", tensorboard=False
    )
    config = RunConfig(BaseModelConfig(str(begun / name)), DataConfig(path=str(data)), training)
    run(config, tmp_path / "run", progress=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}
    assert curves[name].keys() == ours.keys() == set(range(1, STEPS + 1))
    for step, pair in curves[name].items():
        assert pair == pytest.approx(ours[step], rel=2e-5), f"step {step}"

    theirs = residua.load(out / name / "checkpoint" / f"step-{STEPS}")
    mine = open_run(tmp_path / "run", device="cpu").model
    assert type(theirs) is type(mine)
    assert theirs.state_dict().keys() == mine.state_dict().keys()
    for weight, expected in zip(theirs.state_dict().values(), mine.state_dict().values()):
        assert (weight - expected).abs().max() < 1e-4


def test_resumed_training_has_the_same_losses(on_two, start, data, tmp_path):
    """From a checkpoint of two processes, on two and on one."""
    curves, out = on_two
    expected = {step: pair for step, pair in curves["hc"].items() if step > STEPS // 2}
    for size in (1, 2):
        place = tmp_path / str(size)
        shutil.copytree(out / "hc" / "checkpoint" / f"step-{STEPS // 2}", place / "checkpoint" / f"step-{STEPS // 2}")
        command = arguments("hc", data, place, "--training.local-batch-size", "2", "--checkpoint.enable")
        (tmp_path / f"meet{size}").mkdir()
        resumed = together(start, tmp_path / f"meet{size}", size, train, {"hc": command})[0]["hc"]
        if size == 2:
            assert resumed == expected
        assert resumed.keys() == expected.keys()
        for step, pair in resumed.items():
            assert pair == pytest.approx(expected[step], rel=2e-5), f"step {step} on {size}"


WAYS = {
    "full": ("full", "--training.local-batch-size", "2"),
    "selective": ("selective", "--training.local-batch-size", "2"),
    "compiled": ("none", "--training.local-batch-size", "2", "--compile.enable", "--compile.backend", "aot_eager"),
    "tensor parallel": ("none", "--training.local-batch-size", "4", "--parallelism.tensor-parallel-degree", "2"),
    "narrow": ("none", "--training.local-batch-size", "2", "--training.mixed-precision-param", "bfloat16"),
}


def test_every_way_to_train_gives_the_same_losses(on_two, start, begun, data, tmp_path):
    """Activation checkpointing, torch.compile, tensor parallelism; bfloat16 within its rounding."""
    curves, _ = on_two
    runs = {
        f"{name}, {way}": arguments(name, data, tmp_path / name / way, *from_folder(begun / name), *more, policy=policy)
        for name in ("ddl-tc", "hc", "attnres-block")
        for way, (policy, *more) in WAYS.items()
    }
    (tmp_path / "meet").mkdir()
    for name, curve in together(start, tmp_path / "meet", 2, train, runs)[0].items():
        tolerance = 2e-2 if "narrow" in name else 2e-5
        assert len(curve) == STEPS
        for step, pair in curve.items():
            assert pair == pytest.approx(curves[name.partition(",")[0]][step], rel=tolerance), f"{name}: step {step}"


def test_a_scheme_with_several_inputs_trains_in_tensor_parallel(start, data, tmp_path):
    """The start is the same for any number of ranks."""
    size = "--training.local-batch-size"
    runs = {
        "sharded": arguments("mudd", data, tmp_path / "sharded", size, "2"),
        "cut": arguments("mudd", data, tmp_path / "cut", size, "4", "--parallelism.tensor-parallel-degree", "2"),
    }
    (tmp_path / "meet").mkdir()
    curves = together(start, tmp_path / "meet", 2, train, runs)[0]
    assert len(curves["cut"]) == STEPS
    for step, pair in curves["cut"].items():
        assert pair == pytest.approx(curves["sharded"][step], rel=2e-5), f"step {step}"


def documented(connection, data, out):
    """The command line of the page, for the smallest model."""
    page = (Path(__file__).parents[2] / "docs" / "pretraining.md").read_text()
    command = re.search(r"-m torchtitan\.train (.*?)\npython", page, re.DOTALL)[1].replace("\\\n", " ")
    places = {"small": "debug", "ddl-tc": connection, "data/fineweb-edu": str(data), "runs/titan": str(out)}
    assert places.keys() < set(shlex.split(command))
    return [places.get(word, word) for word in shlex.split(command)]


def starts(rank, commands):
    """On each rank: the parameters of every run before its first step."""
    from engines import torchtitan_on_cpu

    torchtitan_on_cpu.install()
    from torchtitan.config import ConfigManager

    found = {}
    for name, command in commands.items():
        trainer = ConfigManager().parse_args(command).build()
        found[name] = {key: x.full_tensor().detach() for key, x in trainer.model_parts[0].named_parameters()}
        trainer.close()
    return found


def test_schemes_start_alike_on_one_rank_and_on_two(start, data, tmp_path):
    """By the command of the page: parameters that two schemes share are the same to the last bit."""
    found = []
    for size in (1, 2):
        (meet := tmp_path / f"meet{size}").mkdir()
        commands = {name: documented(name, data, tmp_path / f"{name}{size}") for name in ("residual", "ddl-tc", "mhc")}
        found += together(start, meet, size, starts, commands)
    plain = found[0]["residual"]
    shared = [name for name in plain if not name.startswith("stream.")]
    assert len(shared) == 2 + 4 * 7  # the embedding, the last norm, and the matrices of four layers
    for rank in found:
        for name, parameters in rank.items():
            assert parameters.keys() == found[0][name].keys()
            assert all(torch.equal(x, found[0][name][key]) for key, x in parameters.items())
            assert all(torch.equal(parameters[key], plain[key]) for key in shared)


@pytest.mark.parametrize(
    ("output_init", "attention_output", "mlp_output"),
    [("sqrt_depth", 1 / 2, 1 / 2), ("depth", 1 / 4, 64 / 192 / 4)],
)
def test_matrices_start_as_in_models_of_residua(output_init, attention_output, mlp_output):
    """Four layers of width 64, with an MLP of 192: 0.5 / sqrt(64) for matrices that read, others by these factors."""
    from residua.engines.torchtitan import model_registry

    config = model_registry("debug").model
    config.output_init = output_init
    model = config.build()
    model.init_states()
    factors = {
        "attention.qkv_linear.wk": 1,
        "attention.wo": attention_output,
        "feed_forward.w1": 1,
        "feed_forward.w2": mlp_output,
    }
    for name, factor in factors.items():
        weights = torch.cat([layer.get_submodule(name).weight for layer in model.layers.values()])
        assert weights.std().item() == pytest.approx(factor * 0.5 / 8, rel=0.03), name


def test_a_penalty_reaches_the_gradient():
    from residua.engines.torchtitan import AddPenalty

    x, weight = torch.randn(3, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    (3 * AddPenalty.apply(x, weight**2 / 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))
    assert weight.grad == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"connection": "hcc"}, "did you mean"),
        (
            {
                "connection": "mudd",
                "checkpoint": {"enable": True, "last_save_model_only": True, "last_save_in_hf": True},
            },
            "connection must be .*MultiwayDynamicDense",
        ),
        ({"parallelism": {"enable_sequence_parallel": True}}, "parallelism.enable_sequence_parallel must be false"),
        ({"parallelism": {"spmd_backend": "spmd_types"}}, "parallelism.spmd_backend must be partial_dtensor"),
        (
            {"parallelism": {"tensor_parallel_degree": 2}, "compile": {"enable": True}},
            "compile.enable must be false with tensor parallelism",
        ),
    ],
)
def test_a_setting_that_would_train_something_else_is_refused(changes, message):
    from residua.engines.torchtitan import debug

    config = debug()
    sections = {
        name: replace(getattr(config, name), **value) if isinstance(value, dict) else value
        for name, value in changes.items()
    }
    with pytest.raises(ValueError, match=message):
        replace(config, **sections)


@pytest.mark.parametrize("name", ["debug", "small", "medium", "llama_1b"])
@pytest.mark.parametrize("connection", ["residual", "ddl-cc", "mhc"])
def test_every_parameter_has_its_place_in_the_converted_llama(name, connection):
    from transformers import AutoModelForCausalLM

    from residua.engines import torchtitan

    config = getattr(torchtitan, name)().model_spec.model
    config.connection = connection
    with torch.device("meta"):
        ours = dict(config.build().named_parameters())
        theirs = AutoModelForCausalLM.from_config(torchtitan.converted_configuration(config))
    places = torchtitan.names_in_transformers(config)
    assert {places[name]: x.shape for name, x in ours.items()} == {n: x.shape for n, x in theirs.named_parameters()}
    if connection == "residual":  # the paper: 124M and 353M
        millions = theirs.num_parameters() / 1e6
        assert {"small": 123.587328, "medium": 353.502208}.get(name, millions) == millions
