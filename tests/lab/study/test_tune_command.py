"""residua study tune: which runs it makes, what it says of them, and that a kill changes nothing."""

import json
import math
import multiprocessing
import os
import shutil
import signal
import time
from functools import partial
from itertools import chain

import pytest

from residua.commands.cli import main
from residua.errors import InputError
from residua.lab import experiment
from residua.lab.data import prepare
from residua.lab.data.tokenizer import byte_tokenizer, train_bpe
from residua.lab.evaluation.comparable import Measurement
from residua.lab.evaluation.runs import Row, Run
from residua.lab.jobs.pool import Job
from residua.lab.records import figures, jsonlines
from residua.lab.study.search import Search, losses_in, values_of
from residua.lab.study.sweep import Outcome, Sweep, parse_over, train_sweep
from residua.lab.training import load_config
from support.converted_models import save_base

OPTIONS = (
    "--model.num_hidden_layers=1",
    "--model.hidden_size=32",
    "--model.num_attention_heads=1",
    "--model.head_dim=32",
    "--train.steps=12",
    "--train.warmup_steps=2",
    "--train.batch_size=2",
    "--train.sequence_length=16",
    "--train.evaluate_every=6",
    "--train.checkpoint_every=3",
    "--train.log_every=1",
    "--train.device=cpu",
)
BY_CLOCK = ("seconds", "tokens_per_second", "facts")


def sweep_of(data, over, **options):
    return Sweep(("tiny",), (*OPTIONS, f"--data.path={data}"), over, **options)


def timeless(folder):
    rows = jsonlines.read(folder / "records.jsonl")
    return sorted(json.dumps({k: v for k, v in row.items() if k not in BY_CLOCK}) for row in rows)


def walked(sweep, loss):
    """The runs that a sweep makes, in rounds, where `loss(values, seed)` is what a run comes to."""
    finished, rounds = {}, []
    while new := [job for job in jobs_of(sweep, finished) if job.key not in finished]:
        runs = {job.key: (tuple(job.arguments[1].values()), job.arguments[2]) for job in new}
        finished |= {key: {"val_loss": loss(*run)} for key, run in runs.items()}
        rounds.append(list(runs.values()))
    return rounds


def jobs_of(sweep, finished):
    return [job for search in sweep.searches().values() for job in search.walk(sweep.job, losses_in(finished))[0]]


RATES = {"train.lr": (1e-3, 2e-3)}


def test_a_grid_is_every_point_with_every_seed():
    sweep = Sweep(("tiny",), (), RATES | {"model.embedding_init_std": (0.06, 0.12)}, seeds=2)
    first, second = walked(sweep, lambda point, seed: sum(point))
    assert first == [((lr, std), 0) for lr in (1e-3, 2e-3) for std in (0.06, 0.12)]
    assert sorted(second) == sorted((point, 1) for point, _ in first)


def test_only_finalists_get_more_seeds():
    sweep = Sweep(("tiny",), (), {"train.lr": (1e-3, 2e-3, 4e-3)}, seeds=3, finalists=2)
    losses = {1e-3: 3.0, 2e-3: 1.0, 4e-3: math.inf}
    first, second = walked(sweep, lambda point, seed: losses[point[0]])
    assert len(first) == 3
    assert sorted(second) == [((lr,), seed) for lr in (1e-3, 2e-3) for seed in (1, 2)]


@pytest.mark.slow
def test_the_search_walks_to_the_best_neighbour_within_valid_values():
    """Best at lr = 0.016 and min_lr_ratio = 0.8, whose double is no valid ratio."""
    sweep = Sweep(("tiny",), (), RATES | {"train.min_lr_ratio": (0.4,)}, neighbours=True, seeds=2, finalists=1)

    def loss(point, seed):
        return abs(math.log(point[0] / 0.016)) + abs(math.log(point[1] / 0.8))

    rounds = walked(sweep, loss)
    runs = list(chain(*rounds))
    assert len(runs) == len(set(runs))
    tried = {point for point, seed in runs if seed == 0}
    assert {(0.016, 0.8), (0.008, 0.8), (0.032, 0.8), (0.016, 0.4)} <= tried
    assert max(ratio for _, ratio in tried) == 0.8
    assert rounds[-1] == [((0.016, 0.8), 1)]


