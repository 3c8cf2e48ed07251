"""What records say: planted differences are found, and nothing is said where there is nothing to compare with."""

import csv
import io
import math

import numpy
import pytest
from scipy.stats import ttest_ind

from residua.errors import InputError
from residua.lab.study.picture import draw
from residua.lab.study.report import markdown, payload, table, write_report
from residua.lab.study.results import read_results, results
from support.planted_study import DOCUMENT, copied, cost, costs, folder, record, records, study


def row_of(found, scheme="ddl"):
    return found.row("small", scheme)


def test_differences_are_paired_by_seed_and_have_the_interval_of_students_t():
    difference = row_of(results(study(), records(), costs())).difference("residual", "tokens")
    assert difference.estimate.mean == pytest.approx(-0.2)
    assert difference.estimate.half_width == pytest.approx(4.302653 * 0.1 / math.sqrt(3))
    assert difference.holm is None
    (named,) = results(study(primary={"small": [["residual", "ddl"]]}), records(), costs()).corrected.values()
    assert named.holm == pytest.approx(difference.p)


def test_equal_seconds_is_the_baseline_after_as_many_more_steps_as_a_step_costs():
    row = row_of(results(study(), records(), costs()))
    assert row.difference("residual", "seconds").estimate.mean == pytest.approx(-0.2 + 0.3)
    # On a + b / sqrt(C) from 100 to 150 steps: below the straight line in the logarithm, which gives 0.15.
    gained = (1 - 1.5**-0.25) / (1 - 1.5**-0.5)
    assert row.difference("residual", "FLOPs").estimate.mean == pytest.approx(-0.2 + 0.3 * gained)
    assert 0.3 * gained > 0.157


def test_an_interval_at_equal_seconds_has_the_error_of_the_timing():
    """Quartiles 0.01 from the median of 45 rounds, on both sides: standard errors of 0.00277 / 1.5 and 0.00277; and
    0.02 from one session to another."""
    row = row_of(results(study(), records(), costs()))
    tokens, found = (row.difference("residual", measure).estimate for measure in ("tokens", "seconds"))
    one = math.sqrt(math.pi / 2 / 45) * 0.01 / 0.67449
    slope = 0.5 * 0.3 / (1.5**0.5 - 1)  # of a + b / sqrt(C) over the logarithm, at 150 steps
    assert found.error == pytest.approx(math.hypot(tokens.error, slope * math.hypot(one, one / 1.5, 0.02)), rel=1e-4)
    noisy = [{**c, "time_ratio": {**c["time_ratio"], "upper": 3 * c["time_ratio"]["median"]}} for c in costs()]
    wide = row_of(results(study(), records(), noisy))
    assert wide.difference("residual", "seconds").estimate.half_width > 1.5 * found.half_width
    for measure in ("tokens", "FLOPs"):
        assert wide.difference("residual", measure) == row.difference("residual", measure)


def test_beyond_the_longest_run_of_the_baseline_nothing_is_said():
    found = results(study(), records(), [cost("residual", 1.0, 1000.0), cost("ddl", 1.7, 800.0)])
    row = row_of(found)
    assert row.difference("residual", "seconds").estimate is None
    assert row.difference("residual", "FLOPs").estimate is None
    assert row.difference("residual", "tokens").estimate is not None
    assert "–" in next(line for line in markdown(found).splitlines() if line.startswith("| `ddl`"))


def test_compiled_steps_have_a_comparison_of_their_own():
    assert "compiled" not in markdown(results(study(), records(), costs())).partition("## How")[0]
    timed = [cost("residual", 1.0, 1.0, compiled=True), cost("ddl", 1.5**0.5, 1.0, compiled=True)]
    for known in (costs() + timed, timed + costs()):
        found = results(study(), records(), known)
        row = row_of(found)
        assert row.difference("residual", "seconds").estimate.mean == pytest.approx(-0.2 + 0.3)
        assert row.difference("residual", "compiled seconds").estimate.mean == pytest.approx(-0.2 + 0.158, abs=1e-3)
        assert row.cost["time_ratio"]["median"] == 1.5
        told = markdown(found)
        assert "| 1.500 [1.490, 1.510] | 1.225 [1.215, 1.235] |" in told
        assert "| vs residual, equal compiled seconds |" in told
        assert payload(found)["measures"] == ["tokens", "FLOPs", "seconds", "compiled seconds"]


