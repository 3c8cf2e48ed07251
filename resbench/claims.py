"""Fill the sentences of claims.md with numbers, once ResBench's records bear out their words.

pages.py writes them into the pages. An assertion that fails stands for words that are no longer so.
"""

import math
import statistics
from functools import cache
from itertools import product
from typing import Any

from answers import PARTS as ANSWERS
from answers import ahead_of_both, whole
from methods import PARTS as METHODS
from rows import (
    BASELINES,
    MEASURES,
    NUMBERS,
    SHAPES,
    SIZES,
    WRITING,
    apart,
    compared,
    erasing,
    erasing_at_equal_settings,
    gain,
    row,
    side,
    split_runs,
    step_time,
)
from tables import (
    SEEDS,
    SPLIT,
    baselines_at_rates,
    by_rate,
    contrasts,
    ends,
    ends_by_seed,
    from_smear,
    interval,
    leads_on_plain,
    on_plain_at,
    records,
    rival,
    rival_rate,
    searched,
    span,
    split_losses,
    step_costs,
    study,
    tables,
)

from residua.connections import resolve
from residua.connections.explained import added, state
from residua.lab.records.statistics import Contrast, holm
from residua.lab.study.forms import Cost
from residua.lab.study.results import Difference

# Gathered from the records


def copying_counts() -> tuple[int, int]:
    """Of the runs of `split_runs`, those with a convolution and those of the baselines; all and none of them copy."""
    copies = {name: [] for name in (False, True)}
    for run in split_runs():
        copies[run["scheme"] in BASELINES].append(run["transition"] is not None)
    assert all(copies[False])
    assert not any(copies[True])
    return len(copies[False]), len(copies[True])


@cache
def longer_baselines() -> tuple[dict[str, Any], ...]:
    """The baselines with three times the tokens at 0.016 and 0.008."""
    runs = tuple(run for run in records("headline.jsonl") if run["size"] == "0.3M-long")
    rates = {(run["scheme"], run["point"]["train.lr"], run["seed"]) for run in runs}
    assert rates == {*product(BASELINES, (0.008, 0.016), (1, 2, 3))}
    assert [row("0.3M", name).point["train.lr"] for name in BASELINES] == [0.016, 0.032]
    return runs


def learned() -> list[dict[str, Any]]:
    """Those of `longer_baselines` that learn to copy: all are of `lambdas`."""
    runs = [run for run in longer_baselines() if run["transition"] is not None]
    assert {run["scheme"] for run in runs} == {"lambdas"}
    return runs


def long_leads(scheme: str) -> list[tuple[float, float]]:
    """What a scheme leads each run of `learned` by, and `lambdas` with its seed at the rate that tuning chose."""
    ours, chosen = row("0.3M-long", scheme).losses, row("0.3M-long", "lambdas").losses
    return [(run["val_loss"] - ours[seed], chosen[seed] - ours[seed]) for run in learned() for seed in [run["seed"]]]


def writing_at_length() -> Contrast:
    """Four channels that only write minus `lambdas+tc` with three times the tokens, where by their losses all copy."""
    ends = [loss for name in (WRITING, "lambdas+tc") for loss in row("0.3M-long", name).losses.values()]
    assert len(ends) == 6
    assert max(ends) < min(run["val_loss"] for run in learned())
    contrast = apart("0.3M-long", WRITING, "lambdas+tc")
    assert side(contrast) == "ahead"
    return contrast


def cheap() -> list[Difference]:
    """`lambdas+tc` to both baselines in every shape and measure: ahead everywhere, and after Holm's correction too."""
    differences = [row(size, "lambdas+tc").difference(*pair) for size in SIZES for pair in product(BASELINES, MEASURES)]
    assert {side(each.estimate) for each in differences} == {"ahead"}
    assert max(holm([each.p for each in differences])) < 0.05
    assert {each.holm for each in differences} == {None}  # none was planned
    others = whole("0.3M").keys() - {*BASELINES, "lambdas+tc"}
    assert not any(all(ahead_of_both(row(*place), measure) for *place, measure in product(SIZES, [name], MEASURES))
                   for name in others)  # fmt: skip
    return differences


def sessions(name: str = "lambdas+tc") -> list[int]:
    """The rounds of the only session that timed a scheme's eager step, by shape."""
    timed = [row(size, name).timed(compiled=False) for size in SIZES]
    assert {len(each) for each in timed} == {1}
    return [each[0].rounds for each in timed]


