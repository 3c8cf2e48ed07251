"""The command `residua bench` and what it can measure."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, get_args

from residua.benchmarks import generate, memory, models, ops
from residua.benchmarks.cases import CASES, CONNECTIONS, Dtype
from residua.benchmarks.record import append_records, open_records
from residua.benchmarks.settings import BASELINE, Device, Precision
from residua.errors import extra

with extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[], None]

# What the help says of settings that are whole numbers; a command has those that its settings have.
NUMBERS: Mapping[str, str] = {
    "layers": "layers of attention and MLP",
    "dim": "width",
    "heads": "attention heads",
    "head_dim": "width of a head",
    "sequence_length": "tokens in a sequence",
    "batch_size": "sequences in a step",
    "prompt_length": "tokens before those that are timed",
    "new_tokens": "tokens that are written in one measurement",
    "vocab_size": "rows of the embedding",
    "rounds": "times each candidate is measured",
    "warmup": "rounds before that which do not count",
    "threads": "of the CPU; with more than one, wall-clock time is measured in place of CPU time",
    "seed": "of weights and inputs",
}
LISTS: Mapping[str, str] = {
    "tokens": "tokens of all sequences together",
    "dims": "widths",
    "channels": "value channels, or streams",
    "batch_sizes": "sequences that are written at once",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of `residua bench`."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="|".join(COMMANDS))
    for name, (add, measure, help, description) in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=description, allow_abbrev=False)
        command.set_defaults(measure=measure)
        add(command)
        command.add_argument("--out", metavar="FILE", help="append one JSON line for each result")
        command.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command that was chosen. Raises InputError and RunError."""
    return arguments.measure(arguments)


def _shared(parser: argparse.ArgumentParser, settings: type) -> None:
    """The device, and everything of `settings` that `NUMBERS` and `LISTS` explain."""
    parser.add_argument("--device", default=settings.device, choices=get_args(Device), help="(default: %(default)s)")
    for field in fields(settings):
        option = f"--{field.name.replace('_', '-')}"
        if field.name in NUMBERS:
            meaning = f"{NUMBERS[field.name]} (default: %(default)s)"
            parser.add_argument(option, type=int, default=field.default, metavar="N", help=meaning)
        elif field.name in LISTS:
            meaning = f"{LISTS[field.name]} (default: {' '.join(map(str, field.default))})"
            parser.add_argument(option, type=int, nargs="+", default=field.default, metavar="N", help=meaning)


def _of_models(parser: argparse.ArgumentParser, settings: type, precision: str) -> None:
    parser.add_argument(
        "--presets",
        nargs="+",
        default=settings.presets,
        metavar="NAME",
        help=f"schemes to measure beside {BASELINE}, with options where wanted, as in ddl-cc:recompute=none "
        "(default: all that residua schemes lists)",
    )
    _shared(parser, settings)
    parser.add_argument(
        "--precision",
        default=settings.precision,
        choices=get_args(Precision),
        help=f"{precision} (default: %(default)s)",
    )
    parser.add_argument(
        "--state-dtype", choices=get_args(Precision), help="of the residual state (default: that of the embeddings)"
    )


COMPILE = "compile every model, the plain residual included"


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    _of_models(parser, models.ModelSettings, "bfloat16 is autocast")
    parser.add_argument("--compile", action="store_true", help=COMPILE)


def _generate_arguments(parser: argparse.ArgumentParser) -> None:
    _of_models(parser, generate.GenerateSettings, "of the weights")
    parser.add_argument("--compile", action="store_true", help=f"{COMPILE}; with CUDA graphs on a CUDA device")


def _memory_arguments(parser: argparse.ArgumentParser) -> None:
    _of_models(parser, memory.MemorySettings, "bfloat16 is autocast")
    parser.add_argument("--compile", action="store_true", help=COMPILE)
    parser.add_argument(
        "--no-peak", dest="peak", action="store_false", help="only count what is kept, without running a step"
    )


