"""The command `residua study`."""

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from residua.commands import geometry, tune
from residua.commands.base import Arguments, Parser, SubCommand, add_json, number, print_json, whole
from residua.errors import require

if TYPE_CHECKING:
    from residua.lab.study.plan import Plan

HELP = "compare schemes with tuning budgets, paired seeds and costs; tune a recipe; geometric benchmarks"
EXAMPLES = f"""\
residua study run resbench --data data/resbench --out runs/resbench --rungs 0.3M --schemes residual ddl
residua study run resbench --out runs/resbench --data data/resbench --rungs 0.1M --questions erasing
residua study run my-study.yaml --out runs/mine --dry-run
residua study run my-study.yaml --out runs/mine --processes 2
residua study report runs/mine
residua study verify runs/mine --share 0.1
residua study verify runs/mine --connections --schemes ddl
{tune.EXAMPLES}
{geometry.EXAMPLES}"""


def add_arguments(parser: Parser) -> None:
    """Add the sub-commands to the parser of `residua study`."""
    parser.add_subcommands(SUBCOMMANDS)


def run(arguments: Arguments) -> int | None:
    """Do what was chosen. Raises InputError and RunError."""
    return arguments.chosen(arguments)


def _run_arguments(parser: Parser) -> None:
    parser.add_argument("study", metavar="FILE.yaml|resbench", help="what to compare, and how")
    parser.add_argument("--out", metavar="DIR", required=True, help="the folder of the study, new or to continue")
    _add_data(parser)
    _add_schemes(parser, "these beside the baselines (default: all)")
    parser.add_argument("--questions", nargs="+", metavar="NAME", help="with the schemes that these questions compare")
    parser.add_argument("--processes", type=whole(1), default=1, metavar="N", help="runs at the same time (default: 1)")
    parser.add_argument("--no-costs", action="store_true", help="measure neither time nor memory")
    parser.add_argument(
        "--measure",
        nargs="?",
        const="step",
        choices=("step", "compiled"),
        help="measure time and memory again, and train nothing; compiled: the time of a step through torch.compile",
    )
    parser.add_argument("--rounds", type=whole(9), metavar="N", help="of time measurements (default: 45)")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print runs, hours and the differences that they can show, and train nothing",
    )
    parser.add_argument(
        "--teraflops",
        type=number,
        metavar="T",
        help="dry run: a second, for another machine (default: as a step of the first baseline has here)",
    )
    add_json(parser)


def _report_arguments(parser: Parser) -> None:
    _add_folder(parser)
    parser.add_argument("--out", metavar="DIR", help="where to write (default: the folder of the study)")
    add_json(parser)


def _verify_arguments(parser: Parser) -> None:
    _add_folder(parser)
    _add_data(parser)
    _add_schemes(parser, "runs of these (default: all)")
    parser.add_argument("--seeds", nargs="+", type=whole(0), metavar="SEED", help="runs of these (default: all)")
    parser.add_argument("--share", type=number, help="of these runs (default: 0.1; 1 with --connections)")
    parser.add_argument("--draw", type=whole(0), help="decides which runs (default: another every time)")
    parser.add_argument(
        "--connections",
        action="store_true",
        help="measure the connections at every evaluation of reported runs, of the first seed without --seeds, for the "
        "report",
    )


def _add_folder(parser: Parser) -> None:
    parser.add_argument("folder", metavar="DIR", help="the folder of a study")


def _add_data(parser: Parser) -> None:
    parser.add_argument("--data", metavar="DATA", help="prepared data, in place of what the study names")


def _add_schemes(parser: Parser, which: str) -> None:
    parser.add_argument("--schemes", nargs="+", metavar="NAME", help=which)
    parser.add_argument("--rungs", nargs="+", metavar="NAME", help="these sizes (default: all)")


def _run(arguments: Arguments) -> None:
    from residua.lab.study.engine import ROUNDS, measure_again, run_study
    from residua.lab.study.plan import Plan, load_study

    study = load_study(arguments.study).only(arguments.schemes, arguments.rungs, arguments.questions)
    options = {"data": arguments.data, "rungs": arguments.rungs, "rounds": arguments.rounds or ROUNDS}
    if arguments.dry_run:
        _forecast(Plan(study, study.data(arguments.data), arguments.rungs), arguments)
        return
    if arguments.measure:
        measure_again(study, arguments.out, compiled=arguments.measure == "compiled", **options)
    else:
        run_study(study, arguments.out, processes=arguments.processes, costs=not arguments.no_costs, **options)
    _show(Path(arguments.out), Path(arguments.out), arguments.json)


