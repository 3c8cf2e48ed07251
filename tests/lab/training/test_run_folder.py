import json
import os
import shutil
import signal
from unittest.mock import Mock

import pytest
import yaml

from residua.errors import InputError, RunError
from residua.files.durable import remove
from residua.lab.records import folder as folders
from residua.lab.records.folder import hold
from residua.lab.training import claim, latest_checkpoint, log
from residua.lab.training import folder as folder_module
from support.toy_language_model import ToyBatches


@pytest.mark.parametrize(
    "names",
    [
        ["config.yaml"],
        [".lock", "records.jsonl", "settings.json"],
        [".lock", "settings.json", "study.json"],
        ["checkpoints", "config.yaml", "data", "tokenizer", "train.py"],  # a project
        ["checkpoints"],
    ],
)
def test_a_folder_of_the_wrong_kind_is_refused_and_unchanged(names, tmp_path, fit):
    """The folder of a study is an example."""
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=f"{tmp_path.name} must be .*, got"):
        fit(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(path.read_text() == "mine" for path in tmp_path.iterdir())


def test_a_copy_of_a_run_without_hidden_files_is_told_to_resume_and_unchanged(tmp_path, fit):
    for name in ("config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match="holds a run already; continue it with --resume"):
        fit(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.yaml": "mine",
        "metrics.jsonl": "mine",
    }


def test_a_run_that_ended_before_its_first_step_starts_over(tmp_path):
    with claim(tmp_path / "run", {"train": {"lr": 1.0}}) as run:
        (run.path / "data").mkdir()
        run.metrics.touch()  # as of a run whose disk was full before the first row
    with claim(tmp_path / "run", {"train": {"lr": 2.0}}) as run:
        assert yaml.safe_load(run.config.read_text()) == {"train": {"lr": 2.0}}


@pytest.mark.parametrize("there", [False, True])
def test_resuming_without_a_run_is_refused(there, tmp_path, fit):
    if there:
        (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match=r"must be a run .*config\.yaml"):
        fit(tmp_path / "run", resume=True)
    assert not there or not list((tmp_path / "run").iterdir())


def test_resume_allows_what_does_not_change_the_numbers(tmp_path, fit, rows):
    fit(tmp_path / "whole")
    folder = tmp_path / "run"
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    changes = {"checkpoint_every": 1, "keep_checkpoints": 5, "evaluate_every": 2, "device": "auto", "compile": False}
    fit(folder, resume=True, **changes)
    assert [row["loss"] for row in rows(folder)] == [row["loss"] for row in rows(tmp_path / "whole")]
    assert yaml.safe_load((folder / "config.yaml").read_text())["train"]["keep_checkpoints"] == 5


def test_resume_refuses_what_changes_the_numbers_and_names_it(tmp_path, fit):
    folder = tmp_path / "run"
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    before = (folder / "config.yaml").read_bytes()
    with pytest.raises(InputError) as error:
        fit(folder, resume=True, steps=20, lr=0.5, keep_checkpoints=1)
    assert "train.lr was 0.01, is 0.5; train.steps was 12, is 20" in str(error.value)
    assert "keep_checkpoints" not in str(error.value)
    assert (folder / "config.yaml").read_bytes() == before


def test_a_refused_resume_does_not_change_the_settings(tmp_path, fit):
    """The last checkpoint of the run is damaged, so it is not finished and cannot have more steps."""
    folder = tmp_path / "run"
    fit(folder, checkpoint_every=6, keep_checkpoints=2)
    before = (folder / "config.yaml").read_bytes()
    (folder / "checkpoints" / "step-12" / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match=r"train\.steps was 12, is 20"):
        fit(folder, resume=True, steps=20)
    assert (folder / "config.yaml").read_bytes() == before
    assert fit(folder, resume=True)["step"] == 12


def test_two_processes_do_not_share_a_folder(tmp_path, fit, monkeypatch):
    """A lock of this process counts as that of another one."""
    monkeypatch.setattr(folder_module, "PATIENCE_SECONDS", 0.1)
    fit(tmp_path / "run", batches=ToyBatches(signals={5: signal.SIGINT}))
    with hold(tmp_path / "run", markers=["config.yaml"]):
        for resume in (False, True):
            with pytest.raises(InputError, match="another process"):
                fit(tmp_path / "run", resume=resume)
    assert fit(tmp_path / "run", resume=True)["step"] == 12


def test_the_printed_command_to_resume_quotes_spaces(tmp_path):
    with claim(tmp_path / "my run", {"train": {}}) as run:
        assert run.resume_command == f"residua train --run '{tmp_path}/my run' --resume"


@pytest.mark.parametrize("there", ["nothing", "an empty folder", "a run"])
def test_a_run_that_is_refused_can_be_started_again_and_leaves_no_new_folder(there, tmp_path, fit, monkeypatch):
    folder = tmp_path / "run"
    if there == "an empty folder":
        folder.mkdir()
    elif there == "a run":
        fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))

    monkeypatch.setattr(log, "_wandb_run", Mock(side_effect=InputError("no login")))
    with pytest.raises(InputError, match="no login"):
        fit(folder, resume=there == "a run", wandb="mine", log_every=2)
    assert folder.exists() == (there != "nothing")
    monkeypatch.undo()
    assert fit(folder, resume=there == "a run")["step"] == 12


