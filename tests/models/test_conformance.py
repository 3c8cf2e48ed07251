"""Logits, losses and the gradient of every parameter equal those that both of the authors' codes computed.

The numbers are in authors/ (their first code) and authors/current/, whose READMEs say where they come from.
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
from support.tolerances import assert_close

FOLDER = Path(__file__).with_name("authors")
CURRENT = json.loads((FOLDER / "current" / "index.json").read_text())
FIRST_CASES = {case["name"]: case for case in json.loads((FOLDER / "index.json").read_text())["cases"]}
CURRENT_CASES = {
    f"current {case['name']}": case | {"file": f"current/{case['file']}"}
    for case in CURRENT["cases"] + CURRENT["refused"]
}
REFUSED = f"current {CURRENT['refused'][0]['name']}"
CASES = FIRST_CASES | {name: case for name, case in CURRENT_CASES.items() if name != REFUSED}
every_case = pytest.mark.parametrize("case", CASES)
current_case = pytest.mark.parametrize("case", [name for name in CASES if name in CURRENT_CASES])


def load(name: str, dtype: torch.dtype) -> tuple[dict, dict[str, Tensor], dict[str, Tensor]]:
    """The configuration, the authors' parameters in `dtype`, and the other tensors of a case."""
    case = (FIRST_CASES | CURRENT_CASES)[name]
    tensors = load_file(FOLDER / case["file"])
    state = {
        key.removeprefix("param."): tensor.to(dtype) for key, tensor in tensors.items() if key.startswith("param.")
    }
    return case["config"], state, tensors


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
            grad = grad.flip(0).permute(2, 1, 0) if grad.dim() == 3 else grad.T
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


def test_every_test_vector_is_in_the_index():
    files = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.safetensors")}
    assert {case["file"] for case in (FIRST_CASES | CURRENT_CASES).values()} == files
    assert len(FIRST_CASES) == 6
    assert len(CURRENT_CASES) == 7


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
def test_the_reference_implementation_matches_the_test_vectors(case):
    config, state, tensors = load(case, torch.float64)
    assert (authors_logits(config, state, tensors["input_ids"]) - tensors["logits.f64"]).abs().max() <= 1e-9


@torch.no_grad()
@current_case
def test_padded_and_packed_rows_match_the_test_vectors(case):
    """Rows padded on the left, with positions or without; documents packed by cumulative lengths."""
    config, state, tensors = load(case, torch.float64)
    model, mask = load_authors_checkpoint(config, state), tensors["pad.attention_mask"]
    for positions in (None, tensors["pad.position_ids"]):
        logits = model(tensors["pad.input_ids"], attention_mask=mask, position_ids=positions).logits
        assert (logits - tensors["pad.logits.f64"])[mask.bool()].abs().max() <= 1e-9
    lengths, expected = tensors["packed.cu_seqlens"], tensors["packed.logits.f64"]
    logits = model(tensors["input_ids"].reshape(1, -1), cu_seq_lens_q=lengths, cu_seq_lens_k=lengths).logits
    assert (logits.view_as(expected) - expected).abs().max() <= 1e-9


@torch.no_grad()
@current_case
def test_a_saved_configuration_has_the_keys_of_the_authors(case):
    """A config.json has keys of transformers in addition to the authors' keys."""
    config, state, tensors = load(case, torch.float64)
    model = load_authors_checkpoint(config | CURRENT["config_json"], state)
    assert (model(tensors["input_ids"]).logits - tensors["logits.f64"]).abs().max() <= 1e-9


def test_updates_that_are_scaled_are_refused():
    config, state, _ = load(REFUSED, torch.float64)
    with pytest.raises(ValueError, match=r"residual_branch_mult .*0\.5"):
        load_authors_checkpoint(config, state)


@pytest.mark.parametrize("variation", CURRENT["variations"], ids=lambda variation: json.dumps(variation["change"]))
def test_variations_of_a_configuration_are_accepted_or_refused_as_listed(variation):
    config, state, tensors = load(REFUSED, torch.float64)
    if variation["expect"] == "accept":
        logits = load_authors_checkpoint(config | variation["change"], state)(tensors["input_ids"]).logits
        assert_close(logits, authors_logits(config | variation["change"], state, tensors["input_ids"]))
    else:
        (name, value) = next((name, value) for name, value in variation["change"].items() if value is not None)
        with pytest.raises(ValueError, match=f"{name} .*{value}"):
            load_authors_checkpoint(config | variation["change"], state)
