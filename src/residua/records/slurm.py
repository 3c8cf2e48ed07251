"""Make runs on a cluster that Slurm manages, through submitit: the executor beside the processes of `jobs`.

The machines share the folder of the runs, which then also holds

    slurm/jobs.jsonl     the number of every job in the queue
    slurm/NAME.jsonl     what the job of a run reports: its finished steps, then its record or its error
    slurm/...            submitit's files: what Slurm starts, and what the jobs print
"""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residua.errors import InputError, RunError, first_line
from residua.records import jsonlines
from residua.records.durable import unlinked
from residua.records.jobs import Job, Work, file_name
from residua.records.jsonlines import JsonLines
from residua.records.threads import threads

POLL_SECONDS = 10.0
"""Between two looks at the jobs, and between two reports of their steps."""
SETTLE_SECONDS = 60.0
"""A network file system may show a record so long after its job has ended. Without one the job was killed."""
KILLS = 3
"""A run has failed that was killed so many times at the same step."""
ENDED = (
    *("COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "CANCELLED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL"),
    *("DEADLINE", "FINISHED", "INTERRUPTED", "NO PROCESS"),
)
"""How the states begin of jobs that have ended: those of Slurm, then those of submitit's processes."""


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
    """A run and its job: the last step that it reported, the step of every kill, and when the job seemed to end."""

    job: Job
    path: Path
    handle: Any = None
    step: int = 0
    kills: list[int] = field(default_factory=list)
    ended: float | None = None


class _Queue:
    """The jobs that Slurm has of `work`."""

    def __init__(self, settings: Slurm, work: Work, folder: Path, log: JsonLines):
        import submitit

        self._work, self._folder, self._log, self._most = work, folder, log, settings.most
        self._executor = submitit.AutoExecutor(folder, settings.cluster, slurm_max_num_timeout=1000)
        options = {f"slurm_{name}": value for name, value in settings.options.items() if name != "time"}
        self._executor.update_parameters(name="residua", timeout_min=settings.options["time"], **options)
        self._handle = submitit.SlurmJob if settings.cluster == "slurm" else submitit.LocalJob
        self._earlier = {row["run"]: row["job"] for row in log.rows}
        self._runs: list[_Run] = []

    def begin(self) -> bool:
        """Submit the runs that may begin, and take up earlier jobs. Return whether any job is in the queue."""
        new: list[_Run] = []
        while (self._most is None or len(self._runs) + len(new) < self._most) and (job := self._work.next()):
            run = _Run(job, unlinked(self._folder / f"{file_name(job.name)}.jsonl"))
            if number := self._earlier.get(job.name):
                run.handle = self._handle(self._folder, number)
                self._runs.append(run)
            else:
                new.append(run)
        if new:
            self._submit(new)
            self._runs += new
        return bool(self._runs)

    def look(self) -> None:
        """Take the records of finished runs, and submit killed ones again. Raises InputError or RunError if a run did,
        and RunError for a cancelled job and for a run that was killed too often."""
        for run in list(self._runs):
            last = (jsonlines.read(run.path) or [{}])[-1]
            if "record" in last:
                self._work.finished(run.job, last["record"])
                self._forget(run)
                run.path.unlink()
                continue
            if "error" in last:
                raise (InputError if last["input"] else RunError)(last["error"])
            if last.get("step", run.step) != run.step:
                run.step = last["step"]
                self._work.update(run.job, run.step)
            if self._was_killed(run):
                run.kills.append(run.step)
                state, paths = run.handle.state, run.handle.paths
                ended = state.startswith("CANCELLED") or paths.result_pickle.exists()  # submitit's, with a traceback
                if ended or run.kills[-KILLS:] == KILLS * [run.step]:
                    raise RunError(f"the job of {run.job.name} ended as {state}; see {paths.stderr}")
                self._submit([run])

    def cancel(self) -> None:
        for run in list(self._runs):
            run.handle.cancel(check=False)
            self._forget(run)

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
            self._log.write({"run": run.job.name, "job": run.handle.job_id})
        self._log.sync()

    def _was_killed(self, run: _Run) -> bool:
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


@dataclass(frozen=True)
class _Task:
    """What a job does: a run, whose steps, record or error it writes to a file."""

    job: Job
    place: Path | None
    path: Path

    def __call__(self) -> None:
        with _stopped_in_order(), threads(1), JsonLines(self.path) as lines:
            said = -POLL_SECONDS

            def report(step: int) -> None:
                nonlocal said
                if time.monotonic() - said >= POLL_SECONDS:
                    said = time.monotonic()
                    lines.write({"step": step})
                    lines.sync()

            row: Mapping[str, Any]
            try:
                row = {"record": self.job.function(*self.job.arguments, place=self.place, report=report)}
            except (InputError, RunError) as error:
                row = {"error": str(error), "input": isinstance(error, InputError)}
            except Exception as error:
                lines.write({"error": f"{self.job.name} failed: {error!r}", "input": False})
                raise  # into submitit's log
            lines.write(row)
            lines.sync()

    def checkpoint(self) -> Any:
        """Return what Slurm starts again after a preemption or a time limit: the same run, which goes on."""
        import submitit

        return submitit.helpers.DelayedSubmission(self)


@contextmanager
def _stopped_in_order() -> Iterator[None]:
    """Interrupt a run at the signal with which Slurm announces the end of a job: training saves its state. Then let
    submitit, which waits for that signal, requeue the job."""
    import submitit

    number = getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}")
    requeue: Any = signal.getsignal(number)
    announced = []

    def interrupt(*_: Any) -> None:
        announced.append(number)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if not announced:
            raise
        requeue(number, None)
    finally:
        signal.signal(number, requeue)
