"""Make the tables of the pages on ResBench from its records. pages.py writes them into the pages."""

import json
import statistics
from collections.abc import Iterable
from functools import cache
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
from blocks import markdown
from picture import BASELINE, SCHEMES
from scipy.stats import binomtest

from residua.lab.evaluation.runs import Run
from residua.lab.records.statistics import Contrast, Estimate, welch
from residua.lab.study.forms import Cost
from residua.lab.study.results import ALPHA, Difference, Results, SchemeRow, read_results
from residua.lab.study.search import loss_of

RECORDS = Path(__file__).with_name("records")


@cache
def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RECORDS / name).read_text(encoding="utf-8").splitlines()]


@cache
def study(name: str) -> Results:
    """The results of a study's folder beside this file."""
    return read_results(RECORDS / name)


@cache
def answers() -> dict[tuple[str, str, str], Difference]:
    """What the questions of the first study compare at equal tokens, over all their seeds."""
    found = [each for each in study("main").answers if each.measure == "tokens" and each.difference]
    return {(each.size, each.scheme, each.to): each.difference for each in found}


def lead(difference: Any) -> str:
    """A difference of a study with its interval, bold where it is clear after the correction; empty without one."""
    if difference is None:
        return ""
    text = interval(difference.estimate, 3)
    return f"**{text}**" if difference.clear else text


def interval(estimate: Contrast | Estimate, digits: int = 4) -> str:
    return f"{estimate.mean:+.{digits}f} ± {estimate.half_width:.{digits}f}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """The least and the largest size, or one number if they are written alike."""
    sizes = sorted(map(abs, values))
    return " to ".join(dict.fromkeys(f"{size:,.{digits}f}" for size in (sizes[0], sizes[-1])))


def resbench_table() -> str:
    """The leads of ResBench's picture at every size, and what a step costs beside the plain residual's."""
    results = study("main")
    sizes = {"0.1M": "0.1M, four layers", "0.1M-deep": "eight layers", "0.1M-wide": "two layers", "0.3M": "0.3M"}
    lines = []
    for name, words in SCHEMES.items():
        rows = [results.row(size, name) for size in sizes]
        cells = [lead(row.difference(BASELINE, "tokens") if row else None) for row in rows]
        times = [row.cost.ratio.median for row in rows if row and row.cost]
        lines.append([f"`{name}`", words, *cells, span(times, 1)])
    return markdown(["name", "in words", *sizes.values(), "step time"], lines)


FIELD = ("lambdas", "residual+tc", "lambdas+tc", "ddl", "ddl-tc", "ddl-tc-write-only", "hc-static", "hc", "mhc", "mudd",
         "attnres")  # fmt: skip
"""The schemes of docs/field.md."""


def times_the_tokens(row: SchemeRow, loss: float) -> float:
    """How many times a row's tokens bring the plain residual to a loss: on the curve through its two lengths."""
    base = study("main").row(row.size, BASELINE)
    short, long = (statistics.fmean(map(loss_of, runs)) for runs in (base.reported.runs, base.longer))
    lengths = [runs[0].steps / row.steps for runs in (base.reported.runs, base.longer)]
    powers = [length**-ALPHA for length in lengths]
    power = powers[0] + (loss - short) / (long - short) * (powers[1] - powers[0])
    return max(power, lengths[1] ** -ALPHA) ** (-1 / ALPHA)


def field_table() -> str:
    """Our smallest models in the field's currency: the effective speed-up on the plain residual, with its interval."""
    lines = []
    for name in FIELD:
        row = study("main").row("0.1M", name)
        estimate = row.difference(BASELINE, "tokens").estimate
        losses = [row.loss.mean + side * estimate.half_width for side in (0, 1, -1)]
        speedups = [times_the_tokens(row, loss) for loss in losses]
        time = row.cost.ratio.median if row.cost else None
        cells = [
            speedup_text(speedups, 1.0),
            f"{time:.2f}" if time else "",
            speedup_text(speedups, time) if time else "",
        ]
        lines.append([f"`{name}`", interval(estimate, 3), *cells])
    header = ["ours, 0.1M, 2.1M tokens, 5 seeds", "loss", "speed-up", "step time on a CPU", "speed-up in time"]
    return markdown(header, lines)