def test_two_are_compared_by_rounds_in_which_both_took_turns():
    """The machine was another in the afternoon: a ratio of that time over one of the morning means nothing."""
    afternoon = [cost("residual", 1.0, 1000.0, date="2027"), cost("other", 1.1, 1000.0, date="2027")]
    known = [*costs(), cost("other", 1.3, 1000.0)]
    wanted = study(
        schemes={"residual": {}, "ddl": {}, "other": {}},
        baselines=["residual", "other"],
        questions={"gain": {"ask": "Who?", "compare": [["ddl", "other"]], "at": ["seconds"]}},
    )
    found = results(wanted, [*records(), *copied("other")], [*known, *afternoon])
    assert found.row("small", "other").difference("residual", "seconds").cost == 1.1
    assert found.row("small", "ddl").difference("residual", "seconds").cost == 1.5
    assert found.row("small", "ddl").difference("other", "seconds").cost == pytest.approx(1.5 / 1.3)
    (answer,) = results(wanted, [*records(), *copied("other")], [*costs(), *afternoon]).answers
    assert answer.missing == "steps of ddl and other were not timed in the same rounds (--measure)"


def test_too_few_rounds_tell_no_error_and_no_difference():
    few = [{**c, "seconds": c["seconds"][:8]} for c in costs()]
    row = row_of(results(study(), records(), few))
    assert row.difference("residual", "seconds") is None
    assert row.difference("residual", "FLOPs") is not None


def test_a_reported_run_that_diverged_has_a_row_and_breaks_no_report(tmp_path):
    diverged = [{**r, "val_loss": None, "curve": []} if r["key"].startswith("small ddl report seed=2") else r
                for r in records()]  # fmt: skip
    found = results(study(), diverged, costs())
    assert "| `ddl` | diverged |" in markdown(found)
    assert write_report(found, tmp_path)


def test_without_costs_only_equal_tokens_are_compared():
    assert [d.measure for d in row_of(results(study(), records(), [])).differences] == ["tokens"]


def test_the_point_is_the_one_that_tuning_chose():
    better = [*records(), record("ddl", "report", 1, 1.0, lr=0.004)]
    row = row_of(results(study(), better, costs()))
    assert row.point == {"train.lr": 0.008}
    assert row.loss.mean == pytest.approx(4.02 - 0.2)


def test_tuning_runs_of_another_length_choose_nothing():
    shorter = [*records(), record("ddl", "tune", 0, 1.0, lr=0.004, steps=50)]
    row = row_of(results(study(), shorter, costs()))
    assert row.point == {"train.lr": 0.008}
    assert row.tuning_runs == 2


def test_of_points_with_equal_losses_the_reported_one_counts_whatever_finished_first():
    equal = [{**r, "val_loss": 4} if (r["scheme"], r["kind"]) == ("ddl", "tune") else r for r in records()]
    for found in (equal, list(reversed(equal))):
        row = row_of(results(study(), found, costs()))
        assert row.point == {"train.lr": 0.008}
        assert row.whole


def test_a_tuned_value_at_the_edge_of_what_was_tried_is_marked():
    assert row_of(results(study(), records(), costs())).edges == ["train.lr"]
    assert "| lr 0.008 (edge) | 2 |" in markdown(results(study(), records(), costs()))
    beyond = [*records(), record("ddl", "tune", 0, 5.0, lr=0.016)]
    assert row_of(results(study(), beyond, costs())).edges == []
    assert "| lr 0.008 | 3 |" in markdown(results(study(), beyond, costs()))
    alone = [r for r in records() if (r["scheme"], r["point"]["train.lr"]) != ("ddl", 0.004)]
    assert row_of(results(study(), alone, costs())).edges == []


def test_longer_runs_that_still_go_on_give_no_difference_over_some_of_the_seeds():
    some = [one for one in records() if (one["kind"], one["seed"]) != ("longer", 3)]
    known = {one.measure: one.estimate for one in results(study(), some, costs()).row("small", "ddl").differences}
    assert known["tokens"].count == 3
    assert known["FLOPs"] is None
    assert known["seconds"] is None


