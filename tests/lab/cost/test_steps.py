import functools
import json
import os
import shutil

import pytest
import torch

from residua.commands import cost
from residua.commands.signature import run_function
from residua.errors import InputError, RunError
from residua.lab.cost import measured_memory
from residua.lab.cost import steps as cost_steps
from residua.lab.cost.measured_memory import peak_of
from residua.lab.cost.steps import MeasuredStep, measure_schemes, table
from residua.lab.experiment import model_config
from residua.lab.training import load_config
from residua.models import ResiduaForCausalLM
from support.converted_models import save_base
from support.tiny_models import TINY_RUN, tiny_config

WIDER = {"model__num_hidden_layers": 4, "model__hidden_size": 64, "model__head_dim": 32, "train__sequence_length": 64}


def config_of(connection="residual", **changes):
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return load_config("tiny", {**TINY_RUN, "model.connection": connection, **keys})


def step(connection="residual", **changes):
    config = config_of(connection, **changes)
    return MeasuredStep(config, model_config(config))


def command(*arguments):
    """Run `residua cost step` with a tiny model."""
    sizes = [f"--{key}={value}" for key, value in TINY_RUN.items()]
    run_function("residua cost step", cost.step, ["--config", "tiny", *sizes, "--rounds", "2", *arguments])


@pytest.mark.nightly
@pytest.mark.compiler
def test_each_compiled_step_is_one_graph_for_any_number_of_schemes(monkeypatch):
    # The backend decides how fast the graph is, not whether there is one; this backend takes no time to build it.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        rows = measure_schemes(config_of(train__compile=True), ["ddl"], rounds=1, peak=False)
    assert [row["scheme"] for row in rows] == ["residual", "ddl"]


def test_training_steps_reduce_the_loss():
    one = step("ddl-cc-ec")
    first = one.loss().item()
    for _ in range(20):
        one()
    assert one.loss().item() < first - 0.05


def test_measuring_leaves_threads_and_random_state_as_they_were():
    torch.set_num_threads(threads := torch.get_num_threads() + 1)
    state = torch.random.get_rng_state()
    try:
        measure_schemes(config_of(), [], rounds=1, peak=False)
        assert torch.get_num_threads() == threads
        assert torch.equal(torch.random.get_rng_state(), state)
    finally:
        torch.set_num_threads(threads - 1)


def test_the_table_has_the_usual_names(capsys):
    command("--schemes", "Residual+TC", "ddl-cc:beta_init=0.5", "--no-peak")
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows[-3:] == ["residual", "residual+tc", "ddl-cc:beta_init=0.5"]


