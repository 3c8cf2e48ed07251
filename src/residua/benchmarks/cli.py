"""The command `residua bench` and what it can measure."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import get_args

from residua.benchmarks.models import BASELINE, Device, ModelSettings, Precision, benchmark
from residua.benchmarks.record import append_records, open_records
from residua.errors import extra

with extra("train"):
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the sub-commands to the parser of `residua bench`."""
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="models")
    _models_arguments(
        commands.add_parser(
            "models",
            help="training step of whole language models",
            description="Time the training step (forward, backward, fused AdamW) of language models under each scheme, "
            "and its ratio to the plain residual's in the same rounds. All models are first checked against float64.",
            allow_abbrev=False,
        )
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the sub-command that was chosen. Raises InputError and RunError."""
    return arguments.measure(arguments)


def _models_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(measure=_models)
    parser.add_argument(
        "--presets",
        nargs="+",
        default=list(ModelSettings.presets),
        metavar="NAME",
        help=f"schemes to measure beside {BASELINE} (default: all that residua schemes lists)",
    )
    parser.add_argument(
        "--device", default=ModelSettings.device, choices=get_args(Device), help="(default: %(default)s)"
    )
    for name, meaning in (
        ("layers", "layers of attention and MLP"),
        ("dim", "width"),
        ("heads", "attention heads"),
        ("head_dim", "width of a head"),
        ("sequence_length", "tokens in a sequence"),
        ("batch_size", "sequences in a step"),
        ("vocab_size", "rows of the embedding"),
        ("rounds", "times each step is measured"),
        ("warmup", "rounds before that which do not count"),
        ("threads", "of the CPU; with more than one, wall-clock time is measured in place of CPU time"),
        ("seed", "of weights and tokens"),
    ):
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=getattr(ModelSettings, name),
            metavar="N",
            help=f"{meaning} (default: %(default)s)",
        )
    parser.add_argument(
        "--precision",
        default=ModelSettings.precision,
        choices=get_args(Precision),
        help="bfloat16 is autocast (default: %(default)s)",
    )
    parser.add_argument("--compile", action="store_true", help="compile every model, the plain residual included")
    parser.add_argument("--out", metavar="FILE", help="append one JSON line for each preset")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _models(arguments: argparse.Namespace) -> int:
    chosen = {name: getattr(arguments, name) for name in ModelSettings.__dataclass_fields__}
    settings = ModelSettings(**{**chosen, "presets": tuple(arguments.presets)})
    if arguments.out is not None:
        open_records(arguments.out)
    with _progress(len(settings.presets) * (settings.warmup + settings.rounds)) as advance:
        result = benchmark(settings, advance=advance)
    records = result.records()
    if arguments.out is not None:
        append_records(arguments.out, records)
    if arguments.json:
        print(json.dumps(records, indent=2))
    else:
        _print_table(*result.table())
    return 0


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
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
    """The first column to the left, the others, all numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    for first, *others in (header, ["-" * width for width in widths], *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        print("  ".join([first.ljust(widths[0]), *cells]))
