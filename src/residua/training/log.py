"""What a run tells while it goes: rows in metrics.jsonl and TensorBoard, a progress bar, the facts of its process."""

import json
import math
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from residua.durable import sync, write_text
from residua.errors import InputError, extra
from residua.provenance import circumstances
from residua.training.folder import RunFolder, flatten

with extra("lab"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_LINE_SECONDS = 10.0


def say(message: str) -> None:
    """One line for the person at the screen, on standard error; a progress bar makes room for it."""
    print(message, file=sys.stderr, flush=True)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in their order. A last line that was cut short is left out.

    Raises:
        InputError: a line before the last is no row.
    """
    rows = []
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines() if Path(path).exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append(row | {"step": int(row["step"])})
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise InputError(
                    f"{path}: expected a JSON object with a step in line {number}, got {line[:60]!r}"
                ) from error
    return rows


class Rows:
    """A file with one JSON object per line and step, each written before the next step begins. A context manager.

    Opening it drops the rows after `step`, which a run that goes on from there will write again.
    """

    def __init__(self, path: Path, *, step: int):
        rows = [row for row in read_metrics(path) if row["step"] <= step]
        write_text(path, "".join(json.dumps(row) + "\n" for row in rows))
        self._path = path
        # Unbuffered: after a failed write nothing is left over that closing would try to write once more.
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> "Rows":
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row; a number that is not finite, which JSON does not know, becomes null. Raises OSError."""
        remaining = (json.dumps(_finite(row)) + "\n").encode()
        while remaining:
            remaining = remaining[self._file.write(remaining) :]

    def sync(self) -> None:
        """Wait until the rows are on the disk: a checkpoint must not be there without them. Raises OSError."""
        sync(self._path)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class MetricsLog:
    """Rows of numbers, one per logged step, in metrics.jsonl (`Rows`), as TensorBoard events and in the project `wandb`
    of Weights & Biases. A context manager.
    """

    def __init__(self, run: RunFolder, *, step: int, tensorboard: bool, wandb: str | None = None):
        with ExitStack() as stack:
            self._rows = stack.enter_context(Rows(run.metrics, step=step))
            self._events = _event_writer(run.tensorboard, step) if tensorboard else None
            if self._events:
                stack.callback(self._close_events)
            self._wandb = _wandb_run(run, wandb) if wandb else None
            if self._wandb:
                stack.callback(self._wandb.finish)
            self._stack = stack.pop_all()

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row. Raises OSError."""
        self._rows.write(row)
        if self._events:
            for name, value in row.items():
                if name != "step":
                    self._events.add_scalar(name, value, row["step"])
        if self._wandb:
            self._wandb.log({name: value for name, value in row.items() if name != "step"}, step=row["step"])

    def _close_events(self) -> None:
        try:
            self._events.close()
        except OSError as error:  # must not hide what ended the run
            say(f"the last TensorBoard events could not be written: {error}")

    def sync(self) -> None:
        """Wait until the rows are on the disk. Raises OSError."""
        self._rows.sync()


class Display:
    """A progress bar on a terminal, now and then a plain line elsewhere, nothing where not `enabled`."""

    def __init__(self, name: str, *, done: int, steps: int, enabled: bool):
        console = Console(stderr=True)
        self._enabled = enabled
        self._first, self._steps, self._started = done, steps, time.monotonic()
        self._next_line = 0.0
        self._bar = None
        if enabled and console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task(name, total=steps, completed=done, numbers="")

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        step = row["step"]
        numbers = f"loss {row['loss']:.3f}"
        if "val_loss" in row:
            numbers += f"  val {row['val_loss']:.3f}"
        numbers += f"  {row['tokens_per_second']:,.0f} tokens/s"
        if self._bar:
            self._bar.update(self._task, completed=step, numbers=numbers)
        elif self._enabled:
            now = time.monotonic()
            if now >= self._next_line or "val_loss" in row or step == self._steps:
                left = (now - self._started) / (step - self._first) * (self._steps - step)
                say(f"step {step}/{self._steps}  {numbers}  {_duration(left)} left")
                self._next_line = now + PLAIN_LINE_SECONDS


def write_facts(run: RunFolder, facts: Mapping[str, Any], *, device: torch.device, step: int, **more: Any) -> None:
    """Write facts.json: `facts` with those of this process and `more`. A run that goes on keeps its first and adds to
    `resumed`.

    Raises OSError.
    """
    here = {**circumstances(device), **more}
    whole = {**facts, **here}
    if step and run.facts.exists():
        try:
            before = dict(json.loads(run.facts.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise InputError(f"{run.facts}: expected a JSON object, got: {error}; remove it to go on") from error
        whole = {**before, "resumed": [*before.get("resumed", []), {"step": step, **here}]}
    write_text(run.facts, json.dumps(whole, indent=1) + "\n")


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard events are written: tensorboard is not installed (pip install 'residua[lab]')")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


def _wandb_run(run: RunFolder, project: str) -> Any:
    """The run of this folder at Weights & Biases, the same one when it goes on. Raises InputError where it refuses."""
    try:
        import wandb
    except ImportError as error:
        raise InputError("train.wandb: wandb is not installed; pip install 'residua[wandb]'") from error
    known = run.path / "wandb-id"
    if not known.exists():
        write_text(known, f"{uuid.uuid4().hex}\n")
    try:
        return wandb.init(
            project=project,
            name=run.path.resolve().name,
            id=known.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(run.path),
            config=flatten(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise InputError(f"train.wandb: {reason}; WANDB_MODE=offline keeps the rows on the disk alone") from error


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
