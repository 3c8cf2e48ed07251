"""The command `residua cost`."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from residua.commands.base import Arguments, Parser, SubCommand, add_json, print_json, whole
from residua.errors import InputError
from residua.records.table import print_table
from residua.records.terminal import one_line

if TYPE_CHECKING:
    from residua.lab.cost.estimate import Estimate

HELP = "what a run will cost: count its FLOPs and memory, or measure a step of each scheme"
EXAMPLES = """\
residua cost count --config small --model.connection ddl-tc --gpus 4 --gpu h200
residua cost step --device cpu --presets ddl-cc ddl-tc
residua cost memory --presets ddl-cc ddl-cc:recompute=none"""
GIB = 2**30
MOST_THREADS = 4096

NUMBERS: Mapping[str, str] = {
    "layers": "layers of attention and MLP",
    "dim": "width",
    "heads": "attention heads",
    "head_dim": "width of a head",
    "sequence_length": "tokens in a sequence",
    "batch_size": "sequences in a step",
    "prompt_length": "tokens before the timed ones",
    "new_tokens": "tokens that are written in one measurement",
    "vocab_size": "rows of the embedding",
    "rounds": "times each candidate is measured",
    "warmup": "rounds before that which do not count",
    "threads": "of the CPU; with more than one, wall-clock time is measured in place of CPU time",
    "seed": "of weights and inputs",
}
"""The help of integer settings. A subcommand has options for those of its settings."""
LISTS: Mapping[str, str] = {
    "tokens": "tokens of all sequences together",
    "dims": "widths",
    "channels": "value channels, or streams",
    "batch_sizes": "sequences that are written at once",
}
"""The same for lists of whole numbers."""


def add_arguments(parser: Parser) -> None:
    parser.add_subcommands(SUBCOMMANDS)


def run(arguments: Arguments) -> int | None:
    return arguments.chosen(arguments)


def _count_arguments(parser: Parser) -> None:
    from residua.lab.training import add_config_arguments

    parser.usage = (
        "residua cost count --config NAME|FILE.yaml [--gpus N] [--gpu NAME] [--json] [--print_config] [--KEY VALUE ...]"
    )
    parser.add_argument("--gpus", type=whole(high=2**20), default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument("--gpu", default="h200", metavar="NAME", help="h200, h100, b200, a100 or rtx4090 (h200)")
    add_json(parser)
    add_config_arguments(parser)


def _count(arguments: Arguments) -> None:
    from residua.lab.training import load_config

    if arguments.config is None and not arguments.print_config:
        raise InputError("--config NAME|FILE.yaml must say which run to count; residua cost count --help explains")
    config = load_config(arguments.config, arguments.overrides)
    if arguments.print_config:
        print(config.to_yaml(), end="")
        return

    from residua.lab.cost.estimate import estimate
    from residua.lab.experiment import expected_vocabulary

    vocab_size = expected_vocabulary(config)
    costs = estimate(config, vocab_size=vocab_size, gpu=arguments.gpu, gpus=arguments.gpus)
    if arguments.json:
        print_json(asdict(costs))
    else:
        _print_estimate(costs)


def _print_estimate(costs: "Estimate") -> None:
    print_table(["parameters", ""], [[name, f"{count:,}"] for name, count in costs.parameters.items()])
    print()
    print_table(["MFLOP per token", ""], [[name, f"{x / 1e6:,.1f}"] for name, x in costs.flops_per_token.items()])
    print()
    ways = list(costs.memory)
    header = ["GiB per GPU", *(f"states: {way}" for way in ways)]
    rows = [[part, *(f"{costs.memory[way][part] / GIB:.2f}" for way in ways)] for part in costs.memory[ways[0]]]
    rows.append(["largest batch_size", *(f"{costs.largest_batch_size[way]}" for way in ways)])
    print_table(header, rows)
    print()
    print(f"{costs.tokens / 1e9:.3g} billion tokens, {costs.tokens * sum(costs.flops_per_token.values()):.3g} FLOPs")
    print()
    for line in costs.assumptions:
        print(f"assumed: {line}")
    if all(costs.memory[way]["total"] > costs.gpu_memory for way in ways):
        print(f"note: this does not fit into {costs.gpu_memory / GIB:.0f} GiB; lower train.batch_size")


def add_shared(parser: Parser, settings: type) -> None:
    """Add the options of the device, of the settings in `NUMBERS` and `LISTS`, and of the output."""
    from residua.lab.cost.settings import Device

    parser.add_argument("--device", default=settings.device, choices=get_args(Device), help="(default: %(default)s)")
    for field in fields(settings):
        option = f"--{field.name.replace('_', '-')}"
        if field.name in NUMBERS:
            meaning = f"{NUMBERS[field.name]} (default: %(default)s)"
            kind = whole(high=MOST_THREADS) if field.name == "threads" else whole()
            parser.add_argument(option, type=kind, default=field.default, metavar="N", help=meaning)
        elif field.name in LISTS:
            meaning = f"{LISTS[field.name]} (default: {' '.join(map(str, field.default))})"
            parser.add_argument(option, type=whole(), nargs="+", default=field.default, metavar="N", help=meaning)
    parser.add_argument("--out", metavar="FILE", help="append one JSON line for each result, once it is measured")
    add_json(parser)


def add_models(parser: Parser, settings: type, precision: str, compiled: str = "") -> None:
    from residua.lab.cost.settings import BASELINE, Precision

    parser.add_argument(
        "--presets",
        nargs="+",
        default=settings.presets,
        metavar="NAME",
        help=f"schemes to measure beside {BASELINE}, with options where wanted, as in ddl-cc:recompute=none "
        "(default: all that residua schemes lists)",
    )
    add_shared(parser, settings)
    parser.add_argument(
        "--precision",
        default=settings.precision,
        choices=get_args(Precision),
        help=f"{precision} (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dtype", choices=get_args(Precision), help="of the residual state (default: as the embeddings)"
    )
    text = f"compile every model, the plain residual included{compiled}"
    parser.add_argument("--compile", action="store_true", help=text)


def _step_arguments(parser: Parser) -> None:
    from residua.lab.cost import steps as models

    add_models(parser, models.ModelSettings, "bfloat16 is autocast")
    _base(parser)


def _base(parser: Parser) -> None:
    from residua.lab.cost.steps import Base, ModelSettings

    text = "residua's model, or a Llama of transformers that residua.convert gives each scheme (default: %(default)s)"
    parser.add_argument("--base", default=ModelSettings.base, choices=get_args(Base), help=text)


def _memory_arguments(parser: Parser) -> None:
    from residua.lab.cost import measured_memory as memory

    add_models(parser, memory.MemorySettings, "bfloat16 is autocast")
    _base(parser)
    parser.add_argument(
        "--no-peak", dest="peak", action="store_false", help="only count what is kept, without running a step"
    )


def chosen(arguments: Arguments, settings: type) -> Any:
    values = {
        field.name: getattr(arguments, field.name) for field in fields(settings) if hasattr(arguments, field.name)
    }
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def measure(module: str, kind: str, arguments: Arguments) -> int:
    """Run the benchmark of a module with its settings class `kind` and a progress bar. Append each record to --out at
    once, then print the results, and the notes on stderr.
    """
    from residua.records.folder import writable
    from residua.records.jsonlines import JsonLines
    from residua.records.progress import Progress

    benchmarks = import_module(module)
    settings = chosen(arguments, getattr(benchmarks, kind))
    with ExitStack() as stack:
        lines = None
        if arguments.out is not None:
            with writable(arguments.out, "a file to append to"):  # raises before hours of measuring
                lines = stack.enter_context(JsonLines(Path(arguments.out).resolve()))
        bar = stack.enter_context(Progress("checking, then measuring", settings.steps, lines=False, threaded=False))
        steps_done = count()

        def advance() -> None:
            bar.update(number := next(steps_done), f"{number}/{settings.steps}")

        def keep(record: Mapping[str, Any]) -> None:
            if lines is not None:
                lines.write(record)
                lines.sync()

        advance()
        result = benchmarks.benchmark(settings, advance=advance, keep=keep)
    if arguments.json:
        print_json(result.records())
    else:
        print_table(*result.table())
    for note in getattr(result, "notes", []):
        print(one_line(note), file=sys.stderr)
    return 0


SUBCOMMANDS: Mapping[str, SubCommand] = {
    "count": SubCommand(
        "parameters, FLOPs and memory per GPU of a run, computed",
        "Compute the parameters, the FLOPs per token and the memory per GPU of a run, and say what was assumed.",
        _count_arguments,
        _count,
    ),
    "step": SubCommand(
        "time of a training step, measured",
        "Time the training step (forward, backward, fused AdamW) of language models under each scheme, and its ratio "
        "to the plain residual's in the same rounds. Check all models against float64 first.",
        _step_arguments,
        partial(measure, "residua.lab.cost.steps", "ModelSettings"),
    ),
    "memory": SubCommand(
        "memory of a training step, measured",
        "Count what each scheme keeps for the backward pass, in vectors of the model's width for each token and layer, "
        "and measure the peak of a training step. Check all models against float64 first.",
        _memory_arguments,
        partial(measure, "residua.lab.cost.measured_memory", "MemorySettings"),
    ),
}