def speedup_text(speedups: list[float], cost: float) -> str:
    """The value between the ends of its interval; those beyond the longest runs are bounds."""
    mean, low, high = (f"{'> ' if speedup > 1.499 else ''}{speedup / cost:.2f}" for speedup in speedups)
    return f"{mean} ({low} to {high})"


def fresh_table() -> str:
    """The contrasts of five seeds that no run of ResBench had: beside ResBench's, split by labels, on a second text."""
    size = "0.1M"
    fresh = study("fresh")

    def means(name: str) -> list[float]:
        runs = recorded("fresh", fresh.row(size, name).reported.runs)
        losses = [(*run["split"][-1][1:], run["further_curve"][-1][1]) for run in runs]
        return list(map(statistics.fmean, zip(*losses)))

    lines = []
    for scheme, to in fresh.study.primary[size]:
        before = answers().get((size, scheme, to)) or study("main").row(size, scheme).difference(to, "tokens")
        splits = [f"{ours - theirs:+.3f}" for ours, theirs in zip(means(scheme), means(to))]
        lines.append([f"`{scheme}` − `{to}`", lead(before), lead(fresh.corrected[size, scheme, to]), *splits])
    header = ["loss of the first − the second", "ResBench, seeds 1 to 5", "fresh seeds", "repeated labels"]
    return markdown([*header, "all others", "second text"], lines)


def copying_table() -> str:
    """The baselines with three times the tokens, at two rates: how many runs learned to copy, and both losses."""
    runs: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for record in records("headline.jsonl"):
        if record["size"] == "0.3M-long":
            runs.setdefault((record["scheme"], record["point"]["train.lr"]), []).append(record)
    lines = []
    for (name, rate), group in sorted(runs.items(), reverse=True):
        steps = [f"{record['transition']:,.0f}" for record in group if record["transition"] is not None]
        learned = f"{len(steps)} of {len(group)}" + (f", at {' and '.join(steps)}" if steps else "")
        losses = [(record["val_loss"], *record["split"][-1][1:]) for record in group]
        means = [f"{statistics.fmean(values):.3f}" for values in zip(*losses)]
        lines.append([f"`{name}`", f"{rate:g}", learned, *means])
    header = ["name", "learning rate", "runs that learn to copy, and when (of 9,609 steps)", "loss"]
    return markdown([*header, "repeated labels", "all others"], lines)


SPLIT = {"0.1M": "fresh", "1M": "1M", "10M": "10M"}
"""Where the losses of a size are split by label, beside resbench-headline.jsonl, which has those of 0.3M."""


@cache
def split_losses(size: str) -> dict[str, dict[int, tuple[float, ...]]]:
    """By scheme and seed, the loss of all labels, repeated ones, all others, and all others of the second text.

    At 0.3M ddl-tc is taken at the settings of its form that does not erase, as at 1M.
    """
    if size == "0.3M":
        runs = [run for run in records("headline.jsonl") if run["size"] == size]
        points = {run["scheme"]: run["point"] for run in reversed(runs)}
        points["ddl-tc"] = points["ddl-tc-write-only"]
        runs = [run for run in runs if run["point"] == points[run["scheme"]]]
    else:
        rows = study(SPLIT[size]).rows
        runs = recorded(SPLIT[size], [run for row in rows if row.whole for run in row.reported.runs])
    losses: dict[str, dict[int, tuple[float, ...]]] = {}
    for run in runs:
        losses.setdefault(run["scheme"], {})[run["seed"]] = ends(run)
    return losses


def recorded(folder: str, runs: Iterable[Run]) -> list[dict[str, Any]]:
    """The records of runs of a study."""
    by_key = {record["key"]: record for record in records(f"{folder}/records.jsonl")}
    return [by_key[run.key] for run in runs]


def ends(run: dict[str, Any]) -> tuple[float, ...]:
    """The last losses of a run: of all labels, repeated ones, all others, and all others of the second text."""
    return run["val_loss"], *run["split"][-1][1:], run["further_split"][-1][2]


def ends_by_seed(runs: dict[int, dict[str, Any]]) -> dict[int, tuple[float, ...]]:
    """The `ends` of runs by seed."""
    return {seed: ends(run) for seed, run in runs.items()}


