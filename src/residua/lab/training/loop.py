"""The training loop: one process or several, exact resume, safe to kill at any moment."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from residua.errors import InputError
from residua.lab.records.folder import RunFolder
from residua.lab.records.progress import say
from residua.lab.training.distributed import ALONE, Ranks
from residua.lab.training.folder import claim
from residua.lab.training.optimizer import learning_rate_factor, set_learning_rate
from residua.lab.training.saving import RunState
from residua.lab.training.step import Step, next_token_loss
from residua.models.evaluating import evaluating

if TYPE_CHECKING:
    from residua.lab.training.config import TrainConfig


STOPPING = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that end training after the current step: from the keyboard, a lost terminal or a scheduler."""


class IndexedBatches(Protocol):
    """A data source in which batch `index` never changes, so that the step is the whole state of the source."""

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
    parent: Mapping[str, Any] | None = None,
    end_of_text: int | None = None,
    progress: bool | Callable[[int], None] = True,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Train `model` into a run folder.

    Ctrl-C and the other signals in `STOPPING` end training after the current step, with a checkpoint; a second Ctrl-C
    or SIGTERM ends it at once. After a kill at any moment, `resume` continues from the newest complete checkpoint as if
    nothing had happened: on the CPU the losses are the same to the last bit.

    If `distributed.join` connected several processes, all call this function with equal models; each gets its own rows
    of the micro-batches, by `distributed.BatchShard`. Together they compute the same steps as one process, and all
    stop after the same step. Any number of processes can resume from a checkpoint.

    Args:
        model: `model(input_ids=, labels=, shift_labels=).loss` is the mean loss of a batch (a float or bfloat16
            scalar); labels are aligned with the inputs. The model is moved to the device and left in training mode.
        batches: `batches.at(i)` returns this rank's rows of micro-batch i = (step - 1) * gradient_accumulation + micro,
            for step = 1, 2, ...
        folder: the path of the run folder, or a RunFolder from `claim`, which also determines `resume`. Several ranks
            need a RunFolder.
        evaluate: `evaluate(model)` returns numbers for the row of its step, including `val_loss`. It runs in
            evaluation mode without gradients, in the run's precision, and the random state is restored afterwards.
            Every rank runs it, with the same number of forward passes, and gets the same result.
        observe: `observe(model, inputs)` returns the values of a row of connections.jsonl, measured on the first
            sequence of a step, inputs (1, sequence_length), every `train.connections_every` steps. It runs as
            `evaluate` does. Each rank has its own sequence; that of the first rank does not depend on the number of
            ranks.
        facts: metadata of the data, for facts.json and checkpoints. Its `fingerprint`, if any, must be the same on
            resume.
        parent: metadata of the model from whose weights the run begins, for facts.json.
        end_of_text: the token before each document, for document masks; `model` then also gets `documents_apart`.
        progress: whether to show the progress, or a function that is called with the step at which the run begins or
            resumes, and with each logged step, instead; the caller then has to tell the user how to resume an
            interrupted run.

    Returns:
        The row of the last step (step, tokens, loss, lr, grad_norm, tokens_per_second, seconds, results of
        `evaluate`), `checkpoint` (its folder) and `interrupted`. `seconds` counts only training steps. If a signal
        came, also `signal`, its number, after which a caller with other work stops too. In the last step it interrupts
        nothing.

    Raises:
        InputError: the folder cannot be used (see `claim`), the checkpoint has other settings, data or weights, or
            the device is not available.
        RunError: a loss or gradient is not finite, or the folder cannot be written. Older checkpoints stay.
    """
    with ExitStack() as stack:
        if not isinstance(folder, RunFolder):
            folder = stack.enter_context(claim(folder, {"train": asdict(config)}, resume=resume))
        with ranks.raise_together():
            device = pick_device(config.device)
        torch.manual_seed(config.seed + ranks.rank)
        loss = partial(next_token_loss, end_of_text=end_of_text)
        take_step = Step(model, batches.at, config, device, ranks=ranks, loss=loss)
        state = RunState(folder, config, take_step, facts or {}, parent)
        return _train(state, take_step, config, evaluate, observe, progress)


def _train(
    state: RunState,
    take_step: Step,
    config: "TrainConfig",
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None,
    observe: Callable[[nn.Module, Tensor], Mapping[str, Any]] | None,
    progress: bool | Callable[[int], None],
) -> dict[str, Any]:
    """Take the steps of a run that are not saved yet, as `train` describes."""
    model, ranks = take_step.model, take_step.ranks
    state.restore()
    if state.step == config.steps:
        if ranks.first and not callable(progress):
            say(f"{state.run.path}: this run is finished ({state.step} steps); raise --train.steps to continue")
        return state.last_row() | {"checkpoint": str(state.newest.path), "interrupted": False}

    observe_every = config.connections_every if observe is not None else 0
    with (
        state.logging(gates=observe_every > 0, progress=progress),
        _stop_signals(twice=not ranks.joined) as stop,
    ):
        seconds = state.newest.seconds if state.newest else 0.0
        lap_step, lap_start = state.step, time.perf_counter()
        for step in range(state.step + 1, config.steps + 1):
            factor = learning_rate_factor(step, config)
            set_learning_rate(take_step.optimizer, factor)
            update = take_step(step)
            if observe_every and step % observe_every == 0:
                state.expect_finite()  # the host waits for the device, so that the step's own time is over
                began = time.perf_counter()
                with take_step.autocast, evaluating(model):
                    gates = observe(model, update.first_row)
                state.log({"step": step, **gates}, gates=True)
                lap_start += time.perf_counter() - began

            stopping = ranks.any(bool(stop))
            validating = evaluate is not None and _due(step, config.evaluate_every, config)
            logging = validating or _due(step, config.log_every, config)
            saving = stopping or _due(step, config.checkpoint_every, config)
            if not (logging or saving):
                continue

            state.expect_finite()  # the host waits for the device here
            elapsed = time.perf_counter() - lap_start
            seconds += elapsed
            row = {"step": step, "tokens": step * config.tokens_per_step, **update.numbers(ranks, config.lr * factor)}
            row |= {"tokens_per_second": (step - lap_step) * config.tokens_per_step / elapsed, "seconds": seconds}
            if validating:
                with take_step.autocast, evaluating(model):
                    row = {**row, **evaluate(model), **row}  # keys of the row come first, and its values win
            if logging:
                state.log(row)
            if saving:
                state.save(step, seconds=seconds, val_loss=row.get("val_loss"))
            if stopping:
                break
            lap_step, lap_start = step, time.perf_counter()  # the time of evaluating and saving does not count
    result = row | {"checkpoint": str(state.newest.path), "interrupted": step < config.steps}
    if result["interrupted"] and ranks.first and not callable(progress):
        say(f"stopped after step {step}, which is saved; continue with: {state.run.resume_command}")
    received = max(ranks.gather(stop[0] if stop else 0))
    return result | ({"signal": received} if received else {})


def _due(step: int, every: int, config: "TrainConfig") -> bool:
    """Return whether a task with period `every` is due after this step; every task is due after the last one."""
    return step == config.steps or step % every == 0


def pick_device(name: str, option: str = "train.device") -> torch.device:
    """Return the device for the value `name` of an option; "auto" picks cuda if available.

    Raises InputError if cuda is requested and missing.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{option} needs a machine with a CUDA device, found none; use cpu")
    return torch.device(name)


@contextmanager
def _stop_signals(*, twice: bool) -> Iterator[list[int]]:
    """Yield a list that receives the number of each signal in `STOPPING`.

    twice: whether a second Ctrl-C or SIGTERM ends the process at once. False under torchrun, which repeats signals that
    the terminal has already sent, and has its own timeout. Ignored signals, such as SIGHUP under nohup, stay ignored.
    """
    stop: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread can handle signals
        return

    def request(number: int, frame: Any) -> None:
        stop.append(number)
        if twice and number in (signal.SIGINT, signal.SIGTERM):
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
