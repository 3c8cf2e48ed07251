import json
import math

import pytest
import yaml

import residua
from residua.connections import describe, resolve
from residua.errors import InputError
from residua.lab.evaluation.compare import compare
from residua.lab.records.statistics import Estimate


def test_runs_that_differ_only_in_the_seed_form_a_group(make_run):
    folders = [make_run("a1", seed=1), make_run("b0", connection="ddl", offset=-0.1), make_run("a0", seed=0)]
    folders.append(make_run("b1", connection="ddl", seed=1, offset=-0.1))
    comparison = compare(folders)
    assert [(group.name, group.seeds) for group in comparison.rows] == [("residual", (0, 1)), ("ddl", (0, 1))]
    assert comparison.baseline is comparison.rows[0]
    assert comparison.rows[0].loss("nats per token") == pytest.approx((4.035, 0.01 / math.sqrt(2), 2))
    assert comparison.notes == ()


def test_further_facts_do_not_split_a_group(make_run):
    logging = {"connections_every": 10, "wandb": "mine", "tensorboard": False}
    (group,) = compare([make_run("a", seed=0), make_run("b", seed=1, **logging)]).rows
    assert group.seeds == (0, 1)


def test_a_connection_with_all_its_options_has_a_short_name(make_run):
    converted = make_run("a", connection=describe(resolve("ihc:start=residual")))
    elsewhere = make_run("b", connection={"scheme": "theirs", "order": 2})
    assert [row.name for row in compare([converted, elsewhere]).rows] == ["ihc:start=residual", "theirs:order=2"]


def test_changed_connections_form_groups_named_as_residua_resolves_them(make_run):
    changed = make_run("c", connection={"preset": "ddl-tc", "value_channels": 8})
    control = make_run("control", connection="residual:compress=token")
    comparison = compare([make_run("a"), control, changed, make_run("d", connection="ddl-tc")])
    names = [group.name for group in comparison.rows]
    assert names == ["residual", "residual+tc", "ddl-tc:value_channels=8", "ddl-tc"]
    assert [residua.resolve(name).compress for name in names[:2]] == [None, "token"]
    assert comparison.settings == {}


def test_runs_of_one_scheme_are_named_after_their_folders_and_their_differing_settings_are_listed(make_run):
    runs = [make_run(f"slow-{seed}", seed=seed, lr=2e-3) for seed in (10, 11)]
    runs += [make_run("fast", checkpoint_every=7), make_run("d", connection="ddl")]
    comparison = compare(runs)
    assert [group.name for group in comparison.rows] == ["slow", "fast", "d"]
    assert comparison.baseline.name == "slow"
    assert comparison.setting_lines() == [
        "model.connection: residual (slow, fast); ddl (d)",
        "train.lr: 0.002 (slow); 0.001 (fast, d)",
    ]
    assert "\nSettings that differ:\n\n- model.connection" in comparison.to_markdown()
    assert "\n- train.lr: 0.002 (slow)" in comparison.to_markdown()


def test_folders_of_the_same_name_are_named_with_their_parents(make_run, tmp_path):
    for place in ("x", "y"):
        (tmp_path / place).mkdir()
    runs = [make_run("x/run"), make_run("y/run", lr=2e-3), make_run("z", lr=3e-3)]
    names = [group.name for group in compare(runs).rows]
    assert len({*names}) == 3
    assert [name.endswith(end) for name, end in zip(names, ("x/run", "y/run", "z"))] == [True] * 3


def test_a_table_of_many_runs_and_long_settings_is_readable_in_80_columns(make_run):
    runs = [make_run(f"run-{number:02}x", lr=number / 7) for number in range(1, 20)]
    comparison = compare([*runs, make_run("other", connection="ddl")])
    assert max(map(len, comparison.setting_lines())) <= 80
    assert max(len(row[0]) for row in comparison.table().rows) < 10


