"""What README.md and the pages show runs: Python, commands, and the recipes of the demo are what their study found."""

import os
import re
import shlex
import subprocess
import sys
import sysconfig
import traceback
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

import residua
import residua.lab.demo
from residua.commands.cli import main
from residua.lab.records.folder import flatten
from residua.lab.study.definition import load_study
from residua.lab.study.results import results
from residua.lab.training import load_config
from support.pages import DOCS, RESBENCH, ROOT, blocks, cells, pages, records

PAGES = pages()
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    """The commands in the `sh` blocks of all pages, each once; a page comes after the pages that make its runs."""
    order = ["README.md", "docs/language-models.md", *PAGES]
    lines = "\n".join(block for page in order for block in blocks(PAGES[page], "sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in dict.fromkeys(lines) if line.strip()]


def run_as_main(code: str, folder: Path) -> None:
    """Run code in this process, where torch and transformers are imported and nothing of residua, as in a new one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "residua"]:
        del sys.modules[name]
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    sys.modules["__main__"] = main_module = ModuleType("__main__")
    with open("out", "w") as out, open("err", "w") as err, redirect_stdout(out), redirect_stderr(err):
        try:
            exec(code, vars(main_module))
        except BaseException:
            traceback.print_exc()
            raise


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(name, marks=() if name == "README.md" else pytest.mark.nightly)
        for name, text in PAGES.items()
        if blocks(text, "python")
    ],
)
def test_the_python_of_a_page_runs(page, start, tmp_path):
    """The blocks run as printed, one after the other, in a process that has only their names."""
    code = "\n".join(cells(DOCS / "tutorial.ipynb") if page == "docs/tutorial.md" else blocks(PAGES[page], "python"))
    process = start(run_as_main, code, tmp_path)
    process.join()
    printed = (tmp_path / "out").read_text()
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    for line in re.findall(r"^ *print\(.*\)\n# (.*)$", code, flags=re.MULTILINE):
        assert line in printed.splitlines()
    if page == "docs/tutorial.md":
        losses, expected = re.findall(r"last loss (\d\.\d+) ", printed), re.search(r"# such as (.*)", code)[1]
        for loss, about in zip(losses, re.findall(r"\d\.\d+", expected), strict=True):
            assert abs(float(loss) - float(about)) < 0.15


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(300)
def test_the_notebook_installs_a_wheel_if_residua_is_missing(tmp_path):
    """Its first cell and the model run in an environment with our packages but without residua or a network."""
    folder, python = tmp_path / "notebook", tmp_path / "env/bin/python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    (place,) = (tmp_path / "env").glob("lib/*/site-packages")
    (place / "packages.pth").write_text(f"{sysconfig.get_path('purelib')}\n")  # a .pth in there is not read
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PIP_NO_INDEX": "1"}
    make = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(make, check=True)
    install, *code = cells(DOCS / "tutorial.ipynb")
    assert subprocess.run([python, "-c", "import residua"], env=bare, capture_output=True).returncode == 1
    model = "\n".join([install, *code[: 1 + next(i for i, cell in enumerate(code) if "residua.build" in cell)]])
    done = subprocess.run([python, "-c", model], env=bare, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "6,446 parameters" in done.stdout


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.timeout(900)  # every command of every page, one after the other
def test_the_commands_run(quick_pool, monkeypatch, tmp_path, capsys):
    """`make` is checked against the Makefile; every residua command runs, training for a few steps only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name, recipe in residua.lab.demo.RECIPES.items():
        tiny = tmp_path / f"{name}.yaml"
        tiny.write_text(
            load_config(recipe, [*TINY, "--data.path=data", "--train.warmup_steps=0"]).to_yaml(), encoding="utf-8"
        )
        monkeypatch.setitem(residua.lab.demo.RECIPES, name, str(tiny))
    seen = set()
    for command in commands():
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", MAKEFILE, re.MULTILINE), command
        elif command[0] == "residua":
            status = main([*command[1:], *shortened(command)])
            assert status == 0, (command, capsys.readouterr().err)
            seen.add(command[1])
        else:
            assert command[:2] in (["pip", "install"], ["source", ".venv/bin/activate"]), command
    expected = {"schemes", "prepare", "train", "evaluate", "generate", "compare", "demo", "cost"}
    assert expected | {"export", "explore", "study"} <= seen


TINY = [
    "--model.num_hidden_layers=1",
    "--model.hidden_size=32",
    "--model.num_attention_heads=1",
    "--train.batch_size=2",
]


def shortened(command: list[str]) -> list[str]:
    """The options that make a command quick enough for a test."""
    recipe = ["--train.steps", "4", "--train.warmup_steps", "1", *TINY]
    match command[1:3]:
        case ["demo", *_]:
            return ["--steps", "2"]
        case ["study", "geometry"]:
            return ["--steps", "4", "--seeds", "42", "--processes", "1"]
        case ["study", "tune"]:
            return recipe
        case ["train", _] if "--resume" not in command:
            return recipe
        case ["cost", "count"]:
            return ["--model.num_hidden_layers", "2"]
        case ["cost", _]:
            return [*TINY, "--rounds", "1", "--train.sequence_length", "16"]
    return []


def test_the_commands_that_need_more_than_a_laptop_exist(capsys):
    """In `console` blocks: they do not run, but their own help knows every command and option."""
    lines = [line for text in PAGES.values() for block in blocks(text, "console") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in (shlex.split(line, comments=True) for line in dict.fromkeys(lines)):
        command = line[line.index("residua") + 1 :]
        assert main([*command[: 2 if command[0] in ("cost", "study") else 1], "--help-all"]) == 0
        told = capsys.readouterr().out
        assert {option for option in command if option.startswith("--")} <= set(re.findall(r"--[\w.-]+", told)), line


def test_the_demo_has_the_settings_that_resbench_found():
    found = results(load_study("resbench"), records("main/records.jsonl", RESBENCH / "records"), ())
    rows = {row.scheme: row for row in found.rows if row.size == "0.1M"}
    steps = {run.steps for row in rows.values() for run in row.runs if run.kind == "report"}
    for name, scheme in (("residual", "residual"), ("ddl-tc", "ddl-tc"), ("residual+tc", "residual+tc")):
        config = load_config(residua.lab.demo.RECIPES[name])
        keys = flatten(asdict(config))
        assert {key: keys[key] for key in rows[scheme].point} == rows[scheme].point, name
        assert {config.train.steps} == steps
