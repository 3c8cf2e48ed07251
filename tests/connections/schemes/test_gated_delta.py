"""The gated delta against its formula, the plain residual and a delta write with one gate."""

import math

import pytest
import torch
from torch import Tensor

from residua import DeepDelta, GatedDelta
from residua.connections.schemes.gated_delta import Parts
from residua.ops import delta_operator, delta_write
from support.references import assert_computes, by_token
from support.tolerances import assert_close
from support.variants import bare_sublayers, normal, perturbed

DIM, SUBLAYERS = 8, 4
OPTIONS = {
    "signed": {},
    "heads": {"heads": 4, "scale": 1.0},
    "positive": {"erase": "positive", "heads": 2, "k_eps": 0.3},
    "write": {"write_gate": True, "heads": 2},
    "write-only": {"erase": "none", "write_gate": True},
    "rank": {"rank": 3, "write_gate": True},
    "channels": {"value_channels": 4, "compress": "channel", "write_gate": True},
    "channel-gates": {"value_channels": 2, "compress": "channel", "channel_gates": True, "heads": 2, "rank": 2},
}
VALUES = {
    "ddl": {"erase": "coupled"},
    "ddl-channels": {"erase": "coupled", "value_channels": 4, "compress": "channel", "k_eps": 0.3},
    "ddl-rank": {"erase": "coupled", "value_channels": 2, "compress": "channel", "rank": 2, "channel_gates": True},
    "ddl-heads": {"erase": "coupled", "heads": 2, "rank": 3, "v_activation": "linear"},
    "write-only-channels": {"erase": "none", "value_channels": 4, "compress": "channel"},
    "apart": {"value_channels": 2, "compress": "channel", "heads": 4},
}
VALUES = {f"value-{name}": {"write": "value", **options} for name, options in VALUES.items()}


def built(options: dict, *, start: bool = False):
    stream = GatedDelta(**options).build(DIM, SUBLAYERS)
    return (stream if start else perturbed(stream)).double()


@by_token
def matrices(stream, embedding: Tensor, sublayers: list, scheme: GatedDelta) -> Tensor:
    """Token by token with I - e k k^T as a matrix for each channel, direction and head, X in R^{d x m}."""
    m, heads, rank = scheme.value_channels, scheme.heads, scheme.rank
    own = dict(stream.named_parameters())

    def read(state: Tensor, compressor) -> Tensor:
        weights = torch.ones(1, DIM).double() if scheme.compress is None else compressor.weights()
        return (state * weights.mT).sum(-1)

    def mapped(name: str, i: int, shared: int, row: Tensor) -> Tensor:
        z = own[f"connections.{i}.{name}.weight"] @ row + own[f"connections.{i}.{name}.bias"]
        return z.view(rank, shared, heads).expand(rank, m, heads)

    state = torch.stack([embedding] * m, -1)
    for i, sublayer in enumerate(sublayers):
        connection = stream.connections[i]
        x_in = read(state, connection.compressor)
        context = x_in / (x_in.square().mean() + 1e-5).sqrt() * connection.norm.weight
        c = m if scheme.channel_gates else 1
        erase, write, beta = torch.zeros(rank, m, heads).double(), torch.ones(rank, m, heads).double(), None
        if scheme.erase in ("signed", "positive"):
            erase = scheme.scale * mapped("erase.out", i, c, context).tanh()
            erase = torch.where(erase < 0, 0, erase) if scheme.erase == "positive" else erase
        if scheme.write_gate:
            write = 1 + mapped("write_gate.out", i, m, context).tanh()
        if scheme.write == "value":
            beta, v = 2 * mapped("beta.out", i, c, context).sigmoid(), mapped("value.project", i, m, x_in)
            v = v if scheme.v_activation == "linear" else 4 * v.sigmoid()
            erase = beta if scheme.erase == "coupled" else erase
        y = sublayer(context)
        for r in range(rank):
            h = y if rank == 1 else own[f"connections.{i}.parts.weight"][r] * y
            after = []
            for j in range(m):
                groups = []
                for g, (part, piece) in enumerate(zip(state[:, j].chunk(heads), h.chunk(heads), strict=True)):
                    length = (piece @ piece + scheme.k_eps**2).sqrt()
                    k = piece / length
                    w = write[r, j, g] * length if beta is None else beta[r, j, g] * v[r, j, g]
                    kept = torch.eye(len(k)).double() - erase[r, j, g] * torch.outer(k, k)
                    groups.append(kept @ part + w * k)
                after.append(torch.cat(groups))
            state = torch.stack(after, -1)
    return read(state, getattr(stream.collapse, "compress", None))


@pytest.mark.parametrize("options", (OPTIONS | VALUES).values(), ids=OPTIONS | VALUES)
def test_values_and_gradients_are_those_of_matrices(options):
    assert_computes(built(options), matrices, GatedDelta(**options))


def one_step(erase: str, *, bias: float):
    """The coefficients, the state before and after, and the output, of one sublayer whose gates have a bias."""
    stream = built({"erase": erase}, start=True)
    connection, x = stream.connections[0], normal(2, 5, DIM)
    torch.nn.init.constant_(connection.erase.out.bias, bias)
    context, carry = connection.read(x)
    y = bare_sublayers(DIM, 1)[0](context)
    return carry.coefficients.erase, x, connection.write(y, carry), y