def test_differences_are_paired_by_seed_so_that_shared_noise_vanishes(make_run):
    runs = [make_run(f"a{s}", seed=s, offset=0.5 * s) for s in (0, 1, 2)]
    runs += [make_run(f"b{s}", connection="ddl", seed=s, offset=0.5 * s - 0.2 + 0.01 * s) for s in (0, 1, 2)]
    comparison = compare(runs)
    _, difference = comparison.final_difference(comparison.rows[1])
    assert difference.mean == pytest.approx(-0.19)
    assert difference.deviation == pytest.approx(0.01)
    assert difference.count == 3
    assert comparison.rows[1].loss("nats per token").deviation > 0.5


def test_without_a_shared_seed_the_means_are_compared_with_a_note(make_run):
    runs = [make_run(f"a{s}", seed=s) for s in (0, 1)]
    runs += [make_run(f"b{s}", connection="ddl", seed=s) for s in (7, 8)]
    comparison = compare(runs)
    _, difference = comparison.final_difference(comparison.rows[1])
    assert difference.mean == pytest.approx(0.07)
    assert difference.deviation == pytest.approx(math.hypot(0.01, 0.01) / math.sqrt(2))
    assert difference.count == 0
    assert any("share no seed" in note for note in comparison.notes)


def test_differences_are_taken_at_equal_steps_or_at_equal_seconds(make_run):
    # The slow run loses the same at every step, so at equal seconds it is behind by the steps it has not made yet.
    comparison = compare([make_run("a"), make_run("b", connection="ddl", seconds_per_step=1.0)])
    slow = comparison.rows[1]
    assert [d.mean for d in comparison.differences(slow, "step").values()] == pytest.approx([0.0] * 10)
    by_seconds = {at: d.mean for at, d in comparison.differences(slow, "seconds").items()}
    assert min(by_seconds) == 10.0
    assert max(by_seconds) == 50.0
    assert by_seconds[40.0] == pytest.approx(3 / 40 - 3 / 80)


def test_runs_of_different_length_are_compared_over_their_common_steps(make_run):
    comparison = compare([make_run("a", steps=100), make_run("b", connection="ddl", steps=60, offset=-0.1)])
    group = comparison.rows[1]
    at, difference = comparison.final_difference(group)
    assert (at, difference.mean) == (64 * 60, pytest.approx(-0.1))
    assert any("3,840 tokens" in note for note in comparison.notes)


def test_a_run_without_validation_has_a_row_but_no_difference(make_run):
    comparison = compare([make_run("a"), make_run("b", connection="ddl", evaluate=False)])
    _, rows = comparison.table()
    assert rows[1][:4] == ["ddl", "seed 0", "–", "–"]
    assert rows[1][4:] == ["1,234", "128", "50.0"]
    assert any("no validation loss" in note for note in comparison.notes)


def test_runs_whose_evaluations_do_not_overlap_have_a_reason_in_place_of_a_difference(make_run):
    comparison = compare([make_run("a", every=100), make_run("b", connection="ddl", steps=60, every=60)])
    assert [row[3] for row in comparison.table().rows] == ["baseline", "–"]
    (note,) = (note for note in comparison.notes if note.startswith("ddl: no difference"))
    assert "evaluate more often with train.evaluate_every" in note


def test_an_empty_metrics_file_is_a_run_that_has_just_begun(make_run):
    folder = make_run("a")
    (folder / "metrics.jsonl").write_text("")
    _, rows = compare([folder]).table()
    assert rows == [["residual", "seed 0", "–", "baseline", "1,234", "–", "–"]]


def test_a_run_that_was_stopped_is_marked(make_run):
    comparison = compare([make_run("a"), make_run("b", connection="ddl", crashed_at=40)])
    assert [row[2].endswith("*") for row in comparison.table().rows] == [False, True]
    assert [row[3].endswith("*") for row in comparison.table().rows] == [False, True]
    assert any("b ended at step 40 of 100" in note for note in comparison.notes)
    assert [group["stopped"] for group in comparison.to_json()["groups"]] == [[], [[40, 100]]]


