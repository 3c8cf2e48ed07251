"""What README.md and the pages on ResBench say is what its records say: a test for each statement."""

import csv
import itertools
import re
import statistics
from collections import Counter
from datetime import datetime

import pytest

from residua.connections import resolve
from residua.lab.records.folder import read_object
from residua.lab.records.statistics import paired, welch
from residua.lab.study.definition import load_study
from residua.lab.study.report import table
from residua.lab.study.results import read_results
from support.pages import RESBENCH, records, script

SHAPES = "0.1M", "0.1M-wide", "0.1M-deep"
SIZES = (*SHAPES, "0.3M")
BASELINES = "residual", "lambdas"
MEASURES = "tokens", "FLOPs", "seconds", "compiled seconds"
FAILED = "0.1M-deep", "lambdas-gated+tc"
"""A row with a run whose loss jumped."""


@pytest.fixture(scope="module")
def study():
    return read_results(RESBENCH / "records" / "main")


@pytest.fixture(scope="module")
def rows(study):
    """By size and scheme, those of which all seeds are finished; those with Muon at a size of their own."""
    whole = {}
    for row in study.rows:
        if row.whole:
            muon = row.scheme.endswith("-muon")
            whole.setdefault(f"{row.size}-muon" if muon else row.size, {})[row.scheme] = row
    return whole


@pytest.fixture(scope="module")
def answers(study):
    """By size and both schemes, at equal tokens: the difference."""
    compared = [answer for answer in study.answers if answer.measure == "tokens" and answer.difference]
    return {(answer.size, answer.scheme, answer.to): answer.difference for answer in compared}


@pytest.fixture(scope="module")
def picture():
    """The module that draws the leads."""
    return script("picture", RESBENCH)


def test_the_hashes_of_both_texts_lead_to_every_record():
    first, second = (read_object(RESBENCH / f"{name}.json")["documents_sha256"] for name in ("corpus", "further"))
    for folder in ("main", "fresh", "1M", "10M"):
        for row in records(f"{folder}/records.jsonl", RESBENCH / "records"):
            data = row["facts"]["data"]
            assert data["sha256"] == first
            assert data.get("further_validation", {"sha256": second})["sha256"] == second


def side(estimate):
    """Where the interval of a difference is."""
    low, high = estimate.mean - estimate.half_width, estimate.mean + estimate.half_width
    return "ahead" if high < 0 else "behind" if low > 0 else "level"


def to(row, baseline, measure="tokens"):
    return side(row.difference(baseline, measure).estimate)


def ahead_of_both(row, measure):
    estimates = [row.difference(baseline, measure).estimate for baseline in BASELINES]
    return all(estimate and side(estimate) == "ahead" for estimate in estimates)


def gain(row, baseline="residual"):
    """Nats per token by which the mean at equal tokens is below the baseline's."""
    return -row.difference(baseline, "tokens").estimate.mean


def against(ours, theirs):
    """At equal tokens, over the study's seeds."""
    return side(paired(ours.losses, theirs.losses))


def ratio(row):
    """Of the time of a step to that of the plain residual's."""
    return round(row.cost.ratio.median, 2)


def ends(size, scheme, kind, **point):
    """The last losses of runs by seed, at one point of the tuning."""
    wanted = {"size": size, "scheme": scheme, "kind": kind}
    return {
        run["seed"]: run["val_loss"]
        for run in records("main/records.jsonl", RESBENCH / "records")
        if wanted.items() <= run.items() and point.items() <= run["point"].items()
    }


def longer(size, baseline):
    """Of the runs with 1.5 times the tokens."""
    return ends(size, baseline, "longer")


def test_the_csv_is_what_the_report_writes(study):
    """To nine digits: the quantiles of Student's t in SciPy 1.15 and 1.17 differ by 2e-11."""
    shipped = (RESBENCH / "records" / "main" / "results.csv").read_text(encoding="utf-8")
    for ours, theirs in itertools.zip_longest(csv.reader(table(study).splitlines()), csv.reader(shipped.splitlines())):
        for cell, other in zip(ours, theirs, strict=True):
            same = cell == other or float(cell) == pytest.approx(float(other), rel=1e-9)
            assert same, (ours, theirs)


def test_the_picture_splits_a_lead_by_labels(picture, rows):
    """Their sum is the lead, and most of every lead is on repeated labels."""
    results = picture.read_results(picture.RECORDS)
    parts = picture.splits(results)
    assert parts.keys() == picture.SCHEMES.keys() - {"ddl"}
    for name, part in parts.items():
        assert sum(part) == pytest.approx(gain(rows["0.3M"][name]), abs=2e-3), name  # some on another processor
        assert name == "lambdas" or part.repeated > 0.8 * sum(part)
    for size in ("0.1M", "0.3M"):
        for name, lead in picture.leads(results, size).items():
            assert lead.mean == gain(rows[size][name])