def test_longer_runs_of_a_single_size_are_told_in_how_to_read():
    rungs = {**study().rungs, "small": {"longer": [2.0]}}
    assert "trained for 2 times as many steps" in markdown(results(study(longer=[], rungs=rungs), records(), costs()))
    assert "the baselines have no longer runs" in markdown(results(study(longer=[]), records(), costs()))


def test_every_torch_of_the_runs_is_named():
    other = [{**r, "facts": {**r["facts"], "torch": "1"}} if r["seed"] == 3 else r for r in records()]
    assert "; PyTorch 1, 2." in markdown(results(study(), other, costs()))


def test_missing_seeds_and_schemes_are_named():
    some = [r for r in records() if (r["scheme"], r["kind"], r["seed"]) != ("ddl", "report", 3)]
    found = results(study(schemes={"residual": {}, "ddl": {}, "hc": {}}), some, costs())
    assert found.unfinished == ["ddl at small: 2 of 3 seeds", "hc at small"]
    assert "Not finished" in markdown(found)
    assert row_of(found).difference("residual", "tokens").estimate.count == 2
    fewer = [r for r in records() if (r["scheme"], r["kind"], r["seed"]) != ("residual", "report", 3)]
    assert "(2 seeds) |" in markdown(results(study(), fewer, costs()))
    assert "seeds) |" not in markdown(results(study(), records(), costs()))


def test_a_size_with_fewer_seeds_is_whole_with_them():
    small = DOCUMENT["rungs"]["small"]
    long = {**small, "tuned": "small", "seeds": [1, 2], "tokens_per_parameter": 0.06}
    more = [record(name, "report", seed, 3.0 + seed / 10, rung="long", steps=300)
            for name in ("residual", "ddl") for seed in (1, 2)]  # fmt: skip
    found = results(study(rungs={"small": small, "long": long}), [*records(), *more], costs())
    assert [row.whole for row in found.rows if row.size == "long"] == [True, True]
    assert found.row("long", "ddl").difference("residual", "tokens").estimate.count == 2
    assert "- long: 0.06 tokens a parameter, seeds 1, 2.\n" in markdown(found)
    assert not found.unfinished
    assert "seeds 1, 2." not in markdown(results(study(), records(), costs()))


def test_a_row_with_a_run_that_diverged_has_no_mean_and_no_difference():
    changed = [{**r, "val_loss": None} if (r["scheme"], r["seed"]) == ("ddl", 2) else r for r in records()]
    found = results(study(), changed, costs())
    assert row_of(found).loss is None
    assert all(difference.estimate is None for difference in row_of(found).differences)
    assert "diverged" in markdown(found)


def test_schemes_of_a_size_share_one_noise_and_two_alone_have_that_of_their_differences():
    """Of two schemes it is the paired t, of three the residual of a model with scheme and seed."""
    more = [{**r, "val_loss": r["val_loss"] + 0.01 * (-1) ** r["seed"]} for r in copied("hc")]
    found = results(study(schemes={"residual": {}, "ddl": {}, "hc": {}}), records() + more, costs())
    losses = numpy.array([list(row.losses.values()) for row in found.rows])
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    noise = found.noise("small")
    assert (noise.freedom, noise.deviation) == (4, pytest.approx(math.sqrt((rest**2).sum() / 4)))
    for name in ("ddl", "hc"):
        estimate = row_of(found, name).difference("residual", "tokens").estimate
        assert (estimate.error, estimate.freedom) == (pytest.approx(noise.deviation * math.sqrt(2 / 3)), 4)
    assert f"a run varies by {noise.deviation:.4f}" in markdown(found)


def test_where_the_noise_is_each_schemes_own_the_test_is_welchs():
    rungs = {"small": {**DOCUMENT["rungs"]["small"], "noise": "own"}}
    found = results(study(rungs=rungs), records(), costs())
    ours, theirs = (list(row_of(found, name).losses.values()) for name in ("ddl", "residual"))
    difference = row_of(found).difference("residual", "tokens")
    test = ttest_ind(ours, theirs, equal_var=False)
    assert difference.p == pytest.approx(test.pvalue)
    low, high = test.confidence_interval()
    assert difference.estimate.half_width == pytest.approx((high - low) / 2)
    assert found.noise("small") is None
    assert "noise of its own 3 seeds (Welch's t)" in markdown(found)


