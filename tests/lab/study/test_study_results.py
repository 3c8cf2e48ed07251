"""Planted differences are found in the records, and a missing comparison gives no result."""

import csv
import io
import json
import math
import re
from itertools import chain

import numpy
import pytest
from scipy.stats import ttest_ind

from residua.errors import InputError
from residua.lab.study.report import draw, markdown, payload, table, write_report
from residua.lab.study.results import read_results
from support.planted_study import (
    DOCUMENT,
    changed,
    copied,
    cost,
    costs,
    folder,
    planted,
    record,
    records,
    searched,
    study,
    without,
)


def row_of(found, scheme="ddl"):
    return found.row("small", scheme)


def test_differences_are_paired_by_seed_and_have_the_interval_of_students_t():
    difference = row_of(planted()).difference("residual", "tokens")
    assert difference.estimate.mean == pytest.approx(-0.2)
    assert difference.estimate.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert difference.holm is None
    (named,) = planted(primary={"small": [["residual", "ddl"]]}).corrected.values()
    assert named.holm == pytest.approx(difference.p)


def test_the_point_is_chosen_over_all_seeds_and_the_report_shows_the_other_points_and_which_runs_copy():
    runs, tuning = searched()
    found = planted(runs, [], tuning=tuning)
    row = row_of(found)
    assert (row.point, row.tuning_runs, row.edges, row.whole) == ({"train.lr": 0.008}, 2, ["train.lr"], True)
    assert len(row.runs) == 6
    said = markdown(found)
    assert "| `ddl` | lr 0.004 | 3 | 4.2000 ± 0.0000 | 3.2667 ± 2.7252 | 1 of 3, step 60 |" in said
    assert "| `ddl` | lr 0.008 | 3 | 4.0000 ± 0.0000 | 3.8000 ± 0.0000 | 0 of 3 |" in said
    assert "lr 0.008 (edge)" in said
    assert "none of which tuned" not in said
    unfinished = planted(runs[:-1], [], tuning=tuning)
    assert unfinished.row("small", "ddl") is None, "a point lacks a seed"
    alone = planted([run for run in runs[:-1] if run["scheme"] == "ddl"], [], tuning=tuning)
    assert "Not finished: no scheme has a result yet.\n" in markdown(alone)
    with pytest.raises(InputError, match="labels"):
        planted([{**run, "split": []} for run in runs], [], tuning=tuning)


def every_seed(scheme, other, size="small"):
    """Records of three seeds at each rate of `other`, which has the loss on labels that do not repeat by rate."""
    return [
        {
            **record(scheme, "report", seed, loss - seed / 10 ** len(scheme), lr=rate, size=size),
            "split": [[100, 3.5, loss]],
        }
        for rate, loss in other.items()
        for seed in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ((0.008,), None),  # of the grid one point has not begun
        ((0.004, 0.008), None),  # the best lies at an edge, and a third point is planned
        ((0.004, 0.008, 0.016), 0.008),
    ],
)
def test_a_row_has_no_point_before_every_point_that_the_search_plans_is_trained(rates, chosen):
    losses = {0.004: 4.3, 0.008: 4.1, 0.016: 4.2}
    tuning = {"over": {"train.lr": [0.004, 0.008]}, "rule": "all seeds", "runs": 3, "baseline_runs": 3}
    base = every_seed("residual", {0.002: 4.5, 0.004: 4.4, 0.008: 4.5})
    primary = {"small": [["ddl", "residual"]]}
    found = planted(
        base + every_seed("ddl", {rate: losses[rate] for rate in rates}), [], tuning=tuning, primary=primary
    )
    row = found.row("small", "ddl")
    assert (row and row.point["train.lr"]) == chosen
    assert len(found.corrected) == (chosen is not None)


HEADS = "model.num_attention_heads"


@pytest.mark.parametrize(("scheme", "heads", "chosen"), [
    ("ddl", (4, 8), 8),  # 16 heads of 3, and 2 of 24, which is worse than 4 and so no neighbour of the best
    ("ddl", (4,), None),
    ("absent", (4, 8), None),  # without its package nobody knows
])  # fmt: skip
def test_a_neighbour_that_the_plan_cannot_build_is_not_awaited(scheme, heads, chosen):
    """Each number of heads fits its key alone, but 16 do not fit the width."""
    sizes = {"small": {"model.hidden_size": 48, "model.head_dim": None, "model.num_hidden_layers": 1}}
    tuning = {"over": {HEADS: [4, 8]}, "rule": "all seeds", "runs": 3, "baseline_runs": 3}
    runs = [
        changed(
            every_seed(scheme, {4.0 - number / 100: 4.0 - number / 100}), lambda run, n=number: {"point": {HEADS: n}}
        )
        for number in heads
    ]
    found = planted([*chain(*runs)], [], sizes=sizes, tuning=tuning, schemes={"residual": {}, scheme: {}})
    row = found.row("small", scheme)
    assert (row and row.point[HEADS]) == chosen


