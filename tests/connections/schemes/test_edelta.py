"""EDelta against its equations in plain dense algebra, in each context; its start, its penalty, its isometry."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from residua import EDelta, EDeltaStream, Stream, ops
from residua.connections.parts.ends import Repeat
from support.references import assert_computes, gelu, rms_norm
from support.tolerances import assert_close
from support.variants import normal, perturbed

DIM, EPS = 12, 1e-5
CONTEXTS = ["token", "cumulative", "sequence"]
HYBRIDS = {
    "edelta": EDelta(),
    "edelta-n2": EDelta(num_streams=2, hidden=5, gamma_init=0.3),
    "edelta-n6-bare": EDelta(num_streams=6, projections=False),
    "edelta-stream": EDeltaStream(hidden=7),
    "edelta-stream-n2": EDeltaStream(num_streams=2, hidden=5, gamma_init=0.3),
    "edelta-stream-n3": EDeltaStream(num_streams=3, cayley_init=0.7),
}
every_hybrid = pytest.mark.parametrize("name", HYBRIDS)
every_context = pytest.mark.parametrize("context", CONTEXTS)


def build(name: str, context: str, sublayers: int = 2, dtype: torch.dtype = torch.float64) -> Stream:
    torch.manual_seed(0)
    return perturbed(replace(HYBRIDS[name], context=context).build(DIM, sublayers, norm_eps=EPS)).to(dtype)


def state_for(name: str, batch: int = 2, seq: int = 5, seed: int = 0) -> Tensor:
    """A state whose rows differ."""
    scheme = HYBRIDS[name]
    rows = (scheme.num_streams,) if isinstance(scheme, EDeltaStream) else ()
    return normal(batch, seq, *rows, DIM, seed=seed)


# The reference: one token after another, dense matrices, a solve for Q, nothing of the library.


def seen_by(x: Tensor, t: int, context: str) -> Tensor:
    """What the coefficients of token t see of x: (seq, features)."""
    if context == "token":
        return rms_norm(x[t])
    return x[: t + 1].mean(0) if context == "cumulative" else x.mean(0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x - x.mean()) / ((x - x.mean()).square().mean() + EPS).sqrt() * weight + bias


def operator(u: Tensor, v: Tensor, k: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
    identity = torch.eye(len(u), dtype=u.dtype)
    m = beta / 2 * (torch.outer(u, v) - torch.outer(v, u))
    q = torch.linalg.solve(identity + m, identity - m)
    k = k / k.norm()
    return gamma * q + (1 - gamma) * (identity - 2 * torch.outer(k, k))


def heads(p: dict[str, Tensor], features: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    u, v, k = (p[f"heads.{name}.weight"] @ features[i] + p["heads.frame.rows"][i] for i, name in enumerate("uvk"))
    z = (p["heads.beta.weight"] @ features[3] + p["heads.beta.bias"])[0]
    return u, v, k, (1 + z.exp()).log()


def sigmoid(z: Tensor) -> Tensor:
    return 1 / (1 + (-z).exp())


def edelta(scheme: EDelta, connection: nn.Module, x: Tensor, sublayer) -> Tensor:
    """x: (seq, dim)."""
    p = dict(connection.named_parameters())
    out = []
    for t in range(len(x)):
        c = seen_by(x, t, scheme.context)
        features = gelu(p["up.weight"] @ c + p["up.bias"]).chunk(4)
        gamma = sigmoid((p["gamma.out.weight"] @ c + p["gamma.out.bias"])[0])
        rows = operator(*heads(p, features), gamma).contiguous()
        g = torch.kron(rows, torch.eye(DIM // scheme.num_streams, dtype=x.dtype)) @ x[t]
        seen = rms_norm(g, p["norm.weight"])
        y = sublayer(p["h_pre.weight"] @ seen if scheme.projections else seen)
        out.append(g + (p["h_post.weight"] @ y if scheme.projections else y))
    return torch.stack(out)


def edelta_stream(scheme: EDeltaStream, connection: nn.Module, x: Tensor, sublayer) -> Tensor:
    """x: (seq, num_streams, dim)."""
    p = dict(connection.named_parameters())
    n, out = scheme.num_streams, []
    for t in range(len(x)):
        c = layer_norm(seen_by(x.flatten(1), t, scheme.context), p["context_norm.weight"], p["context_norm.bias"])
        features = gelu(p["up.weight"] @ c + p["up.bias"])
        gamma = sigmoid((p["gamma.out.weight"] @ features + p["gamma.out.bias"])[0])
        g = operator(*heads(p, [features] * 4), gamma) @ x[t]
        routed = layer_norm(g.flatten(), p["router.norm.weight"], p["router.norm.bias"])
        logits = list((p["router.project.weight"] @ routed).view(-1, n, n) + p["router.bias"])
        raw, h_post = logits.pop(0), torch.full((n, n), 1 / n, dtype=x.dtype)
        h_pre = raw.exp() / raw.exp().sum(1, keepdim=True)
        if connection.distributes:
            raw = logits.pop(0)
            h_post = raw.exp() / raw.exp().sum(0, keepdim=True)
        y = sublayer(rms_norm((h_pre @ g).mean(0), p["norm.weight"]))
        out.append(g + h_post @ y.expand(n, DIM))
    return torch.stack(out)


def published(stream: Stream, x: Tensor, sublayers: list, scheme: EDelta | EDeltaStream) -> Tensor:
    connect, streams = (edelta, False) if isinstance(scheme, EDelta) else (edelta_stream, True)
    sequences = []
    for state in x:
        state = torch.stack([state] * scheme.num_streams, 1) if streams else state
        for connection, sublayer in zip(stream.connections, sublayers):
            state = connect(scheme, connection, state, sublayer)
        sequences.append(state.mean(1) if streams else state)
    return torch.stack(sequences)


@every_context
@every_hybrid
def test_values_and_gradients_are_those_of_dense_algebra(name, context):
    stream = build(name, context, sublayers=3)
    assert_computes(stream, published, replace(HYBRIDS[name], context=context), tokens=(1, 3), dim=DIM)


@every_context
@every_hybrid
@torch.no_grad()
def test_the_start_is_as_documented(name, context):
    """gamma has the requested value for every token; the rotation is small, in a plane drawn for each connection."""
    torch.manual_seed(0)
    scheme = replace(HYBRIDS[name], context=context)
    stream = scheme.build(DIM, 4).double()
    planes = []
    for connection in stream.connections:
        _, carry = connection.read(state_for(name))
        gamma, beta, k, u, v, *_ = carry.coefficients
        assert (gamma == gamma[0, 0]).all()
        assert gamma[0, 0].item() == pytest.approx(scheme.gamma_init, rel=1e-7)
        assert (beta == beta[0, 0]).all()
        assert beta[0, 0].item() == pytest.approx(scheme.cayley_init, rel=1e-6)
        # The weights of u and v are small, not zero: tokens differ a little from the first step on.
        angle = ops.cayley_angle(u, v, beta)
        assert ((angle > 0.5 * scheme.cayley_init) & (angle < 1.5 * scheme.cayley_init)).all()
        assert angle.unique().numel() == angle.numel()
        frame = connection.heads.frame.rows
        assert_close((frame[:2] @ frame[:2].T).float(), torch.eye(2))
        assert_close(frame[2].norm().float(), torch.tensor(1.0))
        assert ((k * frame[2]).sum(-1) > 0.9).all(), "the bias decides at the start"
        planes.append(frame)
    assert len({tuple(plane.flatten().tolist()) for plane in planes}) == 4, "every connection has its own plane"


@torch.no_grad()
@pytest.mark.parametrize("start", ["published", "residual"])
def test_the_rotation_starts_in_a_plane_and_the_reflection_along_a_unit_vector(start):
    """With a start that preserves, all three leave equal streams unchanged."""
    (u, v, k) = EDeltaStream(start=start).build(DIM, 2).connections[0].heads.frame().double()
    assert_close(torch.stack([u @ u, v @ v, u @ v, k @ k]), torch.tensor([1.0, 1, 0, 1]).double(), dtype=torch.float32)
    if start == "residual":
        assert not torch.stack([u, v, k]).sum(1).any()


def test_the_projections_start_as_the_identity():
    for connection in EDelta().build(DIM, 4).connections:
        for projection in (connection.h_pre, connection.h_post):
            assert projection.bias is None
            assert torch.equal(projection.weight, torch.eye(DIM))
    (bare,) = EDelta(projections=False).build(DIM, 1).connections
    (full,) = EDelta().build(DIM, 1).connections
    missing, unexpected = full.load_state_dict(bare.state_dict(), strict=False)
    assert (missing, unexpected) == (["h_pre.weight", "h_post.weight"], [])
    state = normal(2, 5, DIM, dtype=torch.float32)
    assert_close(full(state, torch.tanh), bare(state, torch.tanh))


@torch.no_grad()
def test_the_router_starts_with_uniform_reads_and_random_writes():
    """Rows that are read and written alike would stay alike."""
    torch.manual_seed(0)
    biases = []
    for connection in EDeltaStream().build(DIM, 50).connections[1:-1]:
        assert (connection.router.project.weight == 0).all()
        _, carry = connection.read(state_for("edelta-stream").float())
        assert_close(carry.coefficients.h_pre, torch.full((2, 5, 4), 0.25))
        h_post = carry.coefficients.h_post
        assert_close(h_post, h_post[:1, :1].expand_as(h_post))
        assert h_post.std(-1).min() > 0.02, "the rows are written differently"
        biases.append(connection.router.bias)
    pre, post = torch.stack(biases).unbind(1)
    assert (pre == 0).all()
    assert post.std().item() == pytest.approx(1.0, rel=0.15)
    assert abs(post.mean().item()) < 0.2


def with_gate(connection: nn.Module, logit: float) -> nn.Module:
    """The connection with gamma = sigmoid(logit) for every token."""
    with torch.no_grad():
        connection.gamma.out.weight.zero_()
        connection.gamma.out.bias.fill_(logit)
    return connection


@every_hybrid
def test_penalty(name):
    """The penalty of each token is weight * 4 gamma (1 - gamma); the weight is 0.1 by default, and there is none for
    0."""
    assert EDelta().penalty == EDeltaStream().penalty == 0.1
    for context in CONTEXTS:
        scheme = replace(HYBRIDS[name], context=context, penalty=0.7)
        connection = perturbed(scheme.build(DIM, 1)).double().connections[0]
        _, carry = connection.read(state_for(name))
        gamma = carry.coefficients.gamma
        found = connection.penalty(carry.coefficients)
        assert found.shape == (2, 1 if context == "sequence" else state_for(name).shape[1])
        assert_close(found, 0.7 * 4 * gamma * (1 - gamma))
    (connection,) = replace(HYBRIDS[name], penalty=0.0).build(DIM, 1).connections
    assert connection.penalty(carry.coefficients) is None


def test_the_published_blocks_have_the_published_parameters():
    assert count(EDelta(), 128) == 296_540 - 12 * 128**2
    assert count(EDeltaStream(), 128) == 284_412 - 12 * 128**2


def count(scheme: EDelta | EDeltaStream, dim: int) -> int:
    """The parameters of a block that is neither the first nor the last."""
    connections = scheme.build(dim, 6).connections[2:4]
    return sum(parameter.numel() for parameter in connections.parameters())


@pytest.mark.parametrize("n", [2, 4])
@torch.no_grad()
def test_the_first_read_decides_the_sign_once_the_gate_reflects(n):
    """The rows of g are multiples c_i x of the embedding. A reflection turns some of them around."""
    (connection,) = perturbed(EDeltaStream(num_streams=n).build(DIM, 1)).double().connections
    connection.heads.k.weight.zero_()
    connection.heads.frame.rows[2] = torch.eye(n)[0]
    with_gate(connection, -800.0)
    x = normal(2, 5, DIM)
    seen = []
    for row in (0, 1):
        connection.router.project.weight.zero_()
        connection.router.bias.copy_(50 * torch.eye(n)[row].expand(1, n, n))
        seen.append(connection.read(Repeat(n)(x))[0])
    gain = connection.norm.weight
    assert_close(seen[0], -nn.functional.rms_norm(x, (DIM,), gain, EPS))
    assert_close(seen[1], nn.functional.rms_norm(x, (DIM,), gain, EPS))


def test_beta_starts_at_any_requested_value():
    """The inverse of softplus keeps its digits from tiny numbers to large ones."""
    for beta in (1e-6, 0.05, 1.0, 30.0, 1000.0):
        (connection,) = EDelta(cayley_init=beta).build(8, 1).double().connections
        found = connection.read(normal(1, 2, 8))[1].coefficients.beta
        assert found.flatten().tolist() == pytest.approx([beta, beta], rel=1e-5)


def test_the_last_sublayer_writes_with_weights_of_one():
    """They stand in place of the weights that nothing reads."""
    stream = build("edelta-stream", "token")
    connection, state = stream.connections[-1], state_for("edelta-stream")
    x, carry = connection.read(state)
    assert carry.coefficients.h_post is None
    shortcut = connection.shortcut(state, carry, x)
    assert shortcut.left_out == ("h_post",)
    assert (shortcut.h_post == 1).all()
