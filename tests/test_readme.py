"""Everything that the README tells its reader to type works: its Python in order, its commands with few steps."""

import json
import re
import shlex
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from residua.cli import main
from support.variants import ALL

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.strip()]


def test_the_python_of_the_readme_runs(monkeypatch, tmp_path):
    """One after the other in one namespace, as a reader would paste them; only what is theirs is provided."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    attention, norm = nn.Linear(64, 64), nn.RMSNorm(64)
    namespace = {
        "x": torch.randn(2, 5, 64),
        "attention": attention,
        "norm": norm,
        "sublayers": [attention, nn.Linear(64, 64)],
        "sublayer": attention,
    }
    found = blocks("python")
    assert len(found) >= 4
    for block in found:
        exec(compile(block, "README.md", "exec"), namespace)
    assert namespace["x"].shape == (2, 5, 64)


def test_the_commands_of_the_readme_run(monkeypatch, tmp_path, capsys):
    """`make` is checked against the Makefile; every residua command runs, training for a few steps only."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    seen = set()
    for command in commands():
        if command[0] == "make":
            assert re.search(rf"^{command[1]}:", MAKEFILE, re.MULTILINE), command
        elif command[0] == "residua":
            if command[1] in ("demo", "geometry"):
                command += ["--steps", "4"]
            if command[1] == "train" and "--resume" not in command:
                command += ["--train.steps", "4", "--train.warmup_steps", "1"]
            if command[1] == "bench":
                command += ["--layers", "1", "--dim", "32", "--heads", "2", "--head-dim", "16", "--rounds", "1"]
                command += ["--sequence-length", "16", "--vocab-size", "64", "--warmup", "0"]
            status = main(command[1:])
            assert status == 0, (command, capsys.readouterr().err)
            seen.add(command[1])
        else:
            assert command[:2] == ["pip", "install"], command
    assert {
        "schemes",
        "prepare",
        "train",
        "evaluate",
        "generate",
        "compare",
        "demo",
        "bench",
        "estimate",
        "export",
    } <= seen


def test_the_commands_that_need_more_than_a_laptop_exist(capsys):
    """Those in `console` blocks: not run, but every command and option in them is known to its own help."""
    lines = [shlex.split(line) for block in blocks("console") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        command = line[line.index("residua") + 1 :]
        assert main([command[0], "--help"]) == 0
        told = capsys.readouterr().out
        assert {option for option in command if option.startswith("--")} <= set(re.findall(r"--[\w.-]+", told)), line


def test_the_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    local = [target for target in targets if "://" not in target]
    assert local
    missing = [target for target in local if not (ROOT / target).exists()]
    assert not missing


@pytest.mark.parametrize("page", ["docs/deviations.md", "docs/equations.md"])
def test_the_options_named_in_the_documentation_exist(page):
    """`name="value"` or `name=value` in code spans: an option of a scheme or of ResiduaConfig, and a value that it
    takes beside the options of some variant."""
    from residua.models import ResiduaConfig

    text = (ROOT / page).read_text(encoding="utf-8")
    for span in re.findall(r"`([^`]*)`", text):
        for name, value in re.findall(r"\b([a-z_]+)=(\"[a-z0-9_]+\"|\d[\d.]*|True|False)", span):
            options = {name: eval(value)}
            takers = [scheme for scheme in ALL.values() if name in scheme.__dataclass_fields__]
            assert not takers or any(takes(scheme, options) for scheme in takers), span
            if not takers:
                ResiduaConfig(**options)


def takes(scheme, options) -> bool:
    try:
        replace(scheme, **options)
    except (TypeError, ValueError):
        return False
    return True


def test_the_readme_lists_every_preset_with_its_state_and_its_parameters():
    """The parameters that it adds to the plain residual at the paper's two sizes, counted on the whole model."""
    from residua import PRESETS
    from residua.estimate import parameters
    from residua.models import SIZES, ResiduaConfig

    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (\d?)d \| ([\d,]+)(?: / ([\d,]+))? \|$", README, flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(PRESETS)
    sizes = [SIZES[name] for name in ("small", "medium")]
    totals = {name: [parameters(ResiduaConfig(connection=name, **size))["total"] for size in sizes] for name in PRESETS}
    for name, streams, small, medium in rows:
        assert int(streams or 1) == PRESETS[name].state_rows
        told = [int(count.replace(",", "")) for count in (small, medium or small)]
        assert told == [total - plain for total, plain in zip(totals[name], totals["residual"])], name


def test_the_tables_say_what_the_records_say():
    done = subprocess.run([sys.executable, ROOT / "experiments/tables.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def runs(name: str) -> list[dict]:
    """The records of a file in experiments/."""
    return [json.loads(line) for line in (ROOT / "experiments" / name).read_text(encoding="utf-8").splitlines()]


def test_the_network_without_layers_is_ahead_where_the_readme_says_so():
    """Of every scheme, with any seeds of both, but for `mhc` on rotations in every plane."""
    losses = {}
    for run in runs("geometry/quick/records.jsonl"):
        if run["kind"] == "run":
            losses.setdefault(run["task"], {}).setdefault(run["model"], []).append(run["loss"])
    level = {}
    for task in ("stability", "near-pi", "near-pi-multi"):
        without = losses[task].pop("zero-layer")
        level[task] = {name for name, found in losses[task].items() if min(found) <= max(without)}
    assert level == {"stability": set(), "near-pi": set(), "near-pi-multi": {"mhc"}}


def test_every_row_of_the_deviations_is_there():
    text = (ROOT / "docs/deviations.md").read_text(encoding="utf-8")
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.MULTILINE)]
    assert rows == list(range(1, 52))


def test_the_rows_of_the_deviations_that_are_cited_are_those_that_are_meant():
    rows = dict(
        re.findall(r"^\| (\d+) \| (.*) \|", (ROOT / "docs/deviations.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    ((first, last),) = re.findall(
        r"\(deviations\.md\), rows (\d+) to (\d+)", (ROOT / "docs/geometry.md").read_text(encoding="utf-8")
    )
    cited = [rows[str(number)].split(" | ")[:2] for number in range(int(first), int(last) + 1)]
    assert cited == [["EDelta", "initial gate"], ["EDelta", "initial rotation"], ["EDelta", "H_pre, H_post"]]


def test_the_limits_of_the_reproduction_are_those_of_its_records():
    """Which rows were tuned over the initial scale, and what the sweep of the demo says of those that were not."""
    tried = {}
    for run in runs("reproduction.jsonl"):
        tried.setdefault(run["variant"], set()).add(run["embedding_init_std"])
    assert tried.pop("residual") == {0.06, 0.12, 0.24}
    assert set(map(tuple, tried.values())) == {(0.12,)}

    losses = {}
    for run in runs("tune-demo.jsonl"):
        place = run["scheme"], run["embedding_init_std"], run["hidden_init_std_factor"]
        losses.setdefault(place, {}).setdefault(run["lr"], []).append(run["val_loss"])
    best = {
        place: min(statistics.mean(found) for found in rates.values() if len(found) == 3)
        for place, rates in losses.items()
        if any(len(found) == 3 for found in rates.values())
    }
    told = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    for own, shared in ((("ddl", 0.06, 0.5), ("ddl", 0.12, 0.5)), (("ddl-cc-ec", 0.12, 1.0), ("ddl-cc-ec", 0.12, 0.5))):
        assert best[own] == min(loss for place, loss in best.items() if place[0] == own[0])
        assert re.search(rf"\({best[own]:.3f}\b[^)]*\b{best[shared]:.3f}\b[^)]*\)", told), own
