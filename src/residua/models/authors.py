"""Importing checkpoints of the authors' public models (deep-delta-learning, commit 2b55f25).

Their state is (..., dim, value_channels) and ours (..., value_channels, dim), so filters are transposed; everything
else is renaming. The variant is told by the parameter names.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from residua.connections import DeepDelta, Residual, Scheme
from residua.models.configuration import ResiduaConfig
from residua.models.transformer import ResiduaForCausalLM

# Keys of the authors' configuration that change nothing in the function computed from given parameters.
_WITHOUT_EFFECT = {
    "block_size", "bias", "dropout", "embedding_init_std", "hidden_init_std_factor", "ddl_beta_init",
    "ddl_state_read_init", "ddl_state_dv_shortconv_causal", "ddl_beta_hidden_size", "kv_cache_slot_size",
    "num_key_value_heads", "scale_attn_by_inverse_layer_idx", "use_cache", "tie_word_embeddings", "hidden_size_base",
    "mup", "model_type",
}  # fmt: skip


def load_authors_checkpoint(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> ResiduaForCausalLM:
    """Our model with the authors' parameters: the same function, with their defects mended.

    config: their configuration keys (hidden_size, num_attention_heads, ddl_*, ...); state_dict: their parameter names.
    The variant (baseline, d_v = 1, token or channel compression, embedding convolution, kind of gate) follows from the
    names. The dtype of the parameters is kept. ValueError for parameters that are unknown, missing or of another
    shape, and for options that are not supported.
    """
    state = {name: tensor for name, tensor in state_dict.items() if name != "lm_head.weight"}
    layers = {int(match[1]) for name in state if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    if "transformer.wte.weight" not in state or not layers:
        raise ValueError("state_dict: expected the authors' names (transformer.wte.weight, transformer.h.0...), got "
                         + (", ".join(sorted(state)[:3]) or "nothing"))  # fmt: skip
    head = state_dict.get("lm_head.weight")
    if head is not None and not torch.equal(head, state["transformer.wte.weight"]):
        raise ValueError("lm_head.weight: expected it tied to transformer.wte.weight, got different values")

    ours = _model_config(config, state, len(layers))
    with torch.device("meta"):
        model = ResiduaForCausalLM(ours)
    renamed = _renamed(ours.scheme, state, len(layers))
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    missing = sorted(expected.keys() - renamed.keys())
    unknown = sorted(renamed.keys() - expected.keys())
    if missing or unknown:
        back = _authors_names(ours.scheme, len(layers))
        raise ValueError(
            "state_dict does not fit the configuration: "
            + "; ".join(
                f"{word}: {', '.join(back.get(name, name) for name in names)}"
                for word, names in (("missing", missing), ("unknown", unknown))
                if names
            )
        )
    for name, shape in expected.items():
        if renamed[name].shape != shape:
            raise ValueError(
                f"{name}: expected shape {tuple(shape)}, got {tuple(renamed[name].shape)} in the state_dict"
            )
    model.load_state_dict(renamed, strict=False, assign=True)
    model.tie_weights()
    return model.requires_grad_()


def _model_config(config: Mapping[str, Any], state: Mapping[str, Tensor], num_layers: int) -> ResiduaConfig:
    given = dict(config)
    for name in ("use_k_shift", "use_v_shift", "using_groupnorm", "q_activation", "k_activation", "v_activation"):
        if given.pop(name, None):
            raise ValueError(f"{name}: not supported (the authors' baseline and Deep Delta models leave it off)")
    vocab_size, hidden_size = state["transformer.wte.weight"].shape
    declared = given.pop("num_hidden_layers", num_layers)
    if declared != num_layers:
        raise ValueError(f"num_hidden_layers: expected {num_layers} as in the state_dict, got {declared}")
    for name, size in (("hidden_size", hidden_size), ("vocab_size", vocab_size)):
        if given.pop(name, size) != size:
            raise ValueError(f"{name}: expected {size} as in the state_dict, got {config[name]}")
    heads = given.pop("num_attention_heads", None)
    if heads is None:
        raise ValueError("config: expected the key num_attention_heads, which the parameters do not tell")
    width = state["transformer.h.0.attn.c_q.weight"].shape[0]

    scheme = _scheme(given, state)
    ours = ResiduaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        head_dim=given.pop("head_dim", width // heads),
        intermediate_size=state["transformer.h.0.mlp.c_fc1.weight"].shape[0],
        max_position_embeddings=given.get("block_size", 1024),
        connection=scheme,
        qk_norm="post_rope" if given.pop("use_qk_rmsnorm", True) else None,
        rope_theta=float(given.pop("rope_base", 10000.0)),
        rope_ratio=float(given.pop("rope_ratio", 1.0)),
        attention_output_gate=bool(given.pop("use_output_gate", False)),
        rms_norm_eps=float(given.pop("rms_norm_eps", 1e-5)),
        embedding_init_std=float(given.get("embedding_init_std", 0.02)),
        hidden_init_std_factor=float(given.get("hidden_init_std_factor", 0.5)),
        mup=bool(given.get("mup", False)),
        mup_base_width=int(given.get("hidden_size_base", 1024)),
    )
    unknown = sorted(given.keys() - _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"config: no option of the authors' models is called {', '.join(unknown)}")
    return ours


def _scheme(given: dict[str, Any], state: Mapping[str, Tensor]) -> Scheme:
    """The scheme that the parameter names and shapes tell; removes the keys that it reads from `given`."""
    options = {name.removeprefix("ddl_"): given.pop(name) for name in list(given) if name.startswith("ddl_")}
    kernel_e = given.pop("input_embed_shortconv_kernel_size", 4)
    first = "transformer.h.0."
    if not any(name.startswith(f"{first}ddl_") for name in state):
        return Residual()
    token, channel = state.get(f"{first}compress.shortconv.weight"), state.get(f"{first}compress.weight")
    read, embed = state.get(f"{first}compress.read"), state.get("input_embed.conv.weight")
    value_channels = 1 if read is None else read.numel()
    if options.get("value_channels", value_channels) != value_channels:
        raise ValueError(
            f"ddl_value_channels: expected {value_channels} as in the state_dict, got {options['value_channels']}"
        )
    constant = options.get("v_constant", False) or options.get("v_dim1_constant", False)
    two_layer = f"{first}ddl_attn.beta_in.weight" in state
    beta_in = state.get(f"{first}ddl_attn.beta_in.weight")
    return DeepDelta(
        value_channels=value_channels,
        compress="token" if token is not None else "channel" if channel is not None else None,
        compress_kernel=None if read is None else (token if token is not None else channel).shape[-1],
        expand="conv" if embed is not None else "repeat",
        expand_kernel=embed.shape[-1] if embed is not None else kernel_e,
        k_eps=float(options.get("k_eps", 1e-5)),
        beta_init=min(max(float(options.get("beta_init", 1.0)), 0.0), 2.0),
        beta_head="mlp" if two_layer else "linear",
        beta_hidden=beta_in.shape[0] if two_layer else 128,
        v_activation="constant" if constant else "scaled_sigmoid" if options.get("v_sigmoid", True) else "linear",
        v_scale=float(options.get("v_sigmoid_scale", 4.0)),
        v_constant=float(options.get("v_constant_value", options.get("v_dim1_constant_value", 2.0))),
        init="authors",
    )


def _authors_names(scheme: Scheme, num_layers: int) -> dict[str, str]:
    """Our parameter name -> theirs, for everything that models of this scheme can hold."""
    names = {"model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "transformer.ln_f.weight"}
    for i in range(num_layers):
        theirs, layer = f"transformer.h.{i}", f"model.layers.{i}"
        for ours, name in (("q_proj", "c_q"), ("k_proj", "c_k"), ("v_proj", "c_v"), ("o_proj", "c_proj"), ("g_proj",
        "g_proj"),
                           ("q_norm", "q_rms"), ("k_norm", "k_rms"), ("o_norm", "o_norm")):  # fmt: skip
            names[f"{layer}.attention.{ours}.weight"] = f"{theirs}.attn.{name}.weight"
        for ours, name in (("gate_proj", "c_fc1"), ("up_proj", "c_fc2"), ("down_proj", "c_proj")):
            names[f"{layer}.mlp.{ours}.weight"] = f"{theirs}.mlp.{name}.weight"
        for sublayer, (norm, delta) in enumerate((("ln_1", "ddl_attn"), ("ln_2", "ddl_mlp"))):
            connection = f"model.stream.connections.{2 * i + sublayer}"
            names[f"{connection}.norm.weight"] = f"{theirs}.{norm}.weight"
            two_layer = isinstance(scheme, DeepDelta) and scheme.beta_head == "mlp"
            gate = "beta_out" if two_layer else "beta"
            names[f"{connection}.beta.out.weight"] = f"{theirs}.{delta}.{gate}.weight"
            names[f"{connection}.beta.out.bias"] = f"{theirs}.{delta}.{gate}.bias"
            names[f"{connection}.beta.hidden.weight"] = f"{theirs}.{delta}.beta_in.weight"
            names[f"{connection}.value.project.weight"] = f"{theirs}.{delta}.v_proj.weight"
            names[f"{connection}.value.project.bias"] = f"{theirs}.{delta}.v_proj.bias"
        names |= _compressor_names(scheme, f"model.stream.connections.{2 * i}.compress", f"{theirs}.compress")
    names |= _compressor_names(scheme, "model.stream.collapse.compress", "transformer.readout")
    names["model.stream.expand.taps"] = "transformer.input_embed.conv.weight"
    return names


def _compressor_names(scheme: Scheme, ours: str, theirs: str) -> dict[str, str]:
    token = isinstance(scheme, DeepDelta) and scheme.compress == "token"
    taps = f"{theirs}.shortconv.weight" if token else f"{theirs}.weight"
    return {f"{ours}.taps": taps, f"{ours}.read": f"{theirs}.read"}


def _renamed(scheme: Scheme, state: Mapping[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The authors' parameters under our names and in our layout; names that we do not know stay as they are."""
    ours = {theirs: name for name, theirs in _authors_names(scheme, num_layers).items()}
    renamed = {}
    for theirs, tensor in state.items():
        # Constant values leave an unused projection behind in their models.
        if (
            isinstance(scheme, DeepDelta)
            and scheme.v_activation == "constant"
            and ".v_proj." in theirs
            and ".ddl_" in theirs
        ):
            continue
        # The readout and the embedding convolution are named with or without the prefix of the trunk.
        name = ours.get(theirs) or ours.get(f"transformer.{theirs}") or theirs
        if name.endswith(".taps"):
            # (dim * channels, 1, kernel) or (dim * channels, kernel), last tap the current token, channels fastest; or
            # (dim, kernel) over the channels.
            filters = tensor.reshape(tensor.shape[0], -1)
            if theirs.endswith("conv.weight"):
                tensor = filters.reshape(-1, scheme.num_streams, filters.shape[-1]).permute(2, 1, 0).flip(0)
            else:
                tensor = filters.T
            tensor = tensor.contiguous()
        renamed[name] = tensor
    return renamed
