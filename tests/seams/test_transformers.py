"""The private names of transformers that residua uses."""

import inspect

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import can_return_tuple

from residua.models.attention import PACKED
from residua.models.cache import CACHE
from support.seams import Seam, check, find, reached

MEMORY = "the memory of streams that look back is kept in it"
OUTPUTS = "our outputs are of this kind"
SEAMS = [
    Seam("transformers.cache_utils.Cache", MEMORY, "update get_seq_length"),
    Seam("transformers.cache_utils.Cache.update", MEMORY, parameters="key_states value_states layer_idx"),
    Seam(
        "transformers.cache_utils.DynamicCache",
        MEMORY,
        "layers layer_class_to_replicate",
        "config",
        make=lambda kind: kind(),
    ),
    Seam(
        "transformers.cache_utils.EncoderDecoderCache",
        "a converted decoder keeps its memory in the cache of its own tokens",
        "self_attention_cache",
        make=lambda kind: kind(*(find("transformers.cache_utils.DynamicCache", MEMORY)() for _ in range(2))),
    ),
    Seam(
        "transformers.cache_utils.LinearAttentionLayer",
        MEMORY,
        "number_of_states conv_states has_previous_state record_past crop",
        "number_of_states",
        make=lambda kind: kind(number_of_states=2),
    ),
    Seam(
        "transformers.cache_utils.LinearAttentionLayer.update_conv_state",
        MEMORY,
        parameters="conv_states state_idx conv_kernel_size",
    ),
    Seam(
        "transformers.GenerationMixin._prepare_cache_for_generation",
        "our models add their memory to the cache there",
        parameters="generation_config model_kwargs",
        ordered=True,
    ),
    Seam(
        "transformers.masking_utils.create_causal_mask",
        "our models ask it for their mask",
        parameters=f"config inputs_embeds attention_mask {CACHE} position_ids",
        ordered=True,
    ),
    Seam(
        "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface",
        "our attention finds its function there",
        parameters="attn_implementation default",
        ordered=True,
    ),
    Seam(
        "transformers.modeling_layers.GradientCheckpointingLayer",
        "our layers are recomputed by it",
        "gradient_checkpointing",
        make=lambda kind: kind(),
    ),
    Seam(
        "transformers.modeling_outputs.BaseModelOutputWithPast",
        OUTPUTS,
        f"last_hidden_state hidden_states attentions {CACHE}",
        make=lambda kind: kind(),
    ),
    Seam(
        "transformers.modeling_outputs.CausalLMOutputWithPast",
        OUTPUTS,
        f"loss logits hidden_states attentions {CACHE}",
        make=lambda kind: kind(),
    ),
    Seam(
        "transformers.models.auto.modeling_auto",
        "AutoModel opens our models and converted ones",
        "AutoModel AutoModelForCausalLM AutoModelForSequenceClassification",
    ),
    Seam(
        "transformers.models.auto.modeling_auto.AutoModel",
        "converted models are registered with every class that has such a mapping",
        "_model_mapping register",
    ),
    Seam(
        "transformers.PreTrainedModel",
        "our models set or call it",
        "_can_compile_fullgraph _from_config _init_weights _initialize_weights _keep_in_fp32_modules "
        "_keep_in_fp32_modules_strict _no_split_modules _set_gradient_checkpointing "
        "_skip_keys_device_placement _supports_attention_backend _supports_flash_attn _supports_flex_attn "
        "_supports_sdpa _tied_weights_keys _tp_plan save_pretrained",
    ),
    Seam(
        "transformers.PreTrainedModel.__init__",
        "a plain class refuses the configuration of a converted model",
        mentions="config.name_or_path",
    ),
    Seam(
        "transformers.PreTrainedModel._set_gradient_checkpointing",
        "our models recompute states in another way than layers",
        parameters="enable gradient_checkpointing_func",
        ordered=True,
    ),
    Seam(
        "transformers.PreTrainedConfig",
        "our configuration sets or calls it",
        "base_model_tp_plan get_text_config _decode_special_floats get_config_dict",
        make=lambda kind: kind(),
    ),
    Seam("transformers.pytorch_utils.Conv1D", "Muon takes its weight", "weight", make=lambda c: c(2, 3)),
    Seam(
        "transformers.utils.logging",
        "opening a model is silent",
        "CRITICAL disable_progress_bar enable_progress_bar get_logger get_verbosity is_progress_bar_enabled "
        "set_verbosity",
    ),
    Seam("transformers.utils.is_flash_attn_2_available", "attention that is not installed is replaced"),
    Seam("transformers.utils.is_flash_attn_3_available", "attention that is not installed is replaced"),
    Seam(
        "transformers.utils.output_capturing",
        "hooks that it leaves on a converted model are removed",
        mentions="_output_capturing_hooks_installed",
    ),
    Seam(
        "transformers.modeling_utils",
        "weights that were loaded are not drawn again; reentrant checkpoints are refused",
        mentions="_is_hf_initialized _gradient_checkpointing_func",
    ),
    Seam("transformers.trainer", "the Trainer leaves the cache out", mentions="keys_to_ignore_at_inference"),
    Seam(
        "transformers.integrations.accelerate",
        "a cache is not moved between devices",
        mentions="_skip_keys_device_placement",
    ),
]


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.path.partition(".")[2])
def test_the_package_has_the_names_that_we_use(seam):
    check(seam)


def test_every_name_that_we_import_is_in_the_table():
    tried = {"transformers.utils.can_return_tuple", "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS"}
    assert reached("transformers") - tried <= {seam.path for seam in SEAMS}


def test_can_return_tuple_removes_return_dict_from_the_arguments_of_forward():
    class Model(PreTrainedModel):
        config_class = LlamaConfig

        @can_return_tuple
        def forward(self, x):
            return find("transformers.modeling_outputs.BaseModelOutputWithPast", OUTPUTS)(last_hidden_state=x)

    model, x = Model(LlamaConfig()), torch.ones(1)
    assert model(x).last_hidden_state is x
    assert model(x, return_dict=False) == (x,)


def test_models_take_the_cache_under_the_name_that_their_outputs_have():
    assert CACHE in inspect.signature(LlamaForCausalLM.forward).parameters, f"Llama no longer takes {CACHE}"


def test_attention_functions_have_the_names_that_we_know():
    interface = find("transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS", "our attention finds its function there")
    assert {"sdpa", "flash_attention_2", "flex_attention"} <= set(interface.valid_keys())


def test_our_forwards_accept_every_keyword_of_packed_documents():
    """A keyword that is missing in `PACKED` would be refused."""
    path = "transformers.modeling_flash_attention_utils.FlashAttentionKwargs"
    assert find(path, "data collators hand it to models").__annotations__.keys() <= PACKED


@pytest.mark.parametrize("name", ["_keep_in_fp32_modules_strict", "_keep_in_fp32_modules"])
def test_a_loaded_model_keeps_modules_in_float32(name, tmp_path):
    """The gates of connections stay wide in a model that is loaded in a narrow dtype."""
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, head_dim=8
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    kind = type("Wide", (LlamaForCausalLM,), {name: {"mlp"}})
    model = kind.from_pretrained(tmp_path, dtype=torch.float16)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32, f"transformers no longer minds {name}"
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float16
