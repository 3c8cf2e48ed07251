"""`residua.convert`: a transformers model keeps what it computes, and its layers get another residual connection."""

import copy
import functools
import itertools
import math
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    DynamicCache,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    Mamba2ForCausalLM,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Qwen2_5_VLTextConfig,
    Qwen3VLTextConfig,
    StableLmConfig,
    StaticCache,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import residua
from residua.conversion import convert_model
from residua.conversion.probe import change, small_inputs
from residua.conversion.rebuild import stream_of
from residua.errors import InputError
from residua.models.cache import CACHE
from support.converted_models import IDS, PLAIN, PRESERVING, VOCAB, WINDOWED, converted, lively, llama, model_of
from support.families import randomised, tiny
from support.tiny_models import left_padded, tiny_model
from support.tolerances import assert_close


def test_one_log_line_describes_the_conversion(caplog, monkeypatch):
    caplog.set_level("INFO", logger="residua")
    model = llama()
    size = model.num_parameters()
    residua.convert(model, "hc")
    added = model.num_parameters() - size
    (line,) = caplog.messages
    assert re.fullmatch(rf"LlamaForCausalLM: \d+ connections, \+{added:,} parameters to {size:,}, equal outputs", line)
    monkeypatch.setenv("RANK", "1")
    residua.convert(residua.unconvert(model), "ddl", start="fresh")
    monkeypatch.setenv("RANK", "0")
    residua.convert(residua.unconvert(model, lossy=True), "ddl", start="fresh")
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("new connections, to be trained")


@pytest.mark.parametrize(
    ("connection", "warned"),
    [("edelta-stream", True), ("edelta-stream:penalty=0", False), ("residual:branch=conv", False)],
)
def test_a_penalty_that_the_loss_leaves_out_is_a_warning(connection, warned, recwarn):
    residua.convert(llama(), connection)
    assert [str(w.message).startswith("the loss of a converted Llama") for w in recwarn] == [True] * warned


@pytest.mark.parametrize("training", [False, True])
def test_new_connections_are_in_the_mode_of_the_model(training):
    model = residua.convert(llama().train(training), "ddl", start="fresh")
    assert {module.training for module in model.modules()} == {training}


def test_hooks_on_a_norm_that_reads_run_once_and_get_tensors():
    def hooked(model):
        norm = model.model.layers[1].input_layernorm
        norm.register_forward_hook(lambda module, args, out: 2 * out)
        norm.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        return model

    want = hooked(llama())(IDS).logits
    assert torch.equal(residua.convert(hooked(llama()), "residual")(IDS).logits, want)
    assert torch.equal(hooked(residua.convert(llama(), "residual"))(IDS).logits, want)


