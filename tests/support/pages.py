"""What the documentation shows, and the records behind it."""

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS, EXPERIMENTS, TOOLS = ROOT / "docs", ROOT / "experiments", ROOT / "tools"
RESBENCH = ROOT / "resbench"


def script(name: str, folder: Path = EXPERIMENTS) -> ModuleType:
    """A script as a module; it may import others from its own folder and from tools/."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOOLS)
        patch.syspath_prepend(folder)
        return importlib.import_module(name)


def pages() -> dict[str, str]:
    """The text of README.md and of every page, by its path."""
    outside = EXPERIMENTS / "speed.md", EXPERIMENTS / "geometry/details.md", RESBENCH / "evidence.md"
    paths = [ROOT / "README.md", *sorted(DOCS.glob("*.md")), RESBENCH / "methods.md", *outside]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def cells(notebook: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    content = json.loads(notebook.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) + "\n" for cell in content["cells"] if cell["cell_type"] == "code"]


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in one language, in their order."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def records(name: str, folder: Path = EXPERIMENTS) -> list[dict[str, Any]]:
    """The records of a file."""
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]
