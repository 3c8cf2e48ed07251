"""Whatever is typed or closed, the command line answers with one line and an exit status."""

import errno
import os
import random
import re
import signal
import subprocess
import sys

import pytest
import torch

from residua.cli import COMMANDS, main
from residua.commands import process
from residua.commands.base import Parser, number, whole

NOWHERE = "nowhere"
# Every command with what makes it stop before it does any work: `{}` is where the bad option goes.
STARTS = [
    ["schemes", NOWHERE, "{}"],
    ["prepare", "--source", NOWHERE, "--out", "out", "{}"],
    ["train", "--config", NOWHERE, "--run", "run", "{}"],
    ["train", "--config", "tiny", "--print_config", "{}"],
    ["train", "--config", "retrofit", "--model.base", NOWHERE, "--run", "run", "{}"],
    ["train", "--resume", "--run", NOWHERE, "{}"],
    ["study", "tune", "--config", "tiny", "--out", "out", "--over", NOWHERE, "{}"],
    ["study", "run", NOWHERE, "--out", "out", "{}"],
    ["study", "verify", NOWHERE, "{}"],
    ["cost", "count", "--config", "tiny", "--gpu", NOWHERE, "{}"],
    ["cost", "count", "--config", "small", "--print_config", "{}"],
    ["evaluate", NOWHERE, "{}"],
    ["evaluate", NOWHERE, "--tasks", "nothing", "{}"],
    ["export", NOWHERE, "out", "{}"],
    ["convert", NOWHERE, "--connection", "ihc", "--out", "out", "{}"],
    ["generate", NOWHERE, "--prompt", "a", "{}"],
    ["compare", NOWHERE, "{}"],
    ["explore", NOWHERE, "{}"],
    ["explore", NOWHERE, "--prompt", "a", "{}"],
    ["demo", "--steps", "0", "stray", "{}"],
    ["cost", "step", "--presets", NOWHERE, "{}"],
    ["cost", "memory", "--presets", NOWHERE, "{}"],
    ["study", "geometry", "reflection", "--models", NOWHERE, "{}"],
    ["study", "geometry", "quick", "--models", NOWHERE, "{}"],
    ["study", "geometry", "sizes", "--models", NOWHERE, "{}"],
    ["{}"],
]
VALUES = [
    *("", " ", "-", "--", "=", "0", "-1", "-0", "1.5", "nan", "-inf", "inf", "1e400", "1e-400", "1e-40", "0x10", "1_0"),
    *("9" * 19, "9" * 30, "9" * 400, "9" * 5000, "-" + "9" * 30, "0x" + "f" * 5000, str(2**63), str(2**64)),
    *("null", "true", "[", "[" * 2000, "{", "{}", "[1, 2]", "*a", "&a [*a]", "!!python/name:os.system", "a: b"),
    *('{"preset": 1}', '{"preset": "ddl", "value_channels": 1e9}', "ddl:", "ddl:beta_init=1e400", "ddl:a=b,c", "mhc:,"),
    *(
        "..",
        "/",
        "/dev/null",
        "/proc/self/mem",
        "a" * 5000,
        "a\0b",
        "\udcff",
        "a\nb",
        "\x1b[31mred",
        "%s",
        "%(prog)s",
        "é",
    ),
]


def options_of(capsys, start):
    if start[0] == "{}":
        return ["--help", "--version", "train"]
    depth = 3 if start[1:2] == ["geometry"] else 2 if start[0] in ("cost", "study") else 1
    assert main([*start[:depth], "--help"]) == 0
    found = set(re.findall(r"(?<!\w)--[\w.-]+", capsys.readouterr().out)) - {"--help", "--version"}
    return sorted(found) or ["--none"]


def test_starts_name_every_command():
    assert {start[0] for start in STARTS} >= set(COMMANDS)


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
            assert {"--print_config", "--help", "--version"} & set(argv), argv
            continue
        said = printed.err.splitlines()
        assert len(said) == 1 or argv == [] or said[0].startswith("usage:"), (argv, printed.err)
        assert "Traceback" not in printed.err, argv
        assert "\x1b" not in printed.err, argv
        assert len(printed.err) < 12_000, argv
    assert [*tmp_path.rglob("*")] == [here.parent, here]


def shell(command, **options):
    return subprocess.run(
        ["bash", "-c", command.replace("RESIDUA", f"{sys.executable} -m residua")],
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("RESIDUA --help >&-", 0),
        ("RESIDUA --help >&- 2>&- <&-", 0),
        ("RESIDUA trian 2>&-", 2),
        ("RESIDUA trian >&- 2>&-", 2),
        ("RESIDUA trian 2> >(true); exit $?", 2),
        ("RESIDUA train --help | true; exit ${PIPESTATUS[0]}", None),
        ("RESIDUA schemes --help | head -1; exit ${PIPESTATUS[0]}", None),
        ("RESIDUA --help > /dev/full", 1),
        ("RESIDUA trian 2> /dev/full", 2),
    ],
)
def test_closed_and_full_streams(command, status):
    if "/dev/full" in command and not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    done = shell(command)
    assert done.returncode == status or (status is None and done.returncode in (0, 1))
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert len(done.stderr.splitlines()) <= 1