def test_the_records_are_complete(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    out.write_text('{"scheme": "earlier"}\n')
    command("--schemes", "DDL-CC", "--no-peak", "--out", str(out), "--json")
    earlier, base, record = (json.loads(line) for line in out.read_text().splitlines())
    assert [row["scheme"] for row in (earlier, base, record)] == ["earlier", "residual", "ddl-cc"]
    ratios = [a / b for a, b in zip(record["seconds"], base["seconds"], strict=True)]
    assert record["time_ratio"]["median"] == pytest.approx(sum(ratios) / 2)
    assert record["vectors"] == pytest.approx(record["kept_bytes"] / (2 * 8 * 16 * 4))
    assert record["peak_bytes"] is None
    assert record["parameters"] > base["parameters"]
    assert (record["train"]["batch_size"], record["model"]["connection"]) == (2, "ddl-cc")
    assert record.keys() >= {"commit", "residua", "torch", "python", "device", "cpu", "date", "load", "threads"}
    assert json.loads(capsys.readouterr().out) == [base, record]


def test_the_table_has_a_line_for_each_scheme_and_the_run_has_its_own(capsys, monkeypatch):
    monkeypatch.setattr(cost_steps, "peak_of", lambda *_, **__: 3 * 2**20)
    command("--model.connection", "hc")
    header, rule, *rows = capsys.readouterr().out.splitlines()
    assert "times residual" in header
    assert [row.split()[0] for row in rows] == ["residual", "hc"]
    assert all(row.endswith(" 3") for row in rows)
    assert {len(row) for row in rows} == {len(rule)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schemes", "dll"], "did you mean 'ddl'"),
        (["--schemes", "frac:num_fractions=3"], "16"),
        (["--model.num_hidden_layers", "0"], "num_hidden_layers must be at least 1, got 0"),
        (["--rounds", "0"], "rounds must be at least 1, got 0"),
        (["--out", "."], "cannot be used as a file .*: Is a directory"),
        (["--out", "nowhere/out.jsonl"], "cannot be used as a file .*: No such file or directory"),
    ],
)
def test_schemes_that_cannot_be_measured_are_refused_first(arguments, message, monkeypatch):
    monkeypatch.setattr(cost_steps, "measure", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(InputError, match=message):
        command(*arguments)


def test_the_base_as_it_is_counts_once_and_one_with_a_connection_is_refused(tmp_path):
    base = save_base(tmp_path / "llama", hidden_size=16, num_attention_heads=2, head_dim=8)
    keys = {"train.sequence_length": 8, "train.batch_size": 1, "train.device": "cpu"}
    config = load_config("retrofit", {**keys, "model.base": str(base), "model.connection": "null"})
    rows = measure_schemes(config, [config.model.connection], rounds=1, peak=False)
    assert [row["scheme"] for row in rows] == ["residual"]
    assert table(rows).rows[0][0] == "residual"
    model = ResiduaForCausalLM(tiny_config("ddl"))
    model.save_pretrained(tmp_path / "own")
    shutil.copy(base / "tokenizer.json", tmp_path / "own")
    shutil.copy(base / "tokenizer_config.json", tmp_path / "own")
    config = load_config("retrofit", {**keys, "model.base": str(tmp_path / "own"), "model.connection": "null"})
    with pytest.raises(InputError, match=r"^model.base must be a model without a connection, .*, got .*own$"):
        measure_schemes(config, [None], rounds=1, peak=False)


@pytest.mark.parametrize("changes", [{}, {"train__precision": "bfloat16"}, {"model__state_dtype": "bfloat16"}])
def test_counting_gives_the_same_number_again_and_leaves_no_gradient(changes):
    one = step("ddl-tc", **changes)
    assert one.kept() == one.kept()
    assert all(parameter.grad is None for parameter in one.model.parameters())


def test_a_bfloat16_state_keeps_less_memory_than_a_float32_state():
    wide, narrow = (
        [step(name, **WIDER, **changes).kept() for name in ("ddl-tc:recompute=none", "residual")]
        for changes in ({}, {"model__state_dtype": "bfloat16"})
    )
    assert narrow[0] - narrow[1] < 0.8 * (wide[0] - wide[1])


def test_kept_bytes_grow_with_the_batch():
    one, two = (step("ddl-cc", **WIDER, train__batch_size=size).kept() for size in (4, 8))
    assert two == pytest.approx(2 * one, rel=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not measured_memory.STATUS.exists(), reason="only Linux tells the peak of a process")
def test_the_peak_is_that_of_a_training_step():
    sizes = {"model__hidden_size": 128, "model__head_dim": 64, "train__sequence_length": 256, "train__batch_size": 16}
    config = config_of("ddl-cc:recompute=none", **sizes)
    one = MeasuredStep(config, model_config(config))
    least = one.kept() + 3 * 4 * one.model.num_parameters()  # with both moments of AdamW
    assert least < peak_of(MeasuredStep, (config, model_config(config)), "ddl-cc", device="cpu") < 2 * least + 2**26


def killed(*arguments):
    os.abort()


@pytest.mark.slow
def test_a_process_that_is_killed_is_reported(monkeypatch):
    monkeypatch.setattr(measured_memory, "_process_peak", killed)
    with pytest.raises(RunError, match=r"^ddl: .*killed"):
        peak_of(MeasuredStep, (), "ddl", device="cpu")


def test_a_system_that_does_not_report_the_peak_gives_none(monkeypatch, tmp_path):
    monkeypatch.setattr(measured_memory, "STATUS", tmp_path / "nothing")
    assert peak_of(MeasuredStep, (), "ddl", device="cpu") is None


@pytest.mark.nightly
def test_a_converted_llama_is_compared_with_itself_under_the_plain_residual(tmp_path):
    """In wider and wider models, numbers of gates and mappings take a smaller and smaller share of a vector."""
    found = []
    for dim in (64, 128):
        sizes = {"hidden_size": dim, "num_hidden_layers": 4, "num_attention_heads": 2}
        base = save_base(tmp_path / f"llama-{dim}", **sizes, head_dim=32)
        keys = {"model.base": str(base), "train.sequence_length": 64, "train.batch_size": 1, "train.device": "cpu"}
        config = load_config("retrofit", {**keys, "model.connection": "hc"})
        rows = measure_schemes(config, ["hc", "gated-residual"], rounds=1, peak=False)
        assert [row["scheme"] for row in rows] == ["residual", "hc", "gated-residual"]
        found.append(rows[1]["vectors"] - rows[0]["vectors"])
    numbers = 128 * (found[0] - found[1])
    assert 2 < found[1] - numbers / 128 <= 4.5
    with pytest.raises(InputError, match=r"connection must be .*MultiwayDynamicDense"):
        measure_schemes(config, ["mudd"], rounds=1, peak=False)
