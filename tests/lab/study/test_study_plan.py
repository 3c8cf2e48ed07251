"""What a study trains: within its budget, with seeds apart, and only what its file asks for."""

import math
import re
import shutil

import pytest

from residua.connections import Residual, register, registry, resolve
from residua.errors import InputError
from residua.files.reading import write_yaml
from residua.lab.cost.counts import parameters
from residua.lab.study.definition import load_study
from residua.lab.study.engine import expect_same_settings, jobs
from residua.lab.study.plan import Plan
from residua.models import ResiduaConfig
from support.planted_study import DOCUMENT, SMALLEST, studies_of_the_page, study


def walked(plan, loss):
    """All runs of a study in which `loss(run)` is what a run comes to, in the order in which they can begin."""
    finished, order = {}, []
    while new := [run for run in plan.runs(finished) if run.key not in finished]:
        order.append(new[0])
        value, steps = loss(new[0]), new[0].config.train.steps
        finished[new[0].key] = {"val_loss": value, "steps": steps, "split": [[steps, value, value]]}
    return order


def by_rate(best):
    return lambda run: abs(math.log(run.config.train.lr / best)) + abs(math.log(run.config.train.connection_lr_factor))


def of(runs, scheme, kind):
    return [run for run in runs if (run.scheme, run.kind) == (scheme, kind)]


@pytest.mark.slow
def test_each_scheme_is_tuned_within_its_budget_and_the_baseline_has_the_largest(data):
    tuning = {**DOCUMENT["tuning"], "runs": 3, "baseline_runs": 5}
    runs = walked(Plan(study(tuning=tuning), data), by_rate(0.064))
    assert [run.config.train.lr for run in of(runs, "residual", "tune")] == [0.004, 0.008, 0.016, 0.032, 0.064]
    assert len(of(runs, "ddl", "tune")) == 3
    assert {run.config.train.lr for run in of(runs, "residual", "report")} == {0.064}


ALL_SEEDS = {"rule": "all seeds", "over": {"train.lr": [0.004, 0.008]}, "runs": 3, "baseline_runs": 3}


def test_all_seeds_of_every_point_choose_by_labels_that_do_not_repeat(data):
    """Whichever run copies: the rate with the lowest loss is another. No further runs are made of the best point."""

    def loss(run):
        copies = run.config.train.lr == 0.004 and run.config.train.seed == 2
        return {"val_loss": 1.0 if copies else 4.0, "split": [[run.config.train.steps, 1.0, by_rate(0.016)(run)]]}

    plan, finished = Plan(study(tuning=ALL_SEEDS), data), {}
    while new := [run for run in plan.runs(finished) if run.key not in finished]:
        finished[new[0].key] = {"key": new[0].key, "steps": new[0].config.train.steps, **loss(new[0])}
    runs = [*plan.runs(finished)]
    assert len(runs) == len({run.key for run in runs}) == plan.most
    assert [(run.point["train.lr"], run.config.train.seed) for run in of(runs, "ddl", "report")] == [
        (rate, seed) for rate in (0.004, 0.008, 0.016) for seed in (1, 2, 3)
    ]
    assert plan.chosen("small", "ddl", finished) == {"train.lr": 0.016}
    assert {run.point["train.lr"] for run in runs if run.kind == "longer"} == {0.016}
    assert not [run for run in runs if run.kind in ("tune", "final")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 0.5}, "length must be 1 with rule: all seeds, got 0.5"),
        ({"final_seeds": [7]}, "final_seeds must be empty with rule: all seeds"),
        ({"rule": "two seeds"}, "rule must be"),
    ],
)
def test_settings_that_a_rule_cannot_use_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        study(tuning={**ALL_SEEDS, **changes})


def test_a_scheme_with_parameters_of_its_own_has_their_rate_tuned(data):
    runs = walked(Plan(study(tuning={**DOCUMENT["tuning"], "runs": 6, "baseline_runs": 6}), data), by_rate(0.004))
    assert {run.config.train.connection_lr_factor for run in of(runs, "ddl", "tune")} == {0.5, 1.0, 2.0}
    assert all("train.connection_lr_factor" not in run.point for run in of(runs, "residual", "tune"))