def test_a_trained_copy_in_the_place_of_a_norm_is_used_as_the_norm():
    """Adapters put such a copy there, keep the original norm and train the copy."""

    class Adapter(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.copy = norm, copy.deepcopy(norm)

        def forward(self, x):
            return self.copy(x)

    def adapted(model):
        layer = model.model.layers[1]
        layer.input_layernorm = Adapter(layer.input_layernorm)
        with torch.no_grad():
            layer.input_layernorm.copy.weight.mul_(2)
        return model

    want = adapted(llama())(IDS).logits
    model = adapted(residua.convert(llama(), "residual"))
    assert torch.equal(model(IDS).logits, want)
    model(IDS).logits.sum().backward()
    adapter = model.model.layers[1].input_layernorm
    assert adapter.copy.weight.grad is not None
    assert adapter.norm.weight.grad is None


def attention_of(layer, trunk):
    """The attention of a layer to earlier tokens of IDS, as a sublayer."""
    rotary = trunk.rotary_emb(trunk.embed_tokens(IDS), position_ids=torch.arange(9)[None])
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    return lambda x: layer.self_attn(x, attention_mask=mask, position_embeddings=rotary)[0]


def test_a_converted_model_equals_a_stream_of_its_sublayers():
    """Computed once more by hand: the stream over the layers' own attention and MLP."""
    model = converted("mhc")
    inner = model.model
    sublayers = [part for layer in inner.layers for part in (attention_of(layer, inner), layer.mlp)]
    hidden = stream_of(model)(inner.embed_tokens(IDS), sublayers)
    assert_close(model.lm_head(inner.norm(hidden)), model(IDS).logits)


@pytest.mark.parametrize("connection", list(residua.connections.PRESETS))
def test_every_scheme_preserves_the_model_or_says_why_not(connection):
    """This also covers sublayers that read the state without a norm, as in OLMo 2."""
    for model in (llama(), model_of(Olmo2Config, intermediate_size=24)):
        before = model(IDS).logits
        if connection not in PRESERVING:
            with pytest.raises(InputError, match=r"or start='fresh'|several for a sublayer"):
                residua.convert(model, connection)
            assert torch.equal(model(IDS).logits, before)
        else:
            residua.convert(model, connection)
            assert (model(IDS).logits - before).abs().max() <= 1e-9 * before.abs().max()


def parallel(name):
    """A model whose layers add attention and MLP one after the other to one read."""
    if name == "longcat_flash":
        return tiny(name).double()
    config = {"cohere": CohereConfig, "cohere2": Cohere2Config, "stablelm": StableLmConfig}[name]
    options = {"use_parallel_residual": True} if name == "stablelm" else {}
    return model_of(config, num_key_value_heads=2, intermediate_size=24, **options)


# One of each way to add: a sum, with scales, to streams, along the state, over depth, to what was turned.
WAYS = ("residual", "lambdas", "mhc", "gated-orthogonal", "delta-attnres", "edelta-stream")


@pytest.mark.parametrize(
    ("family", "connection"),
    [
        *itertools.product(["cohere"], [*WAYS, {"preset": "lambdas", "z": None, "backout": None}]),
        *itertools.product(["cohere2", "stablelm", "longcat_flash"], ["mhc"]),
    ],
)
def test_a_model_that_adds_outputs_in_two_steps_keeps_its_logits(family, connection):
    model = parallel(family)
    ids = IDS.clamp(max=model.config.vocab_size - 1)
    before = model(ids).logits
    residua.convert(model, connection)
    assert (model(ids).logits - before).abs().max() <= 1e-9 * before.abs().max()


def test_a_convolution_of_outputs_added_in_two_steps_is_refused():
    model = parallel("cohere")
    before = model(IDS).logits
    with pytest.raises(InputError, match="adds two outputs"):
        residua.convert(model, "residual:branch=conv")
    assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("connection", ["mhc", "ddl", "attnres", "altup"])
def test_outputs_added_in_two_steps_count_as_one_sublayer(connection):
    model = lively(parallel("cohere"), connection)
    inner = model.model
    attend = [attention_of(layer, inner) for layer in inner.layers]
    sublayers = [lambda x, f=f, mlp=layer.mlp: f(x) + mlp(x) for f, layer in zip(attend, inner.layers)]
    hidden = stream_of(model)(inner.embed_tokens(IDS), sublayers)
    expected, logits = model.lm_head(inner.norm(hidden)) * model.config.logit_scale, model(IDS).logits
    assert_close(logits, expected)
    parameters = [p for p in model.parameters() if p.requires_grad]
    for grad, other in zip(*(torch.autograd.grad(x.square().sum(), parameters) for x in (logits, expected))):
        assert_close(grad, other, factor=10)  # sums over all tokens


def test_a_sublayer_without_a_norm_before_it_reads_the_unchanged_state():
    model = model_of(Olmo2Config, intermediate_size=24)
    before = model(IDS).logits
    residua.convert(model, "residual")
    assert torch.equal(model(IDS).logits, before)
    assert all(isinstance(connection.norm, torch.nn.Identity) for connection in stream_of(model).connections)


@pytest.mark.parametrize("connection", [PLAIN, WINDOWED, "attnres-block"])
@pytest.mark.parametrize("cache", ["dynamic", "without a configuration", "static"])
def test_token_by_token_equals_all_at_once(connection, cache):
    model = converted(connection).eval()
    keep = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "without a configuration": DynamicCache,
        "static": lambda: StaticCache(config=model.config, max_cache_len=12),
    }[cache]()
    with torch.no_grad():
        pieces = [model(piece, **{CACHE: keep}).logits for piece in IDS.split([4, 1, 3, 1], dim=1)]
        assert_close(torch.cat(pieces, 1), model(IDS).logits)


