import errno
import json
import math
import re
import shutil
import signal
import sys
import types

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

from residua.errors import InputError, RunError
from residua.files import durable
from residua.lab.records import jsonlines
from residua.lab.training import checkpoint as checkpoint_module
from residua.lab.training import loop
from support.full_disk import room
from support.toy_language_model import BATCH, LENGTH, ToyBatches, ToyModel


def weights(folder, step):
    return load_file(folder / "checkpoints" / f"step-{step}" / "model.safetensors")


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_losses_are_those_of_a_plain_loop(name, tmp_path, fit, rows):
    """The plain loop spells out clipping, the schedule, decay on matrices only, accumulation and the order of the
    batches. No setting has its default."""
    settings = {"weight_decay": 0.3, "beta1": 0.8, "beta2": 0.9, "adam_eps": 1e-3, "min_lr_ratio": 0.2}
    settings |= {"gradient_accumulation": 2, "clip": 0.5, "log_every": 1, "optimizer": name}
    result = fit(tmp_path / "run", **settings)

    model, batches, steps, warmup, peak = ToyModel(), ToyBatches(), 12, 2, 0.01
    torch.manual_seed(0)
    matrices, others = [model.embedding.weight], [model.gain, model.hidden.bias]
    optimizers = []
    if name == "muon":
        optimizers = [torch.optim.Muon([model.hidden.weight], weight_decay=0.3, adjust_lr_fn="match_rms_adamw")]
    else:
        matrices.append(model.hidden.weight)
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    optimizers.append(torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3))
    for row in rows(tmp_path / "run"):
        step = row["step"]
        share = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        lr = peak * (step / warmup if step < warmup else 0.2 + 0.8 * share)
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["lr"] = lr
        halves = [model(*batches.at(2 * (step - 1) + half), batches.at(2 * (step - 1) + half)[1]) for half in (0, 1)]
        loss = sum(half.loss for half in halves) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        assert row["loss"] == pytest.approx(loss.item(), rel=1e-5)
        assert row["lr"] == pytest.approx(lr, rel=1e-12)
        assert row["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        assert row["tokens"] == step * 2 * BATCH * LENGTH
    assert norm > 0.5, "the test shall clip"
    assert result["loss"] == row["loss"]


def test_the_logged_loss_is_without_the_penalty_whose_mean_has_a_column_of_its_own(tmp_path, fit, rows):
    class Penalised(ToyModel):
        """The penalty is the number of the forward pass, so that it has no gradient."""

        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            if self.training:
                output.penalty = torch.tensor(float(self.calls))
                output.loss = output.loss + output.penalty
            return output

    for name, model in (("plain", ToyModel()), ("penalised", Penalised())):
        fit(tmp_path / name, model=model, gradient_accumulation=2, log_every=1)
    plain, penalised = rows(tmp_path / "plain"), rows(tmp_path / "penalised")
    assert [row["penalty"] for row in penalised] == [2 * step - 0.5 for step in range(1, 13)]
    assert [row["loss"] for row in penalised] == pytest.approx([row["loss"] for row in plain], abs=1e-5)


def test_a_run_writes_the_files_that_other_tools_read(tmp_path, fit, rows):
    folder = tmp_path / "run"
    result = fit(folder, log_every=5, tensorboard=True, facts={"fingerprint": "abc", "tokens": 7})
    assert [row["step"] for row in rows(folder)] == [4, 5, 8, 10, 12]
    assert [row["step"] for row in rows(folder) if "val_loss" in row] == [4, 8, 12]
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    keys = ["step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second", "seconds", "val_loss"]
    assert list(last) == keys
    assert last["tokens"] == 12 * BATCH * LENGTH, "not the tokens that the evaluation counted"
    assert result == last | {"interrupted": False, "checkpoint": str(folder / "checkpoints" / "step-12")}
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-12", "step-9"]
    (events,) = (folder / "tensorboard").iterdir()
    written = {(event.step, value.tag): value.simple_value
               for event in LegacyEventFileLoader(str(events)).Load() for value in event.summary.value}  # fmt: skip
    numbers = {(row["step"], name): row[name] for row in rows(folder) for name in row if name != "step"}
    assert {place: written[place] for place in numbers} == pytest.approx(numbers)

    facts = json.loads((folder / "facts.json").read_text())
    assert facts["data"] == {"fingerprint": "abc", "tokens": 7}
    assert facts["parameters"] == 11 * 8 + 8 + 8 * 8 + 8
    assert facts["torch"] == torch.__version__
    assert facts["commit"] is None or re.fullmatch("[0-9a-f]{40}(-dirty)?", facts["commit"])
    for name in ("date", "device", "python", "residua", "threads", "transformers"):
        assert name in facts


def test_evaluation_does_not_affect_the_training(tmp_path, fit, rows):
    """Its random numbers, its mode and its frequency do not change the losses."""
    fit(tmp_path / "often", evaluate_every=1)
    fit(tmp_path / "seldom", evaluate_every=12)
    assert [row["loss"] for row in rows(tmp_path / "often")] == [row["loss"] for row in rows(tmp_path / "seldom")]


def test_bfloat16_runs_under_autocast_with_weights_in_float32(tmp_path, fit, rows):
    dtypes = set()
    model = ToyModel()
    model.hidden.register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    fit(tmp_path / "half", precision="bfloat16", model=model)
    assert dtypes == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights(tmp_path / "half", 12).values()} == {torch.float32}
    fit(tmp_path / "full")
    half, full = ([row["loss"] for row in rows(tmp_path / name)] for name in ("half", "full"))
    assert half != full
    assert half == pytest.approx(full, rel=0.05)


