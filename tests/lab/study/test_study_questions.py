"""A study answers its questions from its records: with an interval, or with the runs that are missing."""

import pytest

from residua.connections import PRESETS
from residua.connections.parts.options import named
from residua.errors import InputError
from residua.lab.study.definition import load_study
from residua.lab.study.report import markdown, payload
from support.planted_study import DOCUMENT, changed, copied, cost, planted, record, records, without

ASKED = {"gain": {"ask": "Is `ddl` ahead?", "compare": [["ddl", "residual"]], "at": ["tokens", "seconds"]}}


def asked(runs=None, timed=None, **changes):
    return planted(runs, timed, questions={"gain": {**ASKED["gain"], **changes}})


def test_an_answer_is_the_paired_difference_with_its_interval():
    tokens, seconds = asked().answers
    assert (tokens.scheme, tokens.to, tokens.measure, tokens.waiting) == ("ddl", "residual", "tokens", [])
    assert tokens.difference.estimate.mean == pytest.approx(-0.2)
    assert seconds.difference.estimate.mean == pytest.approx(0.1)
    assert tokens.difference.holm is None


@pytest.mark.parametrize("ahead", [0.1, -0.1])
def test_a_difference_whose_interval_excludes_zero_is_bold(ahead):
    near = changed(records(), lambda row: {"val_loss": 4 + 0.0099 * row["seed"] - ahead}, scheme="ddl", kind="report")
    found = planted(near, questions=ASKED, primary={"small": [["ddl", "residual"]]})
    answer = found.answers[0]
    assert answer.difference.clear
    assert (answer.difference.estimate.mean < 0) == (ahead > 0)
    assert f"| tokens | **{answer.difference.estimate.mean:+.4f} ± " in markdown(found)


def test_a_primary_contrast_has_its_interval_over_documents_if_all_reported_runs_have_losses_by_document():
    named = {"questions": ASKED, "primary": {"small": [["ddl", "residual"]]}}
    nats = {"ddl": [10.0, 30.0, 21.0], "residual": [11.0, 30.0, 24.0]}

    def documents(row):
        return {"further_documents": {"labels": [10, 20, 20], "nats": nats[row["scheme"]]}}

    runs = changed(records(), documents, kind="report")
    found = planted(runs, **named)
    (difference,) = found.corrected.values()
    assert difference.documents["further_"].mean == pytest.approx(-4 / 50)
    assert "| second text, over documents" in markdown(found)
    assert payload(found)["primary_note"] in markdown(found)
    assert f"{-4 / 50:+.4f} ± " in markdown(found)
    again = {"labels": [20, 10, 20], "nats": nats["ddl"]}  # of a text that was prepared again
    for last in (None, again):
        others = changed(runs, lambda row, last=last: {"further_documents": last}, scheme="ddl", kind="report", seed=3)
        assert "second text" not in markdown(planted(others, **named))
        assert payload(planted(others, **named))["primary_note"] is None


def test_an_interval_that_excludes_zero_only_before_the_correction_is_not_bold():
    schemes = {name: {} for name in ("residual", "ddl", "hc", "mhc")}
    named = {"small": [["ddl", "residual"], ["hc", "residual"], ["hc", "ddl"]]}
    near = [*records(), *copied("hc"), *copied("mhc")]
    for name in ("ddl", "hc", "mhc"):
        near = changed(near, lambda row: {"val_loss": row["val_loss"] + 0.1}, scheme=name, kind="report")
    found = planted(near, schemes=schemes, questions=ASKED, primary=named)
    answer = found.answers[0]
    assert answer.difference.p < 0.05 < answer.difference.holm
    assert "| tokens | -0.1000 ± " in markdown(found)


def test_two_schemes_that_are_not_baselines_are_compared():
    more = changed(copied("hc"), lambda row: {"val_loss": row["val_loss"] + 0.1})
    pair = {"pair": {"ask": "Which?", "compare": [["hc", "ddl"]]}}
    (answer,) = planted(records() + more, [], schemes={"residual": {}, "ddl": {}, "hc": {}}, questions=pair).answers
    assert answer.difference.estimate.mean == pytest.approx(0.1)


