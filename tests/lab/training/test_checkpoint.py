import hashlib
import json
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from residua.errors import InputError
from residua.lab.training import checkpoint as checkpoint_module
from residua.lab.training import latest_checkpoint, load_checkpoint, train
from residua.lab.training.checkpoint import Checkpoint, open_checkpoint, saved_steps, snapshot, write_checkpoint
from residua.lab.training.distributed import ALONE
from support.toy_language_model import ToyBatches, ToyModel, toy_config

OPTIMIZER = "optimizer.safetensors"


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(path, **values):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | values))


# What may happen to a checkpoint, and what the message names.
DAMAGE = {
    "no manifest": (
        lambda path: (path / "manifest.json").unlink(),
        "manifest.json cannot be read as JSON: No such file",
    ),
    "half a manifest": (lambda path: cut(path / "manifest.json"), "manifest.json must be JSON"),
    "a manifest of something else": (lambda path: (path / "manifest.json").write_text("[1]"), "must be a mapping"),
    "another step": (lambda path: rewrite(path, step=7), "step must be 12, .*got 7"),
    "a negative step": (lambda path: rewrite(path, step=-5), "step must be 0 or more, got -5"),
    "no file listed": (lambda path: rewrite(path, files={}), "files must be .*safetensors"),
    "an empty folder": (
        lambda path: (shutil.rmtree(path), path.mkdir()),
        "manifest.json cannot be read as JSON: No such",
    ),
    "weights cut short": (lambda path: cut(path / "model.safetensors"), "model.safetensors was cut short or changed"),
    "weights changed": (lambda path: flip(path / "model.safetensors"), "model.safetensors was cut short or changed"),
    "optimizer changed": (lambda path: flip(path / OPTIMIZER), "optimizer.safetensors was cut short or changed"),
    "optimizer missing": (lambda path: (path / OPTIMIZER).unlink(), f"cannot read {OPTIMIZER}: No such file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_skipped_with_a_message(damage, tmp_path, fit, rows, capsys):
    fit(tmp_path / "run")
    before = rows(tmp_path / "run")
    harm, names = DAMAGE[damage]
    newest = tmp_path / "run" / "checkpoints" / "step-12"
    harm(newest)

    with pytest.raises(InputError, match=names):
        open_checkpoint(newest)
    capsys.readouterr()
    assert latest_checkpoint(tmp_path / "run").step == 9
    messages = capsys.readouterr().err.splitlines()
    assert len(messages) == 1
    assert str(newest) in messages[0]

    model = ToyModel()
    fit(tmp_path / "run", resume=True, model=model)
    assert model.calls == 3, "it goes on from step 9"
    assert len([line for line in capsys.readouterr().err.splitlines() if "damaged" in line]) == 1
    assert rows(tmp_path / "run") == before
    assert open_checkpoint(newest).step == 12, "the damaged one is replaced"


@pytest.mark.parametrize("keep_best", [False, True])
def test_a_damaged_checkpoint_does_not_displace_a_valid_one(keep_best, tmp_path, fit):
    """It was saved after step 6, with the best loss of all; the run resumes from step 3 and saves every four steps."""
    folder = tmp_path / "run"
    fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}))
    newest = folder / "checkpoints" / "step-6"
    (newest / "optimizer.safetensors").unlink()
    rewrite(newest, val_loss=0.5)

    losses = iter([1.0, 2.0])
    kept = {"keep_checkpoints": 1, "keep_best": True} if keep_best else {"keep_checkpoints": 2}
    train(
        ToyModel(),
        ToyBatches(signals={7: signal.SIGINT}),
        toy_config(checkpoint_every=4, **kept),
        folder,
        evaluate=lambda model: {"val_loss": next(losses)},
        resume=True,
        progress=False,
    )
    assert saved_steps(folder) == [4, 8]


