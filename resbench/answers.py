"""The numbers of ResBench's questions and single answers, once its records bear out the words about them."""

import json
import re
import statistics
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any

import numpy as np
from rows import (
    BASELINES,
    NUMBERS,
    SHAPES,
    SIZES,
    WRITING,
    answers,
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
from scipy.stats import spearmanr
from tables import RECORDS, decided_alike, interval, ordered_alike, records, share_alike, span, study

from residua.lab.records.statistics import Noise, paired
from residua.lab.study.results import SchemeRow

GATED = "gated-orthogonal"
FAILED = "0.1M-deep", "lambdas-gated+tc"
"""A row with a run whose loss jumped."""


def whole(size: str) -> dict[str, SchemeRow]:
    """The finished rows of a size by scheme, without those of Muon."""
    rows = [each for each in study("main").rows if each.size == size and each.whole]
    return {each.scheme: each for each in rows if not each.scheme.endswith("-muon")}


def last_losses(size: str, scheme: str, kind: str, **point: Any) -> dict[int, float]:
    """The last losses of runs by seed, at one point of the tuning."""
    wanted = {"size": size, "scheme": scheme, "kind": kind}
    runs = [run for run in records("main/records.jsonl") if wanted.items() <= run.items()]
    return {run["seed"]: run["val_loss"] for run in runs if point.items() <= run["point"].items()}


def ahead_of_both(each: SchemeRow, measure: str) -> bool:
    estimates = [each.difference(baseline, measure).estimate for baseline in BASELINES]
    return all(estimate and side(estimate) == "ahead" for estimate in estimates)


# The numbers of the sentences


def about_erasing() -> dict[str, Any]:
    gone = erasing()
    behind = {(each.size, each.scheme) for each in gone if side(each.estimate) == "behind"}
    assert {place for place in behind if place[1] == "ddl-tc"} == {("0.3M", "ddl-tc")}
    ours, theirs = (row("0.3M", name) for name in ("ddl-tc", WRITING))
    changed = {key: value / theirs.point[key] for key, value in ours.point.items() if value != theirs.point[key]}
    assert changed == {"train.lr": 2.0, "model.embedding_init_std": 2.0}
    assert row("0.1M", "ddl-tc").edges == ["model.embedding_init_std"]
    equal = {run["seed"]: run["val_loss"] for run in split_runs()
             if run["scheme"] == "ddl-tc" and run["point"] == theirs.point}  # fmt: skip
    by_seed = [loss - theirs.losses[seed] for seed, loss in equal.items()]
    assert min(by_seed) > 0
    rates: dict[str, dict[float, dict[int, float]]] = {"ddl": {}, "ddl-write-only": {}}
    for name, losses in rates.items():
        for run in records(f"main/rates/{name}.jsonl"):
            losses.setdefault(run["point"]["train.lr"], {})[run["seed"]] = run["val_loss"]
    costs = [paired(rates["ddl"][rate], rates["ddl-write-only"][rate]) for rate in (0.032, 0.064)]
    assert all(side(cost) == "behind" for cost in costs)
    assert costs[0].mean < costs[1].mean
    assert [side(paired(losses[0.064], losses[0.032])) for losses in rates.values()] == ["behind", "level"]
    seen = {each.size: each.estimate.detectable for each in gone if each.scheme == "ddl-tc"}
    return {
        "erasing_equal": interval(erasing_at_equal_settings()),
        "erasing_seeds": span(by_seed),
        **{f"seen_{name}": f"{seen[size]:.3f}" for name, size in
           (("four", "0.1M"), ("deep", "0.1M-deep"), ("wide", "0.1M-wide"))},
    }  # fmt: skip


def about_the_convolution() -> dict[str, Any]:
    differences = {size: answers()[size, "ddl-tc", "residual+tc"] for size in SIZES}
    sides = {size: side(difference.estimate) for size, difference in differences.items()}
    assert sides == {"0.1M": "level", "0.1M-wide": "ahead", "0.1M-deep": "level", "0.3M": "ahead"}
    assert not any(difference.clear for difference in differences.values())
    ours, theirs = (row("0.3M", name).losses for name in ("ddl-tc", "residual+tc"))
    by_seed = [theirs[seed] - loss for seed, loss in ours.items()]
    assert min(by_seed) > 0
    assert side(compared("0.1M", "gated-delta+tc", "residual+tc")) == "behind"
    return {"ddl_seeds": span(by_seed)}


def about_seconds() -> dict[str, Any]:
    marks = {
        (name, measure): [size for size in SIZES if ahead_of_both(row(size, name), measure)]
        for name, measure in product(("ddl-tc", "lambdas-gated+conv"), ("seconds", "compiled seconds"))
    }
    assert marks.pop(("ddl-tc", "seconds")) == ["0.3M"]
    assert all(sizes == ["0.1M", "0.1M-wide", "0.3M"] for sizes in marks.values())
    assert side(row("0.1M-deep", "ddl-tc").difference("lambdas", "compiled seconds").estimate) == "behind"
    level = row("0.1M-deep", "lambdas-gated+conv").difference("lambdas", "seconds").estimate
    assert side(level) == "level"
    for name, size in product(("ddl", "ddl-ec", "gated-delta", "gated-delta-write", "gated-delta+tc"), SHAPES):
        assert name not in whole(size) or not ahead_of_both(row(size, name), "seconds")
    times = {name: f"{step_time(size, 'ddl-tc'):.2f}" for name, size in
             (("four", "0.1M"), ("wide", "0.1M-wide"), ("deep", "0.1M-deep"))}  # fmt: skip
    return {"gate_seen": f"{level.detectable:.3f}", **{f"time_{name}": time for name, time in times.items()}}


def about_scales() -> dict[str, Any]:
    sides = {size: side(compared(size, "lambdas", "residual")) for size in SIZES}
    assert sides == {"0.1M": "level", "0.1M-wide": "level", "0.1M-deep": "ahead", "0.3M": "level"}
    ours, theirs = (row("0.3M", name).losses for name in ("lambdas+tc", "residual+tc"))
    *others, late = sorted(theirs[seed] - loss for seed, loss in ours.items())
    return {"scales_late": f"{late:.2f}", "scales_others": span(others)}


def about_the_gate() -> dict[str, Any]:
    search = {run["connection"]: run["losses"] for run in reversed(records("search.jsonl"))}
    first = [search["residual"][seed] - loss for seed, loss in search[GATED].items()]
    assert side(compared("0.1M", GATED, "residual")) == "level"
    lowest = min(whole("0.1M").values(), key=lambda each: each.loss.mean)
    assert lowest.scheme == FAILED[1]
    factor = "train.connection_lr_factor"
    chosen, other = (statistics.fmean(last_losses("0.1M", GATED, "final", **{factor: value}).values())
                     for value in (4.0, 0.25))  # fmt: skip
    sides = (last_losses("0.1M", GATED, "report", **{factor: 0.25}), row("0.1M", "residual").losses)
    second = study("main").noise("0.1M").contrast(*(list(losses.values()) for losses in sides))
    return {
        "gate_search": f"{statistics.fmean(first):.2f}",
        "gate_second": f"{other - chosen:.4f}",
        "gate_second_point": interval(second),
    }


def about_muon() -> dict[str, Any]:
    results = study("main")
    muon = [each for each in results.rows if each.whole and each.scheme.endswith("-muon")]
    assert len(muon) == 5
    own = Noise.of([each.losses for each in muon])
    assert own.deviation > Noise.of([each.losses for each in whole("0.1M").values()]).deviation
    assert answers()["0.1M", "residual-muon", "residual"].clear
    assert answers()["0.1M", "residual+tc-muon", "residual-muon"].clear
    losses = (list(row("0.1M", name).losses.values()) for name in ("residual+tc-muon", "residual-muon"))
    p = own.contrast(*losses).p_value
    better = sum(difference.p < p for difference in results.corrected.values())
    assert (len(results.corrected) - better) * p > 0.05
    without = {name for name in whole("0.1M") if not {"conv", "tc", "ec"} & {*re.split("[-+]", name)}}
    assert max(without, key=lambda name: gain("0.1M", name)) == "hc"
    assert gain("0.1M", "hc") < gain("0.1M", "residual-muon")
    assert side(compared("0.1M", "hc", "hc-static")) == "level"
    return {}


def about_sizes() -> dict[str, Any]:
    large = {name: list(each.losses.values()) for name, each in whole("0.3M").items()}
    alike = ordered_alike({name: list(row("0.1M", name).losses.values()) for name in large}, large)
    others = [pair for pair, same in alike.items() if not same]
    assert len(large) == 8
    assert all(any(name.startswith("ddl-tc") for name in pair) for pair in others)
    decided = {size: decided_alike(size, 0) for size in ("0.1M", "0.3M")}
    assert all(decided["0.3M"].values())
    low, high = share_alike(alike, list(large))
    return {
        "pairs_all": len(alike),
        "pairs_alike": sum(alike.values()),
        "pairs_share": f"{100 * sum(alike.values()) / len(alike):.0f}",
        "pairs_interval": f"{100 * low:.0f} % to {100 * high:.0f}",
        "pairs_other": NUMBERS[len(others)],
        "decided_all": len(decided["0.3M"]),
        "decided_plain": NUMBERS[sum("residual" in pair for pair in decided["0.3M"])],
        "decided_second": "all",
        "decided_first": NUMBERS[sum(decided["0.1M"].values())],
    }


def about_tuning() -> dict[str, Any]:
    for size in SHAPES:
        more = last_losses(size, "lambdas", "longer")
        forms = [name for name in whole(size) if name.startswith("ddl-") and name != "ddl-write-only"]
        forms += [name for name in whole(size) if name.endswith(("+conv", "+tc"))]
        assert "ahead" not in {side(paired(row(size, name).losses, more)) for name in forms}
    return {"point_gap": f"{max(lost('one')):.3f}"}


def about_the_failed_run() -> dict[str, Any]:
    size, scheme = FAILED
    failed = row(size, scheme)
    best = {
        seed: min(each.losses[seed] for name, each in whole(size).items() if name != scheme) for seed in failed.losses
    }
    (seed,) = (seed for seed, loss in failed.losses.items() if loss > best[seed])
    (run,) = (run for run in failed.reported.runs if run.seed == seed)
    jump = next(later.step for point, later in pairwise(run.validation) if later.loss > point.loss + 1)
    assert jump <= run.steps / 2 + 1
    (points,) = (audit["points"] for audit in records("main/audits.jsonl")
                 if (audit["size"], audit["scheme"], audit["seed"]) == (size, scheme, seed))  # fmt: skip
    (sublayers,) = {len(point["sublayers"]) for point in points}
    stuck = {point["step"]: sum(sub["gate_q05"] > 0.99 for sub in point["sublayers"]) for point in points}
    assert all(count <= 1 for step, count in stuck.items() if step < jump)
    return {"stuck_after": stuck[jump], "stuck_of": sublayers, "stuck_end": NUMBERS[stuck[run.steps]]}


def about_gates() -> dict[str, Any]:
    audits = {audit["key"]: audit for audit in records("main/audits.jsonl")}.values()
    last = {audit["scheme"]: audit["points"][-1]["sublayers"] for audit in audits if audit["size"] == "0.1M"}
    assert statistics.fmean(sub["reflection"] for sub in last["ddl"]) < 0.05
    mlp, *others = sorted(last["ddl-tc"], key=lambda sub: -sub["reflection"])
    assert mlp["sublayer"] == "1 mlp"
    assert all(sub["reflection"] < 0.01 for sub in others)
    (larger,) = (audit["points"][-1]["sublayers"] for audit in audits if audit["size"] == "0.3M")
    most, second, *others = sorted(larger, key=lambda sub: -sub["reflection"])
    assert [sub["sublayer"] for sub in (most, second)] == ["1 mlp", "2 attention"]
    assert all(sub["reflection"] < 0.02 for sub in others)
    return {
        "gates_doubled": NUMBERS[sum(sub["gate_q50"] < -0.98 for sub in last[GATED])],
        "gates_of": NUMBERS[len(last[GATED])],
        "reflected_small": f"{100 * mlp['reflection']:.0f}",
        "reflected": f"{100 * most['reflection']:.0f}",
        "reflected_second": f"{100 * second['reflection']:.0f}",
        "erased": f"{most['erase_norm']:.1f}",
        "written": f"{most['write_norm']:.1f}",
    }


def about_the_published_order() -> dict[str, Any]:
    found = json.loads((RECORDS / "main" / "published.json").read_text(encoding="utf-8"))["differences"]
    names = sorted(found.keys() - {"residual"})
    assert max(found[name] for name in names) < 0 < min(gain("0.1M", name) for name in names)
    seen = [name for name in names if side(apart("0.1M", name, "residual")) == "ahead"]
    _, *close = sorted(found[name] for name in names)
    assert max(close) - min(close) < 0.008
    ahead = {name for name in names if side(apart("0.1M", name, "lambdas")) == "ahead"}
    assert ahead == {"hc", "hc-static", "mudd"}
    assert all(row("0.1M", name).difference("residual", "seconds").estimate is None for name in ("hc", "mhc"))
    six, seven = (
        spearmanr([row("0.1M", name).loss.mean for name in some], [found[name] for name in some])
        for some in (names, [*names, "residual"])
    )
    return {
        "Published_count": NUMBERS[len(names)].capitalize(),
        "published_seen": NUMBERS[len(seen)],
        "published_rank": f"{six.statistic:+.2f}",
        "published_rank_all": f"{seven.statistic:+.2f}",
        "published_p": f"{seven.pvalue:.2f}",
        "published_ahead": span(gain("0.1M", name, "lambdas") for name in ahead),
        "time_hc": f"{step_time('0.1M', 'hc'):.2f}",
        "time_mhc": f"{step_time('0.1M', 'mhc'):.2f}",
    }


def about_the_curve() -> dict[str, Any]:
    """The exponent through three lengths of the plain residual: 1, 1.5 and 3 times at 0.3M, a half in place of 3 at
    0.1M, with what one seed lost by it."""
    larger = (row("0.3M", "residual").losses, last_losses("0.3M", "residual", "longer"),
              row("0.3M-long", "residual").losses)  # fmt: skip
    means = [statistics.fmean(losses[seed] for seed in (1, 2, 3)) for losses in larger]
    plain = row("0.1M", "residual")
    short, full = (last_losses("0.1M", "residual", kind, **plain.point)[0] for kind in ("tune", "final"))
    longer = statistics.fmean(last_losses("0.1M", "residual", "longer").values())
    small = [plain.loss.mean + short - full, plain.loss.mean, longer]
    return {
        "exponent": f"{exponent(means, (1, 1.5, 3)):.1f}",
        "exponent_small": f"{exponent(small, (0.5, 1, 1.5)):.1f}",
    }


def exponent(losses: list[float], lengths: tuple[float, ...]) -> float:
    """The alpha of the curve a + b C^-alpha through three losses."""
    gained = (losses[0] - losses[1]) / (losses[1] - losses[2])
    grid = np.linspace(0.01, 3, 3000)
    powers = [length**-grid for length in lengths]
    return float(grid[np.abs((powers[0] - powers[1]) / (powers[1] - powers[2]) - gained).argmin()])


def about_the_lookup() -> dict[str, Any]:
    runs = {run["scheme"]: run for run in records("main/repeats.jsonl")}
    last = {name: run["points"][-1] for name, run in runs.items()}
    half = 1605
    at_half = {
        name: point["repeated"] for name, run in runs.items() for point in run["points"] if point["step"] == half
    }
    (learned,) = {f"{at_half[name]:.0f}" for name in ("lambdas+conv", "ddl-tc", WRITING)}
    late = row("0.3M", "residual+tc").losses
    assert max(late, key=lambda seed: late[seed] - row("0.3M", "lambdas+tc").losses[seed]) == 1
    others = [point["other"] for point in last.values()]
    share = {size: gain(size, "lambdas+conv", "lambdas") / gain(size, "lambdas+tc", "lambdas") for size in SIZES}
    return {
        "lookup_runs": NUMBERS[len(runs)],
        "half_step": half,
        "half_learned": learned,
        "ends_baselines": f"{min(last[name]['repeated'] for name in BASELINES):.1f}",
        "ends_others": f"{max(others) - min(others):.2f}",
        **{f"lookup{name}": f"{share[size]:.2f}" for name, size in
           (("", "0.3M"), ("_four", "0.1M"), ("_wide", "0.1M-wide"), ("_deep", "0.1M-deep"))},
    }  # fmt: skip


def about_longer_runs() -> dict[str, Any]:
    longer = last_losses("0.3M", "lambdas", "longer")
    long = [loss for name in BASELINES for loss in row("0.3M-long", name).losses.values()]
    assert (len(longer) + len(last_losses("0.3M", "residual", "longer")), len(long)) == (10, 6)
    learned = min(longer, key=longer.get)
    assert learned == 2
    assert longer[learned] < min(long)
    mixed = row("0.3M", "ddl-tc").difference("lambdas", "seconds")
    share = (1 - mixed.cost**-0.5) / (1 - 1.5**-0.5)
    short, ours = row("0.3M", "lambdas").losses, row("0.3M", "ddl-tc").losses
    by_seed = {seed: ours[seed] - loss - share * (longer[seed] - loss) for seed, loss in short.items()}
    assert abs(statistics.fmean(by_seed.values()) - mixed.estimate.mean) < 1e-4  # steps are whole
    least, *others = sorted((loss for seed, loss in by_seed.items() if seed != learned), reverse=True)
    return {
        "longer_learned": f"{longer.pop(learned):.3f}",
        "longer_others": span(longer.values(), 3),
        "longer_long": span(long, 3),
        "mixed": interval(mixed.estimate),
        "mixed_learned": f"{by_seed[learned]:.2f}",
        "mixed_others": f"{least:.2f} to {others[-1]:.2f}",
    }


def lost(how: str) -> list[float]:
    """What a choice between the two points of each search costs over all seeds: by a "short" run, "one" or "three"."""
    losses: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for run in records("main/records.jsonl"):
        each = whole("0.1M").get(run["scheme"]) if run["size"] == "0.1M" else None
        if each and (run["kind"] != "report" or run["seed"] in each.losses):
            points = losses.setdefault(run["scheme"], {})
            points.setdefault(json.dumps(run["point"]), {}).setdefault(run["kind"], {})[run["seed"]] = run["val_loss"]
    both = [[kinds for kinds in points.values() if len(kinds.get("report", ())) == 5] for points in losses.values()]
    choices: dict[str, Callable[[Any], float]] = {
        "short": lambda kinds: kinds["tune"][0],
        "one": lambda kinds: kinds["final"][0],
        "three": lambda kinds: statistics.fmean(kinds["final"].values()),
    }
    choice = choices[how]
    costs = []
    for reported in (each for each in both if len(each) > 1):
        means = [statistics.fmean(kinds["report"].values()) for kinds in reported]
        costs.append(means[min(range(len(reported)), key=lambda i: choice(reported[i]))] - min(means))
    return costs


PARTS = (
    about_erasing,
    about_the_convolution,
    about_seconds,
    about_scales,
    about_the_gate,
    about_muon,
    about_sizes,
    about_tuning,
    about_the_failed_run,
    about_gates,
    about_the_published_order,
    about_the_curve,
    about_the_lookup,
    about_longer_runs,
)
