"""What a stream computes before it has learned anything: gates, compressors, expansions start where they were told."""

import math

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from residua import DeepDelta
from residua.connections import Projection
from residua.connections.parts.delta_maps import Value
from support.tolerances import assert_close
from support.variants import ALL, DEEP_DELTA, normal

DIM = 8
AVERAGE = {name: scheme for name, scheme in DEEP_DELTA.items() if scheme.start == "average"}
states = normal(2, 5, 8, DIM, dtype=torch.float32)


def state_for(scheme: DeepDelta) -> torch.Tensor:
    """A state whose channels differ, as they do after the first write."""
    state = states[:, :, : scheme.value_channels]
    return state if scheme.has_stream_axis else state[:, :, 0]


@pytest.mark.parametrize("name", AVERAGE)
def test_gates_start_at_beta_init_for_every_token(name):
    scheme = AVERAGE[name]
    for connection in scheme.build(DIM, 4).connections:
        _, carry = connection.read(state_for(scheme))
        beta = carry.coefficients.beta
        if beta is None:
            beta = connection.beta(normal(2, 5, DIM, dtype=torch.float32))
        assert (beta == beta.flatten()[0]).all(), "the state has no say at the start"
        assert beta.flatten()[0].item() == pytest.approx(scheme.beta_init, rel=1e-6)


@pytest.mark.parametrize(
    ("asked", "got"), [(1.0, 1.0), (1, 1.0), (0.5, 0.5), (0.01, 0.01), (1.9, 1.9), (0, 2e-6), (2, 2 - 2e-6)]
)
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_every_beta_init_is_reached(asked, got, head):
    """The ends are clamped by 2e-6, as in the authors' code: their logit would be infinite."""
    scheme = DeepDelta(beta_init=asked, beta_head=head)
    for connection in scheme.build(DIM, 2).connections:
        beta = connection.read(states[:, :, 0])[1].coefficients.beta
        assert (beta == beta[0, 0]).all()
        assert beta[0, 0].item() == pytest.approx(got, rel=1e-6)


@pytest.mark.parametrize("name", AVERAGE)
def test_compressors_start_as_the_average_of_the_channels(name):
    scheme = AVERAGE[name]
    stream, state = scheme.build(DIM, 4), state_for(scheme)
    mean = state.mean(-2) if scheme.has_stream_axis else state
    for connection in stream.connections:
        assert_close(connection.read(state)[0], nn.functional.rms_norm(mean, (DIM,), eps=1e-5))
    assert_close(stream.collapse(state), mean)


DIFFERENT = [name for name, scheme in ALL.items() if getattr(scheme, "expand", None) in ("projections", "lss")]


@pytest.mark.parametrize("name", [name for name in ALL if name not in DIFFERENT])
def test_expansion_starts_as_repetition(name):
    """Drawn as the authors draw, too: they reset this convolution to the identity. AltUp projects; LSS has gains."""
    x = states[:, :, 0]
    for leaf in tree_leaves(ALL[name].build(DIM, 2).expand(x)):
        expected = x if leaf.dim() == 3 else x.unsqueeze(-2).expand_as(leaf)
        assert torch.equal(leaf, expected)


@pytest.mark.parametrize("name", AVERAGE)
def test_values_start_without_a_bias(name):
    for connection in AVERAGE[name].build(DIM, 2).connections:
        projection = connection.value.project
        if projection is not None and projection.bias is not None:
            assert (projection.bias == 0).all()


def test_pools_of_the_gate_start_as_the_mean():
    scheme = DeepDelta(value_channels=3, compress="channel", beta_input="conv")
    connection = scheme.build(DIM, 2).connections[0]
    assert_close(connection.pool(states[:, :, :3]), states[:, :, :3].mean(-2))


def spread(parameter: torch.Tensor, std: float) -> None:
    """The parameter looks drawn from N(0, std^2): within five standard errors."""
    n = parameter.numel()
    assert parameter.std().item() == pytest.approx(std, rel=5 / (2 * n) ** 0.5)
    assert abs(parameter.mean().item()) < 5 * std / n**0.5