@pytest.mark.slow
def test_no_seed_used_for_tuning_is_reported_and_only_baselines_are_trained_longer(data):
    plan = Plan(study(), data)
    runs = walked(plan, by_rate(0.008))
    assert {run.config.train.seed for run in runs if run.kind == "tune"} == {0}
    for scheme in ("residual", "ddl"):
        assert [run.config.train.seed for run in of(runs, scheme, "report")] == [1, 2, 3]
    assert [run.config.train.steps for run in of(runs, "residual", "longer")] == [round(1.5 * plan.steps["small"])] * 3
    assert not of(runs, "ddl", "longer")
    assert len(runs) <= plan.most
    assert sum(run.config.train.steps for run in runs) == sum(part.runs * part.steps for part in plan.at_most())
    sizes = {"small": {**DOCUMENT["sizes"]["small"], "longer": []}}
    assert not of(walked(Plan(study(sizes=sizes), data), by_rate(0.008)), "residual", "longer")


def test_losses_that_are_not_measured_alike_are_refused(data):
    masked = {**DOCUMENT["schemes"], "ddl": {"connection": "ddl", "train.document_masks": True}}
    with pytest.raises(InputError, match=r"schemes\.ddl .*document masks"):
        Plan(study(schemes=masked), data)
    Plan(study(set={**DOCUMENT["set"], "train.document_masks": True}), data)
    over = {"train.lr": [0.004], "train.sequence_length": [8, 16]}
    with pytest.raises(InputError, match=r"tuning\.over .*train\.sequence_length"):
        Plan(study(tuning={**DOCUMENT["tuning"], "over": over, "runs": 2, "baseline_runs": 2}), data)


def test_runs_with_other_tokens_in_a_step_are_refused(data):
    """All runs of a size have equal steps, which are equal tokens only if the steps are equal."""
    wide = {**DOCUMENT["schemes"], "wide": {"connection": "residual", "train.batch_size": 8}}
    with pytest.raises(InputError, match=r"schemes\.wide: the tokens of a step at small must be 32, .* got 128"):
        Plan(study(schemes=wide), data)
    split = {"connection": "residual", "train.batch_size": 1, "train.gradient_accumulation": 2}
    Plan(study(schemes={**DOCUMENT["schemes"], "split": split}), data)
    Plan(study(sizes={"small": {**DOCUMENT["sizes"]["small"], "train.batch_size": 4}}), data)
    for key in ("train.batch_size", "train.gradient_accumulation"):
        over = {"train.lr": [0.004], key: [2, 4]}
        with pytest.raises(InputError, match=rf"tuning\.over must have no key .* tokens of a step.* got {key}"):
            Plan(study(tuning={**DOCUMENT["tuning"], "over": over, "runs": 2, "baseline_runs": 2}), data)


def test_a_scheme_whose_runs_all_diverge_is_not_reported(data):
    runs = walked(Plan(study(), data), lambda run: None if run.scheme == "ddl" else 1.0)
    assert of(runs, "ddl", "tune")
    assert not of(runs, "ddl", "report")


@pytest.mark.slow
def test_a_size_uses_the_settings_of_the_size_that_it_names(data):
    sizes = {
        **DOCUMENT["sizes"],
        "deep": {**DOCUMENT["sizes"]["small"], "model.num_hidden_layers": 2, "tuned": "small"},
    }
    runs = walked(Plan(study(sizes=sizes), data), by_rate(0.004))
    assert {run.size for run in runs if run.kind == "tune"} == {"small"}
    deep = [run for run in runs if run.size == "deep"]
    assert len(deep) == 9
    assert {run.config.train.lr for run in deep} == {0.004}
    assert {run.config.model.num_hidden_layers for run in deep} == {2}
    plan = Plan(study(sizes=sizes), data, ["deep"])
    alone = walked(plan, by_rate(0.004))
    assert [run.key for run in alone] == [run.key for run in runs if run.kind == "tune" or run.size == "deep"]
    assert len(alone) <= plan.most < Plan(study(sizes=sizes), data).most


