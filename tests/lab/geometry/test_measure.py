import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from residua.lab.geometry.measure import causality, full_and_online, norm_deviation, position0, stream_norms
from residua.lab.geometry.references import expected_first_point, predictors, running_mean, solved_rotation
from residua.lab.geometry.tasks import task

copy = torch.clone
GYROSCOPE = replace(task("gyroscope"), length=24, num_train=1, num_val=1000)


@pytest.fixture(scope="module")
def data():
    return GYROSCOPE.data()


def given_the_plane(inputs):
    """A leak: position 0 is predicted from later inputs, all other positions only from earlier inputs."""
    honest = solved_rotation(inputs)
    if inputs.shape[1] == 1:
        return honest
    return torch.cat((inputs[:, 1:2], honest[:, 1:]), dim=1)


def shifted_mean(inputs):
    """A weak leak: a little of the mean over the whole sequence is added to every output."""
    return inputs + 1e-4 * inputs.mean(1, keepdim=True)


class Network(nn.Module):
    """Linear, causal or pooled over the sequence, with dropout and parameters."""

    def __init__(self, dim, pooled, strength=1.0):
        super().__init__()
        self.map = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(0.5)
        self.pooled, self.strength = pooled, strength

    def forward(self, x):
        context = x.mean(1, keepdim=True) if self.pooled else x
        return x + self.strength * self.dropout(self.map(context))


@pytest.mark.parametrize("model", [copy, running_mean, solved_rotation, Network(16, pooled=False)])
def test_a_causal_model_is_found_causal(model):
    assert causality(model, 16, 12) == (True, 0)


@pytest.mark.parametrize("model", [shifted_mean, Network(16, pooled=True), Network(16, pooled=True, strength=1e-6)])
def test_a_model_that_reads_the_last_position_is_found_not_causal(model):
    causal, change = causality(model, 16, 12)
    assert 0 < change < 1
    assert not causal


def test_reading_one_step_ahead_is_detected_even_if_position_0_is_unaffected():
    def peek(x):
        return torch.cat((x[:, 1:], x[:, -1:]), dim=1)

    assert not causality(peek, 4, 6).causal


def test_a_model_is_measured_in_float64_and_is_unchanged():
    seen = []

    class Watched(Network):
        def forward(self, x):
            seen.append((x.dtype, self.training))
            return super().forward(x)

    model = Watched(8, pooled=False).train()
    assert causality(model, 8, 5).causal
    assert seen == [(torch.float64, False)] * 2
    assert model.training
    assert model.dropout.training
    assert model.map.weight.dtype == torch.float32
    assert model.map.weight.grad is None


def test_the_causality_of_outputs_that_are_not_finite_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        causality(lambda x: x / 0, 4, 3)


@pytest.mark.parametrize("stride", [1, 5])
@pytest.mark.parametrize("model", [running_mean, Network(16, pooled=False)])
def test_the_online_and_the_full_loss_agree_for_a_causal_model(data, model, stride):
    scores = full_and_online(model, *data[2:], trajectories=32, stride=stride)
    assert scores.online_loss == pytest.approx(scores.loss, rel=1e-5)
    assert abs(scores.online_difference) < 1e-6
    if model is running_mean:
        expected = (model(data.val_inputs).double() - data.val_targets).square()
        assert scores.loss == pytest.approx(expected.mean().item())
        assert scores.by_position == pytest.approx(expected.mean((0, 2)).tolist())


def test_the_online_loss_is_computed_from_prefixes_for_every_model(data):
    """There is no short cut: a model that seems causal is run on prefixes too."""
    lengths = []

    def model(x):
        lengths.append(x.shape[1])
        return copy(x)

    full_and_online(model, data.val_inputs[:4], data.val_targets[:4])
    assert lengths == [24, *range(1, 25)]
    lengths.clear()
    full_and_online(model, data.val_inputs[:4], data.val_targets[:4], stride=6)
    assert lengths == [24, 1, 2, 3, 4, 5, 6, 7, 13, 19]


