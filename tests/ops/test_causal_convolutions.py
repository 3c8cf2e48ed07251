"""Causal short convolutions against torch's grouped convolution, their adjointness, causality and gradients."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import causal_expand, causal_read, causal_read_on, smear
from support.delta_cases import assert_equals_with_gradients, generator, normal
from support.tolerances import assert_close

seeds = st.integers(0, 2**31)
lengths = st.integers(1, 6)  # from one token, through less than the kernel, to more
kernels = st.integers(1, 5)
widths = st.integers(1, 4)


def expand_by_conv1d(x, taps):
    """x: (batch, seq, dim); one group for each feature, `streams` outputs in each, the newest token's tap last."""
    kernel, num_streams, dim = taps.shape
    weight = taps.permute(2, 1, 0).flip(-1).reshape(dim * num_streams, 1, kernel)
    out = F.conv1d(F.pad(x.mT, (kernel - 1, 0)), weight, groups=dim)
    return out.unflatten(1, (dim, num_streams)).permute(0, 3, 2, 1)


def read_by_conv1d(streams, taps):
    """streams: (batch, seq, streams, dim); one group for each feature, which sums its streams."""
    kernel, _, dim = taps.shape
    channels = streams.permute(0, 3, 2, 1).flatten(1, 2)
    return F.conv1d(F.pad(channels, (kernel - 1, 0)), taps.permute(2, 1, 0).flip(-1), groups=dim).mT


@given(lengths, kernels, widths, widths, seeds)
def test_expand_and_read_are_grouped_convolutions_with_their_gradients(length, kernel, num_streams, dim, seed):
    g = generator(seed)
    x, streams = normal(g, 2, length, dim), normal(g, 2, length, num_streams, dim)
    taps = normal(g, kernel, num_streams, dim)
    assert_equals_with_gradients(causal_expand, expand_by_conv1d, x, taps)
    assert_equals_with_gradients(causal_read, read_by_conv1d, streams, taps)


@given(lengths, kernels, widths, widths, seeds)
def test_expand_and_read_are_adjoint_with_time_reversed(length, kernel, num_streams, dim, seed):
    g = generator(seed)
    x, streams = normal(g, 2, length, dim), normal(g, 2, length, num_streams, dim)
    taps = normal(g, kernel, num_streams, dim)
    backwards = causal_read(streams.flip(-3), taps).flip(-2)
    assert_close((causal_expand(x, taps) * streams).sum(), (x * backwards).sum())


@pytest.mark.parametrize("changed", [0, 3, 6])
def test_earlier_tokens_are_bit_equal_when_a_later_one_changes(changed):
    g = generator(0)
    x, streams, taps = normal(g, 2, 7, 5).float(), normal(g, 2, 7, 3, 5).float(), normal(g, 4, 3, 5).float()
    scale, gate = normal(g, 1).float(), normal(g, 3).float()
    look_back = lambda x, _: smear(x, scale, gate)  # noqa: E731
    for op, source, kernel in [(causal_expand, x, 4), (causal_read, streams, 4), (look_back, x, 2)]:
        other = source.clone()
        other[:, changed] = float("nan")
        before, after = op(source, taps), op(other, taps)
        assert torch.equal(before[:, :changed], after[:, :changed])
        # ... and the change reaches the next kernel - 1 tokens, no further.
        reached = after.flatten(2).isnan().all(-1).all(0)
        assert reached.tolist() == [changed <= t < changed + kernel for t in range(7)]


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_leading_axes_are_independent(leading):
    g = generator(0)
    x, streams, taps = normal(g, *leading, 5, 4), normal(g, *leading, 5, 3, 4), normal(g, 2, 3, 4)
    expanded, read = causal_expand(x, taps), causal_read(streams, taps)
    flat_x, flat_streams = x.reshape(-1, 5, 4), streams.reshape(-1, 5, 3, 4)
    for i, (one, other) in enumerate(zip(expanded.reshape(-1, 5, 3, 4), read.reshape(-1, 5, 4))):
        assert torch.equal(one, causal_expand(flat_x[i], taps))
        assert torch.equal(other, causal_read(flat_streams[i], taps))


def test_the_memory_layout_changes_no_number():
    g = generator(0)
    x, streams = normal(g, 6, 5, 2).permute(2, 1, 0), normal(g, 6, 4, 5, 2).permute(3, 2, 1, 0)
    taps = normal(g, 6, 4, 3).permute(2, 1, 0)
    assert torch.equal(causal_expand(x, taps), causal_expand(x.contiguous(), taps.contiguous()))
    assert torch.equal(causal_read(streams, taps), causal_read(streams.contiguous(), taps.contiguous()))


@pytest.mark.parametrize("leading", [(0, 3), (2, 0)])
def test_an_empty_batch_and_no_tokens_are_allowed(leading):
    taps = torch.ones(4, 3, 5, requires_grad=True)
    for op, rest, result in [(causal_expand, (5,), (3, 5)), (causal_read, (3, 5), (5,))]:
        source = torch.ones(*leading, *rest, requires_grad=True)
        taps.grad = None
        out = op(source, taps)
        out.sum().backward()
        assert out.shape == (*leading, *result)
        assert source.grad.shape == source.shape
        assert torch.equal(taps.grad, torch.zeros_like(taps))


