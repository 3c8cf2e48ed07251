"""What README.md, docs/results.md and docs/resbench.md say of ResBench is what its records say."""

import itertools
import json
import math
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from residua.lab.study.plan import load_study
from residua.lab.study.report import estimate_text
from residua.lab.study.results import rankings, results
from residua.records.statistics import paired, spearman
from support.pages import records

ROOT = Path(__file__).parents[1]
SHAPES = "0.1M", "0.1M-wide", "0.1M-deep"
BASELINES = "residual", "lambdas"
MEASURES = "tokens", "FLOPs", "seconds", "compiled seconds"
CONVOLVED = "lambdas+conv", "lambdas-gated+conv", "residual+tc", "lambdas+tc", "ddl-tc", "ddl-tc-write-only"
"""Those of 0.3 million parameters that read through a convolution over tokens."""
FAILED = "0.1M-deep", "lambdas-gated+tc"
"""A row with a run whose loss jumped."""


@pytest.fixture(scope="module")
def found():
    return results(load_study("resbench"), records("resbench/records.jsonl"), records("resbench/costs.jsonl"))


@pytest.fixture(scope="module")
def rows(found):
    """By size and scheme, those of which all seeds are finished; those with Muon at a size of their own."""
    whole = {}
    for row in found.rows:
        if row.whole:
            muon = row.scheme.endswith("-muon")
            whole.setdefault(f"{row.rung}-muon" if muon else row.rung, {})[row.scheme] = row
    return whole


@pytest.fixture(scope="module")
def answers(found):
    """By size, both schemes and measure."""
    return {(one.rung, one.scheme, one.to, one.measure): one for one in found.answers}


@pytest.fixture(scope="module")
def audits():
    return records("resbench/audits.jsonl")


def side(estimate):
    """Where the interval of a difference is."""
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    return "ahead" if high < 0 else "behind" if low > 0 else "level"


def to(row, baseline, measure):
    return side(row.difference(baseline, measure).estimate)


def leads(row):
    """Over each baseline at equal tokens, in nats per token."""
    return [-row.difference(baseline, "tokens").estimate.mean for baseline in BASELINES]


def against(ours, theirs):
    """At equal tokens, over the study's seeds."""
    return side(paired(ours.losses, theirs.losses))


def ratio(row):
    """Of the time of a step to that of the plain residual's."""
    return round(row.cost["time_ratio"]["median"], 2)


def ends(rung, scheme, kind, **point):
    """The last losses of runs by seed, at one point of the tuning."""
    return {
        run["seed"]: run["val_loss"]
        for run in records("resbench/records.jsonl")
        if (run["rung"], run["scheme"], run["kind"]) == (rung, scheme, kind) and point.items() <= run["point"].items()
    }


def longer(rung, baseline):
    """Of the runs with 1.5 times the tokens."""
    return ends(rung, baseline, "longer")


def plain(rows):
    return rows["0.1M"]["residual"].losses


def second_point():
    """The losses of `gated-orthogonal` at the point that tuning did not choose."""
    return ends("0.1M", "gated-orthogonal", "report", **{"train.connection_lr_factor": 0.25})


def shared_noise(rows, rung):
    """The standard deviation of a run that all rows of a size share, without what scheme and seed explain."""
    table = np.array([[row.losses[seed] for seed in sorted(row.losses)] for row in rows[rung].values()])
    rest = table - table.mean(1, keepdims=True) - table.mean(0, keepdims=True) + table.mean()
    return math.sqrt((rest**2).sum() / ((table.shape[0] - 1) * (table.shape[1] - 1)))


def jumped(rows):
    """The one run of the row that failed which is not ahead of all others of its seed."""
    failed = rows[FAILED[0]][FAILED[1]]
    others = [row for name, row in rows[FAILED[0]].items() if name != failed.scheme]
    best = {seed: min(row.losses[seed] for row in others) for seed in failed.losses}
    (seed,) = (seed for seed, loss in failed.losses.items() if loss > best[seed])
    (run,) = (run for run in failed.runs if (run["kind"], run["seed"]) == ("report", seed))
    return run


