"""Logging of a run: rows in metrics.jsonl, TensorBoard and Weights & Biases, and the display of its progress."""

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from residua.errors import InputError
from residua.files.durable import unlinked, write_text
from residua.files.reading import read_text
from residua.lab.records.folder import RunFolder, flatten
from residua.lab.records.jsonlines import JsonLines, step_of
from residua.lab.records.progress import Progress, say

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


class RunLog:
    """What the first rank writes and shows as a run trains. All of it may raise OSError.

    Rows of numbers, one per logged step, go into metrics.jsonl, to TensorBoard and to Weights & Biases; those of gates
    go into connections.jsonl. Opening the log drops the rows after `step`, which a run that resumes there writes again.

    stack: closes what the log opens. gates: whether there will be rows of them. progress: as in `loop.train`.
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
        self._wandb = _wandb_run(run, config.wandb) if config.wandb else None  # first, because it may be refused
        if self._wandb:
            stack.callback(self._wandb.finish)
        paths = [run.metrics, *([run.connections] if gates else [])]
        self._files = [stack.enter_context(JsonLines(path, keep=partial(_until, step, path))) for path in paths]
        if config.tensorboard:
            stack.enter_context(_errors_of_threads_raised_once())
        self._events = _event_writer(unlinked(run.tensorboard), step) if config.tensorboard else None
        if self._events:
            stack.callback(self._close_events)
        name = run.path.resolve().name
        self._bar = stack.enter_context(Progress(name, config.steps, done=step, enabled=progress is True))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row of numbers, and show it."""
        step, numbers = row["step"], {name: value for name, value in row.items() if name != "step"}
        self._files[0].write(row)
        if self._events:
            for name, value in numbers.items():
                self._events.add_scalar(name, value, step)
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

    def _close_events(self) -> None:
        try:
            self._events.close()
        except OSError as error:  # must not hide the error that ended the run
            say(f"the last TensorBoard events could not be written: {error}")


def _until(last: int, path: Path, row: Mapping[str, Any]) -> bool:
    return step_of(row, path) <= last


@contextmanager
def _errors_of_threads_raised_once() -> Iterator[None]:
    """Print no traceback of an OSError in a thread: TensorBoard raises it again where the next number is added."""
    printing = threading.excepthook

    def print_others(failure: threading.ExceptHookArgs) -> None:
        if not isinstance(failure.exc_value, OSError):
            printing(failure)

    threading.excepthook = print_others
    try:
        yield
    finally:
        threading.excepthook = printing


def _event_writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        say("no TensorBoard events are written: tensorboard is not installed (pip install 'residua[lab]')")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1)


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
            id=read_text(id_file).strip(),
            resume="allow",
            dir=str(unlinked(run.path / "wandb").parent),
            config=flatten(run.settings),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise InputError(f"train.wandb: {reason}; WANDB_MODE=offline keeps the rows on this disk") from error
