"""The command `residua train`."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from residua.commands.configuration import Configuration
from residua.errors import InputError
from residua.lab.records.folder import settings_of
from residua.lab.records.terminal import one_line


def train(*, run: str | None = None, resume: bool = False, configuration: Configuration) -> int:
    """Train a language model into a run folder, or resume one.

    Examples:
        residua train --config tiny --run runs/residual
        residua train --config tiny --model.connection ddl-cc --run runs/ddl-cc
        residua train --config tiny mine.yaml --run runs/mine
        residua train --run runs/ddl-cc --resume
        residua train --config tiny --print-config > mine.yaml
        torchrun --nproc-per-node 8 -m -- residua train --config small --run runs/s

    Args:
        run (DIR): a new folder for the run, or with --resume the folder of one
        resume: resume the run at its newest checkpoint
    """
    begun: dict[str, Any] = {}
    if resume:
        if not run:
            raise InputError("give --run DIR, the folder of the run to resume")
        settings = Path(run) / "config.yaml"
        begun = settings_of(settings)
        if not configuration.config:
            if not begun:
                raise InputError(f"{run} must be a run to resume, found no config.yaml; start one with --config")
            configuration = replace(configuration, config=(str(settings),))
    config = configuration.load(needed="what to train, or --resume which run goes on", begun=begun)
    if config is None:
        return 0
    if not run:
        raise InputError("give --run DIR, the folder for the run")

    from residua.lab import experiment
    from residua.lab.training.distributed import is_first

    result = experiment.run(config, run, resume=resume)
    if result["interrupted"]:
        return 128 + result["signal"]
    if is_first():
        units = {"val_loss": "", "bits_per_byte": " bits per byte"}
        losses = {name: result[name] for name in units if name in result}  # None if it was not a number
        told = ", ".join(f"{math.nan if loss is None else loss:.4f}{units[name]}" for name, loss in losses.items())
        print(f"{one_line(run)}: step {result['step']}, validation loss {told}")
    return 0