def test_every_interval_on_the_page_is_of_two_schemes_that_its_section_names(found, rows):
    """Nobody types a number twice: "-0.0841 ± 0.0155" is a difference of the records, at equal tokens or else."""
    known = {("gated-orthogonal", "residual"): {estimate_text(paired(second_point(), plain(rows)), "+.4f")}}
    for rung, name in itertools.product(SHAPES, CONVOLVED):  # to longer runs of the baseline
        difference = paired(rows[rung][name].losses, longer(rung, "lambdas"))
        known.setdefault((name, "lambdas"), set()).add(estimate_text(difference, "+.4f"))
    for one in found.answers:
        if one.difference and one.difference.estimate:
            known.setdefault((one.scheme, one.to), set()).add(estimate_text(one.difference.estimate, "+.4f"))
    for row in (row for own in rows.values() for row in own.values()):
        for one in row.differences:
            if one.estimate:
                known.setdefault((row.scheme, one.baseline), set()).add(estimate_text(one.estimate, "+.4f"))
    page = (ROOT / "docs/resbench.md").read_text(encoding="utf-8")
    counts = []
    for section in re.split(r"^##+ ", page, flags=re.MULTILINE):
        text = " ".join(section.split())
        names = {*re.findall(r"`([^` ]+)`", text), *BASELINES}
        names |= {f"{name}-muon" for name in names} if "Muon" in text else set()
        there = {number for pair, numbers in known.items() if names >= {*pair} for number in numbers}
        told = re.findall(r"[-+]?\d\.\d+ ± \d\.\d+", text)
        assert not {*told} - there, text[:60]
        counts.append(len(told))
    assert sum(counts) > 40


def test_the_sizes_that_have_rows(rows):
    assert rows.keys() == {*SHAPES, "0.1M-muon", "0.3M", "0.3M-long"}


def test_at_the_second_size_every_form_with_a_convolution_is_ahead_of_both_baselines(rows):
    larger, small = rows["0.3M"], rows["0.1M"]
    assert larger.keys() == {*BASELINES, *CONVOLVED}
    for name, baseline, measure in itertools.product(CONVOLVED, BASELINES, MEASURES):
        difference = larger[name].difference(baseline, measure)
        assert side(difference.estimate) == "ahead"
        assert difference.clear == ((name, baseline, measure) != ("ddl-tc", "lambdas", "seconds"))
    for here, least, most in ((larger, 0.24, 0.37), (small, 0.04, 0.09)):
        every = [lead for name in CONVOLVED for lead in leads(here[name])]
        assert [round(min(every), 2), round(max(every), 2)] == [least, most]
    assert to(larger["lambdas"], "residual", "tokens") == "level"
    assert against(larger["lambdas-gated+conv"], larger["lambdas+conv"]) == "level"


def test_at_the_second_size_four_channels_without_erasing_lead(rows, answers):
    larger = rows["0.3M"]
    first = larger["ddl-tc-write-only"]
    assert {against(first, row) for row in larger.values() if row is not first} == {"ahead"}
    others = "ddl-tc", "lambdas+tc", "lambdas+conv", "residual+tc"
    behind = [paired(larger[name].losses, first.losses).mean for name in others]
    assert [round(lag, 2) for lag in behind] == [0.05, 0.07, 0.09, 0.13]
    assert [against(larger["ddl-tc"], larger[name]) for name in ("lambdas+conv", "lambdas+tc")] == ["ahead", "level"]
    each = [larger["residual+tc"].losses[seed] - loss for seed, loss in larger["ddl-tc"].losses.items()]
    assert [round(min(each), 2), round(max(each), 2)] == [0.04, 0.22]
    assert round(statistics.fmean(leads(first)), 2) == 0.37


def test_at_the_second_size_scales_add_to_the_convolution(rows):
    larger = rows["0.3M"]
    scales = larger["lambdas+tc"]
    lead = paired(scales.losses, larger["residual+tc"].losses)
    assert side(lead) == "ahead"
    assert round(lead.mean, 2) == -0.06
    assert min(leads(scales)) > 0.30
    smaller = [lead for rung in SHAPES for lead in leads(rows[rung]["lambdas+tc"])]
    assert [round(min(smaller), 2), round(max(smaller), 2)] == [0.05, 0.10]


def test_the_convolution_by_shape(rows):
    leads = [-rows[rung]["residual+tc"].difference("residual", "tokens").estimate.mean for rung in (*SHAPES, "0.3M")]
    assert [round(min(leads[:3]), 2), round(max(leads[:3]), 2), round(leads[3], 2)] == [0.06, 0.08, 0.25]
    parts = {}  # of the lead of the convolution before every sublayer, what one behind the embedding has
    for rung in (*SHAPES, "0.3M"):
        once, always = (rows[rung][name].difference("lambdas", "tokens") for name in ("lambdas+conv", "lambdas+tc"))
        parts[rung] = round(once.estimate.mean / always.estimate.mean, 2)
    assert parts == {"0.1M": 0.59, "0.1M-wide": 0.85, "0.1M-deep": 0.11, "0.3M": 0.92}


def test_four_channels_that_only_write_are_ahead_of_scales_at_the_second_size_alone(rows):
    sides = {rung: against(rows[rung]["ddl-tc-write-only"], rows[rung]["lambdas+tc"]) for rung in (*SHAPES, "0.3M")}
    assert sides == {"0.1M": "level", "0.1M-wide": "level", "0.1M-deep": "behind", "0.3M": "ahead"}
    assert {against(rows[rung]["ddl-tc-write-only"], rows[rung]["residual+tc"]) for rung in SHAPES} == {"level"}


