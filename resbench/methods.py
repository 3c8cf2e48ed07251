"""The numbers of how ResBench's runs were made, chosen and compared, once its records bear out the words about them."""

import json
import math
import statistics
from collections import Counter
from datetime import datetime
from itertools import combinations, product
from typing import Any

from answers import last_losses, lost, whole
from picture import splits
from rows import BASELINES, NUMBERS, SHAPES, SIZES, WRITING, answers, gain, row, side
from tables import (
    RECORDS,
    SPLIT,
    decided_alike,
    records,
    searched,
    span,
    split_losses,
    study,
)

from residua.connections import resolve
from residua.lab.records.statistics import Contrast, detects, welch
from residua.lab.study.definition import load_study
from residua.lab.study.results import FAILED

EPYC, XEON, H200 = "AMD EPYC", "Intel(R) Xeon(R) Processor", "NVIDIA H200"


def seconds(run: dict[str, Any]) -> range:
    """When a run was made, by the clock."""
    start = int(datetime.fromisoformat(run["facts"]["date"]).timestamp())
    return range(start, start + round(run["seconds"]))


def seeds_are_new(name: str) -> bool:
    """Whether no run of another study has a seed of this one."""
    others = {"main", *SPLIT.values()} - {name}
    seeds = {run["seed"] for other in others for run in records(f"{other}/records.jsonl")}
    return not seeds & {*study(name).study.seeds}


# The numbers of the sentences


def about_the_sizes() -> dict[str, Any]:
    planned = study("main").study
    keys = {size: planned.sizes[size].keys for size in (*SIZES, "0.3M-long")}
    assert [size["model.num_hidden_layers"] for size in keys.values()] == [4, 2, 8, 4, 4]
    assert [planned.sizes[size].tuned for size in ("0.1M-wide", "0.1M-deep", "0.3M-long")] == ["0.1M", "0.1M", "0.3M"]
    long = [each for each in study("main").rows if each.size == "0.3M-long" and each.whole]
    assert {(each.seeds, each.steps) for each in long} == {(3, 3 * row("0.3M", "residual").steps)}
    assert all(each.point == row("0.3M", each.scheme).point for each in long)
    assert all(study(name).study.tuning.runs == study(name).study.tuning.baseline_runs for name in ("1M", "10M"))
    later = {name: [each for each in study(name).rows if each.whole] for name in ("1M", "10M")}
    assert {each.seeds for rows in later.values() for each in rows} == {3}
    embedded = [2048 * keys[size]["model.hidden_size"] / row(size, "residual").reported.parameters for size in SIZES]
    parts = splits(study("main"))
    assert all(name == "lambdas" or part.repeated > 0.8 * sum(part) for name, part in parts.items())
    return {
        **{f"width{name}": keys[size]["model.hidden_size"] for name, size in
           (("", "0.3M"), ("_four", "0.1M"), ("_wide", "0.1M-wide"), ("_deep", "0.1M-deep"))},
        "eight": NUMBERS[len(whole("0.3M"))],
        "million_rows": NUMBERS[len(later["1M"])],
        "ten_rows": NUMBERS[len(later["10M"])],
        "per_parameter": f"{planned.tokens_per_parameter:g}",
        "window": planned.set["train.sequence_length"],
        "embedding": f"{100 * min(embedded):.0f} to {100 * max(embedded):.0f}",
    }  # fmt: skip


def about_the_schemes() -> dict[str, Any]:
    recipe = load_study("resbench").schemes
    begun = {run["scheme"] for run in records("main/records.jsonl")}
    finished = {each.scheme for each in study("main").rows if each.size == "0.1M" and each.whole}
    assert not begun & {"ddl-cc", "ddl-cc-ec", "ddl-v", "denseformer", "altup", "siamese", "frac"}
    assert not finished & {"ddl-apart", "gated-delta-4-gates", "gated-delta-4", "layerscale", "scales", "residual-mup"}
    assert recipe["residual+mlp"].parameters_of == "ddl-tc"
    return {"recipe": len(recipe), "finished": len(finished), "never": len(recipe.keys() - begun)}


