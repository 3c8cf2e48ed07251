"""Names for schemes that are not the library's: registered ones, and those of an installed package."""

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import pytest

import residua
from residua import Residual
from residua.cli import main
from residua.connections import describe, registry, resolve

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from residua import Carry, Connection, Scheme, Stream
from residua.connections import RMSNorm
from residua.connections.ends import Same


class ScaledConnection(Connection):
    def __init__(self, dim, start):
        super().__init__()
        self.norm, self.scale = RMSNorm(dim), nn.Parameter(torch.full((dim,), start))

    def read(self, state, memory=None):
        return self.norm(state), Carry(state, None)

    def write(self, y, carry):
        return carry.residual + self.scale * y


@dataclass(frozen=True)
class Scaled(Scheme):
    equation: ClassVar[str] = "x + a F(norm(x))"
    paper: ClassVar[str] = "none"
    start: float = 0.5

    def build(self, dim, num_sublayers, *, norm_eps=1e-5, norm=None):
        return Stream(Same(), [ScaledConnection(dim, self.start) for _ in range(num_sublayers)], Same())
"""


def wheel(folder: Path, entry_points: str, module: str = MODULE) -> Path:
    """A distribution `scaled-residuals` 1.2 as a wheel, written by hand: no build backend is needed."""
    path = folder / "scaled_residuals-1.2-py3-none-any.whl"
    info = "scaled_residuals-1.2.dist-info"
    files = {
        "scaled_residuals.py": module,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: scaled-residuals\nVersion: 1.2\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[residua.schemes]\n{entry_points}\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder of installed packages with `scaled-residuals` in it."""
    folder = tmp_path_factory.mktemp("package")
    path = wheel(
        folder,
        "scaled = scaled_residuals:Scaled\nscaled-small = scaled_residuals:SMALL",
        f"{MODULE}\n\nSMALL = Scaled(0.1)\n",
    )
    return installed(path, folder / "site")


def installed(path: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, path]
    subprocess.run(command, check=True, capture_output=True)
    return target


class Done(NamedTuple):
    status: int
    out: str
    err: str


def _child(function, arguments, site, out, err):
    """In a process that has imported torch and residua, and nothing of `scaled-residuals`."""
    assert "scaled_residuals" not in sys.modules
    sys.path[:0] = [site] if site else []
    with out.open("w") as sys.stdout, err.open("w") as sys.stderr:
        try:
            status = function(*arguments)
        except Exception as error:
            status = print(error, file=sys.stderr) or 1
    os._exit(status)


@pytest.fixture
def run(start, tmp_path_factory):
    """Call a function that returns an exit status in a fresh process, which has the package installed in `site`."""

    def run(function, *arguments: object, site: Path | None = None, status: int = 0) -> Done:
        folder = tmp_path_factory.mktemp("process")
        out, err = folder / "out", folder / "err"
        process = start(_child, function, arguments, site and str(site), out, err)
        process.join(120)
        done = Done(process.exitcode, out.read_text(), err.read_text())
        assert done.status == status, done
        return done

    return run


def command(*arguments: object) -> int:
    return main(list(map(str, arguments)))


def load(folder: Path) -> int:
    import transformers

    import residua.models  # noqa: F401

    print(transformers.AutoModelForCausalLM.from_pretrained(folder).config.scheme)
    return 0