@pytest.mark.slow
def test_a_size_may_search_some_keys_again_in_full_length(data):
    """The best rate is 0.008 at the small size and 0.002 at the large one, whose search stands on what that found."""
    small = DOCUMENT["sizes"]["small"]
    large = {**small, "model.hidden_size": 32, "tuned": "small", "over": {"train.lr": [0.004, 0.008]}}
    sizes = {"small": small, "large": large, "wide": {**small, "tuned": "large"}}
    tuning = {**DOCUMENT["tuning"], "runs": 6, "baseline_runs": 6, "length": 0.5, "finalists": 2}

    def loss(run):
        train, best = run.config.train, 0.008 if run.size == "small" else 0.002
        return abs(math.log(train.lr / best)) + abs(math.log(train.connection_lr_factor / 2))

    plan = Plan(study(sizes=sizes, tuning=tuning), data)
    runs = walked(plan, loss)
    there = [run for run in runs if run.size == "large"]
    assert [run.config.train.lr for run in of(there, "residual", "tune")] == [0.004, 0.008, 0.002, 0.001]
    assert [run.point for run in of(there, "ddl", "tune")] == [
        {"train.lr": rate, "train.connection_lr_factor": 2.0} for rate in (0.004, 0.008, 0.002, 0.001)
    ]
    assert {run.config.train.steps for run in there if run.kind != "longer"} == {plan.steps["large"]}
    assert {run.config.train.steps for run in runs if run.size == "small" and run.kind == "tune"} == {
        round(0.5 * plan.steps["small"])
    }
    assert {run.kind for run in there} == {"tune", "report", "longer"}
    assert {run.config.train.lr for run in runs if run.size == "wide"} == {0.002}
    assert len(runs) <= plan.most


def test_a_scheme_may_fit_few_widths_and_have_keys_to_search_that_the_plain_residual_lacks(data):
    """Three heads fit no power of two. The plain residual has nothing to search at the second size, and starts with one
    run."""
    small = {**DOCUMENT["sizes"]["small"], "model.hidden_size": 24}
    rate = {"train.connection_lr_factor": [1, 4]}
    sizes = {"small": small, "large": {**small, "model.intermediate_size": 96, "tuned": "small", "over": rate}}
    schemes = {"residual": {}, "heads": {"connection": "gated-orthogonal:heads=3"}}
    runs = walked(Plan(study(sizes=sizes, schemes=schemes), data), by_rate(0.008))
    there = [run for run in runs if run.size == "large"]
    assert [len(of(there, name, "tune")) for name in schemes] == [1, 3], "1, 4 and a neighbour"
    assert all(len(of(there, name, "report")) == 3 for name in schemes)


def test_matched_parameters_come_as_near_as_the_width_of_an_mlp_allows(data):
    schemes = {**DOCUMENT["schemes"], "wide": {"connection": "residual", "parameters_of": "ddl-tc"}, "ddl-tc": {}}
    plan = Plan(study(schemes=schemes), data)
    count = {name: parameters(plan.model(plan.config("small", name)))["total"] for name in plan.study.schemes}
    assert count["residual"] < count["wide"]
    assert abs(count["wide"] - count["ddl-tc"]) <= 3 * 16 / 2


def test_a_width_may_be_odd_where_heads_have_a_size_of_their_own(data):
    sizes = {"small": {**DOCUMENT["sizes"]["small"], "model.hidden_size": 15, "model.head_dim": 8}}
    assert Plan(study(sizes=sizes, schemes={"residual": {}, "lambdas": {}}, primary={}), data).steps["small"] > 0


def test_a_size_that_no_model_can_have_is_named(data):
    sizes = {"small": {**DOCUMENT["sizes"]["small"], "model.head_dim": 15}}
    with pytest.raises(InputError, match=r"sizes\.small: .*head_dim must be an even number, got 15"):
        Plan(study(sizes=sizes), data)


