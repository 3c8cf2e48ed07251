"""The command `residua bench` and what it can measure."""

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import fields
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any, get_args

from residua.commands.base import Arguments, Parser, SubCommand, add_json, print_json, whole
from residua.tables import print_table
from residua.terminal import one_line

HELP = "measure the speed and the memory of a training step under each scheme"
EXAMPLES = """\
residua bench models --device cpu --presets ddl-cc ddl-tc
residua bench memory --presets ddl-cc ddl-cc:recompute=none"""
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
"""What the help says of settings that are whole numbers. A sub-command has the ones that its settings have."""
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


def add_shared(parser: Parser, settings: type) -> None:
    """Add the device, everything of `settings` that `NUMBERS` and `LISTS` explain, and where results go."""
    from residua.benchmarks.settings import Device

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
    from residua.benchmarks.settings import BASELINE, Precision

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
    what = f"compile every model, the plain residual included{compiled}"
    parser.add_argument("--compile", action="store_true", help=what)


def _models_arguments(parser: Parser) -> None:
    from residua.benchmarks import models

    add_models(parser, models.ModelSettings, "bfloat16 is autocast")
    _base(parser)


def _base(parser: Parser) -> None:
    from residua.benchmarks.models import Base, ModelSettings

    what = "residua's model, or a Llama of transformers that residua.convert gives each scheme (default: %(default)s)"
    parser.add_argument("--base", default=ModelSettings.base, choices=get_args(Base), help=what)


def _memory_arguments(parser: Parser) -> None:
    from residua.benchmarks import memory

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
    """Run the benchmark of a module, with its settings of this kind, behind a bar; append its records to --out as they
    come, print its results, and its notes on stderr.
    """
    from residua.runs.folder import writable
    from residua.runs.jsonlines import JsonLines
    from residua.runs.progress import Progress

    found = import_module(module)
    settings = chosen(arguments, getattr(found, kind))
    with ExitStack() as stack:
        lines = None
        if arguments.out is not None:
            with writable(arguments.out, "a file to append to"):  # before hours are spent on the records
                lines = stack.enter_context(JsonLines(Path(arguments.out).resolve()))
        bar = stack.enter_context(Progress("checking, then measuring", settings.steps, lines=False, threaded=False))
        done = count()

        def advance() -> None:
            bar.update(number := next(done), f"{number}/{settings.steps}")

        def keep(record: Mapping[str, Any]) -> None:
            if lines is not None:
                lines.write(record)
                lines.sync()

        advance()
        result = found.benchmark(settings, advance=advance, keep=keep)
    if arguments.json:
        print_json(result.records())
    else:
        print_table(*result.table())
    for note in getattr(result, "notes", []):
        print(one_line(note), file=sys.stderr)
    return 0


SUBCOMMANDS: Mapping[str, SubCommand] = {
    "models": SubCommand(
        "training step of whole language models",
        "Time the training step (forward, backward, fused AdamW) of language models under each scheme, and its ratio "
        "to the plain residual's in the same rounds. Check all models against float64 first.",
        _models_arguments,
        partial(measure, "residua.benchmarks.models", "ModelSettings"),
    ),
    "memory": SubCommand(
        "memory of a training step",
        "Count what each scheme keeps for the backward pass, in vectors of the model's width for each token and layer, "
        "and measure the peak of a training step. Check all models against float64 first.",
        _memory_arguments,
        partial(measure, "residua.benchmarks.memory", "MemorySettings"),
    ),
}
