"""A folder that somebody sent: no link in it leads a command to a file outside, to write or to remove that."""

import os
import shutil

import pytest

from residua.commands.cli import main
from residua.files.reading import write_yaml
from support.lanes import some
from support.planted_study import DOCUMENT
from support.tiny_runs import options

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
MODEL = {"connection": "ddl", "num_hidden_layers": 1}
TINY = ["--config", "tiny", *options(None, model=MODEL, steps=4, tensorboard="true", connections_every=1)]
STUDY = {
    **DOCUMENT,
    "tokens_per_parameter": 0.015,
    "tuning": {"over": {"train.lr": [0.008]}, "runs": 1, "baseline_runs": 1, "length": 0.5},
    "schemes": dict.fromkeys(("residual", "ddl")),
    "seeds": [1, 2],
    "longer": [],
}
SWEEP = ["--out", "sweep", "--over", "train.lr=0.001", *TINY, "--data.path", "data"]
GEOMETRY = ["study", "geometry", "reflection", "--models", "linear", "--steps", "1", "--seeds", "1"]
COMMANDS = {
    "train": ("run", ["train", "--run", "run", "--resume"]),
    "train again": ("begun", ["train", "--run", "begun", *TINY, "--data.source", "text", "--data.tokenizer", "byte"]),
    "explore": ("run", ["explore", "run", "--no-page", "--tokens", "3"]),
    "sweep": ("sweep", ["study", "tune", *SWEEP, "--seeds", "2"]),
    "sweep finished": ("sweep", ["study", "tune", *SWEEP]),
    "study": ("study", ["study", "run", "study.yaml", "--out", "study", "--data", "data", "--no-costs"]),
    "report": ("study", ["study", "report", "study"]),
    "geometry": ("geometry", [*GEOMETRY, "--out", "geometry", "--processes", "1"]),
}
OWNERS = ("checkpoints",)
"""Folders of a run that its owner may have linked to another disk."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Folders as somebody may send them: a run stopped after step 2, one that was killed before its first step, and
    the finished folders of a sweep, a study and a benchmark."""
    home = tmp_path_factory.mktemp("links")
    (home / "text").mkdir()
    for number in range(40):
        text = " ".join(f"word{(number * j) % 97} is {(number + j) % 13}," for j in range(60))
        (home / "text" / f"{number:02d}.txt").write_text(text)
    (home / "study.yaml").write_text(write_yaml(STUDY))
    here = os.getcwd()
    os.chdir(home)
    try:
        assert main(["prepare", "--source", "text", "--out", "data", "--tokenizer", "byte"]) == 0
        assert main(["train", "--run", "run", *TINY, "--data.path", "data"]) == 0
        assert main(["explore", "run", "--checkpoint", "2", "--no-page"]) == 0
        for name in ("sweep finished", "study", "geometry"):
            assert main(COMMANDS[name][1]) == 0
    finally:
        os.chdir(here)
    shutil.rmtree(home / "run" / "checkpoints" / "step-4")
    begun = home / "begun"
    begun.mkdir()
    for name in (".lock", "config.yaml", "tokenizer"):
        copy = shutil.copytree if (home / "run" / name).is_dir() else shutil.copyfile
        copy(home / "run" / name, begun / name)
    shutil.copytree(home / "data", begun / "data")
    return home


def contents(folder):
    """What a folder holds, and when it was written: a report that is written again may be the same to the byte."""
    found = {}
    for path in folder.rglob("*"):
        status = path.stat()
        found[str(path.relative_to(folder))] = status.st_ino, status.st_mtime_ns, path.is_file() and path.read_bytes()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("command", some(COMMANDS, lambda name: name != "train again"))
def test_no_link_in_a_folder_is_followed(command, home, tmp_path, monkeypatch, capsys):
    """Every file and folder in it that the command makes, changes or removes is a link to one outside in its turn."""
    folder, argv = COMMANDS[command]
    outside = tmp_path / "outside"

    def place(number):
        copy = tmp_path / str(number)
        shutil.copytree(home, copy)
        monkeypatch.chdir(copy)
        return copy / folder

    made = place("made")
    before = contents(made)
    assert main(argv) == 0
    after = contents(made)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    changed |= {name for name in after if name.endswith(".lock")}  # opened for writing, though nothing is written
    names = sorted(name for name in changed if "events.out" not in name)
    followed, unclear = [], []
    for number, name in enumerate(name for name in names if name not in OWNERS):
        shutil.rmtree(outside, ignore_errors=True)
        outside.mkdir()
        link = place(number) / name
        if link.exists():
            shutil.move(link, outside / "theirs")
        elif (made / name).is_dir():
            shutil.copytree(made / name, outside / "theirs")
        elif number % 2:
            (outside / "theirs").write_bytes(b"precious")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside / "theirs")
        there = contents(outside)
        capsys.readouterr()
        status = main(argv)
        said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("residua: ")]
        if contents(outside) != there:
            followed.append(name)
        if status not in (0, 2) or len(said) != (status == 2):
            unclear.append((name, status, said))
        shutil.rmtree(tmp_path / str(number))
    assert (followed, unclear) == ([], [])
    assert names
