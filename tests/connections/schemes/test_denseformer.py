"""DenseFormer against the published form, the plain residual, and what may be kept."""

import pytest
from torch import Tensor

from residua import DenseFormer
from support.references import assert_computes, rms_norm
from support.variants import perturbed

DIM = 8


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