def ratios(compiled: bool, rounds: int) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """The logarithms of repeated ratios of times to the plain residual's, and their own errors, on the EPYC."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for cost in records("main/costs.jsonl"):
        right = cost.get("compiled", False) is compiled and len(cost["seconds"]) >= rounds
        if right and "EPYC" in cost["device"] and cost["scheme"] != cost["baseline"]:
            one = math.log(cost["time_ratio"]["median"]), Cost.of(cost).error
            found.setdefault((cost["size"], cost["connection"]), []).append(one)
    return {place: some for place, some in found.items() if len(some) > 1}


def scatter(compiled: bool, rounds: int) -> float:
    """By how much repeated ratios differ beyond what their own errors explain, in per cent."""
    again = ratios(compiled, rounds).values()
    spread = sum(len(some) * statistics.pvariance(ratio for ratio, _ in some) for some in again)
    own = sum(error**2 * (1 - 1 / len(some)) for some in again for _, error in some)
    return 100 * math.sqrt((spread - own) / sum(len(some) - 1 for some in again))


def drift(rounds: int) -> float:
    """How many times as large as the smallest the largest of repeated eager ratios is, at most."""
    return max(math.exp(max(some)[0] - min(some)[0]) for some in ratios(False, rounds).values())


def slower(difference: Difference, factor: float) -> Contrast:
    """A comparison at equal seconds, if the scheme's step took so many times as long: on the baseline's curve."""
    ours, base = row(difference.size, difference.scheme), row(difference.size, difference.baseline)
    tokens = ours.difference(difference.baseline, "tokens").estimate
    # The loss is a + b / sqrt(C) between 1 and `cost` times the tokens, so the lead there gives b.
    share = (1 - (difference.cost * factor) ** -0.5) / (1 - difference.cost**-0.5)
    assert base.longer
    mean = tokens.mean + share * (difference.estimate.mean - tokens.mean)
    return difference.estimate._replace(mean=mean)


@cache
def together() -> dict[tuple[str, ...], tuple[Difference, float]]:
    """The finished planned comparisons of all five studies by folder, and p corrected for all of them together."""
    folders = "main", *SPLIT.values(), "rivals-1M"
    planned = {(name, *place): each for name in folders for place, each in study(name).corrected.items()}
    return dict(zip(planned, zip(planned.values(), holm([each.p for each in planned.values()]))))


def search_leads(scheme: str, to: str) -> dict[float, float]:
    """What a scheme is ahead by in the search at 1M, at each rate at which an H200 trained both."""
    ours, theirs = searched()[scheme], searched()[to]
    return {
        rate: theirs[rate]["val_loss"] - run["val_loss"]
        for rate, run in sorted(ours.items())
        if rate in theirs and all("H200" in each["facts"]["device"] for each in (run, theirs[rate]))
    }


@cache
def ten() -> tuple[Difference, dict[int, float]]:
    """The lead at ten million parameters and its course: every run copies, at twice the plain residual's rate."""
    ours, theirs = row("10M", "residual+tc"), row("10M", "residual")
    assert (ours.point["train.lr"], theirs.point["train.lr"]) == (0.008, 0.004)
    rates = [{run.point["train.lr"] for run in each.reported.runs} for each in (ours, theirs)]
    assert rates == [{0.008}, {0.004}]
    first = ours.reported.runs[0].validation[0].step
    assert {step for each in (ours, theirs) for step in each.transitions} == {first}
    (difference,) = study(SPLIT["10M"]).corrected.values()
    course = {step: mean for step, mean, _ in study(SPLIT["10M"]).curves(ours)["residual"]}
    return difference, course


def column(size: str, scheme: str, to: str, place: int) -> float:
    """The lead on one of the four losses of `split_losses`, on average."""
    ours, theirs = (
        statistics.fmean(ends[place] for ends in split_losses(size)[name].values()) for name in (scheme, to)
    )
    return theirs - ours


def share_of_runs(scheme: str) -> list[int]:
    """The steps after which the reported runs of a scheme at 1M copy."""
    return [round(step) for step in row("1M", scheme).transitions if step is not None]


def rate_costs() -> list[float]:
    """What twice the rate adds to the last loss of a baseline on labels that do not repeat, wherever two were tried."""
    runs = [
        *longer_baselines(),
        *(run for rates in baselines_at_rates().values() for runs in rates.values() for run in runs.values()),
    ]
    ends = {(run["scheme"], run["steps"], run["seed"], run["point"]["train.lr"]): run["split"][-1][2] for run in runs}
    halves = {place: (*place[:-1], place[-1] / 2) for place in ends}
    return [ends[place] - ends[half] for place, half in halves.items() if half in ends]


# The numbers of the sentences


