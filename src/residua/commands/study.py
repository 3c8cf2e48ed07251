"""The command `residua study`."""

import secrets
from pathlib import Path

from residua.commands.base import Arguments, Parser, add_json, number, print_json, whole
from residua.errors import InputError

HELP = "compare schemes with tuning budgets, paired seeds and costs; verify a comparison"
EXAMPLES = """\
residua study resbench --data data/resbench --out runs/resbench --rungs 0.3M --schemes residual ddl
residua study resbench --out runs/resbench --data data/resbench --rungs 0.1M --questions erasing
residua study my-study.yaml --out runs/mine --processes 2
residua study report runs/mine
residua study verify runs/mine --share 0.1
residua study audit runs/mine --schemes ddl
"""
TAKES = {
    "report": ("out",),
    "verify": ("data", "share", "seed"),
    "audit": ("data", "schemes", "rungs", "seeds"),
}
"""The options of what can be done with a study's folder."""
RUN = ("out", "data", "schemes", "questions", "rungs", "processes", "no_costs", "measure", "rounds")
"""Those of a study to run."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments to the parser of `residua study`."""
    parser.usage = (
        "residua study FILE.yaml|resbench --out DIR [--data DATA] [--schemes NAME ...] [--rungs NAME ...] "
        "[--processes N]\n       residua study report|verify|audit DIR [options]"
    )
    parser.add_argument("what", metavar="FILE.yaml|resbench|report|verify|audit", help="a study to run, or what to do")
    parser.add_argument("folder", nargs="?", metavar="DIR", help="the folder of a study, for the last three")
    parser.add_argument("--out", metavar="DIR", help="a study's folder, new or to continue; for report: where to write")
    parser.add_argument("--data", metavar="DATA", help="prepared data, in place of what the study names")
    parser.add_argument("--schemes", nargs="+", metavar="NAME", help="these beside the baselines (default: all)")
    parser.add_argument("--questions", nargs="+", metavar="NAME", help="with the schemes that these questions compare")
    parser.add_argument("--rungs", nargs="+", metavar="NAME", help="these sizes (default: all)")
    parser.add_argument("--processes", type=whole(1), metavar="N", help="runs at the same time (default: 1)")
    parser.add_argument("--no-costs", action="store_true", default=None, help="measure neither time nor memory")
    parser.add_argument(
        "--measure",
        nargs="?",
        const="step",
        choices=("step", "compiled"),
        help="measure time and memory again, and train nothing; compiled: the time of a step through torch.compile",
    )
    parser.add_argument("--rounds", type=whole(9), metavar="N", help="of time measurements (default: 45)")
    parser.add_argument("--share", type=number, help="verify: of the runs to repeat (default: 0.1)")
    parser.add_argument("--seed", type=whole(0), help="verify: of the choice of runs (default: another every time)")
    parser.add_argument(
        "--seeds", nargs="+", type=whole(0), metavar="SEED", help="audit: runs of these (default: the first)"
    )
    add_json(parser)


def run(arguments: Arguments) -> int | None:
    """Run a study, or report, verify or audit what is there. Raises InputError and RunError."""
    takes = TAKES.get(arguments.what, RUN)
    for name in dict.fromkeys([*RUN, *(name for names in TAKES.values() for name in names)]):
        if name not in takes and getattr(arguments, name) is not None:
            what = arguments.what if arguments.what in TAKES else "a study to run"
            options = ", ".join(f"--{one.replace('_', '-')}" for one in takes)
            raise InputError(f"--{name.replace('_', '-')}: {what} does not take it; it takes {options}")
    if arguments.what in TAKES:
        if arguments.folder is None:
            raise InputError(f"expected the folder of a study: residua study {arguments.what} DIR")
        return {"report": _report, "verify": _verify, "audit": _audit}[arguments.what](arguments)
    if arguments.folder is not None:
        raise InputError(f"unexpected argument {arguments.folder!r}; a study takes one file")
    if arguments.out is None:
        raise InputError("expected --out DIR, the folder of the study")
    from residua.study.engine import ROUNDS, measure_again, run_study
    from residua.study.plan import load_study

    study = load_study(arguments.what).only(arguments.schemes, arguments.rungs, arguments.questions)
    options = {"data": arguments.data, "rungs": arguments.rungs, "rounds": arguments.rounds or ROUNDS}
    if arguments.measure:
        measure_again(study, arguments.out, compiled=arguments.measure == "compiled", **options)
    else:
        run_study(study, arguments.out, processes=arguments.processes or 1, costs=not arguments.no_costs, **options)
    return _show(Path(arguments.out), Path(arguments.out), arguments.json)


def _report(arguments: Arguments) -> None:
    _show(Path(arguments.folder), Path(arguments.out or arguments.folder), arguments.json)


def _show(folder: Path, out: Path, as_json: bool) -> None:
    from residua.study.report import markdown, payload, write_report
    from residua.study.results import read_results

    found = read_results(folder)
    paths = write_report(found, out)
    if as_json:
        print_json(payload(found))
        return
    print(markdown(found), end="")
    for path in paths:
        print(f"written: {path}")


def _verify(arguments: Arguments) -> int:
    from residua.study.engine import verify

    count = wrong = 0
    seed = secrets.randbelow(10**6) if arguments.seed is None else arguments.seed
    share = 0.1 if arguments.share is None else arguments.share
    for one in verify(arguments.folder, data=arguments.data, share=share, seed=seed):
        count, wrong = count + 1, wrong + (not one.equal)
        said = "equal to the last bit"
        if not one.equal:
            where = f" (recorded with {one.elsewhere}; last bits differ there)" if one.elsewhere else ""
            said = f"recorded {one.recorded['val_loss']}, now {one.repeated['val_loss']}{where}"
        print(f"{one.key}: {said}", flush=True)
    print(f"{count - wrong} of {count} runs are equal to the last bit; --seed {seed} chooses them again")
    return 1 if wrong else 0


def _audit(arguments: Arguments) -> int:
    from residua.study.audit import audit

    count = wrong = 0
    chosen = {name: getattr(arguments, name) for name in ("data", "schemes", "rungs", "seeds")}
    for row in audit(arguments.folder, **chosen):
        count, wrong = count + 1, wrong + (not row["equal"])
        said = "equal to the last bit" if row["equal"] else "other losses than its record"
        print(f"{row['key']}: {said}, measured at {len(row['points'])} steps", flush=True)
    if not count:
        print(f"all of these runs are audited; residua study report {arguments.folder} shows them")
    return 1 if wrong else 0