def test_a_question_without_all_of_its_runs_shows_the_reason_in_place_of_an_answer():
    found = asked(without(records(), scheme="ddl", seed=3))
    assert [(answer.difference, answer.waiting) for answer in found.answers] == [(None, ["ddl"])] * 2
    assert "\n\nWaiting for `ddl`.\n" in markdown(found)
    name, pair = "a{0}{b}", {"gain": {"ask": "Who?", "compare": [["a{0}{b}", "residual"]]}}
    assert "\n\nWaiting for `a{0}{b}`.\n" in markdown(planted(schemes={"residual": {}, name: {}}, questions=pair))
    for known in ([], [cost("residual", 1.0, 1000.0), cost("ddl", 1.7, 1000.0)]):
        found = asked(timed=known)
        tokens, seconds = found.answers
        assert tokens.difference is not None
        assert seconds.difference is None
        assert seconds.missing
    assert "No comparison: residual has no runs 1.70 times as long as ddl" in markdown(found)
    assert markdown(found).count("\n| `ddl` − `residual` | ") == 1


def test_each_size_with_an_answer_has_a_column_and_the_others_are_named():
    small = DOCUMENT["sizes"]["small"]
    pair, other = ["ddl", "residual"], ["hc", "residual"]
    study = {
        "sizes": {"small": small, **{name: {**small, "tuned": "small"} for name in ("wide", "deep")}},
        "questions": {
            "gain": {"ask": "Is it?", "compare": [pair]},
            "more": {"ask": "And?", "compare": [pair, other]},
            "none": {"ask": "Or?", "compare": [other]},
        },
        "schemes": {"residual": {}, "ddl": {}, "hc": {}},
    }

    def elsewhere(size, **where):
        rows = [row for row in records() if row["kind"] == "report" and where.items() <= row.items()]
        return [{**row, "size": size, "key": f"{size} {row['scheme']} {row['seed']}"} for row in rows]

    started = [*elsewhere("wide", scheme="residual"), *elsewhere("deep", scheme="residual", seed=1)]
    text = markdown(planted([*records(), *started], **study)).partition("## Questions")[2].partition("\n## ")[0]
    first, second, third = text.split("### ")[1:]
    assert "| comparison, at equal tokens | small |\n" in first
    assert "\n| `ddl` − `residual` | -0.2000 ± 0.2484; would see 0.3" in first
    assert "Waiting" not in first
    assert "Waiting for `hc` at small." in second
    assert third.strip() == "Or?\n\nWaiting for `hc`."
    assert "wide" not in text
    assert "deep" not in text
    text = markdown(planted([*records(), *elsewhere("wide")], **study))
    assert "| comparison, at equal tokens | small | wide |\n" in text
    assert "\n\nWaiting for `hc`.\n" in text


def test_a_question_with_further_seeds_is_answered_by_all_of_them_and_rows_are_not():
    further = {"at": ["tokens"], "seeds": [4, 5]}
    more = [record(name, "report", seed, loss) for name, loss in (("residual", 4.0), ("ddl", 3.0)) for seed in (4, 5)]
    for some, count, mean in ((more[:3], 3, -0.2), (more, 5, -0.52)):
        found = asked(records() + some, **further)
        (answer,) = found.answers
        assert (answer.difference.estimate.count, answer.difference.estimate.mean) == (count, pytest.approx(mean))
        assert (f" ({count} seeds)" in markdown(found)) == (count != 3)
        row = found.row("small", "ddl")
        assert row.loss == planted().row("small", "ddl").loss
        assert row.difference("residual", "tokens").estimate.count == 3
        (shown,) = (one for one in payload(found)["rows"] if one["scheme"] == "ddl")  # every run behind an answer
        assert [run["seed"] for run in shown["runs"] if run["kind"] == "further"] == [r["seed"] for r in some[2:]]
    diverged = changed(records() + more, lambda row: {"val_loss": None}, scheme="ddl", seed=5)
    (answer,) = asked(diverged, **further).answers
    assert (answer.difference, bool(answer.missing)) == (None, True)


