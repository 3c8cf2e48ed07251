import pytest
import torch

from benchmarks.exact import check
from residua.connections import PRESETS
from residua.errors import RunError
from residua.lab.experiment import model_config
from residua.lab.training import load_config
from support.tiny_models import TINY_RUN


def checked(connection, **changes):
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config("tiny", {**TINY_RUN, "model.connection": connection, **keys})
    return check(config, model_config(config))


class Slightly(torch.nn.Module):
    """A faulty fast path: the loss or one gradient of the model inside is a little off."""

    def __init__(self, model, fault):
        super().__init__()
        self.model, self.fault = model, fault

    def forward(self, **batch):
        output = self.model(**batch)
        if self.fault == "loss":
            output.loss = output.loss * 1.001
        elif self.fault == "gradient":
            gain = self.model.model.norm.weight
            output.loss = output.loss + 1e-3 * (gain - gain.detach()).sum()  # adds nothing to the loss itself
        else:
            output.loss = output.loss / 0
        return output


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_passes_the_check(preset):
    checked(preset)


def test_bfloat16_computes_other_numbers_and_passes_its_own_check():
    in_float32, in_bfloat16 = (checked("ddl-tc", train__precision=name) for name in ("float32", "bfloat16"))
    assert in_bfloat16.gradient > 100 * in_float32.gradient


@pytest.mark.parametrize("fault", ["loss", "gradient", "infinite"])
def test_no_speed_is_reported_for_a_wrong_fast_path(monkeypatch, fault):
    monkeypatch.setattr(torch, "compile", lambda model, **options: Slightly(model, fault))
    message = r"^residual must have the (loss|gradient) within "
    with pytest.raises(RunError, match=message):
        checked("residual", train__compile=True)


@pytest.mark.interpreter
def test_kernels_are_checked_against_the_plain_definitions():
    """No kernel takes float64."""
    pytest.importorskip("triton", reason='triton is not installed: pip install ".[kernels]"')
    checked("mhc:implementation=triton")
