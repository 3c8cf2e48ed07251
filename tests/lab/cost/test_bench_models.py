import functools
import json
import platform

import pytest
import torch

from residua.commands import cost
from residua.commands.signature import run_function
from residua.connections import PRESETS
from residua.errors import InputError, RunError
from residua.lab.cost import steps as models
from residua.lab.cost.settings import ModelSettings
from residua.lab.cost.steps import TrainingStep, benchmark

SIZES = {"layers": 1, "dim": 16, "heads": 2, "head_dim": 8, "sequence_length": 8, "vocab_size": 32}
TINY = {**SIZES, "rounds": 2, "warmup": 1}


def settings(*presets, **changes):
    return ModelSettings(presets=presets, **{**TINY, **changes})


def command(*arguments):
    """Run `residua cost step` with a tiny model."""
    sizes = [text for name, value in TINY.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    run_function("residua cost step", cost.step, [*sizes, *arguments])


class Slightly(torch.nn.Module):
    """A faulty fast path: the loss or one gradient of the model inside is a little off."""

    def __init__(self, model, fault):
        super().__init__()
        self.model, self.fault = model, fault

    def forward(self, **batch):
        output = self.model(**batch)
        if self.fault == "loss":
            output.loss = output.loss * 1.001
        elif self.fault == "gradient":
            gain = self.model.model.norm.weight
            output.loss = output.loss + 1e-3 * (gain - gain.detach()).sum()  # adds nothing to the loss itself
        else:
            output.loss = output.loss / 0
        return output


def test_the_plain_residual_always_takes_part_and_nothing_twice():
    assert settings("ddl", "residual", "ddl").presets == ("residual", "ddl")


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_check(preset):
    TrainingStep(preset, settings(preset)).check()


def test_bfloat16_is_really_another_computation_and_passes_its_own_check():
    in_float32 = TrainingStep("ddl-tc", settings(precision="float32")).check()
    in_bfloat16 = TrainingStep("ddl-tc", settings(precision="bfloat16")).check()
    assert in_bfloat16.gradient > 100 * in_float32.gradient


@pytest.mark.parametrize("fault", ["loss", "gradient", "infinite"])
def test_a_wrong_fast_path_gets_no_speed(monkeypatch, capsys, tmp_path, fault):
    monkeypatch.setattr(torch, "compile", lambda model, **options: Slightly(model, fault))
    with pytest.raises(
        RunError, match=r"^residual must have the (loss|gradient) within .* a wrong model has no speed$"
    ):
        command("--presets", "ddl", "--compile", "--out", str(tmp_path / "out.jsonl"))
    assert capsys.readouterr().out == ""
    assert (tmp_path / "out.jsonl").read_text() == ""


@pytest.mark.compiler
def test_compiled_steps_are_each_one_graph_however_many_there_are(monkeypatch):
    # The backend decides how fast the graph is, not whether there is one; this backend takes no time to build it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        result = benchmark(settings("ddl", compile=True, rounds=1, warmup=0))
    assert [row["preset"] for row in result.records()] == ["residual", "ddl"]


def test_a_step_learns():
    step = TrainingStep("ddl-cc-ec", settings())
    step()
    first = step.last_loss
    for _ in range(20):
        step()
    assert step.last_loss < first - 0.05


def test_measuring_leaves_threads_and_random_state_as_they_were():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    benchmark(settings(threads=threads + 1, rounds=1, warmup=0))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_loss_that_is_lost_on_the_way_is_reported(monkeypatch):
    call = TrainingStep.__call__

    def diverge(step):
        call(step)
        step.last_loss = step.last_loss * float("nan")

    monkeypatch.setattr(TrainingStep, "__call__", diverge)
    with pytest.raises(RunError, match="residual must have a finite loss after the last step, got nan"):
        benchmark(settings())


def test_records_are_complete(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        command("--presets", "ddl", "--out", str(out), "--json", "--seed", "3")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["preset"] for record in records] == ["residual", "ddl"] * 2  # appended

    record = records[1]
    base, own = record["baseline_seconds"], record["seconds"]
    assert base == records[0]["seconds"]
    assert len(own) == TINY["rounds"]
    assert record["ratio"]["median"] == pytest.approx(sum(a / b for a, b in zip(own, base)) / 2)
    assert record["ratio"]["lower"] <= record["ratio"]["median"] <= record["ratio"]["upper"]
    assert record["tokens_per_second"] == pytest.approx(2 * 8 / record["median_seconds"])
    assert record["parameters"] > records[0]["parameters"]
    assert record["settings"] == {
        **TINY,
        "presets": ["residual", "ddl"],
        "base": "residua",
        "device": "cpu",
        "batch_size": 2,
        "precision": "float32",
        "compile": False,
        "state_dtype": None,
        "threads": 1,
        "seed": 3,
    }
    assert record["clock"] == "process_clock"
    assert record["torch"] == torch.__version__
    assert record["python"] == platform.python_version()
    assert record["threads"] == 1
    assert record.keys() >= {"benchmark", "baseline", "errors", "commit", "residua", "device", "cpu", "date", "load"}

    printed = capsys.readouterr().out
    assert json.loads(printed[printed.index("]\n[") + 2 :]) == records[2:]


def test_the_table_has_a_line_for_each_preset(capsys):
    command("--presets", "ddl", "ddl-cc")
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "preset"
    assert "ratio to residual" in header
    assert [row.split()[0] for row in rows] == ["residual", "ddl", "ddl-cc"]
    assert {len(row) for row in rows} == {len(rule)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--presets", "dll"], "did you mean 'ddl'"),
        (["--layers", "0"], "layers must be at least 1, got 0"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--warmup", "-1"], "warmup must be 0 or more, got -1"),
        (["--batch-size", "0"], "batch-size must be at least 1, got 0"),
        (["--vocab-size", "0"], "vocab_size must"),
        (["--head-dim", "7"], "head_dim must be an even number"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        command(*arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused():
    with pytest.raises(InputError, match="device needs a machine with a CUDA device, found none; use cpu"):
        command("--device", "cuda")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "benchmark", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(InputError, match=r"must be a file to append to, got: No such file or directory"):
        command("--out", str(tmp_path / "nowhere" / "out.jsonl"))
    with pytest.raises(InputError, match=r"must be a file to append to, got: Is a directory"):
        command("--out", str(tmp_path))


@pytest.mark.interpreter
@pytest.mark.parametrize("preset", ["ddl-cc:implementation=triton", "mhc:implementation=triton"])
def test_kernels_are_checked_against_the_plain_definitions(preset):
    """No kernel takes float64."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'residua[kernels]'")
    TrainingStep(preset, settings(preset, layers=2)).check()
