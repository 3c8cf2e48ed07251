"""A tiny random model of every causal language model, and of every other model, that transformers registers."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_NAMES: dict[Any, str] = {
    64: """
        vocab_size vocab_size_per_layer_input unpadded_vocab_size max_position_embeddings n_positions context_length
        max_target_positions""",
    32: """
        hidden_size d_model n_embd emb_dim word_embed_proj_dim attention_hidden_size embedding_size
        input_embedding_size output_embedding_size embedding_dim intermediate_size ffn_dim dim_ff n_inner
        ffn_hidden_size feed_forward_size decoder_ffn_dim encoder_ffn_dim moe_intermediate_size
        expert_ffn_hidden_size encoder_hash_byte_group_vocab shared_expert_intermediate_size shared_intermediate_size
        intermediate_size_mlp prefix_dense_intermediate_size shared_experts_intermediate_size lru_width
        dense_intermediate_size moe_shared_expert_intermediate_size router_hidden_size image_size img_size
        input_size""",
    3: """
        num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers""",
    4: """
        num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
        num_decoder_attention_heads num_encoder_attention_heads attention_heads swa_num_attention_heads
        num_attention_heads_per_layer num_experts n_routed_experts num_local_experts moe_num_experts mamba_n_heads
        n_mamba_heads mamba_num_heads sliding_window local_attention_window_len attention_window_size block_size
        global_block_size""",
    2: """
        num_key_value_heads num_kv_heads swa_num_key_value_heads num_experts_per_tok n_shared_experts
        num_shared_experts moe_num_shared_experts linear_num_key_heads linear_num_value_heads linear_num_heads
        num_frames frames_per_clip tubelet_size temporal_patch_size spatial_merge_size""",
    8: """
        head_dim swa_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim dim_head kv_lora_rank q_lora_rank d_kv
        laurel_rank rotary_dim attention_head_size linear_key_head_dim linear_value_head_dim linear_head_dim
        mamba_d_state state_size ssm_state_size mamba_d_ssm chunk_size mamba_chunk_size attention_chunk_size
        index_head_dim index_n_heads patch_size spatial_patch_size hidden_size_per_layer_input""",
    1: """
        n_group topk_group num_mtp_layers num_nextn_predict_layers bos_token_id eos_token_id pad_token_id
        sep_token_id decoder_start_token_id""",
    0.0: "layerdrop decoder_layerdrop encoder_layerdrop",
    16: "mamba_d_head mamba_head_dim num_mel_bins max_source_positions feature_projection_input_dim",
    (32, 32, 32, 32, 32, 32, 32): "conv_dim",
    None: "moe_latent_size",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
"""Small values of the fields that configurations have; a field that a configuration lacks is left out."""

LARGEST = 14_000_000
"""Parameters of the largest model; a larger one has a size that nothing above makes small."""

COMPASS_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
}

ODD: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 64},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4},
    },
    "xmod": {"default_language": "en_XX"},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "laguna": {"num_attention_heads_per_layer": [4, 4, 4]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron_h": {"n_groups": 2},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local", "local"], "axial_pos_embds": False},
    "zamba2": {"layers_block_type": ["mamba", "hybrid", "mamba"]},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "cohere_compass_text": {"layer_types": ["full_attention"] * 3, "rope_parameters": COMPASS_ROPE},
    "dots3_note_text": {"layer_types": ["full_attention"] * 3, "index_topk": 4},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 3, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "gemma4_unified": {"vision_config": None, "audio_config": None},
}
"""What single families need besides."""

PARTS: dict[str, dict[str, str]] = {
    "fuyu": {"text_config": "persimmon"},
    "gemma3": {"vision_config": "siglip_vision_model"},
    "got_ocr2": {"text_config": "qwen2"},
    "moss_transcribe_diarize": {"text_config": "qwen3"},
    "moshi": {"audio_encoder_config": "mimi"},
}
"""The configurations inside that may be of several families, and the one that is taken, where the default is large."""


def settings(config_class: Any, family: str) -> dict[str, Any]:
    """Return keyword arguments for a tiny configuration, of the nested ones too."""
    known = {field.name for field in fields(config_class)} | set(getattr(config_class, "attribute_map", {}))
    chosen = {name: value for name, value in SIZES.items() if name in known}
    for field in fields(config_class):  # where a configuration has a size for every stage
        default = getattr(config_class, field.name, None)
        if field.name in chosen and isinstance(default, (list, tuple)) and isinstance(chosen[field.name], int):
            chosen[field.name] = type(default)([chosen[field.name]] * len(default))
    for name, nested in getattr(config_class, "sub_configs", {}).items():
        if isinstance(nested, type) and is_dataclass(nested):
            chosen[name] = settings(nested, nested.model_type)
    for name, part in PARTS.get(family, {}).items():
        chosen[name] = {"model_type": part, **settings(CONFIG_MAPPING[part], part)}
    if "kv_lora_rank" in known:  # every head of latent attention has keys and values of its own
        chosen["num_key_value_heads"] = SIZES["num_attention_heads"]
    return {**chosen, **ODD.get(family, {})}


def other_families() -> list[str]:
    """Return the registered models that are neither causal language models nor encoder-decoders."""
    return sorted(set(MODEL_MAPPING_NAMES) - set(FAMILIES) - set(encoder_decoders()))


def halves() -> list[str]:
    """Return the names of the encoders and decoders of encoder-decoders, as `tiny` takes them."""
    return [f"{family}: {half}" for family in encoder_decoders() for half in ("encoder", "decoder")]


def encoder_decoders() -> list[str]:
    return sorted(
        family for family in MODEL_MAPPING_NAMES if getattr(CONFIG_MAPPING[family], "is_encoder_decoder", False) is True
    )


def tiny(name: str) -> PreTrainedModel:
    """Return the model of a family, or its part "family: encoder", in evaluation mode.

    Its weights depend on the name alone, and no norm is trivial.
    """
    family, _, half = name.partition(": ")
    config_class = CONFIG_MAPPING[family]
    auto: Any = AutoModel if half or family not in FAMILIES else AutoModelForCausalLM
    config = config_class(**settings(config_class, family))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{family} must be a tiny model, got one with {size:,} parameters")
    model = randomised(lambda: auto.from_config(config), scale=0.05)
    return getattr(model, f"get_{half}")() if half else model


def randomised(build: Callable[[], PreTrainedModel], *, scale: float) -> PreTrainedModel:
    """Return what `build` builds, always with the same weights, in evaluation mode. Noise makes no norm trivial."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = build().eval()
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model
