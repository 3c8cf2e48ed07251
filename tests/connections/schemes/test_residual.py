"""The plain residual with the convolutions of Deep Delta Learning, or with a gate: controls of what they do there."""

import pytest
import torch
from torch import Tensor, nn

from residua import DeepDelta, GatedDelta, Residual
from residua.connections import resolve
from support.references import assert_computes, by_token
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, VOCAB, PAD = 8, 40, 1


def outputs(scheme: Residual, x: Tensor, *, start: bool = False) -> Tensor:
    torch.manual_seed(0)
    stream = scheme.build(DIM, 4).double()
    return (stream if start else perturbed(stream))(x, bare_sublayers(DIM, 4))


def count(scheme: Residual) -> int:
    return sum(parameter.numel() for parameter in scheme.build(DIM, 4).parameters())


def test_the_plain_residual_has_no_convolution():
    assert Residual() == Residual(expand="repeat", expand_kernel=4)
    assert [name for name, _ in Residual().build(DIM, 2).named_parameters()] == [
        "connections.0.norm.weight",
        "connections.1.norm.weight",
    ]


def test_the_convolution_is_that_of_deep_delta_with_one_channel():
    ours = perturbed(Residual(expand="conv", expand_kernel=3).build(DIM, 2).expand)
    theirs = DeepDelta(expand="conv", expand_kernel=3).build(DIM, 2).expand
    theirs.load_state_dict(ours.state_dict())
    x = normal(2, 5, DIM, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x).squeeze(-2))


@pytest.mark.parametrize("options", [{}, {"compress_kernel": 2, "compress_sharing": "separate"}])
def test_reading_through_the_token_compression_is_deep_delta_that_writes_h(options):
    """One channel of `gated-delta` that erases nothing is the same scheme, to the last bit, and has the same names."""
    ours = Residual(compress="token", **options).build(DIM, 4)
    theirs = GatedDelta(erase="none", compress="token", **options).build(DIM, 4)
    assert {name: p.shape for name, p in ours.named_parameters()} == {n: p.shape for n, p in theirs.named_parameters()}
    perturbed(ours)
    theirs.load_state_dict(ours.state_dict())
    x, sublayers = normal(2, 6, DIM), bare_sublayers(DIM, 4)
    assert torch.equal(ours.double()(x, sublayers), theirs.double()(x, sublayers))


@pytest.mark.parametrize("preset", ["residual", "lambdas", "gated-orthogonal", "orthogonal"])
def test_a_scheme_with_a_read_convolution_starts_as_the_scheme_without_it(preset):
    x = normal(2, 6, DIM)
    plain, through = (resolve(preset + options) for options in ("", ":compress=token"))
    assert torch.equal(outputs(plain, x, start=True), outputs(through, x, start=True))
    assert count(through) - count(plain) == 3 * (4 * DIM + 1)  # two blocks and the readout


def test_writes_go_to_the_stream_itself():
    stream = perturbed(Residual(compress="token").build(DIM, 2)).double()
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, 2)
    filters = [part.compress.weights()[:, 0] for part in (stream.connections[0], stream.collapse)]  # (taps, dim)

    def read(state: Tensor, taps: Tensor) -> Tensor:
        return sum(nn.functional.pad(state, (0, 0, s, 0))[:, :5] * taps[s] for s in range(4))

    state = x
    for connection, sublayer in zip(stream.connections, sublayers):
        state = state + sublayer(connection.norm(read(state, filters[0])))
    assert_close(stream(x, sublayers), read(state, filters[1]))


@by_token
def gated(stream, row: Tensor, sublayers: list) -> Tensor:
    """The gate of prime-rl, token by token."""
    for connection, sublayer in zip(stream.connections, sublayers):
        size = (row.square().mean() + 1e-5).sqrt()
        w, s, b = (dict(connection.logits.named_parameters())[key] for key in ("project.weight", "scale", "bias"))
        gate = 2 / (1 + torch.exp(-(s * (w[0] @ row) / size + b)))
        row = row + gate * sublayer(row / size * connection.norm.weight)
    return row


def test_the_gate_is_that_of_the_plain_form():
    assert_computes(perturbed(Residual(write_gate=True).build(DIM, 4)).double(), gated)


def test_only_a_gated_residual_has_gate_facts():
    assert not Residual().gates
    assert Residual(write_gate=True).gates.keys() == {"gate"}
