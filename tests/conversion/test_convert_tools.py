"""What adapters, wrappers, copies and parametrisations do to a converted model is what they do to the plain one."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    M2M100Config,
    M2M100Model,
    Olmo2Config,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    T5Config,
    T5EncoderModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.quantizers.quantizers_utils import should_convert_module

import residua
from residua.connections.parts.projection import LINEAR_MAPS
from residua.conversion.flow import UnknownUse
from residua.errors import InputError
from residua.models.cache import CACHE
from support.converted_models import IDS, PLAIN, VOCAB, WINDOWED, converted, llama, model_of
from support.families import randomised, tiny
from support.tolerances import assert_close

peft = pytest.importorskip("peft", reason="peft is not installed")


def lora(**options):
    return peft.LoraConfig(**({"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["q_proj"]} | options))


ADAPTERS = {
    "norms by their names": lambda: peft.LNTuningConfig(task_type="CAUSAL_LM"),
    "a suffix of all norms": lambda: lora(modules_to_save=["norm"]),
    "embeddings and norms": lambda: lora(modules_to_save=["embed_tokens", "norm"]),
    "a whole layer": lambda: lora(target_modules=["layers.0.self_attn.q_proj"], modules_to_save=["layers.2"]),
    "all linear maps": lambda: lora(target_modules="all-linear", use_dora=True),
    "layers twice": lambda: lora(layer_replication=[(0, 2), (1, 3)]),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_learns_as_on_the_plain_model(kind):
    results = []
    for model in (llama(), residua.convert(llama(), "residual")):
        torch.manual_seed(0)
        adapted = peft.get_peft_model(model, ADAPTERS[kind]()).double().train()
        optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
        for _ in range(2):
            adapted(input_ids=IDS, labels=IDS).loss.backward()
            assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
            optimizer.step()
            optimizer.zero_grad()
        learnt = adapted.eval()(input_ids=IDS).logits
        results.append((learnt, adapted.merge_and_unload()(input_ids=IDS).logits))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", ["edelta-stream", "gated-delta", "gated-residual", "hc", "ihc", "mhc"])
def test_an_adapter_of_all_linear_maps_starts_as_the_plain_model_and_trains(name, dora):
    plain, model = llama(), residua.convert(llama(), name)
    adapted = peft.get_peft_model(model, lora(target_modules="all-linear", use_dora=dora)).double().train()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert not any(".stream." in name for name in trained)
    assert_close(adapted(input_ids=IDS).logits, plain(input_ids=IDS).logits, factor=10)
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in trained.values())
    assert any(parameter.grad.count_nonzero() for parameter in trained.values())


def test_an_adapter_can_exclude_a_connection_map_named_like_a_map_of_attention_by_its_path():
    model = residua.convert(llama(), "ddl:k_proj=true", start="fresh")
    adapted = peft.get_peft_model(model, lora(target_modules=["k_proj"], exclude_modules=r".*\.stream\..*"))
    assert not any(".stream." in name for name, parameter in adapted.named_parameters() if parameter.requires_grad)


def test_a_copied_stream_borrows_the_norm_of_its_layer_and_a_copied_layer_its_own():
    layer = converted(PLAIN).model.layers[1]
    stream, other = copy.deepcopy(layer.stream), copy.deepcopy(layer)
    assert stream.connections[0].norm.owner is layer.input_layernorm
    assert other.stream.connections[0].norm.owner is other.input_layernorm
    assert not any(isinstance(module, LlamaRMSNorm) for module in layer.stream.modules())


class Steered(nn.Module):
    """A norm whose input and output somebody changes; `calls` counts."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.calls = norm, 0

    def forward(self, x):
        self.calls += 1
        return self.norm(x.tanh()) + 0.5


