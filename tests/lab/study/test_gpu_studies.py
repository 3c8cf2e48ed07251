"""The studies for a GPU can be planned, and take the time that the pages say."""

import pytest

from residua.lab.data import PreparedData
from residua.lab.study.definition import load_study
from residua.lab.study.engine import forecast
from residua.lab.study.plan import Plan
from support.pages import EXPERIMENTS, RESBENCH, records


@pytest.fixture
def planned(monkeypatch):
    """A function that plans a study on data with a vocabulary and so many tokens, in place of data on disk."""

    def plan(name, vocabulary, tokens, schemes=None, sizes=None):
        facts = records("main/records.jsonl", RESBENCH / "records")[0]["facts"]["data"]
        data = PreparedData(EXPERIMENTS, vocabulary, 0, "", facts, range(tokens), range(10**5), 1)
        monkeypatch.setattr(PreparedData, "open", lambda folder: data)
        return Plan(load_study(str(RESBENCH / name)).only(schemes), "data", sizes)

    return plan


@pytest.mark.slow
def test_the_study_of_ten_million_parameters_is_planned_for_25_minutes(planned):
    tokens = records("main/records.jsonl", RESBENCH / "records")[0]["facts"]["data"]["train_tokens"]
    plan = planned("gpu.yaml", 2048, tokens)
    (size,) = forecast(plan, 100e12)
    assert 15 < 60 * size.hours < 25
    assert (size.runs, size.schemes) == (9 + 9, 3)
    config = plan.config("10M", "residual")
    assert config.train.sequence_length == config.model.max_position_embeddings == 1024
    assert 10e6 < size.tokens / plan.study.tokens_per_parameter < 11e6
    assert size.tokens > tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schemes"),
    [("gpu-rates.yaml", ["residual"]), ("gpu-write-only.yaml", ["residual", "ddl-tc-write-only"])],
)
def test_a_study_at_one_rate_has_the_runs_of_the_first_study_at_that_rate(planned, name, schemes):
    tokens = records("main/records.jsonl", RESBENCH / "records")[0]["facts"]["data"]["train_tokens"]
    first, study = (planned(each, 2048, tokens) for each in ("gpu.yaml", name))
    reported = {run.key for scheme in schemes for run in first.reported("10M", scheme, {"train.lr": 0.008})}
    searched = {run.key: {"val_loss": 4.0} for run in study.runs({})}
    runs = {run.key for run in study.runs(searched) if run.kind == "report"}
    assert runs == reported
    assert len(runs) == 3 * len(schemes)


@pytest.mark.nightly
def test_the_larger_study_is_planned_for_a_day(planned):
    small, rest = (
        planned("gpu-day.yaml", 50257, 10**9 * 9, schemes, [size])
        for schemes, size in ((None, "20M"), (["residual+tc", "ddl-tc-write-only"], "125M"))
    )
    sizes = *forecast(small, 150e12), [*forecast(rest, 150e12)][-1]
    assert [size.size for size in sizes] == ["20M", "125M"]
    assert 20 < sum(size.hours for size in sizes) < 24
    assert [size.runs for size in sizes] == [12 + 8, 9]
    totals = [size.tokens / per for size, per in zip(sizes, (20, 10))]
    assert totals == pytest.approx([40e6, 124e6], rel=0.02)


@pytest.mark.slow
def test_the_study_of_one_million_parameters_is_planned(planned):
    plan = planned("1M.yaml", 2048, 72 * 10**6)
    (size,) = forecast(plan, 50e9)
    assert (size.runs, size.schemes) == (18 + 18, 6)
    config = plan.config("1M", "ddl-tc")
    assert config.train.document_masks
    assert config.train.sequence_length == config.model.max_position_embeddings == 512
    assert not {*plan.study.seeds} & {*range(13), *range(201, 206), 301, 302, 303}, "seeds that no run had"
    assert 1.0e6 < size.tokens / 20 < 1.1e6


@pytest.mark.nightly
def test_rivals_and_rates_have_the_recipe_and_the_steps_of_one_million_parameters(planned):
    first, rivals, rates = (planned(name, 2048, 72 * 10**6) for name in ("1M.yaml", "rivals-1M.yaml", "rates-1M.yaml"))
    assert first.steps == rivals.steps == rates.steps
    (size,) = forecast(rivals, 50e9)
    assert (size.runs, size.schemes) == (9 * 3 * 3 + 3, 9)
    order = list(dict.fromkeys(run.scheme for run in rivals.runs(Every())))
    assert order[:4] == ["lambdas+smear", "mhc", "hc", "attnres-block"]
    assert {frozenset(pair) for pair in rivals.study.primary["1M"]} == {
        frozenset((name, "lambdas+smear")) for name in order[1:]
    }
    begun = {row["key"]: row for row in records("rates-1M/records.jsonl", RESBENCH / "records")}
    assert begun.keys() <= {run.key for run in rates.runs(begun)}
    assert {run.key for run in first.reported("1M", "lambdas", {"train.lr": 0.008})} <= begun.keys()


@pytest.mark.nightly
def test_steps_at_one_million_parameters_are_timed_as_they_were_trained(planned):
    files = "steps-1M.yaml", "1M.yaml", "rivals-1M.yaml"
    timed, *trained = (planned(name, 2048, 72 * 10**6) for name in files)
    pairs = [(plan, name) for plan in trained for name in plan.schemes_at("1M")]
    assert {name for _, name in pairs} == {*timed.schemes_at("1M")}
    for plan, name in pairs:
        ours, theirs = (each.config("1M", name) for each in (timed, plan))
        assert ours.model == theirs.model
        for key in ("batch_size", "sequence_length", "document_masks", "compile", "optimizer", "precision"):
            assert getattr(ours.train, key) == getattr(theirs.train, key)


class Every(dict):
    """Records of whatever run is asked for, of which the rate 0.008 is the best."""

    def __contains__(self, key):
        return True

    def get(self, key):
        return {"key": key, "steps": 1, "val_loss": 4.0, "split": [[1, 3.0, 4.0]]}