def test_a_scale_of_the_smear_for_each_token_is_refused():
    x = torch.ones(2, 6, 4)
    with pytest.raises(ValueError, match=r"^scale must be \(\) or \(1,\), got \(6,\)"):
        smear(x, torch.ones(6), torch.ones(2))
    with pytest.raises(ValueError, match=r"^gate must be \(features,\) with at most 4 features, got \(5,\)"):
        smear(x, torch.ones(1), torch.ones(5))


def test_taps_with_the_wrong_shape_are_named():
    for taps in [(4, 1, 5), (4, 2, 5), (4, 3, 1)]:
        with pytest.raises(ValueError, match=r"^taps must be \(kernel, streams, dim\) = \(4, 3, 5\), got \(4,"):
            causal_read(torch.ones(2, 6, 3, 5), torch.ones(taps))
    with pytest.raises(ValueError, match=r"^taps must be \(kernel, streams, dim\) = \(4, 3, 5\), got \(4, 3, 1\)"):
        causal_expand(torch.ones(2, 6, 5), torch.ones(4, 3, 1))


@pytest.mark.parametrize("split", [(7,), (1,) * 7, (2, 5), (3, 1, 1, 2)])
@pytest.mark.parametrize("kernel", [1, 2, 4, 9])
def test_reading_from_kept_sums_equals_reading_everything(kernel, split):
    streams, taps = normal(generator(0), 2, 7, 3, 5), normal(generator(1), kernel, 3, 5)
    sums, pieces = None, []
    for piece in streams.split(split, 1):
        x, rows = causal_read_on(piece, taps, sums)
        assert rows.shape == (2, piece.shape[1], kernel - 1, 5)
        pieces.append(x)
        sums = rows[:, -1:]
    assert_close(torch.cat(pieces, 1), causal_read(streams, taps))


def test_rejected_draft_tokens_can_be_dropped_from_the_kept_sums():
    """Rejected draft tokens are dropped with their rows; reading continues from the last row that is left."""
    streams, taps = normal(generator(0), 1, 6, 2, 4), normal(generator(1), 4, 2, 4)
    _, rows = causal_read_on(streams[:, :5], taps)
    other, _ = causal_read_on(streams[:, 3:], taps, rows[:, 2:3])
    assert_close(other, causal_read(streams, taps)[:, 3:])


def test_sums_are_kept_in_float32():
    x, rows = causal_read_on(torch.ones(1, 3, 2, 4).bfloat16(), torch.ones(3, 2, 4).bfloat16())
    assert (x.dtype, rows.dtype) == (torch.bfloat16, torch.float32)


def test_masked_tokens_are_not_read_and_get_no_gradient():
    streams, taps = normal(generator(0), 2, 6, 3, 5), normal(generator(1), 4, 3, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0]])
    assert torch.equal(causal_read(streams, taps, mask), causal_read(streams * mask[..., None, None], taps))
    assert torch.autograd.gradcheck(
        lambda *x: causal_read(*x, mask), (streams.requires_grad_(), taps.requires_grad_()), fast_mode=True
    )
    with pytest.raises(ValueError, match=r"^mask must be \(..., seq\) = \(2, 6\), got \(6,\)"):
        causal_read(streams, taps, mask[0])


def test_reading_from_sums_requires_taps_of_every_stream():
    with pytest.raises(ValueError, match=r"^taps must be \(kernel, streams, dim\) = \(4, 3, 5\), got \(4, 1, 5\)"):
        causal_read_on(torch.ones(2, 6, 3, 5), torch.ones(4, 1, 5))


@pytest.mark.parametrize("kernel", [1, 3, 9])
def test_packed_documents_are_convolved_one_by_one(kernel):
    """Values and gradients, in any number of documents shorter and longer than the filter, also inside transforms."""
    x, streams, taps = (
        normal(generator(i), *shape) for i, shape in enumerate([(2, 7, 5), (2, 7, 3, 5), (kernel, 3, 5)])
    )
    documents = torch.tensor([[8, 8, 8, 8, 1, 0, 0], [3, 4, 4, 5, 5, 5, 5]])
    lengths = [(4, 1, 2), (1, 2, 4)]
    for op, source in (
        (causal_expand, x),
        (lambda streams, taps, documents=None: causal_read(streams, taps, None, documents), streams),
    ):

        def alone(source, taps, op=op):
            rows = ([op(part[None], taps) for part in row.split(own)] for row, own in zip(source, lengths))
            return torch.cat([torch.cat(row, 1) for row in rows])

        assert_equals_with_gradients(lambda source, taps, op=op: op(source, taps, documents), alone, source, taps)
        transformed = torch.func.vmap(lambda row, numbers, op=op: op(row, taps, numbers))(source, documents)
        assert_close(transformed, alone(source, taps))
    with pytest.raises(ValueError, match=r"^documents must be \(..., seq\) = \(2, 7\), got \(7,\)"):
        causal_expand(x, taps, documents[0])