def encoder_of_t5():
    """A model whose norms stand two modules deeper than its layers."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": VOCAB}
    torch.manual_seed(0)
    return T5EncoderModel(T5Config(**sizes)).double().eval()


def add(holder, name, module):
    holder.add_module(name, module)


def add_again(holder, name, module):
    delattr(holder, name)
    holder.add_module(name, module)


HOLDERS = {
    "llama": (llama, lambda model: model.model.layers[1], "input_layernorm"),
    "t5": (encoder_of_t5, lambda model: model.encoder.block[1].layer[0], "layer_norm"),
}


@pytest.mark.parametrize("put", [setattr, add, add_again])
@pytest.mark.parametrize("family", HOLDERS)
def test_a_wrapper_around_a_norm_counts_as_the_norm_and_runs_once(family, put):
    build, holder_of, name = HOLDERS[family]
    plain, model = build(), residua.convert(build(), "residual")
    for holder in map(holder_of, (plain, model)):
        put(holder, name, Steered(getattr(holder, name)))
    assert torch.equal(model(input_ids=IDS)[0], plain(input_ids=IDS)[0])
    wrapper = getattr(holder_of(model), name)
    assert wrapper.calls == 1
    assert torch.equal(copy.deepcopy(model)(input_ids=IDS)[0], plain(input_ids=IDS)[0])
    residua.unconvert(model)
    assert type(wrapper) is Steered
    assert type(holder_of(model)) is type(holder_of(plain))
    assert torch.equal(model(input_ids=IDS)[0], plain(input_ids=IDS)[0])


class Shifted(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 0.5


@pytest.mark.parametrize("family", HOLDERS)
def test_a_wrapper_put_around_a_norm_without_setattr_is_refused(family):
    build, holder_of, name = HOLDERS[family]
    model = residua.convert(build(), "residual")
    holder = holder_of(model)
    holder._modules[name] = Shifted(getattr(holder, name))
    with pytest.raises(UnknownUse, match=rf"in the place of .*{name}; put it there with setattr"):
        model(input_ids=IDS)


def test_a_wrapper_around_a_sublayer_without_a_norm_gets_the_input_of_the_sublayer():
    results = []
    for convert in (lambda model: model, lambda model: residua.convert(model, "residual")):
        model = convert(model_of(Olmo2Config, intermediate_size=24))
        for layer in model.model.layers:
            layer.mlp = Shifted(layer.mlp)
        results.append(model(IDS).logits)
    assert torch.equal(*results)


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight

    def right_inverse(self, weight):
        return weight / 2


@pytest.mark.parametrize("connection", ["residual", "gated-residual"])
def test_a_model_with_a_parametrised_norm_is_converted_and_unconverted(connection):
    model = residua.convert(llama(), connection)
    norm, before = model.model.layers[1].input_layernorm, model(IDS).logits
    parametrize.register_parametrization(norm, "weight", Double())
    assert torch.equal(copy.deepcopy(model)(IDS).logits, before)
    model(IDS).logits.sum().backward()
    assert norm.parametrizations.weight.original.grad is not None
    residua.unconvert(model)
    parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is LlamaRMSNorm
    parametrize.register_parametrization(norm, "weight", Double())
    residua.convert(model, connection)
    parametrize.remove_parametrizations(norm, "weight")
    assert torch.equal(model(IDS).logits, before)


def test_no_tool_finds_the_plain_model_by_an_attribute_name(tmp_path):
    llama().save_pretrained(tmp_path / "plain")
    model = type(llama()).from_pretrained(tmp_path / "plain")
    residua.convert(model, PLAIN)
    assert not {str(tmp_path / "plain")} & {model.name_or_path, model.config._name_or_path, model.model.name_or_path}
    peft.get_peft_model(model, lora()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(OSError, match=r"residua\.load opens it"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    fresh = residua.convert(type(llama()).from_pretrained(tmp_path / "plain"), PLAIN)
    assert "plain_name" not in fresh.config.to_json_string()
    assert residua.unconvert(fresh).config._name_or_path == fresh.name_or_path == str(tmp_path / "plain")


def test_an_adapter_trained_on_a_folder_opens_on_this_folder(tmp_path):
    converted(PLAIN).save_pretrained(tmp_path / "converted")
    adapted = peft.get_peft_model(residua.load(tmp_path / "converted"), lora(init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert_close(opened(input_ids=IDS).logits, adapted(input_ids=IDS).logits)


class Control(nn.Module):
    """A wrapper that passes no attributes on."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *args, **options):
        return self.block(*args, **options)


@pytest.mark.parametrize("connection", [PLAIN, WINDOWED])
@pytest.mark.parametrize("wrap", [Control, checkpoint_wrapper])
def test_layers_are_found_in_wrappers(connection, wrap):
    model = converted(connection)
    out = model(IDS, labels=IDS)
    out.loss.backward()
    before, gradients = out.logits, [p.grad for p in model.parameters()]
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = wrap(layer)
    model.zero_grad()
    model(IDS, labels=IDS).loss.backward()  # in evaluation mode, in which a model makes a cache by default
    for parameter, gradient in zip(model.parameters(), gradients):
        assert_close(parameter.grad, gradient, factor=10)
    with torch.no_grad():
        kept = model(IDS[:, :5], use_cache=True)
        last = model(IDS[:, 5:], past_key_values=kept.past_key_values).logits
    assert_close(torch.cat([kept.logits, last], 1), before)
    with pytest.raises(InputError, match="would change by"):
        residua.unconvert(model)
    assert_close(model(IDS).logits, before)
    assert torch.equal(residua.unconvert(model, lossy=True)(IDS).logits, llama()(IDS).logits)


