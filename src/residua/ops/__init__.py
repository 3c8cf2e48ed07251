"""Pure functions of tensors: every equation of the library, once, with its source."""

from residua.ops.conv import causal_expand, causal_read, causal_read_on
from residua.ops.delta import (
    K_NORMS,
    Composition,
    KNorm,
    compose,
    delta_inverse,
    delta_operator,
    delta_write,
    delta_write_v1,
    determinant,
    eigenvalues,
    singular_values,
    unit,
)
from residua.ops.depth import depth_mix, depth_read
from residua.ops.gated import gated_delta, inverse_length
from residua.ops.norm import rms_norm
from residua.ops.orthogonal import (
    CAYLEY_STARTS,
    CayleyStart,
    cayley,
    cayley_angle,
    cayley_apply,
    cayley_transform,
    gate_penalty,
    householder,
    hybrid,
    iterative_cayley,
)
from residua.ops.precision import at_least_float32, linear_at_least_float32
from residua.ops.sinkhorn import guarded_sinkhorn, kronecker_mixture, permutation_mixture, permutations, sinkhorn
from residua.ops.streams import channel_taps, hyper_mix, hyper_read, hyper_write, stream_read
from residua.ops.update import orthogonal_update, residual_scale, scaled_sum

__all__ = [
    "CAYLEY_STARTS",
    "K_NORMS",
    "CayleyStart",
    "Composition",
    "KNorm",
    "at_least_float32",
    "causal_expand",
    "causal_read",
    "causal_read_on",
    "cayley",
    "cayley_angle",
    "cayley_apply",
    "cayley_transform",
    "channel_taps",
    "compose",
    "delta_inverse",
    "delta_operator",
    "delta_write",
    "delta_write_v1",
    "depth_mix",
    "depth_read",
    "determinant",
    "eigenvalues",
    "gate_penalty",
    "gated_delta",
    "guarded_sinkhorn",
    "householder",
    "hybrid",
    "hyper_mix",
    "hyper_read",
    "hyper_write",
    "inverse_length",
    "iterative_cayley",
    "kronecker_mixture",
    "linear_at_least_float32",
    "orthogonal_update",
    "permutation_mixture",
    "permutations",
    "residual_scale",
    "rms_norm",
    "scaled_sum",
    "singular_values",
    "sinkhorn",
    "stream_read",
    "unit",
]