def test_each_name_of_the_picture_can_be_typed(picture, study):
    """It is what was trained; for `residual+tc` as a gated delta without its erase term."""
    for name in picture.SCHEMES.keys() - {"residual+tc"}:
        assert resolve(name) == resolve(study.study.schemes[name].connection), name
    assert resolve("residual+tc") == resolve("residual:compress=token")


# What we found


def test_how_much_was_trained(study, rows):
    begun = {run["scheme"] for run in records("main/records.jsonl", RESBENCH / "records")}
    finished = rows["0.1M"].keys() | rows["0.1M-muon"].keys()
    recipe = load_study("resbench").schemes
    assert (len(recipe), len(finished), len(recipe.keys() - begun)) == (73, 33, 38)
    assert not begun & {"ddl-cc", "ddl-cc-ec", "ddl-v", "denseformer", "altup", "siamese", "frac"}
    assert not finished & {"ddl-apart", "gated-delta-4-gates", "gated-delta-4", "layerscale", "scales", "residual-mup"}
    assert {name: rows["0.1M"][name].tuning_runs for name in BASELINES} == {"residual": 8, "lambdas": 12}
    assert len(rows["0.3M"]) == 8
    assert {row.seeds for row in rows["0.3M-long"].values()} == {3}
    assert rows["0.3M-long"]["residual"].steps == 3 * rows["0.3M"]["residual"].steps
    chosen = {name: row.loss.mean - ends("0.3M", name, "tune", **row.point)[0] for name, row in rows["0.3M"].items()}
    assert min(chosen.values()) > 0
    assert max(chosen, key=chosen.get) == "lambdas"
    assert [round(value, 2) for value in (statistics.fmean(chosen.values()), chosen["lambdas"])] == [0.03, 0.06]
    embedding = {}
    for size in SIZES:
        plain = rows[size]["residual"]
        embedding[size] = round(2048 * study.study.sizes[size].keys["model.hidden_size"] / plain.reported.parameters, 2)
        assert round(plain.tokens / plain.reported.parameters) == 20
    assert (min(embedding.values()), max(embedding.values())) == (0.40, 0.69)
    facts = rows["0.1M"]["residual"].runs[0].facts["data"]
    assert (facts["validation_tokens"], facts["documents"], facts["validation_fraction"]) == (58563, 31174, 0.001)


# When a run learns to copy


def test_the_leads_are_on_repeated_labels(rows):
    runs = {run["scheme"]: run for run in records("main/repeats.jsonl", RESBENCH / "records")}
    last = {name: run["points"][-1] for name, run in runs.items()}
    leads = [last["residual"]["other"] - last[name]["other"] for name in ("residual+tc", "ddl-tc-write-only")]
    assert [round(lead, 2) for lead in leads] == [0.01, 0.08]
    share = last["lambdas"]["share"]
    assert round(share, 2) == 0.15
    losses = {name: share * point["repeated"] + (1 - share) * point["other"] for name, point in last.items()}
    reported = {row.scheme: row.losses[1] for row in rows["0.3M"].values()}
    for name, run in runs.items():
        assert run["equal"] == (name != "residual")
        assert losses[name] == pytest.approx(reported[name], abs=2e-3 if name == "residual" else 1e-6)
    assert round(losses["residual"] - reported["residual"], 4) == 0.0014


# Methods


def test_what_three_seeds_are_worth_in_the_choice_of_a_point():
    lost = {how: script("answers", RESBENCH).lost(how) for how in ("short", "one", "three")}
    assert {len(costs) for costs in lost.values()} == {10}
    assert {how: sum(cost > 0 for cost in costs) for how, costs in lost.items()} == {"short": 6, "one": 4, "three": 3}
    assert [round(max(lost[how]), 3) for how in ("one", "three")] == [0.030, 0.015]


def test_the_questions_on_erasing_in_four_layers_have_ten_seeds(study):
    erasing = [answer for answer in study.answers if answer.question.name.startswith("erasing") and answer.difference]
    four = {answer.scheme: answer.difference.estimate.count for answer in erasing if answer.size == "0.1M"}
    assert four.pop("ddl-tc") == 5
    assert {*four.values()} == {10}


def test_the_noise_that_a_size_shares(study):
    noise = {size: study.noise(size) for size in SHAPES}
    assert [round(noise[size].deviation, 3) for size in SHAPES] == [0.014, 0.011, 0.013]
    halves = [round(one.contrast([0.0] * 5, [0.0] * 5).half_width, 3) for one in noise.values()]
    assert halves == [0.018, 0.013, 0.017]
    assert [(row.size, row.scheme) for row in study.rows if row.failed] == [("0.1M-wide", "ddl-ec"), FAILED]
    own = {name for name, size in study.study.sizes.items() if size.noise == "own"}
    assert own == {size for size in study.study.sizes if not size.startswith("0.1M")}
    assert study.noise("0.3M") is None


