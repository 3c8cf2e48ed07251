"""DenseFormer against the published form, the plain residual, and what may be kept."""

import pytest
import torch
from torch import Tensor

from residua import DenseFormer, Residual
from residua.connections import resolve
from support.references import assert_computes
from support.variants import bare_sublayers, normal, perturbed

DIM = 8


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def published(stream, x: Tensor, sublayers: list, dilation: int, period: int) -> Tensor:
    """All outputs in one list; after block i the average over those at a distance that the dilation divides.

    The last block may have one sublayer.
    """
    outputs, y = [x], x
    averages = [part.average for part in [*stream.connections[2::2], stream.collapse]]
    for first in range(0, len(sublayers), 2):
        for i in range(first, min(first + 2, len(sublayers))):
            y = y + sublayers[i](rms_norm(y, stream.connections[i].norm.weight))
        outputs.append(y)
        block = first // 2 + 1
        average = averages.pop(0)
        if block % period == 0:
            weights = iter(average.weights)
            y = sum(next(weights) * output for j, output in enumerate(outputs) if (block - j) % dilation == 0)
            assert next(weights, None) is None
        else:
            assert average is None
    return y


@pytest.mark.parametrize("sublayers", [1, 2, 7, 10])
@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (3, 2), (2, 5)])
def test_values_and_gradients_are_those_of_the_published_form(dilation, period, sublayers):
    stream = perturbed(DenseFormer(dilation=dilation, period=period).build(DIM, sublayers)).double()
    assert_computes(stream, published, dilation, period)


@pytest.mark.parametrize("options", [{}, {"dilation": 2}, {"period": 3}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_starts_as_the_plain_residual_to_the_last_bit(options, dtype):
    x, functions = normal(2, 5, DIM, dtype=dtype), bare_sublayers(DIM, 7)
    ours, plain = DenseFormer(**options).build(DIM, 7).to(dtype), Residual().build(DIM, 7).to(dtype)
    assert torch.equal(ours(x, functions), plain(x, functions))


def test_averages_are_float32_in_a_bfloat16_model():
    stream = perturbed(resolve("denseformer").build(DIM, 4)).to(torch.bfloat16)
    state = tuple(normal(2, 3, DIM, seed=i, dtype=torch.bfloat16) for i in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        x, carry = stream.connections[2].average(state), stream.connections[2].read(state)[1]
    assert carry.coefficients.weights.dtype == torch.float32
    exact = sum(w * source.double() for w, source in zip(stream.connections[2].average.weights.double(), state))
    assert torch.equal(x[0], exact.to(torch.bfloat16))