def test_a_run_that_fails_after_its_first_rows_keeps_its_folder(tmp_path, fit):
    class Failing(ToyBatches):
        def at(self, index):
            if index == 2:
                raise MemoryError
            return super().at(index)

    with pytest.raises(MemoryError):
        fit(tmp_path / "run", batches=Failing())
    assert {"config.yaml", "facts.json", "metrics.jsonl"} <= {path.name for path in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("made", [False, True])
def test_files_written_while_a_run_waits_for_its_folder_are_kept(made, tmp_path, fit, monkeypatch):
    """Of two runs that start in the same new folder, one ends just before the other gets the lock."""
    folder = tmp_path / "run"
    if made:
        folder.mkdir()

    def other_first(*arguments, **options):
        monkeypatch.undo()
        fit(folder)
        return hold(*arguments, **options)

    monkeypatch.setattr(folder_module, "hold", other_first)
    with pytest.raises(InputError, match="run already"):
        fit(folder)
    assert latest_checkpoint(folder).step == 12
    assert {"config.yaml", "facts.json", "metrics.jsonl"} <= {path.name for path in folder.iterdir()}


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("when", ["at the start", "between"])
def test_an_owner_may_link_the_checkpoints_to_another_disk(when, tmp_path, fit, rows):
    folder, scratch = tmp_path / "run", tmp_path / "scratch"
    folder.mkdir()
    if when == "at the start":
        scratch.mkdir()
        (folder / "checkpoints").symlink_to(scratch)
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    if when == "between":
        (folder / "checkpoints").rename(scratch)
        (folder / "checkpoints").symlink_to(scratch)
    assert fit(folder, resume=True)["step"] == 12
    assert (scratch / "step-12").is_dir()
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
def test_a_planted_link_never_leads_checkpoints_into_another_folder(tmp_path, fit):
    folder, outside = tmp_path / "run", tmp_path / "outside"
    outside.mkdir()
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    (folder / "checkpoints").rename(tmp_path / "moved")
    (folder / "checkpoints").symlink_to(outside)
    with pytest.raises(InputError, match=r"checkpoints must hold .* got none"):
        fit(folder, resume=True)
    assert not list(outside.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="links need rights on Windows")
@pytest.mark.parametrize("earlier", [True, False])
@pytest.mark.parametrize("linked", [True, False])
def test_a_copied_run_deletes_no_checkpoints_of_another_run(linked, earlier, tmp_path, fit):
    """The copy links to the checkpoints of the original, in the same folder or on another disk, or is of an earlier
    version."""
    mine, theirs, place = tmp_path / "mine", tmp_path / "theirs", tmp_path / "mine" / "checkpoints"
    fit(mine, batches=ToyBatches(signals={5: signal.SIGINT}))
    if linked:
        place = place.rename(tmp_path / "scratch")
        (mine / "checkpoints").symlink_to(place)
    if earlier:
        for path in place.glob("*/manifest.json"):
            path.write_text(json.dumps({key: x for key, x in json.loads(path.read_text()).items() if key != "run"}))
    shutil.copytree(mine, theirs, symlinks=True, ignore=shutil.ignore_patterns("step-*"))
    remove(theirs / "checkpoints")
    (theirs / "checkpoints").symlink_to(place)
    before = sorted(place.iterdir())
    with pytest.raises(InputError, match=r"checkpoints must be .* got a link to "):
        fit(theirs, resume=True)
    assert sorted(place.iterdir()) == before


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_a_run_whose_folder_is_removed_ends_with_an_error(how, tmp_path, fit, monkeypatch):
    monkeypatch.setattr(folders, "LEASE_SECONDS", 1.0)  # the lease goes with the folder
    folder = tmp_path / "run"

    class Goes(ToyBatches):
        def at(self, index):
            if index == 7:
                folder.rename(tmp_path / "elsewhere")
                if how == "deleted":
                    shutil.rmtree(tmp_path / "elsewhere")
                elif how == "replaced":
                    shutil.copytree(tmp_path / "elsewhere", folder)
            return super().at(index)

    with pytest.raises(RunError, match="moved, deleted or replaced"):
        fit(folder, batches=Goes())
    assert folder.exists() == (how == "replaced")
    if how == "moved":
        assert fit(tmp_path / "elsewhere", resume=True)["step"] == 12


def test_a_finished_run_whose_last_row_is_cut_returns_no_earlier_row(tmp_path, fit):
    fit(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"metrics\.jsonl must be rows up to step 12, got "):
        fit(tmp_path / "run", resume=True)


def test_a_finished_run_can_be_trained_further_with_a_note_on_its_schedule(tmp_path, fit, rows, capsys):
    folder = tmp_path / "run"
    fit(folder)
    capsys.readouterr()
    with pytest.raises(InputError, match=r"train\.steps was 12, is 10"):
        fit(folder, resume=True, steps=10)
    assert fit(folder, resume=True, steps=16)["step"] == 16
    said = capsys.readouterr().err
    assert "after its last step, 12, this run goes on to 16: its learning rate rises again, to " in said
    assert [row["step"] for row in rows(folder)] == list(range(1, 17))
    assert fit(folder, resume=True, steps=16)["step"] == 16
    assert json.loads((folder / "facts.json").read_text())["resumed"][0]["steps_before"] == 12