def test_points_of_another_size_are_not_those_of_a_row():
    sizes = {"small": DOCUMENT["sizes"]["small"], "big": {**DOCUMENT["sizes"]["small"], "tuned": "small"}}
    tuning = {"over": {"train.lr": [0.004, 0.008]}, "rule": "all seeds", "runs": 2, "baseline_runs": 2}
    runs = [x for name in ("residual", "ddl") for x in every_seed(name, {0.004: 4.3, 0.008: 4.1})]
    runs += [x for name in ("residual", "ddl") for x in every_seed(name, {0.008: 3.1}, size="big")]
    found = planted(runs, [], tuning=tuning, sizes=sizes)
    row = found.row("big", "ddl")
    assert (row.point, row.points, row.tuning_runs) == ({"train.lr": 0.008}, [], 2)
    assert len(found.row("small", "ddl").points) == 2
    said = next(each for each in payload(found)["rows"] if (each["size"], each["scheme"]) == ("big", "ddl"))
    assert sorted(run["kind"] for run in said["runs"]) == ["final"] * 6 + ["report"] * 3


def test_equal_seconds_is_the_baseline_after_as_many_more_steps_as_a_step_costs():
    row = row_of(planted())
    assert row.difference("residual", "seconds").estimate.mean == pytest.approx(-0.2 + 0.3)
    # On a + b / sqrt(C) from 100 to 150 steps: below the straight line in the logarithm, which gives 0.15.
    gained = (1 - 1.5**-0.25) / (1 - 1.5**-0.5)
    assert row.difference("residual", "FLOPs").estimate.mean == pytest.approx(-0.2 + 0.3 * gained)
    assert 0.3 * gained > 0.157


@pytest.mark.parametrize(
    ("times", "gained"),
    [
        (1.2, 0.3 * (1 - 1.2**-0.5) / (1 - 1.5**-0.5)),
        (2.0, 0.3 + 0.6 * (1.5**-0.5 - 2**-0.5) / (1.5**-0.5 - 3**-0.5)),
        (0.95, 0.3 * (1 - 0.95**-0.5) / (1 - 1.5**-0.5)),
        (0.85, None),
    ],
)
def test_a_baseline_is_read_between_the_runs_of_the_nearest_lengths_and_a_little_below_the_shortest(times, gained):
    """It gains 0.3 from 100 to 150 steps, and 0.9 to 300."""
    longest = [record("residual", "longer", seed, 4 + 0.01 * seed - 0.9, steps=300) for seed in (1, 2, 3)]
    timed = [cost("residual", 1.0, 1000.0), cost("ddl", times, 1000.0 * times)]
    row = row_of(planted([*records(), *longest], timed, longer=[1.5, 3.0]))
    for measure in ("seconds", "FLOPs"):
        found = row.difference("residual", measure).estimate
        assert (found and found.mean) == (None if gained is None else pytest.approx(-0.2 + gained))


def test_an_interval_at_equal_seconds_has_the_error_of_the_timing():
    """Quartiles 0.01 from the median of 45 rounds, on both sides: standard errors of 0.00277 / 1.5 and 0.00277; and
    0.02 from one session to another."""
    row = row_of(planted())
    tokens, found = (row.difference("residual", measure).estimate for measure in ("tokens", "seconds"))
    one = math.sqrt(math.pi / 2 / 45) * 0.01 / 0.67449
    slope = 0.5 * 0.3 / (1.5**0.5 - 1)  # of a + b / sqrt(C) over the logarithm, at 150 steps
    assert found.error == pytest.approx(math.hypot(tokens.error, slope * math.hypot(one, one / 1.5, 0.02)), rel=1e-4)
    noisy = [{**c, "time_ratio": {**c["time_ratio"], "upper": 3 * c["time_ratio"]["median"]}} for c in costs()]
    wide = row_of(planted(timed=noisy))
    assert wide.difference("residual", "seconds").estimate.half_width > 1.5 * found.half_width
    for measure in ("tokens", "FLOPs"):
        assert wide.difference("residual", measure) == row.difference("residual", measure)


def test_there_is_no_comparison_beyond_the_longest_run_of_the_baseline():
    found = planted(timed=[cost("residual", 1.0, 1000.0), cost("ddl", 1.7, 800.0)])
    row = row_of(found)
    assert row.difference("residual", "seconds").estimate is None
    assert row.difference("residual", "FLOPs").estimate is None
    assert row.difference("residual", "tokens").estimate is not None
    assert "vs residual, equal seconds" not in payload(found)["columns"]
    assert payload(found)["measures"] == ["tokens"]  # no marks for the others in pictures
    assert "the size has no baseline trained for as long" in markdown(found)


def test_compiled_steps_have_their_own_comparison():
    assert "compiled" not in markdown(planted()).partition("## How")[0]
    timed = [cost("residual", 1.0, 1.0, compiled=True), cost("ddl", 1.5**0.5, 1.0, compiled=True)]
    for found in (planted(timed=costs() + timed), planted(timed=timed + costs())):
        row = row_of(found)
        assert row.difference("residual", "seconds").estimate.mean == pytest.approx(-0.2 + 0.3)
        assert row.difference("residual", "compiled seconds").estimate.mean == pytest.approx(-0.2 + 0.158, abs=1e-3)
        assert row.cost.ratio.median == 1.5
        assert "| 1.500 [1.490, 1.510] | 1.225 [1.215, 1.235] |" in markdown(found)
        assert "| vs residual, equal compiled seconds |" in markdown(found)
        assert payload(found)["measures"] == ["tokens", "FLOPs", "seconds", "compiled seconds"]