def test_a_primary_contrast_has_the_further_seeds_of_a_question_in_either_order():
    more = [record(name, "report", seed, loss) for name, loss in (("residual", 4.0), ("ddl", 3.0)) for seed in (4, 5)]
    questions = {"gain": {"ask": "How much?", "compare": [["ddl", "residual"]], "seeds": [4, 5]}}
    for pair, mean in ((["ddl", "residual"], -0.52), (["residual", "ddl"], 0.52)):
        found = planted(records() + more, questions=questions, primary={"small": [pair]})
        (difference,), (answer,) = found.corrected.values(), found.answers
        assert (difference.scheme, difference.estimate.count) == (pair[0], 5)
        assert difference.estimate.mean == pytest.approx(mean)
        assert difference.holm == answer.difference.holm == answer.difference.p
    again = {"again": {**questions["gain"], "seeds": []}}
    for asked_twice in (questions | again, again | questions):
        found = planted(records() + more, questions=asked_twice, primary={"small": [["ddl", "residual"]]})
        assert [each.estimate.count for each in found.corrected.values()] == [5]


def test_a_question_at_equal_compiled_seconds_waits_until_these_are_measured():
    found = asked(at=["compiled seconds"])
    (answer,) = found.answers
    assert (answer.difference, answer.waiting) == (None, [])
    assert "No comparison: compiled steps of ddl and residual were not timed in the same rounds" in markdown(found)
    timed = [cost("residual", 1.0, 1.0, compiled=True), cost("ddl", 1.5, 1.0, compiled=True)]
    (answer,) = asked(timed=timed, at=["compiled seconds"]).answers
    assert answer.difference.estimate.mean == pytest.approx(0.1)


def test_the_page_agrees_with_the_report():
    found = asked()
    (shown,) = payload(found)["questions"]
    assert shown["ask"] == "Is `ddl` ahead?"
    header, rows = shown["table"]
    assert header == ["comparison", "at equal", "small"]
    assert [cells[1] for cells in rows] == ["tokens", "seconds"]
    for cells in rows:
        assert f"| {' | '.join(cells)} |" in markdown(found)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"compare": []}, "questions.gain.compare must be at least one pair of schemes"),
        ({"compare": [["ddl"]]}, "questions.gain.compare must be a list, each item a list of 2 items"),
        ({"at": ["flops"]}, "questions.gain.at must be a list, each item one of tokens, FLOPs, seconds"),
        ({"compare": [["residual", "ddl"]]}, "questions.gain.at must be tokens, as ddl is not a baseline"),
        ({"ask": 5}, "questions.gain.ask must be text"),
        ({"seeds": [4, 4]}, "questions.gain.seeds must be different integers"),
        ({"seeds": [4]}, "questions.gain.at must be tokens, as longer runs of the baselines have no further seeds"),
        (
            {"seeds": [3], "at": ["tokens"]},
            "questions.gain.seeds must be different from the study's and those that tune",
        ),
        ({"answer": 5}, "unknown key questions.gain.answer"),
    ],
)
def test_a_wrong_question_is_refused(change, said):
    with pytest.raises(InputError) as refusal:
        asked(**change)
    assert said in str(refusal.value)


def test_a_file_whose_questions_name_no_scheme_is_refused(tmp_path):
    text = (
        "title: t\nsizes: {a: {}}\nschemes: {residual: {}}\n"
        "tuning: {over: {train.lr: [0.1]}, runs: 1, baseline_runs: 1}\n"
        "questions: {q: {ask: who, compare: [[residul, residual]]}}\n"
    )
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(InputError, match=r"questions\.q\.compare must be .*, got 'residul'; did you mean residual"):
        load_study(str(tmp_path / "study.yaml"))


def test_questions_are_kept_if_their_schemes_are_left_out():
    whole = load_study("resbench")
    assert whole.only(["ddl"]).questions == whole.questions


def test_every_causal_preset_is_part_of_resbench():
    there = {named(entry.connection)[0] for entry in load_study("resbench").schemes.values()}
    assert {name for name, scheme in PRESETS.items() if scheme.causal} <= there
