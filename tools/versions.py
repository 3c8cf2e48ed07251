"""The versions of the packages that residua needs: the lock, and the tests with the newest and with the lowest.

    python tools/versions.py lock                        write requirements.txt and requirements-titan.txt anew
    python tools/versions.py newest -- tests/models -x   with pytest's arguments, in the environment .venv-newest
    python tools/versions.py lowest -- tests/models      with the lower bounds of pyproject.toml, in .venv-lowest

`make lock`, `make newest` and `make lowest` call it. uv resolves; it comes from PyPI into an environment that is thrown
away. The builds of torch weigh gigabytes, so torch keeps the locked version in the newest lane unless --torch names
another, and pip installs it first and alone.

A lane writes a table of all packages that residua names, and of all others that are not as locked, to
runs/versions/newest.md or lowest.md. If tests fail, they are run again on the lock, with the lane's torch and one at a
time of the changed packages that residua names, which says what broke them. The exit status is pytest's.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.txt"
OLDEST_PYTHON = "3.10"
HEAD = """\
# All packages that `make demo`, `make test` and `.ci/run` install. `make lock` writes it; pip takes it as --constraint.
# CUDA's libraries are left out: a build of torch that needs them requires their versions, and the others need none.
"""
TITAN_LOCK = ROOT / "requirements-titan.txt"
OLDEST_FOR_TITAN = "3.11"
TITAN_HEAD = "# All packages that `make titan` installs. `make lock` writes it.\n"
BESIDES = ("hatchling>=1.27", "pytest>=8.2", "pytest-timeout>=2.3", "hypothesis>=6.100")
"""What `make titan` installs besides the extra."""
CUDA = re.compile(r"(nvidia|cuda)-")
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
NAMED = "residua (pyproject.toml)"
"""How uv says that a package is one of ours and not another one's requirement."""


def run(*command: str | Path, stdin: str | None = None) -> str:
    """Return what a command prints; stop if it fails."""
    done = subprocess.run([*map(str, command)], cwd=ROOT, input=stdin, text=True, stdout=subprocess.PIPE)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command[:3]))} ended with status {done.returncode}")
    return done.stdout


