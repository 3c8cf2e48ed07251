"""Reading a sublayer input from several streams, mixing the streams, and writing to them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from residua.ops import hyper_mix, hyper_read, hyper_write
from support.delta_cases import assert_equals_with_gradients, generator, leaves, normal
from support.tolerances import assert_close

seeds = st.integers(0, 2**31)
# The leading axes of coefficients for streams of (batch, seq, n, d) = (2, 3, n, d): each token its own, one for a whole
# sequence, one for a position, one for all.
leadings = st.sampled_from([(2, 3), (2, 1), (3,), (1, 3), ()])


@given(st.integers(1, 5), st.integers(1, 6), leadings, leadings, seeds)
def test_read_mix_and_write_are_their_sums(n, d, first, second, seed):
    """Values and gradients."""
    g = generator(seed)
    x, y, rows = normal(g, 2, 3, n, d), normal(g, 2, 3, d), normal(g, 2, 3, n, d)
    h_pre, h_res, h_post = normal(g, *first, n), normal(g, *second, n, n), normal(g, *first, n)

    def read(x, h_pre):
        return torch.einsum("bti,btid->btd", h_pre.expand(2, 3, n), x)

    def mixed(x, h_res):
        return torch.einsum("btoi,btid->btod", h_res.expand(2, 3, n, n), x)

    def written(x, y, h_res, h_post):
        return mixed(x, h_res) + torch.einsum("bto,btd->btod", h_post.expand(2, 3, n), y)

    def added(x, y, h_post):
        return written(x, y, torch.eye(n).double(), h_post)

    def written_rows(x, rows, h_res, h_post):
        return mixed(x, h_res) + torch.einsum("bto,btod->btod", h_post.expand(2, 3, n), rows)

    assert_equals_with_gradients(hyper_read, read, x, h_pre)
    assert_equals_with_gradients(hyper_mix, mixed, x, h_res)
    assert_equals_with_gradients(hyper_write, written, x, y, h_res, h_post)
    assert_equals_with_gradients(hyper_write, written_rows, x, rows, h_res, h_post)
    assert_equals_with_gradients(lambda x, y, h_post: hyper_write(x, y, None, h_post), added, x, y, h_post)


def test_reading_and_writing_are_adjoint():
    """<hyper_read(X, h), y> = <X, h y^T>: what a read takes from the streams, a write puts back."""
    g = generator(0)
    x, y, h = normal(g, 2, 3, 4, 5), normal(g, 2, 3, 5), normal(g, 2, 3, 4)
    nothing = torch.zeros_like(x)
    assert_close((hyper_read(x, h) * y).sum(), (x * hyper_write(nothing, y, None, h)).sum())


def test_mixing_acts_only_on_the_streams():
    """Lifted to R^{n d} the matrix is kron(h_res, I_d): features never mix."""
    g = generator(0)
    x, h_res = normal(g, 4, 3), normal(g, 4, 4)
    lifted = torch.kron(h_res, torch.eye(3, dtype=torch.float64))
    assert_close(hyper_mix(x, h_res).flatten(), lifted @ x.flatten())


def test_a_write_without_mixing_does_not_keep_the_streams():
    g = generator(0)
    x, y, h_post = leaves(normal(g, 2, 3, 4), normal(g, 2, 4), normal(g, 2, 3))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        hyper_write(x, y, None, h_post)
    assert {t.shape for t in kept} == {y.shape, h_post.shape}


def test_shapes_that_do_not_fit_are_named():
    x, y = torch.ones(2, 3, 4, 5), torch.ones(2, 3, 5)
    for shape in [(3,), (1,), (5, 3, 4), (2, 2, 4), (1, 2, 3, 4), (2, 3, 4, 1), ()]:
        with pytest.raises(ValueError, match=r"^h_pre must be \(\.\.\., n\) = \(2, 3, 4\), .* got \("):
            hyper_read(x, torch.ones(shape))
        with pytest.raises(ValueError, match=r"^h_post must be \(\.\.\., n\) = \(2, 3, 4\), .* got \("):
            hyper_write(x, y, None, torch.ones(shape))
    for shape in [(4,), (4, 1), (1, 4), (3, 3), (5, 1, 4, 4), (1, 2, 3, 4, 4)]:
        with pytest.raises(ValueError, match=r"^h_res must be \(\.\.\., n, n\) = \(2, 3, 4, 4\), .* got \("):
            hyper_mix(x, torch.ones(shape))
        with pytest.raises(ValueError, match=r"^h_res must"):
            hyper_write(x, y, torch.ones(shape), torch.ones(4))
    for shape in [(5,), (2, 1, 5), (2, 3, 4)]:
        with pytest.raises(ValueError, match=r"^y must be \(\.\.\., d\) = \(2, 3, 5\), got \("):
            hyper_write(x, torch.ones(shape), None, torch.ones(4))
    with pytest.raises(ValueError, match=r"^y must be \(\.\.\., n, d\) = \(2, 3, 4, 5\), got \(2, 3, 1, 5\)"):
        hyper_write(x, torch.ones(2, 3, 1, 5), None, torch.ones(4))