def test_step_times_are_compared_only_within_rounds_of_both_schemes():
    """The machine changed between the morning and the afternoon, so a ratio across the two is meaningless."""
    afternoon = [cost("residual", 1.0, 1000.0, date="2027"), cost("other", 1.1, 1000.0, date="2027")]
    changes = {"schemes": {"residual": {}, "ddl": {}, "other": {}}, "baselines": ["residual", "other"]}
    changes["questions"] = {"gain": {"ask": "Who?", "compare": [["ddl", "other"]], "at": ["seconds"]}}
    runs = [*records(), *copied("other")]
    found = planted(runs, [*costs(), cost("other", 1.3, 1000.0), *afternoon], **changes)
    assert found.row("small", "other").difference("residual", "seconds").cost == 1.1
    assert row_of(found).difference("residual", "seconds").cost == 1.5
    assert row_of(found).difference("other", "seconds").cost == pytest.approx(1.5 / 1.3)
    (answer,) = planted(runs, [*costs(), *afternoon], **changes).answers
    assert answer.missing == "steps of ddl and other were not timed in the same rounds (--measure)"


def test_too_few_rounds_give_no_error_and_no_difference():
    few = [{**c, "seconds": c["seconds"][:8]} for c in costs()]
    row = row_of(planted(timed=few))
    assert row.difference("residual", "seconds") is None
    assert row.difference("residual", "FLOPs") is not None


def test_a_reported_run_that_diverged_has_a_row_without_a_difference(tmp_path):
    diverged = lambda row: {"val_loss": None, "curve": []}  # noqa: E731
    found = planted(changed(records(), diverged, scheme="ddl", kind="report", seed=2))
    assert row_of(found).loss is None
    assert all(difference.estimate is None for difference in row_of(found).differences)
    assert "| `ddl` | diverged |" in markdown(found)
    assert write_report(found, tmp_path)


def test_a_worth_beyond_the_longest_runs_is_null_in_json(tmp_path):
    beyond = changed(records(), lambda row: {"val_loss": 0.1}, scheme="ddl", kind="report")
    assert row_of(planted(beyond)).difference("residual", "tokens").worth == math.inf
    written = json.dumps(payload(planted(beyond)), allow_nan=False)
    assert json.loads(written)["rows"][1]["differences"][0]["tokens_worth"] is None


@pytest.mark.parametrize("wide", ["ddl", "residual"])
def test_costs_of_another_size_of_model_than_tuning_chose_are_left_out_with_the_reason(wide):
    """All runs have 8,000 parameters; a step was timed with 9,000."""
    timed = [{**row, "parameters": 9000 if row["scheme"] == wide else 8000} for row in costs()]
    asked = {"gain": {"ask": "Is it?", "compare": [["ddl", "residual"]], "at": ["FLOPs", "seconds"]}}
    found = planted(timed=timed, questions=asked)
    assert {difference.measure for difference in row_of(found).differences} == {"tokens"}
    reason = f"tuning chose another size of model for {wide} than the one that was measured"
    assert {answer.missing for answer in found.answers} == {reason}
    said = markdown(found)
    assert f"than the one that was measured: {wide} at small." in said
    assert {row.scheme: row.cost is None for row in found.rows} == {"ddl": wide == "ddl", "residual": wide != "ddl"}
    assert not {"vs residual, equal FLOPs", "vs residual, equal seconds"} & {*payload(found)["columns"]}
    assert ("step time" in payload(found)["columns"]) is (wide == "ddl")
    assert row_of(planted(timed=[{**row, "parameters": 8000} for row in costs()])).difference("residual", "FLOPs")


def test_without_costs_only_equal_tokens_are_compared():
    found = planted(timed=[], longer=[])
    assert [d.measure for d in row_of(found).differences] == payload(found)["measures"] == ["tokens"]
    columns = ["scheme", "validation loss", "vs residual, equal tokens", "vs residual, worth", "parameters"]
    assert payload(found)["columns"] == [*columns, "tuned to", "tuning runs"]
    for word in ("FLOPs", "seconds", "Step time", "Peak", "Learned to copy"):
        assert word not in markdown(found)
        assert word in markdown(planted()) or word == "Learned to copy"
    assert "Time and memory were not measured" in markdown(found)
    assert "Time and memory were not measured" not in markdown(planted())
    header = table(planted(without(records(), kind="longer"), [], longer=[])).partition("\n")[0].split(",")
    assert not {"cost", "tokens_worth", "p_holm"} & {*header}, "no line fills them"
    assert header[:2] == ["size", "scheme"]
    assert {"cost", "tokens_worth"} <= {*table(planted()).partition("\n")[0].split(",")}


def test_the_reported_point_is_the_one_that_tuning_chose():
    better = [*records(), record("ddl", "report", 1, 1.0, lr=0.004)]
    row = row_of(planted(better))
    assert row.point == {"train.lr": 0.008}
    assert row.loss.mean == pytest.approx(4.02 - 0.2)


def test_tuning_runs_of_a_different_length_are_ignored():
    shorter = [*records(), record("ddl", "tune", 0, 1.0, lr=0.004, steps=50)]
    row = row_of(planted(shorter))
    assert row.point == {"train.lr": 0.008}
    assert row.tuning_runs == 2


