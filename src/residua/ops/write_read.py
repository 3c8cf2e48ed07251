"""One operation for everything between two sublayers: the write of the first and the read of the second."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from residua.ops.conv import causal_read
from residua.ops.delta import KNorm, delta_write, expect_write
from residua.ops.dispatch import Implementation, choose
from residua.ops.norm import rms_norm
from residua.ops.precision import linear_at_least_float32
from residua.ops.shapes import expect_shape
from residua.ops.streams import stream_read

ValueInput = Literal["x_in", "context"]


class Boundary(NamedTuple):
    """The written state: (..., value_channels, dim), the context c = RMSNorm(x_in): (..., dim), and in at least float32
    the products gate: (...,) and value: (..., value_channels), still without biases and activations.
    """

    state: Tensor
    context: Tensor
    gate: Tensor
    value: Tensor


def choose_boundary(implementation: Implementation, *tensors: Tensor) -> Literal["reference", "triton"]:
    """Choose as `choose`, but "auto" takes a kernel only if nothing needs a gradient: the backward kernels spill.

    experiments/kernel-resources.jsonl has the registers and the stack of the code that is compiled for every kernel.
    """
    if implementation == "auto" and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "reference"
    return choose(implementation, *tensors)


def boundary(
    state: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    weights: Tensor,
    gain: Tensor,
    gate_weight: Tensor,
    value_weight: Tensor,
    *,
    k_norm: KNorm | None = "rms",
    eps: float = 1e-5,
    norm_eps: float = 1e-5,
    value_input: ValueInput = "x_in",
    recompute_every: int = 1,
    implementation: Implementation = "reference",
) -> Boundary:
    """X' = X + beta k (v^T - k^T X); x_in = sum_j weights[j] X'[j]; c = gain x_in / rms(x_in); the gate's product
    gate_weight . c and the value's products value_weight x_in, or value_weight c with `value_input="context"`.

    state: (..., value_channels, dim), k: (..., dim), v: (..., value_channels), beta: (...,), `recompute_every` as in
    `delta_write`, `implementation` as in `choose_boundary`; weights: (value_channels, dim) as in `stream_read`, for
    channel compression, or the taps (kernel, value_channels, dim) of `causal_read` on a state
    (..., seq, value_channels, dim), for token compression; gain and gate_weight: (dim,), value_weight:
    (value_channels, dim) belong to the sublayer that follows. Results in the dtype of `state`, products in at least
    float32. Other shapes and options raise ValueError. arXiv 2601.00417v2 section 4.2.
    """
    channels, dim = state.shape[-2:]
    expect_write(state, k, v, beta, k_norm)
    expect_shape("weights", weights, (*weights.shape[:-2], channels, dim), "(..., value_channels, dim)")
    expect_shape("gain", gain, (dim,), "(dim,)")
    expect_shape("gate_weight", gate_weight, (dim,), "(dim,)")
    expect_shape("value_weight", value_weight, (channels, dim), "(value_channels, dim)")
    if value_input not in ("x_in", "context"):
        raise ValueError(f"value_input must be 'x_in' or 'context', got {value_input!r}")
    over_tokens = weights.dim() == 3
    if over_tokens and state.dim() < 3:
        raise ValueError(f"state must be (..., seq, value_channels, dim), got {tuple(state.shape)}")
    tensors = (state, k, v, beta, weights, gain, gate_weight, value_weight)
    if choose_boundary(implementation, *tensors) == "triton":
        from residua.ops.kernels import channel_boundary, token_boundary

        kernel = token_boundary.token_boundary if over_tokens else channel_boundary.channel_boundary
        return Boundary(*kernel(*tensors, k_norm, eps, norm_eps, value_input, recompute_every))
    written = delta_write(state, k, v, beta, k_norm=k_norm, eps=eps, recompute_every=recompute_every)
    x = causal_read(written, weights) if over_tokens else stream_read(written, weights)
    context = rms_norm(x, gain, norm_eps)
    gate = linear_at_least_float32(context, gate_weight.unsqueeze(0)).squeeze(-1)
    value = linear_at_least_float32(x if value_input == "x_in" else context, value_weight)
    return Boundary(written, context, gate, value)