def _forecast(plan: "Plan", arguments: Arguments) -> None:
    from residua.lab.study.engine import forecast
    from residua.records.table import cell, print_table

    if arguments.teraflops is not None:
        require(arguments.teraflops > 0, "--teraflops", "a number above 0", arguments.teraflops)
    sizes = forecast(plan, arguments.teraflops and 1e12 * arguments.teraflops)
    if arguments.json:
        print_json([size._asdict() for size in sizes])
        return
    total = sum(size.hours for size in sizes) / arguments.processes
    rows = [
        [
            *map(cell, (size.rung, size.schemes, size.runs, size.tokens)),
            f"{size.flops / 1e15:,.2f}",
            f"{size.hours:,.2f}",
            "nothing" if size.sees is None else f"{size.sees:.1f} deviations",
        ]
        for size in sizes
    ]
    print_table(["size", "schemes", "runs at most", "tokens of a run", "PFLOP", "hours", "sees"], rows)
    print(f"\nabout {total:,.2f} hours, {arguments.processes} at a time; a scheme's elementwise work comes on top")
    print(
        "sees: the difference that four of five such studies show before a correction, in standard deviations of the "
        "difference between two runs with one seed"
    )


def _report(arguments: Arguments) -> None:
    _show(Path(arguments.folder), Path(arguments.out or arguments.folder), arguments.json)


def _show(folder: Path, out: Path, as_json: bool) -> None:
    from residua.lab.study.report import markdown, payload, write_report
    from residua.lab.study.results import read_results

    found = read_results(folder)
    paths = write_report(found, out)
    if as_json:
        print_json(payload(found))
        return
    print(markdown(found), end="")
    for path in paths:
        print(f"written: {path}")


def _verify(arguments: Arguments) -> int:
    from residua.lab.study.verify import verify

    count = wrong = 0
    draw = secrets.randbelow(10**6) if arguments.draw is None else arguments.draw
    share = arguments.share if arguments.share is not None else 1 if arguments.connections else 0.1
    options = {name: getattr(arguments, name) for name in ("data", "schemes", "rungs", "seeds", "connections")}
    for one in verify(arguments.folder, draw=draw, share=share, **options):
        count, wrong = count + 1, wrong + (not one.equal)
        said = "equal to the last bit"
        if not one.equal:
            where = f" (recorded with {one.elsewhere}; last bits differ there)" if one.elsewhere else ""
            said = f"recorded {one.recorded['val_loss']}, now {one.repeated['val_loss']}{where}"
        steps = f"; measured at {len(one.points)} steps" if arguments.connections else ""
        print(f"{one.key}: {said}{steps}", flush=True)
    if count:
        print(f"{count - wrong} of {count} runs are equal to the last bit; --draw {draw} chooses them again")
    else:
        print(f"all of these runs are measured; residua study report {arguments.folder} shows them")
    return 1 if wrong else 0


SUBCOMMANDS: Mapping[str, SubCommand] = {
    "run": SubCommand(
        "run a study that a file describes, such as ResBench",
        "Tune every scheme of a study under one budget, train seeds that took no part in it, measure costs, and write "
        "tables with intervals. The same command goes on where a killed one ended.",
        _run_arguments,
        _run,
    ),
    "report": SubCommand(
        "tables and pictures of a study's records",
        "Make the tables and pictures again from the records of a study, without its data.",
        _report_arguments,
        _report,
    ),
    "verify": SubCommand(
        "repeat runs of a study, to the last bit",
        "Train some runs of a study again, drawn at random, and say whether their losses are equal to the last bit. "
        "With --connections also measure what the connections do along training.",
        _verify_arguments,
        _verify,
    ),
    "tune": SubCommand(tune.HELP, tune.HELP, tune.add_arguments, tune.run),
    "geometry": SubCommand(geometry.HELP, geometry.HELP, geometry.add_arguments, geometry.run),
}