@pytest.mark.processes
def test_a_file_does_not_take_the_place_of_a_closed_stream(tmp_path):
    """The first file that a process opens without stdout has the number 1, and would receive what is printed."""
    config = tmp_path / "mine.yaml"
    config.write_text("train:\n  lr: 0.5\n")
    done = shell(f"RESIDUA train --config {config} --print_config >&- 2>&-", cwd=tmp_path)
    assert (done.returncode, done.stdout, config.read_text()) == (0, "", "train:\n  lr: 0.5\n")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (MemoryError(), 1, "not enough memory: none is left; use smaller sizes"),
        (MemoryError("Unable to allocate 7 TiB\nmore"), 1, "not enough memory: Unable to allocate 7 TiB; use smaller"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "not enough memory: CUDA out of"),
        (
            RuntimeError("[x:1] . DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            1,
            "memory: can't allocate memory",
        ),
        (RuntimeError("Storage size calculation overflowed with sizes=[9, 9]"), 1, "not enough memory: Storage size"),
        (RecursionError("maximum recursion depth exceeded"), 1, "nested too deeply"),
        (OverflowError("int too big to convert"), 2, "got one too large: int too big to convert"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ValueError("embedded null byte"), 2, "expected a path, got one with a zero byte"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), 2, "expected a path, got one too long"),
        (FileExistsError(errno.EEXIST, "File exists", "out"), 2, "expected a path, got the file out in the place of a"),
        (RuntimeError("Symlink loop from '/a'"), 2, "got a link that leads to itself: Symlink loop from '/a'"),
        (OSError(errno.ELOOP, "Too many levels of symbolic links", "a"), 2, "a link that leads to itself"),
        (OSError(28, "No space left on device"), 1, "No space left on device"),
    ],
)
def test_what_the_machine_refuses_is_one_line(error, status, said, capsys, monkeypatch):
    def fail(_):
        raise error

    monkeypatch.setattr("residua.commands.schemes.run", fail)
    assert main(["schemes"]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("residua: ")
    assert said in line


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch):
    def fail(_):
        raise RuntimeError("a defect")

    monkeypatch.setattr("residua.commands.schemes.run", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        main(["schemes"])


def test_an_interrupt_that_became_another_error_is_an_interrupt(capsys, monkeypatch):
    """So do extension modules that are being imported."""

    def fail(_):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    monkeypatch.setattr("residua.commands.schemes.run", fail)
    before = signal.getsignal(signal.SIGINT)
    assert main(["schemes"]) == 130
    assert capsys.readouterr().err == "residua: interrupted\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_while_the_command_line_is_imported_is_one_line():
    code = (
        "import sys, builtins\n"
        "real = builtins.__import__\n"
        "def stop(name, *rest, **options):\n"
        "    if name.startswith('residua.cli'): raise KeyboardInterrupt\n"
        "    return real(name, *rest, **options)\n"
        "from residua.__main__ import main\n"
        "builtins.__import__ = stop\n"
        "sys.exit(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "residua: interrupted\n")


def test_sizes_that_no_machine_holds_are_one_line(capsys):
    for argv in (["cost", "count", "--config", "tiny", "--train.batch_size", str(2**62)],):
        assert main(argv) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("residua: not enough memory: ")


@pytest.mark.parametrize("value", ["inf", "nan", "1e-40", "1e40", "-1"])
def test_temperatures_that_overflow_are_refused(value, capsys):
    assert main(["generate", NOWHERE, "--prompt", "a", f"--temperature={value}"]) == 2
    assert "--temperature: expected a number" in capsys.readouterr().err


def test_numbers_of_options():
    assert [whole()("-3"), whole(1, 5)("5"), number("1e-3")] == [-3, 5, 0.001]
    parser = Parser(prog="residua x")
    parser.add_argument("--n", type=whole(1, 5))
    parser.add_argument("--x", type=number)
    for text in ("0", "6", "x", "9" * 5000):
        with pytest.raises(ValueError, match=r"argument --n: expected a whole number.*, got"):
            parser.parse_args(["--n", text])
    for text in ("nan", "inf", "x", "1e400"):
        with pytest.raises(ValueError, match=r"argument --x: expected a (finite )?number, got"):
            parser.parse_args(["--x", text])


@pytest.mark.parametrize("argv", [["explore", "--out=--"], ["cost", "count", "--config", "tiny", "--train.device=--"]])
def test_two_dashes_are_no_value(argv, capsys):
    assert main(argv) == 2
    assert re.search(r"^residua: argument --\S+: expected a value, got --; ", capsys.readouterr().err)


def test_streams_that_are_open_stay_as_they_are():
    before = sys.stdout, sys.stderr
    process.replace_closed_streams()
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_in_one_line_and_cleans_up(number, capsys, monkeypatch):
    cleaned = []

    def work(_):
        try:
            signal.raise_signal(number)
        finally:
            cleaned.append(number)

    monkeypatch.setattr("residua.commands.schemes.run", work)
    before = signal.getsignal(number)
    assert main(["schemes"]) == 128 + number
    assert capsys.readouterr().err == "residua: interrupted\n"
    assert (cleaned, signal.getsignal(number)) == ([number], before)