def about_the_text() -> dict[str, Any]:
    made = json.loads(RECORDS.with_name("corpus.json").read_text(encoding="utf-8"))
    runs = [run for name in ("main", "fresh", "1M") for run in records(f"{name}/records.jsonl")]
    assert len({run["facts"]["data"]["fingerprint"] for run in runs}) == 1
    data = runs[0]["facts"]["data"]
    assert max(run["tokens"] for run in runs) < data["train_tokens"]
    assert data["validation_fraction"] == 0.001
    (further,) = {len(run["further_documents"]["nats"]) for run in runs if "further_documents" in run}
    return {
        "characters": f"{made['characters'] / 1e6:.0f}",
        "packages": len(made["packages"]),
        "text_tokens": f"{data['tokens'] / 1e6:.0f}",
        "held_out": f"{data['validation_tokens']:,}",
        "documents": f"{data['documents']:,}",
        "further_documents": f"{further:,}",
    }


def about_the_machines() -> dict[str, Any]:
    places: dict[str, set[tuple[str, ...]]] = {EPYC: set(), XEON: set()}
    for run in [*records("main/records.jsonl"), *records("fresh/records.jsonl")]:
        places[run["facts"]["cpu"]].add((run["size"], run["scheme"], run["kind"]))
    trained = product((*BASELINES, "lambdas+conv", "lambdas-gated+conv"), ("tune", "report"))
    assert places[XEON] == {("0.3M", *each) for each in [*trained, ("residual", "longer")]}
    assert not places[XEON] & places[EPYC]
    assert {cost.device for each in whole("0.3M").values() for cost in (each.cost, each.compiled)} == {EPYC}
    again = {run["key"]: run["val_loss"] for run in records("headline.jsonl") if run["facts"]["cpu"] == EPYC}
    changes: dict[str, set[float]] = {EPYC: set(), XEON: set()}
    for run in records("main/records.jsonl"):
        if run["key"] in again:
            changes[run["facts"]["cpu"]].add(abs(run["val_loss"] - again[run["key"]]))
    assert changes[EPYC] == {0.0}
    return {"processors": f"{max(changes[XEON]):.3f}"}


def about_the_budget() -> dict[str, Any]:
    tuning = study("main").study.tuning
    plain, scales = (row("0.1M", name) for name in BASELINES)
    factor = "train.connection_lr_factor"
    assert tuning.over.keys() == {"train.lr", "model.embedding_init_std", "model.hidden_init_std_factor", factor}
    assert scales.point.keys() - plain.point.keys() == {factor}
    assert scales.tuning_runs == tuning.baseline_runs
    assert (len(tuning.over["train.lr"]), tuning.length, tuning.finalists, len(tuning.final_seeds)) == (3, 0.5, 2, 3)
    assert not tuning.own_seeds & {*study("main").study.seeds}
    costs = {how: lost(how) for how in ("short", "one", "three")}
    (schemes,) = {len(some) for some in costs.values()}
    better = {
        name: each.loss.mean - last_losses("0.3M", name, "tune", **each.point)[tuning.seed]
        for name, each in whole("0.3M").items()
    }
    assert min(better.values()) > 0
    assert max(better, key=lambda name: better[name]) == "lambdas"
    return {
        "budget": tuning.runs,
        "budget_baseline": tuning.baseline_runs,
        "budget_used": plain.tuning_runs,
        "chosen_of": NUMBERS[schemes],
        **{f"worse_{how}": NUMBERS[sum(cost > 0 for cost in some)] for how, some in costs.items()},
        "chosen_gap": f"{max(costs['three']):.3f}",
        "chosen_mean": f"{statistics.fmean(better.values()):.2f}",
        "chosen_most": f"{better['lambdas']:.2f}",
    }


