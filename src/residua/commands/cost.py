"""Count what a run will cost, or measure its step."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import count as counter
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

from residua.commands.configuration import Configuration
from residua.commands.signature import Output
from residua.connections.names import canonical
from residua.errors import Count, between
from residua.lab.cost.timing import Quartiles
from residua.records.jobs import Record

if TYPE_CHECKING:
    from residua.lab.cost.estimate import Estimate
    from residua.lab.training import RunConfig

BASELINE = "residual"
GIB = 2**30


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

    _ = config.from_scratch  # raises for a model with a base
    costs = estimate(config, model_config(config), gpu=gpu, gpus=gpus)
    return Output(asdict(costs), _tables(costs))


def _tables(costs: "Estimate") -> Iterator[Any]:
    yield ["parameters", ""], [[name, f"{number:,}"] for name, number in costs.parameters.items()]
    yield ""
    yield ["MFLOP per token", ""], [[name, f"{x / 1e6:,.2f}"] for name, x in costs.flops_per_token.items()]
    yield ""
    ways = list(costs.memory)
    unit, size = ("GiB", GIB) if costs.memory[ways[0]]["total"] >= GIB else ("MiB", GIB / 1024)
    header = [f"{unit} per GPU", *(f"states: {way}" for way in ways)]
    rows = [[part, *(f"{costs.memory[way][part] / size:.2f}" for way in ways)] for part in costs.memory[ways[0]]]
    rows.append(["largest batch_size", *(f"{costs.largest_batch_size[way]}" for way in ways)])
    yield header, rows
    total = costs.tokens * sum(costs.flops_per_token.values())
    yield f"\n{costs.tokens / 1e9:.3g} billion tokens, {total:.3g} FLOPs\n"
    yield from (fill(f"assumed: {line}", 79) for line in costs.assumptions)
    if all(costs.memory[way]["total"] > costs.gpu_memory for way in ways):
        yield f"note: this does not fit into {costs.gpu_memory / GIB:.0f} GiB; lower train.batch_size"


def step(
    *,
    configuration: Configuration,
    schemes: tuple[str, ...] = (),
    rounds: Count = 15,
    peak: bool = True,
    out: Path | None = None,
) -> Output | None:
    """Measure the training step of a run under several schemes.

    Beside the plain residual: time, in rounds in which the schemes take turns; what the backward pass keeps, in vectors
    of the model's width for each token and layer; and the peak of the memory.

    Examples:
        residua cost step --config tiny --schemes ddl-tc lambdas+tc
        residua cost step --config small --train.compile true --no-peak

    Args:
        schemes (SCHEME): to measure, also with options, as in ddl-cc:recompute=none (default: the run's own)
        rounds: times each scheme is measured
        peak: leave the peak out, which takes a process for each scheme
        out (FILE): append one JSON line for each scheme
    """
    names = [canonical(scheme) for scheme in schemes]
    config = configuration.load(needed="which run's step to measure")
    if config is None:
        return None
    from residua.lab.cost.steps import WARMUP
    from residua.records.jsonlines import JsonLines
    from residua.records.progress import Progress

    with ExitStack() as stack:
        lines = None
        if out is not None:
            lines = stack.enter_context(JsonLines(out.resolve()))  # raises before minutes of measuring
        names = names or [config.model.connection]
        bar = stack.enter_context(Progress("time and memory", (1 + len(names)) * (rounds + WARMUP), lines=False))
        done = counter(1)

        def advance() -> None:
            bar.update(next(done), "")

        records = measured(config, names, rounds=rounds, peak=peak, advance=advance)
        for record in records if lines else ():
            lines.write(record)
    return Output(records, [_steps(records)])


def measured(
    config: "RunConfig",
    schemes: Sequence[str | dict[str, Any]],
    *,
    rounds: int,
    peak: bool,
    advance: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Measure the step of a run under the plain residual and under each of these schemes; one record each.

    vectors   kept for the backward pass per token and layer, of the model's width, in the run's precision

    Raises:
        InputError: a scheme cannot be built with the sizes of the run.
        RunError: a step runs out of memory.
    """
    import torch

    from residua.lab.cost.steps import measure
    from residua.lab.experiment import model_config

    configs = {}
    for scheme in (BASELINE, *schemes):
        run = replace(config, model=replace(config.model, connection=scheme))
        configs[scheme if isinstance(scheme, str) else json.dumps(scheme)] = run, model_config(run)
    records = measure(configs, BASELINE, rounds=rounds, peak=peak, advance=advance)
    train = config.train
    for record in records:
        sizes = configs[record["scheme"]][1].get_text_config()
        numbers = train.batch_size * train.sequence_length * sizes.num_hidden_layers * sizes.hidden_size
        record["vectors"] = record["kept_bytes"] / (numbers * getattr(torch, train.precision).itemsize)
        record["train"] = asdict(train)
    return records


def _steps(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """The table of steps: seconds, and vectors beyond those of the first scheme, which is the plain residual."""
    first = records[0]
    rows = []
    for record in records:
        ratio = Quartiles(**record["time_ratio"])
        rows.append(
            [
                record["scheme"],
                f"{1e3 * record['step_seconds']:.1f}",
                f"{ratio:.3f}",
                f"{record['vectors']:.2f}",
                f"{record['vectors'] - first['vectors']:+.2f}",
                "" if record["peak_bytes"] is None else f"{record['peak_bytes'] / 2**20:,.0f}",
            ]
        )
    return ["scheme", "ms", f"times {first['scheme']}", "vectors kept", "above", "peak MiB"], rows