def test_a_row_that_varies_far_more_than_the_others_has_a_noise_of_its_own():
    names = ["hc", "mhc", "krom"]
    wild = [
        {**r, "val_loss": r["val_loss"] + (2 if r["seed"] == 2 else 0)} if r["kind"] == "report" else r
        for r in copied("krom")
    ]
    wanted = study(schemes={name: {} for name in ("residual", "ddl", *names)})
    found = results(wanted, [*records(), *copied("hc"), *copied("mhc"), *wild], [])
    assert [row.scheme for row in found.rows if row.failed] == ["krom"]
    assert found.noise("small").freedom == 6
    assert row_of(found, "krom").difference("residual", "tokens").estimate.freedom == pytest.approx(2, abs=0.1)
    assert "`krom`: noise of its own (Welch's t)" in markdown(found)


def test_primary_contrasts_are_one_family_and_the_rest_is_not_corrected():
    schemes = {"residual": {}, "ddl": {}, "hc": {}}
    more = [{**r, "val_loss": r["val_loss"] - 0.001 * r["seed"]} for r in copied("hc")]
    named = {"small": [["ddl", "residual"], ["hc", "ddl"], ["mhc", "residual"]]}
    found = results(study(schemes=schemes, primary=named), records() + more, costs())
    assert [pair for _, *pair in found.corrected] == [["ddl", "residual"], ["hc", "ddl"]]
    lead = row_of(found).difference("residual", "tokens")
    assert lead.holm == pytest.approx(2 * lead.p)
    assert row_of(found).difference("residual", "seconds").holm is None
    assert row_of(found, "hc").difference("residual", "tokens").holm is None
    assert "2 primary contrasts at equal tokens" in markdown(found)
    assert f"| small | `ddl` − `residual` | -0.2000 ± {lead.estimate.half_width:.4f} |" in markdown(found)


def test_a_loss_is_worth_the_tokens_that_bring_the_baseline_to_it():
    row = row_of(results(study(), records(), costs()))
    worth = row.difference("residual", "tokens").worth
    share = 0.2 / 0.3
    assert worth == pytest.approx((1 - share * (1 - 1.5**-0.5)) ** -2)
    assert 1.29 < worth < 1.3  # of a straight line in the logarithm 1.31
    assert f"{worth:.2f} tokens, {worth / 1.5:.2f} speed" in markdown(results(study(), records(), costs()))
    for shift, expected, text in ((-0.2, math.inf, "> 1.5 tokens, > 1.00 speed"), (0.5, 0.0, "&lt; 0.9 tokens")):
        moved = [{**r, "val_loss": r["val_loss"] + shift} if r["scheme"] == "ddl" else r for r in records()]
        found = results(study(), moved, costs())
        assert row_of(found).difference("residual", "tokens").worth == expected
        assert text in markdown(found)


def test_runs_that_learned_to_copy_are_counted_with_their_steps():
    steps = {1: 40.0, 2: None, 3: 70.4}
    told = [{**r, "transition": steps[r["seed"]]} if r["kind"] == "report" and r["scheme"] == "ddl" else r
            for r in records()]  # fmt: skip
    found = results(study(), told, costs())
    assert row_of(found).transitions == [40.0, None, 70.4]
    assert "| 2 of 3, step 40 to 70 |" in markdown(found)
    assert "learned to copy" not in markdown(results(study(), records(), costs())).partition("## How")[0]


def test_records_of_a_name_that_now_means_another_connection_are_left_out():
    found = results(study(schemes={"residual": {}, "ddl": {"connection": "ddl:beta_init=0.5"}}), records(), costs())
    assert row_of(found) is None
    assert found.unfinished == ["ddl at small"]


