import functools
import json

import pytest
import torch

from benchmarks.__main__ import run as run_benchmark
from benchmarks.generate import Decoding, GenerateSettings, benchmark
from residua.connections import PRESETS
from residua.errors import RunError

SIZES = {"layers": 1, "dim": 16, "heads": 2, "head_dim": 8, "vocab_size": 32}
TINY = {**SIZES, "prompt_length": 5, "new_tokens": 3, "batch_sizes": (1, 2), "rounds": 2, "warmup": 1}


def settings(*presets, **changes):
    return GenerateSettings(presets=presets, **{**TINY, **changes})


def command(*arguments):
    """Run `python -m benchmarks generate` with a tiny model."""
    sizes = []
    for name, value in TINY.items():
        sizes += [f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return run_benchmark(["generate", *sizes, *arguments])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_generates_the_logits_of_its_float64_copy(preset):
    assert Decoding(preset, 2, settings(preset)).check() < 1e-5


@pytest.mark.parametrize("changes", [{"precision": "bfloat16"}, {"state_dtype": "bfloat16"}])
def test_low_precision_passes_its_own_check(changes):
    assert 1e-4 < Decoding("ddl-tc", 2, settings("ddl-tc", **changes)).check() < 5e-2


@pytest.mark.parametrize("preset", ["residual", "ddl-ec"])
def test_every_measurement_generates_the_same_tokens(preset):
    decoding = Decoding(preset, 2, settings(preset))
    written = []
    for _ in range(3):
        decoding.prepare()
        decoding()
        written.append(decoding.next)
    prompt = decoding.tokens[:, : TINY["prompt_length"]]
    for _ in range(TINY["new_tokens"] + 1):
        following = decoding.model(input_ids=prompt, use_cache=False).logits[:, -1:].argmax(-1)
        prompt = torch.cat([prompt, following], 1)
    assert all(torch.equal(one, prompt[:, -1:]) for one in written)


def test_no_speed_is_reported_if_the_memory_is_lost(monkeypatch, capsys):
    step = Decoding._step

    def forgetful(decoding, ids):
        decoding.cache.reset()
        return step(decoding, ids)

    monkeypatch.setattr(Decoding, "_step", forgetful)
    with pytest.raises(RunError, match=r"^residual must be logits within "):
        command("--presets", "ddl")
    assert capsys.readouterr().out == ""


@pytest.mark.compiler
def test_a_compiled_step_is_one_graph(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch, "compile", lambda model, mode, compiled=torch.compile, **rest: compiled(model, **rest))
    torch._dynamo.reset()
    result = benchmark(settings("ddl-tc", compile=True, rounds=1, warmup=0, batch_sizes=(1,)))
    assert result.timing[1].seconds.keys() == {"residual", "ddl-tc"}


def test_records_of_generation_are_complete(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert command("--presets", "ddl", "ddl-cc:value_channels=2", "--out", str(out), "--json") == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert json.loads(capsys.readouterr().out) == records
    found = [(record["batch_size"], record["preset"]) for record in records]
    assert found == [(batch, name) for batch in (1, 2) for name in ("residual", "ddl", "ddl-cc:value_channels=2")]
    record, base = records[4], records[3]
    own = record["seconds"]
    assert record["baseline_seconds"] == base["seconds"]
    assert len(own) == TINY["rounds"]
    assert record["ratio"]["median"] == pytest.approx(sum(a / b for a, b in zip(own, base["seconds"])) / 2)
    assert record["median_seconds_per_token"] == pytest.approx(sum(own) / 2 / TINY["new_tokens"])
    assert record["clock"] == "process_clock"
    assert record["settings"]["prompt_length"] == TINY["prompt_length"]
    assert record.keys() >= {"benchmark", "error", "parameters", "commit", "residua", "torch", "device", "date"}


def test_the_table_of_generation_has_a_line_for_each_preset_and_batch(capsys):
    assert command("--presets", "ddl") == 0
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert "ms per token" in header
    assert [row.split()[:2] for row in rows] == [[name, batch] for batch in "12" for name in ("residual", "ddl")]
    assert {len(row) for row in rows} == {len(rule)}


def test_each_batch_size_is_saved_before_the_next_is_measured():
    kept, done = [], []

    def advance():
        done.append(None)
        if len(done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        benchmark(settings("ddl", batch_sizes=(1, 2), rounds=1, warmup=0), advance=advance, keep=kept.append)
    assert [(record["batch_size"], record["preset"]) for record in kept] == [(1, "residual"), (1, "ddl")]