def test_one_longer_run_of_a_baseline_leaves_the_others(rows):
    larger, runs = rows["0.3M"], longer("0.3M", "lambdas")
    learned = runs.pop(2)
    assert round(learned, 3) == 3.854
    assert [round(min(runs.values()), 3), round(max(runs.values()), 3)] == [4.010, 4.038]
    assert min(longer("0.3M", "residual").values()) > 3.99
    long = [loss for name in BASELINES for loss in rows["0.3M-long"][name].losses.values()]
    assert (len(long), round(min(long), 3), round(max(long), 3)) == (6, 3.926, 3.968)
    curves = {run["seed"]: dict(run["curve"]) for run in records("resbench/records.jsonl")
              if (run["rung"], run["scheme"], run["kind"]) == ("0.3M", "lambdas", "longer")}  # fmt: skip
    first, *others = curves.pop(2), *curves.values()
    ahead = {step: min(one[step] for one in others) - loss for step, loss in first.items()}
    assert max(lead for step, lead in ahead.items() if step < 2405) < 0.01
    assert [round(ahead[step], 2) for step in (2405, 3367, 4804)] == [0.02, 0.05, 0.16]
    for name, same, other in (("lambdas+tc", 0.07, 0.24), ("residual+tc", 0.01, 0.18)):
        assert round(learned - larger[name].losses[2], 2) == same
        assert round(statistics.fmean(loss - larger[name].losses[seed] for seed, loss in runs.items()), 2) == other
    assert larger["lambdas+tc"].steps * 3 // 2 == larger["residual"].steps * 3 // 2 == 4804


def test_how_the_learning_rate_may_decide_when_a_run_learns(rows):
    rates = {rate: ends("0.3M", "lambdas+tc", "tune", **{"train.lr": rate})[0] for rate in (0.016, 0.032)}
    assert [round(loss, 3) for loss in rates.values()] == [3.769, 4.048]
    assert rows["0.3M"]["lambdas"].point["train.lr"] == rows["0.3M-long"]["lambdas"].point["train.lr"] == 0.032
    slow = [
        loss
        for name, kind, rate in itertools.product(BASELINES, ("tune", "report"), (0.008, 0.016))
        for loss in ends("0.3M", name, kind, **{"train.lr": rate}).values()
    ]
    assert min(slow) > 4.05
    chosen = {name: row.loss.mean - ends("0.3M", name, "tune", **row.point)[0] for name, row in rows["0.3M"].items()}
    assert len(chosen) == 8
    assert min(chosen.values()) > 0
    assert round(statistics.fmean(chosen.values()), 2) == 0.03
    assert max(chosen, key=chosen.get) == "lambdas"
    assert round(chosen["lambdas"], 2) == 0.06


def test_what_a_seed_that_learned_does_to_a_mean(rows):
    row = rows["0.3M"]["ddl-tc"].difference("lambdas", "seconds")
    share = math.log(row.cost) / math.log(1.5)
    short, long = rows["0.3M"]["lambdas"].losses, longer("0.3M", "lambdas")
    ours = rows["0.3M"]["ddl-tc"].losses
    by_seed = {seed: ours[seed] - loss - share * (long[seed] - loss) for seed, loss in short.items()}
    assert statistics.fmean(by_seed.values()) == pytest.approx(row.estimate.mean, abs=1e-4)  # steps are whole
    assert round(by_seed.pop(2), 2) == -0.11
    assert [round(min(by_seed.values()), 2), round(max(by_seed.values()), 2)] == [-0.35, -0.26]


def test_erasing_was_compared_at_two_settings_at_the_second_size(rows):
    erasing, control = (rows["0.3M"][name].point for name in ("ddl-tc", "ddl-tc-write-only"))
    assert {key: (value, control[key]) for key, value in erasing.items() if value != control[key]} == {
        "train.lr": (0.032, 0.016),
        "model.embedding_init_std": (0.24, 0.12),
    }
    assert rows["0.1M"]["ddl-tc"].edges == ["model.embedding_init_std"]


def test_no_cost_of_erasing_is_clear_after_the_correction(found):
    erasing = [one for one in found.answers if one.question.name.startswith("erasing")]
    seen = [one.difference for one in erasing if one.difference and one.difference.estimate and one.difference.seen]
    assert len(seen) == 4
    assert min(one.estimate.mean for one in seen) > 0
    assert not any(one.clear for one in seen)