def test_of_points_with_equal_losses_the_reported_one_counts():
    equal = changed(records(), lambda row: {"val_loss": 4}, scheme="ddl", kind="tune")
    for runs in (equal, list(reversed(equal))):
        row = row_of(planted(runs))
        assert row.point == {"train.lr": 0.008}
        assert row.whole


def test_a_tuned_value_at_the_edge_of_what_was_tried_is_marked():
    assert row_of(planted()).edges == ["train.lr"]
    assert "| lr 0.008 (edge) | 2 |" in markdown(planted())
    beyond = planted([*records(), record("ddl", "tune", 0, 5.0, lr=0.016)])
    assert row_of(beyond).edges == []
    assert "| lr 0.008 | 3 |" in markdown(beyond)
    assert row_of(planted(without(records(), scheme="ddl", point={"train.lr": 0.004}))).edges == []


def test_longer_runs_in_progress_give_no_difference_over_some_of_the_seeds():
    row = row_of(planted(without(records(), kind="longer", seed=3)))
    tokens, flops, seconds = (difference.estimate for difference in row.differences)
    assert (tokens.count, flops, seconds) == (3, None, None)


def test_longer_runs_of_a_single_size_are_explained_in_how_to_read():
    sizes = {**study().sizes, "small": {"longer": [2.0]}}
    assert "trained for 2 times as many steps" in markdown(planted(longer=[], sizes=sizes))
    assert "the baselines have no longer runs" in markdown(planted(longer=[]))


def test_every_torch_of_the_runs_is_named():
    other = changed(records(), lambda row: {"facts": {**row["facts"], "torch": "1"}}, seed=3)
    assert "; PyTorch 1, 2." in markdown(planted(other))


def test_versions_and_commits_of_the_runs_are_named_if_known():
    def facts(**own):
        return lambda row: {"facts": {**row["facts"], **own}}

    installed = markdown(planted(changed(records(), facts(residua="0.1.0", commit=None))))
    assert "residua 0.1.0; PyTorch" in installed
    assert "Code of the runs: residua 0.1.0.\n" in installed
    cloned = markdown(planted(changed(records(), facts(residua="0.1.0", commit="ab" * 20))))
    assert "Code of the runs: residua 0.1.0 (abababababab).\n" in cloned


def test_missing_seeds_and_schemes_are_named():
    some = without(records(), scheme="ddl", kind="report", seed=3)
    found = planted(some, schemes={"residual": {}, "ddl": {}, "hc": {}})
    assert (found.unfinished, found.untrained) == (["ddl at small: 2 of 3 seeds"], 1)
    assert "Not finished: ddl at small: 2 of 3 seeds.\n" in markdown(found)
    assert "without a result: 1. Their tuning is not finished, or a run diverged" in markdown(found)
    assert row_of(found).difference("residual", "tokens").estimate.count == 2
    assert "(2 seeds) |" in markdown(planted(without(records(), scheme="residual", kind="report", seed=3)))
    assert "seeds) |" not in markdown(planted())


def test_a_size_with_fewer_seeds_is_complete_with_them():
    small = DOCUMENT["sizes"]["small"]
    long = {**small, "tuned": "small", "seeds": [1, 2], "tokens_per_parameter": 0.06}
    more = [record(name, "report", seed, 3.0 + seed / 10, size="long", steps=300)
            for name in ("residual", "ddl") for seed in (1, 2)]  # fmt: skip
    found = planted([*records(), *more], sizes={"small": small, "long": long})
    assert [row.whole for row in found.rows if row.size == "long"] == [True, True]
    assert found.row("long", "ddl").difference("residual", "tokens").estimate.count == 2
    assert "- long: 0.06 tokens a parameter, seeds 1, 2.\n" in markdown(found)
    assert not found.unfinished
    assert "seeds 1, 2." not in markdown(planted())


def test_schemes_of_a_size_share_one_noise_and_two_schemes_use_that_of_their_differences():
    """Of two schemes it is the paired t, of three the residual of a model with scheme and seed."""
    more = [{**r, "val_loss": r["val_loss"] + 0.01 * (-1) ** r["seed"]} for r in copied("hc")]
    found = planted(records() + more, schemes={"residual": {}, "ddl": {}, "hc": {}})
    losses = numpy.array([list(row.losses.values()) for row in found.rows])
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    noise = found.noise("small")
    assert (noise.freedom, noise.deviation) == (4, pytest.approx(math.sqrt((rest**2).sum() / 4)))
    for name in ("ddl", "hc"):
        estimate = row_of(found, name).difference("residual", "tokens").estimate
        assert (estimate.error, estimate.freedom) == (pytest.approx(noise.deviation * math.sqrt(2 / 3)), 4)
    assert f"standard deviation {noise.deviation:.4f} after" in markdown(found)
    assert "hardly known" not in markdown(found)
    assert "One degree of freedom" in markdown(planted(seeds=[1, 2]))


def test_schemes_with_separate_noise_are_compared_by_welchs_test():
    sizes = {"small": {**DOCUMENT["sizes"]["small"], "noise": "own"}}
    found = planted(sizes=sizes)
    ours, theirs = (list(row_of(found, name).losses.values()) for name in ("ddl", "residual"))
    difference = row_of(found).difference("residual", "tokens")
    test = ttest_ind(ours, theirs, equal_var=False)
    assert difference.p == pytest.approx(test.pvalue)
    low, high = test.confidence_interval()
    assert difference.estimate.half_width == pytest.approx((high - low) / 2)
    assert found.noise("small") is None
    assert "noise of its own 3 seeds (Welch's t)" in markdown(found)


