"""Log a run: rows in metrics.jsonl, TensorBoard and Weights & Biases, and the progress display."""

import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.errors import InputError, installing
from residua.files.durable import unlinked, write_text
from residua.files.reading import read_text
from residua.lab.records.folder import RunFolder, flatten
from residua.lab.records.jsonlines import JsonLines, step_of
from residua.lab.records.progress import Progress, say

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


class RunLog:
    """Write and show the progress of a run, on the first rank only. Every method may raise OSError.

    Rows of numbers, one per logged step, go to metrics.jsonl, TensorBoard and Weights & Biases; rows of gates go to
    connections.jsonl. Opening the log removes the rows after `step`, which a resumed run writes again.

    stack: closes the files of the log. gates: whether there will be rows of gates. progress: as in `loop.train`.
    """

    def __init__(
        self,
        stack: ExitStack,
        run: RunFolder,
        config: "TrainConfig",
        *,
        step: int,
        gates: bool,
        progress: bool | Callable[[int], None],
    ):
        self._steps, self._report = config.steps, progress if callable(progress) else None
        self._wandb = _wandb_run(run, config.wandb) if config.wandb else None  # first, because this may fail
        if self._wandb:
            stack.callback(self._wandb.finish)
        paths = [run.metrics, *([run.connections] if gates else [])]
        self._files = [stack.enter_context(JsonLines(path, keep=partial(_until, step, path))) for path in paths]
        self._events = _Events(unlinked(run.tensorboard), step) if config.tensorboard and _has_tensorboard() else None
        if self._events:
            stack.callback(self._events.close)
        name = run.path.resolve().name
        self._bar = stack.enter_context(Progress(name, config.steps, done=step, enabled=progress is True))
        if self._report is not None:
            self._report(step)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of numbers, and show it."""
        step, numbers = row["step"], {name: value for name, value in row.items() if name != "step"}
        self._files[0].write(row)
        if self._events:
            self._events.write(numbers, step)
        if self._wandb:
            self._wandb.log(numbers, step=step)
        if self._report is not None:
            self._report(step)
        validation = f"  val {row['val_loss']:.3f}" if "val_loss" in row else ""
        text = (
            f"step {step}/{self._steps}  loss {row['loss']:.3f}{validation}  {row['tokens_per_second']:,.0f} tokens/s"
        )
        self._bar.update(step, text, line="val_loss" in row or step == self._steps)

    def write_gates(self, row: Mapping[str, Any]) -> None:
        """Append a row of gates."""
        self._files[1].write(row)

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        for file in self._files:
            file.sync()


def _until(last: int, path: Path, row: Mapping[str, Any]) -> bool:
    return step_of(row, path) <= last


def _has_tensorboard() -> bool:
    """Return whether tensorboard is installed; print a line if it is not."""
    if find_spec("tensorboard"):
        return True
    say(f"no TensorBoard events are written: tensorboard is not installed; it comes with: {installing('lab')}")
    return False


class _Events:
    """A file of TensorBoard events with scalars.

    `SummaryWriter` writes in another thread, which only prints an error if the disk is full. This class writes in the
    calling thread, and every method may raise OSError.

    step: the last valid step; TensorBoard ignores later steps in earlier files of the folder.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._records = RecordWriter((folder / name).open("xb", buffering=0))
        self._write(file_version="brain.Event:2")
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Append the numbers of a step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=Summary(value=values))

    def _write(self, **parts: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **parts).SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._records.close()


def _wandb_run(run: RunFolder, project: str) -> Any:
    """Open or reopen this folder's run at Weights & Biases. Raises InputError if wandb refuses."""
    try:
        import wandb
    except ImportError as error:
        raise InputError(f"train.wandb: wandb is not installed; it comes with: {installing('wandb')}") from error
    id_file = run.path / "wandb-id"
    if not id_file.exists():
        write_text(id_file, f"{uuid.uuid4().hex}\n")
    try:
        return wandb.init(
            project=project,
            name=run.path.resolve().name,
            id=read_text(id_file).strip(),
            resume="allow",
            dir=str(unlinked(run.path / "wandb").parent),
            config=flatten(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise InputError(f"train.wandb: {reason}; WANDB_MODE=offline keeps the rows on this disk") from error