def test_the_longer_of_two_runs_with_the_same_seed_is_used(make_run):
    crashed, finished = make_run("crashed", offset=1.0, crashed_at=40), make_run("finished")
    for folders in ((crashed, finished), (finished, crashed)):
        comparison = compare(folders)
        assert [run.folder.name for run in comparison.rows[0].runs] == ["finished"]
        (note,) = comparison.notes
        assert f"{crashed} repeats {finished}, which came to step 100" in note


def test_losses_of_different_contexts_are_not_compared(make_run):
    runs = [make_run("a", sequence_length=128), make_run("b", sequence_length=256)]
    runs.append(make_run("c", connection="ddl", sequence_length=128))
    comparison = compare(runs)
    (note,) = (note for note in comparison.notes if "context" in note)
    assert note.startswith("b cannot be compared with a: ")
    assert "256 and 128 tokens" in note
    assert [row[3] for row in comparison.table().rows] == ["baseline", "–", "+0.0000"]
    assert comparison.to_json()["groups"][1]["difference"] is None
    assert not [note for note in compare([runs[0], runs[2]]).notes if "context" in note]


def test_masked_and_unmasked_validation_are_not_compared(make_run):
    comparison = compare([make_run("a"), make_run("b", connection="ddl", document_masks=True, offset=-0.1)])
    assert comparison.table().rows[1][3] == "–"
    assert any("ddl cannot be compared with residual" in note and "document masks" in note for note in comparison.notes)


def data_of(folder, bits=None, **facts):
    """Give a planted run facts of its data, and its losses in bits per byte."""
    path = folder / "facts.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"data": content["data"] | {"sha256": "text", **facts}}))
    if bits is not None:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row | ({"bits_per_byte": bits * row["val_loss"]} if "val_loss" in row else {}) for row in rows]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_losses_of_lossless_tokenizers_are_compared_in_bits_per_byte(make_run):
    bpe = data_of(make_run("a"), 0.4, tokenizer="bpe", tokenizer_fingerprint="1")
    bytes_ = make_run("b", connection="ddl", fingerprint="corpus-b", offset=-2.0)
    comparison = compare([bpe, data_of(bytes_, 1.4, tokenizer="byte", tokenizer_fingerprint="2")])
    assert comparison.unit == "bits per byte"
    assert comparison.table().header[2] == "bits per byte"
    assert comparison.final_difference(comparison.rows[1])[1].mean == pytest.approx(1.4 * 2.03 - 0.4 * 4.03)
    assert comparison.to_json()["groups"][1]["val_loss"]["mean"] == pytest.approx(2.03)
    lossy = make_run("c", connection="mhc", fingerprint="corpus-c", offset=-3.0)
    comparison = compare([bpe, data_of(lossy, 0.1, tokenizer="theirs", tokenizer_fingerprint="3")])
    assert comparison.table().rows[1][2:4] == ["1.0300", "–"]
    assert any("mhc cannot be compared with residual" in note and "tokenizers" in note for note in comparison.notes)


def test_runs_validated_on_different_texts_are_not_compared(make_run):
    runs = [make_run("a"), make_run("b", connection="ddl", fingerprint="corpus-b")]
    for run, text in zip(runs, ("x", "y")):
        data_of(run, 0.4, sha256=text, tokenizer="bpe", tokenizer_fingerprint="1")
    comparison = compare(runs)
    assert comparison.table().rows[1][3] == "–"
    assert any("different held-out texts" in note for note in comparison.notes)


def test_a_difference_in_precision_is_noted(make_run):
    runs = [make_run("a", precision="float32"), make_run("b", connection="ddl", precision="bfloat16")]
    comparison = compare(runs)
    assert comparison.table().rows[1][3] == "+0.0000"
    assert any("bfloat16 and float32" in note for note in comparison.notes)


