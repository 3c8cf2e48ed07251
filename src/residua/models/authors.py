"""Import checkpoints of the DDL authors' public models (deep-delta-learning, commits 2b55f25 and d1f7621).

Their state is (..., dim, value_channels) and ours (..., value_channels, dim), so filters are transposed; everything
else is renaming. The parameter names tell which commit's code wrote a checkpoint, and the variant of the model.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from residua.connections import DeepDelta, Residual, Scheme
from residua.errors import extra
from residua.models.configuration import ResiduaConfig
from residua.models.transformer import ResiduaForCausalLM

with extra("lab"):
    from transformers import PreTrainedConfig

# Keys of the authors' configuration that do not change the function computed from given parameters.
_WITHOUT_EFFECT = {
    "block_size", "bias", "dropout", "embedding_init_std", "hidden_init_std_factor", "hidden_size_base",
    "intermediate_size", "mlp_hidden_mult", "kv_cache_slot_size", "num_key_value_heads", "use_cache",
    "scale_attn_by_inverse_layer_idx", "tie_word_embeddings", "ddl_beta_hidden_size", "ddl_beta_single_linear",
    "ddl_state_read_init", "input_embed_shortconv_kernel_size", "validate_cached_position_ids",
    # Keys that transformers writes into every config.json, in any of its versions.
    *PreTrainedConfig().to_dict(), "torch_dtype", "torchscript", "is_decoder", "add_cross_attention", "auto_map",
    "bos_token_id", "eos_token_id", "pad_token_id", "use_bfloat16", "pruned_heads", "tie_encoder_decoder",
}  # fmt: skip

# Options that change the function and have no counterpart in our models.
_UNSUPPORTED = ("use_k_shift", "use_v_shift", "using_groupnorm", "q_activation", "k_activation", "v_activation")
_DEPTH_SCALED = ("completeP", "completep", "spectralP", "SpectralP", "spectralp")
_WIDTH_SCALED = ("widthmuP", "widthmup", *_DEPTH_SCALED)


# Parameters from whose shapes the sizes of a model follow.
_SIZES = ("transformer.wte.weight", "transformer.h.0.attn.c_q.weight", "transformer.h.0.mlp.c_fc1.weight")

# Filters of compressors. Those over the tokens are called `shortconv` in the first code, and are 3-D in the current.
_COMPRESSORS = ("compress.shortconv.weight", "readout.shortconv.weight", "compress.weight", "readout.weight")

# The authors' options of a connection, without the prefix "ddl_", and the defaults.
_OPTIONS = {
    "value_channels": None, "state_shortconv_kernel_size": None, "k_eps": 1e-5, "beta_init": 1.0, "v_sigmoid": True,
    "v_sigmoid_scale": 4.0, "v_constant": False, "v_constant_value": 2.0, "v_dim1_constant": False,
    "v_dim1_constant_value": 2.0,
}  # fmt: skip


def load_authors_checkpoint(config: Mapping[str, Any], state_dict: Mapping[str, Tensor]) -> ResiduaForCausalLM:
    """Build our model with the authors' parameters. It computes their function, without the defects of their code.

    config: their configuration keys (hidden_size, num_attention_heads, ddl_*, ...), or the content of a config.json
    that `save_pretrained` wrote. state_dict: parameters by their names in the authors' first or current code. The
    variant (baseline, d_v = 1, token or channel compression, embedding convolution, kind of gate) is inferred from
    names and shapes. The dtype of the parameters is kept.

    Raises:
        ValueError: a parameter is unknown, missing or of another shape, or an option that changes numbers is not
            supported.
    """
    state = {name: tensor for name, tensor in state_dict.items() if name != "lm_head.weight"}
    layers = {int(match[1]) for name in state if (match := re.match(r"transformer\.h\.(\d+)\.", name))}
    for name in _SIZES:
        if name not in state:
            names = ", ".join(sorted(state)[:3]) or "nothing"
            raise ValueError(f"state_dict must have the authors' names (missing: {name}), got {names}")
    head = state_dict.get("lm_head.weight")
    if head is not None and not torch.equal(head, state["transformer.wte.weight"]):
        raise ValueError("lm_head.weight must be tied to transformer.wte.weight, got different values")

    ours = _model_config(config, state, len(layers))
    with torch.device("meta"):
        model = ResiduaForCausalLM(ours)
    theirs = _authors_names(state, len(layers))
    expected = {theirs[name]: (name, parameter.shape) for name, parameter in model.named_parameters()}
    unused: set[str] = set()
    if not any(".v_proj." in name for name in expected):  # with constant values, their models have an unused projection
        unused = {name for name in state if ".ddl_" in name and ".v_proj." in name}
    problems = [f"missing: {name}" for name in sorted(expected.keys() - state.keys())]
    problems += [f"unknown: {name}" for name in sorted(state.keys() - expected.keys() - unused)]
    for name, (_, shape) in expected.items():
        if name in state and (actual := _filters(state[name], name).shape) != (needed := _their_shape(shape, name)):
            problems.append(f"{name} must have shape {tuple(needed)}, got {tuple(actual)}")
    if problems:
        raise ValueError("the state_dict does not fit the configuration: " + "; ".join(problems))
    renamed = {
        name: _our_layout(state[their_name], shape, their_name) for their_name, (name, shape) in expected.items()
    }
    model.load_state_dict(renamed, strict=False, assign=True)
    model.tie_weights()
    return model.requires_grad_()


def _model_config(config: Mapping[str, Any], state: Mapping[str, Tensor], num_layers: int) -> ResiduaConfig:
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    for name in _UNSUPPORTED:
        value = settings.pop(name, None)
        if value and not (name.endswith("activation") and value == "identity"):
            raise ValueError(f"{name} must be off, got {value!r}: not supported")
    version = settings.pop("ddl_sequence_reduction_version", 1)
    if version != 1 or version is True:
        raise ValueError(f"ddl_sequence_reduction_version must be 1, got {version!r}")
    vocab_size, hidden_size = state["transformer.wte.weight"].shape
    for name, size in {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "vocab_size": vocab_size}.items():
        if settings.pop(name, size) != size:
            raise ValueError(f"{name} must be {size} as in the state_dict, got {config[name]}")
    heads = settings.pop("num_attention_heads", None)
    if heads is None:
        raise ValueError("config must have the key num_attention_heads, which the parameters do not tell")
    width, intermediate_size = (len(state[f"transformer.h.0.{name}.weight"]) for name in ("attn.c_q", "mlp.c_fc1"))
    head_dim = settings.pop("head_dim", width // heads)
    if heads * head_dim != width:
        raise ValueError(
            f"num_attention_heads, head_dim must have the product {width}, the rows of "
            f"transformer.h.0.attn.c_q.weight, got {heads} and {head_dim}"
        )
    if settings.pop("rms_norm_eps", 1e-5) != 1e-5:
        raise ValueError(
            f"rms_norm_eps must be 1e-05, which is fixed in most of the authors' norms, got {config['rms_norm_eps']}"
        )

    mup, base_width = _scales_logits(settings, state, num_layers), settings.get("hidden_size_base") or 1024
    scheme = _scheme(settings, state)
    if settings.pop("attention_dtype", "auto") == "bfloat16" and isinstance(scheme, Residual):
        raise ValueError("attention_dtype must be 'auto' or 'float32' with the authors' baseline, got 'bfloat16'")
    ours = ResiduaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=settings.get("block_size", 1024),
        connection=scheme,
        qk_norm="post_rope" if settings.pop("use_qk_rmsnorm", True) else None,
        rope_theta=float(settings.pop("rope_base", 10000.0)),
        rope_ratio=float(settings.pop("rope_ratio", 1.0)),
        attention_output_gate=bool(settings.pop("use_output_gate", False)),
        embedding_init_std=float(settings.get("embedding_init_std", 0.02)),
        output_init="depth" if _is_current(state) else "sqrt_depth",
        hidden_init_std_factor=float(settings.get("hidden_init_std_factor", 0.5)),
        mup=mup,
        mup_base_width=int(base_width) if base_width == int(base_width) else base_width,
    )
    unknown = sorted(settings.keys() - _WITHOUT_EFFECT)
    if unknown:
        raise ValueError(f"config: no option of the authors' models is called {', '.join(unknown)}")
    return ours


def _scales_logits(settings: dict[str, Any], state: Mapping[str, Tensor], num_layers: int) -> bool:
    """Return whether logits are scaled by the width, as with our option `mup`; pop the deciding keys from `settings`.

    Raises ValueError for a model that multiplies the updates of the state by a number, which is not supported.
    """
    mup, kind = settings.pop("mup", False), settings.pop("parameterization", None)
    multiplier, base_layers = settings.pop("residual_branch_mult", None), settings.pop("num_hidden_layers_base", None)
    if _is_current(state) and (mup or kind in ("muP", "mup")):
        name, value = ("mup", mup) if mup else ("parameterization", kind)
        raise ValueError(
            f"{name} must be left out, got {value!r}: the code with these parameters rejects it; 'widthmuP' is meant"
        )
    if kind is not None and not _is_current(state):
        raise ValueError(f"parameterization must be null in the code with these parameters (c_proj), got {kind!r}")
    if multiplier is None and kind in _DEPTH_SCALED and base_layers not in (None, num_layers):
        raise ValueError(
            f"parameterization {kind!r} with num_hidden_layers_base={base_layers} is not supported for a model of "
            f"{num_layers} layers: every update of the state is multiplied by the ratio"
        )
    if multiplier not in (None, 1):
        raise ValueError(f"residual_branch_mult must be 1, got {multiplier!r}: another value is not supported")
    return bool(mup) or kind in _WIDTH_SCALED


def _is_current(state: Mapping[str, Tensor]) -> bool:
    """Return whether the parameters have the names of the authors' current code: every block has `o_proj`."""
    return _find(state, ".o_proj.weight") is not None


