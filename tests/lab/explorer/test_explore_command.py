import json
import shutil

import pytest
import torch

from residua.commands.cli import main
from residua.lab import experiment
from residua.lab.experiment import open_run
from residua.lab.inspection import Trace
from support.tiny_runs import options, run_config


def output(capsys, *argv):
    """What the command prints without a page."""
    capsys.readouterr()
    status = main(["explore", "--no-page", *map(str, argv)])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return captured.out


def refused(capsys, *argv):
    capsys.readouterr()
    assert main(["explore", *map(str, argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_the_newest_checkpoint_reads_the_validation_data_once(capsys, run):
    assert main(["explore", "--no-page", str(run)]) == 0
    text, said = capsys.readouterr()
    assert "measuring its connections on held-out text" in said
    assert text.startswith("ddl-cc, step 4, the first 16 tokens of the validation data, loss ")
    assert "1 attention" in text
    assert "beta" in text.splitlines()[2]
    path = run / "analysis" / "trace-step-4.safetensors"
    assert f"trace: {path}" in text
    found = Trace.load(path)
    assert (found.facts["run"], found.facts["checkpoint"], found.num_tokens) == ("ddl", 4, 16)
    assert "".join(found.tokens) == open_run(run).tokenizer.decode(found.values["token_ids"].tolist())
    before = path.stat().st_mtime_ns
    assert main(["explore", "--no-page", str(run)]) == 0
    assert capsys.readouterr() == (text, "")
    assert path.stat().st_mtime_ns == before


def test_explore_accepts_a_prompt_and_a_checkpoint(capsys, run):
    text = output(capsys, run, "--prompt", "Text number 3", "--checkpoint", "2")
    assert text.startswith("ddl-cc, step 2, 13 tokens of a prompt, loss ")
    assert output(capsys, run, "--checkpoint", "2").startswith("ddl-cc, step 2, the first 16 tokens of the validation")
    assert Trace.load(run / "analysis" / "trace-step-2.safetensors").num_tokens == 16
    assert output(capsys, run, "--prompt", "").startswith("ddl-cc, step 4, 1 tokens of a prompt")
    assert "5 tokens of a prompt" in output(capsys, run, "--prompt", "Text number 3", "--tokens", "5")
    assert [path.name for path in (run / "analysis").iterdir()] == ["trace-step-2.safetensors"], "the others are not"


def test_explore_prints_a_trace_as_json(capsys, run):
    (record,) = json.loads(output(capsys, run, "--checkpoint", "2", "--json"))
    assert record["checkpoint"] == 2
    assert record["trace"] == str(run / "analysis" / "trace-step-2.safetensors")
    assert [row["sublayer"] for row in record["sublayers"]] == ["1 attention", "1 mlp"]
    assert record["sublayers"][0]["beta"] == pytest.approx(1, abs=0.5)
    assert isinstance(record["warnings"], list)


def test_the_loss_is_that_of_the_model_in_the_precision_of_its_training(capsys, prepared, tmp_path):
    experiment.run(run_config(options(prepared, precision="bfloat16")), tmp_path / "run", progress=False)
    (record,) = json.loads(output(capsys, tmp_path / "run", "--tokens", "20", "--json"))
    opened = open_run(tmp_path / "run")
    ids = torch.as_tensor(opened.data.validation.window(0, 20))[None]
    with torch.no_grad(), opened.precision():
        assert record["loss"] == pytest.approx(opened.model(ids, labels=ids).loss.item(), rel=1e-6)
    assert record["read"] == "the first 20 tokens of the validation data"


def test_an_exported_model_needs_a_prompt_and_its_folder_is_unchanged(capsys, run, tmp_path):
    exported = tmp_path / "exported"
    assert main(["export", str(run), str(exported)]) == 0
    files = sorted(exported.rglob("*"))
    assert "give --prompt TEXT" in refused(capsys, exported)
    text = output(capsys, exported, "--prompt", "Text number 3")
    assert text.startswith("ddl-cc, 13 tokens of a prompt, loss ")
    assert "trace: " not in text
    assert sorted(exported.rglob("*")) == files
    assert "give --prompt TEXT" in refused(capsys, exported, "--tokens", "3")
    assert "--checkpoint needs a run, got the model in" in refused(
        capsys, exported, "--prompt", "a", "--checkpoint", "2"
    )


def test_a_page_has_the_requested_trace(capsys, run, tmp_path, monkeypatch):
    """Tables are printed as well; with JSON a page is written only if --out names one."""
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "explorer.html"
    printed = output(capsys, run, "--json")
    assert main(["explore", str(run), "--json"]) == 0
    assert capsys.readouterr().out == printed
    assert not page.exists()
    assert main(["explore", str(run), "--prompt", "Text", "--checkpoint", "2"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ddl-cc, step 2, 4 tokens of a prompt")
    assert text.endswith("open in a browser: explorer.html\n")
    assert '"tokens":["T","e","x","t"]' in page.read_text(encoding="utf-8")
    assert main(["explore", str(run), "--json", "--out", "other.html"]) == 0
    assert [record["checkpoint"] for record in json.loads(capsys.readouterr().out)] == [4]
    assert '"checkpoint":4' in (tmp_path / "other.html").read_text(encoding="utf-8")


def test_unusable_input_gives_a_one_line_error_and_writes_nothing(capsys, run, tmp_path):
    """This holds for several inputs, too: a run before the wrong one is not measured."""
    out, empty, texts = tmp_path / "page.html", tmp_path / "empty", [tmp_path / f"{n}.txt" for n in range(13)]
    empty.mkdir()
    for text in texts:
        text.write_text("no trace\n")
    for arguments, reason in (
        ([run, tmp_path / "none"], "must be a run folder or a trace, found no such file"),
        ([empty], "config.yaml"),
        (texts[:1], "must be a trace"),
        ([*texts[:1], "--tokens", "3"], "got the file of a trace"),
        (texts, "at most 12"),
        ([run, "--checkpoint", "3"], "must hold a checkpoint of step 3, found those of steps 2, 4"),
        ([run, "--tokens", "33"], "the number of tokens must be 1 to 32, the model's context, got 33"),
        ([run, "--tokens", "0"], "tokens must be at least 1, got 0"),
        ([run, "--data", "nowhere"], "must hold prepared data"),
        ([run, "--no-page"], "not allowed with"),
        (["--prompt", "a"], "RUN must be given"),
    ):
        assert reason in refused(capsys, *arguments, "--out", out)
    assert not out.exists()
    assert not (run / "analysis").exists()
    assert "RUN must be given" in refused(capsys, "--json")
    for bad in (empty, tmp_path / "nowhere" / "page.html"):
        assert "--out" in refused(capsys, "--out", bad)
    shutil.rmtree(run / "checkpoints")
    assert "must hold a checkpoint, found none" in refused(capsys, run)


def test_results_are_shown_if_the_folder_cannot_be_written(capsys, run, tmp_path):
    (run / "analysis").write_text("in the way")
    assert main(["explore", str(run), "--json"]) == 0
    printed = capsys.readouterr()
    (found,) = json.loads(printed.out)
    assert found["trace"] is None
    assert found["sublayers"]
    assert "the trace is not kept: " in printed.err
    assert main(["explore", str(run), "--no-page"]) == 0
    assert "trace: " not in capsys.readouterr().out
    assert (run / "analysis").read_text() == "in the way"