def test_a_row_that_varies_far_more_than_the_others_has_its_own_noise():
    wild = changed(copied("krom"), lambda row: {"val_loss": row["val_loss"] + 2}, kind="report", seed=2)
    schemes = {name: {} for name in ("residual", "ddl", "hc", "mhc", "krom")}
    found = planted([*records(), *copied("hc"), *copied("mhc"), *wild], [], schemes=schemes)
    assert [row.scheme for row in found.rows if row.failed] == ["krom"]
    assert found.noise("small").freedom == 6
    assert row_of(found, "krom").difference("residual", "tokens").estimate.freedom == pytest.approx(2, abs=0.1)
    said = markdown(found)
    assert "`krom`: noise of its own (Welch's t)" in said
    assert "for the rows that share it" in said
    assert said.count("more than 3 times") == 2, "beside the noise and in How to read this"
    assert "Two seeds" not in said


def test_primary_contrasts_are_one_family_and_the_rest_is_not_corrected():
    schemes = {"residual": {}, "ddl": {}, "hc": {}}
    more = [{**r, "val_loss": r["val_loss"] - 0.001 * r["seed"]} for r in copied("hc")]
    named = {"small": [["ddl", "residual"], ["hc", "ddl"], ["mhc", "residual"]]}
    found = planted(records() + more, schemes=schemes, primary=named)
    assert [pair for _, *pair in found.corrected] == [["ddl", "residual"], ["hc", "ddl"]]
    lead = row_of(found).difference("residual", "tokens")
    assert lead.holm == pytest.approx(3 * lead.p), "mhc has no runs yet"
    assert row_of(found).difference("residual", "seconds").holm is None
    assert row_of(found, "hc").difference("residual", "tokens").holm is None
    assert "2 of 3 finished" in markdown(found)
    assert "No primary contrast was named" in markdown(planted(schemes=schemes, primary={}))
    assert f"| small | `ddl` − `residual` | -0.2000 ± {lead.estimate.half_width:.4f} |" in markdown(found)


@pytest.mark.parametrize("diverged", ["residual", "ddl"])
@pytest.mark.parametrize("pair", [["ddl", "residual"], ["residual", "ddl"]])
def test_a_primary_contrast_uses_all_seeds(diverged, pair):
    runs = changed(records(), lambda row: {"val_loss": None}, scheme=diverged, kind="report", seed=2)
    assert planted(runs, primary={"small": [pair]}).corrected == {}


def test_a_loss_is_worth_the_tokens_that_the_baseline_needs_for_it():
    found = planted()
    worth = row_of(found).difference("residual", "tokens").worth
    share = 0.2 / 0.3
    assert worth == pytest.approx((1 - share * (1 - 1.5**-0.5)) ** -2)
    assert 1.29 < worth < 1.3  # of a straight line in the logarithm 1.31
    assert f"{worth:.2f} tokens, {worth / 1.5:.2f} speed" in markdown(found)
    for shift, expected, text in ((-0.2, math.inf, "> 1.5 tokens, > 1.00 speed"), (0.5, 0.0, "&lt; 0.9 tokens")):
        found = planted(
            changed(records(), lambda row, shift=shift: {"val_loss": row["val_loss"] + shift}, scheme="ddl")
        )
        assert row_of(found).difference("residual", "tokens").worth == expected
        assert text in markdown(found)
    for shift in (0.3, 0.35):  # longer runs of the baseline are no better
        found = planted(changed(records(), lambda row, by=shift: {"val_loss": row["val_loss"] + by}, kind="longer"))
        assert row_of(found).difference("residual", "tokens").worth is None
    ahead = changed(records(), lambda row: {"val_loss": row["val_loss"] - 0.9}, scheme="ddl", kind="report")
    unfinished = planted([*ahead, record("residual", "longer", 1, 3.2, steps=300)], longer=[1.5, 3.0])
    assert "> 1.5 tokens" in markdown(unfinished)


@pytest.mark.parametrize(
    ("shape", "worths"),
    [  # the gain of longer runs over the reported ones
        ({150: 0.3, 300: 0.9}, {0.3: 1.5, 0.9: 3.0}),  # a + b / sqrt(C) through the ends has 0.56 at 150
        ({150: 0.3, 300: 0.25}, {0.3: 1.5, 0.31: math.inf, 0.2: (1 - 0.2 / 0.3 * (1 - 1.5**-0.5)) ** -2}),
        ({150: 0.3, 300: -0.1}, {0.3: 1.5}),
    ],
)
def test_worth_is_read_from_the_curve_that_equal_flops_are_read_from(shape, worths):
    """A loss that the baseline's runs of a middle length reach is worth their tokens, on a curve of any shape."""
    runs = [
        *(row for row in records() if row["kind"] != "longer"),
        *(
            {**row, "key": f"{row['key']} {steps}", "kind": "longer", "steps": steps, "val_loss": row["val_loss"] - by}
            for row in records()
            if (row["scheme"], row["kind"]) == ("residual", "report")
            for steps, by in shape.items()
        ),
    ]
    for ahead, worth in worths.items():
        some = [
            {**row, "val_loss": theirs["val_loss"] - ahead} if row["scheme"] == "ddl" else row
            for row in runs
            for theirs in runs
            if (theirs["scheme"], theirs["kind"], theirs["seed"]) == ("residual", "report", row["seed"])
        ]
        found = planted([row for row in runs if row["kind"] == "tune"] + some, longer=[1.5, 3.0])
        assert row_of(found).difference("residual", "tokens").worth == pytest.approx(worth)


