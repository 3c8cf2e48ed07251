"""The command `residua study tune`."""

import importlib
from pathlib import Path

from residua.commands.base import Arguments, Parser, add_json, print_json, whole
from residua.errors import InputError, extra
from residua.records.table import print_table

HELP = "tune keys of a training configuration over grids, seeds and neighbours"
EXAMPLES = """\
residua study tune --config tiny --over train.lr=1e-3,2e-3,4e-3 --seeds 3 --processes 2 --out sweeps/residual
residua study tune --config tiny --over model.connection=residual,ddl --over train.lr=2e-3,4e-3 --out sweeps/two
residua study tune --config tiny --model.connection ddl --over train.lr=2e-3,4e-3 --neighbours --out sweeps/ddl"""


def add_arguments(parser: Parser) -> None:
    """Add the arguments to the parser of `residua study tune`."""
    from residua.lab.training import add_config_arguments

    parser.usage = (
        "residua study tune --out DIR --over KEY=VALUE,VALUE,... [--over ...] [--config NAME|FILE.yaml ...] "
        "[--seeds N] [--neighbours] [--finalists N] [--processes N] [--keep-runs] [--json] [--KEY VALUE ...]"
    )
    parser.add_argument("--out", metavar="DIR", help="a new folder, or the folder of a sweep to continue")
    parser.add_argument(
        "--over",
        action="append",
        default=[],
        metavar="KEY=VALUE,...",
        help="a key and the values to try; may be given several times. Keys whose values are not positive numbers, "
        "such as model.connection, make groups that are tuned by themselves",
    )
    parser.add_argument("--seeds", type=whole(1), default=1, metavar="N", help="runs of each point (default: 1)")
    parser.add_argument(
        "--neighbours",
        action="store_true",
        help="continue from the best point of the grid: train its neighbours, each number halved and doubled, until "
        "none is better",
    )
    parser.add_argument(
        "--finalists",
        type=whole(1),
        metavar="N",
        help="points of each group that get more than one seed, the best ones (default: all, or 3 with --neighbours)",
    )
    parser.add_argument(
        "--processes",
        type=whole(1),
        default=1,
        metavar="N",
        help="runs at the same time, each with one thread (default: 1)",
    )
    parser.add_argument("--keep-runs", action="store_true", help="keep the run folders and their last checkpoints")
    add_json(parser)
    add_config_arguments(parser)


def run(arguments: Arguments) -> None:
    """Train the missing runs and show the results. Raises InputError and RunError."""
    from residua.lab.training import load_config

    if arguments.print_config:
        print(load_config(arguments.config, arguments.overrides).to_yaml(), end="")
        return
    if arguments.out is None:
        raise InputError("give --out DIR, the folder of the sweep")
    with extra("lab"):  # raises before hours of training
        importlib.import_module("matplotlib")
    from residua.lab.study.sweep import Sweep, parse_over, train_sweep

    finalists = 3 if arguments.neighbours and arguments.finalists is None else arguments.finalists
    sweep = Sweep(
        arguments.config,
        tuple(arguments.overrides),
        parse_over(arguments.over),
        seeds=arguments.seeds,
        neighbours=arguments.neighbours,
        finalists=finalists,
    )
    outcome = train_sweep(sweep, arguments.out, processes=arguments.processes, keep=arguments.keep_runs)
    if arguments.json:
        print_json(outcome.to_json())
        return
    print_table(*outcome.table())
    for note in outcome.notes:
        print(f"note: {note}")
    for name in ("records.jsonl", "sweep.json", *(["sweep.png"] if outcome.best else [])):
        print(f"written: {Path(arguments.out) / name}")
    if outcome.best:
        print(f"train the best with: {outcome.command()}")