def test_intervals_that_are_narrow_by_luck(rows, answers):
    half = 2.0 * shared_noise(rows, "0.1M-wide") * math.sqrt(2 / 5)  # Student's t of 60 degrees of freedom
    assert round(half, 3) == 0.017
    narrow = answers["0.1M-wide", "ddl-tc", "residual+tc", "tokens"].difference.estimate
    assert narrow.half_width < half / 3
    assert -0.017 < rows["0.1M-wide"]["lambdas"].difference("residual", "tokens").estimate.mean < 0
    error = half / 2.0
    p = math.erfc(abs(narrow.mean) / error / math.sqrt(2))
    assert p * sum(one.difference is not None for one in answers.values()) > 1


def test_the_scales_on_the_convolution_by_seed(rows):
    ours, theirs = (rows["0.3M"][name].losses for name in ("lambdas+tc", "residual+tc"))
    leads = sorted(theirs[seed] - loss for seed, loss in ours.items())
    assert [round(lead, 2) for lead in leads] == [0.03, 0.04, 0.05, 0.05, 0.12]


def test_the_second_point_of_the_gated_orthogonal_update(rows):
    difference = paired(second_point(), plain(rows))
    assert (side(difference), difference.count) == ("ahead", 5)
    chosen, other = (
        statistics.fmean(ends("0.1M", "gated-orthogonal", "final", **{"train.connection_lr_factor": factor}).values())
        for factor in (4.0, 0.25)
    )
    assert round(other - chosen, 4) == 0.0065


def test_how_much_was_trained(found, rows):
    begun = {run["scheme"] for run in records("resbench/records.jsonl")}
    finished = rows["0.1M"].keys() | rows["0.1M-muon"].keys()
    assert (len(found.study.schemes), len(finished), len(found.study.schemes.keys() - begun)) == (72, 33, 37)
    assert not begun & {"ddl-cc", "ddl-cc-ec", "ddl-v", "denseformer", "altup", "siamese", "frac"}
    assert {name: rows["0.1M"][name].tuning_runs for name in BASELINES} == {"residual": 8, "lambdas": 12}
    assert len(rows["0.3M"]) == 8
    embedding = {}
    for rung in (*SHAPES, "0.3M"):
        plain = rows[rung]["residual"]
        embedding[rung] = round(2048 * found.study.rungs[rung].keys["model.hidden_size"] / plain.parameters, 2)
    assert (min(embedding.values()), max(embedding.values())) == (0.40, 0.69)
    facts = rows["0.1M"]["residual"].runs[0]["facts"]["data"]
    assert (facts["validation_tokens"], facts["documents"], facts["validation_fraction"]) == (58563, 31174, 0.001)


def test_the_most_that_a_row_is_ahead_of_both_baselines(rows):
    """At 0.1 million, of the baseline that is harder to beat."""
    most = {rung: max(min(leads(row)) for name, row in rows[rung].items() if name not in BASELINES) for rung in SHAPES}
    assert {rung: round(lead, 2) for rung, lead in most.items()} == {"0.1M": 0.08, "0.1M-wide": 0.08, "0.1M-deep": 0.05}


def test_a_baseline_with_more_tokens_is_level_with_every_convolution(rows):
    for rung in SHAPES:
        more = longer(rung, "lambdas")
        forms = [name for name in rows[rung] if name.startswith("ddl-") and name != "ddl-write-only"]
        forms += [name for name in rows[rung] if name.endswith(("+conv", "+tc"))]
        assert "ahead" not in {side(paired(rows[rung][name].losses, more)) for name in forms}


def test_one_difference_may_have_two_verdicts(found, rows):
    twice = [
        one.scheme
        for one in found.answers
        if one.difference and one.difference.estimate and one.scheme in rows[one.rung]
        for other in rows[one.rung][one.scheme].differences
        if (other.baseline, other.measure) == (one.to, one.measure) and other.clear and not one.difference.clear
        if other.estimate == one.difference.estimate
    ]
    assert len(twice) == 5


def test_a_straight_line_between_two_lengths_flatters_the_schemes(rows):
    """The plain residual's curve as a parabola through 1, 1.5 and 3 times the steps, in the logarithm."""
    lengths = rows["0.3M"]["residual"].losses, longer("0.3M", "residual"), rows["0.3M-long"]["residual"].losses
    means = [statistics.fmean(losses[seed] for seed in (1, 2, 3)) for losses in lengths]
    curve = np.poly1d(np.polyfit(np.log([1, 1.5, 3]), means, 2))
    line = np.poly1d(np.polyfit(np.log([1, 1.5]), means[:2], 1))
    gap = (line - curve)(np.log(np.linspace(1.05, 1.45, 50)))
    assert gap.min() > 0
    assert round(gap.max(), 3) == 0.003


