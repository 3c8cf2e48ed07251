"""Imports go strictly downward, and what an extra brings is imported only where it is used."""

import re
from pathlib import Path

import pytest

import residua
import residua.lab.data
import residua.lab.training
from support.processes import run_python

EXTRAS = {
    *("accelerate", "datasets", "filelock", "huggingface_hub", "lm_eval", "matplotlib", "numpy", "playwright"),
    *("plotly", "pyarrow", "rich", "safetensors", "tensorboard", "tokenizers", "transformers", "triton", "wandb"),
    "yaml",
}
LAZY = [residua, residua.connections, residua.conversion, residua.testing, residua.lab.training, residua.lab.data]


@pytest.mark.slow
def test_imports_go_strictly_downward(monkeypatch):
    """The contracts stand in pyproject.toml."""
    importlinter = pytest.importorskip("importlinter.cli", reason="import-linter needs Python 3.11")
    monkeypatch.chdir(Path(__file__).parents[1])
    monkeypatch.setattr(importlinter, "_configure_logging", lambda verbose: None)  # it would disable our logger
    assert importlinter.lint_imports() == importlinter.EXIT_STATUS_SUCCESS


def loaded_by(statement: str, after: str = "") -> set[str]:
    """The packages that a statement loads in a fresh process that has run another one."""
    code = f"import sys\n{after}\nknown = set(sys.modules)\n{statement}\n"
    code += "print(*{name.partition('.')[0] for name in sys.modules.keys() - known})"
    return set(run_python(code)[0].split())


def test_importing_residua_loads_submodules_only_on_demand():
    unasked = "import residua, residua.connections, residua.lab.training; dir(residua); residua.__version__"
    assert "torch" not in loaded_by(unasked)


TYPOS = [
    "schemes nosch",
    "train --config tiny --model.connection nosch --run run",
    "cost count --config tiny --model.connection nosch",
    "cost step --config tiny --schemes nosch",
    "convert model --connection nosch --out out",
    f"convert model --connection ihc --out {__file__}",
    f"prepare --source stdlib --out {__file__}",
    "export nowhere out",
    "evaluate nowhere",
    "generate nowhere --prompt text",
    "explore nowhere",
    "study run nowhere --out out",
    "study run mistyped.yaml --out out",
    "study run resbench --out out --sizes 1T",
]


@pytest.mark.processes
def test_a_typo_does_not_load_torch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mistyped.yaml").write_text("title: Mistyped\nsheme: {}\n")
    code = "import sys\nfrom residua.commands.cli import main\n"
    code += f"print([line for line in {TYPOS} if main(line.split()) != 2 or 'torch' in sys.modules])"
    assert run_python(code)[0] == "[]\n"


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
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


@pytest.mark.parametrize(
    ("name", "hint"),
    [("DeepDeltaLearning", "did you mean DeepDelta?"), ("mhc", "residua.build('mhc', ...)"), ("AttnRes", "'attnres'")],
)
def test_a_name_that_is_near_another_gets_a_suggestion(name, hint):
    with pytest.raises(AttributeError, match=re.escape(hint)):
        getattr(residua, name)


def test_the_overview_of_the_command_line_loads_neither_torch_nor_an_extra():
    loaded = loaded_by("from residua.commands.cli import main; main(['--help'])")
    assert loaded & (EXTRAS | {"torch"}) == set()


def test_the_help_of_a_command_loads_neither_torch_nor_transformers():
    code = (
        "import contextlib, io\n"
        "from residua.commands.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    assert [main([*name.split(), '--help']) for name in COMMANDS] == [0] * len(COMMANDS)"
    )
    assert loaded_by(code) & {"torch", "transformers", "numpy", "rich"} == set()


@pytest.mark.nightly
@pytest.mark.processes
def test_residua_imports_with_a_transformers_that_the_lab_does_not_support():
    code = (
        "import sys, types\n"
        "sys.modules['transformers'] = types.ModuleType('transformers')\n"
        "import residua\n"
        "assert residua.Residual().build(4, 1).connections\n"
    )
    run_python(code)


@pytest.mark.nightly
@pytest.mark.processes
def test_models_need_no_device_package_and_register_if_transformers_was_imported_first():
    """triton and causal_conv1d are for some machines; the models, and all that they import, do without."""
    code = (
        "import sys\n"
        "for name in ('causal_conv1d', 'fla', 'flash_attn'): sys.modules[name] = None\n"
        "import transformers, residua\n"
        "assert {'residua', 'residua-converted'} <= set(transformers.CONFIG_MAPPING.keys())\n"
        "import residua.models\n"
        "assert not any(name.startswith('residua.ops.kernels') for name in sys.modules)\n"
    )
    run_python(code)
