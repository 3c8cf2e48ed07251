"""Make runs on a cluster that Slurm manages, through submitit: the executor beside the processes of `jobs`.

The machines share the folder of the runs, which then also holds

    slurm/jobs.jsonl    the number of every job in the queue, and the name of its cluster
    slurm/NAME.json     the record of a run, from its job to the command
    slurm/...           submitit's files: what Slurm starts, and what the jobs print
"""

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from residua.errors import InputError, RunError, did_you_mean, extra, first_line, fits, require, shown, words
from residua.files.durable import unlinked, write_text
from residua.files.reading import parse_yaml
from residua.lab.jobs.pool import Job, Work, file_name, threads
from residua.lab.records.folder import read_object
from residua.lab.records.jsonlines import JsonLines, finite
from residua.lab.records.progress import say, say_once

POLL_SECONDS = 10.0
"""Between two looks at the jobs."""
SETTLE_SECONDS = 60.0
"""A network file system may show a record so long after its job has ended. Without one the job was killed."""
KILLS = 3
"""A run has failed whose jobs were killed so many times."""
ENDED = (
    *("COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL"),
    *("DEADLINE", "FINISHED", "INTERRUPTED", "NO PROCESS"),
)
"""How the states begin of jobs that have ended: those of Slurm, then those of submitit's processes."""
INTERNAL = {"return", "command", "folder", "map_count", "nodes", "ntasks_per_node", "num_gpus", "srun_args"}
"""Parameters of submitit that it fills in itself, and those that would make several processes of a run."""


NUMBER = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")
"""The number of a job, or of one in an array of jobs. A folder may come from anybody: nothing else reaches Slurm."""


@dataclass(frozen=True)
class Slurm:
    """An executor for `run_jobs`: every run is a job of Slurm, and goes on from its state if the job is preempted,
    killed or at its time limit. If this process is killed, its jobs go on, and the same command takes them up; if it
    ends otherwise, it cancels them.

    options  of sbatch, by submitit's names; `time`, in minutes, must be among them
    most     jobs in the queue at the same time; None for all
    cluster  "local" for processes of this machine in place of jobs
    """

    options: Mapping[str, Any]
    most: int | None = None
    cluster: str = "slurm"

    @classmethod
    def of(cls, texts: Sequence[str], most: int | None) -> "Slurm":
        """Return the executor for options of sbatch as texts, NAME=VALUE.

        Raises:
            InputError: an option is unknown or of another type, or this machine is not of a cluster.
            ModuleNotFoundError: submitit is not installed.
        """
        with extra("slurm"):
            import submitit
            from submitit.slurm.slurm import _make_sbatch_string
        require(submitit.__version__.startswith("1.5."), "submitit", "1.5 (residua[slurm])", submitit.__version__)
        if submitit.SlurmExecutor.affinity() < 0:
            raise InputError("--executor slurm must run on a machine of the cluster, found no srun here")
        kinds = {name: kind for name, kind in get_type_hints(_make_sbatch_string).items() if name not in INTERNAL}
        options: dict[str, Any] = {}
        for name, _, text in (text.partition("=") for text in texts):
            if name not in kinds:
                raise InputError(f"--slurm has no option {shown(name)}{did_you_mean(name, kinds)}")
            values = [value for value in (parse_yaml(text, "--slurm"), text) if fits(value, kinds[name])]
            require(bool(values), f"--slurm {name}", words(kinds[name]), text)
            options[name] = values[0]
        require("time" in options, "--slurm", "at least time=MINUTES, the limit of a job", texts)
        return cls(options, most)

    def __call__(self, work: Work) -> None:
        folder = unlinked(work.records.path.absolute().parent / "slurm")
        folder.mkdir(exist_ok=True)
        with JsonLines(folder / "jobs.jsonl") as log:
            queue = _Queue(self, work, folder, log)
            try:
                while queue.begin():
                    time.sleep(POLL_SECONDS)
                    queue.look()
            finally:
                queue.cancel()


@dataclass
class _Run:
    """A run, its job, and when the job seemed to end. The job writes the record to `path`."""

    job: Job
    path: Path
    handle: Any = None
    kills: int = 0
    ended: float | None = None


