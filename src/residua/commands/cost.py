"""Count what a run will cost, or measure a step of each scheme."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count as counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from residua.commands.configuration import Configuration
from residua.commands.signature import Output
from residua.errors import between
from residua.lab.cost.settings import MemorySettings, ModelSettings
from residua.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.cost.estimate import Estimate

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
    from residua.lab.experiment import expected_vocabulary

    costs = estimate(config, vocab_size=expected_vocabulary(config), gpu=gpu, gpus=gpus)
    return Output(asdict(costs), _tables(costs))


def _tables(costs: "Estimate") -> Iterator[Any]:
    yield ["parameters", ""], [[name, f"{number:,}"] for name, number in costs.parameters.items()]
    yield ""
    yield ["MFLOP per token", ""], [[name, f"{x / 1e6:,.1f}"] for name, x in costs.flops_per_token.items()]
    yield ""
    ways = list(costs.memory)
    header = ["GiB per GPU", *(f"states: {way}" for way in ways)]
    rows = [[part, *(f"{costs.memory[way][part] / GIB:.2f}" for way in ways)] for part in costs.memory[ways[0]]]
    rows.append(["largest batch_size", *(f"{costs.largest_batch_size[way]}" for way in ways)])
    yield header, rows
    total = costs.tokens * sum(costs.flops_per_token.values())
    yield f"\n{costs.tokens / 1e9:.3g} billion tokens, {total:.3g} FLOPs\n"
    yield from (f"assumed: {line}" for line in costs.assumptions)
    if all(costs.memory[way]["total"] > costs.gpu_memory for way in ways):
        yield f"note: this does not fit into {costs.gpu_memory / GIB:.0f} GiB; lower train.batch_size"


def step(settings: ModelSettings, *, out: Path | None = None) -> Output:
    """Time the training step of language models under each scheme.

    Forward, backward and fused AdamW, and the ratio to the plain residual's in the same rounds. All models are checked
    against float64 first.

    Examples:
        residua cost step --presets ddl-cc ddl-tc
        residua cost step --presets mhc --device cuda --precision bfloat16 --compile

    Args:
        out (FILE): append one JSON line for each result, once it is measured
    """
    from residua.lab.cost.steps import benchmark

    return measure(benchmark, settings, out)


def memory(settings: MemorySettings, *, out: Path | None = None) -> Output:
    """Measure the memory of a training step under each scheme.

    What the backward pass keeps, in vectors of the model's width for each token and layer, and the peak of a step. All
    models are checked against float64 first.

    Examples:
        residua cost memory --presets ddl-cc ddl-cc:recompute=none
        residua cost memory --base llama --no-peak

    Args:
        out (FILE): append one JSON line for each result, once it is measured
    """
    from residua.lab.cost.measured_memory import benchmark

    return measure(benchmark, settings, out)


def measure(benchmark: Callable[..., Any], settings: Any, out: Path | None) -> Output:
    """Run a benchmark with a progress bar. Append each record to the file `out` at once; print notes on stderr."""
    from residua.records.folder import writable
    from residua.records.jsonlines import JsonLines
    from residua.records.progress import Progress, say

    with ExitStack() as stack:
        lines = None
        if out is not None:
            with writable(out, "a file to append to"):  # raises before hours of measuring
                lines = stack.enter_context(JsonLines(out.resolve()))
        bar = stack.enter_context(Progress("checking, then measuring", settings.steps, lines=False, threaded=False))
        steps_done = counter()

        def advance() -> None:
            bar.update(number := next(steps_done), f"{number}/{settings.steps}")

        def keep(record: Mapping[str, Any]) -> None:
            if lines is not None:
                lines.write(record)
                lines.sync()

        advance()
        result = benchmark(settings, advance=advance, keep=keep)
    for note in getattr(result, "notes", []):
        say(one_line(note))
    return Output(result.records(), [result.table()])