def test_the_online_score_is_the_exact_mean_when_all_is_measured(data):
    inputs, targets = data.val_inputs[:10], data.val_targets[:10]
    scores = full_and_online(shifted_mean, inputs, targets, trajectories=10)
    online = torch.stack([shifted_mean(inputs[:, : t + 1])[:, -1] for t in range(24)], dim=1)
    assert scores.online_loss == pytest.approx((online - targets).square().mean().item(), rel=1e-5)
    assert [position for position, _, _ in scores.online_by_position] == list(range(24))
    assert scores.online_difference == pytest.approx(scores.online_loss - scores.loss)


def test_a_model_with_a_leak_loses_its_advantage_online(data):
    scores = full_and_online(given_the_plane, *data[2:], trajectories=200, stride=4)
    assert scores.online_difference > 5 * scores.online_difference_error
    position, online, full = scores.online_by_position[0]
    assert position == 0
    assert full == 0
    assert online > 1e-3
    # Position 0 alone differs, and stands for one position of 24.
    assert scores.online_difference == pytest.approx(online / 24)


def error0(predict, data):
    """The mean squared error at position 0, and its standard error."""
    errors = (predict(data.val_inputs) - data.val_targets)[:, 0].square().mean(-1).double()
    return errors.mean().item(), errors.std().item() / math.sqrt(len(errors))


def test_the_leak_detector_passes_what_is_causal(data):
    for reference in predictors(GYROSCOPE).values():
        assert not position0(reference.predict, data).position0_leak
    best = position0(solved_rotation, data)
    assert best.position0_difference == pytest.approx(0, abs=1e-8)
    loss, error = error0(solved_rotation, data)
    assert abs(loss - best.position0_floor) < 4 * error
    copied, error = error0(copy, data)
    assert copied == pytest.approx(1.238e-2, abs=4 * error)
    assert position0(copy, data).position0_difference == pytest.approx(copied - loss)


def test_the_leak_detector_catches_a_model_that_knows_the_plane(data):
    assert position0(given_the_plane, data).position0_leak

    def partly(inputs):
        """Sees the next input with noise: 5 % below the floor, as a pooled model may be."""
        predictions = solved_rotation(inputs)
        predictions[:, 0] = 0.975 * expected_first_point(inputs) + 0.025 * inputs[:, 1]
        return predictions

    assert 0.9 < error0(partly, data)[0] / error0(solved_rotation, data)[0] < 0.97
    assert position0(partly, data).position0_leak


def test_norm_deviation_is_zero_for_copying_and_large_for_a_good_denoiser():
    assert norm_deviation(copy, 64) == pytest.approx(0, abs=1e-6)
    expected = sum(1 - 1 / math.sqrt(t) for t in range(1, 101)) / 100
    assert norm_deviation(running_mean, 64) == pytest.approx(expected, abs=0.01)


def test_norm_deviation_averages_over_sequences_first():
    def uneven(x):
        signs = torch.tensor([1.5, 0.5]).repeat(len(x) // 2).view(-1, 1, 1)
        return x * signs

    assert norm_deviation(uneven, 8) == pytest.approx(0, abs=1e-6)
    assert norm_deviation(lambda x: 3 * x, 8, length=6) == pytest.approx(2, abs=1e-6)


def test_stream_norms_take_the_whole_state_of_a_token():
    first = torch.tensor([[[[3.0, 0.0], [0.0, 4.0]], [[1.0, 0.0], [0.0, 0.0]]]])  # norms 5 and 1
    second = torch.tensor([[[[0.0, 10.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]]])  # norms 10 and 4
    assert stream_norms([first, second]) == pytest.approx([1, 3])
    assert stream_norms([first.flatten(2)]) == [1]


def test_stream_norms_take_every_tensor_of_a_state_that_grows():
    first = torch.tensor([[[3.0, 0.0], [0.0, 1.0]]])  # norms 3 and 1
    written = torch.tensor([[[0.0, 4.0], [0.0, 0.0]]])  # with the first: 5 and 1
    assert stream_norms([(first,), (first, written)]) == pytest.approx([1, (5 / 3 + 1) / 2])