def about_what_was_asked() -> dict[str, Any]:
    """The planned comparisons are those that the recipe had before the later of their two rows had a reported run."""
    results = study("main")
    assert len(results.study.seeds) == 5
    erasing = {(each.question.name, each.size, each.difference.estimate.count) for each in results.answers
               if each.question.name.startswith("erasing") and each.difference}  # fmt: skip
    assert {place for place in erasing if place[-1] != 5} == {("erasing", "0.1M", 10)}
    assert ("erasing", "0.1M", 5) not in erasing
    asked = {(one["scheme"], one["to"]): datetime.fromisoformat(one["asked"]) for one in records("main/asked.jsonl")}
    first: dict[tuple[str, str], datetime] = {}
    for run in records("main/records.jsonl"):
        if run["kind"] == "report":
            place, date = (run["size"], run["scheme"]), datetime.fromisoformat(run["facts"]["date"])
            first[place] = min(date, first.get(place, date))
    before = {
        (size, frozenset((one, two))): asked[one, two] < max(first[size, one], first[size, two])
        for size, one, two in answers()
    }
    named = {(size, frozenset(pair)) for size, pairs in results.study.primary.items() for pair in pairs}
    assert named == {place for place, early in before.items() if early}
    assert [size for size, _ in before.keys() - named] == ["0.1M"] * 5
    return {}


def about_the_noise() -> dict[str, Any]:
    results = study("main")
    assert FAILED == 3
    assert [(each.size, each.scheme) for each in results.rows if each.failed] == [
        ("0.1M-wide", "ddl-ec"),
        ("0.1M-deep", "lambdas-gated+tc"),
    ]
    own = {name for name, size in results.study.sizes.items() if size.noise == "own"}
    assert own == {name for name in results.study.sizes if not name.startswith("0.1M")}
    noises = {name: results.noise(size) for name, size in zip(("four", "wide", "deep"), SHAPES)}
    halves = {name: noise.contrast([0.0] * 5, [0.0] * 5).half_width for name, noise in noises.items()}
    return {
        **{f"noise_{name}": f"{noise.deviation:.3f}" for name, noise in noises.items()},
        **{f"half_{name}": f"{half:.3f}" for name, half in halves.items()},
        "sees_deviation": f"{math.sqrt(2) * noises['four'].deviation:.3f}",
        **{f"sees_{NUMBERS[count]}": f"{detects(count, 4):.1f}" for count in (2, 3, 5)},
        "sees_own": f"{detects(3):.1f}",
    }


def about_what_remains() -> dict[str, Any]:
    losses = split_losses("0.3M")
    assert losses.keys() == whole("0.3M").keys()
    pairs = study("1M").study.primary["1M"]
    planned = {pair for pair in map(tuple, pairs) if ("0.3M", *pair) in study("main").corrected}
    assert planned == {("residual+tc", "residual"), ("ddl-tc", WRITING)}  # the latter with other settings of ddl-tc
    assert {frozenset(losses[name]) for pair in pairs for name in pair} == {frozenset({1, 2, 3, 4, 5})}

    def contrast(scheme: str, to: str, column: int) -> Contrast:
        return welch(*([ends[column] for ends in losses[name].values()] for name in (scheme, to)))

    found = {(scheme, to, column): contrast(scheme, to, column) for scheme, to in pairs for column in (2, 3)}
    writing = [(WRITING, to, column) for to in ("residual+tc", "lambdas+tc") for column in (2, 3)]
    erasing = [("ddl-tc", WRITING, column) for column in (2, 3)]
    scales = [("lambdas+tc", "lambdas", column) for column in (2, 3)]
    assert {place for place, each in found.items() if side(each) == "ahead"} == {*writing, scales[1]}
    assert {place for place, each in found.items() if side(each) == "behind"} == {*erasing}
    return {
        "remains_writing": f"{-contrast(WRITING, 'residual', 2).mean:.2f}",
        "remains_scales": span(found[place].mean for place in scales),
        "remains_erasing": span(found[place].mean for place in erasing),
    }