@pytest.mark.slow
def test_only_the_forward_pass_is_compiled(tmp_path, fit, rows, monkeypatch):
    """The weights are saved under the names of the model itself."""
    compiled = []
    plain = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: compiled.append(model) or plain(model, backend="eager"))
    model = ToyModel()
    fit(tmp_path / "run", compile=True, model=model, steps=2)
    assert compiled == [model]
    assert "embedding.weight" in weights(tmp_path / "run", 2)


def test_a_missing_device_is_refused(monkeypatch, tmp_path, fit):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loop.pick_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match=r"train\.device .*CUDA"):
        fit(tmp_path / "run", device="cuda")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_restores_the_optimizer_the_clock_and_the_random_state(optimizer, tmp_path, fit, rows):
    """Without dropout's random state or the moments the losses would differ from step 7 on."""
    fit(tmp_path / "whole", optimizer=optimizer)
    folder = tmp_path / "run"
    first = fit(folder, batches=ToyBatches(signals={5: signal.SIGINT}), optimizer=optimizer)
    assert first["step"] == 6
    torch.manual_seed(99)
    batches = ToyBatches()
    fit(folder, resume=True, batches=batches, facts={"tokens": 1}, optimizer=optimizer)
    assert batches.asked == list(range(6, 12))
    assert rows(folder) == rows(tmp_path / "whole")
    seconds = [row["seconds"] for row in jsonlines.read(folder / "metrics.jsonl")]
    assert seconds == sorted(seconds), "the clock goes on where it stood"
    facts = json.loads((folder / "facts.json").read_text())
    assert [entry["step"] for entry in facts["resumed"]] == [6]


def test_resuming_a_finished_run_gives_a_message_and_its_result(tmp_path, fit, capsys):
    first = fit(tmp_path / "run")
    model = ToyModel()
    assert fit(tmp_path / "run", resume=True, model=model) == first
    assert model.calls == 0
    assert "this run is finished" in capsys.readouterr().err
    assert fit(tmp_path / "run", resume=True, progress=lambda step: None) == first
    assert not capsys.readouterr().err, "in a study, other runs follow, and nobody resumes this one"


def test_resume_without_a_checkpoint_starts_again(tmp_path, fit, rows, capsys):
    fit(tmp_path / "whole")
    folder = tmp_path / "run"
    with pytest.raises(RunError):
        fit(folder, model=ToyModel(poison={3: math.nan}))
    assert len(rows(folder)) == 2
    fit(folder, resume=True)
    assert "starting again from the first step" in capsys.readouterr().err
    assert rows(folder) == rows(tmp_path / "whole")


def test_a_run_with_only_damaged_checkpoints_does_not_start_again(tmp_path, fit, rows):
    """The checkpoints may be repairable, and the log is worth keeping."""
    folder = tmp_path / "run"
    fit(folder)
    before = rows(folder)
    for manifest in folder.glob("checkpoints/step-*/manifest.json"):
        manifest.write_text("{}")
    with pytest.raises(InputError, match=r"must hold .* got none"):
        fit(folder, resume=True)
    assert rows(folder) == before
    shutil.rmtree(folder / "checkpoints")
    fit(folder, resume=True)
    assert rows(folder) == before


@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize(("log_every", "noticed"), [(1, 8), (5, 9)])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_loss_that_is_not_finite_stops_the_run_at_its_step(optimizer, factor, log_every, noticed, tmp_path, fit):
    folder = tmp_path / "run"
    model, batches = ToyModel(poison={8: factor}), ToyBatches()
    changes = {"log_every": log_every, "evaluate_every": 100, "checkpoint_every": 3, "optimizer": optimizer}
    with pytest.raises(RunError) as error:
        fit(folder, model=model, batches=batches, **changes)
    message = str(error.value)
    assert message.startswith("step 8: ")
    assert f"last good checkpoint: {folder / 'checkpoints' / 'step-6'}" in message
    assert "embedding.weight nan" in message
    assert "\n" not in message
    assert batches.asked[-1] == noticed - 1, "noticed at the first step that the host waits for"
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-3", "step-6"]

    good = ToyModel()
    fit(tmp_path / "good", model=good, batches=ToyBatches(signals={6: signal.SIGINT}), **changes)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), good.parameters())), "step 8 was applied"


