"""Pure functions of tensors: every equation of the library, each in one place, with its source."""

from residua.ops.conv import causal_expand, causal_read
from residua.ops.delta import (
    GUARDS,
    Composition,
    Guard,
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
from residua.ops.precision import at_least_float32, linear_at_least_float32
from residua.ops.streams import channel_taps, stream_read

__all__ = [
    "GUARDS",
    "Composition",
    "Guard",
    "at_least_float32",
    "causal_expand",
    "causal_read",
    "channel_taps",
    "compose",
    "delta_inverse",
    "delta_operator",
    "delta_write",
    "delta_write_v1",
    "determinant",
    "eigenvalues",
    "linear_at_least_float32",
    "singular_values",
    "stream_read",
    "unit",
]