@pytest.mark.parametrize("connection", [PLAIN, WINDOWED])
def test_generation_does_not_depend_on_the_cache_or_on_padding(connection):
    model = converted(connection).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    want = model.generate(IDS, use_cache=False, **options)[:, 9:]
    assert torch.equal(model.generate(IDS, **options)[:, 9:], want)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 9)], 1).long()
    padded = torch.cat([torch.ones(2, 3).long(), IDS], 1)
    for kind in ({}, {"cache_implementation": "static", "disable_compile": True}):
        assert torch.equal(model.generate(padded, attention_mask=mask, **kind, **options)[:, 12:], want)
    beams = [model.generate(IDS, num_beams=3, use_cache=use, **options) for use in (True, False)]
    assert torch.equal(*beams)


@torch.no_grad()
@pytest.mark.parametrize("connection", [PLAIN, WINDOWED])
def test_a_model_whose_layers_count_no_tokens_generates_from_its_cache(connection):
    options = {"num_heads": 4, "head_dim": 8, "state_size": 4, "n_groups": 1, "expand": 2, "chunk_size": 4}
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    model = lively(Mamba2ForCausalLM(Mamba2Config(**sizes, **options)).eval(), connection)
    assert_close(model(IDS, use_cache=True).logits, model(IDS, use_cache=False).logits)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    cached, not_cached = (model.generate(IDS, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached, not_cached)
    if connection == WINDOWED:
        torch.manual_seed(0)
        plain = Mamba2ForCausalLM(Mamba2Config(**sizes, **options)).eval()
        cache = plain(IDS[:, :5], use_cache=True)[CACHE if CACHE == "cache" else "cache_params"]
        with pytest.raises(ValueError, match=r"^cache must .* without the memory"):
            model(IDS[:, 5:6], **{CACHE if CACHE == "cache" else "cache_params": cache})


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *itertools.product(["mamba2"], [torch.bfloat16, torch.float16, torch.float64]),
        *itertools.product(["mamba", "falcon_mamba"], [torch.bfloat16]),
    ],
)
def test_a_layer_that_keeps_its_residual_in_float32_changes_no_bit(family, dtype, tmp_path):
    """Its norm reads the residual in the dtype of its weights. In float64 the residual is rounded to float32."""
    model = tiny(family).to(dtype)
    before = model(IDS, output_hidden_states=True)
    residua.convert(model, "residual")
    after = model(IDS, output_hidden_states=True)
    assert torch.equal(after.logits, before.logits)
    assert [x.dtype for x in after.hidden_states] == [x.dtype for x in before.hidden_states]
    assert all(map(torch.equal, after.hidden_states, before.hidden_states))
    tiny_again = residua.convert(tiny(family), "residual")  # found in float32, opened in this dtype
    tiny_again.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(opened(IDS).logits, before.logits)


@pytest.mark.parametrize(
    ("family", "connection"), [*itertools.product(["mamba2"], WAYS), ("mamba", "mhc"), ("falcon_mamba", "mhc")]
)
def test_a_scheme_keeps_the_residual_in_float32(family, connection):
    model = residua.convert(tiny(family).bfloat16(), connection)
    out = model(IDS, labels=IDS, output_hidden_states=True)
    assert out.hidden_states[-2].dtype == torch.float32
    exact = residua.convert(tiny(family).bfloat16().float(), connection)(IDS).logits
    assert_close(out.logits.float(), exact, dtype=torch.bfloat16)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@torch.no_grad()