def test_a_budget_ends_the_search_and_a_key_may_have_wider_steps():
    over = {"train.lr": (1e-3,), "train.connection_lr_factor": (1.0,)}
    search = Search(over, values_of(partial(load_config, "tiny")), budget=4, factors={"train.connection_lr_factor": 4})

    def loss(rate, factor):
        return abs(math.log(rate / 1e-3)) + abs(math.log(factor / 4))

    def run_of(point, seed):
        return Job(tuple(point.values()), loss, ())

    finished = {}
    while new := [run.key for run in search.walk(run_of, losses_in(finished))[0] if run.key not in finished]:
        finished |= {key: {"val_loss": loss(*key)} for key in new}
    assert list(finished) == [(1e-3, 1.0), (5e-4, 1.0), (2e-3, 1.0), (1e-3, 0.25)]
    assert search.walk(run_of, losses_in(finished))[1] == {"train.lr": 1e-3, "train.connection_lr_factor": 1.0}
    assert search.walk(run_of, losses_in(dict(list(finished.items())[:3])))[1] is None


def test_a_point_is_trained_once_however_it_is_written():
    sweep = Sweep(("tiny",), (), {"train.lr": (1e-3, 1e-3, 3e-3)}, seeds=2, finalists=2)
    assert [len(runs) for runs in walked(sweep, lambda point, seed: point[0])] == [2, 2]
    search = Search({"train.lr": (0.01, 0.03)}, values_of(partial(load_config, "tiny")), factors={"train.lr": 3})
    finished = {}
    while new := [
        run.key
        for run in search.walk(lambda point, seed: Job(point["train.lr"], None, ()), losses_in(finished))[0]
        if run.key not in finished
    ]:
        finished |= {rate: {"val_loss": abs(math.log(rate / 0.0033))} for rate in new}
    assert list(finished) == [0.01, 0.03, 0.00333333, 0.00111111], "three times 0.00333333 is 0.01"


def row_of(*losses, name="", **point):
    records = ({"seed": seed, "val_loss": loss, "point": point} for seed, loss in enumerate(losses))
    return Row(name, tuple(Run.of(record, Measurement()) for record in records))


def test_a_value_beyond_which_a_run_diverged_is_not_at_the_edge():
    over = {"train.lr": (1e-3, 2e-3, 4e-3)}
    losses = {1e-3: 1.7, 2e-3: 1.0, 4e-3: None}
    sweep = Sweep(("tiny",), (), over)
    rows = tuple(row_of(loss, **{"train.lr": lr}) for lr, loss in losses.items())
    assert not any("edge" in note for note in Outcome(sweep, rows, {"": {"train.lr": 2e-3}}).notes)


def test_whole_numbers_are_tried_as_whole_numbers_of_at_least_one():
    sweep = Sweep(("tiny",), ("--train.warmup_steps=0",), {"train.batch_size": (2,)}, neighbours=True)
    tried = {point[0] for (point, _) in chain(*walked(sweep, lambda point, seed: point[0]))}
    assert tried == {1, 2, 4}
    assert all(isinstance(value, int) for value in tried)


@pytest.mark.slow
def test_each_scheme_is_tuned_separately():
    best = {"residual": 8e-3, "ddl": 1e-3}
    sweep = Sweep(
        ("tiny",), (), {"model.connection": ("residual", "ddl")} | RATES, neighbours=True, seeds=2, finalists=1
    )
    rounds = walked(sweep, lambda point, seed: abs(math.log(point[1] / best[point[0]])))
    final = {point for group in rounds for point, seed in group if seed == 1}
    assert final == set(best.items())


