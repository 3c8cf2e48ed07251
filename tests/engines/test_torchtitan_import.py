"""Without torchtitan, or with a release that was not tested, one line says which one residua works with."""

import importlib
import sys
from pathlib import Path

import pytest

from residua.errors import InputError, installing

MODULE = "residua.engines.torchtitan"


@pytest.fixture(autouse=True)
def _import_anew(monkeypatch):
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def test_a_missing_torchtitan_gives_a_one_line_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module(MODULE)
    text = "torchtitan is not installed, and residua works with torchtitan 0.3"
    assert str(caught.value) == f"{text}: {installing('titan')}"


@pytest.mark.parametrize("installed", ["0.2.1", "0.4.0.dev20261101", "1.0"])
def test_an_untested_release_is_refused_in_one_line(monkeypatch, tmp_path, installed):
    monkeypatch.delitem(sys.modules, "torchtitan", raising=False)
    (tmp_path / "torchtitan.py").write_text(f"__version__ = {installed!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        importlib.import_module(MODULE)
    text = f"torchtitan {installed} is installed, and residua works with torchtitan 0.3"
    assert str(caught.value) == f"{text}: {installing('titan')}"


def test_the_extra_requires_the_tested_release():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"torchtitan>=0.3,<0.4; python_version' in text
