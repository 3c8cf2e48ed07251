"""The size of the house beside its budget, of the working tree, and the time of its tests.

    python tools/house.py              a table, within ten seconds
    python tools/house.py --record     append it to tools/house.jsonl too
    python tools/house.py --tests      append a line: `make check`, `make test` and `make nightly`

lines      of Python in src/residua, by package, and in tests
rooms      packages directly in src/residua, and the modules beside them
commands   those that `residua --help` lists
checks     places that raise, require or expect, for every 1,000 lines of src
functions  outside kernels: the longest, the highest cyclomatic number (decisions, `and` and `or` among them, plus 1),
           and how many are over the budget
seconds    user time of `residua --help`, the median of five
tests      for each of the three: what pytest counted, seconds on the wall, and seconds of all processes it waited for

Idioms of validation are not counted: a reader has to.
"""

import ast
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "residua"
RECORD = Path(__file__).with_name("house.jsonl")
LANES = "check", "test", "nightly"
LONGEST, HIGHEST = 80, 20
BUDGET = {
    "lines": 27_500,
    "lines of tests": 34_000,
    "rooms": 9,
    "modules beside them": 4,
    "commands": 12,
    "checks per 1,000 lines": 20,
    "longest function": LONGEST,
    "functions that are longer": 0,
    "highest cyclomatic number": HIGHEST,
    "functions that are higher": 0,
    "seconds of residua --help": 0.2,
}
DECISIONS = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.match_case, ast.comprehension)


class Function(NamedTuple):
    """A function: the two numbers, and where it is."""

    lines: int
    cyclomatic: int
    place: str


def lines(folder: Path) -> dict[str, int]:
    """Lines of Python, stubs too, below each folder of a folder, and in the modules beside them."""
    counts: Counter[str] = Counter()
    for path in (*folder.rglob("*.py"), *folder.rglob("*.pyi")):
        first, *rest = path.relative_to(folder).parts
        counts[first if rest else "modules"] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(counts.items()))


def nodes() -> Iterator[tuple[Path, ast.AST]]:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            yield path.relative_to(SOURCE), node


def is_check(node: ast.AST) -> bool:
    """Whether a statement raises, or calls a function whose name begins with require or expect."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        return name.lstrip("_").startswith(("require", "expect")) and name != "requires_grad_"
    return isinstance(node, ast.Raise)


def cyclomatic(function: ast.AST) -> int:
    inside = list(ast.walk(function))
    operators = sum(len(node.values) - 1 for node in inside if isinstance(node, ast.BoolOp))
    return 1 + operators + sum(isinstance(node, DECISIONS) for node in inside)


def functions() -> list[Function]:
    return [
        Function((node.end_lineno or node.lineno) - node.lineno + 1, cyclomatic(node), f"{path}::{node.name}")
        for path, node in nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and "kernels" not in path.parts
    ]


def help_seconds(rounds: int = 5) -> tuple[float, int]:
    """User seconds of `residua --help`, and how many commands it lists."""
    seconds, text = [], ""
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        text = residua_help()
        seconds.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return round(statistics.median(seconds), 3), len(re.findall(r"^  [a-z-]+ {2,}\w", text, re.MULTILINE))


def residua_help() -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "residua", "--help"]
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


def house() -> dict[str, Any]:
    by_package, all_functions = lines(SOURCE), functions()
    packages = by_package.keys() - {"modules"}
    seconds, commands = help_seconds()
    total, checks = sum(by_package.values()), sum(is_check(node) for _, node in nodes())
    longest, highest = max(all_functions), max(all_functions, key=lambda function: function.cyclomatic)
    return {
        "lines": total,
        "lines by package": by_package,
        "lines of tests": sum(lines(ROOT / "tests").values()),
        "rooms": len(packages),
        "modules beside them": len(list(SOURCE.glob("*.py"))),
        "commands": commands,
        "checks per 1,000 lines": round(1000 * checks / total, 1),
        "longest function": longest.lines,
        "functions that are longer": sum(function.lines > LONGEST for function in all_functions),
        "highest cyclomatic number": highest.cyclomatic,
        "functions that are higher": sum(function.cyclomatic > HIGHEST for function in all_functions),
        "seconds of residua --help": seconds,
        "places": {"longest": longest.place, "highest": highest.place},
    }


def show(record: dict[str, Any]) -> None:
    print(f"{'':28}{'today':>9}{'budget':>9}")
    for name, budget in BUDGET.items():
        print(f"{name:28}{record[name]:>9,}{budget:>9,}{'' if record[name] <= budget else '   over'}")
    print("longest:", record["places"]["longest"], "  highest:", record["places"]["highest"])
    print("  ".join(f"{name} {count:,}" for name, count in record["lines by package"].items()))


def lane(target: str) -> dict[str, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    done = subprocess.run(["make", target], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout[-5000:], file=sys.stderr)  # the record only counts what failed
    wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    counts: Counter[str] = Counter()
    for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout):
        counts[name] += int(count)  # `make nightly` calls pytest twice
    process = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**counts, "wall": round(wall, 1), "process": round(process, 1)}


def append(record: dict[str, Any]) -> None:
    import torch

    from residua.lab.records.provenance import circumstances

    here = circumstances(torch.device("cpu"))
    record |= {name: here[name] for name in ("date", "python", "torch", "cpu", "load")}
    with RECORD.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"commit": here["commit"], **record}) + "\n")


def main() -> int:
    if sys.argv[1:] == ["--tests"]:
        append({"tests": {f"make {target}": lane(target) for target in LANES}})
        return 0
    if sys.argv[1:] not in ([], ["--record"]):
        print(__doc__)
        return 2
    record = house()
    show(record)
    if sys.argv[1:]:
        append(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