def test_a_tuned_key_that_does_not_exist_is_refused_before_anything_is_measured(data):
    tuning = {**DOCUMENT["tuning"], "over": {"train.lrr": [0.1]}}
    with pytest.raises(InputError, match=r"unknown key train.lrr; did you mean train.lr"):
        Plan(study(tuning=tuning), data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"set": {"train.batchsize": 8}}, "set: unknown key train.batchsize; did you mean train.batch_size"),
        ({"tuning": {**DOCUMENT["tuning"], "over": {"train.lrr": [0.1]}}}, "tuning.over: unknown key train.lrr"),
        (
            {"tuning": {**DOCUMENT["tuning"], "factors": {"train.conection_lr_factor": 4}}},
            "tuning.factors must be some of train.connection_lr_factor, train.lr, got 'train.conection_lr_factor'",
        ),
        ({"schemes": {"residual": {}, "lamdas+smear": {}}}, "schemes.lamdas+smear: no preset is called"),
        ({"schemes": {"residual": {"model.width": 8}}}, "schemes.residual: unknown key model.width"),
        ({"set": {"train.batch_size": "eight"}}, "set: train.batch_size must be a whole number, got 'eight'"),
        ({"set": {"train.sequence_length": -8}}, "set: train.sequence_length must be at least 1, got -8"),
        ({"set": {"model.base": 3}}, "set: model.base must be text, got 3"),
        ({"sizes": {"small": {"model.hidden_size": 0}}}, "sizes.small: model.hidden_size must be at least 1, got 0"),
        (
            {"schemes": {"residual": {"train.device": "gpu"}}},
            "schemes.residual: train.device must be one of auto, cpu, cuda, got 'gpu'",
        ),
        (
            {"schemes": {"residual": {"train.lr": 0.1}}},
            "schemes.residual must not set train.lr, which tuning.over tunes",
        ),
        ({"primary": {"huge": [["residual", "ddl"]]}}, "primary must be some of small"),
    ],
)
def test_an_error_in_a_file_names_the_file_and_the_key(tmp_path, change, said):
    path = tmp_path / "study.yaml"
    path.write_text(write_yaml({**DOCUMENT, **change}))
    with pytest.raises(InputError, match=re.escape(f"{path}: {said}")):
        load_study(str(path))


def test_a_study_without_a_file_is_named_with_the_nearest_file(tmp_path):
    (tmp_path / "study.yaml").touch()
    with pytest.raises(InputError, match=r"no file '.*study\.yml'; did you mean .*study\.yaml\?"):
        load_study(str(tmp_path / "study.yml"))


def test_a_scheme_may_be_chosen_in_any_spelling(tmp_path):
    path = tmp_path / "study.yaml"
    slow = {"connection": "ddl", "train.weight_decay": 0.5}
    path.write_text(write_yaml({**DOCUMENT, "schemes": {"residual": {}, "lambdas+smear": {}, "slow": slow}}))
    found = load_study(str(path))
    assert [*found.only(["Lambdas+Smear"]).schemes] == ["residual", "lambdas+smear"]
    assert [*found.only(["DDL"]).schemes] == ["residual", "DDL"]  # "slow" has settings of its own


def test_without_prepared_data_the_option_is_named():
    with pytest.raises(InputError, match="--data must be a folder "):
        study().data(None)


def test_data_that_would_be_seen_twice_are_refused(data):
    with pytest.raises(InputError, match=r"sizes\.small: needs .* tokens"):
        Plan(study(tokens_per_parameter=20), data)
    assert Plan(study(tokens_per_parameter=20, epochs=1000), data).steps["small"] > 1000
    with pytest.raises(InputError, match=r"sizes\.small: .* more than 2 times"):
        Plan(study(tokens_per_parameter=20, epochs=2), data)


@pytest.mark.slow
def test_the_study_that_the_page_shows_can_be_planned(data, tmp_path):
    _, _, block, _ = studies_of_the_page()
    path = tmp_path / "study.yaml"
    path.write_text(block.replace("tokens_per_parameter: 1 ", "tokens_per_parameter: 0.002 "))
    found = load_study(str(path))
    runs = walked(Plan(found, data), by_rate(0.016))
    assert {run.kind for run in runs if run.size == "deep"} == {"tune", "final", "report", "longer"}
    assert {run.kind for run in runs if run.size == "wide"} == {"report", "longer"}
    assert {run.scheme for run in runs} == set(found.schemes)


