"""The numbers of ResBench's questions and single answers, once its records bear out the words about them."""

import json
import statistics
from itertools import product
from typing import Any

from resbench_rows import (
    BASELINES,
    NUMBERS,
    SHAPES,
    SIZES,
    WRITING,
    answers,
    compared,
    erasing,
    erasing_at_equal_settings,
    interval,
    row,
    side,
    split_runs,
    step_time,
)
from resbench_tables import decided_alike, ordered_alike, records, share_alike, span, study

from residua.lab.study.results import Row
from residua.records.statistics import Noise, paired

GATED = "gated-orthogonal"
FAILED = "0.1M-deep", "lambdas-gated+tc"
"""A row with a run whose loss jumped."""


def whole(size: str) -> dict[str, Row]:
    """The finished rows of a size by scheme, without those of Muon."""
    rows = [each for each in study("resbench").rows if each.size == size and each.whole]
    return {each.scheme: each for each in rows if not each.scheme.endswith("-muon")}


def last_losses(size: str, scheme: str, kind: str, **point: Any) -> dict[int, float]:
    """The last losses of runs by seed, at one point of the tuning."""
    wanted = {"size": size, "scheme": scheme, "kind": kind}
    runs = [run for run in records("resbench/records.jsonl") if wanted.items() <= run.items()]
    return {run["seed"]: run["val_loss"] for run in runs if point.items() <= run["point"].items()}


def ahead_of_both(each: Row, measure: str) -> bool:
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
        for run in records(f"resbench/rates/{name}.jsonl"):
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
    second = study("resbench").noise("0.1M").contrast(*(list(losses.values()) for losses in sides))
    return {
        "gate_search": f"{statistics.fmean(first):.2f}",
        "gate_second": f"{other - chosen:.4f}",
        "gate_second_point": interval(second),
    }


def about_muon() -> dict[str, Any]:
    results = study("resbench")
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


def lost(how: str) -> list[float]:
    """What a choice between the two points of each search costs over all seeds: by a "short" run, "one" or "three"."""
    losses: dict[str, dict[str, dict[str, dict[int, float]]]] = {}
    for run in records("resbench/records.jsonl"):
        each = whole("0.1M").get(run["scheme"]) if run["size"] == "0.1M" else None
        if each and (run["kind"] != "report" or run["seed"] in each.losses):
            points = losses.setdefault(run["scheme"], {})
            points.setdefault(json.dumps(run["point"]), {}).setdefault(run["kind"], {})[run["seed"]] = run["val_loss"]
    both = [[kinds for kinds in points.values() if len(kinds.get("report", ())) == 5] for points in losses.values()]
    choice = {
        "short": lambda kinds: kinds["tune"][0],
        "one": lambda kinds: kinds["final"][0],
        "three": lambda kinds: statistics.fmean(kinds["final"].values()),
    }[how]
    costs = []
    for points in (points for points in both if len(points) > 1):
        means = [statistics.fmean(kinds["report"].values()) for kinds in points]
        costs.append(means[min(range(len(points)), key=lambda i: choice(points[i]))] - min(means))
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
)
