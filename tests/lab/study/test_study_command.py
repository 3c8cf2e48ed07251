"""residua study: it trains, resumes, reports, and verifies to the last bit."""

import json
import re
import shutil
from dataclasses import asdict

import pytest
import torch

from residua.commands.cli import main
from residua.connections.names import today
from residua.errors import InputError
from residua.files.reading import write_yaml
from residua.lab.cost import steps as cost
from residua.lab.cost.steps import measure
from residua.lab.records import jsonlines
from residua.lab.study import verify
from residua.lab.study.engine import begun, joined, measure_costs
from residua.lab.study.plan import Plan
from residua.lab.study.results import read_runs
from support.planted_study import DOCUMENT, SMALLEST, study


def configs_of(plan):
    configs = {name: plan.config("small", name) for name in plan.study.schemes}
    return {name: (config, plan.model(config)) for name, config in configs.items()}


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """The file and the folder of a finished study, of committed code as far as its records say."""
    home = tmp_path_factory.mktemp("study")
    (home / "study.yaml").write_text(write_yaml(SMALLEST))
    out = home / "out"
    assert main(["study", "run", str(home / "study.yaml"), "--out", str(out), "--data", str(data), "--no-costs"]) == 0
    rows = jsonlines.read(out / "records.jsonl")
    write(out, [{**row, "facts": {**row["facts"], "commit": "a" * 40}} for row in rows])
    costs = measure(configs_of(Plan(study(**SMALLEST), data)), "residual", rounds=1, peak=False)
    write(out, [{"size": "small", "connection": row["scheme"], **row} for row in costs], "costs")
    return home


