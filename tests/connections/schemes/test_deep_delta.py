"""Deep Delta connections against a plain second implementation of the paper's formulas.

It is written in the paper's layout, X of shape (batch, seq, dim, d_v), with loops over taps and channels, the dense
operator A = I - beta k k^T and the product form X' = A X + beta k v^T; ours is (batch, seq, d_v, dim) and additive.
"""

import itertools
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor, nn

from residua import DeepDelta, DeltaResidual
from residua.connections.parts.delta_maps import Direction
from residua.connections.parts.ends import TokenCompress
from support.references import assert_computes, rms_norm
from support.tolerances import assert_close
from support.variants import ALL, DEEP_DELTA, bare_sublayers, normal, perturbed

DIM, EPS = 8, 1e-5


def shifted(x: Tensor, steps: int) -> Tensor:
    """x of `steps` tokens earlier, zeros before the first. x: (batch, seq, ...)."""
    out = torch.zeros_like(x)
    for t in range(steps, x.shape[1]):
        out[:, t] = x[:, t - steps]
    return out


def compress(scheme: DeepDelta, p: dict[str, Tensor], X: Tensor) -> Tensor:
    """x_in: (batch, seq, dim) from X: (batch, seq, dim, d_v)."""
    m = scheme.value_channels
    if scheme.compress is None:
        return X[..., 0]
    if scheme.compress == "token":
        convolved = sum(p["taps"][s].T * shifted(X, s) for s in range(scheme.compress_kernel))
        return convolved @ p["read"]
    if scheme.compress_form == "direct":
        return sum(p["taps"][j] * X[..., j] for j in range(m))
    kernel = scheme.compress_kernel
    left = kernel - 1 if scheme.compress_causal else (kernel - 1) // 2
    padded = nn.functional.pad(X, (left, kernel - 1 - left))
    return sum(p["read"][a] * sum(p["taps"][i] * padded[..., a + i] for i in range(kernel)) for a in range(m))


def pooled(scheme: DeepDelta, p: dict[str, Tensor], X: Tensor) -> Tensor:
    if scheme.beta_input == "pool_mean":
        return X.mean(-1)
    if scheme.beta_input == "flatten":
        return torch.cat([X[..., j] for j in range(scheme.value_channels)], -1)
    return sum(p["pool.taps"][s].T * shifted(X, s) for s in range(4)).mean(-1)


def gate(scheme: DeepDelta, p: dict[str, Tensor], inputs: Tensor) -> Tensor:
    if scheme.beta_head == "mlp":
        inputs = torch.tanh(inputs @ p["beta.hidden.weight"].T)
    z = inputs @ p["beta.out.weight"][0] + p["beta.out.bias"]
    return 2 / (1 + torch.exp(-z))


def value(scheme: DeepDelta, p: dict[str, Tensor], inputs: Tensor) -> Tensor:
    if scheme.v_activation == "constant":
        return torch.full((*inputs.shape[:-1], scheme.value_channels), scheme.v_constant, dtype=inputs.dtype)
    v = inputs @ p["value.project.weight"].T
    if scheme.v_bias:
        v = v + p["value.project.bias"]
    return scheme.v_scale / (1 + torch.exp(-v)) if scheme.v_activation == "scaled_sigmoid" else v


def phi_k(scheme: DeepDelta, p: dict[str, Tensor], x_in: Tensor, c: Tensor, X: Tensor) -> Tensor:
    source = x_in if scheme.phi_k_input == "x_in" else c
    if scheme.phi_k == "linear":
        return source @ p["direction.map.weight"].T
    if scheme.phi_k == "attention":
        columns = [rms_norm(X[..., j], p["direction.map.norm.weight"]) for j in range(scheme.value_channels)]
        values = [column @ p["direction.map.value.weight"].T for column in columns]
        mixed = values[0]
        if scheme.value_channels > 1:
            q = c @ p["direction.map.query.weight"].T
            keys = [column @ p["direction.map.key.weight"].T for column in columns]
            keys = [key + slot for key, slot in zip(keys, p["direction.map.slots"])]
            scores = torch.stack([(q * key).sum(-1) / q.shape[-1] ** 0.5 for key in keys])
            weights = scores.exp() / scores.exp().sum(0)
            mixed = sum(w.unsqueeze(-1) * u for w, u in zip(weights, values))
        return mixed @ p["direction.map.out.weight"].T
    if scheme.phi_k == "pool_mlp":
        source = X.mean(-1)
    elif scheme.phi_k == "flatten_mlp":
        source = torch.cat([X[..., j] for j in range(scheme.value_channels)], -1)
    hidden = source @ p["direction.map.up.weight"].T
    return (hidden * torch.sigmoid(hidden)) @ p["direction.map.down.weight"].T