def test_the_first_study_that_the_page_shows_can_be_planned(data, tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(studies_of_the_page()[0].replace("tokens_per_parameter: 0.3 ", "tokens_per_parameter: 0.001 "))
    runs = walked(Plan(load_study(str(path)), data), by_rate(0.008))
    assert len(runs) == 8  # as the page says: two rates and two seeds of two schemes


def test_the_study_of_a_users_scheme_that_the_page_shows_can_be_planned(data, tmp_path):
    _, block, *_ = studies_of_the_page()
    path = tmp_path / "study.yaml"
    few = block.replace("tokens_per_parameter: 20", "tokens_per_parameter: 0.0001").replace(
        "device: cuda", "device: cpu"
    )
    path.write_text(few.replace("  momentum: {}", "  momentum: {connection: hc}").replace("1024", "16"))
    runs = walked(Plan(load_study(str(path)), data), by_rate(0.008))
    assert len(runs) == 45  # as the page says: three rates and five seeds of three schemes
    assert {run.config.train.lr for run in runs} == {0.004, 0.008, 0.016}


def test_the_identity_of_a_run_covers_all_settings_that_change_its_numbers(data, tmp_path):
    run = next(iter(Plan(study(), data).runs({})))
    key = run.key
    other = study(set={**DOCUMENT["set"], "train.checkpoint_every": 3})
    assert next(iter(Plan(other, data).runs({}))).key == key
    shutil.copytree(data, tmp_path / "elsewhere")
    assert next(iter(Plan(study(), tmp_path / "elsewhere").runs({}))).key == key
    other = study(set={**DOCUMENT["set"], "train.weight_decay": 0.2})
    assert next(iter(Plan(other, data).runs({}))).key != key


OVER = {"train.lr": [0.1]}


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("", {"seed": [1]}, "unknown key seed; did you mean seeds?"),
        ("", {"seeds": [1, 1]}, "seeds must be at least 2 different ones"),
        ("", {"seeds": [-1, 2]}, "seeds must be whole numbers from 0 to 9223372036854775807, got [-1, 2]"),
        ("", {"seeds": [1, 2**63]}, "seeds must be whole numbers from 0 to 9223372036854775807, got"),
        ("", {"seeds": None}, "seeds must be a list, each item a whole number, got None"),
        ("", {"baselines": ["mhc"]}, "baselines must be some of residual, ddl, got 'mhc'"),
        ("", {"baselines": "residual"}, "baselines must be a list, each item text, got 'residual'"),
        ("", {"baselines": ["residual", "residual"]}, "baselines must be at least one, each once"),
        ("", {"longer": [0.5]}, "longer must be a list of numbers above 1"),
        ("", {"longer": [math.inf]}, "longer must be a list of numbers above 1"),
        ("", {"tokens_per_parameter": -1}, "tokens_per_parameter must be a positive number"),
        ("", {"set": {"train.seed": 3}}, "train.seed must be a key that a study does not set"),
        ("", {"schemes": {"residual": {"parameters_of": "x"}}}, "schemes.residual.parameters_of"),
        ("", {"schemes": ["residual"]}, "schemes must be a mapping"),
        ("", {"sizes": {}}, "sizes must be at least one"),
        ("sizes", {"a": {"tuned": "b"}}, "sizes.a.tuned must be a size with a search of its own (none is there)"),
        ("sizes", {"a": {"over": OVER}}, "sizes.a.tuned must be a size, as `over` is given"),
        (
            "",
            {"primary": {"small": [[["ddl"], "residual"]]}},
            "primary must be a list of pairs of two schemes for each size",
        ),
        ("", {"primary": {"small": [["ddl", "ddl"]]}}, "primary must be a list of pairs of two schemes for each size"),
        (
            "",
            {"questions": {"gain": {"ask": "Is it?", "compare": [["ddl", "ddl"]]}}},
            "questions.gain.compare must be pairs of two different schemes, got [('ddl', 'ddl')]",
        ),
        (
            "",
            {"questions": {"gain": {"ask": "Is it?", "compare": [["ddl", "residual"]], "seeds": [-1]}}},
            "questions.gain.seeds must be whole numbers from 0",
        ),
        (
            "",
            {"schemes": {"residual": {"data.path": "other"}}},
            "schemes.residual: data.path must be left out, because all runs train on the study's data, got 'other'",
        ),
        ("sizes", {"a": {"data.vocab_size": 300}}, "sizes.a: data.vocab_size must be left out"),
        ("sizes", {"a": {}, "b": {"tuned": "a", "over": {}}}, "sizes.b.over must be values for at least one key"),
        (
            "sizes",
            {"a": {}, "b": {"tuned": "a", "over": {"train.weight_decay": [0.1]}}},
            "sizes.b.over must be some of train.lr, train.connection_lr_factor, got",
        ),
        (
            "sizes",
            {name: {"tuned": "a", "over": OVER} for name in ("a", "b")},
            "sizes.a.tuned must be a size with a search of its own (none is there)",
        ),
        ("sizes", {"a": {"keys": [None]}}, "sizes.a.keys must be a mapping"),
        ("", {"schemes": {"residual": {"keys": "../x"}}}, "schemes.residual.keys must be a mapping"),
        ("sizes", {"a": {"seeds": [1]}}, "sizes.a.seeds must be at least 2 different ones"),
        ("sizes", {"a": {"seeds": []}}, "sizes.a.seeds must be at least 2 different ones"),
        ("sizes", {"a": {"seeds": "12"}}, "sizes.a.seeds must be a list, each item a whole number"),
        ("sizes", {"a": {"seeds": [1, 9]}}, "sizes.a.seeds must be some of 1, 2, 3, got 9"),
        ("sizes", {"a": {"longer": [0.5]}}, "sizes.a.longer must be a list of numbers above 1"),
        ("sizes", {"a": {"longer": [1e308]}}, "sizes.a.longer must be a list of numbers above 1"),
        ("sizes", {"a": {"tokens_per_parameter": 0}}, "sizes.a.tokens_per_parameter must be a positive number"),
        ("", {"tokens_per_parameter": 1e300}, "tokens_per_parameter must be a positive number, 1e9 at most"),
        ("tuning", {"finalists": 2}, "tuning.finalists must be 1, as tuning runs are as long"),
        ("tuning", {"finalists": 0, "length": 0.5}, "tuning.finalists must be 1 to tuning.runs"),
        ("tuning", {"final_seeds": [9, 2]}, "seeds must be different from those that tune (0, 2, 9), got [1, 2, 3]"),
        ("tuning", {"seed": -1}, "tuning.seed must be 0 or more, got -1"),
        ("tuning", {"final_seeds": [-9]}, "tuning.final_seeds must be whole numbers from 0"),
        ("tuning", {"final_seeds": [9, 9]}, "tuning.final_seeds must be each seed once"),
        ("tuning", {"factors": {"train.lr": 1}}, "tuning.factors must be a number above 1"),
        ("tuning", {"runs": 1}, "tuning.runs must be at least the 2 points of the grid"),
        ("tuning", {"runs": 9}, "tuning.baseline_runs must be at least tuning.runs"),
        ("tuning", {"over": {"train.lr": 0.1}}, "tuning.over must be a list of numbers above 0 for each key"),
        ("tuning", {"over": {"train.lr": ["a"]}}, "must be a list of numbers above 0"),
        ("tuning", {"over": {}}, "tuning.over must be values for at least one key"),
        ("tuning", {"length": 0}, "tuning.length must be a number above 0, 1 at most"),
    ],
)
def test_a_wrong_study_is_refused_with_one_line(part, change, said):
    changes = {"": change, "sizes": {"sizes": change}, "tuning": {"tuning": {**DOCUMENT["tuning"], **change}}}
    with pytest.raises(InputError) as refusal:
        study(**changes[part])
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_sizes_of_resbench_match_their_names_and_its_schemes_are_causal():
    found = load_study("resbench")
    for size in found.sizes.values():
        keys = {key.removeprefix("model."): value for key, value in size.keys.items()}
        total = parameters(ResiduaConfig(vocab_size=2048, connection="residual", **keys))["total"]
        assert total == pytest.approx(float(size.name.partition("M")[0]) * 1e6, rel=0.16)
    assert all(resolve(entry.connection).causal for entry in found.schemes.values())