def test_curves_of_differences_have_intervals():
    found = results(study(), records(), costs())
    (early, late) = found.curves(row_of(found))["residual"]
    assert early[:2] == (50, pytest.approx(0.2))
    assert late[:2] == (100, pytest.approx(-0.2))
    assert late[2] == pytest.approx(4.303 * 0.1 / math.sqrt(3))


def test_csv_and_page_say_the_same():
    found = results(study(), records(), costs())
    lines = list(csv.DictReader(io.StringIO(table(found))))
    (line,) = (line for line in lines if (line["scheme"], line["measure"]) == ("ddl", "tokens"))
    assert float(line["difference"]) == pytest.approx(-0.2)
    (shown,) = (row for row in payload(found)["rows"] if row["scheme"] == "ddl")
    assert shown["differences"][0]["difference"] == float(line["difference"])
    assert len(shown["runs"]) == 5


def test_a_name_of_a_scheme_or_a_size_is_no_markup():
    name = "`<img src=x> | a\nb`"
    renamed = [{**r, "scheme": name, "connection": name} if r["scheme"] == "ddl" else r for r in records()]
    renamed = [{**r, "rung": name} for r in renamed]
    rungs = {name: study().rungs["small"].keys}
    text = markdown(results(study(schemes={"residual": {}, name: {}}, rungs=rungs, title=name), renamed, costs()))
    assert "<img" not in text
    assert [line for line in text.splitlines() if line.startswith("b`")] == []
    assert "| `&lt;img src=x> \\| a b` |" in text


def test_the_best_finalist_is_reported_and_without_all_of_them_there_is_no_row():
    """A search that favours 0.008 in short runs, where 0.004 is better in full."""
    two = study(tuning={**DOCUMENT["tuning"], "length": 0.5, "finalists": 2})
    short = [record("ddl", "tune", 0, loss, steps=50, lr=lr) for lr, loss in ((4e-3, 5), (8e-3, 4))]
    finals = [record("ddl", "final", 0, loss, lr=lr) for lr, loss in ((4e-3, 3.8), (8e-3, 4.0))]
    reported = [record("ddl", "report", seed, loss, lr=lr) for seed in (1, 2, 3) for lr, loss in ((4e-3, 3), (8e-3, 4))]
    row = results(two, [*short, *finals, *reported], []).row("small", "ddl")
    assert (row.point, row.loss.mean, row.tuning_runs) == ({"train.lr": 4e-3}, 3, 2)
    assert [run["kind"] for run in row.runs] == ["tune"] * 2 + ["final"] * 2 + ["report"] * 3
    assert results(two, [*short, finals[1], *reported], []).row("small", "ddl") is None
    said = "The best 2 were trained in full with seed 0 to choose between them."
    assert said in markdown(results(two, [*short, *finals], []))


def test_finalists_are_compared_by_their_mean_over_the_seeds_that_judge():
    """The first of these seeds favours 0.008, all three of them 0.004."""
    judged = study(tuning={**DOCUMENT["tuning"], "length": 0.5, "finalists": 2, "final_seeds": [0, 11, 12]})
    short = [record("ddl", "tune", 0, loss, steps=50, lr=lr) for lr, loss in ((4e-3, 5), (8e-3, 4))]
    finals = [
        record("ddl", "final", seed, loss, lr=lr)
        for lr, losses in ((4e-3, (4.0, 3.6, 3.7)), (8e-3, (3.9, 3.9, 3.9)))
        for seed, loss in zip((0, 11, 12), losses)
    ]
    reported = [record("ddl", "report", seed, loss, lr=lr) for seed in (1, 2, 3) for lr, loss in ((4e-3, 3), (8e-3, 4))]
    found = results(judged, [*short, *finals, *reported], [])
    assert found.row("small", "ddl").point == {"train.lr": 4e-3}
    assert "with the seeds 0, 11, 12 to choose between them" in markdown(found)
    assert results(judged, [*short, *finals[:-1], *reported], []).row("small", "ddl") is None
    diverged = [record("ddl", "final", 0, None, lr=4e-3), *finals[1:]]
    assert results(judged, [*short, *diverged, *reported], []).row("small", "ddl").point == {"train.lr": 8e-3}


