"""Whatever is typed, the command line answers with one line and an exit status."""

import errno
import random
import re
import signal
import sys
from unittest.mock import Mock

import pytest
import torch

import residua.__main__
from residua.commands.cli import main
from residua.commands.table import COMMANDS

NOWHERE = "nowhere"
# Every command with what makes it stop before it does any work: `{}` is where the bad option goes.
STARTS = [
    ["schemes", NOWHERE, "{}"],
    ["prepare", "--source", NOWHERE, "--out", "out", "{}"],
    ["train", "--config", NOWHERE, "--run", "run", "{}"],
    ["train", "--config", "tiny", "--print-config", "{}"],
    ["train", "--config", "retrofit", "--model.base", NOWHERE, "--run", "run", "{}"],
    ["train", "--resume", "--run", NOWHERE, "{}"],
    ["study", "tune", "--config", "tiny", "--out", "out", "--over", NOWHERE, "{}"],
    ["study", "run", NOWHERE, "--out", "out", "{}"],
    ["study", "verify", NOWHERE, "{}"],
    ["cost", "count", "--config", "tiny", "--gpu", NOWHERE, "{}"],
    ["cost", "count", "--config", "small", "--print-config", "{}"],
    ["evaluate", NOWHERE, "{}"],
    ["evaluate", NOWHERE, "--tasks", "nothing", "{}"],
    ["export", NOWHERE, "out", "{}"],
    ["convert", NOWHERE, "--connection", "ihc", "--out", "out", "{}"],
    ["generate", NOWHERE, "--prompt", "a", "{}"],
    ["compare", NOWHERE, "{}"],
    ["explore", NOWHERE, "{}"],
    ["explore", NOWHERE, "--prompt", "a", "{}"],
    ["demo", "--steps", "0", "stray", "{}"],
    ["cost", "step", "--config", "tiny", "--schemes", NOWHERE, "{}"],
    ["study", "geometry", "reflection", "--models", NOWHERE, "{}"],
    ["study", "geometry", "quick", "--models", NOWHERE, "{}"],
    ["{}"],
]
VALUES = [
    *("", " ", "-", "--", "=", "0", "-1", "-0", "1.5", "nan", "-inf", "inf", "1e400", "1e-400", "1e-40", "0x10", "1_0"),
    *("9" * 19, "9" * 30, "9" * 400),
    *(str(2**63), str(2**64), "null", "true", "[", "{", "{}", "[1, 2]", "*a", "a: b", "é", "%s"),
    *("!!python/name:os.system", '{"preset": 1}', '{"preset": "ddl", "value_channels": 1e9}', "ddl:", "ddl:a=b,c"),
    *("ddl:beta_init=1e400", "mhc:,", "..", "/", "a\nb", "\x1b[31mred", "%(prog)s"),
]


def options_of(capsys, start):
    if start[0] == "{}":
        return ["--help", "--version", "train"]
    words = max((name.split() for name in COMMANDS if name.split() == start[: len(name.split())]), key=len)
    assert main([*words, "--help-all"]) == 0
    found = set(re.findall(r"(?<!\w)--[\w.-]+", capsys.readouterr().out)) - {"--help", "--version"}
    return sorted(found) or ["--none"]


