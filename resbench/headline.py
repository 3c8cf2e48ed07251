"""Train the runs that decide what ResBench's lead at 0.3 million parameters is: with the loss split in two.

What leads there may only learn sooner to look up what came before. Each record has the loss on labels that repeat an
earlier pair and on all others at every evaluation, on the study's held-out text and on a second one, and the step of
the transition. Three groups of runs, in this order:

    rates        both baselines with three times the tokens at the rates 0.008 and 0.016, which nobody tried there
    settings     ddl-tc at the settings of its form that does not erase: is it the erasing, or the settings?
    split        the reported runs of all eight rows at 0.3 million once more: the recorded bits, on the same processor

--size 1M asks the first question of one million parameters, of the plain residual: tuning chose the rate 0.032 for it.

Resumable: the same command goes on after a kill at any moment. Keys are those of the study's own runs.

    python resbench/headline.py --data data/resbench --further data/further --out runs/headline
    python resbench/headline.py --data data/resbench --out runs/headline --check
    python resbench/headline.py --size 1M --data data/resbench --further data/further --out runs/rates
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from residua.lab.jobs.pool import Job, Record, open_runs, run_jobs
from residua.lab.records import jsonlines
from residua.lab.study.definition import read_folder
from residua.lab.study.engine import train_run
from residua.lab.study.plan import Plan, PlannedRun
from residua.lab.study.verify import Verified

RECORDS = Path(__file__).with_name("records")
SHIPPED = {"0.3M": RECORDS / "main", "1M": RECORDS / "1M"}
SCHEMES = (
    "residual", "lambdas", "lambdas+conv", "lambdas-gated+conv", "residual+tc", "lambdas+tc", "ddl-tc",
    "ddl-tc-write-only",
)  # fmt: skip
RATES = 0.008, 0.016


def groups(plan: Plan, finished: Mapping[str, Record]) -> Iterator[list[PlannedRun]]:
    """The runs of each group. finished: the study's records, which say what tuning chose."""
    if "1M" in plan.study.sizes:
        yield [run for rate in RATES for run in plan.reported("1M", "residual", {"train.lr": rate})]
        return
    points = {name: plan.chosen("0.3M", name, finished) for name in SCHEMES}
    yield [
        run
        for rate in RATES
        for name in plan.study.baselines
        for run in plan.reported("0.3M-long", name, {**points[name], "train.lr": rate})
    ]
    yield list(plan.reported("0.3M", "ddl-tc", points["ddl-tc-write-only"]))
    yield [run for name in SCHEMES for run in plan.reported("0.3M", name, points[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHIPPED, default="0.3M")
    parser.add_argument("--data", required=True, help="the prepared data of ResBench")
    parser.add_argument("--further", help="a second held-out text, prepared with the tokenizer of the first")
    parser.add_argument("--out", type=Path, required=True, help="a folder, new or to continue")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time, each with one thread")
    parser.add_argument("--plan", action="store_true", help="print the runs that are left, and train nothing")
    parser.add_argument("--check", action="store_true", help="compare what is finished with the study's records")
    arguments = parser.parse_args()
    shipped = SHIPPED[arguments.size]
    study = read_folder(shipped)
    if arguments.size == "0.3M":
        study = study.only(SCHEMES, ["0.3M", "0.3M-long"])
    if arguments.further is not None:
        study = replace(study, set={**study.set, "data.further_validation": arguments.further})
    plan = Plan(study, arguments.data)
    recorded = {row["key"]: row for row in jsonlines.read(shipped / "records.jsonl")}
    jobs = [
        Job(run.key, train_run, (run,), run.config.train.steps, order=(group, run.config.train.seed, place))
        for group, runs in enumerate(groups(plan, recorded))
        for place, run in enumerate(runs)
    ]
    done = {row["key"]: row for row in jsonlines.read(arguments.out / "records.jsonl")}
    if arguments.plan:
        for job in sorted(jobs, key=lambda job: job.order):
            print(job.key, "finished" if job.key in done else "to train")
    elif arguments.check:
        for key in done.keys() & recorded.keys():
            equal = Verified(key, recorded[key], done[key]).equal
            losses = recorded[key]["val_loss"], done[key]["val_loss"]
            print(key, "equal to the last bit" if equal else "recorded {}, now {}".format(*losses))
    else:
        settings = {"title": f"ResBench, what the lead at {arguments.size} is", "data": plan.facts["fingerprint"]}
        with open_runs(arguments.out, settings) as made:
            run_jobs(jobs, made, processes=arguments.processes)


if __name__ == "__main__":
    main()
