"""The size of the house at two commits: lines, circles of imports, and the time to start. The time of its tests.

    python experiments/house.py BEFORE [AFTER]    append two lines to experiments/house.jsonl; AFTER is HEAD by default
    python experiments/house.py --tests           append a line: `make check` and `make test` of the working tree

lines     lines of Python in src/residua, for each package and for the modules beside them
circles   groups of modules that import each other in a circle, imports inside functions included
seconds   user time of a process, the median of interleaved rounds: `residua --help`, `import residua`, and
          `residua train --help`
tests     for each of the two: what pytest counted, seconds on the wall, and seconds of all processes that it waited for
"""

import ast
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from residua.provenance import circumstances

RECORD = Path(__file__).with_name("house.jsonl")
ROUNDS = 7
STARTS = {
    "residua --help": ["-m", "residua", "--help"],
    "import residua": ["-c", "import residua"],
    "residua train --help": ["-m", "residua", "train", "--help"],
}


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout


def lines(root: Path) -> dict[str, int]:
    found: dict[str, int] = {}
    for path in (root / "src/residua").rglob("*.py"):
        first, *rest = path.relative_to(root / "src/residua").parts
        package = first if rest else "modules"
        found[package] = found.get(package, 0) + len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(found.items())) | {"all": sum(found.values())}


def circles(root: Path) -> int:
    """The strongly connected components of more than one module."""
    source = root / "src"
    modules = {}
    for path in source.rglob("*.py"):
        parts = path.relative_to(source).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph = {name: sorted(imported(path, modules) - {name}) for name, path in modules.items()}
    reach = {name: reached(name, graph) for name in graph}
    groups = {frozenset({name, *(other for other in reach[name] if name in reach[other])}) for name in graph}
    return sum(len(group) > 1 for group in groups)


def imported(path: Path, modules: dict[str, Path]) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names if f"{node.module}.{alias.name}" in modules}
            inside = {alias.name for alias in node.names if f"{node.module}.{alias.name}" not in modules}
            found |= {node.module} if inside else set()
    return {name for name in found if name in modules}


def reached(start: str, graph: dict[str, list[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def user_seconds(arguments: list[str], root: Path) -> float:
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=environment)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def lane(target: str) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(["make", target], capture_output=True, text=True)
    out = done.stdout
    if done.returncode:
        print(out[-5000:], file=sys.stderr)  # the record only counts what failed
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", out)}
    process = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return counts | {"wall": round(wall, 1), "process": round(process, 1)}


def append(record: dict) -> None:
    here = circumstances(torch.device("cpu"))
    record |= {name: here[name] for name in ("date", "python", "torch", "cpu", "load")}
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__)
        return 2
    if sys.argv[1:] == ["--tests"]:
        commit = git("rev-parse", "HEAD").strip()
        append({"commit": commit, "tests": {f"make {target}": lane(target) for target in ("check", "test")}})
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        roots = {}
        for revision in (sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "HEAD"):
            roots[git("rev-parse", revision).strip()] = root = Path(temporary) / revision
            git("worktree", "add", "--detach", str(root), revision)
        try:
            times: dict[str, dict[str, list[float]]] = {commit: {name: [] for name in STARTS} for commit in roots}
            for _ in range(ROUNDS):
                for commit, root in roots.items():
                    for name, arguments in STARTS.items():
                        times[commit][name].append(user_seconds(arguments, root))
            for commit, root in roots.items():
                seconds = {name: round(statistics.median(found), 3) for name, found in times[commit].items()}
                append({"commit": commit, "lines": lines(root), "circles": circles(root), "seconds": seconds})
        finally:
            for root in roots.values():
                git("worktree", "remove", "--force", str(root))
    return 0


if __name__ == "__main__":
    sys.exit(main())
