"""Convolved outputs of sublayers against a plain convolution around the sublayers, and against that of Inkling."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from residua import Stream
from residua.connections import resolve
from residua.connections.families.convolved import BranchConnection, CompressingScheme
from residua.connections.parts.ends import TokenConv
from residua.models.cache import memories
from support.stream_cases import DIM, built
from support.tolerances import assert_close
from support.variants import bare_sublayers, every, normal, perturbed


def beside_plain(scheme: CompressingScheme, **options: float) -> tuple[Stream, Stream]:
    """The stream of a scheme, and that of the scheme without convolutions, with the same parameters."""
    ours, plain = built(scheme, **options), built(replace(scheme, branch=None, branch_kernel=4, branch_sublayers="all"))
    states = {name.replace(".inner.", "."): p for name, p in ours.state_dict().items() if ".convolution." not in name}
    plain.load_state_dict(states)
    return ours, plain


def with_branch(stream: Stream) -> list[BranchConnection]:
    return [connection for connection in stream.connections if isinstance(connection, BranchConnection)]


def convolved(y: Tensor, taps: Tensor) -> Tensor:
    """y + conv(y), with the taps of the parameters minus the tap of the token itself. y: (batch, seq, dim)."""
    taps = taps.squeeze(1) - F.one_hot(torch.tensor(0), len(taps)).unsqueeze(1)
    padded = F.pad(y.mT, (len(taps) - 1, 0))
    return y + F.conv1d(padded, taps.flip(0).T.unsqueeze(1), groups=y.shape[-1]).mT


@every(CompressingScheme, branch="conv")
def test_values_and_gradients_are_those_of_convolved_sublayers(scheme):
    ours, plain = beside_plain(scheme, noise=0.3)
    sublayers = bare_sublayers(DIM, len(ours.connections))
    wrapped = [
        (lambda x, sublayer=sublayer, taps=connection.convolution.taps: convolved(sublayer(x), taps))
        if connection in with_branch(ours)
        else sublayer
        for sublayer, connection in zip(sublayers, ours.connections)
    ]
    x, grad = normal(2, 6, DIM), normal(2, 6, DIM, seed=7)
    results = []
    for stream, functions in ((ours, sublayers), (plain, wrapped)):
        start, taps = x.clone().requires_grad_(), [connection.convolution.taps for connection in with_branch(ours)]
        out = stream(start, functions)
        results.append([out, *torch.autograd.grad(out, [start, *taps], grad)])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


@every(CompressingScheme, branch="conv")
def test_a_branch_convolution_starts_bit_equal_to_the_scheme_without_it(scheme):
    x, sublayers = normal(2, 6, DIM), bare_sublayers(DIM, 6)
    ours, plain = beside_plain(scheme)
    assert torch.equal(ours(x, sublayers), plain(x, sublayers))
    ours(x, sublayers).square().sum().backward()
    assert all(connection.convolution.taps.grad.abs().min() > 1e-9 for connection in with_branch(ours))


@pytest.mark.parametrize("preset", ["residual", "ddl-cc", "lambdas"])
def test_streams_and_penalty_are_those_of_the_inner_connection(preset):
    ours, plain = beside_plain(resolve(f"{preset}:branch=conv"), noise=0.3)
    state = ours.expand(normal(2, 3, DIM))
    for connection, alone in zip(with_branch(ours), plain.connections):
        _, carry = connection.read(state)
        streams, expected = connection.streams(state), alone.streams(state)
        assert streams is expected is None or torch.equal(streams, expected)
        assert connection.penalty(carry.coefficients) is alone.penalty(carry.coefficients.inner) is None


@pytest.mark.parametrize("preset", ["ddl", "gated-delta"])
def test_the_shortcut_convolves_neither_over_padding_nor_across_documents(preset):
    ours, _ = beside_plain(resolve(f"{preset}:branch=conv"), noise=0.3)
    connection, y, tokens = with_branch(ours)[0], normal(1, 5, DIM), normal(1, 5, DIM)
    documents, padding = torch.tensor([[0, 0, 1, 1, 1]]), torch.tensor([[False, False, True, True, True]])

    def shortcut(x: Tensor, y: Tensor, **given: Tensor | None) -> list[Tensor]:
        (memory,) = memories([connection], None, given.get("padding"), given.get("documents"), num_layers=1)
        _, carry = connection.read(ours.expand(x), memory)
        found = connection.shortcut(ours.expand(x), carry, y)
        return [part for part in found if isinstance(part, Tensor) and part.dim() > 1]

    alone = shortcut(tokens[:, 2:], y[:, 2:])
    for given in ({"documents": documents}, {"padding": padding}):
        for part, expected in zip(shortcut(tokens, y, **given), alone, strict=True):
            assert_close(part[:, 2:], expected)


def test_the_option_may_name_some_sublayers():
    kinds = {kind: resolve(f"residual:branch=conv,branch_sublayers={kind}") for kind in ("all", "attention", "mlp")}
    streams = {kind: scheme.build(DIM, 4) for kind, scheme in kinds.items()}
    places = {kind: [x in with_branch(stream) for x in stream.connections] for kind, stream in streams.items()}
    assert places == {"all": [True] * 4, "attention": [True, False] * 2, "mlp": [False, True] * 2}


def test_the_branch_convolution_is_the_short_convolution_of_inkling():
    pytest.importorskip("transformers.models.inkling", reason="this transformers has no Inkling")
    from transformers.models.inkling.modeling_inkling import InklingShortConvolution

    theirs = InklingShortConvolution(DIM, 4, layer_idx=0, conv_idx=2)
    ours = perturbed(TokenConv(DIM, 4))
    with torch.no_grad():
        taps = ours.taps.squeeze(1).clone()
        taps[0] -= 1
        theirs.conv1d.weight.copy_(taps.flip(0).T.unsqueeze(1))
    x = normal(2, 7, DIM, dtype=torch.float32)
    assert_close(ours(x), theirs(x), dtype=torch.float32)