def split_table(size: str) -> str:
    """What the planned pairs of a size, of 1M at 0.3M, differ by on each kind of label, over the seeds of every row."""
    planned = size if size in SPLIT else "1M"
    results, losses = study(SPLIT[planned]), split_losses(size)
    pairs = [pair for pair in results.study.primary[planned] if losses.keys() >= {*pair}]
    seeds = sorted(set.intersection(*(set(losses[name]) for name in chain.from_iterable(pairs))))
    lines = []
    for pair in pairs:
        found = contrasts(losses[pair[0]], losses[pair[1]], seeds)
        cells = [interval(contrast, 3) for contrast in found]
        if planned == size:
            cells[0] = lead(results.corrected[(size, *pair)])
        if BASELINE in pair:  # at these two sizes its rate is in doubt
            cells = over_rates(pair[0]) if size == "1M" else [cell.strip("*") for cell in cells]
        lines.append([" − ".join(f"`{name}`" for name in pair), *cells])
    return markdown([f"loss of the first − the second, {len(seeds)} seeds", *LABELS], lines)


LABELS = "all labels", "repeated labels", "all others", "all others, second text"
"""Those of `ends`."""


def contrasts(
    ours: dict[int, tuple[float, ...]], theirs: dict[int, tuple[float, ...]], seeds: Iterable[int]
) -> list[Contrast]:
    """Each of the losses of `ends` of one scheme minus another's, each with the noise of its own seeds."""
    sides = (zip(*(losses[seed] for seed in seeds)) for losses in (ours, theirs))
    return [welch(*both) for both in zip(*sides)]


@cache
def by_rate(*folders: str) -> dict[str, dict[float, dict[int, dict[str, Any]]]]:
    """The whole runs of studies at 1M by scheme, by learning rate from the largest down, and by seed."""
    runs: dict[str, dict[float, dict[int, dict[str, Any]]]] = {}
    found = [run for folder in folders for run in records(f"{folder}/records.jsonl")]
    for run in sorted(found, key=lambda run: (-run["point"]["train.lr"], run["seed"])):
        runs.setdefault(run["scheme"], {}).setdefault(run["point"]["train.lr"], {})[run["seed"]] = run
    return runs


def baselines_at_rates() -> dict[str, dict[float, dict[int, dict[str, Any]]]]:
    """`by_rate` of both baselines; seed 0 is that of the search."""
    runs = by_rate("1M", "rates-1M")
    return {name: runs[name] for name in (BASELINE, "lambdas")}


def leads_on_plain(scheme: str) -> dict[tuple[float, int], tuple[float, ...]]:
    """The four losses of a scheme minus the plain residual's at 1M, by the latter's rate and the seed of both."""
    row = study(SPLIT["1M"]).row("1M", scheme)
    runs = [run for run in [*row.tuning, *row.reported.runs] if run.point == row.point]
    ours = {run["seed"]: ends(run) for run in recorded(SPLIT["1M"], runs)}
    return {
        (rate, seed): tuple(mine - theirs for mine, theirs in zip(ours[seed], ends(run)))
        for rate, runs in baselines_at_rates()[BASELINE].items()
        for seed, run in runs.items()
    }


def on_plain_at(rate: float, scheme: str) -> list[Contrast]:
    """The four losses of a scheme at 1M, at its own rate, minus the plain residual's at `rate`."""
    return contrasts(split_losses("1M")[scheme], ends_by_seed(baselines_at_rates()[BASELINE][rate]), SEEDS)


def over_rates(scheme: str) -> list[str]:
    """The ranges of `leads_on_plain` over the rates, with the reported seeds."""
    columns = zip(*(leads for (_, seed), leads in leads_on_plain(scheme).items() if seed in SEEDS))
    return [f"{max(values):+.2f} to {min(values):+.2f}" for values in columns]


