"""What a study is asked, it answers from its records: with an interval, a verdict, or what it waits for."""

import pytest

from residua.connections import PRESETS
from residua.connections.options import named
from residua.errors import InputError
from residua.lab.study.definition import load_study
from residua.lab.study.report import markdown, payload
from residua.lab.study.results import results
from support.planted_study import DOCUMENT, copied, cost, costs, record, records, study

ASKED = {"gain": {"ask": "Is `ddl` ahead?", "compare": [["ddl", "residual"]], "at": ["tokens", "seconds"]}}


def asked(**changes):
    return study(questions={"gain": {**ASKED["gain"], **changes}})


def test_an_answer_is_the_paired_difference_with_its_interval():
    tokens, seconds = results(asked(), records(), costs()).answers
    assert (tokens.scheme, tokens.to, tokens.measure, tokens.waiting) == ("ddl", "residual", "tokens", [])
    assert tokens.difference.estimate.mean == pytest.approx(-0.2)
    assert seconds.difference.estimate.mean == pytest.approx(0.1)
    assert tokens.difference.holm is None


def shifted(ahead):
    """The records with ddl ahead by nearly the same in every seed."""
    mine = [r for r in records() if (r["scheme"], r["kind"]) == ("ddl", "report")]
    return [
        *(r for r in records() if r not in mine),
        *({**r, "val_loss": 4 + 0.01 * r["seed"] - ahead - 1e-4 * r["seed"]} for r in mine),
    ]


@pytest.mark.parametrize("ahead", [0.1, -0.1])
def test_a_difference_clear_of_zero_is_bold(ahead):
    named = study(questions=ASKED, primary={"small": [["ddl", "residual"]]})
    found = results(named, shifted(ahead), costs())
    answer = found.answers[0]
    assert answer.difference.clear
    assert (answer.difference.estimate.mean < 0) == (ahead > 0)
    assert f"| tokens | **{answer.difference.estimate.mean:+.4f} ± " in markdown(found)


def test_a_primary_contrast_has_its_interval_over_documents_if_all_reported_runs_have_losses_by_document():
    named = study(questions=ASKED, primary={"small": [["ddl", "residual"]]})
    text = {"ddl": [10.0, 30.0, 21.0], "residual": [11.0, 30.0, 24.0]}
    told = [
        {**r, "further_documents": {"labels": [10, 20, 20], "nats": text[r["scheme"]]}} if r["kind"] == "report" else r
        for r in records()
    ]
    found = results(named, told, costs())
    (difference,) = found.corrected.values()
    assert difference.documents["further_"].mean == pytest.approx(-4 / 50)
    assert "| second text, over documents" in markdown(found)
    assert f"{-4 / 50:+.4f} ± " in markdown(found)
    last = next(r for r in reversed(told) if r["kind"] == "report")
    fewer = [{**r, "further_documents": None} if r is last else r for r in told]
    assert "second text" not in markdown(results(named, fewer, costs()))
    other = {**last["further_documents"], "labels": [20, 10, 20]}  # of a text that was prepared again
    mixed = [{**r, "further_documents": other} if r is last else r for r in told]
    assert "second text" not in markdown(results(named, mixed, costs()))


def test_an_interval_clear_of_zero_only_before_the_correction_is_not_bold():
    schemes = {name: {} for name in ("residual", "ddl", "hc", "mhc")}
    named = {"small": [["ddl", "residual"], ["hc", "residual"], ["hc", "ddl"]]}
    near = [
        {**r, "val_loss": r["val_loss"] + 0.1} if r["kind"] == "report" and r["scheme"] != "residual" else r
        for r in [*records(), *copied("hc"), *copied("mhc")]
    ]
    found = results(study(schemes=schemes, questions=ASKED, primary=named), near, costs())
    answer = found.answers[0]
    assert answer.difference.p < 0.05 < answer.difference.holm
    assert "| tokens | -0.1000 ± " in markdown(found)


def test_two_schemes_that_are_no_baselines_are_compared():
    more = copied("hc")
    more = [{**r, "val_loss": r["val_loss"] + 0.1} for r in more]
    both = study(
        schemes={"residual": {}, "ddl": {}, "hc": {}},
        questions={"pair": {"ask": "Which?", "compare": [["hc", "ddl"]]}},
    )
    (answer,) = results(both, records() + more, []).answers
    assert answer.difference.estimate.mean == pytest.approx(0.1)


def test_without_all_seeds_or_longer_runs_there_is_no_answer_and_the_reason_is_said():
    some = [r for r in records() if (r["scheme"], r["seed"]) != ("ddl", 3)]
    for answer in results(asked(), some, costs()).answers:
        assert (answer.difference, answer.waiting) == (None, ["ddl"])
    assert "\n\nWaiting for `ddl`.\n" in markdown(results(asked(), some, costs()))
    for known in ([], [cost("residual", 1.0, 1000.0), cost("ddl", 1.7, 1000.0)]):
        tokens, seconds = results(asked(), records(), known).answers
        assert tokens.difference is not None
        assert seconds.difference is None
        assert seconds.missing
    text = markdown(results(asked(), records(), known))
    assert "No comparison: residual has no runs 1.70 times as long as ddl" in text
    assert text.count("\n| `ddl` − `residual` | ") == 1


