"""mHC of DeepSeek-V4 and GLM-5.3-Flash against a plain form for one token: orientation, divisions, start, head."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from residua import DeepSeekHyperConnections, Residual
from support.references import assert_computes, by_token, logits_of_token, rms_norm
from support.stream_cases import DIM, built, spread_over_streams
from support.tolerances import assert_close
from support.variants import bare_sublayers, every, normal, perturbed


def mixing_of_token(z: Tensor, iterations: int, eps: float) -> list[list[Tensor]]:
    """C by lists: softmax of each row, columns, then rows and columns in turn."""
    n = z.shape[0]
    c = [[z[i, j].exp() / z[i].exp().sum() + eps for j in range(n)] for i in range(n)]

    def columns(c):
        sums = [sum(c[i][j] for i in range(n)) + eps for j in range(n)]
        return [[c[i][j] / sums[j] for j in range(n)] for i in range(n)]

    c = columns(c)
    for _ in range(iterations - 1):
        c = columns([[entry / (sum(row) + eps) for entry in row] for row in c])
    return c


@by_token
def published(stream, token: Tensor, sublayers: list, scheme: DeepSeekHyperConnections) -> Tensor:
    """Token by token: stream j goes to stream k with C[j][k]."""
    n, eps = scheme.num_streams, scheme.gate_eps
    rows = stream.expand(token[None, None])
    rows = (rows if scheme.pre == "own" else rows[0])[0, 0]
    read = rows[0]
    for connection, sublayer in zip(stream.connections, sublayers):
        z = logits_of_token(connection.logits, rows)
        pre = torch.sigmoid(z[:n]) + eps
        if scheme.pre == "own":
            read = sum(pre[i] * rows[i] for i in range(n))
        y = sublayer(rms_norm(read, connection.norm.weight))
        c = mixing_of_token(z[2 * n :].view(n, n), scheme.iterations, eps)
        written = []
        for k in range(n):
            mixed = sum(c[j][k] * rows[j] for j in range(n))
            written.append(mixed + 2 / (1 + torch.exp(-z[n + k])) * y)
        rows = torch.stack(written)
        read = sum(pre[i] * rows[i] for i in range(n))  # in a single pass, for the next sublayer
    if scheme.pre == "previous":
        return read
    weights = torch.full((n,), 1 / n, dtype=token.dtype)
    if scheme.head == "sigmoid":
        weights = torch.sigmoid(logits_of_token(stream.collapse.logits, rows)) + eps
    return weights @ rows


@every(DeepSeekHyperConnections)
def test_values_and_gradients_are_those_of_the_plain_form(scheme):
    assert_computes(built(scheme, noise=0.3, count=3), published, scheme, tokens=(1, 2))


def test_the_mixing_is_transposed():
    """Stream i goes to stream o with C[i, o]: a logit for (0, 1) alone moves stream 0 into stream 1."""
    connection = built(DeepSeekHyperConnections(num_streams=2, weight_std=0.0), count=1).connections[0]
    with torch.no_grad():
        connection.logits.bias[4:] = torch.tensor([0.0, 3.0, 0.0, 0.0])
    state = torch.stack([normal(1, 1, DIM), torch.zeros(1, 1, DIM, dtype=torch.float64)], -2)
    _, carry = connection.read(state)
    after = connection.write(torch.zeros(1, 1, DIM, dtype=torch.float64), carry)
    h_res = connection.shortcut(state, carry, after).h_res[0, 0]
    assert h_res[1, 0] > 0.8, "target row first"
    assert_close(after[0, 0], h_res[:, :1] * state[0, 0, 0])


def test_the_published_start_merges_the_streams():
    """Reads of 1/2, writes of 1, and a C of 1/n everywhere: streams that differ are equal after one sublayer."""
    connection = built(DeepSeekHyperConnections(weight_std=0.0), count=1).connections[0]
    state = normal(2, 3, 4, DIM)
    _, carry = connection.read(state)
    h_pre, h_res, h_post = carry.coefficients
    assert_close(h_pre, torch.full_like(h_pre, 0.5 + 1e-6))
    assert_close(h_post, torch.ones_like(h_post))
    assert_close(h_res, torch.full_like(h_res, 0.25), factor=1e5)  # below it by a quarter of 1e-6
    assert spread_over_streams(connection.write(normal(2, 3, DIM, seed=3), carry)) < 1e-12
    weights = [c.logits.project.weight for c in DeepSeekHyperConnections().build(64, 2).connections]
    assert torch.cat(weights).std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("options", [{}, {"num_streams": 2}, {"num_streams": 5, "iterations": 3}, {"gate_eps": 1e-5},
                                     {"pre": "previous"}, {"pre": "previous", "num_streams": 2, "expand": "lss"},
                                     {"gate_eps": 0.0, "head": "mean"}])  # fmt: skip
def test_the_preserving_start_is_the_plain_residual(options):
    """Reads grow and writes shrink with depth by what eps takes from the state; parameters are made in float32."""
    count = 24
    scheme = DeepSeekHyperConnections(**options)
    norms = [perturbed(nn.LayerNorm(DIM), seed=i).double() for i in range(count)]
    ours = scheme.preserving().build(DIM, count, norm=norms.__getitem__).double()
    plain = Residual().build(DIM, count, norm=norms.__getitem__)
    x, sublayers = normal(2, 5, DIM), bare_sublayers(DIM, count)
    assert_close(ours(x, sublayers), plain(x, sublayers))


def test_in_a_single_pass_a_sublayer_reads_with_the_weights_of_the_previous_one():
    stream = built(DeepSeekHyperConnections(pre="previous"), noise=0.3, count=2)
    first, second = stream.connections
    state = stream.expand(normal(2, 3, DIM))
    assert torch.equal(state[1], state[0][..., 0, :]), "the first reads stream 0"
    x, carry = first.read(state)
    streams, read = first.write(torch.tanh(x), carry)
    assert_close(read, (carry.coefficients.h_pre.unsqueeze(-1) * streams).sum(-2))
    last = second(second_state := (streams, read), torch.tanh)
    assert torch.equal(stream.collapse(last), last[1])
    assert torch.equal(second.streams(second_state), streams)


def test_a_connection_equals_a_site_of_deepseek_v41():
    reason = "this transformers has no DeepSeek-V4.1"
    modeling = pytest.importorskip("transformers.models.deepseek_v41.modeling_deepseek_v41", reason=reason)
    layer, n = modeling.DeepseekV41DecoderLayer, 4
    ours = perturbed(DeepSeekHyperConnections(pre="previous").build(DIM, 1, norm_eps=1e-5).connections[0])
    streams, x = normal(2, 3, n, DIM, dtype=torch.float32), normal(2, 3, DIM, seed=1, dtype=torch.float32)
    theirs = SimpleNamespace(hc_mult=n, hc_sinkhorn_iters=20, hc_eps=1e-6)
    theirs.hc_input_norm = modeling.DeepseekV41UnweightedRMSNorm(eps=1e-5)
    logits = ours.logits
    pre, post, comb = layer.hc_mixes(theirs, streams, logits.project.weight, logits.scale, logits.bias)
    read, carry = ours.read((streams, x))
    written, next_x = ours.write(torch.tanh(read), carry)
    expected = layer.hc_expand(torch.tanh(ours.norm(x)), streams, post, comb)
    assert_close(written, expected, dtype=torch.float32)
    assert_close(next_x, layer.hc_collapse(expected, pre), dtype=torch.float32)