def _ops_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operations",
        nargs="+",
        default=ops.OpSettings.operations,
        metavar="NAME",
        help=f"of {', '.join(CASES)}, and {CONNECTIONS[0]} or another preset: the connection around a sublayer "
        "(default: all, and some connections)",
    )
    parser.add_argument(
        "--implementation",
        dest="implementations",
        nargs="+",
        default=ops.OpSettings.implementations,
        choices=get_args(ops.Implementation),
        help="(default: auto)",
    )
    parser.add_argument(
        "--dtypes", nargs="+", default=ops.OpSettings.dtypes, choices=get_args(Dtype), help="(default: float32)"
    )
    _shared(parser, ops.OpSettings)


def _chosen(arguments: argparse.Namespace, settings: type) -> Any:
    values = {
        field.name: getattr(arguments, field.name) for field in fields(settings) if hasattr(arguments, field.name)
    }
    return settings(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _models(arguments: argparse.Namespace) -> int:
    settings = _chosen(arguments, models.ModelSettings)
    steps = len(settings.presets) * (settings.warmup + settings.rounds)
    return _measured(arguments, steps, lambda advance: models.benchmark(settings, advance=advance))


def _generate(arguments: argparse.Namespace) -> int:
    settings = _chosen(arguments, generate.GenerateSettings)
    steps = len(settings.batch_sizes) * len(settings.presets) * (settings.warmup + settings.rounds)
    return _measured(arguments, steps, lambda advance: generate.benchmark(settings, advance=advance))


def _memory(arguments: argparse.Namespace) -> int:
    settings = _chosen(arguments, memory.MemorySettings)
    return _measured(arguments, len(settings.presets), lambda advance: memory.benchmark(settings, advance=advance))


def _ops(arguments: argparse.Namespace) -> int:
    settings = _chosen(arguments, ops.OpSettings)
    return _measured(arguments, len(settings.plan()), lambda advance: ops.benchmark(settings, advance=advance))


def _measured(arguments: argparse.Namespace, steps: int, benchmark: Callable[[Advance], Any]) -> int:
    """Run the benchmark with a bar of so many steps; write and print what it found, and its notes on stderr."""
    if arguments.out is not None:
        open_records(arguments.out)
    with _progress(steps) as advance:
        result = benchmark(advance)
    records = result.records()
    if arguments.out is not None:
        append_records(arguments.out, records)
    if arguments.json:
        print(json.dumps(records, indent=2))
    else:
        _print_table(*result.table())
    for note in getattr(result, "notes", []):
        print(note, file=sys.stderr)
    return 0


COMMANDS: Mapping[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[Any], int], str, str]] = {
    "ops": (
        _ops_arguments,
        _ops,
        "single operations against the bandwidth of a copy",
        "Time operations, forward and with backward, from cold caches, and say how much of the bandwidth of a copy the "
        "bytes that they have to move reach. Every implementation is first checked against float64. Liger-Kernel and "
        "hyper-connections take part where they are installed.",
    ),
    "models": (
        _models_arguments,
        _models,
        "training step of whole language models",
        "Time the training step (forward, backward, fused AdamW) of language models under each scheme, "
        "and its ratio to the plain residual's in the same rounds. All models are first checked against float64.",
    ),
    "generate": (
        _generate_arguments,
        _generate,
        "writing a token, after a prompt",
        "Time the writing of a token under each scheme, with a cache of constant size, and its ratio to the plain "
        "residual's in the same rounds. All models are first checked against float64.",
    ),
    "memory": (
        _memory_arguments,
        _memory,
        "memory of a training step",
        "Count what each scheme keeps for the backward pass, in vectors of the model's width for each token and layer, "
        "and measure the peak of a training step. All models are first checked against float64.",
    ),
}


@contextmanager
def _progress(total: int) -> Iterator[Advance]:
    """A bar on an interactive terminal, else nothing. Yields how to advance it."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # It draws only between two measurements: drawing in a thread of its own would count as CPU time of the models.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False) as bar:
        task = bar.add_task("checking, then measuring", total=total)
        bar.refresh()

        def advance() -> None:
            bar.advance(task)
            bar.refresh()

        yield advance


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """The first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for first, *others in (header, ["-" * width for width in widths], *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]))