def test_tokens_that_are_seen_again_are_named():
    assert "each seen at most once" in markdown(planted())
    assert "each seen at most 3 times" in markdown(planted(epochs=3))


def test_runs_that_learned_to_copy_are_counted_with_their_steps():
    steps = {1: 40.0, 2: None, 3: 70.4}
    found = planted(changed(records(), lambda row: {"transition": steps[row["seed"]]}, scheme="ddl", kind="report"))
    assert row_of(found).transitions == [40.0, None, 70.4]
    assert "| 2 of 3, step 40 to 70 |" in markdown(found)
    assert "learned to copy" not in markdown(planted()).partition("## How")[0]
    none = markdown(planted(changed(records(), lambda row: {"transition": None}, kind="report")))
    for words in ("learned to copy", "Learned to copy", "0 of 3"):
        assert words not in none


def test_records_of_a_name_that_now_means_another_connection_are_left_out():
    found = planted(schemes={"residual": {}, "ddl": {"connection": "ddl:beta_init=0.5"}})
    assert row_of(found) is None
    assert (found.unfinished, found.untrained) == ([], 1)
    assert "Left out, as the study does not have them: records of ddl (ddl) at small." in markdown(found)
    assert "Left out" not in markdown(planted())


def test_curves_of_differences_have_intervals():
    found = planted()
    (early, late) = found.curves(row_of(found))["residual"]
    assert early[:2] == (50, pytest.approx(0.2))
    assert late[:2] == (100, pytest.approx(-0.2))
    assert late[2] == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def test_csv_and_page_agree():
    found = planted()
    lines = list(csv.DictReader(io.StringIO(table(found))))
    (line,) = (line for line in lines if (line["scheme"], line["measure"]) == ("ddl", "tokens"))
    assert float(line["difference"]) == pytest.approx(-0.2)
    (shown,) = (row for row in payload(found)["rows"] if row["scheme"] == "ddl")
    assert shown["differences"][0]["difference"] == float(line["difference"])
    assert len(shown["runs"]) == 5


@pytest.mark.parametrize("name", ['=HYPERLINK("a")', "+1", "-1+1", "@SUM(1)", "\t=1"])
def test_a_spreadsheet_computes_no_name_in_the_csv(name):
    renamed = [{**r, "scheme": name, "connection": name} if r["scheme"] == "ddl" else r for r in records()]
    lines = list(csv.DictReader(io.StringIO(table(planted(renamed, schemes={"residual": {}, name: {}})))))
    (line,) = (line for line in lines if line["scheme"] not in ("residual", ""))
    assert line["scheme"] == line["connection"] == f"'{name}"
    assert float(line["difference"]) < 0


def test_names_of_schemes_and_sizes_are_not_read_as_markup():
    name = "`<img src=x> | a\nb`"
    renamed = [{**r, "scheme": name, "connection": name} if r["scheme"] == "ddl" else r for r in records()]
    renamed = [{**r, "size": name} for r in renamed]
    sizes = {name: study().sizes["small"].keys}
    text = markdown(planted(renamed, schemes={"residual": {}, name: {}}, sizes=sizes, title=name))
    assert "<img" not in text
    assert [line for line in text.splitlines() if line.startswith("b`")] == []
    assert "| `&lt;img src=x> \\| a b` |" in text
    facts = {"data": {"sha256": "<svg onload=a()>"}, "torch": "<b>", "residua": "](javascript:a)", "commit": "<i>"}
    found = planted([row | {"facts": facts} for row in records()])
    assert [part for part in ("<svg", "<b>", "<i>", "](java") if part in markdown(found)] == []
    assert "<svg onload=a()>" in "".join(payload(found)["setting"])


def finalists(seeds, losses, **tuning):
    """Results in which short runs favour 0.008 and finalists have these losses by rate and seed; and the row of ddl."""
    short = [record("ddl", "tune", 0, loss, steps=50, lr=lr) for lr, loss in ((4e-3, 5), (8e-3, 4))]
    finals = [record("ddl", "final", s, loss, lr=lr) for lr in losses for s, loss in zip(seeds, losses[lr])]
    reported = [record("ddl", "report", seed, loss, lr=lr) for seed in (1, 2, 3) for lr, loss in ((4e-3, 3), (8e-3, 4))]
    budget = {**DOCUMENT["tuning"], "length": 0.5, "finalists": 2, **tuning}
    found = planted([*short, *finals, *reported], [], tuning=budget)
    return found, row_of(found)