def test_the_newest_checkpoint_is_found_while_the_run_removes_older_ones(tmp_path, fit, monkeypatch, capsys):
    """A running training publishes one and removes those that were listed: this is no damage, and the run is never
    without one."""
    fit(tmp_path / "run")
    checkpoints, original = tmp_path / "run" / "checkpoints", checkpoint_module.file_sha256

    def go_on(path):
        monkeypatch.setattr(checkpoint_module, "file_sha256", original)
        shutil.copytree(checkpoints / "step-12", checkpoints / "step-15")
        rewrite(checkpoints / "step-15", step=15)
        for old in ("step-9", "step-12"):
            shutil.rmtree(checkpoints / old)
        return original(path)

    monkeypatch.setattr(checkpoint_module, "file_sha256", go_on)
    capsys.readouterr()
    assert latest_checkpoint(tmp_path / "run").path == checkpoints / "step-15"
    assert capsys.readouterr().err == ""


def test_links_in_the_folder_of_a_save_are_neither_followed_nor_changed(tmp_path):
    """They may have been left by a kill or put there by somebody."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "model.safetensors").write_bytes(b"precious")
    (tmp_path / ".step-3.partial").symlink_to("victim")
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters())
    blocks = snapshot(model, optimizer, torch.device("cpu"), ALONE)
    saved = write_checkpoint(Checkpoint(tmp_path / "step-3", 3, 0.0, {}), blocks)
    assert open_checkpoint(saved.path) == saved
    assert (tmp_path / "victim" / "model.safetensors").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-3.partial", "step-3", "victim"]


def test_without_a_checkpoint_the_newest_is_none(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "checkpoints" / "step-x").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-3.partial").mkdir()
    assert latest_checkpoint(tmp_path) is None


def test_weights_are_readable_by_other_users_and_shared_ones_are_saved_once(tmp_path, fit):
    model = ToyModel()
    fit(tmp_path / "run", model=model)
    path = tmp_path / "run" / "checkpoints" / "step-12"
    tensors = load_file(path / "model.safetensors")
    assert set(tensors) == {"embedding.weight", "gain", "hidden.weight", "hidden.bias", "scale"}
    assert torch.equal(tensors["embedding.weight"], model.head.weight)

    other = ToyModel()
    load_checkpoint(open_checkpoint(path), other)
    assert other.head.weight is other.embedding.weight, "still tied"
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values()))
    kept = load_file(path / OPTIMIZER)
    assert kept["optimizer.gain.exp_avg"].shape == (8,)
    assert kept["optimizer.gain.step"] == 12
    assert kept["random.cpu.0"].dtype == torch.uint8
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1, "safetensors' own files are closed to others"
    assert json.loads((path / "manifest.json").read_text())["settings"]["train.lr"] == 0.01


def test_frozen_weights_are_in_a_checkpoint_unless_they_are_stored_elsewhere(tmp_path, fit):
    """A backbone frozen by the user would otherwise be built at random when the run is opened."""
    model = ToyModel()
    model.gain.requires_grad_(False)
    fit(tmp_path / "run", model=model)
    other = ToyModel()
    other.gain.data.fill_(7.0)
    load_checkpoint(latest_checkpoint(tmp_path / "run"), other)
    assert torch.equal(other.gain, model.gain)

    model.kept_elsewhere = {"gain"}
    fit(tmp_path / "apart", model=model)
    other.gain.data.fill_(7.0)
    other.kept_elsewhere = {"gain"}
    load_checkpoint(latest_checkpoint(tmp_path / "apart"), other)
    assert torch.equal(other.gain, torch.full_like(other.gain, 7.0))


def test_weights_of_another_model_are_refused_before_any_is_loaded(tmp_path, fit):
    fit(tmp_path / "run")
    model = ToyModel()
    model.hidden = nn.Linear(8, 8, bias=False)
    model.gain = nn.Parameter(torch.ones(9))
    model.extra = nn.Parameter(torch.zeros(1))
    before = model.embedding.weight.clone()
    with pytest.raises(InputError) as error:
        load_checkpoint(open_checkpoint(tmp_path / "run" / "checkpoints" / "step-12"), model)
    for part in (
        "extra (absent in the file, [1] in the model)",
        "gain ([8] in the file, [9] in the model)",
        "hidden.bias ([8] in the file, absent in the model)",
    ):
        assert part in str(error.value)
    assert torch.equal(model.embedding.weight, before)


def test_a_checkpoint_with_other_settings_is_refused(tmp_path, fit):
    """This holds even if config.yaml agrees: the checkpoint stores the settings that it was made with."""
    fit(tmp_path / "one", lr=0.01)
    fit(tmp_path / "two", lr=0.02)
    shutil.rmtree(tmp_path / "two" / "checkpoints")
    shutil.copytree(tmp_path / "one" / "checkpoints", tmp_path / "two" / "checkpoints")
    with pytest.raises(InputError, match=r"step-12: .*train\.lr was 0\.01, is 0\.02"):
        fit(tmp_path / "two", resume=True, lr=0.02)


@pytest.mark.parametrize(
    "files", [{"../x": {"sha256": ""}}, {"/dev/zero": {"sha256": ""}}, {"model.safetensors": 3}], ids=str
)
def test_a_manifest_may_name_only_files_of_its_folder(files, tmp_path, fit):
    fit(tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run").path
    rewrite(path, files=files)
    with pytest.raises(InputError, match=r"in this folder|a mapping"):
        open_checkpoint(path)


def test_a_manifest_of_a_step_beyond_the_run_is_refused(tmp_path, fit):
    fit(tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run").path
    rewrite(path.rename(path.with_name("step-15")), step=15)
    with pytest.raises(InputError, match=r"step-15 must be at most train\.steps, 12, got 15"):
        fit(tmp_path / "run", resume=True)


def shortened(state):
    state["optimizer.gain.exp_avg"] = state["optimizer.gain.exp_avg"][:3].clone()


def widened(state):
    state["optimizer.gain.exp_avg_sq"] = state["optimizer.gain.exp_avg_sq"].double()


def many_steps(state):
    state["optimizer.gain.step"] = torch.ones(2)


@pytest.mark.parametrize(
    ("forge", "named"),
    [
        (shortened, r"optimizer\.gain\.exp_avg must be \(8,\) .* got \(3,\)"),
        (widened, r"optimizer\.gain\.exp_avg_sq must be .*float32, got .*float64"),
        (many_steps, r"optimizer\.gain\.step must be \(\) .* got \(2,\)"),
        (lambda state: state.pop("optimizer.gain.exp_avg"), r"optimizer\.gain must have .*'exp_avg'"),
        (lambda state: state.update({"optimizer.lost.exp_avg": torch.ones(8)}), "lost"),
        (lambda state: state.update({"random.cpu.0": torch.zeros(9, dtype=torch.uint8)}), r"random\.cpu\.0 must be"),
    ],
)
def test_a_state_of_the_optimizer_that_does_not_fit_its_weight_is_refused(forge, named, tmp_path, fit):
    """A fused optimizer would read beyond a state that is smaller than its weight."""
    fit(tmp_path / "run")
    path = latest_checkpoint(tmp_path / "run").path
    state = load_file(path / OPTIMIZER)
    forge(state)
    save_file(state, path / OPTIMIZER)
    manifest = json.loads((path / "manifest.json").read_text())
    content = (path / OPTIMIZER).read_bytes()
    manifest["files"][OPTIMIZER] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    model = ToyModel()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(InputError, match=named):
        load_checkpoint(open_checkpoint(path), model, optimizer)
    assert not optimizer.state or "random" in named


def test_a_run_with_a_transposed_weight_resumes_with_the_same_numbers(tmp_path, fit):
    """A fused optimizer reads weight and state in one order of bytes, whatever their strides."""

    def model():
        made = ToyModel()
        made.hidden.weight = nn.Parameter(made.hidden.weight.detach().t().contiguous().t())
        return made

    whole = fit(tmp_path / "whole", model=model())
    assert whole["loss"] == pytest.approx(fit(tmp_path / "contiguous")["loss"], rel=1e-5)
    fit(tmp_path / "run", model=model(), batches=ToyBatches(signals={6: signal.SIGINT}))
    assert fit(tmp_path / "run", model=model(), resume=True)["loss"] == whole["loss"]