def test_a_gradient_that_is_not_finite_stops_the_run_too(tmp_path, fit):
    model = ToyModel()
    model.hidden.bias.register_hook(lambda gradient: gradient * math.inf)
    model.gain.register_hook(lambda gradient: gradient * 1e6)
    with pytest.raises(RunError, match=r"^step 1: .*got loss \d+\.\d+; .*: hidden\.bias inf, gain [\d.e+]+, "):
        fit(tmp_path / "run", model=model)


@pytest.mark.parametrize(
    ("module", "name", "file", "failure"),
    [
        (checkpoint_module, "save_file", "model", OSError(errno.ENOSPC, "No space left on device")),
        (checkpoint_module, "save_file", "model", SafetensorError("No space left on device (os error 28)")),
        (checkpoint_module, "save_file", "optimizer", SafetensorError("No space left on device (os error 28)")),
        (durable, "publish", "", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_full_disk_while_saving_keeps_the_last_checkpoint(
    module, name, file, failure, tmp_path, fit, rows, monkeypatch
):
    original, folder = getattr(module, name), tmp_path / "run"

    def full(*arguments, **options):
        if "step-6" in str(arguments) and file in str(arguments):
            raise failure
        return original(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, full)
        with pytest.raises(RunError) as error:
            fit(folder)
    message = str(error.value)
    assert message.startswith("step 6: cannot write")
    assert "No space left on device" in message
    assert f"last good checkpoint: {folder / 'checkpoints' / 'step-3'}" in message
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-3"], "no partial one stays"
    fit(folder, resume=True)
    assert [row["step"] for row in rows(folder)] == list(range(1, 13))


@pytest.mark.parametrize("limit", [1200, 4000])
def test_a_short_write_gives_a_one_line_error_and_keeps_earlier_files(limit, tmp_path, fit, rows):
    """A real short write, into the metrics or into the optimizer's file."""
    with room(limit), pytest.raises(RunError, match="File too large") as error:
        fit(tmp_path / "run", checkpoint_every=12)
    assert str(error.value).startswith("step 12: ") == (limit > 1200)
    fit(tmp_path / "run", resume=True, checkpoint_every=12)
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, 13))


def test_without_a_terminal_plain_lines_are_printed(tmp_path, fit, capsys):
    fit(tmp_path / "run", progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/12", "4/12", "8/12", "12/12"], "the first and every evaluation"
    for part in ("loss ", "val ", "tokens/s", "0:00:00 left"):
        assert part in lines[-1]


def test_rows_are_also_logged_to_weights_and_biases(tmp_path, fit, monkeypatch):
    """A stand-in replaces the package, which requires an account: one run there for each folder here, also after
    resuming."""
    begun, logged, finished = [], [], []

    class Run:
        def log(self, row, step):
            logged.append((step, row))

        def finish(self):
            finished.append(True)

    stand_in = types.SimpleNamespace(
        init=lambda **options: begun.append(options) or Run(), Settings=dict, Error=type("Error", (Exception,), {})
    )
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    fit(tmp_path / "run", wandb="mine", log_every=5)
    assert [step for step, _ in logged] == [4, 5, 8, 10, 12]
    assert logged[0][1].keys() >= {"loss", "val_loss", "lr"}
    assert finished == [True]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-12")
    fit(tmp_path / "run", wandb="mine", log_every=5, resume=True)
    first, second = begun
    assert first["project"] == "mine"
    assert first["id"] == second["id"]
    assert first["config"]["train.steps"] == 12
    assert [step for step, _ in logged[5:]] == [10, 12]

    def refuse(**options):
        raise stand_in.Error("no\nkey")

    stand_in.init = refuse
    with pytest.raises(InputError, match=r"train\.wandb: no key; WANDB_MODE=offline"):
        fit(tmp_path / "other", wandb="mine")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(InputError, match=r'pip install "\.\[wandb\]"'):
        fit(tmp_path / "third", wandb="mine")


def test_progress_is_called_with_the_step_at_which_a_run_begins_or_resumes_and_with_each_logged_step(fit, tmp_path):
    """From the first of these the time left is computed: steps before it were done by an earlier process."""
    begun, resumed = [], []
    fit(tmp_path / "run", steps=8, log_every=4, checkpoint_every=8, progress=begun.append)
    fit(tmp_path / "run", steps=12, log_every=4, checkpoint_every=4, resume=True, progress=resumed.append)
    assert (begun, resumed) == ([0, 4, 8], [8, 12])
