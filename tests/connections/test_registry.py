"""Names for schemes that are not the library's: registered ones, and those of an installed package."""

import enum
import inspect
import json
import os
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import pytest
import torch

import residua
from residua import Residual, Scheme
from residua.commands.cli import main
from residua.connections import describe, registry, resolve
from residua.connections import schemes as papers
from residua.connections.names import canonical

MODULE = """
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from residua import Carry, Connection, Scheme, Stream
from residua.connections import RMSNorm
from residua.connections.parts.ends import Same


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

    def assemble(self, dim, num_sublayers, norm, norm_eps):
        return Stream(Same(), [ScaledConnection(dim, self.start) for _ in range(num_sublayers)], Same())
"""


def installed(site: Path, module: str, text: str, *entry_points: str) -> Path:
    """A folder of installed packages with a distribution of one module, as pip leaves it."""
    info = site / f"{module}-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("\n".join(["[residua.schemes]", *entry_points]) + "\n")
    (info / "RECORD").write_text(f"{module}.py,,\n")
    (site / f"{module}.py").write_text(text)
    return site


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    entry_points = "scaled = scaled_residuals:Scaled", "scaled-small = scaled_residuals:SMALL"
    text = f"{MODULE}\n\nSMALL = Scaled(0.1)\n"
    return installed(tmp_path_factory.mktemp("package"), "scaled_residuals", text, *entry_points)


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
    print(residua.load(folder).config.scheme)
    return 0


def test_a_scheme_of_an_installed_package_works_wherever_a_preset_works(site, tmp_path, run):
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
    run(command, "explore", path, "--no-page", site=site)
    run(command, "export", path, tmp_path / "export", site=site)
    saved = json.loads((tmp_path / "export/config.json").read_text(encoding="utf-8"))["connection"]
    assert saved == {"scheme": "scaled", "package": "scaled_residuals", "start": 0.1}
    assert run(load, tmp_path / "export", site=site).out.strip() == "Scaled(start=0.1)"

    for argv in (
        ["generate", path, "--prompt", "The"],
        ["evaluate", path],
        ["explore", path, "--tokens", "8", "--no-page"],
    ):
        missing = run(command, *argv, status=2).err
        assert missing.count("\n") == 1
        assert "scheme 'scaled' comes with the package 'scaled_residuals', which is not installed" in missing
    failed = run(load, tmp_path / "export", status=1).err
    assert "scheme 'scaled' comes with the package 'scaled_residuals', which is not installed" in failed


def resolve_after_another(name: str) -> int:
    resolve("ddl")
    resolve(name)
    return 0


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("broken = scaled_residuals:Missing", "AttributeError: module 'scaled_residuals' has no attribute 'Missing'"),
        ("broken = scaled_residuals:torch", "TypeError: register 'broken' needs a Scheme"),
        ("broken = not_there:Scaled", "ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_broken_package_gives_a_one_line_error_and_affects_no_other_scheme(entry, reason, tmp_path, run):
    site = installed(tmp_path, "scaled_residuals", MODULE, entry)
    told = run(resolve_after_another, "broken", site=site, status=1).err
    module = entry.split()[-1].partition(":")[0]
    assert told.startswith(f"connection: the scheme 'broken' of the package '{module}' cannot be used: {reason}")
    assert told.count("\n") == 1


@pytest.fixture
def names(monkeypatch):
    """The tables of names, put back afterwards."""
    for table in ("SCHEMES", "PRESETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


@dataclass(frozen=True)
class Mine(Residual):
    paper: ClassVar[str] = "none"
    size: int = 3


@pytest.mark.usefixtures("names")
def test_a_class_or_an_instance_can_be_registered():
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
        ("mine", 3, TypeError, "needs a Scheme"),
        ("mine", dict, TypeError, "needs a Scheme"),
        ("ddl", Mine, ValueError, "'ddl' is the name of another scheme"),
        ("a:b", Mine, ValueError, "needs a name without"),
        ("", Mine, ValueError, "needs a name without"),
        (7, Mine, ValueError, "needs a name without"),
    ],
)
def test_invalid_registrations_are_refused(name, scheme, error, words):
    with pytest.raises(error, match=words):
        residua.register(name, scheme)


@pytest.mark.usefixtures("names")
def test_an_option_must_not_have_the_name_of_a_key():
    @dataclass(frozen=True)
    class Bad(Residual):
        package: str = "x"

    with pytest.raises(ValueError, match="option 'package'"):
        residua.register("bad", Bad)