def test_three_times_the_tokens(rows):
    long, larger = rows["0.3M-long"], rows["0.3M"]
    assert long["residual"].steps == 3 * larger["residual"].steps
    assert {row.seeds for row in long.values()} == {3}
    for name in long.keys() - {*BASELINES}:
        assert {to(long[name], baseline, "tokens") for baseline in BASELINES} == {"ahead"}
        clear = [baseline for baseline in BASELINES if long[name].difference(baseline, "tokens").clear]
        assert clear == (["lambdas"] if name == "ddl-tc-write-only" else [])
        assert min(leads(long[name])) > 0.3
    for size, lead in ((long, 0.08), (larger, 0.07)):
        four = paired(size["lambdas+tc"].losses, size["ddl-tc-write-only"].losses)
        assert (side(four), round(four.mean, 2)) == ("behind", lead)
    assert [round(long[name].loss.mean, 2) for name in ("lambdas", "residual")] == [3.94, 3.95]
    assert round(larger["lambdas+tc"].loss.mean, 2) == 3.78
    assert sum(long[name].seeds for name in BASELINES) == 6


def test_the_leads_are_on_repeated_labels():
    runs = {one["scheme"]: one for one in records("resbench/repeats.jsonl")}
    points = {name: {point["step"]: point for point in one["points"]} for name, one in runs.items()}
    last = {name: found[max(found)] for name, found in points.items()}
    assert {name: [round(points[name][step]["repeated"], 1) for step in (963, 1605)] for name in points} == {
        "residual": [4.2, 3.9],
        "lambdas": [4.3, 4.1],
        "lambdas+conv": [4.0, 2.1],
        "residual+tc": [4.3, 4.0],
        "ddl-tc": [3.9, 1.9],
        "ddl-tc-write-only": [3.5, 1.8],
    }
    assert min(round(last[name]["repeated"], 1) for name in BASELINES) == 3.4
    others = [one["other"] for one in last.values()]
    assert round(max(others) - min(others), 2) == 0.10
    leads = [last["residual"]["other"] - last[name]["other"] for name in ("residual+tc", "ddl-tc-write-only")]
    assert [round(lead, 2) for lead in leads] == [0.01, 0.08]
    share = last["lambdas"]["share"]
    assert round(share, 2) == 0.15
    losses = {name: share * one["repeated"] + (1 - share) * one["other"] for name, one in last.items()}
    for first, second in (("lambdas", "lambdas+conv"), ("lambdas", "ddl-tc-write-only"), ("residual+tc", "ddl-tc")):
        part = share * (last[first]["repeated"] - last[second]["repeated"])
        assert 0.79 < part / (losses[first] - losses[second]) < 0.91
    reported = {one["key"]: one["val_loss"] for one in records("resbench/records.jsonl")}
    for name, one in runs.items():
        assert one["equal"] == (name != "residual")
        assert losses[name] == pytest.approx(reported[one["key"]], abs=2e-3 if name == "residual" else 1e-6)
    assert round(losses["residual"] - reported[runs["residual"]["key"]], 4) == 0.0014


def test_each_size_was_trained_on_the_processor_that_the_page_names(rows):
    used = {}  # by size, scheme and kind
    for run in records("resbench/records.jsonl"):
        used.setdefault((run["rung"], run["scheme"], run["kind"]), set()).add(run["facts"]["cpu"])
    xeon = {key for key, found in used.items() if found == {"Intel(R) Xeon(R) Processor"}}
    assert all(found == {"AMD EPYC"} for key, found in used.items() if key not in xeon)
    own = {(name, kind) for name in (*BASELINES, "lambdas+conv", "lambdas-gated+conv") for kind in ("tune", "report")}
    assert xeon == {("0.3M", name, kind) for name, kind in {*own, ("residual", "longer")}}
    assert {cost["device"] for row in rows["0.3M"].values() for cost in (row.cost, row.compiled)} == {"AMD EPYC"}


@pytest.mark.parametrize(("baseline", "measure"), list(itertools.product(BASELINES, MEASURES)))
def test_a_convolution_leads_in_every_shape(rows, baseline, measure):
    for rung in SHAPES:
        here = rows[rung]
        there = {name: one for name, row in here.items() if (one := row.difference(baseline, measure)) and one.estimate}
        first = min((one.estimate.mean, name) for name, one in there.items())[1]
        assert first.startswith("ddl-tc") or first.endswith(("+tc", "+conv")), rung
        level = (rung, baseline, measure) == ("0.1M-deep", "lambdas", "seconds")
        assert to(here["residual+tc"], baseline, measure) == ("level" if level else "ahead"), rung
        if "lambdas+tc" in there or measure != "compiled seconds":
            assert to(here["lambdas+tc"], baseline, measure) == "ahead", rung
        if rung != "0.1M-deep":
            assert to(here["lambdas+conv"], baseline, measure) == "ahead", rung
    assert min(rows["0.1M"].values(), key=lambda row: row.loss.mean).scheme == "lambdas-gated+tc"