def test_the_primary_contrasts_are_those_that_were_asked_before_their_runs(study):
    asked = {
        (one["scheme"], one["to"]): datetime.fromisoformat(one["asked"])
        for one in records("main/asked.jsonl", RESBENCH / "records")
    }
    first = {}
    for run in records("main/records.jsonl", RESBENCH / "records"):
        if run["kind"] == "report":
            first.setdefault((run["size"], run["scheme"]), []).append(datetime.fromisoformat(run["facts"]["date"]))
    first = {name: min(dates) for name, dates in first.items()}
    before = {
        answer[:4]: asked[answer.scheme, answer.to] < max(first[answer.size, name] for name in answer[2:4])
        for answer in study.answers
        if answer.measure == "tokens" and answer.difference
    }
    before = {(size, frozenset(pair)): early for (_, size, *pair), early in before.items()}
    named = {(size, frozenset(pair)) for size, pairs in study.study.primary.items() for pair in pairs}
    assert named == {name for name, early in before.items() if early}
    assert len(named) == len(study.corrected)
    assert [(size, sorted(pair)) for size, pair in before.keys() - named] != []
    assert len(before.keys() - named) == 5
    assert load_study("resbench").primary.keys() == study.study.primary.keys()


def test_each_size_was_trained_on_the_processor_that_the_page_names(rows):
    used = {}  # by size, scheme and kind
    for run in records("main/records.jsonl", RESBENCH / "records"):
        used.setdefault((run["size"], run["scheme"], run["kind"]), set()).add(run["facts"]["cpu"])
    xeon = {key for key, names in used.items() if names == {"Intel(R) Xeon(R) Processor"}}
    assert all(names == {"AMD EPYC"} for key, names in used.items() if key not in xeon)
    trained = itertools.product((*BASELINES, "lambdas+conv", "lambdas-gated+conv"), ("tune", "report"))
    assert xeon == {("0.3M", name, kind) for name, kind in {*trained, ("residual", "longer")}}
    assert {cost.device for row in rows["0.3M"].values() for cost in (row.cost, row.compiled)} == {"AMD EPYC"}
    again = {
        run["key"]: run for run in records("headline.jsonl", RESBENCH / "records") if run["facts"]["cpu"] == "AMD EPYC"
    }
    apart = {}  # what a second run changes, by whether it was made on the other processor
    for run in records("main/records.jsonl", RESBENCH / "records"):
        if run["key"] in again:
            other = (run["size"], run["scheme"], run["kind"]) in xeon
            apart.setdefault(other, []).append(abs(run["val_loss"] - again[run["key"]]["val_loss"]))
    assert {*apart[False]} == {0.0}
    assert round(max(apart[True]), 3) == 0.012


# What remains of the leads at 0.3M on labels that do not repeat


def test_what_remains_on_labels_that_do_not_repeat():
    losses = script("tables", RESBENCH).split_losses("0.3M")
    pairs = read_results(RESBENCH / "records" / "1M").study.primary["1M"]
    seeds = {1, 2, 3, 4, 5}
    assert set.intersection(*({*losses[name]} for pair in pairs for name in pair)) == seeds

    def apart(first, second, column):
        return welch(*([losses[name][seed][column] for seed in seeds] for name in (first, second)))

    seen = {
        (*pair, column): abs(contrast.mean) > contrast.half_width
        for pair in pairs
        for column in (2, 3)
        for contrast in [apart(*pair, column)]
    }
    writing = [("ddl-tc-write-only", other, column) for other in ("residual+tc", "lambdas+tc") for column in (2, 3)]
    erasing = [("ddl-tc", "ddl-tc-write-only", column) for column in (2, 3)]
    on_scales = [("lambdas+tc", "lambdas", column) for column in (2, 3)]
    assert {key for key, is_seen in seen.items() if is_seen} == {*writing, *erasing, on_scales[1]}
    assert sorted(-round(apart(*key).mean, 2) for key in writing)[:: len(writing) - 1] == [0.05, 0.08]
    assert [-round(apart(*key).mean, 2) for key in on_scales] == [0.02, 0.03]
    assert [round(apart(*key).mean, 2) for key in erasing] == [0.02, 0.02]
    assert round(apart("ddl-tc-write-only", "residual", 2).mean, 2) == -0.07
    assert round(apart("lambdas", "residual", 0).mean, 4) == -0.0004


# One million parameters and ten


