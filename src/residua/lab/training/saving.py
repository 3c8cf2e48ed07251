"""Saving during training: one process waits for the disk; several write in the background while training continues."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from residua.errors import RunError
from residua.lab.training.checkpoint import Checkpoint, Tensors, drop_old, saved_steps, snapshot, write_checkpoint
from residua.lab.training.distributed import Ranks
from residua.records.folder import RunFolder

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


class Saver:
    """Save the checkpoints of a run. `newest` is the newest complete one.

    If several ranks train, `save` copies the state and a thread of each rank writes it while training continues; the
    next `save` waits for that thread. `finish` and the next `save` raise its errors on all ranks.
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
        self._place = run.checkpoints.resolve()  # the user may link it to another disk before the run begins
        self._model, self._optimizer = model, optimizer
        self._retention = {"keep": config.keep_checkpoints, "keep_best": config.keep_best}
        # The run resumes from the newest complete checkpoint, so later ones are damaged.
        self._damaged = {step for step in saved_steps(run.path) if newest is None or step > newest.step}
        self._pending: Future[None] | None = None
        self.newest = newest

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed; `finish` raises its error."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    @contextmanager
    def writing(self, step: int) -> Iterator[None]:
        """Turn an OSError inside into a RunError that says which checkpoint is kept."""
        try:
            yield
        except OSError as error:
            reason = " ".join(str(error).split())
            newest_path = self.newest.path if self.newest else "none"
            raise RunError(
                f"step {step}: cannot write into {self._run.path}: {reason}; last good checkpoint: {newest_path}; "
                f"free disk space or repair the folder, then: {self._run.resume_command}"
            ) from error

    def save(self, step: int, *, seconds: float, val_loss: float | None) -> None:
        """Save the state after `step`. Raises as `finish` does."""
        self.finish()
        checkpoint = Checkpoint(self._run.checkpoints / f"step-{step}", step, seconds, self._settings, val_loss)
        tensors = snapshot(self._model, self._optimizer, self._device, self._ranks)
        if self._ranks.joined:
            self._pending = _in_background(lambda: self._write(tensors, checkpoint))
        else:
            self._write(tensors, checkpoint)

    def finish(self) -> Path | None:
        """Wait until the last checkpoint is on the disk; return the newest.

        Raises RunError if the folder cannot be written, and any other exception that ended a save.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self.newest.path if self.newest else None

    def _write(self, tensors: Tensors, checkpoint: Checkpoint) -> None:
        """Write the checkpoint and drop the old ones; in a thread if there are several ranks.

        Raises RunError on all ranks if one of them cannot write. Other exceptions are raised on this rank only, among
        them RuntimeError if another rank has died.
        """
        ranks, step = self._ranks, checkpoint.step
        with self.writing(step):
            if self._run.checkpoints.resolve() != self._place:
                raise OSError(f"{self._run.checkpoints} has become a link")
            self.newest = write_checkpoint(checkpoint, tensors, ranks)
        with self.writing(step), ranks.raise_together_saving():
            if ranks.first:
                self._damaged.discard(step)
                drop_old(self._run.checkpoints, step, damaged=self._damaged, **self._retention)


def _in_background(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a thread; the future's `result` raises what it raises.

    The thread is a daemon, because `work` may wait for a rank that has died; Python would join an executor's threads.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