def test_a_column_for_a_size_that_has_an_answer_and_what_it_waits_for():
    small = DOCUMENT["rungs"]["small"]
    sizes = {"small": small, **{name: {**small, "tuned": "small"} for name in ("wide", "deep")}}
    pair = {"gain": {"ask": "Is it?", "compare": [["ddl", "residual"]]}}
    pair["more"] = {"ask": "And?", "compare": [["ddl", "residual"], ["hc", "residual"]]}
    pair["none"] = {"ask": "Or?", "compare": [["hc", "residual"]]}
    schemes = {"residual": {}, "ddl": {}, "hc": {}}
    plain = [one for one in records() if one["scheme"] == "residual" and one["kind"] == "report"]
    elsewhere = [{**one, "rung": rung, "key": f"{rung} {one['seed']}"} for rung in sizes for one in plain]
    there = [one for one in elsewhere if one["rung"] == "wide" or (one["rung"] == "deep" and one["seed"] == 1)]
    asked = study(rungs=sizes, questions=pair, schemes=schemes)
    text = markdown(results(asked, [*records(), *there], costs())).partition("## Questions")[2].partition("\n## ")[0]
    first, second, third = text.split("### ")[1:]
    assert "| comparison, at equal tokens | small |\n" in first
    assert "\n| `ddl` − `residual` | -0.2000 ± 0.2484; would see 0.3" in first
    assert "Waiting" not in first
    assert "Waiting for `hc` at small." in second
    assert third.strip() == "Or?\n\nWaiting for `hc`."
    assert "wide" not in text
    assert "deep" not in text
    whole = [{**one, "rung": "wide", "key": f"wide {one['scheme']} {one['seed']}"} for one in records()]
    whole = [one for one in whole if one["kind"] == "report"]
    text = markdown(results(asked, [*records(), *whole], costs()))
    assert "| comparison, at equal tokens | small | wide |\n" in text
    assert "\n\nWaiting for `hc`.\n" in text


def test_a_question_with_further_seeds_is_answered_by_all_of_them_and_rows_are_not():
    further = study(questions={"gain": {"ask": "Is it?", "compare": [["ddl", "residual"]], "seeds": [4, 5]}})
    more = [record(name, "report", seed, loss) for name, loss in (("residual", 4.0), ("ddl", 3.0)) for seed in (4, 5)]
    for there, count, mean in ((more[:3], 3, -0.2), (more, 5, -0.52)):
        found = results(further, records() + there, costs())
        (answer,) = found.answers
        assert (answer.difference.estimate.count, answer.difference.estimate.mean) == (count, pytest.approx(mean))
        assert (f" ({count} seeds)" in markdown(found)) == (count != 3)
        row = found.row("small", "ddl")
        assert row.loss == results(study(), records(), costs()).row("small", "ddl").loss
        assert row.difference("residual", "tokens").estimate.count == 3
        (shown,) = (one for one in payload(found)["rows"] if one["scheme"] == "ddl")  # every run behind an answer
        assert [run["seed"] for run in shown["runs"] if run["kind"] == "further"] == [r["seed"] for r in there[2:]]
    diverged = [{**one, "val_loss": None} if one is more[3] else one for one in more]
    (answer,) = results(further, records() + diverged, costs()).answers
    assert (answer.difference, bool(answer.missing)) == (None, True)


def test_a_question_at_equal_compiled_seconds_waits_until_these_are_measured():
    wanted = asked(at=["compiled seconds"])
    (answer,) = results(wanted, records(), costs()).answers
    assert (answer.difference, answer.waiting) == (None, [])
    told = markdown(results(wanted, records(), costs()))
    assert "No comparison: compiled steps of ddl and residual were not timed in the same rounds" in told
    timed = [cost("residual", 1.0, 1.0, compiled=True), cost("ddl", 1.5, 1.0, compiled=True)]
    (answer,) = results(wanted, records(), timed).answers
    assert answer.difference.estimate.mean == pytest.approx(0.1)


def test_the_page_says_what_the_report_says():
    found = results(asked(), records(), costs())
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
        ({"seeds": [3], "at": ["tokens"]}, "questions.gain.seeds must be others than the study's and those that tune"),
        ({"answer": 5}, "unknown key questions.gain.answer"),
    ],
)
def test_a_wrong_question_is_refused(change, said):
    with pytest.raises(InputError) as refusal:
        asked(**change)
    assert said in str(refusal.value)


def test_a_file_whose_questions_name_no_scheme_is_refused(tmp_path):
    text = (
        "title: t\nrungs: {a: {}}\nschemes: {residual: {}}\n"
        "tuning: {over: {train.lr: [0.1]}, runs: 1, baseline_runs: 1}\n"
        "questions: {q: {ask: who, compare: [[residul, residual]]}}\n"
    )
    (tmp_path / "study.yaml").write_text(text)
    with pytest.raises(
        InputError, match=r"questions.q.compare must be some of residual, got 'residul'; did you mean residual"
    ):
        load_study(str(tmp_path / "study.yaml"))


def test_questions_stay_when_their_schemes_are_left_out():
    whole = load_study("resbench")
    assert whole.only(["ddl"]).questions == whole.questions


def test_every_causal_preset_stands_in_resbench():
    there = {named(entry.connection)[0] for entry in load_study("resbench").schemes.values()}
    assert {name for name, scheme in PRESETS.items() if scheme.causal} <= there
