"""Equal to the authors' code: logits, losses and the gradient of every parameter against numbers that it produced.

The numbers are in authors/, whose README says where they come from.
"""

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from residua.models import load_authors_checkpoint
from residua.models.authors import _authors_names
from support.authors_reference import authors_logits

FOLDER = Path(__file__).with_name("authors")
CASES = {case["name"]: case for case in json.loads((FOLDER / "index.json").read_text())["cases"]}
every_case = pytest.mark.parametrize("case", CASES)


def load(case: str, dtype: torch.dtype) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """The configuration, the authors' parameters in `dtype`, and the other tensors of a case."""
    tensors = load_file(FOLDER / CASES[case]["file"])
    state = {
        key.removeprefix("param."): tensor.to(dtype) for key, tensor in tensors.items() if key.startswith("param.")
    }
    return CASES[case]["config"], state, tensors


def aligned_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy for the authors' labels: next tokens, -1 where none counts."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def gradients_by_their_names(model, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our gradients under the authors' names and in their layouts."""
    gradients, theirs = {}, _authors_names(state, model.config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        grad, their_name = parameter.grad, theirs[name]
        if name.endswith(".taps"):
            # Ours are (kernel, d_v, dim) with the current token first, or (kernel, dim) over the channels.
            grad = grad.flip(0).permute(2, 1, 0) if their_name.endswith("conv.weight") else grad.T
            grad = grad.reshape(state[their_name].shape)
        gradients[their_name] = grad
    return gradients


def compare_gradients(model, state, tensors, precision: str, tolerance: float) -> None:
    ours = gradients_by_their_names(model, state)
    expected = {
        key.removeprefix(f"grad.{precision}."): grad for key, grad in tensors.items() if f"grad.{precision}." in key
    }
    assert ours.keys() == expected.keys() == state.keys()
    for name, grad in expected.items():
        assert (ours[name] - grad).norm() <= tolerance * grad.norm(), name


def test_every_file_is_in_the_index():
    assert {case["file"] for case in CASES.values()} == {path.name for path in FOLDER.glob("*.safetensors")}
    assert len(CASES) == 6


@every_case
def test_float64(case):
    """Also the states after each block, which are stored in float32 and in their layout, and the model's own loss."""
    config, state, tensors = load(case, torch.float64)
    model, labels = load_authors_checkpoint(config, state), tensors["labels"]
    assert model.num_parameters() == CASES[case]["n_params"]
    out = model(tensors["input_ids"], shift_labels=labels.masked_fill(labels == -1, -100), output_states=True)
    assert (out.logits - tensors["logits.f64"]).abs().max() <= 1e-9
    for i, ours in enumerate(out.states[1:]):
        expected = tensors[f"act.block{i}_out"]
        ours = ours if ours.dim() == expected.dim() else ours.unsqueeze(-2)
        ours = ours.mT if expected.dim() == 4 else ours
        assert (ours.reshape(expected.shape) - expected).abs().max() <= 1e-5
    for loss in (out.loss, aligned_loss(out.logits, labels)):
        assert abs(loss.item() - tensors["loss.f64"].item()) <= 1e-9
    loss.backward()
    compare_gradients(model, state, tensors, "f64", 1e-7)


@every_case
def test_float32(case):
    config, state, tensors = load(case, torch.float32)
    model = load_authors_checkpoint(config, state)
    logits = model(tensors["input_ids"]).logits
    assert (logits - tensors["logits.f32"]).abs().max() <= 1e-4
    loss = aligned_loss(logits, tensors["labels"])
    assert abs(loss.item() - tensors["loss.f32"].item()) <= 1e-4
    if CASES[case]["has_f32_grads"]:
        loss.backward()
        compare_gradients(model, state, tensors, "f32", 5e-3)


@every_case
def test_the_plain_reference_implementation(case):
    config, state, tensors = load(case, torch.float64)
    assert (authors_logits(config, state, tensors["input_ids"]) - tensors["logits.f64"]).abs().max() <= 1e-9