def guarded(scheme: DeepDelta, raw: Tensor) -> Tensor:
    n = raw.square().sum(-1, keepdim=True).sqrt()
    eps = scheme.k_eps
    return {
        "rms": raw / (n**2 + eps**2).sqrt(),
        "add": raw / (n + eps),
        "clamp": raw / torch.maximum(n, torch.full_like(n, eps)),
        "rms_d": raw / (n**2 + raw.shape[-1] * eps**2).sqrt(),
    }[scheme.k_norm]


def reference_update(scheme: DeepDelta, p: dict[str, Tensor], X: Tensor, sublayer) -> Tensor:
    """X' of one connection around `sublayer`; p: its parameters, with the compressor's as `taps` and `read`."""
    x_in = compress(scheme, p, X)
    c = rms_norm(x_in, p["norm.weight"])
    h = sublayer(c)
    if scheme.map == "k":
        raw = h @ p["k_proj.weight"].T if scheme.k_proj else h
        v = value(scheme, p, x_in if scheme.v_input == "x_in" else c)
    else:
        raw, v = phi_k(scheme, p, x_in, c, X), value(scheme, p, h)
    if scheme.beta_input == "context":
        beta = gate(scheme, p, c)
    elif scheme.beta_input == "sublayer_out":
        beta = gate(scheme, p, rms_norm(h))
    else:
        beta = gate(scheme, p, pooled(scheme, p, X))

    identity = torch.eye(DIM, dtype=X.dtype)
    beta = beta[..., None, None]
    if scheme.operator == "v1_eps":
        k = raw
        outer = k.unsqueeze(-1) * k.unsqueeze(-2) / (k.square().sum(-1) + scheme.k_eps)[..., None, None]
    else:
        k = guarded(scheme, raw)
        outer = k.unsqueeze(-1) * k.unsqueeze(-2)
    return (identity - beta * outer) @ X + beta * k.unsqueeze(-1) * v.unsqueeze(-2)


def reference_stream(stream, x: Tensor, sublayers: list, scheme: DeepDelta) -> Tensor:
    parameters = dict(stream.named_parameters())
    if scheme.expand == "conv":
        taps = parameters["expand.taps"]
        X = torch.stack(
            [
                sum(taps[s, j] * shifted(x, s) for s in range(scheme.expand_kernel))
                for j in range(scheme.value_channels)
            ],
            -1,
        )
    else:
        X = torch.stack([x] * scheme.value_channels, -1)

    for i, sublayer in enumerate(sublayers):
        own = f"connections.{i}."
        owner = f"connections.{i - i % 2}." if scheme.compress_sharing == "block" else own
        p = {name.removeprefix(own): tensor for name, tensor in parameters.items() if name.startswith(own)}
        for name in ("taps", "read"):
            p[name] = parameters.get(f"{owner}compress.{name}")
        X = reference_update(scheme, p, X, sublayer)
    readout = {name: parameters.get(f"collapse.compress.{name}") for name in ("taps", "read")}
    return compress(scheme, readout, X)


@pytest.mark.parametrize("name", DEEP_DELTA)
def test_the_update_equals_the_formulas_of_the_paper(name):
    """Outputs and the gradients of the input and of every parameter."""
    scheme = DEEP_DELTA[name]
    assert_computes(perturbed(scheme.build(DIM, 4).double()), reference_stream, scheme, tokens=(2, 6))


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("guard", ["rms", "add", "clamp", "rms_d"])
@pytest.mark.parametrize("length", [0.0, 1e-6, 1.0])
def test_guards_differ_only_near_a_zero_direction(guard, eps, length):
    """Only near |k~| = eps do the guards differ; k~ = 0 leaves the state as it is."""
    scheme = DeepDelta(k_norm=guard, k_eps=eps)
    connection = perturbed(scheme.build(DIM, 2).double()).connections[0]
    x = normal(1, 3, DIM)
    direction = length * nn.functional.normalize(normal(1, 3, DIM, seed=4), dim=-1)
    p = dict(connection.named_parameters())
    ours = connection(x, lambda c: direction)
    assert_close(ours.unsqueeze(-1), reference_update(scheme, p, x.unsqueeze(-1), lambda c: direction))
    if not length:
        assert torch.equal(ours, x)