def first_size() -> dict[str, Any]:
    """0.1 million parameters."""
    convolution = [apart(size, "residual+tc", "residual") for size in SHAPES]
    assert {side(each) for each in convolution} == {"ahead"}
    fresh = study("fresh").corrected["0.1M", "residual+tc", "residual"]
    assert fresh.clear
    wide, deep = apart("0.1M-wide", WRITING, "residual+tc"), apart("0.1M-deep", WRITING, "lambdas+tc")
    assert (side(wide), side(deep)) == ("ahead", "behind")
    plain = [apart(size, "ddl", "residual") for size in ("0.1M", "0.1M-wide")]
    assert {side(each) for each in plain} == {"level"}
    assert all(side(apart(size, "ddl-tc", "residual")) == "ahead" for size in SIZES)
    timed = [row(size, "ddl-tc").difference(*pair) for size in SHAPES for pair in product(BASELINES, ["seconds"])]
    assert {side(each.estimate) for each in timed if each.estimate} == {"level"}
    compiled = {size: row(size, "ddl-tc").difference("lambdas", "compiled seconds").estimate for size in SHAPES}
    assert [side(each) for each in compiled.values()] == ["ahead", "ahead", "behind"]
    return {
        "shapes_tc": span(each.mean for each in convolution),
        "fresh_tc": f"{-fresh.estimate.mean:.3f}",
        "wide_writing": f"{-wide.mean:.2f}",
        "deep_writing": f"{deep.mean:.2f}",
        "ddl": interval(plain[0], 3),
        "ddl_wide": interval(plain[1], 3),
    }


def second_size() -> dict[str, Any]:
    """0.3 million parameters, with 20 tokens for each."""
    gains = {name: gain("0.3M", name) for name in ("residual+tc", "ddl-tc", WRITING)}
    assert gains["residual+tc"] > gains["ddl-tc"] / 2
    equal = erasing_at_equal_settings()
    losses = {name: row("0.3M", name).loss.mean for name in split_losses("0.3M")}
    assert min(losses, key=losses.get) == WRITING
    gone = erasing()
    behind = [each for each in gone if side(each.estimate) == "behind"]
    with_convolution, baselines = copying_counts()
    over = {to: apart("0.3M", WRITING, to) for to in ("residual+tc", "lambdas+tc")}
    assert {side(each) for each in over.values()} == {"ahead"}

    def slower(compiled: bool) -> float:
        ours, theirs = (step_time("0.3M", name, compiled=compiled) for name in (WRITING, "lambdas+tc"))
        return ours / theirs

    return {
        "gain_tc": f"{gains['residual+tc']:.2f}",
        "gain_ddl": f"{gains['ddl-tc']:.2f}",
        "gain_writing": f"{gains[WRITING]:.2f}",
        "gain_ddl_equal": f"{gains[WRITING] - equal.mean:.2f}",
        "gain_writing_tc": f"{-over['residual+tc'].mean:.2f}",
        "gain_writing_scales": f"{-over['lambdas+tc'].mean:.2f}",
        "copying_with": with_convolution,
        "copying_without": NUMBERS[baselines],
        "Erasing_behind": NUMBERS[len(behind)].capitalize(),
        "erasing_count": NUMBERS[len(gone)],
        "writing_time": f"{slower(False):.2f}",
        "writing_compiled_time": f"{slower(True):.2f}",
    }


