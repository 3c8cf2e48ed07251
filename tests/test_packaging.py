"""What pyproject.toml says agrees with the package: its version and its extras."""

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
