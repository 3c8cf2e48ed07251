"""Learned symmetry breaking: streams that start as copies times learned gains, in every scheme of streams."""

import math
from dataclasses import replace

import pytest
import torch

from residua import Residual
from residua.connections import PRESETS
from residua.connections.families.streams import ExpandingScheme
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
SCHEMES = {name: scheme for name, scheme in PRESETS.items() if isinstance(scheme, ExpandingScheme)}


def test_all_schemes_with_streams_have_the_option():
    streams = {
        "hc",
        "mhc",
        "mhc-deepseek",
        "mhc-glm",
        "krom",
        "ihc",
        "gated-residual",
        "jpmhc",
        "edelta-stream",
        "wide",
    }
    assert set(SCHEMES) == streams


def test_the_start_is_the_published_one():
    """The mean is 0.6, with uniform noise of Xavier's size, 6 / (n + dim), for each stream and feature."""
    gains = replace(SCHEMES["mhc"], expand="lss").build(512, 2).expand.taps
    bound = math.sqrt(6 / (4 + 512))
    assert gains.shape == (1, 4, 512)
    assert 0.99 * bound < (gains - 0.6).abs().max() <= bound + 1e-7
    assert_close(gains.var(), torch.tensor(bound**2 / 3), factor=1e6)  # of 2,048 draws


@pytest.mark.parametrize("name", SCHEMES)
def test_every_stream_starts_from_the_embedding_times_its_gains(name):
    """Otherwise the scheme is unchanged, except that its first connection also has the mappings that would be pointless
    if all streams started equal."""
    scheme, x = replace(SCHEMES[name], expand="lss"), normal(2, 5, DIM)
    stream = perturbed(scheme.build(DIM, SUBLAYERS)).double()
    gains = stream.expand.taps[0]
    assert_close(stream.expand(x), x.unsqueeze(-2) * gains)
    first, second = (connection.read(stream.expand(x))[1].coefficients for connection in stream.connections[:2])
    missing = [{key for key, value in one._asdict().items() if value is None} for one in (first, second)]
    assert missing[0] == missing[1]
    (stream(x, bare_sublayers(DIM, SUBLAYERS)) * normal(2, 5, DIM, seed=1)).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in stream.connections[0].parameters())
    assert (stream.expand.taps.grad.abs() > 0).all()


@pytest.mark.parametrize("name", sorted(set(SCHEMES) - {"mhc-glm"}))  # mhc-glm has no such start
def test_a_preserving_start_keeps_the_gains_at_one(name):
    start = replace(SCHEMES[name], expand="lss").preserving()
    assert start.expand == "gains"
    assert SCHEMES[name].preserving().expand == "repeat"
    x, functions = normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    expected = Residual().build(DIM, SUBLAYERS).double()(x, functions)
    assert_close(start.build(DIM, SUBLAYERS).double()(x, functions), expected)


def test_schemes_that_split_the_embedding_refuse_stream_gains():
    with pytest.raises(ValueError, match=r"expand must be 'repeat' .*'copies', got 'lss'"):
        replace(SCHEMES["mhc"], layout="split", expand="lss")
