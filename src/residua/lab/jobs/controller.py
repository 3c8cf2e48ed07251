"""Query the cluster and this user's jobs with Slurm's commands. Only sacct needs Slurm's accounting."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from residua.errors import first_line
from residua.lab.records.progress import say_once

SLURM_COMMANDS = ("srun", "sbatch", "scancel")
"""The commands of Slurm that this package needs. squeue and scontrol are optional: some clusters do not offer them."""
AWAY = (
    *("unable to contact slurm controller", "socket timed out", "connection refused", "connection timed out"),
    *("communication connection failure", "zero bytes were transmitted", "temporarily un", "in standby mode"),
)
"""Parts of messages of temporary errors: the controller is unreachable, restarting or busy."""
WAITS_OR_RUNS = ("PENDING", "CONFIGURING", "RUNNING", "SUSPENDED")
AT_ONCE = 500
"""The largest number of jobs in one command line."""


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue: its state, the reason for its waiting, and its script."""

    state: str
    reason: str = ""
    script: str = ""


def is_away(error: Exception | str) -> bool:
    """Return whether an error of a command is temporary, because the controller does not answer."""
    return any(words in str(error).lower() for words in AWAY)


def queue() -> dict[str, QueuedJob] | None:
    """Return this user's jobs by number; None without squeue.

    Jobs that ended a few minutes ago are included (Slurm's MinJobAge).

    Raises:
        OSError, RuntimeError: Slurm does not answer.
    """
    if _lacks("squeue", "the end of a job is seen only in its files, so a killed or cancelled job is waited for"):
        return None
    options = ["--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%i|%T|%r|%o"]
    rows = (line.strip().split("|", 3) for line in _answer("squeue", *options).splitlines())
    return {row[0]: QueuedJob(*row[1:]) for row in rows if len(row) > 1}


def state_in_accounts(number: str) -> str | None:
    """Return the state of a job that left the queue, from sacct. If sacct fails, tell the user and return None."""
    try:
        states = _answer("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={number}")
    except (OSError, RuntimeError) as error:
        say_once(f"sacct does not answer ({first_line(error)}); the ends of jobs are seen in their files and in squeue")
        return None
    return next(iter(states.split("\n")), "").strip() or None


def settings(*keys: str) -> list[str]:
    """Return settings of the cluster, such as ClusterName; "" for a setting that Slurm does not report.

    Raises:
        OSError, RuntimeError: Slurm does not answer.
    """
    lacks = _lacks("scontrol", "the name of the cluster is unknown, and a job array has 1000 jobs at most")
    found = {} if lacks else _shown("config")
    return [found.get(key, [""])[0] for key in keys]


def prints_into(folder: Path, number: str) -> bool:
    """Return whether a job is in the queue and its output goes into `folder`.

    Without scontrol, the folder of the job's script is checked instead.

    Raises:
        OSError, RuntimeError: Slurm does not answer.
    """
    if shutil.which("scontrol") is None:
        return number in unknown_jobs(folder, ())
    try:
        outputs = _shown("job", number).get("StdOut", [])
    except RuntimeError as error:
        if "Invalid job id" in str(error):  # it ended minutes ago
            return False
        raise
    return any(_is_in(path, folder) for path in outputs)


def unknown_jobs(folder: Path, known: Iterable[str]) -> list[str]:
    """Return the numbers of jobs and job arrays whose script is in `folder` and which are not among `known`.

    Raises:
        OSError, RuntimeError: Slurm does not answer.
    """
    known = set(known)
    scripts = {
        number.partition("_")[0]: entry.script
        for number, entry in (queue() or {}).items()
        if entry.state in WAITS_OR_RUNS
    }
    return [number for number, script in scripts.items() if number not in known and _is_in(script, folder)]


def cancel(numbers: Sequence[str]) -> dict[str, Exception]:
    """Cancel jobs. Return the errors for jobs that could not be cancelled, by number."""
    failures: dict[str, Exception] = {}
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        try:
            _answer("scancel", *some)
        except (OSError, RuntimeError) as error:
            if len(some) == 1 or is_away(error):
                failures |= dict.fromkeys(some, error)
            else:  # one ended job fails the command, so cancel each separately
                for number in some:
                    failures |= cancel([number])
    return failures


def _lacks(command: str, so: str) -> bool:
    """Return whether this machine lacks a command; tell the user once, with the consequence `so`."""
    if shutil.which(command) is not None:
        return False
    say_once(f"no {command} on this machine: {so}")
    return True


def _is_in(path: str, folder: Path) -> bool:
    return os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder)


def _shown(kind: str, *names: str) -> dict[str, list[str]]:
    """Return the output of `scontrol show`: all values of each key. Raises OSError or RuntimeError if it fails."""
    values: dict[str, list[str]] = {}
    for line in _answer("scontrol", "show", kind, *names).splitlines():
        key, _, value = line.strip().partition("=")
        values.setdefault(key.strip(), []).append(value.strip())
    return values


def _answer(*command: str) -> str:
    """Return the output of a command. Raises OSError or RuntimeError if it fails."""
    answer = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip() or f"{command[0]} ended with status {answer.returncode}")
    return answer.stdout