def rates_table() -> str:
    """Both baselines at 1M by learning rate: the runs, how many copy, and the lead of the convolution, seed by seed."""
    leader, lines = split_losses("1M")["residual+tc"], []
    for name, rates in baselines_at_rates().items():
        for rate, runs in rates.items():
            ours = {seed: ends(run) for seed, run in runs.items() if seed in leader}
            cells = [difference(leader, ours, column) for column in (0, 2)]
            lines.append([f"`{name}`", f"{rate:g}", *losses_by_seed(runs, (0, *SEEDS)), copying(runs), *cells])
    header = ["", "rate", "seed of the search", *(f"seed {seed}" for seed in SEEDS), "runs that copy"]
    return markdown([*header, "`residual+tc` − this", "on labels that do not repeat"], lines)


def difference(ours: dict[int, tuple[float, ...]], theirs: dict[int, tuple[float, ...]], column: int) -> str:
    """One of the four losses minus another scheme's, over the latter's seeds; with its interval if they are all."""
    if not theirs:
        return ""
    if {*theirs} == {*SEEDS}:
        return interval(contrasts(ours, theirs, SEEDS)[column], 2)
    return f"{statistics.fmean(ours[seed][column] - losses[column] for seed, losses in theirs.items()):+.2f}"


SEEDS = 211, 212, 213
"""The reported ones of both studies at 1M."""


def losses_by_seed(runs: dict[int, dict[str, Any]], seeds: Iterable[int] = SEEDS) -> list[str]:
    return [f"{runs[seed]['val_loss']:.3f}" if seed in runs else "" for seed in seeds]


def copying(runs: dict[int, dict[str, Any]]) -> str:
    """How many of some runs copy, and after how many steps those do that were evaluated along the way."""
    copy = [run for run in runs.values() if run["transition"] is not None]
    steps = [run["transition"] for run in copy if len(run["split"]) > 1]
    some = f"{len(steps)} of them " * (len(steps) < len(copy))
    return f"{len(copy)} of {len(runs)}" + (f", {some}after {span(steps, 0)} steps" if steps else "")


def rivals_table() -> str:
    """The runs of the study of rivals so far, by scheme and learning rate."""
    lines = []
    for name, rates in by_rate("rivals-1M").items():
        for rate, runs in rates.items():
            others = statistics.fmean(ends(run)[2] for run in runs.values())
            lines.append([f"`{name}`", f"{rate:g}", *losses_by_seed(runs), f"{others:.3f}", copying(runs)])
    header = ["", "rate", *(f"seed {seed}" for seed in SEEDS), "labels that do not repeat, mean"]
    return markdown([*header, "runs that copy"], lines)


def smear_table() -> str:
    """What other schemes differ by from `lambdas+smear` at 1M: rivals with all runs, and the first study's but for the
    plain residual."""
    first = [name for name in reversed(split_losses("1M")) if name != BASELINE]
    lines = []
    for name in [*(pair[0] for _, *pair in study("rivals-1M").corrected), *first]:
        lines.append([f"`{name}` − `lambdas+smear`", *(interval(each, 3) for each in from_smear(name))])
    return markdown([f"loss of the first − the second, {len(SEEDS)} seeds", *LABELS], lines)


def steps_table() -> str:
    """The time of a step at 1M, of all schemes in the same rounds, and its FLOPs."""
    costs = step_costs()
    lines = []
    for name, cost in sorted(costs.items(), key=lambda pair: pair[1].ratio.median):
        flops = cost.flops_per_token / costs[BASELINE].flops_per_token
        lines.append([f"`{name}`", f"{cost.ratio:.2f}", f"{flops:.2f}"])
    return markdown(["", "time of a step, times `residual`", "FLOPs, times `residual`"], lines)


def step_costs() -> dict[str, Cost]:
    """The cost of a step at 1M by scheme, compiled."""
    return {record["scheme"]: Cost.of(record) for record in records("steps-1M/costs.jsonl")}


def rival_rate(scheme: str) -> float:
    """The learning rate that the study of rivals chose for a scheme: the best on labels that do not repeat."""
    rate: float = study("rivals-1M").row("1M", scheme).point["train.lr"]
    return rate


def rival(scheme: str) -> dict[int, tuple[float, ...]]:
    """The `ends` of a scheme of the study of rivals, at its `rival_rate`, by seed."""
    return ends_by_seed(by_rate("rivals-1M")[scheme][rival_rate(scheme)])