def _scheme(settings: dict[str, Any], state: Mapping[str, Tensor]) -> Scheme:
    """Infer the scheme from parameter names and shapes and from `settings`, and remove the keys read from there."""
    declared = {name: settings.pop(f"ddl_{name}", default) for name, default in _OPTIONS.items()}
    causal = bool(settings.pop("ddl_state_dv_shortconv_causal", False))
    if not any(".ddl_" in name for name in state):
        return Residual()
    read = _find(state, "compress.read", "readout.read")
    embed = _find(state, "input_embed.conv.weight", "input_embed.weight")
    beta_in = _find(state, ".beta_in.weight")
    options: dict[str, Any] = {}
    if embed is not None:
        options |= {"expand": "conv", "expand_kernel": embed.shape[-1]}
    if beta_in is not None:
        options |= {"beta_head": "mlp", "beta_hidden": beta_in.shape[0]}
    # Their configuration also has values for options without effect.
    constant = "v_dim1_constant" if read is None else "v_constant"
    if declared[constant]:
        options |= {"v_activation": "constant", "v_constant": float(declared[f"{constant}_value"])}
    else:
        options |= (
            {"v_scale": float(declared["v_sigmoid_scale"])} if declared["v_sigmoid"] else {"v_activation": "linear"}
        )
    if read is not None:
        weights = _find(state, *_COMPRESSORS)
        token = weights is not None and (_convolves(state) or (_is_current(state) and weights.dim() == 3))
        options["compress"] = "token" if token else "channel"
        options["value_channels"] = declared["value_channels"] or read.numel()
        kernel = None if weights is None else weights.shape[-1]  # None: reported among the missing parameters
        options["compress_kernel"] = declared["state_shortconv_kernel_size"] or kernel
        if causal and not token:
            options["compress_causal"] = _is_honoured(state)
    elif declared["value_channels"] not in (None, 1):
        raise ValueError(f"ddl_value_channels must be 1 as in the state_dict, got {declared['value_channels']}")
    beta_init = min(max(float(declared["beta_init"]), 0.0), 2.0)
    return DeepDelta(
        k_eps=float(declared["k_eps"]),
        beta_init=beta_init,
        start="rewrite" if _is_current(state) else "authors",
        **options,
    )


