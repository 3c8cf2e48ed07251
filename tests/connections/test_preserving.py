"""Every scheme starts as exactly the plain residual, whatever the norms and sublayers are, and can learn from this
start, or gives the reason why it cannot."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from residua import Residual, Scheme, Stream
from residua.connections import SCHEMES
from residua.testing.contract import stuck
from support.variants import ALL, NON_CAUSAL, bare_sublayers, normal

DIM, SUBLAYERS = 8, 7  # more sublayers than streams, and not a multiple of them
ANY = ALL | NON_CAUSAL


class GemmaNorm(nn.Module):
    """An RMSNorm with an eps that matters and a gain of 1 + w."""

    def __init__(self, seed: int):
        super().__init__()
        self.weight = nn.Parameter(0.5 * normal(DIM, seed=seed))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1) * (1 + self.weight)


def foreign_norm(i: int) -> nn.Module:
    """A norm of a third-party model, with random parameters: LayerNorms with a bias, and `GemmaNorm`."""
    if i % 2:
        return GemmaNorm(i)
    norm = nn.LayerNorm(DIM, eps=0.1).double()
    with torch.no_grad():
        norm.weight.copy_(1 + 0.3 * normal(DIM, seed=20 + i))
        norm.bias.copy_(normal(DIM, seed=40 + i))
    return norm


def preserving() -> dict[str, Scheme]:
    found = {}
    for name, scheme in ANY.items():
        try:
            found[name] = scheme.preserving()
        except ValueError:
            continue
    return found


PRESERVING = preserving()
# The presets that must not lose their start; new ones that have a start need no entry.
KNOWN = {
    *("residual", "lambdas", "gated-orthogonal", "hc", "mhc", "mhc-deepseek", "krom", "ihc", "gated-residual", "jpmhc"),
    *("wide", "frac", "siamese", "gated-delta", "edelta-stream", "attnres", "attnres-block"),
}


def built(scheme: Scheme) -> Stream:
    torch.manual_seed(0)
    return scheme.build(DIM, SUBLAYERS, norm=foreign_norm).double()


def sublayers() -> list[Callable[..., Tensor]]:
    """Sublayers of one input, or of three; the plain residual gives the same three times."""
    bare = bare_sublayers(DIM, SUBLAYERS)
    return [lambda x, k=None, v=None, f=f: f(x, x if k is None else k, x if v is None else v) for f in bare]


def test_known_schemes_can_preserve_the_plain_residual():
    assert set(PRESERVING) >= KNOWN


@pytest.mark.parametrize("name", sorted(set(ANY) - set(PRESERVING)))
def test_schemes_without_a_preserving_start_say_why(name):
    with pytest.raises(ValueError, match=rf"^{type(ANY[name]).__name__}: .{{40,}}") as raised:
        ANY[name].preserving()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", PRESERVING)
def test_making_a_scheme_preserve_changes_only_its_start_and_is_idempotent(name):
    start = PRESERVING[name]
    with torch.device("meta"):  # as an engine builds
        assert ANY[name].preserving() == start
    assert type(start) is type(ANY[name])
    assert start.preserving() == start
    assert start.state_size(3, DIM) == ANY[name].state_size(3, DIM)


# Schemes that start with a sum, without a rounding in it, and those whose published start is this one.
ALWAYS = {SCHEMES[name] for name in ("denseformer", "frac", "gated_delta", "gated_orthogonal", "mudd", "residual")}
EXACT = ALWAYS | {SCHEMES[name] for name in ("delta_attnres", "lambdas", "siamese")}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in PRESERVING if type(ANY[name]) in EXACT])
def test_a_preserving_scheme_starts_as_the_plain_residual_to_the_last_bit(name, dtype):
    start = PRESERVING[name]
    assert start == ANY[name] or type(start) not in ALWAYS
    x = normal(2, 5, DIM, dtype=dtype)
    ours, plain = (scheme.build(DIM, SUBLAYERS).to(dtype) for scheme in (start, Residual()))
    assert torch.equal(ours(x, sublayers()), plain(x, sublayers()))


def states_of(stream: Stream) -> list[Tensor | tuple[Tensor, ...]]:
    """Return the state after each connection."""
    state, states = stream.expand(normal(2, 5, DIM)), []
    for connection, sublayer in zip(stream.connections, bare_sublayers(DIM, SUBLAYERS)):
        state = connection(state, sublayer)
        states.append(state)
    return states


def rows(state: Tensor | tuple[Tensor, ...]) -> Tensor:
    """The largest difference between the rows of a state of several streams, the first tensor of a tuple."""
    state = state[0] if isinstance(state, tuple) else state
    return (state - state.mean(-2, keepdim=True)).abs().max() / state.abs().max()


def assert_parted(states: list[Tensor | tuple[Tensor, ...]]) -> None:
    """Streams that stay equal would compute what one does, at n times its price."""
    assert all(rows(state) > 1e-4 for state in states[1:]), [f"{rows(state):.0e}" for state in states]


STARTS = [(name, "its own") for name in ANY] + [
    (name, "preserving") for name, start in PRESERVING.items() if start != ANY[name]
]


@pytest.mark.parametrize(("name", "start"), STARTS)
def test_every_parameter_learns_within_three_steps_and_streams_become_different(name, start):
    stream = built(PRESERVING[name] if start == "preserving" else ANY[name])
    assert stuck(stream, DIM) == []
    widths = [getattr(ANY[name], option, 1) for option in ("num_streams", "value_channels")]
    if max(widths) > 1 and getattr(ANY[name], "v_activation", None) != "constant":  # the same in every channel
        assert_parted(states_of(stream))
