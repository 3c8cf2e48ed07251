"""The training loop: one process or several, exact resume, safe to kill at any moment."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from residua.errors import InputError
from residua.lab.training.checkpoint import Checkpoint, drop_later, latest_checkpoint, load_checkpoint, saved_steps
from residua.lab.training.distributed import ALONE, BatchShard, Ranks
from residua.lab.training.folder import claim, more_steps
from residua.lab.training.log import RunLog
from residua.lab.training.optimizer import learning_rate_factor, set_learning_rate
from residua.lab.training.saving import Saver
from residua.lab.training.step import Step, next_token_loss
from residua.models.evaluating import evaluating
from residua.records import jsonlines
from residua.records.durable import write_text
from residua.records.folder import FREE_KEYS, RunFolder, flatten, read_object, refuse_changes
from residua.records.progress import say
from residua.records.provenance import circumstances

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that end training after the current step: from the keyboard, a lost terminal or a scheduler."""


class IndexedBatches(Protocol):
    """A data source whose batch `index` is always the same, so that the step is its whole state."""

    def at(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, two int64 tensors (rows, sequence_length); labels[t] follows inputs[t]."""


def train(
    model: nn.Module,
    batches: IndexedBatches,
    config: "TrainConfig",
    folder: str | Path | RunFolder,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    observe: Callable[[nn.Module, Tensor], Mapping[str, Any]] | None = None,
    resume: bool = False,
    facts: Mapping[str, Any] | None = None,
    end_of_text: int | None = None,
    progress: bool | Callable[[int], None] = True,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Train `model` into a run folder.

    Ctrl-C and the other signals of `STOPPING` end it after the current step with a checkpoint; a second Ctrl-C or
    SIGTERM ends it at once. After a kill at any moment, `resume` continues from the newest complete checkpoint as if
    nothing had happened: on the CPU the losses are the same to the last bit.

    Several processes that `distributed.join` connected call this with equal models, each with its own rows of the
    micro-batches that `distributed.BatchShard` assigns to it. They compute the same steps as one process and stop after
    the same step. Any number of processes can resume from a checkpoint, whatever number wrote it.

    Args:
        model: `model(input_ids=, labels=, shift_labels=).loss` is the mean loss of a batch (a float or bfloat16
            scalar); labels are aligned with the inputs. It is moved to the device and left there in training mode.
        batches: gives micro-batch `(step - 1) * gradient_accumulation + micro` of step 1, 2, ..., this rank's rows.
        folder: the path of the run folder, or a RunFolder from `claim`, whose `resume` is used. Several ranks need the
            latter.
        evaluate: `evaluate(model)` returns numbers for the row of its step, including `val_loss`. It runs in
            evaluation mode without gradients, in the run's precision, and the random state is restored afterwards.
            Every rank runs it, with the same number of forward passes, and gets the same result.
        observe: `observe(model, inputs)` returns the values of a row of connections.jsonl, measured on the first
            sequence of a step, inputs (1, sequence_length), every `train.connections_every` steps. It runs as
            `evaluate` does. Each rank has its own sequence; the first rank's does not depend on their number.
        facts: metadata of the data for facts.json; its `fingerprint`, if any, must be the same on resume.
            Checkpoints keep it, and a `tokenizer_fingerprint`.
        end_of_text: the token before each document, for document masks: `model` gets `documents_apart` too.
        progress: whether to show the progress, or a function to call instead with each step that is logged. Its caller
            says how an interrupted run goes on.

    Returns:
        The row of the last step (step, tokens, loss, lr, grad_norm, tokens_per_second, seconds, results of
        `evaluate`), `checkpoint` (its folder) and `interrupted`; if it is, also `signal`, the number of the signal.
        `seconds` counts only the training steps.

    Raises:
        InputError: the folder cannot be used (see `claim`), the checkpoint has other settings, data or weights, or
            the device is not available.
        RunError: a loss or gradient is not finite, or the folder cannot be written. Older checkpoints stay.
    """
    with ExitStack() as stack:
        if not isinstance(folder, RunFolder):
            folder = stack.enter_context(claim(folder, {"train": asdict(config)}, resume=resume))
        facts = dict(facts or {})
        return _train(model, batches, config, folder, evaluate, observe, facts, end_of_text, progress, ranks)


class _Due(NamedTuple):
    """What follows a step."""

    validating: bool
    logging: bool
    saving: bool

    @classmethod
    def at(cls, step: int, config: "TrainConfig", *, evaluating: bool, stopping: bool) -> "_Due":
        last = step == config.steps
        validating = evaluating and (last or step % config.evaluate_every == 0)
        logging = last or validating or step % config.log_every == 0
        return cls(validating, logging, saving=last or stopping or step % config.checkpoint_every == 0)

    def write(self, row: dict[str, Any], log: RunLog) -> None:
        """Log a row if it is due; all rows are on the disk before a checkpoint is. Raises OSError."""
        if self.logging:
            log.write(row)
        if self.saving:
            log.sync()


def _train(
    model: nn.Module,
    batches: IndexedBatches,
    config: "TrainConfig",
    run: RunFolder,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
    observe: Callable[[nn.Module, Tensor], Mapping[str, Any]] | None,
    facts: dict[str, Any],
    end_of_text: int | None,
    progress: bool | Callable[[int], None],
    ranks: Ranks,
) -> dict[str, Any]:
    """Train into a folder that is claimed, as `train` says."""
    with ranks.raise_together():
        device = pick_device(config.device)
        settings = _decisive_settings(run, facts)
        shard = BatchShard.of(config, ranks)
    torch.manual_seed(config.seed + ranks.rank)
    loss = partial(next_token_loss, end_of_text=end_of_text)
    take_step = Step(model, batches.at, config, device, shard=shard, ranks=ranks, loss=loss)
    checkpoint = _restore(run, settings, take_step, config)
    start = checkpoint.step if checkpoint else 0
    if start == config.steps:
        with ranks.raise_together():
            return _finished(run, checkpoint, ranks)

    saver = Saver(run, settings, take_step, config, checkpoint)
    tokens_per_step = config.batch_size * config.gradient_accumulation * config.sequence_length
    observe_every = config.connections_every if observe is not None else 0
    with ExitStack() as stack:
        if ranks.first:
            with saver.writing(start):
                log = RunLog(run, config, step=start, observing=observe_every > 0, progress=progress)
                stack.enter_context(log)
                _write_facts(run, config, take_step, checkpoint, facts)
        stop = stack.enter_context(_stop_signals(twice=not ranks.joined))
        clock = _Clock(checkpoint.seconds if checkpoint else 0.0, start * tokens_per_step)
        for step in range(start + 1, config.steps + 1):
            factor = learning_rate_factor(step, config)
            set_learning_rate(take_step.optimizer, factor)
            update = take_step(step)
            if observe_every and step % observe_every == 0:
                with take_step.autocast, evaluating(model):
                    gates = observe(model, update.first_row)
                if ranks.first:
                    with saver.writing(step):
                        log.write_gates({"step": step, **gates})

            stopping = ranks.any(bool(stop))
            due = _Due.at(step, config, evaluating=evaluate is not None, stopping=stopping)
            if not (due.logging or due.saving):
                continue

            _expect_finite(take_step, saver, ranks)  # the host waits for the device here and where gates are observed
            seconds, speed = clock.lap(step * tokens_per_step)
            row = {"step": step, "tokens": step * tokens_per_step, **update.numbers(ranks, config.lr * factor)}
            row |= {"tokens_per_second": speed, "seconds": seconds}
            with clock.paused():
                if due.validating:
                    with take_step.autocast, evaluating(model):
                        row = {**row, **evaluate(model), **row}  # the row's names come first, its values win
                if ranks.first:
                    with saver.writing(step):
                        due.write(row, log)
                if due.saving:
                    saver.save(step, seconds=seconds, val_loss=row.get("val_loss"))
            if stopping:
                break
    result = row | {"checkpoint": str(saver.newest.path), "interrupted": step < config.steps}
    if result["interrupted"]:
        if ranks.first and not callable(progress):
            say(f"stopped after step {step}, which is saved; continue with: {run.resume_command}")
        result["signal"] = max(ranks.gather(stop[0] if stop else 0))
    return result


def _expect_finite(take_step: Step, saver: Saver, ranks: Ranks) -> None:
    """Raise Diverged after a step that failed. All ranks do, as they have one loss and one gradient."""
    if take_step.finite.failed:
        with ranks.raise_together():
            raise take_step.finite.error(saver.newest.path if saver.newest else None)


def _write_facts(
    run: RunFolder,
    config: "TrainConfig",
    take_step: Step,
    checkpoint: Checkpoint | None,
    facts: dict[str, Any],
) -> None:
    """Write facts.json: what the run is, and the circumstances of this process. A resumed run keeps its first facts
    and adds to `resumed`. Raises OSError.
    """
    size = sum(parameter.numel() for parameter in take_step.parameters)
    process = circumstances(take_step.device) | {"processes": take_step.ranks.world_size}
    if checkpoint and checkpoint.settings["train.steps"] != config.steps:
        process["steps_before"] = checkpoint.settings["train.steps"]
    content = {"parameters": size, "data": facts, **process}
    if checkpoint and run.facts.exists():
        first_facts = read_object(run.facts)
        content = {**first_facts, "resumed": [*first_facts.get("resumed", []), {"step": checkpoint.step, **process}]}
    write_text(run.facts, json.dumps(content, indent=1) + "\n")


def _finished(run: RunFolder, checkpoint: Checkpoint, ranks: Ranks) -> dict[str, Any]:
    """Return the last row of a run that has no steps left."""
    rows = {row["step"]: row for row in jsonlines.read(run.metrics)}  # all were on the disk before the checkpoint was
    if ranks.first:
        say(f"{run.path}: this run is finished ({checkpoint.step} steps); more --train.steps train it on")
    return rows[checkpoint.step] | {"checkpoint": str(checkpoint.path), "interrupted": False}


def pick_device(name: str, option: str = "train.device") -> torch.device:
    """Return the device of an option; auto picks cuda if available. Raises InputError if cuda is missing."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{option} needs a machine with a CUDA device, found none; use cpu")
    return torch.device(name)


def _decisive_settings(run: RunFolder, facts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the flat settings, plus the fingerprints of the data."""
    fingerprints = ("fingerprint", "tokenizer_fingerprint")
    return flatten(run.settings) | {f"data.{name}": facts[name] for name in fingerprints if facts and name in facts}


def _restore(run: RunFolder, settings: Mapping[str, Any], take_step: Step, config: "TrainConfig") -> Checkpoint | None:
    """Load the newest complete checkpoint, if any, into the model. Only the first rank looks for it."""
    newest, ranks = None, take_step.ranks
    with ranks.raise_together():
        if run.resume and ranks.first:
            newest = latest_checkpoint(run.path)
            if newest is None and (saved_steps(run.path) or run.checkpoints.is_symlink()):
                # Starting from the first step would overwrite the log and these checkpoints. A link may be a mistake.
                raise InputError(
                    f"{run.checkpoints} must hold a complete checkpoint to resume from, got none that can be read; "
                    "repair one, or remove this folder or link to start again from the first step"
                )
            if newest is None:
                say(f"{run.path}: no complete checkpoint, starting again from the first step")
            else:
                more = more_steps(newest.step, newest.settings, settings)
                refuse_changes(newest.settings, settings, newest.path, free=FREE_KEYS | more)
                if more:
                    say(_changed_schedule(newest.step, config))
                drop_later(run.checkpoints, newest.step)
    checkpoint = ranks.gather(newest)[0]
    if checkpoint is None:
        return None
    with ranks.raise_together():
        return load_checkpoint(
            checkpoint, take_step.model, take_step.optimizer, device=take_step.device, rank=ranks.rank
        )


def _changed_schedule(step: int, config: "TrainConfig") -> str:
    """Return a message: how a run that goes on after its last step differs from one of that length."""
    return (
        f"after its last step, {step}, this run goes on to {config.steps}: its learning rate rises again, to "
        f"{learning_rate_factor(step + 1, config):.0%} of the peak, so it is no run of {config.steps} steps"
    )


@contextmanager
def _stop_signals(*, twice: bool) -> Iterator[list[int]]:
    """Yield a list that receives the number of each signal in `STOPPING`. With `twice`, a second Ctrl-C or SIGTERM ends
    the process at once; torchrun repeats signals that the terminal has already sent, and has its own timeout.

    Ignored signals, such as SIGHUP under nohup, stay ignored.
    """
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals belong to the main thread
        return

    def request(number: int, frame: Any) -> None:
        stop.append(number)
        if twice:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    numbers = (getattr(signal, name) for name in STOPPING if hasattr(signal, name))
    handlers = {number: signal.getsignal(number) for number in numbers}
    handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in handlers:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


class _Clock:
    """Count the seconds of training over all processes of a run, without evaluation and saving.

    seconds, tokens: of the earlier processes.
    """

    def __init__(self, seconds: float, tokens: int):
        self._began = time.perf_counter() - seconds
        self._lap = tokens, seconds

    def lap(self, tokens: int) -> tuple[float, float]:
        """Return the seconds so far, and the tokens per second since the last call."""
        (tokens_before, seconds_before), self._lap = self._lap, (tokens, time.perf_counter() - self._began)
        return self._lap[1], (tokens - tokens_before) / (self._lap[1] - seconds_before)

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._began += time.perf_counter() - began
