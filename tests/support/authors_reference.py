"""A plain second implementation of the authors' models, in their layout (batch, seq, dim, d_v), from their parameters
(of the first code or the current one) and configuration keys. test_conformance.py checks it against their numbers."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

Config = Mapping[str, Any]
State = Mapping[str, Tensor]


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def earlier(x: Tensor, steps: int) -> Tensor:
    """x of `steps` tokens before, zero before the first; x: (batch, seq, ...)."""
    return torch.cat([torch.zeros_like(x[:, :steps]), x[:, : x.shape[1] - steps]], 1)


def rotary(x: Tensor, config: Config) -> Tensor:
    """x: (batch, seq, heads, head_dim)."""
    n = int(config.get("rope_ratio", 1.0) * x.shape[-1]) // 2 * 2
    if not n:
        return x
    frequencies = config.get("rope_base", 10000.0) ** (-torch.arange(0, n, 2, dtype=x.dtype) / n)
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x[..., : n // 2], x[..., n // 2 : n], x[..., n:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


def attention(c: Tensor, config: Config, p: State, at: str) -> Tensor:
    heads = (*c.shape[:2], config["num_attention_heads"], -1)
    q, k, v = ((c @ p[f"{at}.{name}.weight"].T).view(heads) for name in ("c_q", "c_k", "c_v"))
    q, k = rotary(q, config), rotary(k, config)
    if config.get("use_qk_rmsnorm", True):
        q, k = rms_norm(q, p[f"{at}.q_rms.weight"]), rms_norm(k, p[f"{at}.k_rms.weight"])
    scores = torch.einsum("bthe,bshe->bhts", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(c.shape[1], c.shape[1]).triu(1).bool()
    y = torch.einsum("bhts,bshe->bthe", scores.masked_fill(future, -torch.inf).softmax(-1), v)
    if config.get("use_output_gate", False):
        y = rms_norm(y, p[f"{at}.o_norm.weight"]) * silu((c @ p[f"{at}.g_proj.weight"].T).view(heads))
    return y.flatten(2) @ p[f"{at}.c_proj.weight"].T


def mlp(c: Tensor, p: State, at: str) -> Tensor:
    return (silu(c @ p[f"{at}.c_fc1.weight"].T) * (c @ p[f"{at}.c_fc2.weight"].T)) @ p[f"{at}.c_proj.weight"].T


def named_as_first(p: State) -> State:
    """Parameters of the current code with names and shapes of the first."""
    state = {}
    for name, tensor in p.items():
        name = name.replace(".o_proj.", ".c_proj.")
        if tensor.dim() == 3:
            name = name.replace("input_embed.", "input_embed.conv.").replace("compress.", "compress.shortconv.")
            name, tensor = name.replace("readout.", "readout.shortconv."), tensor.flatten(0, 1)
        state[name] = tensor
    return state


def compressed(X: Tensor, p: State, at: str, *, causal: bool) -> Tensor:
    """x_in: (batch, seq, dim)."""
    d, m = X.shape[-2:]
    if m == 1 and f"{at}.read" not in p:
        return X[..., 0]
    read = p[f"{at}.read"]
    if f"{at}.shortconv.weight" in p:
        w = p[f"{at}.shortconv.weight"]
        kernel = w.shape[-1]
        w = w.reshape(d, m, kernel)
        return sum(w[..., kernel - 1 - s] * earlier(X, s) for s in range(kernel)) @ read
    w = p[f"{at}.weight"]
    kernel = w.shape[-1]
    left = kernel - 1 if causal else (kernel - 1) // 2
    x_in = torch.zeros_like(X[..., 0])
    for a in range(m):
        for i in range(kernel):
            if 0 <= a + i - left < m:
                x_in = x_in + read[a] * w[:, i] * X[..., a + i - left]
    return x_in


def delta(X: Tensor, h: Tensor, x_in: Tensor, c: Tensor, config: Config, p: State, at: str) -> Tensor:
    """One update with the sublayer's output h as the direction."""
    eps = config.get("ddl_k_eps", 1e-5)
    k = h / (h.square().sum(-1, keepdim=True) + eps**2).sqrt()
    if f"{at}.beta.weight" in p:
        z = c @ p[f"{at}.beta.weight"][0] + p[f"{at}.beta.bias"]
    else:
        z = torch.tanh(c @ p[f"{at}.beta_in.weight"].T) @ p[f"{at}.beta_out.weight"][0] + p[f"{at}.beta_out.bias"]
    beta = 2 * torch.sigmoid(z)
    which = "v_dim1_constant" if X.shape[-1] == 1 else "v_constant"
    v = x_in @ p[f"{at}.v_proj.weight"].T + p[f"{at}.v_proj.bias"]
    if config.get(f"ddl_{which}", False):
        v = torch.full_like(v, config.get(f"ddl_{which}_value", 2.0))
    elif config.get("ddl_v_sigmoid", True):
        v = config.get("ddl_v_sigmoid_scale", 4.0) * torch.sigmoid(v)
    erased = torch.einsum("btd,btdm->btm", k, X)
    return X + beta[..., None, None] * torch.einsum("btd,btm->btdm", k, v - erased)


def authors_logits(config: Config, p: State, ids: Tensor) -> Tensor:
    """Logits (batch, seq, vocab) of the model whose parameters are p."""
    first = "transformer.h.0"
    if f"{first}.attn.o_proj.weight" in p:
        p = named_as_first(p)
    causal = config.get("ddl_state_dv_shortconv_causal", False)
    plain = f"{first}.ddl_attn.v_proj.weight" not in p
    m = 1 if plain else p[f"{first}.ddl_attn.v_proj.weight"].shape[0]
    e = p["transformer.wte.weight"][ids]
    X = torch.stack([e] * m, -1)
    if "input_embed.conv.weight" in p:
        w = p["input_embed.conv.weight"]
        kernel = w.shape[-1]
        w = w.reshape(-1, m, kernel)
        X = sum(w[..., kernel - 1 - s] * earlier(e, s).unsqueeze(-1) for s in range(kernel))
    layers = 1 + max(int(name.split(".")[2]) for name in p if name.startswith("transformer.h."))
    for i in range(layers):
        h = f"transformer.h.{i}"
        for norm, sublayer in (("ln_1", "attn"), ("ln_2", "mlp")):
            x_in = compressed(X, p, f"{h}.compress", causal=causal)
            c = rms_norm(x_in, p[f"{h}.{norm}.weight"])
            y = attention(c, config, p, f"{h}.attn") if sublayer == "attn" else mlp(c, p, f"{h}.mlp")
            X = X + y.unsqueeze(-1) if plain else delta(X, y, x_in, c, config, p, f"{h}.ddl_{sublayer}")
    logits = rms_norm(compressed(X, p, "readout", causal=causal), p["ln_f.weight"]) @ p["transformer.wte.weight"].T
    if config.get("mup", False) or config.get("parameterization") is not None:
        logits = logits * config.get("hidden_size_base", 1024) / e.shape[-1]
    return logits
