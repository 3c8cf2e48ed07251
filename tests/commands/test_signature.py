"""A command line from a signature and a docstring."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest

from residua.commands.signature import Output, call, command_parser, run_function
from residua.errors import Count, InputError, between


@dataclass(frozen=True)
class Sizes:
    """Sizes.

    Args:
        dim: the width
        peak: leave out the peak

    Rarely:
        heads: attention heads
    """

    dim: int = 8
    heads: Count = 2
    peak: bool = True


def measure(
    place: Path,
    others: tuple[str, ...] = (),
    *,
    name: str,
    sizes: Sizes,
    share: float | None = None,
    step: Annotated[int, between(0, 9)] | Literal["best"] | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    seeds: tuple[Count, ...] = (1, 2),
    json: bool = False,
):
    """Measure 100 % of a thing.

    Twice.

    Examples:
        residua measure here --name x

    Args:
        place (DIR): where it is
        others: more of them
        name: its name
        share: of all
        step (STEP|best): which
        device: where it runs
        seeds (N): of the runs

    Output:
        json: print JSON
    """
    return place, others, name, sizes, share, step, device, seeds, json


def run(*argv):
    return call(measure, command_parser("residua measure", measure).parse_args([str(word) for word in argv]))


def test_omitted_options_take_the_defaults_of_the_signature():
    assert run("here", "--name", "x") == (Path("here"), (), "x", Sizes(), None, None, "cpu", (1, 2), False)


def test_values_are_of_the_declared_types():
    line = ["here", "a", "b", "--name=x", "--share", "0.5", "--step", "best", "--device", "cuda", "--seeds", "3", "4"]
    line += ["--json", "--dim", "16", "--no-peak"]
    sizes = Sizes(dim=16, peak=False)
    assert run(*line) == (Path("here"), ("a", "b"), "x", sizes, 0.5, "best", "cuda", (3, 4), True)
    assert run("here", "--name=x", "--step=7")[5] == 7
    assert run("here", "--name=a=--")[2] == "a=--"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "the following arguments are required: DIR, --name"),
        (["here", "--name"], "--name must have a value"),
        (["here", "--name", "x", "--seeds"], "--seeds must have a value"),
        (["here", "--name", "x", "--share", "nan"], "--share must be a finite number of at most 64 bits, got nan"),
        (["here", "--name", "x", "--step", "10"], "--step must be a whole number from 0 to 9, got 10"),
        (["here", "--name", "x", "--step", "worst"], "--step must be a whole number or best, got 'worst'"),
        (["here", "--name", "x", "--device", "tpu"], "--device must be one of cpu, cuda, got 'tpu'"),
        (["here", "--name", "x", "--heads", "0"], "--heads must be at least 1, got 0"),
        (["here", "--name", "x", "--dim", "9" * 30], "--dim must be a finite number of at most 64 bits, got 9999"),
        (["here", "--name", "x", "--seeds", "1", "0"], "--seeds must be at least 1, got 0"),
        (["here", "--name=--"], "--name must have a value, got --"),
        (["here", "--name", "x", "--devise", "cpu"], "unknown option --devise; did you mean --device?"),
        (["here", "--nme", "x"], "unknown option --nme; did you mean --name?"),
    ],
)
def test_a_wrong_command_line_gives_one_error(argv, message):
    with pytest.raises(InputError) as error:
        run(*argv)
    assert message in str(error.value)
    assert str(error.value).endswith("see residua measure --help")


def test_the_help_starts_with_examples_and_shows_rare_options_on_request(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert run_function("residua measure", measure, ["--help"]) == 0
    short = capsys.readouterr().out
    assert short.index("Measure 100 % of a thing.") < short.index("examples:") < short.index("options:")
    assert short.startswith("usage: residua measure DIR [NAME ...] --name NAME [options]")
    assert "--no-peak" in short
    assert "--device cpu|cuda" in short
    assert "of the runs (default: 1 2)" in short
    assert "--heads" not in short
    assert "residua measure --help-all shows 1 more" in short
    assert run_function("residua measure", measure, ["--help-all"]) == 0
    assert "--heads N" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "1")
    assert run_function("residua measure", measure, ["--help"]) == 0


def test_a_command_prints_text_and_tables_or_json(capsys):
    def count() -> Output:
        """Count.

        Examples:
            residua count
        """
        return Output({"a": "\x9b"}, ["before\x1b", (["name", "count"], [["a", "1"]])])

    assert run_function("residua count", count, []) is None
    assert capsys.readouterr().out == "before\\u001b\nname  count\n----  -----\na         1\n"
    run_function("residua count", count, ["--json"])
    assert capsys.readouterr().out == '{\n  "a": "\\u009b"\n}\n'


@pytest.mark.processes
def test_options_are_known_without_docstrings():
    program = "from residua.commands.cli import main; main(['prepare', '--help'])"
    command = [sys.executable, "-OO", "-c", program]
    shown = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "80"})
    assert "--validation-fraction" in shown.stdout + shown.stderr
