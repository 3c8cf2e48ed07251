"""Many short training runs, several at a time, into one folder that survives a kill.

OUT/settings.json     the recipe; another recipe is refused
OUT/records.jsonl     one line for every finished run
OUT/checkpoints/      of the runs that are under way

A run is a pure function of its arguments, so it does not matter which process it runs in, nor how often it was stopped.
"""

import fcntl
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from residua.durable import write_text
from residua.errors import InputError, RunError, extra
from residua.provenance import circumstances

with extra("lab"):
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

PLAIN_LINE_SECONDS = 20.0


@dataclass(frozen=True)
class Job:
    """One run: `function(*arguments, checkpoint=path, report=callable)` gives its record, a plain mapping.

    key       names the run in its folder: letters, digits and -_.,=:+ only
    steps     `report` is called with the number of steps done, first with that from which the run begins or goes on
    cost      of one step, relative to those of the other jobs: for the order of the runs and the time that is left
    """

    key: str
    function: Callable[..., dict[str, Any]]
    arguments: tuple[Any, ...]
    steps: int
    cost: float = 1.0


@dataclass(frozen=True)
class Folder:
    """A folder of runs that this process holds; `claim` makes it."""

    path: Path

    @property
    def records_file(self) -> Path:
        return self.path / "records.jsonl"

    def records(self) -> list[dict[str, Any]]:
        """The finished runs, in the order in which they ended."""
        return read_records(self.records_file)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one finished run, and wait until it is on the disk. Raises RunError."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            with self.records_file.open("ab", buffering=0) as file:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
        except OSError as error:
            raise RunError(f"{self.records_file}: a result could not be written: {error.strerror or error}") from error

    def checkpoint(self, key: str) -> Path:
        """Where the run `key` keeps its state while it is under way."""
        return self.path / "checkpoints" / f"{key}.pt"


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines; a last line that was cut short is left out.

    Raises InputError for a line before the last that is no JSON object.
    """
    path = Path(path)
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    lines, records = text.splitlines(), []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            whole = isinstance(record, dict)
        except ValueError:
            whole = False
        if whole:
            records.append(record)
        elif number < len(lines):
            raise InputError(f"{path}: expected a JSON object in line {number}, got {line[:60]!r}")
    return records


@contextmanager
def claim(folder: str | Path, settings: Mapping[str, Any]) -> Iterator[Folder]:
    """Hold `folder` for this process, with all runs in it made by `settings`.

    Raises:
        InputError: another process holds it, its runs were made with other settings, it holds something else, or it
            cannot be written.
    """
    out = Folder(Path(folder))
    path = out.path
    try:
        path.mkdir(parents=True, exist_ok=True)
        names = {entry.name for entry in path.iterdir()}
        if names and not names & {".lock", out.records_file.name}:
            raise InputError(f"{path}: expected a new folder or one of runs, found other files; choose another --out")
        lock = (path / ".lock").open("a")
        (path / "checkpoints").mkdir(exist_ok=True)
    except OSError as error:
        raise InputError(f"{path}: expected a folder to write in, got: {error.strerror or error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"{path}: another process is working in this folder; wait for it or choose another with --out"
            ) from error
        records = out.records()
        _refuse_other_settings(path / "settings.json", settings, begun=bool(records))
        try:
            write_text(path / "settings.json", json.dumps(settings, indent=1) + "\n")
            # A line that a kill cut short must not run into the next one.
            write_text(out.records_file, "".join(json.dumps(record) + "\n" for record in records))
            done = {out.checkpoint(record["key"]) for record in records if "key" in record}
            for stale in (path / "checkpoints").iterdir():
                if stale in done or stale.name.endswith(".partial"):
                    stale.unlink()
        except OSError as error:
            raise InputError(f"{path}: expected a folder to write in, got: {error.strerror or error}") from error
        yield out


def save_checkpoint(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a checkpoint in one step: a kill leaves the old one or the new one. Raises OSError."""
    # The number of the process keeps apart one that has not yet noticed that its parent was killed.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with temporary.open("wb") as file:
            torch.save(dict(content), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load_checkpoint(path: Path) -> dict[str, Any] | None:
    """What `save_checkpoint` wrote, on the CPU, or None where there is nothing."""
    return torch.load(path, map_location="cpu", weights_only=True) if path.exists() else None


def run_jobs(folder: Folder, jobs: Sequence[Job], *, workers: int, device: torch.device) -> list[dict[str, Any]]:
    """The records of all `jobs`, in their order; those that the folder does not hold yet are made, `workers` at a time.

    Every process computes with one thread, so that a number depends neither on `workers` nor on the machine's cores.

    Raises:
        RunError: a process of a run died, or a result could not be written. What is finished stays.
    """
    finished = {record["key"]: record for record in folder.records() if "key" in record}
    todo = sorted((job for job in jobs if job.key not in finished), key=lambda job: job.cost * job.steps, reverse=True)
    here = circumstances(device) | {"threads": 1}

    def finish(job: Job, record: Mapping[str, Any]) -> None:
        whole = {"key": job.key, **record, "circumstances": here}
        folder.append(whole)
        finished[job.key] = whole
        folder.checkpoint(job.key).unlink(missing_ok=True)

    with _Display(todo) as display:
        if workers == 1 or len(todo) == 1:
            _run_here(folder, todo, finish, display)
        elif todo:
            _run_in_processes(folder, todo, min(workers, len(todo)), finish, display)
    return [finished[job.key] for job in jobs]


def finite_or_none(value: float) -> float | None:
    """The value, or None for one that JSON cannot hold."""
    return value if math.isfinite(value) else None


Finish = Callable[[Job, Mapping[str, Any]], None]


def _run_here(folder: Folder, jobs: Sequence[Job], finish: Finish, display: "_Display") -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for job in jobs:
            record = job.function(
                *job.arguments,
                checkpoint=folder.checkpoint(job.key),
                report=lambda step, job=job: display.update(job, step),
            )
            finish(job, record)
            display.finished(job)
    finally:
        torch.set_num_threads(threads)


def _run_in_processes(folder: Folder, jobs: Sequence[Job], workers: int, finish: Finish, display: "_Display") -> None:
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    waiting = list(reversed(jobs))
    processes: dict[Connection, Any] = {}
    current: dict[Connection, Job] = {}

    def give(connection: Connection) -> None:
        if waiting:
            job = current[connection] = waiting.pop()
            connection.send((job.function, job.arguments, folder.checkpoint(job.key)))

    try:
        for _ in range(workers):
            connection, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            processes[connection] = process
            give(connection)
        while current:
            for connection in wait(list(current)):
                job = current[connection]
                try:
                    message = connection.recv()
                except (EOFError, ConnectionError) as error:
                    process = processes[connection]
                    process.join()
                    raise RunError(
                        f"the process of {job.key} ended with exit status {process.exitcode}; {len(waiting)} runs were "
                        f"not begun; what is finished stays in {folder.path}, and the same command goes on from there"
                    ) from error
                if isinstance(message, int):
                    display.update(job, message)
                else:
                    del current[connection]
                    finish(job, message)
                    display.finished(job)
                    give(connection)
    finally:
        for connection, process in processes.items():
            connection.close()
            process.terminate()
            process.join()


def _work(connection: Connection) -> None:
    """Do what comes through the pipe until its other end is gone, which also tells that the parent was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends us
    torch.set_num_threads(1)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            function, arguments, checkpoint = connection.recv()
            connection.send(function(*arguments, checkpoint=checkpoint, report=connection.send))


class _Display:
    """One bar over all jobs on a terminal, now and then a plain line elsewhere; on standard error."""

    def __init__(self, jobs: Sequence[Job]):
        self._jobs = len(jobs)
        self._total = sum(job.steps * job.cost for job in jobs)
        self._steps: dict[str, float] = {}
        self._done, self._before = 0, 0.0  # finished runs; work of an earlier process, which says nothing about speed
        self._started = self._last_line = time.monotonic()
        self._bar = None
        console = Console(stderr=True)
        if console.is_terminal and jobs:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("left:"),
                TimeRemainingColumn(elapsed_when_finished=True),
                console=console,
                refresh_per_second=4,
                speed_estimate_period=120,
            )
            self._task = self._bar.add_task(self._words(), total=self._total)

    def __enter__(self) -> "_Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.stop()

    def _words(self, job: Job | None = None) -> str:
        return f"{self._done}/{self._jobs} runs" + (f", {job.key}" if job else "")

    def update(self, job: Job, step: int) -> None:
        """`step` steps of `job` are done."""
        if job.key not in self._steps:
            self._before += step * job.cost
        self._steps[job.key] = step * job.cost
        if self._bar:
            self._bar.update(self._task, completed=sum(self._steps.values()), description=self._words(job))
            return
        now = time.monotonic()
        if now - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = now
            self._line(f"{self._words(job)} step {step}/{job.steps}")

    def finished(self, job: Job) -> None:
        """`job` has its record; one that diverged may have had steps left."""
        self._done += 1
        self._steps[job.key] = job.steps * job.cost
        if self._bar:
            self._bar.update(self._task, completed=sum(self._steps.values()), description=self._words(job))
        else:
            self._line(f"{self._words(job)} finished")

    def _line(self, text: str) -> None:
        done = sum(self._steps.values())
        left = (time.monotonic() - self._started) / max(done - self._before, 1e-9) * (self._total - done)
        minutes, seconds = divmod(round(left), 60)
        print(f"{text}, {minutes}:{seconds:02d} left", file=sys.stderr, flush=True)


def _refuse_other_settings(path: Path, settings: Mapping[str, Any], *, begun: bool) -> None:
    """InputError where the folder was begun with other settings, or holds records of an unknown recipe."""
    if not path.exists():
        if begun:
            raise InputError(f"{path.parent}: its records have no settings.json beside them; choose another with --out")
        return
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path}: expected the settings of earlier runs, got: {error}") from error
    now = json.loads(json.dumps(settings))
    changed = [
        f"{key} was {before.get(key, 'absent')}, is {now.get(key, 'absent')}"
        for key in sorted(before.keys() | now.keys())
        if key not in before or key not in now or before[key] != now[key]
    ]
    if changed:
        shown = "; ".join(changed[:5]) + (f"; and {len(changed) - 5} more" if len(changed) > 5 else "")
        raise InputError(f"{path.parent}: begun with other settings ({shown}); choose another folder with --out")