def test_the_steps_of_a_run_that_was_trained_further_are_listed_in_full(make_run):
    runs = [make_run("a", steps=100), make_run("b", steps=100)]
    for run, before in zip(runs, (12_345_678, 12_345_679)):
        facts = json.loads((run / "facts.json").read_text())
        resumed = [{"step": 50, "steps_before": before}]
        (run / "facts.json").write_text(json.dumps(facts | {"resumed": resumed}))
    (line,) = compare(runs).setting_lines()
    assert line == "train.steps: 12345678, then 100 (a); 12345679, then 100 (b)"


@pytest.mark.parametrize("place", ["tokens", "seconds"])
def test_a_loss_without_its_place_in_the_run_is_refused(place, make_run):
    metrics = make_run("a") / "metrics.jsonl"
    for row in ({"step": 999, "loss": 1.0, "tokens": 1, "seconds": 1, place: None}, {"step": 999, "loss": 1.0}):
        metrics.write_text(json.dumps(row) + "\n")
        with pytest.raises(InputError, match=rf"metrics\.jsonl: {'tokens' if len(row) == 2 else place} must be"):
            compare([metrics.parent])


def test_a_factor_that_is_not_a_number_gives_no_token_count(make_run):
    run = make_run("a", steps=10**7, crashed_at=10, batch_size=10**7, sequence_length=10**7, gradient_accumulation="x")
    assert compare([run]).rows[0].measure.tokens is None


def test_a_count_of_only_the_trained_parameters_is_noted(make_run):
    runs = [make_run("a"), make_run("b", connection="ihc")]
    config = yaml.safe_load((runs[1] / "config.yaml").read_text())
    config["model"]["freeze_base"] = True
    (runs[1] / "config.yaml").write_text(yaml.safe_dump(config))
    assert [note for note in compare(runs).notes if "freeze_base" in note and note.startswith("ihc")]
    assert not [note for note in compare(runs[:1]).notes if "freeze_base" in note]


def test_the_same_folder_counts_once_and_a_repeated_seed_is_left_out_with_a_note(make_run):
    a, copy = make_run("a"), make_run("copy", offset=1.0)
    comparison = compare([a, a.parent / "." / "a", copy])
    assert comparison.rows[0].seeds == (0,)
    assert comparison.rows[0].loss("nats per token").mean == pytest.approx(4.03)
    assert [note for note in comparison.notes if "repeats" in note and "copy" in note]


def test_data_are_distinguished_by_their_fingerprint(make_run):
    comparison = compare([make_run("a"), make_run("b", connection="ddl", fingerprint="corpus-b")])
    assert any("different held-out texts" in note for note in comparison.notes)


def test_a_loss_that_is_not_finite_is_shown_and_never_hidden(make_run):
    comparison = compare([make_run("a"), make_run("b", connection="ddl", not_finite_at=100)])
    _, rows = comparison.table()
    assert rows[1][2:4] == ["nan", "+nan"]
    assert any("not finite" in note for note in comparison.notes)
    plain = comparison.to_json()
    assert plain["groups"][1]["val_loss"]["mean"] is None
    json.dumps(plain, allow_nan=False)


def test_the_baseline_can_be_named_and_a_wrong_name_gets_a_suggestion(make_run):
    folders = [make_run("a"), make_run("b", connection="ddl", offset=-0.1)]
    comparison = compare(folders, baseline="ddl")
    assert comparison.final_difference(comparison.rows[0])[1].mean == pytest.approx(0.1)
    with pytest.raises(InputError, match="did you mean residual"):
        compare(folders, baseline="residul")


def test_without_a_plain_residual_there_is_no_baseline(make_run):
    comparison = compare([make_run("a", connection="ddl"), make_run("b", connection="mhc")])
    assert comparison.baseline is None
    assert any("name a baseline" in note for note in comparison.notes)