def test_the_best_finalist_is_reported_and_without_all_of_them_there_is_no_row():
    found, row = finalists([0], {4e-3: [3.8], 8e-3: [4.0]})
    assert (row.point, row.loss.mean, row.tuning_runs) == ({"train.lr": 4e-3}, 3, 2)
    assert [run.kind for run in row.runs] == ["tune"] * 2 + ["final"] * 2 + ["report"] * 3
    assert "The best 2 were trained in full with seed 0 to choose between them." in markdown(found)
    assert finalists([0], {8e-3: [4.0]})[1] is None


def test_finalists_are_compared_by_their_mean_over_the_seeds_that_judge():
    """The first of these seeds favours 0.008, all three of them 0.004."""
    seeds, losses = [0, 11, 12], {4e-3: [4.0, 3.6, 3.7], 8e-3: [3.9, 3.9, 3.9]}
    found, row = finalists(seeds, losses, final_seeds=seeds)
    assert row.point == {"train.lr": 4e-3}
    assert "with the seeds 0, 11, 12 to choose between them" in markdown(found)
    assert finalists(seeds, {**losses, 8e-3: [3.9, 3.9]}, final_seeds=seeds)[1] is None
    assert finalists(seeds, {**losses, 4e-3: [None, 3.6, 3.7]}, final_seeds=seeds)[1].point == {"train.lr": 8e-3}


def searched_again(start):
    """Results of a study whose large size searches the rate again, in whose records 0.004 and then 0.002 are best.

    start: the other tuned value of ddl in the search of the large size; at the small one 1.0 was best.
    """
    small = DOCUMENT["sizes"]["small"]
    large = {**small, "tuned": "small", "over": {"train.lr": [0.004, 0.008]}}
    runs = []
    for scheme in ("residual", "ddl"):
        for size, best in (("small", 0.004), ("large", 0.002)):
            made = [record(scheme, "tune", 0, abs(lr - best), lr=lr, size=size) for lr in (0.004, 0.008, 0.002)]
            made += [record(scheme, "report", seed, 3.0, lr=best, size=size) for seed in (1, 2)]
            factor = {"train.connection_lr_factor": start if size == "large" else 1.0} if scheme == "ddl" else {}
            runs += changed(made, lambda run, factor=factor: {"point": {**run["point"], **factor}})
    return planted(runs, [], sizes={"small": small, "large": large}, seeds=[1, 2])


def test_a_size_that_searches_again_has_the_point_of_its_own_search():
    found = searched_again(1.0)
    row = found.row("large", "ddl")
    assert row.point == {"train.lr": 0.002, "train.connection_lr_factor": 1.0}
    assert row.tuning_runs == 6
    assert row.edges == ["train.lr"]
    assert "- large: the settings of small, but train.lr 0.004/0.008, searched again in full length." in markdown(found)


def test_a_search_from_a_different_starting_point_gives_no_row():
    found = searched_again(4.0)
    assert found.row("small", "ddl")
    assert found.row("large", "ddl") is None


def test_the_picture_has_the_rows_of_each_size_under_its_name():
    small = DOCUMENT["sizes"]["small"]
    sizes = {"small": small, "large": {**small, "tuned": "small", "model.hidden_size": 32}}
    again = changed(records(), lambda run: {"size": "large", "key": run["key"].replace("small", "large")})
    for runs, expected in (([*records(), *again], ["small", "ddl", "large", "ddl"]), (records(), ["ddl"])):
        found = planted(runs, sizes=sizes)
        (panel,) = draw(found).axes
        assert [label.get_text() for label in reversed(panel.get_yticklabels())] == expected
        marks, filled = (tuple(line.get_ydata()) for line in panel.lines if line.get_marker() == "o")
        assert not filled, "none is clear of zero"
        assert len(marks) == expected.count("ddl")
        assert all(expected[::-1][round(place)] == "ddl" for place in marks)


def test_the_picture_shows_a_name_with_dollar_signs_as_it_is():
    name = r"$\frac$"
    runs = [{**row, "scheme": name, "connection": name} if row["scheme"] == "residual" else row for row in records()]
    figure = draw(planted(runs, [], schemes={name: {}, "ddl": {}}, baselines=[name]))
    figure.draw_without_rendering()  # raises for a formula that cannot be read
    assert r"that of \$\frac\$ (" in figure.axes[0].get_xlabel()


def test_differences_whose_intervals_exclude_zero_are_filled():
    far = changed(records(), lambda row: {"val_loss": 0.0, "curve": []}, scheme="ddl", kind="report")
    found = planted(far, primary={"small": [["ddl", "residual"]]})
    assert row_of(found).difference("residual", "tokens").clear
    figure = draw(found)
    marks, filled = (tuple(line.get_ydata()) for line in figure.axes[0].lines if line.get_marker() == "o")
    assert marks == filled
    assert len(marks) == 1
    handle, *_ = figure.axes[0].get_legend_handles_labels()[0]
    assert handle.lines[0].get_markerfacecolor() == "white", "the legend shows no difference as clear"


def test_a_run_on_other_data_is_refused(tmp_path):
    runs = [{**row, "facts": {**row["facts"], "data": {"fingerprint": "e" * 64}}} for row in records()]
    with pytest.raises(InputError, match=r"must be ffff.*, the study's, got 'eeee"):
        read_results(folder(tmp_path / "study", runs))