@pytest.mark.parametrize("compress", ["token", "channel"])
@pytest.mark.parametrize("head", ["linear", "mlp"])
def test_the_draws_are_those_of_the_authors_code(compress, head):
    """As their code draws: all that has two axes or more from N(0, (0.5 / sqrt(dim))^2), reads 1 / d_v, value biases
    as PyTorch draws them, gate biases at logit(beta_init / 2)."""
    torch.manual_seed(0)
    dim, std = 400, 0.5 / 20
    scheme = DeepDelta(
        value_channels=4,
        compress=compress,
        expand="conv",
        beta_init=0.5,
        beta_head=head,
        start="authors",
    )
    stream = scheme.build(dim, 2)
    for compressor in (stream.connections[0].compress, stream.collapse.compress):
        spread(compressor.taps, std)
        assert (compressor.read == 0.25).all()
    for connection in stream.connections:
        if head == "mlp":
            spread(connection.beta.hidden.weight, std)
        spread(connection.beta.out.weight, std)
        assert torch.sigmoid(connection.beta.out.bias).item() == pytest.approx(0.25, rel=1e-6)
        spread(connection.value.project.weight, std)
        bias = connection.value.project.bias
        assert bias.abs().max() <= 1 / 20
        assert bias.unique().numel() == 4
        assert (connection.norm.weight == 1).all()


@pytest.mark.parametrize("compress", ["token", "channel"])
@pytest.mark.parametrize(("head", "channels", "kernel"), [("linear", 4, None), ("mlp", 3, 2), ("linear", 1, None)])
def test_the_start_is_that_of_the_authors_current_code(compress, head, channels, kernel):
    """Filters of 1 / k, reads of 1 / d_v, maps with 0.5 / sqrt(n_in) min(1, sqrt(n_out / n_in)): 0.5 / dim for a gate.

    One value channel has no filters, and its map is as narrow as a gate.
    """
    torch.manual_seed(0)
    dim, hidden = 4000, 40
    options = {"compress": compress, "compress_kernel": kernel, "expand": "conv"} if channels > 1 else {}
    two_layer = {"beta_head": "mlp", "beta_hidden": hidden} if head == "mlp" else {}
    stream = DeepDelta(value_channels=channels, beta_init=0.5, start="rewrite", **options, **two_layer).build(dim, 2)
    for compressor in (stream.connections[0].compress, stream.collapse.compress) if channels > 1 else ():
        taps = kernel or channels if compress == "channel" else kernel or 4
        assert (compressor.taps == 1 / taps).all()
        assert len(compressor.taps) == taps
        assert (compressor.read == 1 / channels).all()
    for connection in stream.connections:
        if head == "mlp":
            spread(connection.beta.hidden.weight, 0.5 / math.sqrt(dim) * math.sqrt(hidden / dim))
        spread(connection.beta.out.weight, 0.5 / (hidden if head == "mlp" else dim))
        assert torch.sigmoid(connection.beta.out.bias).item() == pytest.approx(0.25, rel=1e-6)
        spread(connection.value.project.weight, 0.5 * math.sqrt(channels) / dim)
        assert 0 < connection.value.project.bias.abs().max() <= 1 / math.sqrt(dim)
    if channels > 1:
        assert (stream.expand.taps[0] == 1).all()
        assert (stream.expand.taps[1:] == 0).all()


def test_projections_are_drawn_with_the_documented_deviation():
    """A projection starts from N(0, (0.5 / sqrt(in_features))^2), and its bias at the given value, unless other values
    are requested."""
    torch.manual_seed(0)
    spread(Projection(400, 100).weight, 0.5 / 20)
    spread(Projection(100, 400).weight, 0.5 / 10)
    spread(Projection(100, 400, std=0.3).weight, 0.3)
    assert Projection(4, 4).bias is None
    assert (Projection(4, 4, bias=1.5).bias == 1.5).all()
    uniform = Projection(100, 4000, bias="uniform").bias
    assert uniform.abs().max() <= 0.1
    assert uniform.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    direction = DeepDelta(map="v", phi_k="mlp").build(400, 2).connections[0].direction.map
    assert direction.up.weight.shape == (100, 400), "the hidden width of phi_k is a quarter of the width"
    spread(direction.up.weight, 0.5 / 20)
    spread(direction.down.weight, 0.5 / 10)


def test_constant_values_have_no_projection():
    """An unused projection would be decayed, counted, and refused by DDP."""
    value = Value(DIM, 3, activation="constant", constant=1.5)
    assert list(value.parameters()) == []
    assert torch.equal(value(states[:, :, 0]), torch.full((2, 5, 3), 1.5))