def from_smear(scheme: str) -> list[Contrast]:
    """The four losses of a scheme of the first study at 1M, or of a rival, minus those of `lambdas+smear`."""
    ours = split_losses("1M")[scheme] if scheme in split_losses("1M") else rival(scheme)
    return contrasts(ours, rival("lambdas+smear"), SEEDS)


def searched() -> dict[str, dict[float, dict[str, Any]]]:
    """The runs of the search at 1M by scheme and rate: as long as the reported ones, with one seed."""
    runs: dict[str, dict[float, dict[str, Any]]] = {}
    for run in records("1M/records.jsonl"):
        if run["kind"] == "tune":
            runs.setdefault(run["scheme"], {})[run["point"]["train.lr"]] = run
    return {name: runs[name] for name in sorted(runs, key=lambda name: -runs[name][0.008]["val_loss"])}


def search_table() -> str:
    """The losses of `searched`; those of a CPU are marked."""
    runs = searched()
    rates = sorted({rate for found in runs.values() for rate in found})

    def loss(run: dict[str, Any] | None) -> str:
        return f"{run['val_loss']:.3f}{'' if 'H200' in run['facts']['device'] else ' *'}" if run else ""

    lines = [[f"`{name}`", *(loss(found.get(rate)) for rate in rates)] for name, found in runs.items()]
    return markdown(["one seed, at the rate", *(f"{rate:g}" for rate in rates)], lines)


def ordered_alike(small: dict[str, list[float]], large: dict[str, list[float]]) -> dict[tuple[str, str], bool]:
    """Of the pairs that the larger size separates (Welch, p < 0.05), those that the smaller orders as it does."""

    means = [{name: statistics.fmean(values) for name, values in losses.items()} for losses in (small, large)]
    return {
        (first, second): len({mean[first] < mean[second] for mean in means}) == 1
        for first, second in combinations(sorted(large), 2)
        if welch(large[first], large[second]).p_value < 0.05
    }


def decided_alike(size: str, column: int) -> dict[tuple[str, str], bool]:
    """`ordered_alike` of a smaller size and 1M, by one of the losses of `split_losses`."""
    small, large = (
        {name: [losses[column] for losses in seeds.values()] for name, seeds in split_losses(each).items()}
        for each in (size, "1M")
    )
    return ordered_alike(small, large)


def share_alike(alike: dict[tuple[str, str], bool], schemes: list[str]) -> tuple[float, float]:
    """The 95 % interval of the share of `ordered_alike`, over the choice of schemes: the bootstrap, 10,000 draws.

    If all are alike, those of every draw are. Then it is the exact interval of as many pairs as schemes, less one.
    """
    if all(alike.values()):
        low, high = binomtest(len(schemes) - 1, len(schemes) - 1).proportion_ci()
        return float(low), float(high)
    draws, shares = np.random.default_rng(0), []
    for _ in range(10_000):
        drawn = combinations(sorted(draws.choice(sorted(schemes), len(schemes))), 2)
        kept = [alike[pair] for pair in drawn if pair in alike]
        shares += [np.mean(kept)] if kept else []
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(low), float(high)


def decisions_table() -> str:
    """How many of the pairs that 1M separates a smaller size orders alike, by all labels and by those not repeated."""
    schemes, lines = list(split_losses("1M")), []
    for size in ("0.1M", "0.3M"):
        cells = []
        for column in (0, 2):
            alike = decided_alike(size, column)
            low, high = share_alike(alike, schemes)
            cells.append(f"{sum(alike.values())} of {len(alike)} ({100 * low:.0f} % to {100 * high:.0f} %)")
        lines.append([size, *cells])
    return markdown(["size", "all labels", "labels that do not repeat"], lines)


def tables() -> dict[str, str]:
    """Every table, by its name in claims.md."""
    made = (
        field_table,
        resbench_table,
        copying_table,
        rates_table,
        rivals_table,
        smear_table,
        search_table,
        decisions_table,
        steps_table,
        fresh_table,
    )
    split = {"remaining": "0.3M", "million": "1M", "ten": "10M"}
    return {
        **{table.__name__: table() for table in made},
        **{f"{name}_table": split_table(size) for name, size in split.items()},
    }
