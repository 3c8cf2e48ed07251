"""The facts of a connection for spectra and telemetry: its shortcut, its gates and its weights over depth."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class RankOne(NamedTuple):
    """A shortcut that moves every row of the state along one direction: X -> X - beta (X k) k^T, then + beta v k^T.

    beta: (batch, seq); k: (batch, seq, dim), of length 1 up to the eps of its norm; readout = X k: (batch, seq, rows);
    v: (batch, seq, rows), the value that the write moves the readout towards, or None if beta does not gate the write.
    read_share: (rows,), the weight of each row in the sublayer's input, with sum 1; None if there are no such weights.
    A sequence axis of size 1 means that all tokens share the coefficients.
    """

    beta: Tensor
    k: Tensor
    readout: Tensor
    v: Tensor | None = None
    read_share: Tensor | None = None


class Mixing(NamedTuple):
    """A shortcut that mixes the rows of the state: X'[o] = sum_i h_res[o, i] X[i].

    h_res: (batch, seq, n, n), target row first; h_pre, h_post: (batch, seq, n), the weights that read and write the
    rows, or None if a scheme has no such weights. Leading axes may be missing or 1 if tokens share the
    coefficients. gates: the gates (batch, seq) that h_res depends on, by name. left_out: the names of mappings and
    gates that the scheme lacks, or that this connection omits because they could change nothing; their tensors hold
    trivial values.
    """

    h_res: Tensor
    h_pre: Tensor | None = None
    h_post: Tensor | None = None
    gates: Mapping[str, Tensor] = {}
    left_out: tuple[str, ...] = ()


class GateFacts(NamedTuple):
    """The facts of a gate. range: the bounds near which its gradient vanishes; start: its initial value.

    `range` is None if the gate is unbounded, `start` is None if the initial value depends on the token.
    """

    range: tuple[float, float] | None = None
    start: float | None = None


class DepthWeights(NamedTuple):
    """The weights with which a connection reads its sources: the embedding, sublayers' outputs, or sums of outputs.

    weights: (batch, seq, reads, sources); leading axes may be missing or 1 if tokens share the coefficients.
    sources: for each source the sublayers that wrote it; range(-1, 0) for the embedding, None for a learned source.
    reads: names of the reads if a connection has several, such as ("q", "k", "v").
    """

    weights: Tensor
    sources: tuple[range | None, ...]
    reads: tuple[str, ...] = ()


EMBEDDING = range(-1, 0)
"""The embedding as a source of `DepthWeights`: before sublayer 0."""
