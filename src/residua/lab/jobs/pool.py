"""Run many jobs, several at a time. A kill at any moment loses no finished run.

A finished run is one line in a file of records. A run is a pure function of its arguments, so its results do not depend
on the process that computes it or on interruptions.

A folder of runs holds

    settings.json     the settings of all its runs; other settings are refused
    records.jsonl     one line for every finished run
    runs/             the state of unfinished runs
"""

import hashlib
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any

from residua.errors import InputError, RunError, require
from residua.files.durable import remove, remove_partials, unlinked, write_text
from residua.lab.records.folder import hold, read_object, refuse_changes, writable
from residua.lab.records.jsonlines import JsonLines, finite, is_plain
from residua.lab.records.progress import Progress


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run PyTorch with `count` threads on the CPU; None keeps the current number."""
    import torch  # imported here, because a pool of runs begins without torch

    previous = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


Record = dict[str, Any]
Key = Callable[[Record], Hashable]


@dataclass(frozen=True)
class Job:
    """One run: `function(*arguments, place=path, report=callable)` returns its record, of JSON values.

    `place` is a file or folder where an unfinished run may keep its state, or None. `report` is called with the number
    of finished steps; the first call is with the step at which the run begins or resumes. If there are several
    processes, `function` must be at the top level of a module.

    key       identifies the run among the records
    steps     the length of the run
    cost      the cost of one step relative to other jobs, for the order of the runs and the remaining time
    order     jobs with a smaller `order` begin first; among equals, the longest job first
    title     the name in the progress display; empty for the key
    """

    key: str | tuple[Hashable, ...]
    function: Callable[..., Record]
    arguments: tuple[Any, ...]
    steps: int = 1
    cost: float = 1.0
    order: tuple[int, ...] = ()
    title: str = ""

    @property
    def name(self) -> str:
        return " ".join(map(str, self.key)) if isinstance(self.key, tuple) else str(self.key)


def file_name(name: str) -> str:
    """Return a valid file name for `name`; different names give different file names."""
    plain = re.sub(r"^\.|[^A-Za-z0-9_.,=+-]", "_", name)[:100]
    return plain if plain == name and name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


class Records(JsonLines):
    """The finished runs in a file of JSON lines.

    key     returns the key of a record's run, or None for other records; of records with equal keys the last counts
    places  the folder for the state of unfinished runs, or None
    drop    whether to remove a run's state when the run is finished
    """

    def __init__(self, path: str | Path, key: Key, *, places: Path | None = None, drop: bool = True):
        super().__init__(path)
        self._key, self._places, self._drop = key, places, drop
        for row in self.rows:
            require(is_plain(key(row)), f"{self.path}: key", "a text or a number", row.get("key"))
        self.finished = {key(row): row for row in self.rows}
        self.finished.pop(None, None)

    def place(self, key: Hashable) -> Path | None:
        """Return the path for the state of the unfinished run `key`, or None."""
        if self._places is None:
            return None
        return unlinked(self._places / file_name(str(key)))

    def add(self, record: Record) -> None:
        """Write the record of a finished run to disk, then drop the run's state. Raises RunError."""
        record = finite(record)  # as it will be read from the file
        try:
            self.write(record)
            self.sync()
        except OSError as error:
            raise RunError(f"{self.path}: a result could not be written: {error.strerror or error}") from error
        self.finished[self._key(record)] = record
        self.drop_state([self._key(record)])

    def drop_state(self, keys: Iterable[Hashable]) -> None:
        """Remove the state of finished runs, if `drop` is set."""
        for place in map(self.place, keys if self._drop else ()):
            with suppress(OSError):
                if place is not None:
                    remove(place)


@contextmanager
def open_runs(
    folder: str | Path, settings: Mapping[str, Any], *, free: Collection[str] = (), keep: bool = False
) -> Iterator[Records]:
    """Lock a folder of runs with the same `settings`, and yield its records; each record has its key under "key".

    free: the settings that may change from one call to the next. keep: whether to keep the state of finished runs.

    Raises:
        InputError: another process holds the folder, its runs have other settings, it holds other files, or it cannot
            be written.
        KeyboardInterrupt: the `with` block was interrupted; the message names the folder of the finished runs.
    """
    path = Path(folder)
    records, settings_file = path / "records.jsonl", path / "settings.json"
    with hold(path, markers=[records.name], hint="choose another folder with --out"):
        if settings_file.exists():
            refuse_changes(read_object(settings_file), settings, settings_file, free=free, of="a folder of runs")
        elif records.exists() and records.stat().st_size:
            raise InputError(f"{path}: its records have no settings.json beside them; choose another folder with --out")
        with Records(records, lambda record: record.get("key"), places=path / "runs", drop=not keep) as open_records:
            with writable(path):
                write_text(settings_file, json.dumps(settings, indent=1) + "\n")
                unlinked(path / "runs").mkdir(exist_ok=True)
                remove_partials(path / "runs")
            open_records.drop_state(open_records.finished)
            try:
                yield open_records
            except KeyboardInterrupt:
                message = f"interrupted; finished runs are in {folder}, and the same command resumes there"
                raise KeyboardInterrupt(message) from None


