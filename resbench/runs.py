"""Make the missing runs of a study, one after the other at low priority, and commit each record as it ends.

    python resbench/runs.py rivals-1M --minutes 480
    python resbench/runs.py resbench/rates-1M.yaml --minutes 60 --data data/resbench

All runs are made by the one commit that the file resbench/commit names: in a worktree of it, runs/resbench-COMMIT, with
an environment of its own from the lock of that commit. A study that is given by its name, too, is that commit's; a file
is read where it is. Records go to resbench/records/STUDY of this checkout.

No run begins that cannot end within the minutes, as far as records tell: the slowest of its scheme at its size on this
kind of processor, or of all schemes at that size. A run that was killed goes on where it was.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", help="a study of resbench/, or a YAML file")
    parser.add_argument("--minutes", type=float, default=60.0, help="in which the last run must end (default: 60)")
    parser.add_argument("--data", default="data/resbench", help="prepared data (default: data/resbench)")
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)  # given in the worktree, where runs are made
    arguments = parser.parse_args()
    ends = time.monotonic() + 60 * arguments.minutes
    if arguments.checkout is not None:
        return make_runs(arguments.study, arguments.data, ends, arguments.checkout)
    checkout = HERE.parent
    try:
        tree = worktree(checkout)
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "see above").strip()  # make prints its own message
        print(f"runs: {' '.join(map(str, error.cmd))}: {said}", file=sys.stderr)
        return 1
    left = (ends - time.monotonic()) / 60  # the environment took some of it
    told = [f"--minutes={left}", "--data", arguments.data, "--checkout", str(checkout)]  # `left` may be below 0
    command = [tree / ".venv/bin/python", tree / "resbench/runs.py", arguments.study, *told]
    return subprocess.call(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(tree / "src")})


def worktree(checkout: Path) -> Path:
    """Return the worktree of the named commit, made with its environment if it is not there yet."""
    commit = (checkout / "resbench/commit").read_text(encoding="utf-8").strip()
    tree = checkout / "runs" / f"resbench-{commit[:12]}"
    if not tree.exists():
        git(checkout, "worktree", "add", "--quiet", "--detach", str(tree), commit)
    found, changed = git(tree, "rev-parse", "HEAD"), git(tree, "status", "--porcelain")
    if found != commit or changed:
        raise SystemExit(f"{tree} must be the commit {commit} without changes, got {found} {changed}; remove it")
    if not (tree / ".venv/.lab").exists():
        subprocess.run(["make", "-C", str(tree), ".venv/.lab"], check=True)
    return tree


def make_runs(study: str, data: str, ends: float, checkout: Path) -> int:
    """Make the runs of a study that its folder in `checkout` does not hold, until the time ends. Returns a status."""
    from residua.errors import InputError, RunError
    from residua.lab.study.definition import load_study
    from residua.lab.study.engine import run_study

    os.nice(19)
    file = HERE / f"{study}.yaml"
    file = file if file.exists() else Path(study)
    out = checkout / "resbench/records" / file.stem
    try:
        run_study(load_study(str(file)), out, data=data, costs=False, executor=until(ends, out))
    except (TimeoutError, KeyboardInterrupt) as reason:
        print(reason, file=sys.stderr)
        return 0 if isinstance(reason, TimeoutError) else 130
    except (InputError, RunError) as error:
        print(f"runs: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def until(ends: float, out: Path) -> Callable[[Any], None]:
    """Return what makes the jobs of a study, see `run_jobs`; it raises TimeoutError before one that would not end."""
    from residua.lab.jobs.pool import Work, threads

    def execute(work: Work) -> None:
        with threads(1):
            while job := work.next():
                (run,) = job.arguments
                needed, left = seconds(run, out.parent), ends - time.monotonic()
                if needed is not None and needed > left:
                    raise TimeoutError(f"runs: {job.name} takes {needed / 60:.0f} minutes, {left / 60:.0f} are left")
                expected = "an unknown time" if needed is None else f"{needed / 60:.0f} minutes"
                print(f"runs: {job.name}, about {expected}", file=sys.stderr)
                place, told = work.records.place(job.key), job
                record = job.function(run, place=place, report=lambda step, job=told: work.update(job, step))
                work.finished(job, record)
                rate = run.config.train.lr
                commit(out, f"Record {run.scheme} of {out.name}: rate {rate}, seed {run.config.train.seed}")

    return execute


def seconds(run: Any, folder: Path) -> float | None:
    """Return how long a run takes here, from the records of all studies; None if no run of its size was made here."""
    from residua.lab.study.verify import circumstances_here

    here, schemes, sizes = circumstances_here(run.config.train.device)["device"], [], []
    for path in sorted(folder.glob("*/records.jsonl")):
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            made = (record.get("facts") or {}).get("device")
            if record["size"] == run.size and made == here and record.get("seconds"):
                sizes.append(record["seconds"] / record["steps"])
                if record["scheme"] == run.scheme:
                    schemes.append(sizes[-1])
    slowest = max(schemes or sizes, default=None)
    return None if slowest is None else slowest * run.config.train.steps


def commit(out: Path, subject: str) -> None:
    """Commit what a study's folder holds and nothing else; say so if git cannot, as the next commit has it too."""
    paths = [str(out / name) for name in ("study.json", "settings.json", "records.jsonl")]
    try:
        git(out, "add", "--", *paths)
        git(out, "commit", "--quiet", "-m", subject[:72], "--", *paths)
    except subprocess.CalledProcessError as error:
        print(f"runs: git could not commit the record: {error.stderr.strip()}", file=sys.stderr)


def git(folder: Path, *arguments: str) -> str:
    result = subprocess.run(["git", "-C", str(folder), *arguments], check=True, capture_output=True, text=True)
    return result.stdout.strip()


if __name__ == "__main__":
    raise SystemExit(main())