def test_padding_between_tokens_is_refused():
    """In a batch, or behind a row that ended before a second turn; padding at the end is accepted."""
    model = converted(WINDOWED).eval()
    gap = torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 1], [1] * 9])
    with pytest.raises(ValueError, match="got padding between them"):
        model(IDS, attention_mask=gap)
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=16)):
        padded = model(IDS[:, :8], attention_mask=gap[:, :8], **{CACHE: cache}).logits
        assert_close(padded[:1, :6], model(IDS[:1, :6]).logits)
        with pytest.raises(ValueError, match="got padding between them"):
            model(IDS[:, 8:], attention_mask=gap, **{CACHE: cache})
        options = {"max_new_tokens": 2, "disable_compile": True}
        with pytest.raises(ValueError, match="got padding between them"):
            model.generate(IDS, attention_mask=gap, **{CACHE: cache}, **options)


@pytest.mark.parametrize(
    ("build", "name", "given"),
    [(converted, WINDOWED, True), (tiny_model, WINDOWED, True), (tiny_model, "residual", False)],
)
@torch.no_grad()
def test_a_mask_may_be_as_long_as_a_static_cache(build, name, given):
    """It marks padding by absolute position and extends beyond the tokens of the call."""
    model, mask = build(name).eval(), torch.zeros(2, 16).long()
    mask[:, 2:11] = 1
    padded = torch.cat([torch.ones(2, 2).long(), IDS], 1)
    cache = StaticCache(config=model.config, max_cache_len=16)
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, :11]
    pieces = [
        model(ids, attention_mask=mask, position_ids=places, **{CACHE: cache}).logits
        for ids, places in zip(padded.split([6, 5], 1), positions.split([6, 5], 1) if given else (None, None))
    ]
    assert_close(torch.cat(pieces, 1)[:, 2:], model(IDS).logits)
    kept = model(IDS[:, :4], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, 9\), for 4 tokens in the cache and 5"):
        model(IDS[:, 4:], attention_mask=torch.ones(2, 5).long(), **{CACHE: kept})


