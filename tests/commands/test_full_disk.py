"""A disk that is full at any file of a command: one line, nothing lost, and the command goes on when there is room."""

import contextlib
import errno
import io
import itertools
import json
import os
import tempfile
from importlib import import_module
from pathlib import Path

import pytest

from residua.commands.cli import main
from residua.files.reading import write_yaml
from residua.lab.training.checkpoint import latest_checkpoint
from support import planted_study
from support.converted_models import data_of_base, save_base
from support.full_disk import refuse_files
from support.tiny_runs import contents, options, prepare_texts

TRAIN = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "connections_every": 1, "tensorboard": "true"}


RECIPE = """
model: {{hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 1, max_position_embeddings: 128,
        connection: CONNECTION}}
data: {{source: {text}, tokenizer: byte}}
train: {{steps: 4, warmup_steps: 2, batch_size: 2, sequence_length: 16, evaluate_every: 2, checkpoint_every: 2,
        device: cpu, tensorboard: false}}
"""
STUDY = {**planted_study.SMALLEST, "schemes": {"residual": {}}}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Prepared data, a base with data of its tokenizer, a run, and studies: a planted one, and a trained one."""
    home = tmp_path_factory.mktemp("home")
    prepare_texts(home)
    save_base(home / "base")
    (home / "of_base").mkdir()
    data_of_base(home / "base", home / "of_base")
    assert main(["train", "--config", "tiny", "--run", str(home / "run"), *options(home / "data", **TRAIN)]) == 0
    planted_study.folder(home / "planted")
    (home / "study.yaml").write_text(write_yaml(STUDY))
    run = [str(home / "study.yaml"), "--data", str(home / "data"), "--out", str(home / "study"), "--no-costs"]
    assert main(["study", "run", *run]) == 0
    (home / "recipe.yaml").write_text(RECIPE.format(text=home / "text"))
    return home


def attempts(home, out, argv, number, answer):
    """Run a command with room for 0, 1, 2, ... new files until it ends well; one that writes its files anew does so
    twice. Write its answers, and what each of them lost of the files before it."""
    tempfile.tempdir = str(out)
    shrink_demo(home)
    allow, said = refuse_files(out, number), []
    for again in range(2 if argv[:2] == ["study", "report"] or argv[0] == "explore" else 1):
        for files in itertools.count():
            resume = ["--resume"] if argv[0] == "train" and said and "--resume" in said[-1][1] else []
            before = contents(home) | contents(out)
            allow(files)
            with contextlib.redirect_stderr(io.StringIO()) as stream, contextlib.redirect_stdout(io.StringIO()):
                status = main([*argv, *resume])
            allow(None)
            after = contents(home) | contents(out)
            said.append((status, stream.getvalue(), sorted(lost(before, after, again))))
            if status == 0 or files > 200:
                break
    answer.write_text(json.dumps(said))


def shrink_demo(home):
    """Let the demonstration train short runs in this process, in which the disk is full."""
    demo, text = import_module("residua.lab.demo"), (home / "recipe.yaml").read_text()
    recipes = {}
    for scheme in ("residual", "ddl"):
        recipes[scheme] = str(home / f"{scheme}.yaml")
        Path(recipes[scheme]).write_text(text.replace("CONNECTION", scheme))
    demo.RECIPES, demo.SAMPLE_TOKENS, run_jobs = recipes, 2, demo.run_jobs
    demo.run_jobs = lambda jobs, records, processes: run_jobs(jobs, records)


UNDER_WAY = ("checkpoints", "runs", "tensorboard", "metrics.jsonl", "connections.jsonl")
"""The state of a run; a resumed one repeats the rows after its checkpoint."""


def lost(before, after, same):
    """Yield the files that are missing, empty, or without records that they had; if `same`, that differ at all."""
    for name, content in before.items():
        parts = Path(name).parts
        if any(part.startswith((".", "tmp")) or part in UNDER_WAY for part in parts):
            continue
        now = after.get(name, b"")
        if (content and not now) or (same and now != content):
            yield name
        if Path(name).name in ("records.jsonl", "costs.jsonl") and not now.startswith(content):
            yield name


COMMANDS = {
    "prepare": "--source {home}/text --out {out}/new --tokenizer byte --shard-tokens 1000",
    "train": "--config tiny --run {out}/new",
    "train --config retrofit": "--run {out}/new --model.base={home}/base --model.connection=ihc "
    "--data.path={home}/of_base/data "
    "--train.steps=2 --train.batch_size=2 --train.sequence_length=16 --train.checkpoint_every=1 --train.device=cpu",
    "compare": "{home}/run --out {out}/new",
    "explore": "{home}/run --out {out}/page.html",
    "study run": "{home}/study.yaml --data {home}/data --out {out}/new --no-costs",
    "study report": "{home}/planted --out {out}/new",
    "study verify": "{home}/study --data {home}/data --share 0.1",
    "study tune": "--config {home}/run/config.yaml --over train.lr=1e-3,2e-3 --out {out}/new",
    "study geometry reflection": "--models linear --steps 20 --seeds 1 --processes 1 --out {out}/new",
    "cost step": "--config tiny --rounds 1 --no-peak --out {out}/costs.jsonl --model.hidden_size=16 "
    "--model.num_hidden_layers=1 --model.num_attention_heads=1 --train.batch_size=1 --train.sequence_length=16 "
    "--train.device=cpu",
    "convert": "{home}/base --connection ihc --out {out}/new",
    "export": "{home}/run {out}/new",
    "demo": "--out {out}/new --steps 4",
}
SYSTEM = {"full": errno.ENOSPC, "quota": errno.EDQUOT, "damaged": errno.EIO, "forbidden": errno.EACCES}
OFTEN = ("prepare", "train", "study report", "study verify", "demo")
"""The commands that are tried before a change lands; the others are tried by night."""
CASES = [(command, "full") for command in COMMANDS] + [("study report", name) for name in SYSTEM if name != "full"]
CASES += [(command, "forbidden") for command in ("compare", "explore", "convert", "export")]


@pytest.mark.parametrize(
    ("command", "disk"),
    [pytest.param(*case, marks=() if case[0] in OFTEN else pytest.mark.nightly) for case in CASES],
)
def test_a_full_disk_gives_a_one_line_error_and_the_command_then_succeeds(command, disk, home, tmp_path, start):
    out = tmp_path / "out"
    out.mkdir()
    argv = f"{command} {COMMANDS[command]}".format(home=home, out=out).split()
    argv += options(home / "data", **TRAIN) if command == "train" else []
    process = start(attempts, home, out, argv, SYSTEM[disk], tmp_path / "said.json")
    process.join()
    said = json.loads((tmp_path / "said.json").read_text())
    failures = [each for each in said if each[0] != 0]
    assert said[-1][0] == 0, said[-1]
    assert failures
    for status, text, lost in failures:
        *_, line = text.splitlines()
        assert status == (2 if disk == "forbidden" else 1), line
        assert line.startswith("residua: ")
        assert os.strerror(SYSTEM[disk]) in line
        assert str(out) in line, "it names the place"
        assert "Traceback" not in text
        assert not lost
    assert contents(out) or command == "study verify"
    assert not list(out.rglob("*.partial"))
    if command == "train":
        assert latest_checkpoint(out / "new").step == TRAIN["steps"]


@pytest.mark.skipif(os.name == "nt", reason="Windows opens no folder")
@pytest.mark.parametrize(
    "command", ["prepare", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("convert", "export"))]
)
def test_a_folder_that_already_has_its_name_counts_as_written(command, home, tmp_path, monkeypatch):
    """The disk fails only when the name of the result is flushed, after the result has it."""

    def fsync(descriptor):
        if os.path.samestat(os.fstat(descriptor), tmp_path.stat()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    argv = f"{command} {COMMANDS[command]}".format(home=home, out=tmp_path).split()
    with pytest.warns(UserWarning, match=rf"{tmp_path / 'new'} .*No space left"):
        assert main(argv) == 0
    assert contents(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
