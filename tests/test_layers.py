"""Imports go strictly downward, and what an extra brings is imported only where it is used."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import residua
import residua.training

PACKAGE = Path(residua.__file__).parent
LEVELS = {
    "errors": -2,
    "checks": -1,
    "evaluating": -1,
    "lazy": -1,
    "provenance": -1,
    "sizes": -1,
    "tables": 0,
    "ops": 0,
    "runs": 0,
    "terminal": -1,
    "connections": 1,
    "dialects": 2,
    "models": 2,
    "conversion": 3,
    "data": 3,
    "training": 3,
    "evaluation": 3,
    "analysis": 3,
    "geometry": 3,
    "benchmarks": 3,
    "testing": 2,
    "experiment": 4,
    "estimate": 4,
    "explorer": 5,
    "demo": 6,
    "export": 5,
    "sweep": 5,
    "study": 6,
    "commands": 7,
    "cli": 8,
    "__main__": 9,
}
EXTRAS = {
    "accelerate",
    "datasets",
    "filelock",
    "huggingface_hub",
    "lm_eval",
    "matplotlib",
    "numpy",
    "playwright",
    "plotly",
    "pyarrow",
    "rich",
    "safetensors",
    "tensorboard",
    "tokenizers",
    "transformers",
    "triton",
    "wandb",
    "yaml",
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py")


def part(path: Path) -> str:
    """The package or module directly below residua that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def imported(path: Path) -> list[str]:
    """The dotted names that a file imports, relative ones made absolute, `from a import b` as a.b."""
    home, names = ["residua", *path.relative_to(PACKAGE).parts[:-1]], []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = home[: len(home) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            names += [f"{source}.{alias.name}" for alias in node.names]
    return names


def test_every_part_has_a_level():
    assert {part(path) for path in FILES} <= LEVELS.keys()


def test_imports_go_strictly_downward():
    """For all but residua/__init__.py, which names what the whole package offers."""
    wrong = []
    for path in FILES:
        for name in imported(path):
            target = name.split(".")[1] if name.startswith("residua.") else part(path)
            # Neither a name in the same part, nor one of residua/__init__.py such as __version__.
            if target != part(path) and target in LEVELS and LEVELS[target] >= LEVELS[part(path)]:
                wrong.append(f"{path.relative_to(PACKAGE)} must not import {name}")
    assert not wrong, "\n".join(wrong)


def test_only_the_command_line_imports_from_the_top_of_the_package():
    """`from residua import x` below the top would load every package that `residua` names, levels or not."""
    modules = {*LEVELS, "kernels"}
    wrong = [
        f"{path.relative_to(PACKAGE)}: import {name} from its own module"
        for path in FILES
        if part(path) not in {"cli", "__main__"}
        for name in imported(path)
        if name == "residua" or (name.startswith("residua.") and name.split(".")[1] not in modules)
    ]
    assert not wrong, "\n".join(wrong)


def loaded_by(statement: str, after: str = "") -> set[str]:
    """The packages that a statement loads in a fresh process that has run another one."""
    code = f"import sys\n{after}\nknown = set(sys.modules)\n{statement}\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules.keys() - known})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.processes
def test_importing_residua_loads_nothing_until_it_is_asked():
    assert "torch" not in loaded_by("import residua")
    assert "torch" not in loaded_by("import residua.training")
    assert "torch" not in loaded_by("import residua; dir(residua); residua.__version__")
    assert "torch" in loaded_by("from residua import DeepDelta")


@pytest.mark.processes
def test_what_residua_names_needs_torch_alone():
    # torch itself takes numpy where it finds it.
    loaded = loaded_by("from residua import *\nimport residua.connections, residua.ops", after="import torch")
    assert loaded & EXTRAS == set()
    assert "residua" in loaded


@pytest.mark.parametrize("package", [residua, residua.training], ids=lambda package: package.__name__)
def test_a_lazy_package_has_every_name_that_it_offers(package):
    namespace = {}
    exec(f"from {package.__name__} import *", namespace)
    for name in package.__all__:
        assert namespace[name] is getattr(package, name)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
    with pytest.raises(ImportError, match="nothing"):
        exec(f"from {package.__name__} import nothing")


@pytest.mark.parametrize("package", [residua, residua.training], ids=lambda package: package.__name__)
def test_type_checkers_see_the_names_of_a_lazy_package(package):
    """Under `if TYPE_CHECKING` stands an import of each of them, and of nothing else."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert block.test.id == "TYPE_CHECKING"
    assert sorted(alias.name for node in block.body for alias in node.names) == sorted(package.__all__)


def test_the_overview_of_the_command_line_loads_neither_torch_nor_an_extra():
    loaded = loaded_by("from residua.cli import main; main(['--help'])")
    assert loaded & (EXTRAS | {"torch"}) == set()


def test_the_help_of_a_command_loads_neither_torch_nor_transformers():
    code = (
        "import contextlib, io\n"
        "from residua.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert [main([name, '--help']) for name in COMMANDS] == [0] * len(COMMANDS)"
    )
    assert loaded_by(code) & {"torch", "transformers", "numpy", "rich"} == set()