def test_two_sublayers_of_a_block_may_share_a_compressor():
    """A shared compressor has one owner, one name and one set of numbers, also in the state dict; separate ones are
    two."""
    shared = DeepDelta(value_channels=2).build(DIM, 4)
    assert [name for name in shared.state_dict() if name.endswith("taps")] == [
        "connections.0.compress.taps",
        "connections.2.compress.taps",
        "collapse.compress.taps",
    ]
    separate = DeepDelta(value_channels=2, compress_sharing="separate").build(DIM, 4)
    assert len([name for name in separate.state_dict() if name.endswith("taps")]) == 5
    before = shared.connections[1].read(normal(1, 3, 2, DIM, dtype=torch.float32))[0]
    with torch.no_grad():
        shared.connections[0].compress.taps.add_(1.0)
    assert not torch.equal(before, shared.connections[1].read(normal(1, 3, 2, DIM, dtype=torch.float32))[0])


def test_a_convolution_over_tokens_requires_a_sequence_axis():
    """(batch, dim) has none: using the batch as a sequence would silently mix its entries."""
    block = DeltaResidual(DIM, 2, Phi(DIM, DIM, lambda X: X[..., 0, :]), pool="conv")
    with pytest.raises(ValueError, match=r"x must be \(batch, seq, dim\), got \(6, 8\)"):
        block(normal(6, 2, DIM, dtype=torch.float32))


class Phi(nn.Module):
    """A state map of no particular kind: pools the state as told, then one layer."""

    def __init__(self, in_features: int, out_features: int, pool):
        super().__init__()
        self.pool, self.map = pool, nn.Linear(in_features, out_features)

    def forward(self, state: Tensor) -> Tensor:
        return torch.tanh(self.map(self.pool(state)))


@pytest.mark.parametrize("pool", ["mean", "flatten", "conv"])
@pytest.mark.parametrize("with_phi_v", [True, False])
def test_delta_residual_equals_its_formula(pool, with_phi_v):
    """The general block computes direction, value and gate from the state, through any modules."""
    m = 3
    block = DeltaResidual(
        DIM,
        m,
        Phi(DIM, DIM, lambda X: X.mean(-2)),
        Phi(m * DIM, m, lambda X: X.flatten(-2)) if with_phi_v else None,
        pool=pool,
        beta_init=0.5,
    )
    X = normal(2, 5, m, DIM)
    perturbed(block.double())

    G = {
        "mean": X.mean(-2),
        "flatten": X.flatten(-2),
        "conv": sum(block.pool.taps[s] * shifted(X, s) for s in range(4)).mean(-2) if pool == "conv" else None,
    }[pool]
    beta = 2 * torch.sigmoid(G @ block.beta.out.weight[0] + block.beta.out.bias)
    raw = block.phi_k(X)
    k = raw / (raw.square().sum(-1, keepdim=True) + 1e-10).sqrt()
    v = block.phi_v(X) if with_phi_v else X.mean(-2) @ block.phi_v[1].project.weight.T
    A = torch.eye(DIM, dtype=X.dtype) - beta[..., None, None] * k.unsqueeze(-1) * k.unsqueeze(-2)
    expected = A @ X.mT + beta[..., None, None] * k.unsqueeze(-1) * v.unsqueeze(-2)
    assert_close(block(X), expected.mT)


@pytest.mark.parametrize("pool", ["mean", "flatten"])
def test_delta_residual_trains_in_a_stack_without_sequences(pool):
    """An image-like stack: (batch, d_v, dim) states, a convolutional phi_k over the channels, trained end to end."""

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(2, 1, 3, padding=1)

        def forward(self, state: Tensor) -> Tensor:
            return self.conv(state).squeeze(-2)

    torch.manual_seed(0)
    blocks = nn.Sequential(*(DeltaResidual(DIM, 2, Conv(), pool=pool) for _ in range(3)))
    out = blocks(normal(4, 2, DIM, dtype=torch.float32))
    assert out.shape == (4, 2, DIM)
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in blocks.parameters())