def three_times_the_tokens() -> dict[str, Any]:
    """0.3 million parameters with 60 tokens for each."""
    runs, copying = longer_baselines(), learned()
    rest = [run for run in runs if run["transition"] is None and run["scheme"] == "lambdas"]
    assert (len(rest), len(runs)) == (2, 12)
    scales = long_leads("lambdas+tc")
    assert all(lead < chosen / 2 for lead, chosen in scales)
    others: dict[tuple[str, float], list[float]] = {}
    for run in runs:
        others.setdefault((run["scheme"], run["point"]["train.lr"]), []).append(run["split"][-1][2])
    means = {place: statistics.fmean(losses) for place, losses in others.items()}
    assert all(abs(means["residual", rate] - means["lambdas", rate]) < 0.03 for rate in (0.008, 0.016))
    on_others = [statistics.fmean(run["split"][-1][2] for run in group) for group in (copying, rest)]
    assert on_others[0] > on_others[1]
    writing = writing_at_length()
    ours, theirs, base = (row("0.3M-long", name).losses for name in (WRITING, "lambdas+tc", "lambdas"))
    return {
        "long_runs": NUMBERS[len(runs) // 2],
        "long_learned": NUMBERS[len(copying)],
        "long_copying": span(lead for lead, _ in scales),
        "long_copying_writing": span(lead for lead, _ in long_leads(WRITING)),
        "long_chosen": span(base[seed] - loss for seed, loss in theirs.items()),
        "long_learned_ends": span([run["val_loss"] for run in copying], 3),
        "long_rest_ends": " and ".join(f"{loss:.3f}" for loss in sorted(run["val_loss"] for run in rest)),
        "long_rest_leads": " and ".join(sorted(f"{run['split'][-1][2] - run['split'][-1][1]:.1f}" for run in rest)),
        "long_both_ends": span([*ours.values(), *theirs.values()], 3),
        "long_writing": f"{-writing.mean:.4f} ± {writing.half_width:.4f}",
        "long_writing_short": f"{-writing.mean:.2f}",
        "long_writing_difference": interval(writing),
        "long_writing_seeds": span([ours[seed] - loss for seed, loss in theirs.items()], 3),
    }


def million() -> dict[str, Any]:
    """One million parameters."""
    results = study(SPLIT["1M"])
    planned = {place[1:]: each for place, each in results.corrected.items()}
    assert {place for place, each in planned.items() if not each.clear} == {
        ("lambdas+tc", "lambdas"),
        ("ddl-tc", WRITING),
    }
    rows = {each.scheme: each for each in results.rows}
    assert min(rows, key=lambda name: rows[name].loss.mean) == WRITING
    assert max(max(rows[name].transitions) for name in (WRITING, "residual+tc", "lambdas+tc")) < 1500
    assert rows["residual"].transitions == [None] * 3
    assert rows["residual"].point["train.lr"] == 0.032
    assert all(each.mean < 0 for each in (planned["lambdas+tc", "lambdas"].estimate,))
    leads, (plain, scales_at) = leads_on_plain("residual+tc"), baselines_at_rates().values()
    high, own, lowest = (
        {seed: run for seed, run in scales_at[rate].items() if seed in SEEDS} for rate in (0.016, 0.008, 0.004)
    )
    assert {*high} == {*own} == {*lowest} == {*SEEDS}
    assert high[213]["transition"] is None
    assert all(high[seed]["transition"] > own[seed]["transition"] for seed in (211, 212))
    worse = {seed: high[seed]["val_loss"] - own[seed]["val_loss"] for seed in SEEDS}
    both, below = (contrasts(ends_by_seed(runs), ends_by_seed(own), SEEDS) for runs in (high, lowest))
    assert {side(each[column]) for each in (both, below) for column in (0, 2)} == {"level"}
    assert below[2].mean < 0 < both[2].mean
    assert all(lowest[seed]["transition"] < high[seed]["transition"] for seed in (211, 212))
    assert min(scales_at) == 0.004
    at_best = {
        name: contrasts(split_losses("1M")[name], ends_by_seed(lowest), SEEDS) for name in ("residual+tc", "lambdas+tc")
    }
    assert {side(each[column]) for each in at_best.values() for column in (0, 2)} == {"ahead"}
    scales_best = contrasts(ends_by_seed(lowest), ends_by_seed(plain[0.004]), SEEDS)
    assert [side(scales_best[0]), side(scales_best[2])] == ["ahead", "level"]
    whole = [rate for rate, some in plain.items() if {*SEEDS} <= some.keys()]
    assert whole == [*plain] == [0.032, 0.016, 0.008, 0.004, 0.002]
    runs = {(rate, seed): run for rate, some in plain.items() for seed, run in some.items()}
    copies = {place for place, run in runs.items() if run["transition"] is not None}
    assert {(0.032, 0), (0.016, 0)} <= copies
    assert not copies & {(0.008, 0), (0.016, 211), (0.008, 211), *((0.032, seed) for seed in SEEDS)}
    assert [seed for seed in SEEDS if (0.004, seed) in copies] == [211]
    assert [seed for seed in SEEDS if (0.002, seed) in copies] == [213]
    assert all(runs[0.008, seed]["val_loss"] < runs[0.032, seed]["val_loss"] for seed in plain[0.008] if seed)
    tried = {rate: leads[rate, 211] for rate in whole}
    low, scales = (
        [each for (rate, seed), each in leads_on_plain(name).items() if rate == 0.008 and seed in SEEDS]
        for name in ("residual+tc", "lambdas")
    )
    assert rows["residual+tc"].point["train.lr"] == rows["lambdas"].point["train.lr"] == 0.008
    assert max(each[0] for each in (*low, *scales)) < 0
    twice, equal, half, quarter = (on_plain_at(rate, "residual+tc") for rate in (0.016, 0.008, 0.004, 0.002))
    assert [side(each[0]) for each in (twice, equal, half, quarter)] == ["level", "level", "ahead", "ahead"]
    assert {side(each[2]) for each in (twice, equal, half, quarter)} == {"ahead"}
    scaled = [side(on_plain_at(rate, "lambdas")[0]) for rate in whole]
    assert scaled == ["ahead", "level", "level", "ahead", "ahead"]
    others = {rate: statistics.fmean(ends(plain[rate][seed])[2] for seed in SEEDS) for rate in whole}
    assert min(others, key=lambda rate: others[rate]) == 0.004
    losses = {rate: statistics.fmean(plain[rate][seed]["val_loss"] for seed in SEEDS) for rate in whole}
    assert min(losses, key=lambda rate: losses[rate]) == 0.008
    assert [side(on_plain_at(rate, "ddl-tc")[0]) for rate in (0.032, 0.008)] == ["ahead", "level"]
    columns = {to: [column("1M", WRITING, to, place) for place in (0, 2)] for to in ("residual+tc", "lambdas+tc")}
    assert all(0.9 < other / whole < 1.1 for whole, other in columns.values())
    by_seed = {
        pair: [rows[pair[0]].losses[seed] - loss for seed, loss in rows[pair[1]].losses.items()]
        for pair in (("lambdas+tc", "lambdas"), ("ddl-tc", WRITING))
    }
    assert max(by_seed["lambdas+tc", "lambdas"]) < 0 < min(by_seed["ddl-tc", WRITING])
    search = searched()
    assert {run["steps"] for runs in search.values() for run in runs.values()} == {rows["residual"].steps}
    over = {to: search_leads(WRITING, to) for to in columns}
    assert all({0.008, 0.016} <= leads.keys() for leads in over.values())
    over = {to: [leads[rate] for rate in (0.008, 0.016)] for to, leads in over.items()}
    assert {rows[name].point["train.lr"] for name in ("ddl-tc", "lambdas+tc")} == {0.004}
    assert rows[WRITING].point["train.lr"] == 0.008
    ended = {(name, rate): run["val_loss"] for name, runs in search.items() for rate, run in runs.items()}
    marked = {run["facts"]["device"] for runs in search.values() for run in runs.values()} - {"NVIDIA H200"}
    assert marked == {"Intel(R) Xeon(R) Processor"}
    erasing = {rate: ended["ddl-tc", rate] - ended[WRITING, rate] for rate in (0.004, 0.008, 0.016)}
    assert erasing[0.004] < 0 < min(erasing[0.008], erasing[0.016])
    return {
        "million_rates": span(each[0] for (_, seed), each in leads.items() if seed in SEEDS),
        "million_rate": "{}, {}, {}, {} and {}".format(*(f"{-each[0]:.2f}" for each in tried.values())),
        "million_others": "{}, {}, {}, {} and {}".format(*(f"{-each[2]:.2f}" for each in tried.values())),
        "million_tried": NUMBERS[len(plain)],
        "million_scales_ahead": NUMBERS[scaled.count("ahead")],
        "million_lowest": f"{others[0.002] - others[0.004]:.3f}",
        "million_quarter_mean": interval(quarter[0], 2).removeprefix("-"),
        "million_quarter_others_mean": interval(quarter[2], 2).removeprefix("-"),
        "million_half_mean": interval(half[0], 2).removeprefix("-"),
        "million_half_others_mean": interval(half[2], 2).removeprefix("-"),
        "million_low_mean": interval(equal[0], 2).removeprefix("-"),
        "million_twice_mean": interval(twice[0], 2).removeprefix("-"),
        "million_twice_others_mean": interval(twice[2], 2).removeprefix("-"),
        "million_low_others_mean": interval(equal[2], 2).removeprefix("-"),
        **{f"million_{name}_copying": NUMBERS[sum((rate, seed) in copies for seed in SEEDS)]
           for name, rate in (("quarter", 0.002), ("half", 0.004), ("low", 0.008), ("twice", 0.016))},
        "million_low_scales": span(each[0] for each in scales),
        "million_copying": span(leads[place][0] for place in copies),
        "million_copies": NUMBERS[len(copies)],
        "million_plain": len(runs),
        "million_preferred": f"{runs[0.016, 0]['val_loss'] - runs[0.032, 0]['val_loss']:.4f}",
        "million_tc_planned": interval(planned["residual+tc", "residual"].estimate, 3).removeprefix("-"),
        "million_lambdas_planned": interval(planned["lambdas", "residual"].estimate, 3).removeprefix("-"),
        "million_tc_transitions": span(share_of_runs("residual+tc"), 0),
        "million_lambdas_transitions": span(share_of_runs("lambdas"), 0),
        "million_lambdas_higher": " and ".join(f"{high[seed]['transition']:,.0f}" for seed in (211, 212)),
        "million_lambdas_worse": " and ".join(f"{worse[seed]:.2f}" for seed in (211, 212)),
        "million_lambdas_worst": f"{worse[213]:.2f}",
        "million_lambdas_lowest": span((run["transition"] for run in lowest.values()), 0),
        "million_lambdas_lowest_mean": interval(below[0], 3),
        "million_lambdas_lowest_others": interval(below[2], 3),
        "million_scales_best": interval(scales_best[0], 2).removeprefix("-"),
        "million_scales_best_others": interval(scales_best[2], 3),
        **{f"million_{key}_best{part}": interval(at_best[name][column], 3).removeprefix("-")
           for key, name in (("cheap", "lambdas+tc"), ("tc", "residual+tc"))
           for part, column in (("", 0), ("_others", 2))},
        "million_lambdas_higher_mean": interval(both[0], 2).removeprefix("+"),
        "million_lambdas_higher_others": interval(both[2], 2).removeprefix("+"),
        "million_steps": f"{rows['residual'].steps:,}",
        "million_writing_tc": f"{columns['residual+tc'][0]:.2f}",
        "million_writing_scales": f"{columns['lambdas+tc'][0]:.2f}",
        "million_cheap": f"{-planned['lambdas+tc', 'lambdas'].estimate.mean:.2f}",
        "million_cheap_seeds": span(by_seed["lambdas+tc", "lambdas"]),
        "million_erasing_seeds": span(by_seed["ddl-tc", WRITING], 3),
        "search_writing": span(lead for leads in over.values() for lead in leads),
        **{f"search_writing_{key}": " and ".join(f"{lead:.3f}" for lead in over[to])
           for key, to in (("tc", "residual+tc"), ("scales", "lambdas+tc"))},
        "search_erasing_own": f"{ended[WRITING, 0.008] - ended['ddl-tc', 0.004]:.3f}",
        "search_erasing_equal": f"{erasing[0.008]:.3f} and {erasing[0.016]:.3f}",
        "search_erasing_low": f"{-erasing[0.004]:.3f}",
    }  # fmt: skip


def rivals() -> dict[str, Any]:
    """The studies of rates and of rivals at one million parameters, as far as their runs are made."""
    counts: dict[str, int] = {}
    for folder in ("rates-1M", "rivals-1M"):
        plan = study(folder).study
        most = len(plan.schemes) * plan.tuning.runs + len(plan.baselines) * len(plan.longer)
        name = folder.removesuffix("-1M")
        counts |= {f"{name}_made": len(records(f"{folder}/records.jsonl")), f"{name}_most": most * len(plan.seeds)}
    results = study("rivals-1M")
    ((place, planned),) = results.corrected.items()
    assert place == ("1M", "mhc", "lambdas+smear")
    assert not planned.clear
    looks, rates = (by_rate("rivals-1M")[name] for name in ("lambdas+smear", "mhc"))
    assert all({*SEEDS} == runs.keys() for tried in (looks, rates) for runs in tried.values())
    assert rates.keys() == looks.keys() == {0.016, 0.008, 0.004}
    smear_rate = rival_rate("lambdas+smear")
    look, cheap = looks[smear_rate], row("1M", "lambdas+tc")
    assert cheap.point["train.lr"] == smear_rate == rival_rate("mhc") == min(looks)
    tc, scales, to_look = (from_smear(name) for name in ("lambdas+tc", "lambdas", "mhc"))
    assert [side(tc[0]), side(tc[2]), side(scales[0])] == ["ahead", "ahead", "level"]
    assert scales[0].mean > 0
    lambdas = baselines_at_rates()["lambdas"][0.004]
    best = contrasts(ends_by_seed(lambdas), rival("lambdas+smear"), SEEDS)
    assert [side(best[0]), side(best[2])] == ["level", "behind"]
    assert [seed for seed, run in rates[0.016].items() if run["transition"] is not None] == [213]
    lowest = rival("mhc")
    higher, lower = (contrasts(ends_by_seed(rates[rate]), lowest, SEEDS) for rate in (0.016, 0.008))
    assert [side(higher[0]), side(higher[2])] == ["level", "behind"]
    assert {side(lower[0]), side(lower[2])} == {"level"}
    to_tc = contrasts(split_losses("1M")["lambdas+tc"], lowest, SEEDS)
    assert [side(to_look[0]), side(to_look[2]), side(to_tc[0]), side(to_tc[2])] == ["level", "level", "ahead", "level"]
    assert all(each[column].mean < 0 for each in (to_look, to_tc) for column in (0, 2))
    leads = [run["val_loss"] - cheap.losses[seed] for seed, run in look.items()]
    assert min(leads) > 0
    forms = "residual+tc", "lambdas+tc", "ddl-tc", WRITING
    costs = step_costs()
    times = {name: cost.ratio.median for name, cost in costs.items()}
    assert all(cost.compiled for cost in costs.values())
    assert max(abs(times[name] - 1) for name in forms[:2]) < 0.05
    *others, slowest = (f"`{name}`" for name in sorted(times, key=lambda name: times[name]) if times[name] >= 1.2)
    (device,) = {cost.device for cost in costs.values()}
    (rounds,) = {cost.rounds for cost in costs.values()}
    assert {side(each) for name in forms for each in from_smear(name)[:3:2]} == {"ahead"}
    return {
        **counts,
        "million_writing_time": f"{times[WRITING] / times['lambdas+tc']:.2f}",
        "steps_device": device,
        "steps_rounds": rounds,
        "steps_tc": f"{times['residual+tc']:.2f}",
        "steps_scales_tc": f"{times['lambdas+tc']:.2f}",
        "steps_slow": f"{', '.join(others)} and {slowest}",
        "smear_rate": f"{smear_rate:g}",
        "smear_tc": interval(tc[0], 3).removeprefix("-"),
        "smear_tc_short": f"{-tc[0].mean:.2f}",
        "smear_tc_others": interval(tc[2], 3).removeprefix("-"),
        "mhc_smear": interval(to_look[0], 3),
        "mhc_smear_others": interval(to_look[2], 3),
        "mhc_p": f"{planned.p:.2f}",
        "mhc_holm": f"{planned.holm:.2f}",
        "mhc_tc": interval(to_tc[0], 3).removeprefix("-"),
        "mhc_tc_short": f"{-to_tc[0].mean:.2f}",
        "mhc_tc_others": interval(to_tc[2], 3).removeprefix("-"),
        "mhc_higher_steps": f"{rates[0.016][213]['transition']:,.0f}",
        "mhc_higher_mean": interval(higher[0], 2).removeprefix("+"),
        "mhc_higher_others": interval(higher[2], 2).removeprefix("+"),
        "mhc_lower_mean": interval(lower[0], 3).removeprefix("+"),
        "mhc_lower_others": interval(lower[2], 3).removeprefix("+"),
        "mhc_steps": span((run["transition"] for run in rates[0.004].values()), 0),
        "mhc_lower_steps": span((run["transition"] for run in rates[0.008].values()), 0),
        "mhc_time": f"{times['mhc'] / times['lambdas+tc']:.2f}",
        "smear_best": interval(best[0], 3).removeprefix("+"),
        "smear_best_others": interval(best[2], 3).removeprefix("+"),
        "smear_lambdas": interval(scales[0], 3).removeprefix("+"),
        "smear_steps": span((run["transition"] for run in look.values()), 0),
        "smear_convolution_steps": span((step for name in forms for step in share_of_runs(name)), 0),
    }


def ten_million() -> dict[str, Any]:
    """Ten million parameters."""
    difference, course = ten()
    assert difference.clear
    first, *middle = course.values()
    later = [-mean for mean in middle[2:]]
    assert later == sorted(later)
    short = {(run["scheme"], run["point"]["train.lr"]): run for run in records("10M/records.jsonl")
             if run["kind"] == "tune"}  # fmt: skip
    assert min((0.002, 0.004, 0.008), key=lambda rate: short["residual", rate]["val_loss"]) == 0.004
    assert min((0.004, 0.008, 0.016), key=lambda rate: short["residual+tc", rate]["val_loss"]) == 0.008
    assert min((0.004, 0.008, 0.016), key=lambda rate: short[WRITING, rate]["val_loss"]) == 0.016
    others = {rate: short["residual", rate]["split"][-1][2] for rate in (0.004, 0.008)}
    (steps,) = {run["steps"] for run in short.values()}
    costs = rate_costs()
    writing = short["residual+tc", 0.008]["val_loss"] - short[WRITING, 0.008]["val_loss"]
    return {
        "ten": f"{-difference.estimate.mean:.2f}",
        "ten_repeated": f"{column('10M', 'residual+tc', 'residual', 1):.2f}",
        "ten_others": f"{column('10M', 'residual+tc', 'residual', 2):.2f}",
        "p_ten_own": f"{difference.holm:.3f}",
        "ten_first": next(iter(course)),
        "ten_steps": f"{row('10M', 'residual').steps:,}",
        "ten_start": f"{-first:.2f}",
        "ten_middle": span(middle[:3]),
        "ten_short": steps,
        "ten_short_lead": f"{others[0.004] - others[0.008]:.2f}",
        "ten_short_writing": f"{writing:.2f}",
        "ten_short_preferred": f"{short[WRITING, 0.008]['val_loss'] - short[WRITING, 0.016]['val_loss']:.4f}",
        "rate_costs": f"{min(costs):+.2f} to {max(costs):+.2f}",
    }


def corrections() -> dict[str, Any]:
    """How many comparisons were planned and are clear."""
    first = study("main").corrected.values()
    later = [sum(map(len, study(name).study.primary.values())) for name in SPLIT.values()]
    alone = {place: each for place, (each, p) in together().items() if each.clear and p >= 0.05}
    assert not any(p < 0.05 for each, p in together().values() if not each.clear)
    scales, tc, lambdas = (("1M", "1M", *pair) for pair in
                           (("lambdas", "residual"), (WRITING, "residual+tc"), (WRITING, "lambdas+tc")))  # fmt: skip
    ten = "10M", "10M", "residual+tc", "residual"
    assert alone.keys() == {scales, tc, lambdas, ten}
    return {
        "planned_later": "{}, {} and {}".format(*(NUMBERS[count] for count in later)),
        "planned_rivals": NUMBERS[len(study("rivals-1M").study.primary["1M"])],
        "planned_first": len(first),
        "clear_first": sum(each.clear for each in first),
        "planned_all": len(together()),
        "clear_all": sum(p < 0.05 for _, p in together().values()),
        **{f"p_{name}": f"{alone[place].p:.4f}" for name, place in
           (("scales", scales), ("writing_tc", tc), ("writing_scales", lambdas))},
        "p_ten": f"{alone[ten].p:.3f}",
    }  # fmt: skip


def timing() -> dict[str, Any]:
    """`lambdas+tc` at equal seconds, and how ratios of times scatter."""
    differences, rounds = cheap(), sessions()
    at_seconds = {(each.size, each.baseline): each for each in differences if each.measure == "seconds"}
    shaken = {place: slower(each, drift(90)) for place, each in at_seconds.items()}
    assert {place for place, each in shaken.items() if side(each) != "ahead"} == {("0.1M-deep", "lambdas")}
    assert [size for size in SIZES if row(size, "lambdas+tc").compiled] == ["0.1M-deep", "0.3M"]
    worth = [row(size, "lambdas+tc").difference("lambdas", "tokens").worth for size in SHAPES]
    speed = [each / at_seconds[size, "lambdas"].cost for each, size in zip(worth, SHAPES)]
    earlier = {size: [cost.ratio.median for cost in row(size, "residual+tc").timed(compiled=False)]
               for size in ("0.1M", "0.1M-wide")}  # fmt: skip
    *some, last = (f"{ratio:.2f}" for ratio in earlier["0.1M"])
    return {
        "cheap_count": len(differences),
        "cheap_worth": span(worth, 1),
        "cheap_speed": span(speed, 1),
        "cheap_rounds": span(rounds, 0),
        "cheap_slower": interval(shaken["0.1M-deep", "lambdas"], 3),
        "drift": f"{100 * (drift(90) - 1):.0f}",
        "scatter_eager": f"{scatter(False, 9):.1f}",
        "scatter_compiled": f"{scatter(True, 9):.1f}",
        "scatter_eager_long": f"{scatter(False, 90):.1f}",
        "scatter_compiled_long": f"{scatter(True, 90):.1f}",
        "ratio_tc": f"{', '.join(some)} and {last}",
        "ratio_tc_wide": " and ".join(f"{ratio:.2f}" for ratio in earlier["0.1M-wide"]),
    }


# The sections of claims.md


@cache
def numbers() -> dict[str, Any]:
    parts = first_size, second_size, three_times_the_tokens, million, rivals, ten_million, corrections, timing, tables
    return {name: value for part in (*parts, *ANSWERS, *METHODS) for name, value in part().items()}


def filled(field: str) -> str:
    """What a pair of braces stands for: a number or table by name, a size and two schemes, which are compared, or the
    parameters that a preset adds at 124M, its state, and the time of its step at 0.3M.
    """
    match field.split():
        case [name]:
            return str(numbers()[name])
        case ["added", preset]:
            return f"{next(iter(added(resolve(preset)).values())):,}"
        case ["state", preset]:
            return state(resolve(preset))
        case ["step", preset]:
            return f"{step_time('0.3M', preset):.2f}"
        case [size, scheme, to]:
            return interval(compared(size, scheme, to))
    raise KeyError(field)
