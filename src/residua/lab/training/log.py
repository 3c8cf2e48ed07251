"""Logging of a run: rows in metrics.jsonl and TensorBoard, the progress display, and facts.json."""

import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from residua.errors import InputError
from residua.records.durable import unlinked, write_text
from residua.records.folder import RunFolder, flatten, read_object
from residua.records.jsonlines import JsonLines
from residua.records.progress import Progress, say
from residua.records.provenance import circumstances


class Rows(JsonLines):
    """A file with one row per step, each written before the next step begins.

    Opening it drops the rows after `step`, which a run that resumes there writes again.
    """

    def __init__(self, path: Path, *, step: int):
        super().__init__(path, keep=lambda row: row["step"] <= step)


class MetricsLog:
    """Rows of numbers, one per logged step, in metrics.jsonl, as TensorBoard events and in the project `wandb` of
    Weights & Biases. A context manager.
    """

    def __init__(self, run: RunFolder, *, step: int, tensorboard: bool, wandb: str | None = None):
        with ExitStack() as stack:
            self._wandb = _wandb_run(run, wandb) if wandb else None  # first, because it may be refused
            if self._wandb:
                stack.callback(self._wandb.finish)
            self._rows = stack.enter_context(Rows(run.metrics, step=step))
            self._events = _event_writer(unlinked(run.tensorboard), step) if tensorboard else None
            if self._events:
                stack.callback(self._close_events)
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
        except OSError as error:  # must not hide the error that ended the run
            say(f"the last TensorBoard events could not be written: {error}")

    def sync(self) -> None:
        """Wait until the rows are on the disk. Raises OSError."""
        self._rows.sync()


class Display(Progress):
    """The progress of a run. If `enabled` is a function, it is called with each logged step instead."""

    def __init__(self, name: str, *, done: int, steps: int, enabled: bool | Callable[[int], None]):
        self._call = enabled if callable(enabled) else None
        super().__init__(name, steps, done=done, enabled=bool(enabled) and self._call is None)

    def show(self, row: Mapping[str, Any]) -> None:
        """Show a row of metrics."""
        step = row["step"]
        if self._call is not None:
            self._call(step)
        text = f"step {step}/{self.total}  loss {row['loss']:.3f}"
        if "val_loss" in row:
            text += f"  val {row['val_loss']:.3f}"
        text += f"  {row['tokens_per_second']:,.0f} tokens/s"
        self.update(step, text, line="val_loss" in row or step == self.total)


def write_facts(run: RunFolder, facts: Mapping[str, Any], *, device: torch.device, step: int, **more: Any) -> None:
    """Write facts.json: `facts`, the circumstances of this process, and `more`. A resumed run keeps its first facts
    and adds to `resumed`.

    Raises OSError.
    """
    process_facts = {**circumstances(device), **more}
    content = {**facts, **process_facts}
    if step and run.facts.exists():
        first_facts = read_object(run.facts)
        content = {**first_facts, "resumed": [*first_facts.get("resumed", []), {"step": step, **process_facts}]}
    write_text(run.facts, json.dumps(content, indent=1) + "\n")


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard events are written: tensorboard is not installed (pip install 'residua[lab]')")
        return None
    try:
        return SummaryWriter(str(folder), purge_step=step + 1)
    except UnicodeEncodeError:  # it accepts only file names in UTF-8
        say(f"no TensorBoard events are written: {str(folder)!r} has a name that is not UTF-8 here; set LC_ALL=C.UTF-8")
        return None


def _wandb_run(run: RunFolder, project: str) -> Any:
    """Open or reopen this folder's run at Weights & Biases. Raises InputError if wandb refuses."""
    try:
        import wandb
    except ImportError as error:
        raise InputError("train.wandb: wandb is not installed; pip install 'residua[wandb]'") from error
    id_file = run.path / "wandb-id"
    if not id_file.exists():
        write_text(id_file, f"{uuid.uuid4().hex}\n")
    try:
        return wandb.init(
            project=project,
            name=run.path.resolve().name,
            id=id_file.read_text(encoding="utf-8").strip(),
            resume="allow",
            dir=str(unlinked(run.path / "wandb").parent),
            config=flatten(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise InputError(f"train.wandb: {reason}; WANDB_MODE=offline keeps the rows on this disk") from error