def test_tuning_ends_if_all_points_of_the_grid_diverge():
    sweep = Sweep(("tiny",), (), RATES, neighbours=True)
    assert walked(sweep, lambda point, seed: math.inf) == [[((1e-3,), 0), ((2e-3,), 0)]]


def test_values_are_read_as_yaml():
    connection = {"preset": "ddl", "beta_init": 0.5}
    texts = ["train.lr=1e-3,2e-3,0.001", "model.connection=ddl,{preset: ddl, beta_init: 0.5}", "model.mup=true,false"]
    assert parse_over(texts) == {
        "train.lr": (1e-3, 2e-3),
        "model.connection": ("ddl", connection),
        "model.mup": (True, False),
    }
    sweep = Sweep(("tiny",), (), parse_over(texts))
    assert sweep.tuned == ["train.lr"]
    point = dict(zip(sweep.over, (1e-3, connection, True)))
    assert sweep.config(point).model.connection == connection


@pytest.mark.slow
def test_the_command_writes_a_table_a_picture_and_records_and_resumes(data, capsys, tmp_path):
    out = tmp_path / "out"
    argv = ["study", "tune", "--config", "tiny", *OPTIONS, f"--data.path={data}", "--out", str(out)]
    argv += ["--over", "train.lr=1e-3,1e-2", "--over", "model.connection=residual,ddl"]
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "note: one seed each" in text
    assert "written: " + str(out / "sweep.png") in text
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    before = (out / "records.jsonl").read_bytes()
    assert len(before.splitlines()) == 4
    assert not list((out / "runs").iterdir())
    # More seeds join what is there.
    assert main([*argv, "--seeds", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (out / "records.jsonl").read_bytes().startswith(before)
    means = [row["mean"] for row in found["results"]]
    assert means == sorted(means)
    assert all(len(row["losses"]) == 2 and row["half_width"] >= 0 for row in found["results"])
    # Another recipe does not.
    assert main([*argv, "--train.weight_decay", "0.3"]) == 2
    assert "train.weight_decay was 0.1, is 0.3" in capsys.readouterr().err
    # The best one, trained by itself with the command that is printed, comes to the same loss.
    command = found["command"].replace("DIR", str(tmp_path / "best")).split()
    assert main(command[1:]) == 0
    row = jsonlines.read(tmp_path / "best" / "metrics.jsonl")[-1]
    assert row["val_loss"] == found["results"][0]["losses"][0]


def test_a_sweep_resumes_whatever_the_order_of_its_keys(data, tmp_path):
    over = {"model.connection": ("residual",), "train.lr": (1e-3, 2e-3)}
    train_sweep(sweep_of(data, over), tmp_path / "out", progress=False)
    before = (tmp_path / "out" / "records.jsonl").read_bytes()
    again = train_sweep(sweep_of(data, dict(reversed(over.items()))), tmp_path / "out", progress=False)
    assert (tmp_path / "out" / "records.jsonl").read_bytes() == before
    assert len(again.rows) == 2


def test_bases_with_different_tokenizers_can_be_swept(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(" ".join(f"word{(i * j) % 97}" for j in range(200)))
    tokenizers = {"bytes": byte_tokenizer(), "pieces": train_bpe(["word1 word2 word3 word4 word5 word6 " * 40], 262)}
    for name, tokenizer in tokenizers.items():
        save_base(tmp_path / name, vocab_size=320)
        tokenizer.save_pretrained(tmp_path / name)
    options = [option for option in OPTIONS if option.startswith("--train.")]
    options += [f"--data.source={tmp_path / 'text'}", "--model.connection=residual"]
    bases = tuple(str(tmp_path / name) for name in tokenizers)
    for order in (bases, bases[::-1]):  # the second finds all runs finished
        sweep = Sweep(("retrofit",), tuple(options), {"model.base": order})
        outcome = train_sweep(sweep, tmp_path / "out", progress=False)
        assert sorted(row.point["model.base"] for row in outcome.rows) == sorted(bases)
        assert outcome.unit == "bits per byte"
    assert len(jsonlines.read(tmp_path / "out" / "records.jsonl")) == 2


def test_a_resumed_sweep_keeps_the_schedule_of_its_folder():
    sweep = Sweep(("tiny",), ("--train.steps=60",), RATES, begun={"train.warmup_steps": 40})
    assert sweep.config({"train.lr": 1e-3}).train.warmup_steps == 40
    lengths = Sweep(("tiny",), (), {"train.steps": (60, 100)}, begun={"train.warmup_steps": 40})
    assert [lengths.config({"train.steps": steps}).train.warmup_steps for steps in (60, 100)] == [6, 10]


def test_runs_of_different_lengths_have_the_same_schedule_as_shares_of_the_run():
    """So another length may be added to a sweep, but not another schedule."""
    settings = [
        Sweep(("tiny",), overrides, {"train.steps": (60, 100)}).settings({"train.steps": steps})["train.warmup_steps"]
        for overrides, steps in (((), 60), ((), 100), (("--train.warmup_steps=5",), 60))
    ]
    assert settings == ["40 of 400", "40 of 400", 5]


def test_a_run_that_diverges_is_recorded_and_listed_last(data, tmp_path):
    sweep = sweep_of(data, {"train.lr": (1e30, 1e-3)})
    outcome = train_sweep(sweep, tmp_path / "out", progress=False)
    assert [row.point["train.lr"] for row in outcome.rows] == [1e-3, 1e30]
    assert outcome.rows[1].losses("nats per token") == {0: None}
    assert outcome.table().rows[1][-1] == "diverged: 1"
    rows = {row["point"]["train.lr"]: row for row in jsonlines.read(tmp_path / "out" / "records.jsonl")}
    assert "loss and gradient must be finite" in rows[1e30]["diverged"]
    assert not list((tmp_path / "out" / "runs").iterdir())


def test_a_record_with_a_wrong_value_is_refused(data, tmp_path):
    sweep, out = sweep_of(data, {"train.lr": (1e-3,)}), tmp_path / "out"
    train_sweep(sweep, out, progress=False)
    (record,) = jsonlines.read(out / "records.jsonl")
    forged = [{"val_loss": "2.5"}, {"val_loss": 10**400}, {"point": [1e-3]}, {"curve": [[6, "low"]]}, {"steps": -1}]
    for wrong in forged:
        (out / "records.jsonl").write_text(json.dumps(record | wrong) + "\n")
        with pytest.raises(InputError, match=rf"records\.jsonl: {next(iter(wrong))} .* got"):
            train_sweep(sweep, out, progress=False)
    for name, wrong in {"point": {"train.lr": 2e-3}, "seed": 1, "steps": 70}.items():
        (out / "records.jsonl").write_text(json.dumps(record | {"curve": [], name: wrong}) + "\n")
        with pytest.raises(InputError, match=f"{name} of the record .* must be .*, got"):
            train_sweep(sweep, out, progress=False)
    (out / "records.jsonl").write_text(json.dumps({"key": record["key"]}) + "\n")
    with pytest.raises(InputError, match="point, val_loss, got"):
        train_sweep(sweep, out, progress=False)


def test_other_data_under_the_same_path_are_refused(data, tmp_path):
    mine = tmp_path / "data"
    shutil.copytree(data, mine)
    sweep = sweep_of(mine, {"train.lr": (1e-3,)})
    train_sweep(sweep, tmp_path / "out", progress=False)
    shutil.rmtree(mine)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("other words " * 500)
    (tmp_path / "text" / "b.txt").write_text("still other words " * 500)
    prepare(str(tmp_path / "text"), mine, vocab_size=300, validation_fraction=0.5, progress=False)
    with pytest.raises(InputError, match="data was"):
        train_sweep(sweep, tmp_path / "out", progress=False)


def tune(data, out, processes):
    options = ["--config", "tiny", *OPTIONS, f"--data.path={data}", "--over", "train.lr=1e-3,4e-3,1e-2"]
    os._exit(main(["study", "tune", *options, "--out", str(out), "--processes", processes]))


@pytest.mark.processes
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGKILL")
def test_a_sweep_killed_at_any_moment_resumes_with_the_same_numbers(data, tmp_path):
    """It is killed in the middle of a run, with one process and with two workers, which end with their parent."""
    sweep = sweep_of(data, {"train.lr": (1e-3, 4e-3, 1e-2)})
    train_sweep(sweep, tmp_path / "whole", progress=False)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["residua.lab.experiment"])
    out, resumed = tmp_path / "out", 0
    for processes in ("1", "2"):
        process = context.Process(target=tune, args=(data, out, processes))
        process.start()
        before = len(list(out.glob("runs/*/checkpoints/step-*")))
        while process.is_alive() and len(list(out.glob("runs/*/checkpoints/step-*"))) == before:
            time.sleep(0.002)
        process.kill()
        process.join()
        resumed += len(list(out.glob("runs/*/checkpoints/step-*")))
    assert resumed, "no run was killed under way"
    assert len(train_sweep(sweep, out, progress=False).rows) == 3
    assert timeless(out) == timeless(tmp_path / "whole")
    assert not list((out / "runs").iterdir())


@pytest.mark.parametrize("step", [3, 12])
def test_a_signal_ends_a_sweep_also_in_the_last_step_of_a_run(step, data, tmp_path, monkeypatch, capsys):
    take, taken = experiment.Batches.at, []

    def stopped(batches, index):
        taken.append(index)
        if len(taken) == step:
            signal.raise_signal(signal.SIGTERM)
        return take(batches, index)

    monkeypatch.setattr(experiment.Batches, "at", stopped)
    argv = ["study", "tune", "--config", "tiny", *OPTIONS, f"--data.path={data}", "--over", "train.lr=1e-3,2e-3"]
    assert main([*argv, "--out", str(tmp_path / "out")]) == 143
    assert "interrupted; finished runs are in" in capsys.readouterr().err
    assert len(taken) == step
    assert main([*argv, "--out", str(tmp_path / "out")]) == 0
    assert len(taken) == 2 * 12


def test_the_picture_has_every_run_and_the_best_point_at_each_value_of_a_key(tmp_path, monkeypatch):
    sweep = Sweep(("tiny",), (), {"model.connection": ("residual", "ddl"), "train.lr": (1e-3, 2e-3)}, seeds=2)
    losses = {("ddl", 2e-3): 1.0, ("residual", 1e-3): 2.0, ("residual", 2e-3): 3.0, ("ddl", 1e-3): 4.0}
    rows = (row_of(loss, loss + 0.1, name=run[0], **dict(zip(sweep.over, run))) for run, loss in losses.items())
    outcome = Outcome(sweep, tuple(rows), {})
    drawn = {}
    monkeypatch.setattr(figures, "save", lambda pictures, folder: drawn.update(pictures))
    outcome.draw(tmp_path / "sweep.png")
    (panel,) = drawn["sweep.png"].axes  # the key with names makes groups
    lines = [line for line in panel.lines if line.get_marker() == "None"]
    assert [line.get_ydata().tolist() for line in lines] == [[4.05, 1.05], [2.05, 3.05]]
    dots = [loss for line in panel.lines if line not in lines for loss in line.get_ydata()]
    assert sorted(dots) == [1.0, 1.1, 2.0, 2.1, 3.0, 3.1, 4.0, 4.1]


def outcome_of(over, losses, facts=None, bits=None):
    """The outcome of a sweep whose runs came to these losses, by the values of their point."""
    sweep, finished = Sweep(("tiny",), (), over), {}
    for values, loss in losses.items():
        point = dict(zip(over, values))
        data = {"sha256": "text", **(facts or {}).get(values, {})}
        record = {"point": point, "seed": 0, "val_loss": loss, "facts": {"data": data}}
        finished[sweep.job(point, None).key] = record | ({"bits_per_byte": bits[values]} if bits else {})
    return Outcome.of(sweep, finished)


@pytest.mark.parametrize(
    ("key", "values", "said"),
    [
        ("train.sequence_length", (16, 128), "16 tokens"),
        ("train.document_masks", (False, True), "document masks"),
    ],
)
def test_values_with_incomparable_losses_each_have_a_best_point(key, values, said):
    """The longer context has the lower losses, and is not recommended for them."""
    losses = {(value, lr): 4 - place - 100 * lr for place, value in enumerate(values) for lr in (1e-3, 2e-3)}
    outcome = outcome_of({key: values, **RATES}, losses)
    assert [(row.point[key], row.point["train.lr"]) for row in outcome.won] == [(value, 2e-3) for value in values]
    assert outcome.best is None
    assert outcome.to_json()["command"] is None
    assert [f"--{key}={json.dumps(value)}" in c for value, c in zip(values, outcome.commands.values())] == [True] * 2
    assert any("cannot be compared" in note and said in note for note in outcome.notes)


def test_vocabularies_are_ranked_by_bits_per_byte():
    """Nats per token favour the small one."""
    over, losses = {"data.vocab_size": (300, 600)}, {(300,): 2.0, (600,): 2.5}
    facts = {(size,): {"tokenizer": "bpe", "tokenizer_fingerprint": str(size)} for size in (300, 600)}
    outcome = outcome_of(over, losses, facts, {(300,): 1.9, (600,): 1.7})
    assert outcome.best.point == {"data.vocab_size": 600}
    assert outcome.table().header[-1] == "bits per byte"
    assert [row[-1] for row in outcome.table().rows] == ["1.7000 (one seed)", "1.9000 (one seed)"]
    theirs = {place: {**facts[place], "tokenizer": "theirs"} for place in facts}
    for other in (outcome_of(over, losses, theirs, {(300,): 1.9, (600,): 1.7}), outcome_of(over, losses, facts)):
        assert other.best is None
        assert any("cannot be compared" in note and "tokenizers" in note for note in other.notes)


def test_points_of_other_lengths_are_marked():
    outcome = outcome_of({"train.steps": (100, 200)}, {(100,): 3.0, (200,): 2.0})
    assert outcome.best.point == {"train.steps": 200}
    assert any("training tokens" in note for note in outcome.notes)
    assert not any("training tokens" in note for note in outcome_of(RATES, {(1e-3,): 3.0, (2e-3,): 2.0}).notes)


def test_points_with_fewer_seeds_are_listed_below_the_others():
    sweep = Sweep(("tiny",), (), {"train.lr": (1e-3, 2e-3, 4e-3)}, seeds=2, finalists=2)
    losses = {1e-3: (1.5, 2.7), 2e-3: (1.6,), 4e-3: (1.4, 2.9)}
    finished = {}
    for rate, by_seed in losses.items():
        for seed, loss in enumerate(by_seed):
            point = {"train.lr": rate}
            finished[sweep.job(point, seed).key] = {"point": point, "seed": seed, "val_loss": loss}
    outcome = Outcome.of(sweep, finished)
    assert outcome.best.point == {"train.lr": 1e-3}
    header, rows = outcome.table()
    assert header == ["train.lr", "seeds", "validation loss"]
    assert rows[0] == ["0.001", "2", "2.1000 ± 7.6236"]
    assert rows[2] == ["0.002", "1", "1.6000 (one seed)"]
    assert outcome.notes == ["the best train.lr=0.001 is at the edge of what was tried; try further, or --neighbours"]
