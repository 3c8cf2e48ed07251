import json
import os

import pytest
import torch

from residua.commands import cost
from residua.commands.signature import run_function
from residua.connections import PRESETS
from residua.errors import InputError, RunError
from residua.lab.cost import measured_memory as memory
from residua.lab.cost.measured_memory import benchmark, kept_bytes, peak_bytes
from residua.lab.cost.settings import MemorySettings, with_and_without_recompute
from residua.lab.cost.steps import TrainingStep

TINY = {"layers": 2, "dim": 64, "heads": 2, "head_dim": 32, "sequence_length": 64, "vocab_size": 32}


def settings(*presets, **changes):
    return MemorySettings(presets=presets, **{**TINY, "peak": False, **changes})


def above_baseline(settings):
    """What each preset keeps above the plain residual, in vectors of the width for each token and layer."""
    return {row["preset"]: row["vectors_above_baseline"] for row in benchmark(settings).records()}


def command(*arguments):
    """Run `residua cost memory` with a tiny model."""
    sizes = [text for name, value in TINY.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    run_function("residua cost memory", cost.memory, [*sizes, *arguments])


def test_recomputed_states_are_not_kept():
    """Eight sublayers of four channels: two states are kept of eight, or all, and then the values as well."""
    found = above_baseline(settings("ddl-cc", "ddl-cc:recompute=none", "ddl-cc:recompute_every=8", layers=4))
    _, replayed, everything, rarely = found.values()
    assert everything - replayed == pytest.approx(6 * 4 / 4 + 2 * 4 / TINY["dim"], abs=0.05)
    assert replayed - rarely == pytest.approx(1 * 4 / 4, abs=0.05)
    numbers = 2 * (2 * 4 + 4) / TINY["dim"]
    assert replayed <= 4.5 + numbers


def test_a_state_of_several_tensors_is_kept_once():
    """Beside the plain residual: a source for each sublayer, and two numbers for each source of each read; less what is
    read and its norm, which are derived again."""
    found = above_baseline(settings("attnres", layers=4))
    read = sum(1 + boundary for boundary in range(1, 9))
    assert found["attnres"] == pytest.approx((8 - 2 * 8 + 2 * read / TINY["dim"]) / 4, abs=0.05)


@pytest.mark.parametrize("changes", [{}, {"precision": "bfloat16"}, {"state_dtype": "bfloat16"}])
def test_counting_gives_the_same_number_again_and_leaves_no_gradient(changes):
    step = TrainingStep("ddl-tc", settings("ddl-tc", **changes))
    assert kept_bytes(step) == kept_bytes(step)
    assert all(parameter.grad is None for parameter in step.model.parameters())


def test_a_narrow_state_keeps_less():
    name = "ddl-tc:recompute=none"
    assert above_baseline(settings(name, state_dtype="bfloat16"))[name] < 0.8 * above_baseline(settings(name))[name]


def test_what_is_kept_grows_with_the_batch():
    one, two = (kept_bytes(TrainingStep("ddl-cc", settings("ddl-cc", batch_size=size))) for size in (4, 8))
    assert two == pytest.approx(2 * one, rel=0.02)


def test_every_preset_that_recomputes_states_is_measured_without_that_too():
    names = with_and_without_recompute()
    assert [name for name in names if ":" not in name] == list(PRESETS)
    place = names.index("ddl-tc")
    assert names[place + 1] == "ddl-tc:recompute=none"
    assert "frac:recompute=none" in names
    assert {"ddl:recompute=none", "attnres:recompute=none"}.isdisjoint(names)
    assert MemorySettings(peak=False).presets == names


@pytest.mark.slow
@pytest.mark.skipif(not memory.STATUS.exists(), reason="only Linux tells the peak of a process")
def test_the_peak_is_that_of_a_training_step():
    sizes = {"sequence_length": 256, "batch_size": 16, "vocab_size": 32, "dim": 128, "head_dim": 64}
    found = settings("ddl-cc:recompute=none", **sizes)
    step = TrainingStep("ddl-cc:recompute=none", found)
    weights = 4 * step.model.num_parameters()
    least = kept_bytes(step) + 3 * weights  # with both moments of AdamW
    assert least < peak_bytes("ddl-cc:recompute=none", found) < 2 * least + 64 * memory.MEBIBYTE


def killed(*arguments):
    os.abort()


@pytest.mark.slow
def test_a_process_that_is_killed_is_reported(monkeypatch):
    monkeypatch.setattr(memory, "_process_peak", killed)
    with pytest.raises(RunError, match=r"^ddl: the process of the training step was killed, perhaps for lack of memor"):
        peak_bytes("ddl", settings("ddl"))


def test_a_wrong_step_gets_no_number(monkeypatch, capsys):
    loss = TrainingStep.loss
    monkeypatch.setattr(TrainingStep, "loss", lambda step: loss(step) * 1.001)
    with pytest.raises(RunError, match="residual must have the loss within"):
        command("--presets", "ddl", "--no-peak")
    assert capsys.readouterr().out == ""


def test_records_of_memory_are_complete(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    command("--presets", "ddl-cc", "--no-peak", "--out", str(out), "--json")
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out) == records
    base, record = records
    assert (base["preset"], record["preset"]) == ("residual", "ddl-cc")
    assert base["vectors_above_baseline"] == 0
    assert record["vectors_above_baseline"] == pytest.approx(record["vectors"] - base["vectors"])
    assert record["vectors"] == pytest.approx(record["kept_bytes"] / (2 * 64 * 2 * 64 * 4))
    assert record["peak_bytes"] is None
    assert record.keys() >= {"benchmark", "errors", "settings", "commit", "residua", "torch", "device", "date"}


def test_the_table_of_memory_has_a_line_for_each_preset(monkeypatch, capsys):
    monkeypatch.setattr(memory, "peak_bytes", lambda preset, settings: 2**20 * len(preset))
    command("--presets", "ddl")
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert "above residual" in header
    assert [row.split()[0] for row in rows] == ["residual", "ddl"]
    assert rows[1].endswith(f"{3 / 8:.3f}")
    assert {len(row) for row in rows} == {len(rule)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_memory_of_a_missing_device_is_refused():
    with pytest.raises(InputError, match="device needs a machine with a CUDA device"):
        command("--device", "cuda")


def test_each_preset_is_kept_before_the_next_is_measured(monkeypatch):
    kept, real = [], memory.kept_bytes

    def counted(step):
        if step.preset == "hc":
            raise KeyboardInterrupt
        return real(step)

    monkeypatch.setattr(memory, "kept_bytes", counted)
    with pytest.raises(KeyboardInterrupt):
        benchmark(settings("ddl", "hc"), keep=kept.append)
    assert [record["preset"] for record in kept] == ["residual", "ddl"]


@pytest.mark.slow
def test_a_converted_llama_is_compared_with_itself_before(capsys):
    """In wider and wider models, numbers of gates and mappings take a smaller and smaller share of a vector."""
    found = []
    for dim in (64, 128):
        sizes = {"dim": dim, "layers": 4, "batch_size": 1}
        found.append(above_baseline(settings("residual", "hc", base="llama", **sizes))["hc"])
    numbers = 128 * (found[0] - found[1])
    assert 2 < found[1] - numbers / 128 <= 4.5
    with pytest.raises(InputError, match="base must be one of residua, llama, got 'gpt'"):
        settings(base="gpt")
    with pytest.raises(InputError, match="state_dtype must be None with base='llama'"):
        settings(base="llama", state_dtype="bfloat16")
    with pytest.raises(InputError, match="takes one input, and this scheme reads several"):
        command("--base", "llama", "--presets", "mudd", "--no-peak")