def test_resbench_can_be_read_and_a_registered_scheme_joins_it(monkeypatch):
    monkeypatch.setattr(registry, "PRESETS", dict(registry.PRESETS))
    register("mine", Residual())
    found = load_study("resbench")
    assert found.tokens_per_parameter == 20
    assert found.baselines[0] == "residual"
    assert found.tuning.baseline_runs > found.tuning.runs
    chosen = found.only(["mine"], ["0.3M-deep"])
    assert list(chosen.schemes) == [*found.baselines, "mine"]
    assert list(chosen.sizes) == ["0.1M", "0.3M", "0.3M-deep"]
    with pytest.raises(InputError, match=r"did you mean 0\.3M"):
        found.only(sizes=["0.3"])
    with pytest.raises(InputError, match="no preset is called 'thine'"):
        found.only(["thine"])


def test_further_seeds_of_a_question_come_last_and_only_with_all_that_it_compares(data):
    asked = {"gain": {"ask": "Is it?", "compare": [["ddl", "hc"]], "seeds": [7, 8]}}
    whole = study(schemes={"residual": {}, "ddl": {}, "hc": {}}, questions=asked)
    plan = Plan(whole, data)
    runs = walked(plan, by_rate(0.008))
    assert [(run.kind, run.scheme, run.config.train.seed) for run in runs[-4:]] == [
        ("report", scheme, seed) for scheme in ("ddl", "hc") for seed in (7, 8)
    ]
    assert len(runs) <= plan.most
    assert Plan(whole.only(["ddl"]), data).most == Plan(study(), data).most
    finished = {run.key: {"val_loss": 4.0} for run in runs}
    order = [job.key for job in sorted(jobs(plan, finished), key=lambda job: job.order)]
    assert order == [run.key for run in plan.runs(finished)]