def _convolves(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict of the first code has compressors over the tokens."""
    return not _is_current(state) and _find(state, ".shortconv.weight") is not None


def _is_honoured(state: Mapping[str, Tensor]) -> bool:
    """Return True, or raise ValueError if the parameters do not tell whether the convolution was causal or centred."""
    if not _is_current(state):
        raise ValueError(
            "ddl_state_dv_shortconv_causal must be false for a checkpoint of the authors' first code (c_proj), got "
            "true: only the accelerated file of that code obeys the option, and the parameters do not tell which file "
            "made them"
        )
    return True


def _find(state: Mapping[str, Tensor], *endings: str) -> Tensor | None:
    """Return a parameter whose name ends with one of the `endings`, or None. Earlier endings are preferred."""
    return next((state[name] for ending in endings for name in sorted(state) if name.endswith(ending)), None)


def _authors_names(state: Mapping[str, Tensor], num_layers: int) -> dict[str, str]:
    """Map our parameter names to theirs, for every parameter that a model with such a `state` can have."""
    gate = "beta" if _find(state, ".beta_in.weight") is None else "beta_out"
    out = "o_proj" if _is_current(state) else "c_proj"
    names = {"model.embed_tokens.weight": "transformer.wte.weight", "model.norm.weight": "ln_f.weight"}
    for i in range(num_layers):
        theirs, layer = f"transformer.h.{i}", f"model.layers.{i}"
        for ours, name in (("q_proj", "c_q"), ("k_proj", "c_k"), ("v_proj", "c_v"), ("o_proj", out),
                           ("g_proj", "g_proj"), ("q_norm", "q_rms"), ("k_norm", "k_rms"),
                           ("o_norm", "o_norm")):  # fmt: skip
            names[f"{layer}.attention.{ours}.weight"] = f"{theirs}.attn.{name}.weight"
        for ours, name in (("gate_proj", "c_fc1"), ("up_proj", "c_fc2"), ("down_proj", out)):
            names[f"{layer}.mlp.{ours}.weight"] = f"{theirs}.mlp.{name}.weight"
        for sublayer, (norm, delta) in enumerate((("ln_1", "ddl_attn"), ("ln_2", "ddl_mlp"))):
            connection = f"model.stream.connections.{2 * i + sublayer}"
            names[f"{connection}.norm.weight"] = f"{theirs}.{norm}.weight"
            names[f"{connection}.beta.out.weight"] = f"{theirs}.{delta}.{gate}.weight"
            names[f"{connection}.beta.out.bias"] = f"{theirs}.{delta}.{gate}.bias"
            names[f"{connection}.beta.hidden.weight"] = f"{theirs}.{delta}.beta_in.weight"
            names[f"{connection}.value.project.weight"] = f"{theirs}.{delta}.v_proj.weight"
            names[f"{connection}.value.project.bias"] = f"{theirs}.{delta}.v_proj.bias"
        names |= _compressor_names(state, f"model.stream.connections.{2 * i}.compress", f"{theirs}.compress")
    names |= _compressor_names(state, "model.stream.collapse.compress", "readout")
    names["model.stream.expand.taps"] = f"input_embed.{'weight' if _is_current(state) else 'conv.weight'}"
    return names


def _compressor_names(state: Mapping[str, Tensor], ours: str, theirs: str) -> dict[str, str]:
    taps = "shortconv.weight" if _convolves(state) else "weight"
    return {f"{ours}.taps": f"{theirs}.{taps}", f"{ours}.read": f"{theirs}.read"}


def _filters(tensor: Tensor, name: str) -> Tensor:
    """Return filters without the axis of length 1 that they have in the first code."""
    return tensor.squeeze(1) if tensor.dim() == 3 and name.endswith("conv.weight") else tensor


def _their_shape(shape: torch.Size, name: str) -> torch.Size:
    """Return the shape in their layout of a parameter with `shape` in ours.

    Filters over the tokens are (kernel, channels, dim) here, (dim * channels, kernel) in their first code and
    (dim, channels, kernel) in the current one; filters over the channels (kernel, dim) here and (dim, kernel) there.
    """
    if name.endswith("conv.weight"):
        return torch.Size([shape[1] * shape[2], shape[0]])
    return shape[::-1] if name.endswith((*_COMPRESSORS, "input_embed.weight")) else shape


def _our_layout(tensor: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Copy a parameter into our layout, with `shape`.

    In their filters over the tokens, the channel is the fastest axis, and the last tap is that of the current token.
    """
    filters = tensor.detach()
    if len(shape) == 3:
        filters = filters.reshape(shape[::-1]).permute(2, 1, 0).flip(0)
    elif name.endswith(_COMPRESSORS):
        filters = filters.T
    return filters.clone(memory_format=torch.contiguous_format)