def test_a_wrapper_with_reentrant_checkpoints_is_refused():
    model = converted(PLAIN).train()
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.REENTRANT)
    with pytest.raises(ValueError, match="NO_REENTRANT"):
        model(IDS)


def test_a_trunk_without_layers_is_refused_with_this_reason():
    model = converted(PLAIN)
    model.model.layers = nn.ModuleDict({"0": nn.Identity()})
    with pytest.raises(UnknownUse, match="must have its converted layers in a list"):
        model(IDS)


@pytest.mark.parametrize(
    "use",
    [
        lambda x: x.detach(),
        lambda x: x + torch.ones(16),
        lambda x: torch.ones(16) + x,
        lambda x: 2 * x,
        lambda x: x[0],
        lambda x: torch.relu(x),
        lambda x: x.to(torch.float64).norm(),
    ],
)
def test_a_hook_between_layers_gets_an_error_that_names_boundaries(use):
    model = converted(PLAIN)
    model.model.layers[1].register_forward_hook(lambda layer, args, out: use(out))
    with pytest.raises(UnknownUse, match=r"residua\.lab\.inspection\.boundaries"):
        model(IDS)


def test_narrowing_a_converted_model_gives_the_same_warning_as_for_a_stream():
    model = converted("mhc", torch.float32)
    with pytest.warns(UserWarning, match=r"must stay in float32, got torch\.bfloat16"):
        model.bfloat16()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        converted("mhc", torch.bfloat16).to("cpu")
        converted("residual", torch.float32).half()


def test_quantizers_of_transformers_do_not_quantize_the_connections_of_a_folder(tmp_path):
    converted("mhc", torch.float32).save_pretrained(tmp_path)
    model = residua.load(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    kept = [name for name in names if not should_convert_module(name, list(model._keep_in_fp32_modules))]
    assert kept == [name for name in names if ".stream." in name]


@pytest.mark.nightly
@pytest.mark.compiler
@pytest.mark.filterwarnings("ignore")
def test_activation_checkpoints_compile_into_one_graph():
    model = converted(PLAIN).train()
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.compile(model, backend="eager", fullgraph=True)(IDS, labels=IDS, use_cache=False).loss.backward()
    for parameter, gradient in zip(model.parameters(), gradients):
        assert_close(parameter.grad, gradient, factor=10)


def m2m(**options):
    names = ("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads")
    sizes = dict.fromkeys(names, 2) | {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "vocab_size": 48}
    return M2M100Model(M2M100Config(**sizes, max_position_embeddings=32, pad_token_id=1, **options))


def sound_encoder(layerdrop):
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    sizes |= {"conv_dim": (8,), "conv_kernel": (4,), "conv_stride": (4,), "num_feat_extract_layers": 1}
    sizes |= {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "do_stable_layer_norm": True}
    dropouts = ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout")
    config = Wav2Vec2Config(**sizes, **dict.fromkeys(dropouts, 0.0), layerdrop=layerdrop, mask_time_prob=0.0)
    return Wav2Vec2Model(config)


SOUND = {"input_values": torch.randn(1, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}
SKIPPING = {
    "encoder": (lambda: m2m(encoder_layerdrop=0.5, dropout=0.0).get_encoder(), {"input_ids": IDS}),
    "sound": (lambda: sound_encoder(0.5), SOUND),
}


@pytest.mark.parametrize("connection", ["residual", "hc", "mhc", "edelta-stream"])
@pytest.mark.parametrize("kind", SKIPPING)
def test_layers_are_skipped_at_random_in_training_as_in_the_plain_model(kind, connection):
    """The twenty draws include ones that skip the first layers, the last ones, and all."""
    build, inputs = SKIPPING[kind]
    plain = randomised(build, scale=0.3).double()
    model = residua.convert(copy.deepcopy(plain).eval(), connection, inputs=inputs).train()
    plain.train()
    names = [name for name, p in plain.named_parameters()]
    for seed in range(20):
        results = []
        for other in (plain, model):
            torch.manual_seed(seed)
            out = other(**inputs, output_hidden_states=True)
            out.last_hidden_state.square().sum().backward()
            parameters = dict(other.named_parameters())
            results.append((out.hidden_states, [parameters[name].grad for name in names]))
            other.zero_grad()
        (states, gradients), (expected_states, expected) = results
        for x, y in zip(states, expected_states, strict=True):
            assert_close(x, y, factor=10)
        for x, y in zip(gradients, expected, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                assert_close(x, y, factor=100)  # sums over all tokens and layers
    assert not [
        hook for part in residua.unconvert(model.eval(), inputs=inputs).modules() for hook in part._forward_pre_hooks
    ]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("encoder", r"layerdrop must be 0 .* got 0\.5; set layerdrop = 0 on the M2M100Encoder"),
        ("sound", r"layerdrop must be 0 .* got 0\.5; set config\.layerdrop = 0 on the Wav2Vec2EncoderStable"),
    ],
)
def test_a_scheme_that_reads_over_depth_needs_every_layer_in_training(kind, says):
    build, inputs = SKIPPING[kind]
    model = build().double().eval()
    before = model(**inputs).last_hidden_state
    residua.convert(model, "attnres", inputs=inputs)
    assert_close(model(**inputs).last_hidden_state, before)
    with pytest.raises(ValueError, match=says):
        model.train()(**inputs)
    trunk = model if kind == "encoder" else model.encoder.config
    trunk.layerdrop = 0
    model(**inputs).last_hidden_state.sum().backward()


def test_a_model_that_adds_images_between_its_layers_requires_an_image_as_input():
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text = {**sizes, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 4, "rope_parameters": rope}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": 16, "num_position_embeddings": 16, "temporal_patch_size": 1}
    vision |= {"deepstack_visual_indexes": [0, 1]}
    tokens = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)).eval()
    with pytest.raises(InputError, match=r"inputs must be given .* got none; give a small batch with an image"):
        residua.convert(model, "residual")
    ids = torch.tensor([[3, 62, 60, 60, 60, 60, 63, 7]])
    image = {"pixel_values": torch.randn(16, 48), "image_grid_thw": torch.tensor([[1, 4, 4]])}
    with pytest.raises(InputError, match=r"uses its residual as a tensor \(\.clone\)"):
        residua.convert(model, "residual", inputs={"input_ids": ids, "mm_token_type_ids": (ids == 60).int(), **image})
    residua.convert(model, "residual", inputs={"input_ids": torch.arange(8)[None]})


