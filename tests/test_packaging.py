"""What pyproject.toml says agrees with the package: its version and its extras."""

import itertools
import re
from pathlib import Path

import pytest

import residua

ROOT = Path(__file__).parents[1]


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place():
    found = project()
    assert "version" in found["project"]["dynamic"]
    source = (ROOT / found["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [residua.__version__]


def test_the_citation_has_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [residua.__version__]


def test_there_are_few_extras_and_every_hint_names_one_of_them():
    extras = project()["project"]["optional-dependencies"]
    assert extras.keys() == {"lab", "eval", "kernels", "wandb", "dev", "docs"}
    hinted = set()
    for path in Path(residua.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        hinted |= {*re.findall(r'extra\("(\w+)"\)', text), *re.findall(r"residua\[(\w+)\]", text)}
    assert {"lab", "eval", "kernels", "wandb"} <= hinted
    assert hinted <= extras.keys()


def test_versions_are_lower_bounds_only():
    found = project()["project"]
    for requirement in itertools.chain(found["dependencies"], *found["optional-dependencies"].values()):
        assert re.fullmatch(r"residua\[[\w,]+\]|[\w-]+>=[\d.]+(; .*)?", requirement), requirement
