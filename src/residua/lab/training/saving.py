"""Read and write the files of a run: checkpoints, facts, and rows of the log."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from residua.errors import InputError, RunError, require
from residua.files.durable import write_text
from residua.files.reading import write_yaml
from residua.lab.records import jsonlines
from residua.lab.records.folder import FREE_KEYS, RunFolder, flatten, read_facts, refuse_changes, writable
from residua.lab.records.progress import say
from residua.lab.records.provenance import circumstances
from residua.lab.training.checkpoint import (
    Checkpoint,
    drop_later,
    drop_old,
    latest_checkpoint,
    load_checkpoint,
    saved_steps,
    snapshot,
    write_checkpoint,
)
from residua.lab.training.folder import more_steps
from residua.lab.training.log import RunLog
from residua.lab.training.optimizer import learning_rate_factor
from residua.lab.training.step import Step

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig

FINGERPRINTS = ("fingerprint", "tokenizer_fingerprint")


class RunState:
    """The files of a run; only the first rank writes them. newest: the newest complete checkpoint, if any.

    parent: metadata of the model from whose weights the run begins, if any.
    facts: metadata of the data. The settings in a checkpoint include the fingerprints from `facts`, and the weight
        decays of the optimizer that differ from `train.weight_decay`, as under muP.
    """

    def __init__(
        self,
        run: RunFolder,
        config: "TrainConfig",
        take_step: Step,
        facts: Mapping[str, Any],
        parent: Mapping[str, Any] | None = None,
    ):
        self._parent = {} if parent is None else {"parent": parent}
        self.run, self._config, self._step, self._facts = run, config, take_step, facts
        self._ranks = take_step.ranks
        self._settings = flatten(run.settings) | {f"data.{name}": facts[name] for name in FINGERPRINTS if name in facts}
        # Earlier versions derived the decays from the settings differently, and a run keeps its first decays.
        decays = {group["weight_decay"] for group in take_step.optimizer.param_groups} - {0.0, config.weight_decay}
        if decays:
            self._settings["optimizer.weight_decay"] = sorted(decays)
        self._log: RunLog | None = None
        self.newest: Checkpoint | None = None

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, 0 before the first."""
        return self.newest.step if self.newest else 0

    def restore(self) -> None:
        """Load the newest complete checkpoint, if any, into the model, and write the current settings of the run.

        Only the first rank searches for the checkpoint.
        """
        newest = None
        with self._ranks.raise_together():
            if self.run.resume and self._ranks.first:
                newest = self._checked()
        self.newest = self._ranks.gather(newest)[0]
        if self.newest is not None:
            step = self._step
            with self._ranks.raise_together():
                load_checkpoint(self.newest, step.model, step.optimizer, device=step.device, rank=self._ranks.rank)
        with self._ranks.raise_together(), writable(self.run.path):
            if self.run.resume and self._ranks.first:
                write_text(self.run.config, write_yaml(dict(self.run.settings)))

    def _checked(self) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run, and delete damaged later ones. Raises InputError."""
        run, newest = self.run, latest_checkpoint(self.run.path)
        if newest is None:
            if saved_steps(run.path) or run.checkpoints.is_symlink():
                # Starting from the first step would overwrite the log and the damaged checkpoints.
                raise InputError(
                    f"{run.checkpoints} must hold a complete checkpoint to resume from, got none that can be read; "
                    "repair one, or remove this folder or link to start again from the first step"
                )
            say(f"{run.path}: no complete checkpoint, starting again from the first step")
            return None
        more = more_steps(newest.step, newest.settings, self._settings)
        refuse_changes(newest.settings, self._settings, newest.path, free=FREE_KEYS | more)
        last = f"at most train.steps, {self._config.steps}"
        require(newest.step <= self._config.steps, f"the step of {newest.path}", last, newest.step)
        if more:
            peak = f"{learning_rate_factor(newest.step + 1, self._config):.0%} of the peak"
            say(
                f"after its last step, {newest.step}, this run goes on to {self._config.steps}: its learning rate "
                f"rises again, to {peak}, so the result does not equal a run of {self._config.steps} steps"
            )
        drop_later(run.checkpoints, newest.step)
        return newest

    def last_row(self) -> dict[str, Any]:
        """Return the row of the newest checkpoint, for a run that has no steps left."""
        with self._ranks.raise_together():
            rows = {row["step"]: row for row in jsonlines.read_metrics(self.run.metrics)}
            found = f"{len(rows)} rows without it"
            require(self.step in rows, str(self.run.metrics), f"rows up to step {self.step}", found)
            return rows[self.step]

    @contextmanager
    def logging(self, *, gates: bool, progress: bool | Callable[[int], None]) -> Iterator[None]:
        """Write the facts, and keep the log open while the `with` block runs. gates, progress: as in `RunLog`."""
        if not self._ranks.first:
            yield
            return
        with ExitStack() as stack:
            with self._writing(self.step):
                self._log = RunLog(stack, self.run, self._config, step=self.step, gates=gates, progress=progress)
                self._write_facts()
            yield

    def log(self, row: Mapping[str, Any], *, gates: bool = False) -> None:
        """Append a row of numbers, or of gates. Raises RunError if it cannot be written."""
        if self._log is not None:
            with self._writing(row["step"]):
                (self._log.write_gates if gates else self._log.write)(row)

    def _write_facts(self) -> None:
        """Write facts.json: facts of the run, and the circumstances of this process. Raises OSError.

        A resumed run keeps its first facts, and appends its new circumstances to `resumed`.
        """
        size = sum(parameter.numel() for parameter in self._step.parameters)
        process = circumstances(self._step.device) | {"processes": self._ranks.world_size}
        if self.newest and self.newest.settings["train.steps"] != self._config.steps:
            process["steps_before"] = self.newest.settings["train.steps"]
        content = {"parameters": size, "data": self._facts, **self._parent, **process}
        if self.newest and self.run.facts.exists():
            first_facts = read_facts(self.run.facts)
            resumed = [*first_facts.get("resumed", []), {"step": self.newest.step, **process}]
            content = {**first_facts, "resumed": resumed}
        write_text(self.run.facts, json.dumps(content, indent=1) + "\n")

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Turn an OSError of the `with` block into a RunError that names the last good checkpoint."""
        try:
            yield
        except OSError as error:
            reason = " ".join(str(error).split())
            newest_path = self.newest.path if self.newest else "none"
            raise RunError(
                f"step {step}: cannot write into {self.run.path}: {reason}; last good checkpoint: {newest_path}; "
                f"free disk space or repair the folder, then: {self.run.resume_command}"
            ) from error

    def save(self, step: int, *, seconds: float, val_loss: float | None) -> None:
        """Save the state after `step`, and delete old checkpoints. The first rank writes, and the others wait for it.

        Raises RunError if the folder cannot be written.
        """
        path, run = self.run.checkpoints / f"step-{step}", str(self.run.path.resolve())
        checkpoint = Checkpoint(path, step, seconds, self._settings, val_loss, run=run)
        tensors = snapshot(self._step.model, self._step.optimizer, self._step.device, self._ranks)
        with self._ranks.raise_together(), self._writing(step):
            if self._log is not None:
                self._log.sync()  # all rows must be on disk before the checkpoint
                self.run.checkpoints.mkdir(exist_ok=True)  # without `parents`, because the run's folder may be gone
                checkpoint = write_checkpoint(checkpoint, tensors)
            self.newest = checkpoint
            if self._log is not None:
                drop_old(self.run.checkpoints, keep=self._config.keep_checkpoints, keep_best=self._config.keep_best)

    def expect_finite(self) -> None:
        """Raise Diverged if a step was not finite. All ranks raise it, because they have the same loss and gradient."""
        if self._step.finite.failed:
            with self._ranks.raise_together():
                raise self._step.finite.error(self.newest.path if self.newest else None)