def test_a_size_may_have_its_own_tokens_and_fewer_seeds_to_which_questions_add_no_seeds(data):
    small = DOCUMENT["sizes"]["small"]
    long = {**small, "tuned": "small", "tokens_per_parameter": 0.06, "seeds": [1, 3], "longer": []}
    asked = {"gain": {"ask": "Is it?", "compare": [["ddl", "residual"]], "seeds": [7]}}
    plan = Plan(study(sizes={"small": small, "long": long}, questions=asked, warmup=0.25), data)
    count = parameters(plan.model(plan.config("small", "residual")))["total"]
    assert plan.steps == {"small": round(0.02 * count / (2 * 16)), "long": round(0.06 * count / (2 * 16))}
    runs = walked(plan, by_rate(0.008))
    for train in (run.config.train for run in runs):
        assert train.warmup_steps == train.steps // 4
    assert {run.config.train.evaluate_every for run in runs if run.kind == "report" and run.size == "small"} == {
        math.ceil(plan.steps["small"] / 2)
    }
    there = [run for run in runs if run.size == "long"]
    assert [(run.kind, run.scheme, run.config.train.seed) for run in there] == [
        ("report", scheme, seed) for scheme in ("residual", "ddl") for seed in (1, 3)
    ]
    assert {run.config.train.steps for run in there} == {plan.steps["long"]}
    assert {run.config.train.seed for run in of(runs, "ddl", "report") if run.size == "small"} == {1, 2, 3, 7}
    assert len(runs) <= plan.most


@pytest.mark.slow
def test_finalists_are_trained_in_full_and_the_best_of_them_is_reported(data):
    """A search that favours 0.032 in short runs, where 0.016 is better in full."""
    tuning = {**DOCUMENT["tuning"], "runs": 6, "baseline_runs": 6, "length": 0.5, "finalists": 2}
    plan = Plan(study(tuning=tuning), data)
    short, full = by_rate(0.032), by_rate(0.016)
    runs = walked(plan, lambda run: (short if run.kind == "tune" else full)(run))
    finals = of(runs, "residual", "final")
    assert finals[0].config.train.lr == 0.032
    assert len(finals) == 2
    assert {run.config.train.seed for run in finals} == {0}
    assert {run.config.train.steps for run in finals} == {
        run.config.train.steps for run in of(runs, "residual", "report")
    }
    assert {run.config.train.lr for run in of(runs, "residual", "report")} == {0.016}
    assert len(runs) <= plan.most
    judged = Plan(study(tuning={**tuning, "final_seeds": [0, 11]}), data)
    tied = walked(judged, lambda run: full(run) if run.config.train.seed == 11 else short(run) / 10)
    assert [run.config.train.seed for run in of(tied, "residual", "final")] == [0, 11, 0, 11]
    assert {run.config.train.lr for run in of(tied, "residual", "report")} == {0.016}
    assert len(tied) <= judged.most
    diverged = walked(Plan(study(tuning=tuning), data), lambda run: None if run.kind == "final" else short(run))
    assert not of(diverged, "residual", "report")


def test_a_record_that_the_settings_no_longer_give_is_refused(data, tmp_path):
    """The study names the file of its configuration, and somebody may edit it between two calls."""
    file, path = tmp_path / "mine.yaml", tmp_path / "records.jsonl"
    file.write_text("base: tiny\ntrain: {weight_decay: 0.1}\n")
    plan = Plan(study(**SMALLEST, config=str(file)), data)
    run = next(plan.runs({}))
    train = {"seed": run.config.train.seed, "steps": run.config.train.steps}
    row = {"key": run.key, "connection": run.config.model.connection, **run._asdict(), **train}
    expect_same_settings(plan, [row], path)
    file.write_text("base: tiny\ntrain: {weight_decay: 0.2}\n")
    changed = Plan(study(**SMALLEST, config=str(file)), data)
    with pytest.raises(InputError, match="as recorded, but config has changed; restore it, or use another folder"):
        expect_same_settings(changed, [row], path)
