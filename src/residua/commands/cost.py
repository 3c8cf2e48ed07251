"""Count the cost of a run, or measure its step."""

from contextlib import ExitStack
from dataclasses import asdict
from itertools import count as counter
from pathlib import Path
from typing import Annotated

from residua.commands.configuration import Configuration
from residua.commands.signature import Output
from residua.connections.names import canonical
from residua.errors import Count, between


def count(
    *, configuration: Configuration, gpus: Annotated[int, between(1, 2**20)] = 1, gpu: str = "h200"
) -> Output | None:
    """Count the parameters, FLOPs and memory per GPU of a run.

    Examples:
        residua cost count --config small --model.connection ddl-tc --gpus 4
        residua cost count --config tiny --train.batch_size 32 --json

    Args:
        gpus: number of GPUs
        gpu: h200, h100, b200, a100 or rtx4090
    """
    config = configuration.load(needed="which run to count")
    if config is None:
        return None
    from residua.lab.cost.estimate import estimate
    from residua.lab.experiment import model_config

    costs = estimate(config, model_config(config), gpu=gpu, gpus=gpus)
    return Output(asdict(costs), costs.parts())


def step(
    *,
    configuration: Configuration,
    schemes: tuple[str, ...] = (),
    rounds: Count = 15,
    peak: bool = True,
    out: Path | None = None,
) -> Output | None:
    """Measure the training step of a run under several schemes.

    Measures each scheme and the plain residual: the time, in rounds in which the schemes take turns; the memory that
    the backward pass keeps, in vectors of the model's width for each token and layer; and the peak memory. The step has
    one micro-batch, whatever train.gradient_accumulation is.

    Examples:
        residua cost step --config tiny --schemes ddl-tc lambdas+tc
        residua cost step --config small --train.compile true --no-peak

    Args:
        schemes (SCHEME): schemes to measure, with options or without: ddl-cc:recompute=none (default: the run's own)
        rounds: number of time measurements per scheme
        peak: skip peak memory, which needs a process per scheme
        out (FILE): append one JSON line for each scheme
    """
    names = [canonical(scheme) for scheme in schemes]
    config = configuration.load(needed="which run's step to measure")
    if config is None:
        return None
    from residua.lab.cost.steps import WARMUP, measure_schemes, measured, table
    from residua.lab.records.jsonlines import JsonLines
    from residua.lab.records.progress import Progress

    with ExitStack() as stack:
        lines = None
        if out is not None:
            lines = stack.enter_context(JsonLines(out.resolve()))  # raises before minutes of measuring
        names = names or [config.model.connection]
        turns = len(measured(names)) * (rounds + WARMUP)
        bar = stack.enter_context(Progress("time and memory", turns, measuring=True))
        done = counter(1)
        records = measure_schemes(config, names, rounds=rounds, peak=peak, advance=lambda: bar.update(next(done), ""))
        for record in records if lines else ():
            lines.write(record)
    return Output(records, [table(records)])