class _Queue:
    """The jobs that Slurm has of `work`."""

    def __init__(self, settings: Slurm, work: Work, folder: Path, log: JsonLines):
        import submitit

        self._work, self._folder, self._log, self._settings = work, folder, log, settings
        self._executor = submitit.AutoExecutor(folder, settings.cluster, slurm_max_num_timeout=1000)
        options = {f"slurm_{name}": value for name, value in settings.options.items() if name != "time"}
        self._executor.update_parameters(name="residua", timeout_min=settings.options["time"], **options)
        self._handle = submitit.SlurmJob if settings.cluster == "slurm" else submitit.LocalJob
        self._cluster = _cluster_name() if settings.cluster == "slurm" else settings.cluster
        self._earlier = _earlier_jobs(log)
        self._ours: dict[str, bool] = {}
        self._runs: list[_Run] = []

    def begin(self) -> bool:
        """Submit the runs that may begin, and take up earlier jobs. Return whether any job is in the queue."""
        new: list[_Run] = []
        most = self._settings.most
        while (most is None or len(self._runs) + len(new) < most) and (job := self._work.next()):
            run = _Run(job, unlinked(self._folder / f"{file_name(job.name)}.json"))
            number, cluster = self._earlier.get(job.name, (None, None))
            if number is not None and self._is_ours(number, cluster):
                run.handle = self._handle(self._folder, number)
            taken_up = run.handle is not None or (number is not None and run.path.is_file())
            (self._runs if taken_up else new).append(run)
        if new:
            self._submit(new)
            self._runs += new
        return bool(self._runs)

    def look(self) -> None:
        """Take the records of finished runs, and submit killed ones again. Raises RunError for a run that failed, was
        cancelled, or was killed too often."""
        for run in list(self._runs):
            if run.path.is_file():
                self._work.finished(run.job, read_object(run.path))
                self._forget(run)
                run.path.unlink()
            elif self._has_ended(run):
                run.kills += 1
                state, paths = run.handle.state, run.handle.paths
                failed = paths.result_pickle.exists()  # submitit's, with a traceback
                if failed or state.startswith("CANCELLED") or run.kills == KILLS:
                    raise RunError(f"the job of {run.job.name} ended as {state}; see {paths.stderr}")
                self._submit([run])

    def cancel(self) -> None:
        """Cancel the jobs. One that Slurm does not cancel stays in the log, so that the same command takes it up."""
        for run in [run for run in self._runs if run.handle is not None]:
            try:
                run.handle.cancel()
            except (OSError, subprocess.CalledProcessError) as error:
                say(f"the job {run.handle.job_id} of {run.job.name} could not be cancelled: {first_line(error)}")
            else:
                self._forget(run)

    def _is_ours(self, number: str, cluster: str | None) -> bool:
        """Return whether an earlier job is in the queue of this cluster, and one of this folder, which may be a copy of
        another or come from another cluster. Raises RunError if Slurm does not answer."""
        if self._settings.cluster != "slurm":
            return True
        array = number.partition("_")[0]
        if array not in self._ours:
            same_cluster = cluster is None or cluster == self._cluster
            self._ours[array] = same_cluster and _prints_into(self._folder, array)
        if not self._ours[array]:
            say_once(f"{self._folder}: the job {array} is not in the queue, or of another folder; its runs begin again")
        return self._ours[array]

    def _submit(self, runs: list[_Run]) -> None:
        try:
            with self._executor.batch():
                for run in runs:
                    run.path.unlink(missing_ok=True)
                    place = self._work.records.place(run.job.key)
                    run.handle, run.ended = self._executor.submit(_Task(run.job, place, run.path)), None
        except RuntimeError as error:  # of sbatch
            raise RunError(f"Slurm refused a job: {first_line(error)}") from error
        for run in runs:
            self._log.write({"run": run.job.name, "job": run.handle.job_id, "cluster": self._cluster})
        self._log.sync()

    def _has_ended(self, run: _Run) -> bool:
        """Return whether the job of a run without a record ended a while ago, and does not run again."""
        now = time.monotonic()
        if not run.handle.state.startswith(ENDED):
            run.ended = None
        elif run.ended is None:
            run.ended = now
        elif now > run.ended + SETTLE_SECONDS:
            run.handle.watcher.clear()  # submitit asks no more for a state that it takes for the last one
            return run.handle.state.startswith(ENDED)
        return False

    def _forget(self, run: _Run) -> None:
        self._runs.remove(run)
        self._log.write({"run": run.job.name, "job": None})


def _earlier_jobs(log: JsonLines) -> dict[str, tuple[str | None, str | None]]:
    """Return the number of the last job of each run, None for one that ended, and the cluster, None if unknown.

    Raises:
        InputError: a row has something else, such as an option of Slurm in place of a number.
    """
    jobs: dict[str, tuple[str | None, str | None]] = {}
    for row in log.rows:
        run, number, cluster = row.get("run"), row.get("job"), row.get("cluster")
        known = number is None or (isinstance(number, str) and NUMBER.fullmatch(number) is not None)
        whole = isinstance(run, str) and "job" in row and known and isinstance(cluster, str | None)
        require(whole, str(log.path), 'a run and the number of its job in each row, such as "42_0"', row)
        jobs[str(run)] = number, cluster
    return jobs


def _cluster_name() -> str | None:
    """Return the name of this cluster, None where Slurm does not tell it."""
    try:
        return _shown("config", "ClusterName")[0]
    except (OSError, RuntimeError, LookupError):
        return None


def _prints_into(folder: Path, number: str) -> bool:
    """Return whether a job is in the queue, and prints into `folder`. Raises RunError if Slurm does not answer."""
    try:
        outputs = _shown("job", "StdOut", number)
    except (OSError, RuntimeError) as error:
        if "Invalid job id" in str(error):  # it ended minutes ago
            return False
        raise RunError(
            f"the job {number} of an earlier command may still run, but Slurm does not tell: {first_line(error)}; "
            "try again when it answers"
        ) from error
    return any(os.path.realpath(os.path.dirname(path)) == os.path.realpath(folder) for path in outputs)


def _shown(kind: str, key: str, *names: str) -> list[str]:
    """Return the values of a key in what `scontrol show` prints. Raises OSError or RuntimeError if it fails."""
    answer = subprocess.run(["scontrol", "show", kind, *names], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip() or f"scontrol ended with status {answer.returncode}")
    lines = (line.strip().partition("=") for line in answer.stdout.splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]


@dataclass(frozen=True)
class _Task:
    """What a job does: a run, whose record it writes to a file. An error goes into submitit's log.

    At the signal with which Slurm announces the end of a job, submitit requeues it; training saves its state first.
    """

    job: Job
    place: Path | None
    path: Path

    def __call__(self) -> None:
        with threads(1):
            record = self.job.function(*self.job.arguments, place=self.place, report=lambda step: None)
        write_text(self.path, json.dumps(finite(record)))

    def checkpoint(self) -> Any:
        """Return what Slurm starts again after a preemption or a time limit: the same run, which goes on."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)