@pytest.mark.parametrize(
    "name", ["antigravity", "os.path:join", "residua.connections.schemes.hyper:HyperConnections", "../x"]
)
@pytest.mark.parametrize("key", ["preset", "scheme"])
def test_a_configuration_never_imports_the_module_that_it_names(name, key):
    """`antigravity` would open a browser."""
    before = set(sys.modules)
    with pytest.raises(ValueError, match=f"no {key} is called"):
        resolve({key: name})
    with pytest.raises(ValueError, match="package 'antigravity'"):
        resolve({key: name, "package": "antigravity"})
    with pytest.raises(ValueError, match=r"package '\.\./nowhere'"):
        resolve({key: name, "package": "../nowhere"})
    assert "antigravity" not in set(sys.modules) - before


HALF = """
from dataclasses import dataclass
from typing import ClassVar

from residua import Residual


@dataclass(frozen=True)
class Half(Residual):
    paper: ClassVar[str] = "none"


SMALL, OTHER = Half(expand="conv"), Half(expand="conv", expand_kernel=2)
"""


@pytest.fixture
def declare(tmp_path, monkeypatch, names):
    """A function that installs a distribution with a module `half_NAME`."""

    def declare(name: str, *entry_points: str) -> Any:
        monkeypatch.syspath_prepend(installed(tmp_path / name, f"half_{name}", HALF, *entry_points))
        monkeypatch.delitem(sys.modules, f"half_{name}", raising=False)
        return import_module(f"half_{name}")

    return declare


def test_a_package_installed_after_the_first_search_is_found(declare):
    with pytest.raises(ValueError, match="no preset is called 'half'"):
        canonical("half")
    declare("new", "half = half_new:Half")
    assert canonical("half:expand=conv") == "half:expand=conv"
    assert type(resolve("HALF")).__name__ == "Half"


def test_a_record_opens_only_with_the_scheme_of_its_own_package(declare):
    """This holds however the scheme of the record and the present one were registered."""
    ours = declare("ours")
    residua.register("half", ours.Half)
    assert describe(ours.Half())["package"] == "half_ours"
    for package in ("half_ours", "__main__"):  # of the module, of a script
        assert resolve({"scheme": "half", "package": package}) == ours.Half()
    for key in ("scheme", "preset"):
        with pytest.raises(ValueError, match=r"'half' of the package 'theirs', got .*'half_o"):
            resolve({key: "half", "package": "theirs"})
        with pytest.raises(ValueError, match="the package 'theirs', got the one of 'residua'"):
            resolve({key: "residual", "package": "theirs"})
    with pytest.raises(ValueError, match=r"'half' of the package 3, got .*'half_ours'"):
        resolve({"scheme": "half", "package": 3})


def test_a_name_that_two_packages_declare_is_refused_unless_the_package_is_named(declare):
    first, second = (declare(name, f"half = half_{name}:Half", f"small-{name} = half_{name}:SMALL") for name in "ab")
    with pytest.raises(ValueError, match="'half', got 'half_a', 'half_b'"):
        resolve("half")
    with pytest.warns(UserWarning, match="one package .*'half'"):
        residua.schemes()
    record = describe(resolve({"preset": "small-b"}))
    assert (record["scheme"], record["package"]) == ("half", "half_b")
    assert resolve(record) == resolve({"preset": "half", "package": "half_b", "expand": "conv"}) == second.SMALL
    with pytest.raises(ValueError, match="of the package 'half_a', got the one of 'half_b'"):
        resolve({"scheme": "half", "package": "half_a"})
    assert type(resolve({"preset": "small-a"})) is first.Half


def test_a_built_in_name_cannot_be_taken(declare):
    theirs = declare("shadow", "mhc = half_shadow:Half", "deep_delta = half_shadow:Half")
    assert resolve({"scheme": "deep_delta"}) == residua.DeepDelta()
    assert resolve("mhc:num_streams=2").num_streams == 2
    with pytest.raises(ValueError, match="the package 'half_shadow', got the one of 'residua'"):
        resolve({"scheme": "mhc", "package": "half_shadow"})
    with pytest.raises(ValueError, match="Half has no name"):
        describe(theirs.Half())
    with pytest.warns(UserWarning, match="'mhc' of the package 'half_shadow', got .*'residua'"):
        residua.schemes()


@pytest.mark.parametrize("order", [1, -1])
def test_every_registered_name_of_a_class_opens_its_records(order, declare):
    """Whichever of two was registered first, in the process that wrote and in the one that reads."""
    half = declare("named")
    for name, scheme in [("half-small", half.SMALL), ("half-other", half.OTHER)][::order]:
        residua.register(name, scheme)
    for name in ("half-small", "half-other"):
        assert resolve({**describe(half.OTHER), "scheme": name}) == half.OTHER
    residua.register("ddl-mine", residua.DeepDelta(map="v"))
    assert describe(resolve("ddl-mine"))["scheme"] == "deep_delta"


