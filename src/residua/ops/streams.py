"""Reading one sublayer input from several streams of the residual state."""

import torch
from torch import Tensor

from residua.ops.precision import at_least_float32
from residua.ops.shapes import expect_shape


def stream_read(streams: Tensor, weights: Tensor) -> Tensor:
    """x = sum_j weights[j] X[j], one weight for each stream and feature: DDL's channel compression (CC).

    streams: (..., streams, dim), weights: (streams, dim). Returns (..., dim) in the dtype of `streams`; computed in
    float32 at least. Raises ValueError where the two shapes do not match. arXiv 2601.00417v2, coefficients c_{i,j}.
    """
    expect_shape("weights", weights, streams.shape[-2:], "(streams, dim)")
    return (streams * at_least_float32(weights)).sum(-2).to(streams.dtype)


def channel_taps(conv: Tensor, read: Tensor, *, causal: bool = False) -> Tensor:
    """The weights c[j] that a zero-padded convolution over the streams followed by a read vector amounts to.

    y[a] = sum_i conv[i] X[a + i - p], x = sum_a read[a] y[a], so c[j] = sum_a read[a] conv[j - a + p], where
    p = (kernel - 1) // 2 centres the kernel, or p = kernel - 1 lets it see only streams up to a (`causal`).

    conv: (kernel, dim), read: (streams,). Returns (streams, dim) in the wider of the two dtypes, float32 at least: a
    sum of a few products is worth its digits. Raises ValueError where the kernel is longer than the streams.
    """
    kernel, num_streams = conv.shape[0], read.shape[0]
    if kernel > num_streams:
        raise ValueError(f"conv: expected a kernel of at most {num_streams} taps, one for each stream, got {kernel}")
    conv, read = at_least_float32(conv), at_least_float32(read)
    shift = kernel - 1 if causal else (kernel - 1) // 2
    weights = torch.zeros(
        num_streams, conv.shape[1], dtype=torch.promote_types(conv.dtype, read.dtype), device=conv.device
    )
    for i in range(kernel):
        # Tap i carries stream j = a + i - shift into position a.
        low, high = max(0, i - shift), min(num_streams, num_streams + i - shift)
        weights[low:high] += read[low - i + shift : high - i + shift, None] * conv[i]
    return weights
