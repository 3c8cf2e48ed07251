"""When and how a run saves: one process waits for the disk, several write behind the steps that follow."""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from residua.errors import RunError, extra
from residua.training.checkpoint import (
    Checkpoint,
    digest,
    drop_old,
    own_tensors,
    publish_checkpoint,
    save_checkpoint,
    saved_steps,
    unfinished,
)
from residua.training.distributed import Ranks, Together, gather
from residua.training.folder import RunFolder
from residua.training.shards import snapshot, write_shards

with extra("lab"):
    from safetensors import SafetensorError

if TYPE_CHECKING:
    from residua.training.config import TrainConfig


# torch and safetensors have exceptions of their own for a disk that fails.
REFUSED = (OSError, RuntimeError, SafetensorError)


@contextmanager
def writing(
    run: RunFolder, step: int, checkpoint: Checkpoint | None, refused: tuple[type[Exception], ...] = REFUSED
) -> Iterator[None]:
    """Say what was kept when the disk fails, which it does with the exceptions `refused`. Raises RunError."""
    try:
        yield
    except refused as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = " ".join(str(cause).split())
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
        if self._ranks.joined:
            state = snapshot(own_tensors(self._model), self._optimizer, self._device, self._ranks)
            self._pending = _behind(lambda: self._write(state, checkpoint))
            return
        with writing(self._run, step, self.newest):
            self.newest = save_checkpoint(
                self._run.checkpoints,
                step=step,
                seconds=seconds,
                settings=self._settings,
                model=self._model,
                optimizer=self._optimizer,
                device=self._device,
                val_loss=val_loss,
            )
        with writing(self._run, step, self.newest):
            self._drop_old()

    def finish(self) -> Path | None:
        """Wait until the last checkpoint is on the disk; returns the newest.

        Raises RunError where the folder cannot be written, and whatever else has ended a save.
        """
        if self._pending is not None:
            self._pending.result()
            self._pending = None
        return self.newest.path if self.newest else None

    def _drop_old(self) -> None:
        self._damaged.discard(self.newest.step)
        drop_old(self._run.checkpoints, self.newest.step, damaged=self._damaged, **self._kept)

    def _write(self, state: Mapping[str, torch.Tensor], checkpoint: Checkpoint) -> None:
        """In the thread: every rank its part, then the first one the manifest and the name.

        Raises RunError on all ranks where one of them cannot write: each OSError in here is one that all know of. Other
        exceptions are of this rank alone, a RuntimeError where another rank is gone among them.
        """
        ranks, step = self._ranks, checkpoint.step

        def together() -> Together:
            return Together(ranks.saving, lambda failure: OSError(f"rank {failure.rank}: {failure.reason}"))

        with writing(self._run, step, self.newest, (OSError,)), unfinished(checkpoint.path) as temporary:
            write_shards(state, temporary, ranks)
            with together():
                mine = sorted(temporary.iterdir())[ranks.rank :: ranks.world_size]
                files = {path.name: digest(path) for path in mine}
            parts = gather(files, ranks.saving)
            with together():
                if ranks.first:
                    publish_checkpoint(checkpoint, {name: file for part in parts for name, file in part.items()})
        self.newest = checkpoint
        with writing(self._run, step, self.newest, (OSError,)), together():
            if ranks.first:
                self._drop_old()


def _behind(work: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread; what it raises is raised by the future's `result`.

    A daemon: the threads of an executor are waited for when Python ends, and work may wait for a rank that is gone.
    """
    future: Future[None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # is handed over; torch's CheckpointException is no Exception
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future
