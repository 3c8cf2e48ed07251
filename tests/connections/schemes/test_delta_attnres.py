"""Delta attention residuals against the published form, the plain residual, and what may be kept."""

import pytest
import torch
from torch import Tensor

from residua import DeltaAttentionResiduals
from support.references import assert_computes, rms_norm
from support.tolerances import assert_close
from support.variants import normal, perturbed

DIM = 8


def published(stream, x: Tensor, sublayers: list, scheme: DeltaAttentionResiduals) -> Tensor:
    """A list of the embedding and the deltas, stacked for every read; a delta is the change of h over a block."""
    h, start, sources = x, x, [x]
    for i, (connection, sublayer) in enumerate(zip(stream.connections, sublayers)):
        read = h
        if i > 0:
            nulls = [] if connection.null is None else [connection.null.expand_as(h)]
            values = torch.stack([*nulls, *sources])
            weights = torch.ones(1, 1, 1, 1, dtype=h.dtype)
            if connection.attend is not None:
                keys = rms_norm(values, connection.attend.gain) * connection.attend.query
                scores = keys.unflatten(-1, (scheme.heads, -1)).sum(-1)
                weights = scores.softmax(0).repeat_interleave(DIM // scheme.heads, -1)
            added = (weights * values).sum(0)
            gate = {"none": lambda g: 1.0, "scalar": lambda g: g, "sigmoid": torch.sigmoid}[scheme.read_gate]
            read = h + gate(connection.gate) * added
        h = h + sublayer(rms_norm(read, connection.norm.weight))
        if (i + 1) % scheme.block_size == 0:
            sources.append(h - start)
            start = h
    return h


@pytest.mark.parametrize("sublayers", [1, 2, 7])
@pytest.mark.parametrize(
    "scheme",
    [
        DeltaAttentionResiduals(),
        DeltaAttentionResiduals(read_gate="scalar", block_size=2),
        DeltaAttentionResiduals(read_gate="sigmoid", null_source=True, block_size=3),
        DeltaAttentionResiduals(null_source=True, heads=4),
        DeltaAttentionResiduals(heads=2, block_size=4),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_the_published_form(scheme, sublayers):
    # The deltas of blocks are differences of h there, and sums of outputs here.
    assert_computes(perturbed(scheme.build(DIM, sublayers)).double(), published, scheme)


def test_delta_attnres_starts_with_zero_queries_and_null_sources():
    scheme = DeltaAttentionResiduals(read_gate="sigmoid", null_source=True)
    first, *others = scheme.build(DIM, 4).connections
    assert [name for name, _ in first.named_parameters()] == ["norm.weight"]
    for one in others:
        assert not one.null.any()
        assert not one.attend.query.any()
        assert (one.attend.gain == 1).all()
        assert one.gate.item() == -2


def test_a_read_of_a_single_source_has_no_query():
    connections = DeltaAttentionResiduals(block_size=3).build(DIM, 7).connections
    assert [one.attend is None for one in connections] == [True, True, True, False, False, False, False]
    state = tuple(normal(1, 2, DIM, seed=i, dtype=torch.float32) for i in range(3))
    x, _ = connections[1].read(state)
    assert_close(x, rms_norm(state[-1] + state[0]))