def test_the_convolution_of_the_embedding_beside_that_of_every_sublayer(rows):
    for rung, expected in (("0.1M-wide", "level"), ("0.1M", "ahead")):
        assert against(rows[rung]["residual+tc"], rows[rung]["residual+conv"]) == expected
    assert ratio(rows["0.1M-wide"]["residual+conv"]) < ratio(rows["0.1M-wide"]["residual+tc"])


def test_scales_help_in_eight_layers(rows):
    deep = rows["0.1M-deep"]
    assert {to(deep["lambdas"], "residual", measure) for measure in MEASURES} == {"ahead"}
    for rung, expected in (("0.1M-deep", "ahead"), ("0.1M", "level"), ("0.1M-wide", "level")):
        assert against(rows[rung]["lambdas+tc"], rows[rung]["residual+tc"]) == expected
    for rung, baseline in itertools.product(SHAPES, BASELINES):
        scales = rows[rung]["lambdas+tc"]
        clear = [scales.difference(baseline, measure).clear for measure in ("tokens", "FLOPs", "seconds")]
        assert all(clear) == (rung == "0.1M-wide")


@pytest.mark.parametrize(
    ("rung", "scheme", "other", "verdict"),
    [
        ("0.1M", "ddl-tc", "residual+tc", "no difference seen"),
        ("0.1M-deep", "ddl-tc", "residual+tc", "behind"),
        ("0.1M-wide", "ddl-tc", "residual+tc", "ahead"),
        ("0.1M", "ddl-tc", "ddl-tc-write-only", "no difference seen"),
        ("0.1M-deep", "ddl-tc", "ddl-tc-write-only", "no difference seen"),
        ("0.1M-wide", "ddl-tc", "ddl-tc-write-only", "no difference seen"),
        ("0.3M", "ddl-tc", "residual+tc", "no difference seen"),
        ("0.3M", "ddl-tc", "ddl-tc-write-only", "behind by its interval, but not after the correction"),
        ("0.1M", "ddl", "ddl-write-only", "behind"),
        ("0.1M-wide", "ddl", "ddl-write-only", "behind"),
        ("0.1M", "gated-delta-write", "gated-delta-write-only", "behind"),
        ("0.1M", "gated-delta", "residual", "no difference seen"),
        ("0.1M", "gated-delta-positive", "residual", "no difference seen"),
        ("0.1M", "gated-delta+tc", "residual+tc", "behind"),
        ("0.1M-wide", "gated-delta+tc", "residual+tc", "no difference seen"),
        ("0.1M", "lambdas-gated+conv", "lambdas+conv", "no difference seen"),
        ("0.1M-deep", "lambdas-gated+conv", "lambdas+conv", "ahead"),
        ("0.1M-wide", "lambdas-gated+conv", "lambdas+conv", "ahead by its interval"),
        ("0.1M", "residual+tc-muon", "residual-muon", "ahead by its interval, but not after the correction"),
        ("0.1M", "lambdas-gated+tc-muon", "residual-muon", "ahead by its interval, but not after the correction"),
        ("0.1M", "ddl-tc-muon", "residual-muon", "ahead by its interval, but not after the correction"),
        ("0.1M", "gated-orthogonal-muon", "residual-muon", "no difference seen"),
        ("0.1M", "ddl-tc-muon", "residual+tc-muon", "no difference seen"),
    ],
)
def test_the_answers_at_equal_tokens(answers, rung, scheme, other, verdict):
    assert answers[rung, scheme, other, "tokens"].verdict.startswith(verdict)


def test_ddl_adds_to_its_convolution_in_two_layers_also_after_the_correction(answers):
    assert answers["0.1M-wide", "ddl-tc", "residual+tc", "tokens"].difference.clear


def test_what_such_a_study_would_see_of_erasing_on_four_channels(answers):
    seen = [answers[rung, "ddl-tc", "ddl-tc-write-only", "tokens"].difference.estimate.detectable for rung in SHAPES]
    assert [round(value, 3) for value in seen] == [0.018, 0.040, 0.036]
    assert -answers["0.1M-wide", "ddl-tc", "residual+tc", "tokens"].difference.estimate.mean < seen[1]


def test_the_questions_on_erasing_have_ten_seeds_in_four_layers(answers):
    asked = (
        ("ddl", "ddl-write-only"),
        ("gated-delta-write", "gated-delta-write-only"),
        ("gated-delta", "residual"),
        ("gated-delta-positive", "residual"),
    )
    assert {answers[("0.1M", *pair, "tokens")].difference.estimate.count for pair in asked} == {10}
    others = (
        ("ddl-tc", "ddl-tc-write-only"),
        ("ddl-tc", "residual+tc"),
        ("gated-delta+tc", "residual+tc"),
        ("lambdas-gated+conv", "lambdas+conv"),
    )
    assert {answers[("0.1M", *pair, "tokens")].difference.estimate.count for pair in others} == {5}
    assert answers["0.1M-wide", "ddl", "ddl-write-only", "tokens"].difference.estimate.count == 5