def test_delta_residual_starts_at_the_requested_gate():
    """beta_init holds for every state; beta_init = 0 leaves the state as it is, to 2e-6."""
    X = normal(2, 5, 2, DIM, dtype=torch.float32)
    block = DeltaResidual(DIM, 2, Phi(DIM, DIM, lambda X: X[..., 0, :]), beta_init=0.5)
    assert_close(block.beta(block.pool(X)), torch.full((2, 5), 0.5))
    closed = DeltaResidual(DIM, 2, Phi(DIM, DIM, lambda X: X[..., 0, :]), beta_init=0)
    assert (closed(X) - X).abs().max() < 1e-4


def test_delta_residual_names_a_wrong_pool():
    with pytest.raises(ValueError, match="'mean', 'flatten' or 'conv', got 'max'"):
        DeltaResidual(DIM, 2, nn.Identity(), pool="max")


def test_the_direction_has_a_gradient_at_the_start():
    """A zero-initialised last layer would start at k~ = 0, where the gradient is 1 / eps."""
    for kind, streams in itertools.product(get_args(get_type_hints(DeepDelta)["phi_k"]), (1, 2)):
        direction = Direction(kind, DIM, streams, 4, source="context", norm_eps=EPS)
        raw = direction(normal(3, DIM).float(), normal(3, DIM).float(), normal(3, streams, DIM).float())
        assert (raw.norm(dim=-1) > 1e-3).all()


def test_a_replaced_compressor_is_used_by_both_sublayers():
    stream = ALL["ddl-tc"].build(DIM, 2)
    other = perturbed(TokenCompress(DIM, 4, 4))
    stream.connections[0].compress = other
    assert all(connection.compressor is other for connection in stream.connections)


def test_delta_residual_checks_its_options():
    for options, words in [
        ({"beta_init": 3.0}, r"beta_init must be a number in \[0, 2\], got 3.0"),
        ({"beta_init": float("nan")}, r"beta_init must be a number in \[0, 2\], got nan"),
        ({"k_norm": "l2"}, "k_norm must be one of rms, add, clamp, rms_d, got 'l2'"),
    ]:
        with pytest.raises(ValueError, match=words):
            DeltaResidual(4, 1, nn.Flatten(-2), **options)(torch.ones(2, 1, 4))


def test_a_constant_value_is_not_rounded_to_the_dtype_of_a_narrow_state():
    value = DeepDelta(v_activation="constant", v_constant=1.3).build(4, 1).connections[0].value
    assert (value(torch.ones(2, 4).bfloat16()) == torch.tensor(1.3)).all()


@pytest.mark.parametrize(
    ("options", "sized", "skips"),
    [
        ({}, False, True),
        ({"value_channels": 3, "compress": "channel"}, False, True),
        ({"k_proj": True}, False, True),
        ({"operator": "v1_eps"}, True, True),
        ({"map": "v"}, True, False),
    ],
)
@torch.no_grad()
def test_the_size_of_the_output_matters_only_if_the_output_is_not_normalised(options, sized, skips):
    """LayerScale and the factor of DropPath do nothing in a k-Map; a dropped output leaves its state as it is."""
    stream = perturbed(DeepDelta(k_eps=1e-12, **options).build(8, 2).double())
    connection, (sublayer, _) = stream.connections[0], bare_sublayers(8, 2)
    state = stream.expand(normal(2, 3, 8))
    written = connection(state, sublayer)
    scaled = connection(state, lambda x: 0.1 * sublayer(x))
    if sized:
        assert (scaled - written).abs().max() > 1e-3
    else:
        assert_close(scaled, written)
    assert torch.equal(connection(state, torch.zeros_like), state) == skips


def test_a_gate_that_reads_the_sublayers_output_is_computed_only_in_the_write():
    connection, x = perturbed(DeepDelta(beta_input="sublayer_out").build(8, 2)).connections[0], normal(2, 5, 8).float()
    seen, carry = connection.read(x)
    assert carry.coefficients.beta is None
    beta, _, _ = connection.completed(seen.tanh(), carry.coefficients)
    assert_close(beta, connection.beta(rms_norm(seen.tanh())))
    assert connection.write(seen.tanh(), carry).isfinite().all()