def test_gated_delta_is_a_delta_write_with_a_separate_gate_for_the_value():
    """DDL's residual start, v = k^T x + ..., made for every token: v = w |h| / e."""
    erase, x, after, y = one_step("signed", bias=0.4)
    length = (y.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    written = delta_write(x.unsqueeze(-2), y / length, length / erase, erase[..., 0]).squeeze(-2)
    assert_close(after, written)
    matrix = delta_operator(y / length, erase[..., 0])
    assert_close(after, (matrix @ x.unsqueeze(-1)).squeeze(-1) + y)


@pytest.mark.parametrize("bias", [-0.7, 0.7])
def test_a_positive_gate_only_erases(bias):
    signed, positive = (one_step(erase, bias=bias)[0] for erase in ("signed", "positive"))
    assert_close(signed, torch.full_like(signed, 2 * math.tanh(bias)))
    assert_close(positive, torch.full_like(positive, max(0.0, 2 * math.tanh(bias))))


def test_a_zero_output_changes_nothing_and_has_finite_gradients():
    stream, x = built(OPTIONS["write"]), normal(2, 3, DIM).requires_grad_()
    zero = torch.zeros(2, 3, DIM).double().requires_grad_()
    after = stream.connections[0](x, lambda _: zero)
    assert torch.equal(after, x)
    after.sum().backward()
    assert x.grad.isfinite().all()
    assert zero.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"value_channels": 4, "compress": "channel", "k_eps": 0.3}], ids=["1", "4"])
def test_gated_delta_with_coupled_gates_is_deep_delta_learning(options):
    x, functions = normal(2, 5, DIM), bare_sublayers(DIM, SUBLAYERS)
    ddl = perturbed(DeepDelta(**options).build(DIM, SUBLAYERS)).double()
    ours = GatedDelta(erase="coupled", write="value", **options).build(DIM, SUBLAYERS).double()
    ours.load_state_dict(ddl.state_dict())
    assert_close(ours(x, functions), ddl(x, functions))


def test_the_directions_made_from_one_output_start_as_parts_of_it():
    """They add up to it, they are orthogonal, and each head has its part of every one."""
    y = normal(2, 3, 12)
    parts = Parts(12, 3).double()(y)
    assert torch.equal(sum(parts), y)
    assert all(torch.equal(a * b, torch.zeros_like(y)) for i, a in enumerate(parts) for b in parts[:i])
    assert all(part.unflatten(-1, (4, 3)).count_nonzero(-1).eq(1).all() for part in parts)


def test_successive_blocks_start_by_reading_different_channels():
    stream = GatedDelta(value_channels=3, compress="channel", write_gate=True).build(DIM, 7)
    reads = [stream.connections[i].compressor.weights()[:, 0].tolist() for i in range(7)]
    reads.append(stream.collapse.compress.weights()[:, 0].tolist())
    one = [[float(j == channel) for j in range(3)] for channel in range(3)]
    assert reads == [one[0], one[0], one[1], one[1], one[2], one[2], one[0], one[1]]


def test_gated_delta_without_gates_is_the_plain_residual_without_parameters():
    stream = perturbed(GatedDelta(erase="none").build(DIM, 2))
    assert {name.rpartition(".")[0] for name, _ in stream.named_parameters()} == {
        f"connections.{i}.norm" for i in range(2)
    }


@pytest.mark.parametrize("name", ["signed", "channels", "value-ddl", "value-ddl-channels"])
def test_the_shortcut_is_what_the_write_does_to_the_state(name):
    options = (OPTIONS | VALUES)[name]
    stream = built(options)
    connection, state = stream.connections[1], stream.expand(normal(2, 3, DIM))
    context, carry = connection.read(state)
    y = torch.tanh(context)
    beta, k, readout, v, share = connection.shortcut(state, carry, y)
    streams = connection.streams(state)
    erased = streams - (beta.unsqueeze(-1) * readout).unsqueeze(-1) * k.unsqueeze(-2)
    gate = torch.ones(1).double() if carry.coefficients.write is None else carry.coefficients.write
    written = gate.unsqueeze(-1) * y.unsqueeze(-2)
    if options.get("erase") == "coupled":
        written = (beta.unsqueeze(-1) * v).unsqueeze(-1) * k.unsqueeze(-2)
    assert (v is None) is (options.get("erase") != "coupled")
    assert (share is None) is (connection.scheme.value_channels == 1)
    assert_close(erased + written, connection.streams(connection.write(y, carry)))


@pytest.mark.parametrize("name", ["heads", "rank", "channel-gates", "write-only"])
def test_without_exactly_one_direction_there_is_no_shortcut_of_rank_one(name):
    stream = built(OPTIONS[name])
    state = stream.expand(normal(2, 3, DIM))
    context, carry = stream.connections[0].read(state)
    assert stream.connections[0].shortcut(state, carry, context) is None