def test_no_delta_form_is_ahead_of_lambdas_at_equal_seconds_in_every_shape(rows):
    for rung, baseline, measure in itertools.product(SHAPES, BASELINES, MEASURES):
        if rung != "0.1M-deep" or measure in ("tokens", "FLOPs"):
            assert to(rows[rung]["lambdas-gated+conv"], baseline, measure) == "ahead", (rung, baseline, measure)
    level = rows["0.1M-deep"]["lambdas-gated+conv"].difference("lambdas", "seconds").estimate
    assert side(level) == "level"
    assert round(level.detectable, 3) == 0.023
    for rung, baseline in itertools.product(("0.1M", "0.1M-wide"), BASELINES):
        assert to(rows[rung]["gated-orthogonal"], baseline, "tokens") == "level"


def test_the_run_that_failed(rows, audits):
    failed, run = rows[FAILED[0]][FAILED[1]], jumped(rows)
    assert {to(failed, *measure) for measure in itertools.product(BASELINES, MEASURES)} == {"level"}
    jump = next(later[0] for (_, loss), later in itertools.pairwise(run["curve"]) if later[1] > loss + 1)
    assert jump <= run["steps"] / 2 + 1

    def stuck(seed):
        """By step: the sublayers, of sixteen, whose gates stand at 1 for nearly every token."""
        (points,) = [one["points"] for one in audits if (one["rung"], one["scheme"], one["seed"]) == (*FAILED, seed)]
        assert {len(one["sublayers"]) for one in points} == {16}
        return {one["step"]: sum(sub["gate_q05"] > 0.99 for sub in one["sublayers"]) for one in points}

    after = stuck(run["seed"])
    assert (after[jump], after[run["steps"]]) == (8, 3)
    assert all(count <= 1 for step, count in after.items() if step < jump)
    assert max(stuck(1).values()) == 1


def test_most_schemes_give_the_plain_residual_less_than_muon_does(rows):
    muon = rows["0.1M-muon"]["residual-muon"].difference("residual", "tokens").estimate.mean
    gains = [
        row.difference("residual", "tokens").estimate.mean for name, row in rows["0.1M"].items() if name != "residual"
    ]
    assert sum(gain > muon for gain in gains) > len(gains) / 2


def test_the_schemes_of_the_published_ranking(found, rows):
    here, published = rows["0.1M"], found.study.published["304M"].differences
    six = published.keys() - {"residual"}
    assert len(six) == 6
    assert max(published[name] for name in six) < 0
    assert {to(here[name], "residual", "tokens") for name in six} == {"ahead"}
    assert {name for name in six if to(here[name], "lambdas", "tokens") == "ahead"} == {"hc", "hc-static"}
    over_lambdas = [leads(here[name])[BASELINES.index("lambdas")] for name in ("hc-static", "hc")]
    assert [round(lead, 2) for lead in over_lambdas] == [0.03, 0.04]
    assert against(here["hc"], here["hc-static"]) == "level"
    (ranking,) = (one for one in rankings(found) if one.rung == "0.1M")
    assert len(ranking.schemes) == 7
    assert [round(value, 2) for value in (ranking.correlation, ranking.lower, ranking.upper)] == [0.36, -0.65, 1.00]
    without = spearman([here[name].loss.mean for name in six], [published[name] for name in six])
    assert round(without, 2) == -0.03
    _, *close = sorted(published[name] for name in six)
    assert max(close) - min(close) < 0.008
    assert min(here[name].difference("residual", "tokens").estimate.half_width for name in six) > 0.008
    assert [ratio(here[name]) for name in ("hc", "mhc")] == [1.89, 1.97]
    assert all(here[name].difference("residual", "seconds").estimate is None for name in ("hc", "mhc"))
    assert {name for name in six if here[name].cost is not None} == {"hc", "mhc"}


def test_at_equal_seconds_the_compiler_decides_for_ddl(rows):
    ratios = []
    for name, rung in itertools.product(("ddl-ec", "ddl-tc"), ("0.1M", "0.1M-wide")):
        row = rows[rung][name]
        assert all(to(row, baseline, "seconds") != "ahead" for baseline in BASELINES)
        assert to(row, "residual", "compiled seconds") == "ahead"
        ratios.append(ratio(row))
        assert ratio(rows[rung]["residual+tc"]) < ratios[-1]
    assert (min(ratios), max(ratios)) == (1.39, 1.48)
    for rung, baseline, measure in itertools.product(("0.1M", "0.1M-wide"), BASELINES, ("tokens", "compiled seconds")):
        assert to(rows[rung]["ddl-tc"], baseline, measure) == "ahead"
    deep = rows["0.1M-deep"]["ddl-tc"]
    assert to(deep, "lambdas", "compiled seconds") == "behind"
    assert to(deep, "residual", "compiled seconds") != "ahead"
    assert ratio(deep) == 1.76


