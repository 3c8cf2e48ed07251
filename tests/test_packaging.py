"""What pyproject.toml says agrees with the package, its version and its extras, and with the lock."""

import itertools
import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import residua
import residua.engines.vllm
import residua.models
from residua.errors import PACKAGES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "requirements.txt").read_text(encoding="utf-8")
LOCK = [line.partition("  #")[0].strip() for line in TEXT.splitlines() if not line.startswith("#")]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
CUDA = re.compile(r"(nvidia|cuda)-")


def project():
    tomllib = pytest.importorskip("tomllib", reason="Python reads TOML from 3.11 on")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_is_defined_in_one_place():
    found = project()
    assert "version" in found["project"]["dynamic"]
    source = (ROOT / found["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8")
    assert re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE) == [residua.__version__]


def test_the_citation_has_the_version_of_the_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", text, re.MULTILINE) == [residua.__version__]


def test_there_are_few_extras_and_every_hint_names_one_of_them():
    extras = project()["project"]["optional-dependencies"]
    assert extras.keys() == {"lab", "eval", "kernels", "wandb", "slurm", "titan", "vllm", "dev", "docs"}
    hinted = set()
    for path in Path(residua.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        hinted |= set(re.findall(r"""(?:extra|installing)\(["'](\w+)["']\)|residua\[(\w+)\]""", text))
    hinted = {name for names in hinted for name in names if name}
    assert {"lab", "eval", "kernels", "wandb"} <= hinted
    assert hinted <= extras.keys()


def requirements():
    """All requirements of pyproject.toml: {"transformers": ">=5.17,<5.25"}."""
    source = project()
    table = source["project"]
    lines = itertools.chain(
        source["build-system"]["requires"], table["dependencies"], *table["optional-dependencies"].values()
    )
    found = [Requirement(line) for line in lines if not line.startswith("residua[")]
    return {requirement.name: requirement for requirement in found}


def locked(python):
    """The versions of the lock for one Python on Linux, by normalised name."""
    environment = {"python_version": python, "python_full_version": f"{python}.20", "sys_platform": "linux"}
    pins = {}
    for line in LOCK:
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(environment):
            assert pin.name not in pins, f"{pin.name} stands twice for Python {python}"
            pins[pin.name] = next(iter(pin.specifier)).version
    return pins


INSIDE = ("transformers", "torchtitan", "vllm", "submitit")
"""Packages that we reach below the public surface of."""


def test_a_requirement_has_a_lower_bound_and_an_upper_bound_if_we_use_its_private_names():
    for name, requirement in requirements().items():
        operators = {bound.operator for bound in requirement.specifier}
        assert operators == ({">=", "<"} if name in INSIDE else {">="}), requirement


def test_one_package_has_the_same_bound_in_every_extra():
    table = project()["project"]
    bounds = {}
    for line in itertools.chain(table["dependencies"], *table["optional-dependencies"].values()):
        name = re.match(r"[\w-]+", line)[0]
        if name != "residua":
            assert bounds.setdefault(name, line) == line


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_has_all_that_we_install_and_all_its_requirements(python):
    """Every requirement but those that nothing installs or that a lock of its own has, and those of packages installed
    as locked."""
    pins = locked(python)
    environment = {"python_version": python, "python_full_version": f"{python}.20", "extra": ""}
    for name, requirement in requirements().items():
        applies = requirement.marker is None or requirement.marker.evaluate(environment)
        if applies and name not in ("wandb", "torchtitan", "vllm"):
            version = pins[canonicalize_name(name)]
            assert requirement.specifier.contains(version, prereleases=True), (requirement, version)
    for name in pins:
        try:
            needed = metadata.requires(name) or () if metadata.version(name) == pins[name] else ()
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, needed):
            if requirement.marker is None or requirement.marker.evaluate(environment):
                assert canonicalize_name(requirement.name) in pins or CUDA.match(requirement.name), (name, requirement)


def test_every_line_of_the_lock_pins_one_version_without_an_address_or_a_hash():
    assert len(LOCK) > 100
    for line in LOCK:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.!+]+( ; [^#@]+)?", line), line
        assert not CUDA.match(line), line
    assert "://" not in TEXT
    assert "--" not in "\n".join(LOCK)


def test_the_lock_of_torchtitan_pins_all_that_its_target_installs():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lock = (ROOT / "requirements-titan.txt").read_text(encoding="utf-8")
    installed = re.findall(r"^\t\$\(TITAN_PIP\) (?:--editable '\.\[titan\]')?(.*)$", makefile, re.MULTILINE)
    names = " ".join(installed).split()
    assert {"torch", "hatchling", "pytest"} <= {*names}
    assert {*names} <= {*re.findall(r"^([\w-]+)==", lock, re.MULTILINE)}


def test_the_upper_bound_of_transformers_is_the_newest_minor_that_is_locked():
    major, minor = map(int, locked(PYTHONS[-1])["transformers"].split(".")[:2])
    assert f"<{major}.{minor + 1}" in str(requirements()["transformers"].specifier)
    assert (major, minor) == residua.models.TESTED


def test_the_extra_for_vllm_allows_the_tested_minor_releases():
    (major, oldest), (_, newest) = residua.engines.vllm.TESTED
    assert str(requirements()["vllm"].specifier) == f"<{major}.{newest + 1},>={major}.{oldest}"


def test_a_transformers_newer_than_tested_gives_a_one_line_warning(caplog):
    """Once per process, as `residua.models` does it when it is imported."""
    major, minor = residua.models.TESTED
    for version in (f"{major}.{minor}.9", f"{major}.{minor - 1}.0", f"{major - 1}.99"):
        residua.models._say_if_newer(version)
    assert not caplog.records
    for version in (f"{major}.{minor + 1}.0.dev0", f"{major + 1}.0.0"):
        residua.models._say_if_newer(version)
        (record,) = caplog.records
        assert record.getMessage().startswith(f"transformers {version} is newer than {major}.{minor}, the newest")
        assert record.levelname == "WARNING"
        assert "\n" not in record.getMessage()
        caplog.clear()


def test_the_hints_know_the_packages_of_the_extras():
    extras = project()["project"]["optional-dependencies"]
    imported = {"pyyaml": "yaml"}
    for name, packages in PACKAGES.items():
        brought = {re.split(r"[>\[]", requirement)[0] for requirement in extras[name]} - {"residua"}
        assert {imported.get(package, package) for package in brought} <= packages