@dataclass(frozen=True)
class Weights(Residual):
    paper: ClassVar[str] = "none"
    w: tuple[float, ...] = (1.0, 0.5)
    pairs: tuple[tuple[int, str], ...] = ((1, "a"),)
    way: Literal["up", "down"] | None = None
    n: int = 2
    anything: Any = 1

    def __post_init__(self):
        """Check nothing, as the class of a third party may do."""


@pytest.mark.usefixtures("names")
def test_tuples_are_restored_from_files():
    residua.register("weights", Weights)
    scheme = Weights(w=(2.0, 1), pairs=((1, "a"), (2, "b")), anything=(1, ()))
    described = describe(scheme)
    again = resolve(json.loads(json.dumps(described)))
    assert again == scheme
    assert hash(again) == hash(scheme)
    assert described == json.loads(json.dumps(described)), "a configuration equals the file it was read from"
    assert resolve({"preset": "weights", "w": [3.0]}).w == (3.0,)


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n": "abc"}, "n must be .*, got 'abc'"),
        ({"n": 2.5}, r"n must be .*, got 2\.5"),
        ({"w": 1.0}, "w must be a list, each item a number, got 1.0"),
        ({"w": ["a"]}, r"w must be a list, each item a number, got \['a'\]"),
        ({"pairs": [[1, "a", 2]]}, "pairs must be a list, each item a list of 2 items"),
        ({"way": "left"}, "way must be one of .*up.*, .*down.*, got 'left'"),
    ],
)
def test_options_of_any_scheme_have_their_declared_types(options, words):
    residua.register("weights", Weights)
    for key, name in (("scheme", "weights"), ("preset", "weights")):
        with pytest.raises(ValueError, match=words):
            resolve({key: name, **options})


class Mode(enum.Enum):
    A = 1


class Letter(str, enum.Enum):
    A = "a"


def scheme_with(declared: Any, default: Any, init: bool = True, **methods: Any) -> type[Scheme]:
    """A scheme with one option of this type."""
    body = {"__annotations__": {"option": declared, "paper": ClassVar[str]}, "paper": "none"}
    body |= {"__post_init__": lambda self: None, **methods}
    body["option"] = field(default=default, init=init)
    return dataclass(frozen=True)(type("Odd", (Residual,), body))


@pytest.mark.parametrize("module", [part.name for part in pkgutil.iter_modules(papers.__path__)])
def test_every_scheme_has_a_name_a_preset_and_a_second_implementation(module):
    """What `names.py`, the listing of the package and the tests lack of a file in `connections/schemes`."""
    path = f"{papers.__name__}.{module}"
    classes = [
        kind for kind in vars(import_module(path)).values() if isinstance(kind, type) and kind.__module__ == path
    ]
    kinds = [kind for kind in classes if issubclass(kind, Scheme) and not inspect.isabstract(kind)]
    for kind in kinds:
        assert kind in registry.SCHEMES.values(), "names.SCHEMES"
        assert any(type(preset) is kind for preset in registry.PRESETS.values()), "names.PRESETS"
        assert getattr(residua, kind.__name__, None) is kind, "connections/schemes/__init__.py"
        assert Path(__file__).with_name("schemes").joinpath(f"test_{module}.py").is_file()


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        (scheme_with(Mode, Mode.A), "TypeError: Object of type Mode is not JSON serializable"),
        (scheme_with(Letter, Letter.A), "ValueError: Odd: option must be Letter, got 'a'"),
        (scheme_with(torch.dtype, torch.float32), "TypeError: Object of type dtype is not JSON"),
        (scheme_with(Callable[[int], int], abs), "TypeError: Object of type builtin_function_or_method is not JSON"),
        (scheme_with(Residual, Residual()), "ValueError: Odd: option must be Residual, got {"),
        (scheme_with(tuple[Mode], (Mode.A,)), "TypeError: Object of type Mode is not JSON"),
        (scheme_with(int, None), "ValueError: Odd: option must be a whole number, got None"),
        (scheme_with(int, 1, init=False), "TypeError: .*unexpected keyword argument 'option'"),
        (
            scheme_with(int, 1, __post_init__=lambda self: vars(self).update(option=2 * self.option)),
            r"Odd\(.*\) becomes Odd\(",
        ),
    ],
)
def test_an_option_that_cannot_be_saved_and_read_back_is_refused_at_registration(scheme, words):
    with pytest.raises(ValueError, match=f"^Odd: .*: {words}") as raised:
        residua.register("odd", scheme)
    assert "\n" not in str(raised.value)
    assert "odd" not in registry.PRESETS | registry.SCHEMES
    if scheme().option is None:
        return
    registry.SCHEMES["odd"] = scheme
    with pytest.raises(ValueError, match=words):
        describe(scheme())
