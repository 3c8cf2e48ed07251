"""A disk that is full at any file of a command: one line, nothing lost, and the command goes on when there is room."""

import contextlib
import io
import itertools
import json

import pytest

from residua.commands.cli import main
from residua.lab.training.checkpoint import latest_checkpoint
from support.converted_models import save_base
from support.full_disk import refuse_files
from support.tiny_runs import contents, options, prepare_texts

TRAIN = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "connections_every": 1, "tensorboard": "true"}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Prepared data, a base and a run."""
    home = tmp_path_factory.mktemp("home")
    prepare_texts(home)
    save_base(home / "base")
    assert main(["train", "--config", "tiny", "--run", str(home / "run"), *options(home / "data", **TRAIN)]) == 0
    return home


def attempts(home, out, argv, answer):
    """Run a command with room for 0, 1, 2, ... new files until it ends well. Write what it said each time."""
    allow, said = refuse_files(out), []
    for number in itertools.count():
        resume = ["--resume"] if argv[0] == "train" and said and "--resume" in said[-1][1] else []
        allow(number)
        with contextlib.redirect_stderr(io.StringIO()) as stream, contextlib.redirect_stdout(io.StringIO()):
            status = main([*argv, *resume])
        allow(None)
        said.append((status, stream.getvalue()))
        if status == 0 or number > 200:
            break
    answer.write_text(json.dumps(said))


COMMANDS = {
    "prepare": "--source {home}/text --out {out}/new --tokenizer byte --shard-tokens 1000",
    "train": "--config tiny --run {out}/new",
    "compare": "{home}/run --out {out}/new",
    "explore": "{home}/run --out {out}/page.html",
    "study tune": "--config {home}/run/config.yaml --over train.lr=1e-3,2e-3 --out {out}/new",
    "study geometry reflection": "--models linear --steps 20 --seeds 1 --processes 1 --out {out}/new",
    "convert": "{home}/base --connection ihc --out {out}/new",
    "export": "{home}/run {out}/new",
}


OFTEN = ("prepare", "train")
"""The commands that are tried before a change lands; the others are tried by night."""


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=() if each in OFTEN else pytest.mark.nightly) for each in COMMANDS]
)
def test_a_full_disk_is_one_line_wherever_it_fills_and_the_command_goes_on(command, home, tmp_path, start):
    out = tmp_path / "out"
    out.mkdir()
    argv = [*command.split(), *COMMANDS[command].format(home=home, out=out).split()]
    argv += options(home / "data", **TRAIN) if command == "train" else []
    process = start(attempts, home, out, argv, tmp_path / "said.json")
    process.join()
    *failures, (status, _) = json.loads((tmp_path / "said.json").read_text())
    assert status == 0
    assert failures
    for status, said in failures:
        *_, line = said.splitlines()
        assert status == 1, line
        assert line.startswith("residua: ")
        assert "No space left on device" in line
        assert str(out) in line, "it names the place"
        assert "Traceback" not in said
    assert contents(out)
    assert not list(out.rglob("*.partial"))
    if command == "train":
        assert latest_checkpoint(out / "new").step == TRAIN["steps"]