FORGED = [("val_loss", "low"), ("facts", 7), ("seed", None), ("point", []), ("steps", 0)]
FORGED += [("curve", curve) for curve in ([[1, "x"]], [[1, 2.0, 3.0]], [[60, 2.0], [50, 2.0]], [[1, -2.0]])]
FORGED += [("val_loss", value) for value in (-1.0, math.nan, math.inf, 1e200)] + [("transition", math.nan)]
FORGED += [("tokens", -1), ("tokens", 10**400), ("seconds", math.nan), ("seed", -1), ("kind", "reported")]
FORGED += [("point", {"train.lr": value}) for value in ("0.008", None, True, math.nan, 10**400)]
FORGED += [("documents", {"nats": [1.0, 1.0], "labels": labels}) for labels in ([1], [-1, 3], [0, 0], [0.5, 0.5])]
FORGED += [("facts", {"parameters": -1}), ("facts", {"residua": [1]}), ("facts", {"residua": 1})]
CONTRADICTING = [
    ("curve", [[100, 2.0]]),
    ("curve", [[400, 5.0]]),
    ("split", [[100, 1.0, 1.5]]),
    ("split", [[400, 5, 5]]),
]
CONTRADICTING += [
    ("documents", {"nats": [1.0, 2.0], "labels": [1, 1]}),
    ("transition", 400),
    ("further_transition", 400),
]


@pytest.mark.parametrize(("name", "value"), FORGED + CONTRADICTING)
def test_a_field_with_an_invalid_value_is_named(name, value, tmp_path):
    with pytest.raises(InputError, match=rf"{name} of .* must be"):
        read_results(folder(tmp_path / "study", [row | {name: value} for row in records()]))


@pytest.mark.parametrize("facts", [None, {"data": None}, {"data": {"source": "caf\udce9.txt"}}], ids=str)
def test_a_run_with_few_facts_or_a_file_whose_name_is_not_utf_8_is_read(facts, tmp_path):
    found = read_results(folder(tmp_path / "study", [row | {"facts": facts} for row in records()]))
    assert found.rows
    markdown(found).encode()


def again(change):
    """The records, of which one of ddl is there a second time with other values: `change(row)` returns them."""
    return [*records(), *(row | change(row) for row in records() if row["key"].startswith("small ddl report seed=2"))]


def of_ddl(change):
    return changed(records(), change, scheme="ddl", kind="report", seed=2)


MIXED = {
    "a second loss": again(lambda row: {"val_loss": 9.0, "curve": []}),
    "a second key": again(lambda row: {"key": f"{row['key']}x"}),
    "other settings": of_ddl(lambda row: {"point": {"train.lr": 0.008, "train.clip": 1.0}}),
    "another size": of_ddl(lambda row: {"facts": {**row["facts"], "parameters": 9000}}),
    "another length": of_ddl(lambda row: {"key": row["key"].replace("=100", "=200"), "steps": 200, "curve": []}),
    "another seed": of_ddl(lambda row: {"seed": 1}),
}


@pytest.mark.parametrize("runs", MIXED.values(), ids=MIXED)
def test_records_of_several_studies_are_refused(runs, tmp_path):
    with pytest.raises(InputError, match=r"records\.jsonl: .* must be .*, got") as refusal:
        read_results(folder(tmp_path / "a {study}", runs))
    assert "\n" not in str(refusal.value)


def test_a_record_that_is_there_twice_counts_once(tmp_path):
    once, twice = (read_results(folder(tmp_path / str(n), n * records())) for n in (1, 2))
    assert markdown(twice) == markdown(once)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"title": "Another", "data": "f" * 64}, "title must be 'Planted', as in study.json beside it, got 'Another'"),
        ({"title": "Planted"}, "data must be the fingerprint of the data, got None"),
    ],
)
def test_settings_of_another_study_are_refused(settings, said, tmp_path):
    place = folder(tmp_path / "study")
    (place / "settings.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=re.escape(f"settings.json: {said}")):
        read_results(place)


@pytest.mark.parametrize("change", [{"baseline": "ddl"}, {"parameters": 9000}], ids=str)
def test_costs_of_another_study_are_refused(change, tmp_path):
    place = folder(tmp_path / "a {study}", None, [row | change for row in costs()])
    with pytest.raises(InputError, match=rf"costs\.jsonl: {next(iter(change))} of .* must be .*, got"):
        read_results(place)


WRONG_COSTS = [("time_ratio", {}), ("time_ratio", {"lower": 2.0, "median": 1.0, "upper": 3.0}), ("seconds", None)]
WRONG_COSTS += [("seconds", [math.nan]), ("peak_bytes", -1), ("peak_bytes", math.inf)]
WRONG_COSTS += [("flops_per_token", {"a": value}) for value in ("x", 0, -5.0, math.inf)]


@pytest.mark.parametrize(("name", "value"), WRONG_COSTS)
def test_a_cost_with_an_invalid_value_is_named(name, value, tmp_path):
    place = folder(tmp_path / "study", None, [row | {name: value} for row in costs()])
    with pytest.raises(InputError, match=rf"{name} of .* must be"):
        read_results(place)


def test_a_study_without_results_or_with_one_seed_gives_no_error(tmp_path):
    assert "Not finished" in markdown(read_results(folder(tmp_path / "none", [], [])))
    first = [row for row in records() if row["seed"] < 2]
    assert "(one seed)" in markdown(read_results(folder(tmp_path / "one", first)))