@pytest.mark.parametrize(
    ("rung", "scheme", "ratios"), [("0.1M", "residual+tc", [1.11, 1.08, 1.16]), ("0.3M", "ddl-tc", [1.36, 1.42])]
)
def test_a_ratio_of_times_moves_from_one_measurement_to_the_next(rows, rung, scheme, ratios):
    timed = rows[rung][scheme].timed(compiled=False)
    assert [round(cost["time_ratio"]["median"], 2) for cost in timed] == ratios


def test_what_three_seeds_are_worth_in_the_choice_of_a_point(rows):
    losses = {}  # by scheme, point and kind: of the schemes whose two best points were trained with all seeds
    for one in records("resbench/records.jsonl"):
        own = rows["0.1M"].get(one["scheme"]) if one["rung"] == "0.1M" else None
        if own and (one["kind"] != "report" or one["seed"] in own.losses):
            points = losses.setdefault(one["scheme"], {})
            points.setdefault(json.dumps(one["point"]), {}).setdefault(one["kind"], {})[one["seed"]] = one["val_loss"]
    both = [[kinds for kinds in points.values() if len(kinds.get("report", ())) == 5] for points in losses.values()]
    both = [points for points in both if len(points) > 1]
    choices = {
        "short": lambda kinds: kinds["tune"][0],
        "one": lambda kinds: kinds["final"][0],
        "three": lambda kinds: statistics.fmean(kinds["final"].values()),
    }
    lost = {how: [] for how in choices}
    for (how, choice), points in itertools.product(choices.items(), both):
        means = [statistics.fmean(kinds["report"].values()) for kinds in points]
        chosen = min(range(len(points)), key=lambda i: choice(points[i]))
        lost[how].append(means[chosen] - min(means))
    assert {how: sum(loss > 0 for loss in some) for how, some in lost.items()} == {"short": 6, "one": 4, "three": 3}
    assert len(both) == 10
    assert 0.029 < max(lost["one"]) < 0.0305
    assert 0.014 < max(lost["three"]) < 0.0155


def test_what_a_learning_rate_is_worth():
    rates = {"ddl": {}, "ddl-write-only": {}}
    for name, losses in rates.items():
        for one in records(f"resbench/rates/{name}.jsonl"):
            losses.setdefault(one["point"]["train.lr"], {})[one["seed"]] = one["val_loss"]
    ddl, without = rates.values()
    assert [side(paired(ddl[rate], without[rate])) for rate in (0.032, 0.064)] == ["behind", "behind"]
    assert [side(paired(one[0.064], one[0.032])) for one in (ddl, without)] == ["behind", "level"]


def test_what_the_audits_say_of_the_gates(found, audits):
    told = found.with_audits(audits).audits
    last = {one["scheme"]: one["points"][-1]["sublayers"] for one in told if one["rung"] == "0.1M"}
    assert sum(one["gate_q50"] < -0.98 for one in last["gated-orthogonal"]) == 5
    assert sum(one["gate_q50"] < 0 for one in last["lambdas-gated"]) == 4
    mlp, *others = sorted(last["ddl-tc"], key=lambda one: -one["reflection"])
    assert mlp["sublayer"] == "1 mlp"
    assert 0.15 < mlp["reflection"] < 0.2
    assert all(one["reflection"] < 0.01 for one in others)
    assert all(0.3 < one["beta_q50"] < 1.3 for one in last["ddl"])
    assert statistics.fmean(one["reflection"] for one in last["ddl"]) < 0.05
    (larger,) = (one["points"][-1]["sublayers"] for one in told if one["rung"] == "0.3M")
    most, second, *others = sorted(larger, key=lambda one: -one["reflection"])
    assert [one["sublayer"] for one in (most, second)] == ["1 mlp", "2 attention"]
    assert [round(one["reflection"], 2) for one in (most, second)] == [0.93, 0.51]
    assert all(one["reflection"] < 0.02 for one in others)
    assert [round(most[name], 1) for name in ("erase_norm", "write_norm")] == [0.6, 8.3]
    point = {one["key"]: one["point"]["train.lr"] for one in records("resbench/records.jsonl")}
    (fast,) = (one for one in audits if (one["scheme"], point[one["key"]]) == ("ddl", 0.064))
    gates = fast["points"][-1]["sublayers"]
    assert gates[1]["beta_q05"] > 1.5
    assert gates[6]["beta_q95"] < 0.1
