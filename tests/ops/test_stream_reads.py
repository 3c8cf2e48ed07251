"""Reading one sequence from several streams, and the weights a convolution over streams with a read amounts to."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import channel_taps, linear_at_least_float32, rms_norm, stream_read
from support.delta_cases import assert_equals_with_gradients, generator, normal
from support.tolerances import assert_close

CONVOLUTIONS = [(kernel, streams) for streams in range(1, 6) for kernel in range(1, streams + 1)]


def convolve_then_read(streams, conv, read, causal):
    """streams: (batch, seq, streams, dim): a zero-padded convolution over the streams, then the read vector."""
    kernel, dim = conv.shape
    left = kernel - 1 if causal else (kernel - 1) // 2
    columns = F.pad(streams.flatten(0, 1).mT, (left, kernel - 1 - left))
    convolved = F.conv1d(columns, conv.mT.unsqueeze(1), groups=dim)
    return (convolved @ read).unflatten(0, streams.shape[:2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kernel", "num_streams"), CONVOLUTIONS)
def test_channel_taps_are_the_convolution_followed_by_the_read(kernel, num_streams, causal):
    g = generator(10 * kernel + num_streams)
    streams, conv, read = normal(g, 2, 3, num_streams, 4), normal(g, kernel, 4), normal(g, num_streams)
    assert_equals_with_gradients(
        lambda streams, conv, read: stream_read(streams, channel_taps(conv, read, causal=causal)),
        lambda streams, conv, read: convolve_then_read(streams, conv, read, causal),
        *(streams, conv, read),
    )


def test_channel_taps_can_reach_every_weight():
    """With an even read of 1 / streams and the longest kernel, the map from kernel to weights loses nothing."""
    for m in range(1, 6):
        columns = [
            channel_taps(torch.eye(m).double()[:, i : i + 1], torch.full((m,), 1 / m).double()) for i in range(m)
        ]
        assert torch.linalg.matrix_rank(torch.cat(columns, -1)) == m


def test_a_kernel_longer_than_the_streams_is_an_error():
    with pytest.raises(ValueError, match=r"at most 4 taps, .*got 5"):
        channel_taps(torch.ones(5, 2), torch.ones(4))


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 2**31))
def test_stream_read_is_the_weighted_sum(num_streams, dim, seed):
    g = generator(seed)
    streams, weights = normal(g, 2, 3, num_streams, dim), normal(g, num_streams, dim)
    assert_close(stream_read(streams, weights), torch.einsum("btjd,jd->btd", streams, weights))
    average = torch.full_like(weights, 1 / num_streams)
    assert_close(stream_read(streams, average), streams.mean(-2))


def test_weights_with_the_wrong_shape_are_named():
    for shape in [(1, 5), (2, 5), (3, 1), (3,)]:
        with pytest.raises(ValueError, match=r"^weights must be \(streams, dim\) = \(3, 5\), got \("):
            stream_read(torch.ones(2, 3, 5), torch.ones(shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_token_needs_no_other_axes(dtype):
    streams, weights = (normal(generator(i), 3, 4).to(dtype).requires_grad_() for i in range(2))
    x = linear_at_least_float32(rms_norm(stream_read(streams, weights), weights[0]), weights)
    x.sum().backward()
    assert x.shape == (3,)
    assert streams.grad.shape == weights.grad.shape == (3, 4)