def test_a_dry_run_prints_hours_and_what_the_seeds_can_show_and_writes_nothing(data, tmp_path, capsys):
    (tmp_path / "study.yaml").write_text(write_yaml({**DOCUMENT, "seeds": [1, 2, 3, 4, 5]}))
    argv = ["study", "run", str(tmp_path / "study.yaml"), "--out", str(tmp_path / "out"), "--data", str(data)]
    assert main([*argv, "--dry-run", "--teraflops", "1e-6"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^small +2 +21 ", text, re.MULTILINE), text  # 2 x 3 tune, 2 x 5 report, 5 are longer
    assert "1.7 deviations" in text
    assert "--no-costs" in text
    assert main([*argv, "--dry-run", "--teraflops", "1e-6", "--json"]) == 0
    (size,) = json.loads(capsys.readouterr().out)
    assert size["hours"] == pytest.approx(size["flops"] / 1e6 / 3600)
    (tmp_path / "study.yaml").write_text(write_yaml({**DOCUMENT, "seeds": [1, 2, 3, 4, 5], "evaluations": 8}))
    assert main([*argv, "--dry-run", "--teraflops", "1e-6", "--json"]) == 0
    (often,) = json.loads(capsys.readouterr().out)
    assert often["flops"] > size["flops"], "evaluations count"
    (tmp_path / "study.yaml").write_text(write_yaml({**DOCUMENT, "seeds": [1, 2, 3, 4, 5]}))
    assert main([*argv, "--dry-run", "--json"]) == 0
    (here,) = json.loads(capsys.readouterr().out)
    assert here.pop("hours") > 0
    assert here.items() <= size.items()
    assert main([*argv, "--dry-run", "--teraflops", "0"]) == 2
    assert "--teraflops must be a positive number, got 0.0" in capsys.readouterr().err
    for option, told in ((["--teraflops", "100"], "--dry-run"), (["--compiled"], "--measure")):
        assert main([*argv, *option]) == 2
        assert f"{option[0]} must be left out without {told}" in capsys.readouterr().err
    for options in (["--measure", "--dry-run"], ["--no-costs", "--measure"], ["--rounds", "9", "--no-costs"]):
        assert main([*argv, *options]) == 2
        first, told = (option for option in options if option.startswith("--"))
        assert f"{first} must be left out with {told}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_repeating_the_command_makes_no_run_twice_and_reports(finished, data, capsys):
    out = finished / "out"
    before = (out / "records.jsonl").read_bytes()
    assert len(before.splitlines()) == 6
    for row in map(json.loads, before.splitlines()):
        assert [step for step, *_ in row["split"]] == [step for step, _ in row["curve"]]
        assert row["transition"] is None
        if row["kind"] == "report":
            by_document = row["documents"]
            loss = sum(by_document["nats"]) / sum(by_document["labels"])
            assert loss == pytest.approx(row["val_loss"], abs=1e-5)
    argv = ["study", "run", str(finished / "study.yaml"), "--out", str(out), "--data", str(data), "--no-costs"]
    assert main(argv) == 0
    assert (out / "records.jsonl").read_bytes() == before
    said = capsys.readouterr().out
    assert (out / "report.md").read_text() in said
    assert "| `ddl` |" in said
    for name in ("report.md", "results.csv", "index.html", "differences.png"):
        assert f"written: {out / name}" in said
    assert (out / "differences.png").read_bytes().startswith(b"\x89PNG")
    # The report needs neither the data nor the code of the runs.
    assert main(["study", "report", str(out), "--out", str(finished / "elsewhere"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "Planted"
    assert (finished / "elsewhere" / "report.md").read_bytes() == (out / "report.md").read_bytes()


@pytest.mark.slow
def test_a_study_may_grow_and_loses_no_scheme(finished, data, tmp_path):
    argv = ["study", "run", str(finished / "study.yaml"), "--out", str(tmp_path), "--data", str(data), "--no-costs"]
    assert main([*argv, "--schemes", "residual"]) == 0
    (tmp_path / "report.md").unlink()
    few = len(jsonlines.read(tmp_path / "records.jsonl"))
    assert main([*argv, "--schemes", "ddl"]) == 0
    assert len(jsonlines.read(tmp_path / "records.jsonl")) == 2 * few == 6
    assert main([*argv, "--schemes", "residual"]) == 0
    assert "`ddl`" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_only_the_requested_size_has_rows_and_costs(data, tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "peak_of", lambda *args, **kwargs: 1)
    small = SMALLEST["sizes"]["small"]
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    file.write_text(write_yaml({**SMALLEST, "sizes": {"small": small, "deep": {**small, "tuned": "small"}}}))
    argv = ["study", "run", str(file), "--out", str(out), "--data", str(data), "--sizes", "deep", "--rounds", "9"]
    assert main(argv) == 0
    assert main([*argv, "--measure"]) == 0
    runs, costs = (jsonlines.read(out / f"{name}.jsonl") for name in ("records", "costs"))
    assert {(row["size"], row["kind"]) for row in runs} == {("small", "tune"), ("deep", "report")}
    assert [row["size"] for row in costs] == 2 * len(SMALLEST["schemes"]) * ["deep"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"set": {**SMALLEST["set"], "train.weight_decay": 0.5}}, "set was {"),
        ({"tokens_per_parameter": 0.03}, "tokens_per_parameter was 0.015, is 0.03"),
        ({"schemes": {"residual": {}, "ddl": {"connection": "ddl:beta_init=0.5"}}}, "schemes.ddl was {"),
        ({"sizes": {"small": {**SMALLEST["sizes"]["small"], "model.num_hidden_layers": 2}}}, "sizes.small was {"),
        ({"tuning": {**SMALLEST["tuning"], "length": 1.0}}, "tuning.length was 0.5, is 1.0"),
        ({"seeds": [2, 3]}, "seeds must be at least [1, 2], as in"),
    ],
)
def test_a_folder_accepts_no_runs_with_other_settings(finished, data, tmp_path, capsys, change, said):
    other, out = tmp_path / "other.yaml", finished / "out"
    other.write_text(write_yaml({**SMALLEST, **change}))
    before = {path.name: path.read_bytes() for path in out.glob("*.json*")}
    assert main(["study", "run", str(other), "--out", str(out), "--data", str(data), "--no-costs"]) == 2
    reading, error = capsys.readouterr().err.splitlines()
    assert reading.startswith("study: reading ")
    assert said in error
    assert {path.name: path.read_bytes() for path in out.glob("*.json*")} == before


def test_a_folder_accepts_no_runs_after_an_edit_of_the_configuration_file(finished, data, tmp_path):
    folder, file = shutil.copytree(finished / "out", tmp_path / "out"), tmp_path / "mine.yaml"
    file.write_text("base: tiny\ntrain: {weight_decay: 0.3}\n")
    changed = study(**{**SMALLEST, "config": str(file)})
    (folder / "study.json").write_text(json.dumps(asdict(changed)))
    with pytest.raises(InputError, match="config has changed"), begun(changed, folder, data=str(data)):
        pass


def grown(folder, **changes):
    return joined(study(**{**SMALLEST, **changes}), folder, jsonlines.read(folder / "records.jsonl"))


def test_a_study_may_add_seeds_and_questions(finished):
    asked = {"gain": {"ask": "Who?", "compare": [["ddl", "residual"]]}}
    assert grown(finished / "out", seeds=[1, 2, 3], questions=asked).seeds == (1, 2, 3)


def test_a_contrast_can_become_primary_only_before_its_runs(finished, tmp_path):
    with pytest.raises(InputError, match=r"primary\.small must be contrasts"):
        grown(finished / "out", primary={"small": [["ddl", "residual"]]})
    more = {"schemes": {**SMALLEST["schemes"], "hc": {}}, "primary": {"small": [["hc", "residual"]]}}
    planned = grown(finished / "out", **more)
    assert planned.primary == more["primary"]
    (tmp_path / "study.json").write_text(json.dumps(asdict(planned)))
    with pytest.raises(InputError, match=r"primary\.small must be at least \[.*hc.*\], as in .*, got \[\]"):
        grown(tmp_path)


def test_a_size_may_add_seeds_and_leave_out_none(tmp_path):
    few, more = ({"small": {**SMALLEST["sizes"]["small"], "seeds": seeds}} for seeds in ([1, 2], [1, 2, 3]))
    seeds = {"seeds": [1, 2, 3]}
    (tmp_path / "study.json").write_text(json.dumps(asdict(grown(tmp_path, sizes=few, **seeds))))
    grown_study = grown(tmp_path, sizes=more, **seeds)
    assert grown_study.seeds_at("small") == (1, 2, 3)
    (tmp_path / "study.json").write_text(json.dumps(asdict(grown_study)))
    with pytest.raises(InputError, match=r"sizes\.small\.seeds must be at least \[1, 2, 3\], as in .*, got \[1, 2\]"):
        grown(tmp_path, sizes=few, **seeds)


def test_wrong_records_and_costs_are_refused_before_anything_is_trained_or_timed(finished, data, tmp_path):
    folder = shutil.copytree(finished / "out", tmp_path / "forged")
    plan = Plan(study(**SMALLEST), data)
    records = folder / "records.jsonl"
    reading = {
        "costs": lambda: measure_costs(plan, folder),
        "records": lambda: read_runs(records, plan.facts["fingerprint"]),
    }
    for name, use in reading.items():
        (folder / f"{name}.jsonl").write_text("{}\n")
        with pytest.raises(InputError, match=rf"{name}\.jsonl must be .*, got {{}}"):
            use()


def test_a_run_of_a_length_that_the_study_does_not_have_is_not_repeated(finished, data, tmp_path):
    folder = shutil.copytree(finished / "out", tmp_path / "longer")
    row = next(row for row in jsonlines.read(folder / "records.jsonl") if row["kind"] == "tune")
    other = {**row, "steps": 10**9, "curve": []}
    write(folder, [{**other, "key": Plan(study(**SMALLEST), data).recorded(other).key}])
    with pytest.raises(InputError, match="must hold records that fit its study"):
        verify.sample(folder, data=str(data))


def test_a_repetition_logs_nowhere_else(data, monkeypatch):
    run = Plan(study(**{**SMALLEST, "set": {**SMALLEST["set"], "train.wandb": "theirs"}}), data).run(
        "report", "small", "ddl", {"train.lr": 0.008}, 1, 2
    )
    assert run.config.train.wandb == "theirs"
    monkeypatch.setattr(verify, "train_run", lambda run, **_: {"val_loss": None, "wandb": run.config.train.wandb})
    assert verify.repeat(run, {}, lambda step: None).repeated["wandb"] is None


def test_a_study_keeps_the_baseline_beside_which_steps_were_timed(finished):
    with pytest.raises(InputError, match="baselines must be residual first"):
        grown(finished / "out", baselines=["ddl", "residual"])


def test_a_repeated_run_equals_a_record_with_the_former_name_of_an_option():
    former = "hc:expand=copies"
    record = {"val_loss": 3.0, "loss": 3.0, "curve": [[1, 3.0]], "point": {}, "tokens": 1, "connection": former}
    assert today(former) != former
    for connection, equal in ((today(former), True), ("hc", False)):
        assert verify.Verified("key", record, {**record, "connection": connection}).equal is equal


@pytest.mark.slow
def test_a_repeated_run_equals_its_record_to_the_last_bit_and_another_number_is_found(finished, data, capsys):
    out = finished / "out"
    assert main(["study", "verify", str(out), "--data", str(data), "--share", "0.3"]) == 0
    assert "2 of 2 runs are equal to the last bit" in capsys.readouterr().out
    only = ["--schemes", "ddl", "--seeds", "2", "--share", "1"]
    assert main(["study", "verify", str(out), "--data", str(data), *only]) == 0
    said = capsys.readouterr().out
    assert "small ddl report seed=2" in said
    assert said.endswith("1 of 1 runs are equal to the last bit\n")
    assert main(["study", "verify", str(out), "--data", str(data), "--schemes", "hc"]) == 2
    assert "--schemes must be some of residual, ddl, got 'hc'" in capsys.readouterr().err
    rows = jsonlines.read(out / "records.jsonl")
    argv = ["study", "verify", str(out), "--data", str(data), "--share", "0.1"]
    try:
        write(out, [nudged(row) for row in rows])
        assert main(argv) == 1
        said = capsys.readouterr().out
        assert "0 of 1 runs" in said
        assert "recorded with" not in said
        write(out, [nudged({**row, "facts": {**row["facts"], "torch": "1.0"}}) for row in rows])
        assert main(argv) == 1
        assert f"(recorded with torch 1.0, here {torch.__version__}; last bits differ there)" in capsys.readouterr().out
        # A run that the study would not make cannot be repeated, however good its record looks.
        write(out, [{**row, "key": row["key"][:-1] + "x"} if row["kind"] == "report" else row for row in rows])
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert "got 4 that do not" in said
        assert "'small ddl report" in said
    finally:
        write(out, rows)


@pytest.mark.slow
def test_runs_of_a_similar_device_are_repeated_first(finished, data, tmp_path, monkeypatch, capsys):
    """The runs follow a line with their cost."""
    folder = shutil.copytree(finished / "out", tmp_path / "mixed")
    rows = jsonlines.read(folder / "records.jsonl")
    other = [{**row, "facts": {**row["facts"], "device": "NVIDIA H200"}} for row in rows[1:]]
    write(folder, [*other, {**rows[0], "seconds": 5400}])
    monkeypatch.setattr(verify, "repeat", lambda run, recorded, _: verify.Verified(run.key, recorded, recorded))
    argv = ["study", "verify", str(folder), "--data", str(data), "--share"]
    for _ in range(3):
        assert main([*argv, "0.1"]) == 0
        cost, run, _ = capsys.readouterr().out.splitlines()
        assert run.startswith(rows[0]["key"])
        assert f"1 of {len(rows)} runs" in cost
        assert f"{rows[0]['tokens']:,} tokens, 1.5 hours" in cost
    assert main([*argv, "1"]) == 0
    cost, run, *others = capsys.readouterr().out.splitlines()
    assert run.startswith(rows[0]["key"])
    assert len(others) == len(rows)
    write(folder, other)
    assert main([*argv, "0.1"]) == 0, "there is no other"


def write(out, rows, name="records"):
    (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def nudged(row):
    """The record with another last bit in its loss, which a person could have typed."""
    loss = row["val_loss"] + 1e-15
    return {**row, "val_loss": loss, "curve": [*row["curve"][:-1], [row["steps"], loss]]}


def alone(finished, tmp_path):
    """A copy of the folder in which nobody has trained ddl."""
    folder = shutil.copytree(finished / "out", tmp_path / "alone")
    write(folder, [row for row in jsonlines.read(folder / "records.jsonl") if row["scheme"] == "residual"])
    document = json.loads((folder / "study.json").read_text())
    document["schemes"].pop("ddl")
    (folder / "study.json").write_text(json.dumps(document))
    return folder


@pytest.mark.slow
def test_steps_are_timed_again_in_the_requested_number_of_rounds(finished, data, tmp_path):
    out = alone(finished, tmp_path)
    known = (out / "costs.jsonl").read_bytes()
    argv = ["study", "run", str(finished / "study.yaml"), "--out", str(out), "--data", str(data), "--measure"]
    assert main([*argv, "--rounds", "9"]) == 0
    assert (out / "costs.jsonl").read_bytes().startswith(known)
    new = jsonlines.read(out / "costs.jsonl")[len(known.splitlines()) :]
    assert [(row["scheme"], len(row["seconds"])) for row in new] == [("residual", 9), ("ddl", 9)]


@pytest.mark.slow
def test_steps_can_be_timed_before_anything_is_trained(finished, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cost, "peak_of", lambda *args, **kwargs: 1)
    out = tmp_path / "new"
    argv = ["study", "run", str(finished / "study.yaml"), "--out", str(out), "--data", str(data), "--rounds", "9"]
    assert main([*argv, "--measure"]) == 0
    assert [row["scheme"] for row in jsonlines.read(out / "costs.jsonl")] == ["residual", "ddl"]
    assert not jsonlines.read(out / "records.jsonl")
    assert "small residual 1.000 [1.000, 1.000]" in " ".join(capsys.readouterr().out.split())
    report = (out / "report.md").read_text()
    assert "Not finished: no scheme has a result yet." in report
    assert "Device" not in report


@pytest.mark.slow
def test_costs_include_arithmetic_outside_matrix_products(data):
    """The delta write is elementwise: it adds arithmetic of that kind, and little of the other."""
    plan = Plan(study(**SMALLEST), data)
    plain, delta = measure(configs_of(plan), "residual", rounds=2, peak=False)
    assert delta["flops_per_token"]["elementwise"] > 1.05 * plain["flops_per_token"]["elementwise"]
    assert plain["time_ratio"] == {"lower": 1.0, "median": 1.0, "upper": 1.0}
    assert len(delta["seconds"]) == 2
    assert delta["kept_bytes"] > plain["kept_bytes"]
    narrow = Plan(study(**{**SMALLEST, "set": {**SMALLEST["set"], "train.precision": "bfloat16"}}), data)
    assert measure(configs_of(narrow), "residual", rounds=1, peak=False)[0]["kept_bytes"] < plain["kept_bytes"]


@pytest.mark.slow
def test_compiled_steps_are_timed_beside_the_costs_and_do_not_replace_them(data, tmp_path, monkeypatch):
    plan, compiled = Plan(study(**SMALLEST), data), []
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or model)
    monkeypatch.setattr(cost, "peak_of", lambda *args, **kwargs: 1)
    for again in (True, False, False):
        measure_costs(plan, tmp_path, rounds=1, again=again, compiled=again, progress=False)
    rows = jsonlines.read(tmp_path / "costs.jsonl")
    assert [row["compiled"] for row in rows] == [True, True, False, False]
    assert len(compiled) == 2
    assert rows[0]["kept_bytes"] is None


@pytest.mark.processes
def test_the_peak_is_measured_in_a_process_of_its_own(data):
    plan = Plan(study(**SMALLEST), data)
    config = plan.config("small", "residual")
    (record,) = measure({"residual": (config, plan.model(config))}, "residual", rounds=1)
    assert record["peak_bytes"] > 0
