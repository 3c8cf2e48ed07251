"""Run jobs on a Slurm cluster, through submitit: an executor in place of the local processes of `pool`.

All machines must share the folder of the runs, which then also holds

    slurm/jobs.jsonl    the number of every job in the queue, and the name of its cluster
    slurm/NAME.json     the record of a run, from its job to the command
    slurm/...           submitit's files: the scripts that Slurm starts, and the output of the jobs
"""

import io
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from residua.errors import (
    InputError,
    RunError,
    did_you_mean,
    extra,
    first_line,
    fits,
    installing,
    require,
    shown,
    words,
)
from residua.files.durable import unlinked, write_text
from residua.files.reading import readings
from residua.lab.jobs import controller
from residua.lab.jobs.controller import QueuedJob
from residua.lab.jobs.pool import Job, Work, file_name, threads
from residua.lab.records.folder import read_object
from residua.lab.records.jsonlines import JsonLines, finite
from residua.lab.records.progress import say, say_once

Reply = TypeVar("Reply")

POLL_SECONDS = 10.0
"""The time between two checks of the files of the jobs."""
QUEUE_SECONDS = 30.0
"""The time between two queries of Slurm's queue, which put load on its controller."""
SETTLE_SECONDS = 60.0
"""The time after which an ended job without a record counts as killed; network file systems show files late."""
AWAY_SECONDS = 900.0
"""How long submissions are repeated while Slurm's controller does not answer."""
KILLS = 3
"""A run counts as failed after this many killed jobs."""
LIMITS = ("ClusterName", "MaxArraySize")
GONE = "NOT IN THE QUEUE"
ENDED = (
    *("COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL"),
    *("DEADLINE", "FINISHED", "INTERRUPTED", "NO PROCESS", GONE),
)
"""Prefixes of the states of ended jobs: Slurm's states, then those of submitit's local processes."""
INTERNAL = {"return", "command", "folder", "map_count", "nodes", "ntasks_per_node", "num_gpus", "srun_args"}
"""Parameters that submitit sets itself, and those that would start several processes for a run."""
WARNING_SECONDS = 90
"""How long before its time limit a job gets the signal to save its state; the default of signal_delay_s."""
EARLY_SECONDS = 60
"""How much earlier than requested Slurm may send this signal."""
LEAST_SECONDS = 30
"""How long a job must be able to work before the signal."""


NUMBER = re.compile(r"[0-9]{1,20}(_[0-9]{1,20})?")
"""The number of a job, or of a job in an array. A folder may be forged, so nothing else from it is passed to Slurm."""


@dataclass(frozen=True)
class Slurm:
    """An executor for `run_jobs`: every run is a Slurm job. If a job is preempted, killed or reaches its time limit,
    another job continues from its saved state.

    If this process is killed, its jobs continue, and the next call of the command waits for them. If this process
    ends in another way, it cancels its jobs.

    options  options of sbatch, by submitit's names; `time`, in minutes, is required
    most     the largest number of jobs in the queue; None for all
    cluster  "local" for processes of this machine in place of jobs
    """

    options: Mapping[str, Any]
    most: int | None = None
    cluster: str = "slurm"

    @classmethod
    def of(cls, texts: Sequence[str], most: int | None) -> "Slurm":
        """Return the executor for options of sbatch, given as texts NAME=VALUE.

        Raises:
            InputError: an option is unknown or has the wrong type, or this machine has no Slurm.
            ModuleNotFoundError: submitit is not installed.
        """
        with extra("slurm"):
            submitit = _submitit()
            from submitit.slurm.slurm import _make_sbatch_string
        tested = f"1.5 ({installing('slurm')})"
        require(submitit.__version__.startswith("1.5."), "submitit", tested, submitit.__version__)
        kinds = {name: kind for name, kind in get_type_hints(_make_sbatch_string).items() if name not in INTERNAL}
        options: dict[str, Any] = {}
        for name, _, text in (text.partition("=") for text in texts):
            if name not in kinds:
                raise InputError(f"--slurm has no option {shown(name)}{did_you_mean(name, kinds)}")
            values = [value for value in readings(text, "--slurm") if fits(value, kinds[name])]
            require(bool(values), f"--slurm {name}", words(kinds[name]), text)
            options[name] = values[0]
        require("time" in options, "--slurm", "at least time=MINUTES, the limit of a job", texts)
        _require_time_to_work(options["time"], options.get("signal_delay_s", WARNING_SECONDS))
        for name in controller.SLURM_COMMANDS:
            if shutil.which(name) is None:
                raise InputError(f"--executor slurm must run on a machine of the cluster, found no {name} here")
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


