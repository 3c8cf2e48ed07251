"""Save the checkpoints of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from residua.errors import RunError
from residua.lab.training.checkpoint import Checkpoint, drop_old, snapshot, write_checkpoint
from residua.lab.training.step import Step
from residua.records.folder import RunFolder

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


class Saver:
    """Save the checkpoints of a run. `newest` is the newest complete one."""

    def __init__(
        self,
        run: RunFolder,
        settings: Mapping[str, Any],
        take_step: Step,
        config: "TrainConfig",
        newest: Checkpoint | None,
    ):
        self._run, self._settings, self._step, self._ranks = run, settings, take_step, take_step.ranks
        self._retention = {"keep": config.keep_checkpoints, "keep_best": config.keep_best}
        self.newest = newest

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
        """Save the state after `step`, and drop old checkpoints. The other ranks wait for the first, which writes.

        Raises RunError if the folder cannot be written.
        """
        checkpoint = Checkpoint(self._run.checkpoints / f"step-{step}", step, seconds, self._settings, val_loss)
        tensors = snapshot(self._step.model, self._step.optimizer, self._step.device, self._ranks)
        with self._ranks.raise_together(), self.writing(step):
            if self._ranks.first:
                checkpoint = write_checkpoint(checkpoint, tensors)
            self.newest = checkpoint
            if self._ranks.first:
                drop_old(self._run.checkpoints, **self._retention)