def test_the_argument_lists_cover_every_command():
    assert {start[0] for start in STARTS} >= {name.split()[0] for name in COMMANDS}


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS, ids=lambda start: "-".join(word for word in start if word.isalpha()))
def test_no_value_of_any_option_ends_in_a_traceback(start, capsys, tmp_path, monkeypatch):
    here = tmp_path / "a" / "b"  # ".." holds nothing that another test is making
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    chance = random.Random(f"{start}")
    options = options_of(capsys, start)
    for _ in range(40):
        option = chance.choice(options)
        value = chance.choice(VALUES)
        bad = chance.choice([[option, value], [f"{option}={value}"], [value], [option], [option[:-1], value]])
        argv = [word for part in start for word in (bad if part == "{}" else [part])]
        status = main(argv)
        printed = capsys.readouterr()
        assert status in (0, 1, 2), argv
        if status == 0:
            assert {"--print-config", "--help", "--help-all", "--version", "help"} & set(argv), argv
            continue
        said = [line for line in printed.err.splitlines() if not line.startswith("train.steps is ")]  # what it became
        assert len(said) == 1 or argv == [] or said[0].startswith("usage:"), (argv, printed.err)
        assert "Traceback" not in printed.err, argv
        assert "\x1b" not in printed.err, argv
        assert len(printed.err) < 12_000, argv
    assert [*tmp_path.rglob("*")] == [here.parent, here]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), 1, "not enough memory: none is left; use smaller sizes"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "not enough memory: CUDA out of"),
        (RuntimeError("[x:1] . DefaultCPUAllocator: can't allocate memory: 9 bytes"), 1, "memory: can't allocate"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2, "residua: out: File exists"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "out"), 2, "residua: out: File name too long"),
        (OSError(errno.ENOENT, "No such file or directory", "out"), 2, "residua: out: No such file or directory"),
        (OSError(errno.EROFS, "Read-only file system", "out"), 2, "residua: out: Read-only file system"),
        (RuntimeError("Symlink loop from '/out'"), 2, "residua: Symlink loop from '/out'"),
        (OSError(errno.ENOSPC, "No space left on device"), 1, "No space left on device"),
    ],
)
def test_sizes_beyond_the_machine_give_a_one_line_error(error, status, said, capsys, monkeypatch):
    monkeypatch.setattr("residua.connections.registry.schemes", Mock(side_effect=error))
    assert main(["schemes"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("residua: ")
    assert said in line


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["train", "--config", "tiny", "--run", "file"], "file must be a folder to write in, found a file; choose"),
        (["train", "--resume"], "give --run DIR, the folder of the run to resume"),
        (["compare", "runs"], "runs must be a run folder, found no config.yaml; give a run inside it: runs/a"),
        (["compare", "absent"], "absent must be a run folder, found no such folder; residua train --run makes one"),
        (["evaluate", "runs"], "runs must be a run folder, found no config.yaml; give a run inside it: runs/a"),
        (["evaluate", "runs/a", "--data", ""], "--data must be a path, got ''"),
        (["prepare", "--source", "", "--out", "b"], "source must be the name of a source, got ''"),
        (["compare", "runs/a", "runs/a", "--out", ""], "--out must be a path, got ''"),
        (["study", "report", ""], "DIR must be a path, got ''"),
        (["export", "runs/a", "file/b"], "DIR must be a new or empty folder, got file/b"),
        (["evaluate", "runs/a", "--data", "absent.txt"], "absent.txt must be a file or folder of text, or the run's"),
        (
            ["train", "--config", "tiny", "--data.path", "absent", "--run", "b"],
            "of format 1, found no such folder; run",
        ),
        (["train", "--config", "tiny", "--train.learning_rate", "1"], "did you mean --train.lr?"),
    ],
)
def test_a_wrong_path_or_option_is_named_with_the_remedy(argv, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").touch()
    (tmp_path / "file").touch()
    assert main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_file_in_place_of_the_folder_for_pictures_is_named(capsys, tmp_path, monkeypatch):
    error = FileExistsError(errno.EEXIST, "File exists", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    monkeypatch.setattr("residua.connections.registry.schemes", Mock(side_effect=error))
    assert main(["schemes"]) == 2
    assert "file must be a folder, found a file; choose another name" in capsys.readouterr().err


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_command_runs_without_stdout_or_stderr(closed, monkeypatch):
    """A shell starts it like this with `2>&-`."""
    monkeypatch.setattr(sys, closed, None)
    assert main(["train", "--config", "nowhere"]) == 2
    assert main(["schemes"]) == 0


def test_a_bug_in_residua_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr("residua.connections.registry.schemes", Mock(side_effect=RuntimeError("a defect")))
    with pytest.raises(RuntimeError, match="a defect"):
        main(["schemes"])


def test_an_interrupt_while_the_command_line_is_imported_gives_a_one_line_message(capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "residua.commands.cli")
    monkeypatch.setattr(sys, "meta_path", [Mock(find_spec=Mock(side_effect=KeyboardInterrupt))])
    assert residua.__main__.main() == 130
    assert capsys.readouterr().err == "residua: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_one_line_and_cleans_up(number, capsys, monkeypatch):
    cleaned = []

    def work():
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)

    monkeypatch.setattr("residua.connections.registry.schemes", work)
    before = signal.getsignal(number)
    assert main(["schemes"]) == 128 + number
    assert capsys.readouterr().err == "residua: interrupted\n"
    assert (cleaned, signal.getsignal(number)) == ([number], before)


def test_python_does_not_search_the_objects_of_a_finished_command_for_cycles(monkeypatch):
    froze = Mock()
    monkeypatch.setattr("gc.freeze", froze)
    monkeypatch.setattr(sys, "argv", ["residua", "--version"])
    assert residua.__main__.main() == 0
    froze.assert_called_once_with()