@pytest.mark.parametrize("family", ["doge", "hy_v4", "gemma3n_text"])
def test_a_residual_that_a_dialect_implements_is_refused_with_a_reference_to_it(family):
    with pytest.raises(InputError, match=r"residua\.models\.dialects"):
        residua.convert(tiny(family), "residual")


def test_a_model_whose_layers_got_a_subclass_afterwards_is_restored():
    """As `fully_shard` makes one."""
    model = converted("hc")
    for layer in model.model.layers:
        layer.__class__ = type("Sharded", (type(layer),), {})
    assert residua.unconvert(model, lossy=True)(IDS).logits.shape[:2] == IDS.shape
    assert type(model.model.layers[0]).__name__ == "Sharded"


def test_a_scheme_that_reads_earlier_tokens_fits_a_trunk_that_gets_hidden_states():
    config = tiny("roberta-prelayernorm").config
    config.is_decoder, pad = True, torch.full((2, 2), config.pad_token_id)
    model = randomised(lambda: AutoModelForCausalLM.from_config(config), scale=0.1).double().eval()
    residua.convert(model, "residual:compress=token", start="fresh")
    mask = torch.cat([torch.zeros_like(pad), torch.ones_like(IDS)], 1)
    padded = model(torch.cat([pad, IDS], 1), attention_mask=mask).logits[:, 2:]
    assert_close(padded, model(IDS).logits)
    begun = model(IDS[:, :3], use_cache=True)
    assert_close(model(IDS[:, 3:], **{CACHE: begun[CACHE]}).logits, model(IDS).logits[:, 3:])


def test_connections_in_their_own_fsdp_units_stay_in_float32(alone):
    """The recipe for FSDP2 in mixed precision."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, seen = converted("mhc", torch.float32).train(), {}
    for layer in model.model.layers:
        for part in layer.stream.parts:
            if any(True for _ in part.parameters()):
                fully_shard(part, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for name, module in model.model.layers.named_modules():
        if isinstance(module, LINEAR_MAPS):
            module.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: m.weight.dtype}))
    model(IDS, labels=IDS, use_cache=False).loss.backward()
    assert {dtype for name, dtype in seen.items() if ".stream." in name} == {torch.float32}
    assert {dtype for name, dtype in seen.items() if ".stream." not in name} == {torch.bfloat16}


def test_a_mask_that_only_the_layer_accepts_by_name_is_accepted():
    """Its attention to the encoder has another name for `encoder_attention_mask`."""
    model = randomised(m2m, scale=0.3).double().eval()
    states = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = {"input_ids": IDS, "encoder_hidden_states": states, "encoder_attention_mask": torch.ones(2, 9).tril(6)}
    before = model.get_decoder()(**inputs).last_hidden_state
    residua.convert(model.get_decoder(), "hc", inputs={"input_ids": IDS, "encoder_hidden_states": states})
    assert_close(model.get_decoder()(**inputs).last_hidden_state, before)