def run_jobs(
    jobs: Sequence[Job] | Callable[[Mapping[Hashable, Record]], Iterable[Job]],
    records: Records,
    *,
    processes: int = 1,
    executor: "Executor | None" = None,
    finish: Callable[[Job, Record], Record] = lambda job, record: record,
    most: int = 0,
    noun: str = "runs",
    progress: bool = True,
) -> list[Record]:
    """Run the jobs that have no record yet, `processes` at a time, and return the records of all jobs.

    Every process computes with one thread, so that numbers depend neither on `processes` nor on the machine's cores.

    Args:
        jobs: the jobs, or a function from the finished records by key to the jobs. It is called again after every run,
            and may return more jobs then.
        executor: runs the jobs in place of local processes, see `slurm`.
        finish: a function from a job and its result to the record to write.
        most: the largest number of jobs that the function `jobs` may return in the end, for the progress display.
        noun: the name of the jobs in the progress display, in the plural.

    Raises:
        InputError, RunError: a run raised the error, its process died, or a result could not be written. Finished runs
            stay.
    """
    plan = jobs if callable(jobs) else lambda finished: jobs
    with Progress("", 0, enabled=progress) as bar:
        work = Work(plan, records, finish, bar, most, noun)
        if executor is not None:
            executor(work)
        elif processes == 1 or (len(work.waiting) <= 1 and not callable(jobs)):
            _run_here(work)
        else:
            _run_in_processes(work, processes)
    return [records.finished[job.key] for job in plan(records.finished)]


class Work:
    """The waiting, running and finished jobs of an executor, and their progress display."""

    def __init__(
        self,
        plan: Callable[..., Iterable[Job]],
        records: Records,
        finish: Callable[..., Record],
        bar: Any,
        most: int = 0,
        noun: str = "runs",
    ):
        self._plan, self.records, self._finish, self._bar, self._most = plan, records, finish, bar, most
        self._noun = noun
        self._started: dict[Hashable, Job] = {}
        self._steps: dict[Hashable, float] = {}
        self._plan_jobs()

    def _plan_jobs(self) -> None:
        finished = self.records.finished
        planned = {job.key: job for job in self._plan(finished)}
        todo = {key: job for key, job in planned.items() if key not in finished and key not in self._started}
        self._done = len((planned | self._started).keys() & finished.keys())
        self.waiting = sorted(todo.values(), key=lambda job: (job.order, -job.cost * job.steps))

    def next(self) -> Job | None:
        """Return the next job to begin; None if no job is waiting. A finished job may add waiting jobs."""
        if not self.waiting:
            return None
        job = self.waiting.pop(0)
        self._started[job.key] = job
        return job

    def update(self, job: Job, step: int) -> None:
        """Show that `step` steps of `job` are done."""
        if job.key not in self._steps:
            self._bar.skip(step * job.cost)
        self._steps[job.key] = step * job.cost
        self._show(job, f" step {step}/{job.steps}")

    def finished(self, job: Job, record: Record) -> None:
        """Store the record of `job`, which may have ended before its last step if it diverged."""
        self.records.add(self._finish(job, record))
        self._steps[job.key] = job.steps * job.cost
        self._plan_jobs()
        self._show(job, " finished", line=True)

    def note(self, text: str) -> None:
        """Show a text about the running jobs, such as the machines that they run on."""
        self._display(text, line=True)

    def _show(self, job: Job, what: str, *, line: bool = False) -> None:
        self._display(f"{job.title or job.name}{what}", line=line)

    def _display(self, text: str, *, line: bool) -> None:
        jobs = [*self._started.values(), *self.waiting]
        left = sum(job.key not in self.records.finished for job in jobs)
        known = self._done + left
        most = max(known, self._most) if left else known
        count = f"{self._done}/{most} {self._noun}{' at most' * (most > known)}"
        total = sum(job.steps * job.cost for job in jobs)
        self._bar.update(sum(self._steps.values()), f"{count}, {text}", total=total, line=line)


Executor = Callable[[Work], None]
"""A function that runs all jobs of a `Work`."""


def _run_here(work: Work) -> None:
    with threads(1):
        while job := work.next():
            place = work.records.place(job.key)
            record = job.function(*job.arguments, place=place, report=lambda step, job=job: work.update(job, step))
            work.finished(job, record)


def _run_in_processes(work: Work, count: int) -> None:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    processes: dict[Connection, Any] = {}
    current: dict[Connection, Job] = {}

    def begin() -> None:
        """Give a job to each idle process, and start processes that are missing."""
        while len(current) < count and (job := work.next()):
            connection = next((idle for idle in processes if idle not in current), None)
            if connection is None:
                connection, child_end = context.Pipe()
                processes[connection] = context.Process(target=_work, args=(child_end,), daemon=True)
                processes[connection].start()
                child_end.close()
            current[connection] = job
            connection.send((job.function, job.arguments, work.records.place(job.key)))

    try:
        begin()
        while current:
            ready: list[Any] = wait(list(current))
            for connection in ready:
                job = current[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionError) as error:
                    process = processes[connection]
                    process.join()
                    raise RunError(
                        f"the process of {job.name} ended with exit status {process.exitcode}; {len(work.waiting)} "
                        f"runs were not started; finished ones are in {work.records.path}, and the same command "
                        "continues from there"
                    ) from error
                if isinstance(message, int):
                    work.update(job, message)
                elif isinstance(message, Exception):
                    raise message
                else:
                    del current[connection]
                    work.finished(job, message)
                    begin()
    finally:
        for process in processes.values():
            process.terminate()  # at this signal, training saves its state and ends
        for connection, process in processes.items():
            process.join()
            connection.close()


def _work(connection: Connection) -> None:
    """Run the jobs that arrive through the pipe until its other end closes."""
    import torch

    parent: Any = multiprocessing.parent_process()
    # End with the parent. Otherwise this run would still lock its folder when the user repeats the command.
    Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends this process
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        while True:
            function, arguments, place = connection.recv()
            try:
                answer = function(*arguments, place=place, report=connection.send)
            except (InputError, RunError, OSError) as error:
                answer = error
            connection.send(answer)
