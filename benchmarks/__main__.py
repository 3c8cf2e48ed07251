"""Measurements for those who work on residua: single operations, generation, and other packages beside ours.

    python -m benchmarks ops --device cuda
    python -m benchmarks generate --presets ddl ddl-cc
    python -m benchmarks peers --packages hyper-connections

Run it in the root of a clone. What users measure too, training steps and their memory, is `residua cost`.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import get_args

from benchmarks import generate, ops, peers
from benchmarks.cases import CASES, CONNECTIONS, Dtype
from residua.commands.base import BAD_INPUT, FAILED, HelpShown, Parser, SubCommand, fail
from residua.commands.cost import add_models, add_shared, measure
from residua.errors import InputError, RunError
from residua.lab.cost.settings import Precision


def add_ops(parser: Parser) -> None:
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
    add_shared(parser, ops.OpSettings)


def add_generate(parser: Parser) -> None:
    add_models(parser, generate.GenerateSettings, "of the weights", "; with CUDA graphs on a CUDA device")


def add_peers(parser: Parser) -> None:
    packages = peers.PeerSettings.packages
    names = f"of {', '.join(packages)} (default: all)"
    parser.add_argument("--packages", nargs="+", default=packages, metavar="NAME", help=names)
    add_shared(parser, peers.PeerSettings)
    default = peers.PeerSettings.precision
    parser.add_argument(
        "--precision", default=default, choices=get_args(Precision), help="bfloat16 is autocast (default: %(default)s)"
    )


BENCHMARKS: Mapping[str, SubCommand] = {
    "ops": SubCommand(
        "single operations against the bandwidth of a copy",
        "Time operations, forward and with backward, from cold caches, and say what share of the bandwidth of a copy "
        "they reach with the bytes that they must move. Check every implementation against float64 first.",
        add_ops,
        partial(measure, "benchmarks.ops", "OpSettings"),
    ),
    "generate": SubCommand(
        "writing a token, after a prompt",
        "Time the writing of a token under each scheme, with a cache of constant size, and its ratio to the plain "
        "residual's in the same rounds. Check all models against float64 first.",
        add_generate,
        partial(measure, "benchmarks.generate", "GenerateSettings"),
    ),
    "peers": SubCommand(
        "other packages' implementations beside ours",
        "Check what other packages compute against the paper's scheme, with the kit of residua.testing, and say what "
        "differs. Time the ones that agree, forward and backward, and count what they keep, beside ours with the same "
        "parameters. A package that is not installed is named.",
        add_peers,
        partial(measure, "benchmarks.peers", "PeerSettings"),
    ),
}


def run(argv: list[str] | None = None) -> int:
    """Run one benchmark; return 0. Raises InputError or RunError."""
    parser = Parser(prog="python -m benchmarks", description=__doc__.partition("\n")[0])
    parser.add_subcommands(BENCHMARKS)
    arguments = parser.parse_args(argv)
    return arguments.chosen(arguments)


def main() -> int:
    """Return the exit status: 0, 1 for a failure at run time, 2 for bad input."""
    try:
        return run()
    except HelpShown:
        return 0
    except (InputError, RunError) as error:
        return fail(error, BAD_INPUT if isinstance(error, InputError) else FAILED)


if __name__ == "__main__":
    sys.exit(main())
