"""When and how a run saves: one process waits for the disk, several write behind the steps that follow."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from residua.errors import RunError
from residua.runs.folder import RunFolder
from residua.training.checkpoint import Blocks, Checkpoint, drop_old, saved_steps, snapshot, write_checkpoint
from residua.training.distributed import Ranks

if TYPE_CHECKING:
    from residua.training.config import TrainConfig


@contextmanager
def writing(run: RunFolder, step: int, checkpoint: Checkpoint | None) -> Iterator[None]:
    """Say what is kept when the disk fails, which an OSError tells. Raises RunError."""
    try:
        yield
    except OSError as error:
        reason = " ".join(str(error).split())
        kept = checkpoint.path if checkpoint else "none"
        raise RunError(
            f"step {step}: cannot write into {run.path}: {reason}; last good checkpoint: {kept}; "
            f"make room or mend the folder, then: {run.resume_command}"
        ) from error


class Saver:
    """Saves the checkpoints of a run. `newest` is the newest that is whole.

    Where ranks train together, `save` copies what is to be saved, and a thread of each rank writes it while training
    goes on; it ends before the next one begins. All ranks learn what became of it, in `finish` or the next `save`.
    """

    def __init__(
        self,
        run: RunFolder,
        settings: Mapping[str, Any],
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        config: "TrainConfig",
        ranks: Ranks,
        newest: Checkpoint | None,
    ):
        self._run, self._settings, self._ranks, self._device = run, settings, ranks, device
        self._model, self._optimizer = model, optimizer
        self._kept = {"keep": config.keep_checkpoints, "keep_best": config.keep_best}
        # The run goes on from the newest whole one, so those after it are damaged.
        self._damaged = {step for step in saved_steps(run.path) if newest is None or step > newest.step}
        self._pending: Future[None] | None = None
        self.newest = newest

    @property
    def failed(self) -> bool:
        """Whether a save behind the training has failed; `finish` says how."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def save(self, step: int, *, seconds: float, val_loss: float | None) -> None:
        """Save what is there after `step`. Raises as `finish` does."""
        self.finish()
        checkpoint = Checkpoint(self._run.checkpoints / f"step-{step}", step, seconds, self._settings, val_loss)
        blocks = snapshot(self._model, self._optimizer, self._device, self._ranks)
        if self._ranks.joined:
            self._pending = _behind(lambda: self._write(blocks, checkpoint))
        else:
            self._write(blocks, checkpoint)

    def finish(self) -> Path | None:
        """Wait until the last checkpoint is on the disk; returns the newest.

        Raises RunError where the folder cannot be written, and whatever else has ended a save.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self.newest.path if self.newest else None

    def _write(self, blocks: Blocks, checkpoint: Checkpoint) -> None:
        """Write the checkpoint and drop the old ones; in a thread where there are several ranks.

        Raises RunError on all ranks where one of them cannot write. Other exceptions are of this rank alone, a
        RuntimeError where another rank is gone among them.
        """
        ranks, step = self._ranks, checkpoint.step
        with writing(self._run, step, self.newest):
            self.newest = write_checkpoint(checkpoint, blocks, ranks)
        with writing(self._run, step, self.newest), ranks.together_saving():
            if ranks.first:
                self._damaged.discard(step)
                drop_old(self._run.checkpoints, step, damaged=self._damaged, **self._kept)


def _behind(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread; what it raises is raised by the future's `result`.

    A daemon: the threads of an executor are waited for when Python ends, and work may wait for a rank that is gone.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
