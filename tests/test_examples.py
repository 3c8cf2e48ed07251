"""Every example is short, runs on a CPU in seconds, and prints what its page promises."""

import os
import re
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from residua.connections import registry
from residua.testing import check_scheme
from support.processes import run_python

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name: str, capsys: pytest.CaptureFixture) -> str:
    torch.manual_seed(0)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


@pytest.mark.nightly
def test_a_llama_keeps_its_logits_and_trains(capsys):
    out = printed("convert_llama.py", capsys)
    assert "residual: largest difference of the logits 0\n" in out
    assert "adapter: the logits are the same: True" in out
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "words"), [("vision_transformer", r"accuracy ([\d.]+)%"), ("graph", r"([\d.]+)% of the hidden labels")]
)
def test_a_network_of_another_kind_learns_with_every_scheme(name, words, capsys):
    shares = [float(share) for share in re.findall(words, printed(f"{name}.py", capsys))]
    assert len(shares) == 3
    assert min(shares) > 50  # a guess is right in one of three


def test_a_users_module_is_checked(capsys):
    out = printed("check_module.py", capsys)
    wrong, right = out.split("parameters: passed", 1)
    assert "1 of 8 checks failed (specification 1.6)\n  forward: the mixer is transposed: agrees with H_res^T" in wrong
    assert "FAILED" not in right


@pytest.mark.slow
def test_a_users_scheme_starts_as_the_plain_residual_and_trains(capsys, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES / "custom_scheme")
    for table in ("SCHEMES", "PRESETS"):  # other tests find the names as they were
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    out = printed("custom_scheme/use.py", capsys)
    numbers = re.findall(r"step 0: ([\d.]+), at step 30: ([\d.]+)", out)
    (plain, _), (start, end) = [tuple(map(float, pair)) for pair in numbers]
    assert start == plain
    assert end < 0.7 * start


def test_the_scheme_that_people_copy_keeps_the_contract():
    check_scheme(runpy.run_path(str(EXAMPLES / "custom_scheme" / "momentum_residual.py"))["Momentum"]())


@pytest.mark.processes
def test_a_scheme_of_an_installed_package_is_found_by_its_name(tmp_path):
    """The test writes the same files as pip: the module and the entry points declared in pyproject.toml."""
    project = (EXAMPLES / "custom_scheme" / "pyproject.toml").read_text(encoding="utf-8")
    declared = re.search(r'^\[project.entry-points."(residua.schemes)"\]\n(\w+) = "([\w:]+)"$', project, re.MULTILINE)
    shutil.copy(EXAMPLES / "custom_scheme" / "momentum_residual.py", tmp_path)
    info = tmp_path / "momentum_residual-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: momentum-residual\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*declared.groups()))

    code = "from residua.connections import describe, resolve; print(describe(resolve('momentum')))"
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    described, _ = run_python(code, PYTHONPATH=paths)
    assert described.strip() == "{'scheme': 'momentum', 'package': 'momentum_residual'}"
