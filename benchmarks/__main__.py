"""Measurements for those who work on residua: single operations, generation, and other packages beside ours.

    python -m benchmarks ops --device cuda
    python -m benchmarks generate --presets ddl ddl-cc
    python -m benchmarks peers --packages hyper-connections

Run it in the root of a clone. `residua cost step` measures training steps.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks import generate, ops, peers
from benchmarks.generate import GenerateSettings
from benchmarks.ops import OpSettings
from benchmarks.peers import PeerSettings
from residua.commands.base import BAD_INPUT, FAILED, fail
from residua.commands.signature import Output, run_function
from residua.errors import InputError, RunError
from residua.lab.records.jsonlines import JsonLines
from residua.lab.records.progress import Progress, say
from residua.lab.records.terminal import one_line


def run_ops(settings: OpSettings, *, out: Path | None = None) -> Output:
    """Time single operations against the bandwidth of a copy.

    Forward and with backward, from cold caches, with the share of the bandwidth of a copy that they reach with the
    bytes that they must move. Every implementation is checked against float64 first.

    Examples:
        python -m benchmarks ops --operations hyper_write --implementations triton

    Args:
        out (FILE): append one JSON line for each result, once it is measured
    """
    return measure(ops.benchmark, settings, out)


def run_generate(settings: GenerateSettings, *, out: Path | None = None) -> Output:
    """Time the writing of a token after a prompt under each scheme, relative to the plain residual.

    With a cache of constant size, in the same rounds. All models are checked against float64 first.

    Examples:
        python -m benchmarks generate --presets ddl ddl-cc

    Args:
        out (FILE): append one JSON line for each result, once it is measured
    """
    return measure(generate.benchmark, settings, out)


def run_peers(settings: PeerSettings, *, out: Path | None = None) -> Output:
    """Check other packages against the paper's scheme, and time the right ones beside ours.

    The kit of residua.testing says what differs. Those that agree are timed, forward and backward, with what they keep,
    beside ours with the same parameters. A package that is not installed is named.

    Examples:
        python -m benchmarks peers --packages hyper-connections

    Args:
        out (FILE): append one JSON line for each result, once it is measured
    """
    return measure(peers.benchmark, settings, out)


def measure(benchmark: Callable[..., Any], settings: Any, out: Path | None) -> Output:
    """Run a benchmark with a progress bar. Append each record to the file `out` at once; print notes on stderr."""
    with ExitStack() as stack:
        lines = None
        if out is not None:
            lines = stack.enter_context(JsonLines(out.resolve()))  # raises before hours of measuring
        bar = stack.enter_context(Progress("checking, then measuring", settings.steps, measuring=True))
        steps_done = count()

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


BENCHMARKS = {"ops": run_ops, "generate": run_generate, "peers": run_peers}


def run(argv: list[str]) -> int:
    """Run one benchmark; return 0. Raises InputError or RunError."""
    if not argv or argv[0] not in BENCHMARKS:
        raise InputError(f"one of {', '.join(BENCHMARKS)} must follow, got {argv[:1]}")
    return run_function(f"python -m benchmarks {argv[0]}", BENCHMARKS[argv[0]], argv[1:]) or 0


def main() -> int:
    """Return the exit status: 0, 1 for a failure at run time, 2 for bad input."""
    try:
        return run(sys.argv[1:])
    except (InputError, RunError) as error:
        return fail(error, BAD_INPUT if isinstance(error, InputError) else FAILED)


if __name__ == "__main__":
    sys.exit(main())