def test_the_runs_of_a_million_parameters():
    runs = records("1M/records.jsonl", RESBENCH / "records")
    devices = Counter(run["facts"]["device"] for run in runs)
    assert devices == {"NVIDIA H200": 25, "Intel(R) Xeon(R) Processor": 9, "AMD EPYC": 2}
    minutes = sorted(run["seconds"] / 60 for run in runs if run["facts"]["device"] == "NVIDIA H200")
    alone, beside_others = minutes[:-4], minutes[-4:]
    assert [round(each, 1) for each in (alone[0], alone[-1])] == [1.5, 4.5], "study.md"
    assert {round(each) for each in beside_others} == {11}
    reported = [(run["scheme"], run["facts"]["device"] == "NVIDIA H200") for run in runs if run["kind"] == "report"]
    on_gpu, on_cpu = ({name for name, gpu in reported if gpu is there} for there in (True, False))
    assert (on_gpu - on_cpu, on_cpu - on_gpu) == ({*BASELINES}, {"residual+tc", "lambdas+tc"})
    documents = {len(run["further_documents"]["nats"]) for run in runs if "further_documents" in run}
    assert documents == {1469}, "also of the fresh seeds, which have the same text"


@pytest.mark.parametrize(
    ("size", "column", "otherwise"),
    [
        ("0.1M", 0, {("ddl-tc", "lambdas+tc"), ("ddl-tc-write-only", "lambdas+tc")}),
        ("0.3M", 0, set()),
        ("0.3M", 2, {("lambdas", "residual"), ("residual", "residual+tc")}),
    ],
)
def test_the_pairs_that_a_size_orders_otherwise_than_a_million(size, column, otherwise):
    alike = script("tables", RESBENCH).decided_alike(size, column)
    assert len(alike) == 12
    assert {pair for pair, same in alike.items() if not same} == otherwise


def test_the_runs_of_ten_million_parameters():
    study = read_results(RESBENCH / "records" / "10M")
    runs = records("10M/records.jsonl", RESBENCH / "records")
    assert (len(runs), {run["facts"]["device"] for run in runs}) == (15, {"NVIDIA H200"})
    busy = set()
    for run in runs:
        start = int(datetime.fromisoformat(run["facts"]["date"]).timestamp())
        busy |= {*range(start, start + round(run["seconds"]))}
    assert round(len(busy) / 60) == 17, "study.md"
    (text,) = {run["facts"]["data"]["train_tokens"] for run in runs}
    (read,) = {run["tokens"] for run in runs if run["kind"] == "report"}
    assert round(read / text, 2) == 1.75
    noise = study.noise("10M")
    assert (round(noise.deviation, 3), round(noise.contrast([0.0] * 3, [0.0] * 3).detectable, 2)) == (0.011, 0.05)


# Five fresh seeds


def test_the_lead_of_the_convolution_on_fresh_seeds(study):
    fresh = read_results(RESBENCH / "records" / "fresh")
    earlier = {run["seed"] for run in records("main/records.jsonl", RESBENCH / "records")}
    assert not earlier & {*fresh.study.seeds}
    assert {name for named in fresh.corrected for name in named if fresh.corrected[named].clear} == {
        *("0.1M", "residual", "residual+tc", "lambdas", "lambdas+tc")
    }
    assert not any(difference.seen != difference.clear for difference in fresh.corrected.values())
    ends = {}
    for row in fresh.rows:
        assert row.transitions == [None] * 5
        labels = [(run.repeated[-1].loss, run.other[-1].loss) for run in row.reported.runs]
        repeated, other = map(statistics.fmean, zip(*labels))
        ends[row.scheme] = repeated, other, row.loss.mean
        earlier_row = study.row("0.1M", row.scheme)
        settings = ("train.lr", "model.embedding_init_std", "model.hidden_init_std_factor")
        now = {**fresh.study.set, **fresh.study.schemes[row.scheme].keys, **row.point}
        assert resolve(row.connection) == resolve(earlier_row.connection) or row.scheme == "residual+tc"
        assert row.steps == earlier_row.steps
        assert [now[key] for key in settings] == [earlier_row.point[key] for key in settings]
        factor = "train.connection_lr_factor"
        assert now.get(factor, 1.0) == earlier_row.point.get(factor, 1.0)
    (repeated, other, mean), (repeated_base, other_base, base) = ends["residual+tc"], ends["residual"]
    share = (base - other_base) / (repeated_base - other_base)
    assert (round(share, 2), round(base - mean, 3)) == (0.15, 0.058)
    assert round((1 - share) * (other_base - other) / (base - mean), 2) == 0.80


def test_each_number_of_the_claims_has_a_sentence():
    claims = script("claims", RESBENCH)
    names = {name for text in claims.templates().values() for name in re.findall(r"\{(\w+)\}", text)}
    assert names == claims.numbers().keys()