def test_a_table_tells_a_seed_from_a_number_of_seeds(make_run):
    runs = [make_run("a"), *(make_run(f"b{seed}", connection="ddl", seed=seed) for seed in (0, 1))]
    header, rows = compare(runs).table()
    assert header[1] == "seed"
    assert [row[1] for row in rows] == ["seed 0", "seeds 0, 1"]


def test_a_group_keeps_its_colour_whatever_the_baseline_is(make_run):
    ddl, mhc = make_run("b", connection="ddl"), make_run("c", connection="mhc")
    folders = [ddl, make_run("a"), mhc, make_run("slow", lr=2e-3)]
    for baseline in (None, "ddl", "mhc", "slow"):  # a scheme that one group has names it too
        assert compare(folders, baseline=baseline).colours == {"a": 0, "b": 1, "c": 2, "slow": 3}
    with pytest.raises(InputError, match="b, a, c, slow; got residual"):
        compare(folders, baseline="residual")
    assert compare([ddl, mhc], baseline="mhc").colours == {"ddl": 1, "mhc": 2}


@pytest.mark.parametrize(
    ("mean", "deviation", "count", "seen"),
    [
        (-0.0011, None, 1, False),  # one seed
        (-0.2, 0.02, 0, False),  # no shared one
        (-0.2, 0.03, 2, False),  # ± 12.706 * 0.03 / sqrt(2) = 0.27
        (-0.2, 0.02, 2, True),
        (0.0, 0.0, 5, False),
        (-0.2, 0.0, 2, False),  # equal by chance or by mistake
        (math.nan, math.nan, 3, False),
    ],
)
def test_a_difference_is_marked_if_its_interval_excludes_zero(mean, deviation, count, seen):
    assert Estimate(mean, deviation, count).seen is seen


def test_markdown_has_a_column_for_every_heading(make_run):
    text = compare([make_run("a"), make_run("b", connection="ddl", offset=-0.1)]).to_markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "-0.1000" in lines[3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.yaml", text) for text in (None, "a: [1", "- 1", "{}", "model: {connection: {}}")),
        *(("facts.json", text) for text in ("{", "[]")),
        ("metrics.jsonl", None),
    ],
)
def test_a_missing_or_damaged_file_is_named(make_run, name, content):
    folder = make_run("a")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(InputError, match=name):
        compare([folder])


def test_nothing_to_compare_is_an_input_error():
    with pytest.raises(InputError, match="at least one"):
        compare([])


def test_a_run_with_an_unshared_seed_does_not_shorten_the_others(make_run):
    short = make_run("short", connection="ddl", seed=1, crashed_at=40)
    comparison = compare([make_run("a"), make_run("b", connection="ddl", offset=-0.1), short])
    group = comparison.rows[1]
    assert group.seeds == (0, 1)
    assert group.tokens == 64 * 40, "of the shortest"
    at, difference = comparison.final_difference(group)
    assert (at, difference.mean, difference.count) == (6400, pytest.approx(-0.1), 1)
    assert comparison.notes[1:] == ("ddl: the difference is over the 1 of 2 seeds that are shared.",)
    assert "short ended at step 40" in comparison.notes[0]


def test_one_evaluation_each_is_enough_for_a_difference(make_run):
    comparison = compare([make_run("a", steps=10), make_run("b", connection="ddl", steps=10, offset=-0.1)])
    assert [d.mean for d in comparison.differences(comparison.rows[1]).values()] == pytest.approx([-0.1])


def test_a_loss_that_is_not_finite_affects_only_its_own_step(make_run):
    comparison = compare([make_run("a", steps=30), make_run("b", connection="ddl", steps=30, not_finite_at=20)])
    assert [math.isnan(d.mean) for d in comparison.differences(comparison.rows[1]).values()] == [False, True, False]