def about_the_million() -> dict[str, Any]:
    results, runs = study("1M"), records("1M/records.jsonl")
    assert seeds_are_new("1M")
    assert (len(results.study.seeds), len(results.corrected)) == (3, 6)
    devices = Counter(run["facts"]["device"] for run in runs)
    assert devices.keys() == {H200, XEON, EPYC}
    assert len({run["key"] for run in runs}) == len(runs)
    reported = [(run["scheme"], run["facts"]["device"] == H200) for run in runs if run["kind"] == "report"]
    on_gpu, on_cpu = ({name for name, gpu in reported if gpu is there} for there in (True, False))
    assert (on_gpu - on_cpu, on_cpu - on_gpu) == ({*BASELINES}, {"residual+tc", "lambdas+tc"})
    rates = {name: sorted(found) for name, found in searched().items()}
    assert {len(some) for some in rates.values()} == {3}
    least, most = ({name for name, some in rates.items() if row("1M", name).point["train.lr"] == some[end]}
                   for end in (0, -1))  # fmt: skip
    assert (least, most) == ({"lambdas+tc", "ddl-tc"}, {"residual"})
    busy = {second for run in records("10M/records.jsonl") for second in seconds(run)}
    made = [seconds(run) for run in runs if run["facts"]["device"] == H200]
    made = [when for when in made if when.start not in busy]
    together = [sum(when[len(when) // 2] in other for other in made) for when in made]
    on_cpus = [run["seconds"] / 60 for run in runs if run["facts"]["device"] != H200]
    return {
        "million_window": results.study.set["train.sequence_length"],
        "million_runs": len(runs),
        "million_on_h200": devices[H200],
        "runs_on_h200": devices[H200] + sum(run["facts"]["device"] == H200 for run in records("10M/records.jsonl")),
        "million_on_xeon": NUMBERS[devices[XEON]],
        "million_on_epyc": NUMBERS[devices[EPYC]],
        "million_at_once": NUMBERS[max(together)],
        "million_minutes": span((len(when) / 60 for when in made), 1),
        "million_minutes_cpu": span(on_cpus, 0),
    }


def about_the_order() -> dict[str, Any]:
    schemes = split_losses("1M")
    assert len(schemes) == 6
    alike = {place: decided_alike(*place) for place in product(("0.1M", "0.3M"), (0, 2))}
    assert alike["0.3M", 0].keys() != alike["0.3M", 2].keys()
    otherwise = {place: {pair for pair, same in pairs.items() if not same} for place, pairs in alike.items()}
    assert otherwise["0.1M", 0] == {("ddl-tc", "lambdas+tc"), (WRITING, "lambdas+tc")}
    for form, cheap in otherwise["0.1M", 0]:
        losses = [list(study("fresh").row("0.1M", name).losses.values()) for name in (form, cheap)]
        contrast = study("fresh").noise("0.1M").contrast(*losses)
        assert side(contrast) == "level"
        assert contrast.mean > 0
    assert otherwise["0.3M", 0] == set()
    assert otherwise["0.3M", 2] == {("lambdas", "residual"), ("residual", "residual+tc")}
    scales, plain = ([ends[0] for ends in split_losses("0.3M")[name].values()] for name in ("lambdas", "residual"))
    return {
        "decided_of": len([*combinations(schemes, 2)]),
        "decided_others": len(alike["0.3M", 2]),
        "decided_by_luck": f"{statistics.fmean(plain) - statistics.fmean(scales):.4f}",
    }


def about_ten_million() -> dict[str, Any]:
    results, runs = study("10M"), records("10M/records.jsonl")
    planned, noise = results.study, results.noise("10M")
    assert seeds_are_new("10M")
    assert (len(planned.seeds), len(planned.primary["10M"])) == (3, 2)
    assert {run["facts"]["device"] for run in runs} == {H200}
    assert {run["scheme"] for run in runs if run["kind"] == "report"} == planned.schemes.keys() - {WRITING}
    assert not any((RECORDS / name).exists() for name in ("gpu-rates", "gpu-write-only", "gpu-day"))
    (text,) = {run["facts"]["data"]["train_tokens"] for run in runs}
    (read,) = {run["tokens"] for run in runs if run["kind"] == "report"}
    return {
        "ten_window": f"{planned.set['train.sequence_length']:,}",
        "ten_per_parameter": f"{planned.tokens_per_parameter:g}",
        "ten_epochs": f"{read / text:.2f}",
        "ten_runs": len(runs),
        "ten_planned": len(planned.schemes) * (planned.tuning.runs + len(planned.seeds)),
        "ten_minutes": f"{len({second for run in runs for second in seconds(run)}) / 60:.0f}",
        "ten_noise": f"{noise.deviation:.3f}",
        "ten_seen": f"{noise.contrast([0.0] * 3, [0.0] * 3).detectable:.2f}",
    }


def about_fresh_seeds() -> dict[str, Any]:
    fresh = study("fresh")
    assert seeds_are_new("fresh")
    assert (len(fresh.rows), len(fresh.study.seeds), len(fresh.corrected)) == (6, 5, 5)
    clear = {place[1:] for place, each in fresh.corrected.items() if each.clear}
    assert clear == {("residual+tc", "residual"), ("lambdas+tc", "lambdas")}
    assert {each.seen for place, each in fresh.corrected.items() if place[1:] not in clear} == {False}
    for each in fresh.rows:
        before = row("0.1M", each.scheme)
        assert each.transitions == [None] * 5
        assert each.steps == before.steps
        assert resolve(each.connection) == resolve(before.connection) or each.scheme == "residual+tc"
        now = {**fresh.study.set, **fresh.study.schemes[each.scheme].keys, **each.point}
        assert all(now.get(key, 1.0) == value for key, value in before.point.items())
    ours, theirs = (map(statistics.fmean, zip(*split_losses("0.1M")[name].values()))
                    for name in ("residual+tc", "residual"))  # fmt: skip
    lead, repeated, other, further = (base - loss for loss, base in zip(ours, theirs))
    assert further > 0
    share = other * (lead - repeated) / (other - repeated) / lead  # on labels that do not repeat
    return {
        "fresh_tc_before": f"{gain('0.1M', 'residual+tc'):.3f}",
        "Fresh_share": NUMBERS[round(5 * share)].capitalize(),
    }


def about_the_forms() -> dict[str, Any]:
    """The search before the study: the recipe `tiny`, of which another record has the sizes."""
    forms = records("search.jsonl")
    lines = (RECORDS.parents[1] / "experiments" / "tune-tiny.jsonl").read_text(encoding="utf-8").splitlines()
    (run,) = (run for run in map(json.loads, lines) if f"{run['val_loss']:.3f}" == f"{forms[0]['losses']['0']:.3f}")
    assert (run["scheme"], run["lr"], run["seed"]) == (forms[0]["connection"], forms[0]["lr"], 0)
    parameters = run["facts"]["parameters"]
    return {
        "forms": len(forms),
        "forms_parameters": f"{parameters / 1e6:.2f}",
        "forms_per_parameter": f"{run['tokens'] / parameters:.1f}",
        "forms_seeds": NUMBERS[max(len(form["losses"]) for form in forms)],
    }


PARTS = (
    about_the_sizes,
    about_the_schemes,
    about_the_text,
    about_the_machines,
    about_the_budget,
    about_what_was_asked,
    about_the_noise,
    about_what_remains,
    about_the_million,
    about_the_order,
    about_ten_million,
    about_fresh_seeds,
    about_the_forms,
)