def test_a_scheme_of_an_installed_package_works_wherever_a_preset_does(site, tmp_path, run):
    """Listed, trained, generated with, exported and loaded, each in a fresh process that imports no module of it."""
    listed = json.loads(run(command, "schemes", "--json", site=site).out)
    assert {"scaled", "scaled-small"} <= {row["name"] for row in listed}

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"The number {i} comes before {i + 1}." for i in range(400)), encoding="utf-8")
    options = ["--data.source", text, "--data.tokenizer", "byte", "--train.steps", 3, "--train.warmup_steps", 1]
    options += ["--model.num_hidden_layers", 1, "--model.hidden_size", 16, "--model.num_attention_heads", 1]
    options += ["--model.head_dim", 16, "--train.sequence_length", 16, "--train.tensorboard", "false"]
    path = tmp_path / "run"
    train = "train", "--config", "tiny", "--run", path, "--model.connection", "scaled-small"
    run(command, *train, *options, site=site)
    run(command, "generate", path, "--prompt", "The", "--max-new-tokens", 2, site=site)
    run(command, "analyze", path, site=site)
    run(command, "export", path, tmp_path / "export", site=site)
    saved = json.loads((tmp_path / "export/config.json").read_text(encoding="utf-8"))["connection"]
    assert saved == {"scheme": "scaled", "package": "scaled-residuals", "start": 0.1}
    assert run(load, tmp_path / "export", site=site).out.strip() == "Scaled(start=0.1)"

    for argv in (["generate", path, "--prompt", "The"], ["evaluate", path], ["analyze", path]):
        missing = run(command, *argv, status=2).err
        assert missing.count("\n") == 1
        assert "scheme 'scaled' comes with the package 'scaled-residuals', which is not installed" in missing
    failed = run(load, tmp_path / "export", status=1).err
    assert "scheme 'scaled' comes with the package 'scaled-residuals', which is not installed" in failed


def resolve_after_another(name: str) -> int:
    resolve("ddl")
    resolve(name)
    return 0


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("broken = scaled_residuals:Missing", "AttributeError: module 'scaled_residuals' has no attribute 'Missing'"),
        ("broken = scaled_residuals:torch", "TypeError: register 'broken': expected a Scheme"),
        ("broken = not_there:Scaled", "ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_broken_package_is_one_clear_line_and_concerns_nobody_else(entry, reason, tmp_path, run):
    site = installed(wheel(tmp_path, entry), tmp_path / "site")
    told = run(resolve_after_another, "broken", site=site, status=1).err
    assert told.startswith(
        "connection: the scheme 'broken' of the package 'scaled-residuals' cannot be used: " + reason
    )
    assert told.count("\n") == 1


@pytest.fixture
def names(monkeypatch):
    """The tables of names, put back afterwards."""
    for table in ("SCHEMES", "PRESETS", "_PACKAGES"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


@dataclass(frozen=True)
class Mine(Residual):
    paper: ClassVar[str] = "none"
    size: int = 3


@pytest.mark.usefixtures("names")
def test_register_a_class_and_an_instance():
    residua.register("mine", Mine)
    residua.register("mine-wide", Mine(size=9))
    assert (resolve("mine"), resolve("mine-wide"), resolve("mine:size=4")) == (Mine(), Mine(size=9), Mine(size=4))
    described = describe(Mine(size=9))
    assert described == {"scheme": "mine", "package": __name__.partition(".")[0], **described}
    assert resolve(described) == Mine(size=9)
    residua.register("mine", Mine)  # once more is no mistake: a notebook runs its cells again


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("name", "scheme", "error", "words"),
    [
        ("mine", 3, TypeError, "expected a Scheme"),
        ("mine", dict, TypeError, "expected a Scheme"),
        ("ddl", Mine, ValueError, "'ddl' is the name of another scheme"),
        ("a:b", Mine, ValueError, "expected a name without"),
        ("", Mine, ValueError, "expected a name without"),
        (7, Mine, ValueError, "expected a name without"),
    ],
)
def test_what_cannot_be_registered(name, scheme, error, words):
    with pytest.raises(error, match=words):
        residua.register(name, scheme)


@pytest.mark.usefixtures("names")
def test_an_option_must_not_have_the_name_of_a_key():
    @dataclass(frozen=True)
    class Bad(Residual):
        package: str = "x"

    with pytest.raises(ValueError, match="has an option 'package'; this name is reserved"):
        residua.register("bad", Bad)


@pytest.mark.parametrize("name", ["antigravity", "os.path:join", "residua.connections.hyper:HyperConnections", "../x"])
@pytest.mark.parametrize("key", ["preset", "scheme"])
def test_a_configuration_never_imports_what_it_names(name, key):
    """`antigravity` would open a browser."""
    before = set(sys.modules)
    with pytest.raises(ValueError, match=f"no {key} is called"):
        resolve({key: name})
    with pytest.raises(ValueError, match="comes with the package 'antigravity', which is not installed"):
        resolve({key: name, "package": "antigravity"})
    assert "antigravity" not in set(sys.modules) - before
