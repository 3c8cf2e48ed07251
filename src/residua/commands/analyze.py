"""The command `residua analyze`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from residua.commands.base import Arguments, Parser, add_checkpoint, add_data, add_json, opens_model, print_json, whole
from residua.errors import InputError
from residua.tables import print_table
from residua.terminal import one_line

if TYPE_CHECKING:
    from residua.analysis import Trace

HELP = "what the connections of a trained model do: gates, norms, mixing, warnings"
EXAMPLES = """\
residua analyze runs/ddl
residua analyze runs/ddl --prompt 'The function returns'
residua analyze runs/ddl --all-checkpoints --json"""


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN|HF_DIR", help="folder of a run, or of a model (with --prompt)")
    checkpoints = parser.add_mutually_exclusive_group()
    add_checkpoint(checkpoints)
    checkpoints.add_argument("--all-checkpoints", action="store_true", help="every checkpoint, one trace each")
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="the text to read; '' for a new document (default: the beginning of the run's validation data)",
    )
    add_data(parser)
    parser.add_argument(
        "--tokens",
        type=whole(),
        metavar="N",
        help="at most so many (default: the run's train.sequence_length, or the prompt)",
    )
    add_json(parser)


def run(arguments: Arguments) -> None:
    from residua.analysis import sublayer_statistics, warnings

    folder = Path(arguments.run)
    found = [(trace, trace.keep(folder)) for trace in _traces(arguments)]
    if arguments.json:
        print_json(
            [
                {
                    "trace": path and str(path),
                    **trace.facts,
                    "warnings": warnings(trace),
                    "sublayers": sublayer_statistics(trace),
                }
                for trace, path in found
            ]
        )
        return
    for number, (trace, path) in enumerate(found):
        print("\n" * (number > 0), end="")
        _print(trace)
        if path is not None:
            print(f"trace: {path}")


def _traces(arguments: Arguments) -> "Iterator[Trace]":
    from residua.experiment import open_model, open_run, trace_prompt, trace_run
    from residua.training.checkpoint import saved_steps

    folder = Path(arguments.run)
    if opens_model(folder, True if arguments.all_checkpoints else arguments.checkpoint):
        if arguments.prompt is None:
            raise InputError(f"{folder}: this model has no validation text of its own; give --prompt TEXT")
        facts = {"run": folder.resolve().name}
        yield trace_prompt(*open_model(folder), arguments.prompt, tokens=arguments.tokens, facts=facts)
        return
    steps = saved_steps(folder) if arguments.all_checkpoints else []
    for step in steps or [arguments.checkpoint]:
        yield trace_run(open_run(folder, step, data=arguments.data), arguments.prompt, tokens=arguments.tokens)


def _print(trace: "Trace") -> None:
    from residua.analysis import overview, summary, warnings

    first, *others = overview(trace)
    print(one_line(first))
    print_table(*summary(trace))
    for line in others:
        print(one_line(line))
    for warning in warnings(trace):
        print(f"warning: {one_line(warning)}")