def _submitit() -> Any:
    """Return submitit, with its messages on standard output silenced, because standard output is for results."""
    import submitit

    logger = logging.getLogger("submitit")
    logger.handlers = [handler for handler in logger.handlers if handler.get_name() != "submitit_out"]
    return submitit


def _require_time_to_work(minutes: int, warning: int) -> None:
    """Raise InputError for a time limit at which jobs would get the signal as soon as they begin. 0 means no limit."""
    least = -(-(warning + EARLY_SECONDS + LEAST_SECONDS) // 60)
    need = (
        f"0 (no limit) or at least {least} minutes, as Slurm warns a job {warning} to {warning + EARLY_SECONDS} s "
        "before its limit"
    )
    require(minutes == 0 or minutes >= least, "--slurm time", need, minutes)


@dataclass
class _Run:
    """A run, its job if any, and the time when the job seemed to have ended. The job writes the record to `path`."""

    job: Job
    path: Path
    handle: Any = None
    state: str = ""
    kills: int = 0
    ended: float | None = None


class _Queue:
    """The jobs of `work` in Slurm's queue."""

    def __init__(self, settings: Slurm, work: Work, folder: Path, log: JsonLines):
        submitit = _submitit()
        self._work, self._folder, self._log, self._settings = work, folder, log, settings
        self._slurm = settings.cluster == "slurm"
        self._executor = submitit.AutoExecutor(folder, settings.cluster, slurm_max_num_timeout=1000)
        options = {f"slurm_{name}": value for name, value in settings.options.items() if name != "time"}
        self._executor.update_parameters(name="residua", timeout_min=settings.options["time"], **options)
        self._handle = submitit.SlurmJob if self._slurm else submitit.LocalJob
        self._cluster, self._array_size = settings.cluster, 1000
        if self._slurm:
            self._cluster, size = _while_away("the cluster's limits are needed", lambda: controller.settings(*LIMITS))
            self._array_size = max(int(size or 1000), 1)
        self._earlier = self._jobs_of_earlier_commands()
        self._runs: list[_Run] = []
        self._entries: dict[str, QueuedJob] | None = None
        self._asked = self._tried = -float("inf")
        self._away_since: float | None = None
        self._silence = self._status = ""
        self._unsure = True

    def begin(self) -> bool:
        """Submit the runs that may begin and have no job from an earlier call. Return whether any run is unfinished."""
        most = self._settings.most
        while (most is None or len(self._runs) < most) and (job := self._work.next()):
            run = _Run(job, unlinked(self._folder / f"{file_name(job.name)}.json"))
            number, ours = self._earlier.get(job.name, (None, False))
            if number is None:
                run.path.unlink(missing_ok=True)
            elif ours:
                run.handle = self._handle(self._folder, number)
            self._runs.append(run)
        # A run with a record needs no job, because an earlier job finished it.
        self._submit([run for run in self._runs if run.handle is None and not run.path.is_file()])
        self._show()
        return bool(self._runs)

    def look(self) -> None:
        """Collect the records of finished runs, and count killed jobs.

        Raises RunError for a run that failed, was cancelled, or was killed too often.
        """
        self._ask()
        for run in list(self._runs):
            if not self._collected(run) and run.handle is not None and self._has_ended(run):
                self._count_kill(run)

    def _collected(self, run: _Run) -> bool:
        """Record the result of a run if it has finished. Return whether it has."""
        if not run.path.is_file():
            return False
        self._work.finished(run.job, read_object(run.path))
        self._forget(run)
        run.path.unlink()
        return True

    def cancel(self) -> None:
        """Cancel the jobs that have not finished.

        A job that cannot be cancelled stays in the log; the next call of the command finds it.
        """
        for run in list(self._runs):
            with suppress(InputError, RunError):  # `look` raises them, and this is the end already
                self._collected(run)
        runs = {run.handle.job_id: run for run in self._runs if run.handle is not None}
        failures = controller.cancel(list(runs)) if self._slurm else {}
        for number, run in runs.items():
            if not self._slurm:
                run.handle.cancel()
            if number not in failures:
                self._forget(run)
        with suppress(OSError, RuntimeError):
            self._cancel_unknown()
        if failures:
            why = first_line(next(iter(failures.values())))
            say(
                f"jobs that could not be cancelled: {_spans(failures)} ({why}); call the same command again to wait "
                "for them"
            )

    def _jobs_of_earlier_commands(self) -> dict[str, tuple[str, bool]]:
        """Return the number of each run's job, and whether it is in this cluster's queue and belongs to this folder.

        The folder may be a copy of another folder, or come from another cluster.

        Raises RunError if Slurm does not answer.
        """
        jobs = {run: (number, cluster) for run, (number, cluster) in _earlier_jobs(self._log).items() if number}
        arrays = {(number.partition("_")[0], cluster) for number, cluster in jobs.values()}
        ours = {array: self._is_ours(*array) for array in arrays}
        self._known = {str(row["job"]).partition("_")[0] for row in self._log.rows}
        return {run: (number, ours[number.partition("_")[0], cluster]) for run, (number, cluster) in jobs.items()}

    def _is_ours(self, array: str, cluster: str | None) -> bool:
        if not self._slurm:
            return True
        need = f"the job {array} of an earlier command may still run"
        ours = cluster in (None, self._cluster) and _while_away(
            need, lambda: controller.prints_into(self._folder, array)
        )
        if not ours:
            say_once(f"{self._folder}: Slurm does not show the job {array} as one of this folder; its runs begin again")
        return ours

    def _submit(self, runs: list[_Run]) -> None:
        """Submit jobs for runs, in the largest arrays that the cluster allows.

        While Slurm's controller does not answer, the runs stay without a job. Raises RunError if Slurm refuses the
        jobs, or has not answered for `AWAY_SECONDS`.
        """
        for start in range(0, len(runs), self._array_size):
            some = runs[start : start + self._array_size]
            if self._away_since is not None and time.monotonic() < self._tried + QUEUE_SECONDS:
                return
            self._tried = time.monotonic()
            try:
                self._cancel_unknown()
                handles = self._submitted(some)
            except (RuntimeError, OSError) as error:  # from sbatch and squeue
                self._refused(error)
                return
            self._away_since, self._asked = None, -float("inf")
            for run, handle in zip(some, handles):
                run.handle, run.state, run.ended = handle, "", None
                self._known.add(handle.job_id.partition("_")[0])
                self._log.write({"run": run.job.name, "job": handle.job_id, "cluster": self._cluster})
            self._log.sync()
            self._unsure = False

    def _submitted(self, runs: list[_Run]) -> list[Any]:
        """Submit jobs for runs and return them. Errors contain sbatch's messages, so these are not printed."""
        tasks = [_Task(run.job, self._work.records.place(run.job.key), run.path) for run in runs]
        with redirect_stderr(io.StringIO()), self._executor.batch():
            return [self._executor.submit(task) for task in tasks]

    def _cancel_unknown(self) -> None:
        """Cancel jobs of this folder that are not in the log.

        sbatch may fail after Slurm has accepted a job, and a command may be stopped before it has written the number.
        Such a job does not find its task, because submitit gives the file of the task its final name only afterwards.
        """
        if self._slurm and self._unsure:
            controller.cancel(controller.unknown_jobs(self._folder, self._known))
            for path in self._folder.glob("[0-9a-f]" * 32 + ".pkl"):  # submitit renames them after submission
                path.unlink()
        self._unsure = True

    def _refused(self, error: Exception) -> None:
        """Record a failed submission. Raises RunError if Slurm refused it or has not answered for `AWAY_SECONDS`."""
        if not controller.is_away(error):
            raise RunError(f"Slurm refused a job: {first_line(error)}") from error
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now > self._away_since + AWAY_SECONDS:
            raise RunError(
                f"Slurm has taken no job for {AWAY_SECONDS / 60:.0f} minutes: {first_line(error)}"
            ) from error
        self._silence = first_line(error)

    def _ask(self) -> None:
        """Query Slurm's queue, unless this was done recently and no job is about to count as ended."""
        now = time.monotonic()
        due = any(run.ended is not None and now > run.ended + SETTLE_SECONDS for run in self._runs)
        if not due and now < self._asked + QUEUE_SECONDS:
            return
        self._asked, self._silence = now, ""
        if not self._slurm:
            self._entries = {
                run.handle.job_id: QueuedJob(run.handle.state) for run in self._runs if run.handle is not None
            }
            return
        try:
            self._entries = controller.queue()
        except (OSError, RuntimeError) as error:
            self._entries, self._silence = None, first_line(error)

    def _has_ended(self, run: _Run) -> bool:
        """Return whether a run's job ended without a record at least `SETTLE_SECONDS` ago, and was not requeued."""
        now = time.monotonic()
        if self._entries is not None:
            entry = self._entries.get(run.handle.job_id)
            run.state = entry.state if entry else run.state if run.state.startswith(ENDED) else GONE
            over = run.state.startswith(ENDED) or (run.state == "COMPLETING" and _failed(run))
        else:
            over = _failed(run)
        if not over:
            run.ended = None
        elif run.ended is None:
            run.ended = now
        return run.ended is not None and now > run.ended + SETTLE_SECONDS

    def _count_kill(self, run: _Run) -> None:
        """Allow another job for a run. Raises RunError if the run failed, was cancelled, or was killed too often."""
        run.kills += 1
        state = run.state
        if state == GONE:
            state = controller.state_in_accounts(run.handle.job_id) or GONE
        if _failed(run) and (state == GONE or not state.startswith(ENDED)):
            state = "FAILED"
        if _failed(run) or state.startswith("CANCELLED") or run.kills == KILLS:
            raise RunError(f"the job of {run.job.name} ended as {state}; see {run.handle.paths.stderr}")
        run.handle = run.ended = None

    def _forget(self, run: _Run) -> None:
        self._runs.remove(run)
        self._log.write({"run": run.job.name, "job": None})

    def _show(self) -> None:
        """Show the numbers of the jobs by state, if anything has changed."""
        groups: dict[str, list[str]] = {}
        for run in self._runs:
            groups.setdefault(self._standing(run), []).append(run.handle.job_id if run.handle is not None else "")
        parts = [f"{len(numbers)} {name} {_spans(numbers)}".strip() for name, numbers in sorted(groups.items())]
        parts += [f"Slurm does not answer: {self._silence}"] if self._silence else []
        status = "; ".join(parts)
        if status and status != self._status:
            self._status = status
            self._work.note(status)

    def _standing(self, run: _Run) -> str:
        """Describe the state of a run for the status line."""
        entry = (self._entries or {}).get(run.handle.job_id) if run.handle is not None else None
        if run.handle is None:
            return "not submitted"
        if entry is None:
            return "submitted"
        if entry.state != "PENDING":
            return entry.state.lower()
        return "waiting" if entry.reason in ("", "None") else f"waiting ({entry.reason})"


def _failed(run: _Run) -> bool:
    """Return whether a job has left submitit's result file; if there is no record, this file holds a traceback."""
    return bool(run.handle.paths.result_pickle.exists())


def _spans(numbers: Iterable[str]) -> str:
    """Return the numbers of jobs in short form: 12_0-3, 12_7, 15."""
    spans: list[list[str]] = []
    for array, index in sorted({(int(a), int(i) if i else -1) for a, _, i in (n.partition("_") for n in numbers if n)}):
        if spans and spans[-1][0] == str(array) and int(spans[-1][2]) == index - 1 >= 0:
            spans[-1][2] = str(index)
        else:
            spans.append([str(array), str(index), str(index)])
    texts = [a if i == "-1" else f"{a}_{i}" if i == j else f"{a}_{i}-{j}" for a, i, j in spans]
    return ", ".join(texts[:6]) + (f", and {len(texts) - 6} more" if len(texts) > 6 else "")


def _while_away(need: str, ask: Callable[[], Reply]) -> Reply:
    """Return Slurm's answer; wait for minutes if the controller does not respond. Raises RunError without an answer."""
    end = time.monotonic() + AWAY_SECONDS
    while True:
        try:
            return ask()
        except (OSError, RuntimeError) as error:
            said = f"{need}, but Slurm does not tell: {first_line(error)}"
            if not controller.is_away(error) or time.monotonic() > end:
                raise RunError(f"{said}; try again when it answers") from error
            say_once(f"{said}; waiting")
        time.sleep(POLL_SECONDS)


def _earlier_jobs(log: JsonLines) -> dict[str, tuple[str | None, str | None]]:
    """Return for each run the number of its last job (None if it ended) and the cluster (None if unknown).

    Raises:
        InputError: a row is invalid, for example with an option of Slurm in place of a number.
    """
    jobs: dict[str, tuple[str | None, str | None]] = {}
    for row in log.rows:
        run, number, cluster = row.get("run"), row.get("job"), row.get("cluster")
        known = number is None or (isinstance(number, str) and NUMBER.fullmatch(number) is not None)
        whole = isinstance(run, str) and "job" in row and known and isinstance(cluster, str | None)
        require(whole, str(log.path), 'a run and the number of its job in each row, such as "42_0"', row)
        jobs[str(run)] = number, cluster
    return jobs


@dataclass(frozen=True)
class _Task:
    """The work of a job: a run and the file for its record. Errors go into submitit's log.

    At the signal with which Slurm announces the end of a job, training saves its state, then submitit requeues the job.
    """

    job: Job
    place: Path | None
    path: Path

    def __call__(self) -> None:
        with threads(1):
            record = self.job.function(*self.job.arguments, place=self.place, report=lambda step: None)
        write_text(self.path, json.dumps(finite(record)))

    def checkpoint(self) -> Any:
        """Return the task to requeue after a preemption or a time limit: the same run, which continues."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)
