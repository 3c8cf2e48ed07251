"""Attention, rotary positions and the MLP against plain loops over their formulas (there are no outside vectors for
"pre_rope")."""

import copy
import itertools
import math

import pytest
import torch
from torch import Tensor

from residua.models.attention import Attention, AttentionContext, Rotary
from residua.models.linear import MLP
from support.references import rms_norm
from support.tiny_models import prompt, tiny_config, tiny_model
from support.tolerances import assert_close
from support.variants import normal, perturbed


def rotated(x: Tensor, position: int, share: float, theta: float) -> Tensor:
    """x: (head_dim,): the pair (i, i + n/2) of the first n features turned by position * theta^(-2i/n)."""
    n = int(share * len(x)) // 2 * 2
    out = x.clone()
    for i in range(n // 2):
        angle = position * theta ** (-2 * i / n)
        a, b = x[i].clone(), x[i + n // 2].clone()
        out[i] = a * math.cos(angle) - b * math.sin(angle)
        out[i + n // 2] = a * math.sin(angle) + b * math.cos(angle)
    return out


def plain_attention(attention: Attention, x: Tensor) -> Tensor:
    """x: (seq, dim), every head and position by itself."""
    config = attention.config
    heads, width = config.num_attention_heads, config.head_dim
    q, k, v = (
        (x @ projection.weight.T).view(-1, heads, width)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if config.key_value_kernel is not None:
        taps = attention.convolution.taps.view(config.key_value_kernel, 2, heads, width)  # the first of k and v itself
        k, v = (
            torch.stack([sum(taps[s, i] * rows[t - s] for s in range(min(t + 1, len(taps)))) for t in range(len(rows))])
            for i, rows in enumerate((k, v))
        )

    def prepared(row: Tensor, position: int, norm: str) -> Tensor:
        if config.qk_norm == "pre_rope":
            row = rms_norm(row, getattr(attention, norm).weight)
        row = rotated(row, position, config.rope_ratio, config.rope_theta)
        if config.qk_norm == "post_rope":
            row = rms_norm(row, getattr(attention, norm).weight)
        return row

    out = torch.zeros(len(x), heads, width, dtype=x.dtype)
    for head, t in itertools.product(range(heads), range(len(x))):
        query = prepared(q[t, head], t, "q_norm")
        scores = [query @ prepared(k[s, head], s, "k_norm") / math.sqrt(width) for s in range(t + 1)]
        weights = torch.stack(scores).softmax(0)
        out[t, head] = sum(weight * v[s, head] for s, weight in enumerate(weights))
        if config.attention_output_gate:
            gate = (x[t] @ attention.g_proj.weight.T).view(heads, width)[head]
            out[t, head] = rms_norm(out[t, head], attention.o_norm.weight) * gate * torch.sigmoid(gate)
    return out.flatten(1) @ attention.o_proj.weight.T


@pytest.mark.parametrize("qk_norm", ["post_rope", "pre_rope", None])
@pytest.mark.parametrize("rope_ratio", [1.0, 0.6, 0.0])
@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("kernel", [None, 3])
def test_attention_equals_its_formula(qk_norm, rope_ratio, gate, kernel):
    config = tiny_config(
        hidden_size=12,
        num_attention_heads=3,
        head_dim=8,
        qk_norm=qk_norm,
        rope_ratio=rope_ratio,
        rope_theta=50.0,
        attention_output_gate=gate,
        key_value_kernel=kernel,
    )
    config._attn_implementation = "eager"
    attention = perturbed(Attention(config, 0).double())
    x = normal(1, 5, 12)
    mask = torch.full((5, 5), -math.inf).triu(1).double()[None, None]
    context = AttentionContext(Rotary.at(torch.arange(5)[None], config, torch.float64), mask, None, torch.float64)
    assert_close(attention(x, context=context)[0], plain_attention(attention, x[0]))


def test_rotary_angles_of_long_texts_are_exact():
    """In bfloat16 the position 1023 and its neighbours would be one and the same."""
    rotary = Rotary.at(torch.arange(1020, 1024)[None], tiny_config(), torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    assert_close(rotary.sin[0, :, 0], torch.arange(1020, 1024).double().sin(), dtype=torch.float32)


def test_the_mlp_equals_its_formula():
    mlp = perturbed(MLP(tiny_config()).double())
    x = normal(2, 3, 16)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    assert_close(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.T)
    assert mlp.up_proj.weight.shape == (42, 16), "floor(8 * 16 / 3)"
    assert not any(name.endswith("bias") for name, _ in mlp.named_parameters())


def test_convolved_keys_and_values_start_bit_equal_to_plain_ones():
    options = {"scale": 0.0, "num_hidden_layers": 3}
    plain, convolved = (tiny_model("residual", key_value_kernel=kernel, **options) for kernel in (None, 4))
    convolved.load_state_dict(plain.state_dict(), strict=False)
    ids = prompt(2, 7)
    assert torch.equal(plain(ids).logits, convolved(ids).logits)
    convolved(ids, labels=ids).loss.backward()
    assert all(layer.attention.convolution.taps.grad.abs().max() > 1e-6 for layer in convolved.model.layers)


def test_convolved_keys_and_values_do_not_cross_packed_documents():
    model, ids = tiny_model("residual", key_value_kernel=3), prompt(1, 9)
    packed = model(ids, seq_idx=torch.tensor([[0] * 4 + [1] * 5])).logits
    assert_close(packed, torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1))


def test_convolved_keys_and_values_rule_out_tensor_parallelism():
    assert tiny_config(key_value_kernel=3).base_model_tp_plan is None


@torch.no_grad()
@pytest.mark.parametrize(("norm", "projection"), [("norm", "q_proj"), ("key_norm", "k_proj"), ("value_norm", "v_proj")])
def test_attention_accepts_separate_inputs_for_queries_keys_and_values(norm, projection):
    """The first sublayer reads the embedding through three norms: a gain of the other sign is a weight of the other."""
    model, ids = tiny_model("attnres-inkling-s3-e1"), prompt(2, 6)
    plain, before = copy.deepcopy(model), model(ids).logits
    getattr(model.model.stream.connections[0], norm).weight[0] *= -1
    getattr(plain.model.layers[0].attention, projection).weight[:, 0] *= -1
    assert_close(model(ids).logits, plain(ids).logits)
    assert (model(ids).logits - before).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_boolean_mask_marks_the_visible_positions(implementation):
    model, ids = tiny_model("hc"), prompt(2, 5)
    model.set_attn_implementation(implementation)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    assert_close(model(ids, attention_mask=mask).logits, model(ids).logits)
