import json
import os
import signal
import threading
import time
from dataclasses import asdict

import pytest

import residua.lab.demo
from residua.commands.cli import main
from residua.connections.names import label
from residua.lab.demo import PROMPT, RECIPES, place_of
from residua.lab.records import jsonlines
from residua.lab.training import load_config
from residua.lab.training.checkpoint import saved_steps
from support.tiny_runs import write_texts

# What may be tuned for a scheme; in all else the comparison holds the runs equal.
TUNED = {"model.connection", "model.embedding_init_std", "model.hidden_init_std_factor", "train.lr"}

CONNECTIONS = {name: load_config(recipe).model.connection for name, recipe in RECIPES.items()}

SMALL = """
model: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, max_position_embeddings: 128,
        connection: "CONNECTION"}
data: {source: SOURCE, tokenizer: byte}
train: {steps: 20, warmup_steps: 2, batch_size: 2, sequence_length: 16, evaluate_every: 10, checkpoint_every: 10,
        device: cpu, tensorboard: false, lr: LR}
"""


@pytest.fixture
def small(tmp_path, monkeypatch, quick_pool):
    """Replace the recipes by ones of a second or two."""
    texts = write_texts(tmp_path / "texts")
    recipes = {}
    for number, name in enumerate(RECIPES, start=1):
        recipes[name] = str(tmp_path / f"{name}.yaml")
        text = SMALL.replace("SOURCE", str(texts)).replace("LR", f"{number}.0e-3")
        (tmp_path / f"{name}.yaml").write_text(text.replace("CONNECTION", CONNECTIONS[name]))
    monkeypatch.setattr(residua.lab.demo, "RECIPES", recipes)


def settings(config):
    return {f"{part}.{key}": value for part, keys in asdict(config).items() for key, value in keys.items()}


def test_the_recipes_differ_only_in_what_is_tuned():
    plain, *others = (settings(load_config(recipe)) for recipe in RECIPES.values())
    for other in others:
        assert {key for key in plain if plain[key] != other[key]} <= TUNED


def test_a_folder_of_an_earlier_demo_remains_usable(tmp_path):
    assert place_of(tmp_path, "residual+tc") == tmp_path / "residual+tc"
    (tmp_path / "residual-tc").mkdir()
    assert place_of(tmp_path, "residual+tc") == tmp_path / "residual-tc"
    assert [label(connection) for connection in CONNECTIONS.values()] == list(RECIPES)


@pytest.mark.slow
def test_the_demo_makes_three_runs_on_the_same_tokens_a_table_pictures_and_texts(small, tmp_path, capsys):
    """Repeated, it uses the existing results; other settings are refused."""
    out = tmp_path / "out"
    argv = ["demo", "--out", str(out), "--steps", "4"]
    assert main(argv) == 0
    printed = capsys.readouterr()
    assert "training 3 models side by side: residual, ddl-tc, residual+tc" in printed.err
    assert all(f"/3 runs, {name} finished" in printed.err for name in RECIPES)
    for name, connection in CONNECTIONS.items():
        assert f"\n{label(connection)} " in printed.out
        assert f"{name} writes:\n  {PROMPT}" in printed.out
    assert all(
        (out / picture).is_file() and str(out / picture) in printed.out for picture in ("loss.png", "difference.png")
    )
    page = out / "explorer.html"
    assert f"open in a browser: {page}" in printed.out
    text = page.read_text(encoding="utf-8")
    for name in RECIPES:
        assert (out / name / "analysis" / "trace-step-4.safetensors").is_file()
        assert f'"name":"{name}"' in text

    facts = [json.loads((out / name / "facts.json").read_text())["data"]["fingerprint"] for name in RECIPES]
    assert len(set(facts)) == 1
    configs = [settings(load_config(str(out / name / "config.yaml"))) for name in RECIPES]
    assert [config["model.connection"] for config in configs] == list(CONNECTIONS.values())
    assert [config["train.lr"] for config in configs] == [1e-3, 2e-3, 3e-3]
    assert {
        (config["train.steps"], config["train.warmup_steps"], config["train.evaluate_every"]) for config in configs
    } == {(4, 2, 10)}

    page = page.read_bytes()
    (out / "residual+tc").rename(out / "residual-tc")  # as an earlier version named it
    assert main(argv) == 0
    assert str(out) in capsys.readouterr().out
    (out / "residual-tc").rename(out / "residual+tc")
    metrics = {name: (out / name / "metrics.jsonl").stat().st_mtime_ns for name in RECIPES}
    assert main(argv) == 0
    assert capsys.readouterr().out == printed.out
    assert {name: (out / name / "metrics.jsonl").stat().st_mtime_ns for name in RECIPES} == metrics
    # The traces of the first time were made from the same checkpoints, so they stay, and the page comes out the same.
    assert (out / "explorer.html").read_bytes() == page
    for steps, said in (("3", "a new folder, got 3"), ("8", "a new folder, got 8")):
        assert main([*argv[:-1], steps]) == 2
        error = capsys.readouterr().err
        assert f"--steps must be 4, as in {out}" in error
        assert said in error


@pytest.mark.slow
@pytest.mark.processes
def test_an_interrupted_demo_saves_its_work_prints_how_to_resume_and_resumes(small, tmp_path, capsys):
    out = tmp_path / "out"
    argv = ["demo", "--out", str(out), "--steps", "2000"]
    rows = out / "ddl-tc" / "metrics.jsonl"

    def press():
        while not rows.exists() or len(rows.read_bytes().splitlines()) < 3:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    assert main(argv) == 130
    assert f"residua demo --out {out} --steps 2000" in capsys.readouterr().err
    assert not (out / "explorer.html").exists()
    step = saved_steps(out / "ddl-tc")[-1]
    assert 3 <= step < 1000
    assert [row["step"] for row in jsonlines.read(rows)] == list(range(1, step + 1))