@torch.no_grad()
@pytest.mark.parametrize(
    ("config_class", "options"),
    [
        (MistralConfig, {"sliding_window": 4}),
        (Llama4TextConfig, {"attention_chunk_size": 4, "head_dim": 4, "layer_types": ["chunked_attention"] * 3}),
    ],
)
def test_a_static_cache_may_be_shorter_than_the_text(config_class, options):
    """Its mask begins with the first key that is kept, and hides the last token of a chunk from the next chunk."""
    model = lively(model_of(config_class, num_key_value_heads=2, intermediate_size=24, **options), WINDOWED).eval()
    texts = [IDS[0], IDS.flatten()[-12:]]
    ids, mask = left_padded(texts)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
    expected = torch.cat([model.generate(text[None], use_cache=False, **settings)[:, -5:] for text in texts])
    for size in (None, 5, 1):
        kind = {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": size}
        assert torch.equal(model.generate(ids, attention_mask=mask, **kind, **settings)[:, -5:], expected)


@torch.no_grad()
def test_the_stream_memory_works_alongside_the_states_of_a_hybrid_model():
    """The model's own convolutions keep their states in the same cache."""
    model = model_of(Lfm2Config, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"])
    model = lively(model, WINDOWED).eval()
    cache = DynamicCache(config=model.config)
    pieces = [model(piece, **{CACHE: cache}).logits for piece in IDS.split([4, 1, 3, 1], dim=1)]
    assert_close(torch.cat(pieces, 1), model(IDS, use_cache=False).logits)


def test_a_causal_model_whose_tokens_are_computed_in_groups_is_causal():
    """Another last token moves the others among the experts, and so their last bits."""
    options = {"num_local_experts": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    residua.convert(model_of(MixtralConfig, torch.float32, **options), WINDOWED, start="fresh")


def test_a_layer_refuses_a_cache_or_mask_that_no_part_of_it_accepts():
    """It would otherwise ignore them: `cache` before transformers 5.24, or the names that a new release gives them."""
    layer, flow = converted(PLAIN).model.layers[0], torch.zeros(1, 3, 16).double()
    for name, item in {"kept": DynamicCache(), "padding_mask_2d": torch.ones(1, 3)}.items():
        with pytest.raises(TypeError, match=f"takes no '{name}'"):
            layer(flow, **{name: item})
    for connection in (PLAIN, WINDOWED):
        with pytest.raises(TypeError, match="takes no 'cache_params'"):
            converted(connection).eval()(IDS, cache_params=DynamicCache())


def test_a_cache_that_was_filled_without_the_memory_of_the_stream_is_refused():
    model = converted(WINDOWED).eval()
    cache = DynamicCache()
    llama().eval()(IDS, **{CACHE: cache})
    with pytest.raises(ValueError, match=r"^cache must .* without the memory"):
        model(IDS[:, :1], **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("training", [False, True])
def test_packed_documents_equal_separate_documents(training):
    model = converted(WINDOWED).train(training)
    logits = torch.cat([model(ids).logits for ids in IDS.split((4, 5), 1)], 1)
    numbers = torch.tensor([[0] * 4 + [1] * 5])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    for told in ({"position_ids": positions}, {"seq_idx": numbers}, {"position_ids": positions, "seq_idx": numbers}):
        assert_close(model(IDS, **told).logits, logits)
    block = (numbers[:, :, None] == numbers[:, None]).tril()[:, None]
    with pytest.raises(ValueError, match="got a mask that hides some"):
        model(IDS, attention_mask=block)
    assert_close(model(IDS, attention_mask=block, position_ids=positions, seq_idx=numbers).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("config_class", [Qwen2_5_VLTextConfig, Qwen3VLTextConfig])
def test_packed_documents_are_separated_by_text_positions_in_a_vision_language_model(config_class):
    """The text's positions come before the three of images, and attention separates documents by them alone."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    config = config_class(vocab_size=VOCAB, num_hidden_layers=2, head_dim=4, rope_parameters=rope, **sizes)
    model = lively(randomised(lambda: AutoModel.from_config(config), scale=0.3).double(), WINDOWED)

    def states(ids, **told):
        return model(ids, use_cache=False, **told).last_hidden_state

    expected = torch.cat([states(ids) for ids in IDS.split((4, 5), 1)], 1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    numbers = torch.tensor([[0] * 4 + [1] * 5])
    text, images, both = positions, positions.expand(3, 1, 9), positions.expand(4, 2, 9)
    for told in ({"position_ids": both}, {"position_ids": both, "seq_idx": numbers}):
        assert_close(states(IDS, **told), expected)
    for told in ({"position_ids": text}, {"seq_idx": numbers}, {"position_ids": images, "seq_idx": numbers}):
        with pytest.raises(ValueError, match=r"position_ids must be \(4, batch, seq\) for packed documents"):
            states(IDS, **told)
    # Without the text's positions these are places in one document, for attention as for the stream.
    assert (states(IDS, position_ids=images) - expected)[:, 4:].abs().max() > 0.01


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of the option changes with the sixth version
@pytest.mark.parametrize("connection", [PLAIN, WINDOWED, "attnres-block"])
def test_checkpointing_changes_no_gradient(connection):
    gradients = []
    for checkpointing in (False, True):
        model = converted(connection).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(IDS, labels=IDS).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.skipif(CACHE != "cache", reason="before 5.24, Transformers leaves out the cache of recomputed layers too")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("connection", [PLAIN, WINDOWED])
def test_a_model_in_training_generates_the_tokens_that_it_does_in_evaluation(connection):
    model = converted(connection)
    expected = model.generate(IDS, max_new_tokens=5, do_sample=False)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_reentrant_checkpoints_which_would_lose_gradients_are_refused():
    model = converted(PLAIN).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(IDS)
    assert model.eval()(IDS).logits.isfinite().all()
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("first", [0, 1])
def test_a_reentrant_checkpoint_of_a_training_loop_is_refused(first):
    """The embedding and the layers before the last would silently get no gradient."""
    model = converted(PLAIN).train()
    for layer in model.get_decoder().layers[first:]:

        def checkpointed(x, run=layer.forward, **options):
            return checkpoint(functools.partial(run, **options), x, use_reentrant=True)

        layer.forward = checkpointed
    with pytest.raises(ValueError, match="use_reentrant=False"):
        model(IDS, use_cache=False)
    for layer in model.get_decoder().layers[first:]:
        del layer.forward
    with torch.no_grad():
        assert model(inputs_embeds=model.get_input_embeddings()(IDS).requires_grad_()).logits.isfinite().all()


def test_hidden_states_pass_through_the_readout():
    model = converted(PLAIN)
    states = model(IDS, output_hidden_states=True).hidden_states
    assert [tuple(state.shape) for state in states] == [(2, 9, 16)] * 4
    with pytest.raises(ValueError, match="output_hidden_states"):
        converted(WINDOWED)(IDS, output_hidden_states=True)


def test_a_scheme_that_reads_earlier_tokens_refuses_speculative_decoding():
    with pytest.raises(ValueError, match="prompt lookup must be off"):
        converted(WINDOWED).generate(IDS[:1], max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_independent(copied):
    model = converted(WINDOWED)
    other, want = copied(model), model(IDS).logits
    assert torch.equal(other(IDS).logits, want)
    assert type(other.config) is type(model.config)
    assert any(".stream." in name for name in AutoModelForCausalLM.from_config(copied(other.config)).state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(model(IDS).logits, want)
    assert not other(IDS).logits.any()


def test_connections_made_in_inference_mode_learn():
    model = llama()
    with torch.inference_mode():
        residua.convert(model, "hc")
    model(IDS, labels=IDS).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_model_in_half_precision_is_converted():
    model = converted(WINDOWED, torch.bfloat16)
    exact = copy.deepcopy(model).double()
    logits = model(IDS).logits
    assert logits.dtype == torch.bfloat16
    assert {p.dtype for n, p in model.named_parameters() if ".stream." in n} == {torch.float32}
    assert (logits.double() - exact(IDS).logits).abs().max() < 0.05 * exact(IDS).logits.abs().max()


def test_a_change_from_or_to_nan_counts_as_infinite():
    x = torch.tensor([1.0, 2.0, torch.inf, torch.nan])
    assert change([x], [x.clone()]) == 0
    assert change([x], [torch.tensor([1.0, torch.nan, torch.inf, torch.nan])]) == math.inf
    assert change([x], [torch.tensor([2.0, 2.0, torch.inf, torch.nan])]) == 0.5
    assert change([x], [x.nan_to_num()]) == change([x], [x.half()]) == math.inf


def test_unconvert_restores_the_model():
    model = llama()
    names, before = list(model.state_dict()), model(IDS).logits
    assert residua.convert(model, "residual") is model
    assert list(model.state_dict()) == names
    residua.unconvert(model)
    assert type(model.model.layers[0]) is LlamaDecoderLayer
    assert list(model.state_dict()) == names
    assert torch.equal(model(IDS).logits, before)
    assert not [*model.model._forward_hooks, *model.model._forward_pre_hooks]
    residua.convert(model, "hc", start="fresh")  # and again


def test_unconvert_names_what_is_lost():
    model = converted(WINDOWED)
    before = model(IDS).logits
    with pytest.raises(InputError, match=r"would change by .*lossy=True"):
        residua.unconvert(model)
    assert torch.equal(model(IDS).logits, before)
    assert torch.equal(residua.unconvert(model, lossy=True)(IDS).logits, llama()(IDS).logits)


def test_unconvert_with_inputs_that_do_not_run_changes_nothing():
    model = converted(WINDOWED)
    before, layer = model(IDS).logits, type(model.model.layers[0])
    with pytest.raises(InputError, match="small input: index out of range"):
        residua.unconvert(model, inputs={"input_ids": IDS + model.config.vocab_size})
    assert type(model.model.layers[0]) is layer
    assert torch.equal(model(IDS).logits, before)


class ScaledLayer(LlamaDecoderLayer):
    def forward(self, x, **options):
        return super().forward(x * 0.5, **options)


def broken(model, kind):
    if kind == "scaled":  # as in models that weigh the residual
        model.model.layers[1].__class__ = ScaledLayer
    if kind == "hooked":  # as accelerate does where a model is spread over devices
        layer = model.model.layers[1]
        layer.forward = functools.partial(type(layer).forward, layer)
    if kind == "shared":
        model.model.layers[2] = model.model.layers[1]
    if kind == "random":
        model.model.norm.register_forward_hook(lambda module, args, out: out + torch.rand_like(out))
    if kind == "meta":
        model.to("meta")
    if kind == "quantised":
        model.is_quantized = True
    if kind == "quantised by an object":  # as torchao through transformers
        model.hf_quantizer = object()
    if kind == "quantised in place":  # as bitsandbytes: packed integers in the place of weights
        packed = torch.zeros(4, 1, dtype=torch.uint8)
        model.model.layers[1].mlp.down_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("scaled", "layer 1 .* scales"),
        ("hooked", "convert the model before it is dispatched"),
        ("shared", "in several places"),
        ("random", "equal outputs for equal inputs"),
        ("meta", "not loaded, or offloaded"),
        ("quantised", "got a quantised model"),
        ("quantised by an object", "got a quantised model"),
        ("quantised in place", "got a quantised model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_unchanged(kind, says):
    model = broken(llama(), kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=says):
        residua.convert(model, "residual")
    assert state.keys() == model.state_dict().keys()
    assert type(model.model.layers[0]) is LlamaDecoderLayer
    assert not any("stream" in vars(layer) for layer in model.model.layers)
    hooks = [module for module in model.model.modules() if module._forward_pre_hooks]
    assert not hooks


@pytest.mark.parametrize(
    ("connection", "options", "says"),
    [
        ("nothing", {}, "no preset is called 'nothing'"),
        ("residual", {"start": "warm"}, "start must be 'preserve' or 'fresh'"),
        ("ddl", {}, "start='fresh'"),
        ("edelta:context=sequence", {"start": "fresh"}, "causal"),
    ],
)
def test_options_that_do_not_fit_are_refused(connection, options, says):
    model = llama()
    with pytest.raises(ValueError, match=says):
        residua.convert(model, connection, **options)
    assert type(model.model.layers[0]) is LlamaDecoderLayer


def test_models_that_are_not_one_plain_decoder_are_refused():
    from transformers import T5Config, T5ForConditionalGeneration

    from residua.models import ResiduaConfig, ResiduaForCausalLM

    model = residua.convert(llama(), "residual")
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    for wrong, says in (
        (model, "converted already"),
        (T5ForConditionalGeneration(T5Config(**sizes)), "an encoder and a decoder"),
        (ResiduaForCausalLM(ResiduaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)), "ResiduaConfig"),
        (torch.nn.Linear(2, 2), "must be a model of transformers, got Linear$"),
        ("models/llama", "must be a model of transformers, got str; open a folder with from_pretrained$"),
        (SimpleNamespace(get_base_model=None), "got SimpleNamespace; convert a model before PEFT wraps it$"),
    ):
        with pytest.raises(InputError, match=says):
            residua.convert(wrong, "residual")


def test_a_trunk_that_drops_keywords_refuses_a_scheme_that_reads_earlier_tokens():
    model = llama()
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, options: (args, {k: v for k, v in options.items() if k != "residua_memory"}),
        with_kwargs=True,
    )
    before = model(IDS).logits
    with pytest.raises(InputError, match="gets no padding"):
        residua.convert(model, WINDOWED, start="fresh")
    assert torch.equal(model(IDS).logits, before)
    residua.convert(model, "residual")
    assert torch.equal(model(IDS).logits, before)


def test_a_conversion_makes_small_inputs_once(monkeypatch):
    made = []
    monkeypatch.setattr(convert_model, "small_inputs", lambda *args: made.append(args) or small_inputs(*args))
    residua.convert(llama(), "hc")
    assert len(made) == 1