@contextmanager
def uv() -> Iterator[Path]:
    """Give the path of uv, in an environment that is thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        tool = Path(folder) / "bin" / "uv"
        run(tool.with_name("python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv")
        yield tool


def resolve(uv: Path, *options: str | Path, also: Sequence[str] = (), extras: Sequence[str] = ("dev", "docs")) -> str:
    """Return the versions of everything for these extras, a line each; `also` are further requirements."""
    ours = ["pyproject.toml", "-", *chain.from_iterable(("--extra", extra) for extra in extras)]
    plain = ["--no-header", "--annotation-style", "line", "--no-python-downloads", "--quiet"]
    text = run(uv, "pip", "compile", *ours, *plain, *options, stdin="\n".join(also))
    return "".join(line for line in text.splitlines(keepends=True) if not CUDA.match(line))


def write_lock(uv: Path, torch: str) -> None:
    """Write the locks for every Python from the oldest on, with this version of torch."""
    text = resolve(uv, "--universal", "--python-version", OLDEST_PYTHON, also=[f"torch=={torch}"])
    LOCK.write_text(HEAD + text, encoding="utf-8")
    also = [f"torch=={torch}", *BESIDES]
    text = resolve(uv, "--universal", "--python-version", OLDEST_FOR_TITAN, also=also, extras=["titan"])
    TITAN_LOCK.write_text(TITAN_HEAD + text, encoding="utf-8")


class Outcome(NamedTuple):
    """What pytest did: its exit status, the number of tests, and the names of those that failed."""

    status: int
    count: int
    failed: list[str]


class Lane:
    """An environment for one set of versions, and the tests in it."""

    def __init__(self, uv: Path, folder: Path):
        self.uv = uv
        self.folder = folder
        self.python = folder / "bin" / "python"
        if not self.python.exists():
            venv.create(folder, with_pip=True)

    def resolve(self, *options: str | Path, also: Sequence[str] = ()) -> str:
        return resolve(self.uv, "--python", self.python, *options, also=also)

    def install(self, pins: dict[str, str]) -> None:
        """Install exactly these versions."""
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, f"torch=={pins['torch']}")
        others = [f"{package}=={version}" for package, version in pins.items() if package != "torch"]
        into = [self.uv, "pip", "install", "--quiet", "--python", self.python, "--no-deps"]
        run(*into, "--requirements", "-", stdin="\n".join(others))
        run(*into, "--no-build-isolation", "--editable", ".")

    def test(self, arguments: Sequence[str]) -> Outcome:
        """Run pytest."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-o", "junit_family=xunit1", f"--junitxml={report}"]
        status = subprocess.run([self.python, "-m", "pytest", *options, *arguments], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
        return Outcome(status, len(cases), [f"{case.get('file')}::{case.get('name')}" for case in failed])

    def test_alone(self, package: str, pins: dict[str, str], locked: dict[str, str], failed: Sequence[str]) -> Outcome:
        """Run tests again on the lock with two packages of the lane, torch and this one, and what these require."""
        preferred = self.folder / "preferred.txt"
        preferred.write_text("\n".join(f"{name}=={locked[name]}" for name in locked if name != package))
        also = [f"{name}=={pins[name]}" for name in (package, "torch")]
        self.resolve("--output-file", preferred, also=also)
        alone = {name: version for name, version in PIN.findall(preferred.read_text()) if not CUDA.match(name)}
        self.install(alone)
        return self.test(["-n", "0", *failed])


def compare(uv: Path, name: str, torch: str | None, arguments: Sequence[str]) -> int:
    """Run the tests in a lane, print and write its table, and return pytest's exit status."""
    lane = Lane(uv, ROOT / f".venv-{name}")
    options = ["--resolution", "lowest-direct"] if name == "lowest" else []
    locked = dict(PIN.findall(lane.resolve("--constraint", LOCK)))
    free = dict(PIN.findall(lane.resolve(*options)))
    torch = torch or (free if name == "lowest" else locked)["torch"]
    text = lane.resolve(*options, also=[f"torch=={torch}"])
    pins = dict(PIN.findall(text))
    named = [line.partition("==")[0] for line in text.splitlines() if NAMED in line]
    changed = [package for package in pins if pins[package] != locked.get(package)]

    lane.install(pins)
    outcome = lane.test(arguments)
    broken = {}
    for package in changed if outcome.failed else ():
        if package not in named or package == "torch":
            continue
        with suppress(SystemExit):  # uv has said why this version does not go with the others
            broken[package] = lane.test_alone(package, pins, locked, outcome.failed).failed

    rows = [f"| package | locked | {name} | result |", "|---|---|---|---|"]
    for package in sorted({*named, *changed}):
        if not outcome.failed:
            result = "passed" if outcome.count else "no tests"
        elif package not in changed:
            result = "as locked"
        elif package not in broken:
            result = "not tried alone"
        else:
            result = "; ".join(broken[package]) or "passed"
        if package == "torch" and free["torch"] != torch:
            result += f"; held, {free['torch']} is the {name}"
        rows.append(f"| {package} | {locked.get(package, '')} | {pins[package]} | {result} |")
    version = run(lane.python, "--version").strip()
    rows.append(f"\n{version}: {outcome.count} tests, {len(outcome.failed)} failed, pytest's status {outcome.status}.")
    rows += [f"- {test}" for test in outcome.failed]
    table = "\n".join(rows)
    print(table)
    file = ROOT / "runs" / "versions" / f"{name}.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(table + "\n", encoding="utf-8")
    return outcome.status


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["lock", "newest", "lowest"])
    parser.add_argument("--torch", help="a version of torch in place of the locked, or in `lowest` the lowest, one")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    arguments = parser.parse_args()
    with uv() as tool:
        if arguments.what != "lock":
            return compare(tool, arguments.what, arguments.torch, arguments.pytest)
        write_lock(tool, arguments.torch or dict(PIN.findall(LOCK.read_text(encoding="utf-8")))["torch"])
        return 0


if __name__ == "__main__":
    sys.exit(main())
