"""Compare schemes with tuning budgets, or tune a recipe."""

from pathlib import Path
from typing import Annotated

from residua.commands.pool import PoolOptions
from residua.commands.signature import Output
from residua.errors import Natural, Positive, Range, require
from residua.lab.records.progress import say
from residua.lab.records.terminal import one_line


def run(
    study: str,
    *,
    out: str,
    data: str | None = None,
    schemes: tuple[str, ...] | None = None,
    sizes: tuple[str, ...] | None = None,
    pool: PoolOptions,
    dry_run: bool = False,
    teraflops: Positive | None = None,
    no_costs: bool = False,
    measure: bool = False,
    compiled: bool = False,
    rounds: Annotated[int, Range("at least 9", lambda rounds: rounds >= 9)] | None = None,
) -> Output:
    """Run a study that a file describes, such as ResBench.

    Tunes every scheme with the same budget and baselines with at least that, trains seeds that were not used for
    tuning, measures costs, and writes tables with intervals. If the command is killed, the same command continues.

    Examples:
        residua study run resbench --data data/resbench --out runs/resbench --dry-run
        residua study run resbench --data data/resbench --out runs/mine \\
            --sizes 0.3M --schemes residual ddl
        residua study run my-study.yaml --out runs/mine --processes 2
        residua study run my-study.yaml --out runs/mine \\
            --executor slurm --slurm time=720 partition=gpu gres=gpu:1

    Args:
        study (FILE.yaml|resbench): the study
        out (DIR): the folder of the study, new or to continue
        data (DIR): prepared data, in place of the data that the study names
        schemes (SCHEME): only these and the baselines (default: all)
        sizes (SIZE): only these (default: all)
        dry_run: print runs, hours and the differences that they can detect, and train nothing
        teraflops: speed for --dry-run (default: measured here by a step of the first baseline)

    Rarely:
        no_costs: measure neither time nor memory
        measure: measure time and memory, also again, and train nothing
        compiled: with --measure: only the time of a step through torch.compile
        rounds: rounds of time measurements (default: 45)
    """
    from residua.lab.study.definition import load_study

    require(teraflops is None or dry_run, "--teraflops", "left out without --dry-run", teraflops)
    require(not (measure and dry_run), "--measure", "left out with --dry-run", measure)
    require(not (measure and no_costs), "--no-costs", "left out with --measure", no_costs)
    require(rounds is None or not no_costs, "--rounds", "left out with --no-costs, which times nothing", rounds)
    require(measure or not compiled, "--compiled", "left out without --measure; a run has train.compile", compiled)
    chosen = load_study(study).only(schemes, sizes)  # raises before torch is imported
    count = f"{len(chosen.schemes)} schemes at {len(chosen.sizes)} size{'s' * (len(chosen.sizes) > 1)}"
    say(f"study: reading {chosen.data(data)}, for {count}")
    from residua.lab.study import engine
    from residua.lab.study.plan import Plan

    if dry_run:
        forecasts = [*engine.forecast(Plan(chosen, chosen.data(data), sizes), teraflops and 1e12 * teraflops)]
        processes = pool.processes or 1
        time = engine.duration(sum(each.hours for each in forecasts) / processes)
        notes = (
            f"\nabout {time}, {processes} at a time; a scheme's elementwise work comes on top,\n"
            "and before the runs the measurement of time and memory, which --no-costs leaves out\n"
            "detects: the smallest difference that the study would detect four times in five; smaller is better.\n"
            "  The unit is the standard deviation of the difference between two runs with one seed. A correction of\n"
            "  p-values for several primary contrasts makes it larger."
        )
        return Output([each._asdict() for each in forecasts], [engine.forecast_table(forecasts), notes])
    options = {"rounds": rounds or engine.ROUNDS, "executor": pool.executor_of_jobs()}
    if measure:
        with engine.begun(chosen, Path(out), data, sizes) as (plan, _):
            engine.measure_costs(plan, Path(out), again=True, compiled=compiled, **options)
        value, parts = report(out)
        return Output(value, [engine.costs_table(Path(out)), "", *parts])
    processes = pool.processes or 1
    engine.run_study(chosen, out, data=data, sizes=sizes, processes=processes, costs=not no_costs, **options)
    return report(out)


def report(folder: str, *, out: str | None = None) -> Output:
    """Make the tables and pictures of a study again from its records.

    Examples:
        residua study report runs/mine
        residua study report runs/mine --out report/

    Args:
        folder (DIR): the folder of a study
        out (DIR): folder for the report (default: the folder of the study)
    """
    from residua.lab.study.report import markdown, payload, write_report
    from residua.lab.study.results import read_results

    results = read_results(Path(folder))
    paths = write_report(results, Path(out or folder))
    return Output(payload(results), [markdown(results).rstrip("\n"), *(f"written: {path}" for path in paths)])


def verify(
    folder: str,
    *,
    data: str | None = None,
    schemes: tuple[str, ...] | None = None,
    sizes: tuple[str, ...] | None = None,
    seeds: tuple[Natural, ...] | None = None,
    share: Annotated[float, Range("a number above 0, 1 at most", lambda share: 0 < share <= 1)] = 0.1,
) -> int:
    """Repeat some runs of a study, and compare the results to the last bit.

    First prints the expected effort. Runs that were recorded with this device and PyTorch are drawn first, because
    others may differ in the last bits.

    Runs are drawn from all points that the study's settings allow, even points that it would no longer choose, for
    example after more seeds compared the finalists.

    Examples:
        residua study verify runs/mine --share 0.1
        residua study verify runs/mine --schemes ddl --share 1

    Args:
        folder (DIR): the folder of a study
        data (DIR): prepared data, in place of the data that the study names
        schemes (SCHEME): only runs of these (default: all)
        sizes (SIZE): only runs of these (default: all)
        seeds (N): only runs of these (default: all)
        share: the fraction of these runs to repeat
    """
    from residua.lab.study.verify import sample, verify

    drawn = sample(folder, data=data, share=share, schemes=schemes, sizes=sizes, seeds=seeds)
    print(one_line(str(drawn)), flush=True)
    count = wrong = 0
    for rerun in verify(drawn):
        count, wrong = count + 1, wrong + (not rerun.equal)
        print(one_line(f"{rerun.key}: {rerun.outcome}"), flush=True)
    print(f"{count - wrong} of {count} runs are equal to the last bit")
    return 1 if wrong else 0