def searched_again():
    """A study whose large size searches the rate again, and records in which 0.004 and then 0.002 are best."""
    small = DOCUMENT["rungs"]["small"]
    over = {"train.lr": [0.004, 0.008]}
    one = study(rungs={"small": small, "large": {**small, "tuned": "small", "over": over}}, seeds=[1, 2])

    def runs(scheme, factor):
        point = {} if factor is None else {"train.connection_lr_factor": factor}
        made = [
            *(record(scheme, "tune", 0, abs(lr - 0.004), lr=lr) for lr in (0.004, 0.008, 0.002)),
            *(record(scheme, "tune", 0, lr, lr=lr, rung="large") for lr in (0.004, 0.008, 0.002)),
            *(record(scheme, "report", seed, 3.0, lr=0.004) for seed in (1, 2)),
            *(record(scheme, "report", seed, 2.0, lr=0.002, rung="large") for seed in (1, 2)),
        ]
        return [{**run, "point": {**run["point"], **point}} for run in made]

    return one, runs


def test_a_size_that_searches_again_has_the_point_of_its_own_search():
    wanted, runs = searched_again()
    found = results(wanted, [*runs("residual", None), *runs("ddl", 1.0)], [])
    row = found.row("large", "ddl")
    assert row.point == {"train.lr": 0.002, "train.connection_lr_factor": 1.0}
    assert row.tuning_runs == 6
    assert row.edges == ["train.lr"]
    assert "- large: the settings of small, but train.lr 0.004/0.008, searched again in full length." in markdown(found)


def test_a_search_that_started_elsewhere_makes_no_row():
    wanted, runs = searched_again()
    mixed = [{**run, "point": {**run["point"], "train.connection_lr_factor": 4.0}} for run in runs("ddl", 1.0)]
    large = [run for run in mixed if run["rung"] == "large"]
    small = [run for run in runs("ddl", 1.0) if run["rung"] == "small"]
    found = results(wanted, [*runs("residual", None), *small, *large], [])
    assert found.row("small", "ddl")
    assert found.row("large", "ddl") is None


def test_the_picture_has_the_rows_of_each_size_under_its_name():
    small = DOCUMENT["rungs"]["small"]
    two = study(rungs={"small": small, "large": {**small, "tuned": "small", "model.hidden_size": 32}})
    again = [{**one, "rung": "large", "key": one["key"].replace("small", "large")} for one in records()]
    for found, expected in (
        (results(two, [*records(), *again], costs()), ["small", "ddl", "large", "ddl"]),
        (results(two, records(), costs()), ["ddl"]),
    ):
        (panel,) = draw(found).axes
        assert [label.get_text() for label in reversed(panel.get_yticklabels())] == expected
        marks, hollow = (tuple(line.get_ydata()) for line in panel.lines if line.get_marker() == "o")
        assert marks == hollow  # none of them is clear of zero
        assert len(marks) == expected.count("ddl")
        assert all(expected[::-1][round(place)] == "ddl" for place in marks)


def test_what_is_clear_of_zero_is_filled():
    mine = ("ddl", "report")
    far = [{**r, "val_loss": 0.0, "curve": []} if (r["scheme"], r["kind"]) == mine else r for r in records()]
    found = results(study(primary={"small": [["ddl", "residual"]]}), far, costs())
    assert found.row("small", "ddl").difference("residual", "tokens").clear
    (panel,) = draw(found).axes
    marks, *hollow = (tuple(line.get_ydata()) for line in panel.lines if line.get_marker() == "o")
    assert (len(marks), hollow) == (1, [()])


def test_a_run_on_other_data_is_refused(tmp_path):
    runs = [{**row, "facts": {**row["facts"], "data": {"fingerprint": "e" * 64}}} for row in records()]
    with pytest.raises(InputError, match=r"must be of the data ffff.*, got 'eeee"):
        read_results(folder(tmp_path / "study", runs))


def test_nothing_finished_and_one_seed_are_no_errors(tmp_path):
    assert "Not finished" in markdown(read_results(folder(tmp_path / "none", [], [])))
    first = [row for row in records() if row["seed"] < 2]
    assert "(one seed)" in markdown(read_results(folder(tmp_path / "one", first)))
