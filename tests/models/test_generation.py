"""`generate` in all its modes equals recomputing the whole text for every token."""

import copy
import logging

import pytest
import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import residua
from residua.connections.parts.memory import window_of
from residua.models.cache import CACHE, stream_layer
from support.converted_models import llama
from support.tiny_models import EOS, PAD, VOCAB, left_padded, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import KINDS, LOOKING_BACK, PRESETS

# The cache is more than keys and values for schemes that look back, and where keys and values are convolved ("+kv3").
# For all others generation calls what test_causality_and_padding.py shows to be a function of one token, so two of
# them stand for all, as ddl-tc stands for its v-Map, which remembers the same.
CONVOLVED = ["residual+kv3", "ddl-tc+kv3"]
VARIED = ["beta-conv-dv1", "token-dv5-k3-ec2", "token-dv3-k2-separate", "channel-dv3-branch3"]
LASTING = [name for name in PRESETS if name in {"residual", "mudd", *LOOKING_BACK} - {"ddl-tc-v"}]
every_memory = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in {*KINDS, *CONVOLVED} else pytest.mark.variant)
        for name in [*LASTING, *VARIED, *CONVOLVED]
    ],
)
# eos_token_id -1 is never produced: texts run to their full length unless a test is about their end.
PLAIN = {"do_sample": False, "max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": PAD}


def lively(name: str):
    """A model whose next token depends on what came before: large embeddings, and a head of its own."""
    name, _, kernel = name.partition("+kv")
    return tiny_model(
        name, embedding_init_std=2.0, tie_word_embeddings=False, key_value_kernel=int(kernel) if kernel else None
    )


def generate(model, ids: Tensor, mask: Tensor | None = None, **options) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, **(PLAIN | options))


@torch.no_grad()
def greedily(model, ids: Tensor, count: int) -> Tensor:
    """The likeliest next token, `count` times, from a fresh pass over everything. ids: (batch, seq)."""
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


@every_memory
def test_greedy(name):
    model = lively(name)
    for length in (1, 5):
        ids = prompt(4, length)
        expected = greedily(model, ids, 6)
        assert expected[:, length:].unique().numel() > 4, "a text of few tokens would hide mistakes"
        assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)


@every_memory
def test_a_ragged_left_padded_batch_generates_as_single_rows(name):
    """The result does not depend on the token that fills the batch."""
    model = lively(name)
    prompts = [prompt(5, seed=1), prompt(2, seed=2), prompt(1, seed=3)]
    alone = [greedily(model, ids[None], 6)[0, -6:] for ids in prompts]
    for pad in (PAD, 17):
        ids, mask = left_padded(prompts, pad)
        assert torch.equal(generate(model, ids, mask)[:, -6:], torch.stack(alone))


@every_memory
def test_beam_search_is_the_same_with_and_without_the_cache(name):
    model = lively(name)
    ids, mask = left_padded([prompt(4, seed=1), prompt(2, seed=2)])
    options = {"num_beams": 3, "num_return_sequences": 2}
    cached = generate(model, ids, mask, **options)
    assert torch.equal(cached, generate(model, ids, mask, use_cache=False, **options))
    alone = generate(model, ids[1:, 2:], **options)
    assert torch.equal(cached[2:, 4:], alone[:, 2:]), "left padding changes the beams"


def test_an_assistant_may_draw_the_token_that_fills_a_batch():
    """generate() makes the mask of an assistant from its tokens; what the assistant drew is no padding."""
    model, ids, masks = lively("lambdas"), prompt(1, 4), []
    draft = lively("ddl-ec")
    draft.model.register_forward_pre_hook(
        lambda module, args, given: masks.append(given["attention_mask"]), with_kwargs=True
    )
    text = generate(model, ids, assistant_model=draft)
    assert torch.equal(text, greedily(model, ids, 6))
    assert PAD in text[:, 4:-1], "this text shows nothing"
    assert all(mask.all() for mask in masks if mask is not None)


@every_memory
def test_a_static_cache_gives_the_same_tokens(name):
    model = lively(name)
    prompts = [prompt(4, seed=1), prompt(2, seed=2)]
    ids, mask = left_padded(prompts)
    expected = torch.cat([greedily(model, alone[None], 6)[:, -6:] for alone in prompts])
    for size in (None, 1):
        options = {"cache_implementation": "static", "disable_compile": True, "prefill_chunk_size": size}
        assert torch.equal(generate(model, ids, mask, **options)[:, -6:], expected)


@every_memory
def test_a_chunked_prefill_gives_the_same_tokens(name):
    model, ids = lively(name), prompt(2, 7)
    assert torch.equal(generate(model, ids, prefill_chunk_size=3), greedily(model, ids, 6))


@torch.no_grad()
@every_memory
def test_the_cache_of_one_prefix_can_be_repeated_over_the_batch(name):
    model, ids = lively(name), prompt(1, 6)
    cache = DynamicCache(config=model.config)
    model(ids[:, :4], cache=cache)
    cache.batch_repeat_interleave(3)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert_close(model(ids[:, 4:].expand(2, -1), cache=cache).logits, model(ids).logits[:, 4:].expand(2, -1, -1))


@every_memory
def test_generation_can_continue_from_a_kept_cache(name):
    """The cache of a shared prefix serves several continuations."""
    model, ids = lively(name), prompt(1, 5)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :4], cache=cache)
    for seed in (1, 2):
        text = torch.cat([ids[:, :4], prompt(1, 2, seed=seed)], 1)
        assert torch.equal(generate(model, text, **{CACHE: copy.deepcopy(cache)}), greedily(model, text, 6))


def test_the_configuration_defines_the_end_of_texts():
    model = tiny_model()
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (EOS, PAD)
    with torch.no_grad():  # a head that always says end of text
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 16).double())
    assert model.generate(prompt(1, 3), do_sample=False, max_new_tokens=8).shape == (1, 4)


@every_memory
def test_an_early_exit_draft_changes_no_token(name):
    """The first layers draft, with the readout of the last layer."""
    model, ids = lively(name), prompt(1, 4)
    assert torch.equal(generate(model, ids, assistant_early_exit=1), greedily(model, ids, 6))
    assert model.config.num_hidden_layers == 2


@pytest.mark.parametrize("layers", [0, 3, 1.5])
def test_an_early_exit_that_does_not_exist_is_refused(layers):
    with pytest.raises(ValueError, match=f"num_hidden_layers must be .*got {layers}"):
        generate(tiny_model("ddl-tc"), prompt(1, 4), assistant_early_exit=layers)


@every_memory
@pytest.mark.parametrize("draft", ["prompt lookup", pytest.param("model", marks=pytest.mark.slow)])
def test_speculative_decoding_changes_no_token(name, draft):
    """Guesses are dropped from the cache again: keys, values and convolution states. Hidden states of the tokens that
    stay equal one pass over the text."""
    model, passes = lively(name), []

    def keep(module, args, inputs, out):
        passes.append((inputs["input_ids"], inputs[CACHE].get_seq_length(), out.hidden_states))

    hook = model.model.register_forward_hook(keep, with_kwargs=True)
    ids = torch.cat([prompt(1, 4, seed=3)] * 3, 1)
    how = {"prompt_lookup_num_tokens": 3}
    if draft == "model":
        how = {"assistant_model": lively("ddl-ec" if name != "ddl-ec" else "ddl")}
    text = generate(model, ids, return_dict_in_generate=True, output_hidden_states=True, **how).sequences
    hook.remove()
    assert torch.equal(text, greedily(model, ids, 6))
    with torch.no_grad():
        full = model(text, output_hidden_states=True).hidden_states
    assert draft == "prompt lookup" or max(tokens.shape[1] for tokens, _, _ in passes) > 12
    for tokens, end, states in passes:
        start = end - tokens.shape[1]
        right = (tokens[:, : text.shape[1] - start] == text[:, start:end]).cumprod(1).sum()
        for found, expected in zip(states, full):
            assert_close(found[:, :right], expected[:, start : start + right])


@torch.no_grad()
@pytest.mark.parametrize("name", CONVOLVED)
def test_a_cache_without_a_configuration_works(name):
    model, ids = lively(name), prompt(2, 6)
    assert torch.equal(generate(model, ids, **{CACHE: DynamicCache()}), greedily(model, ids, 6))
    filled = lively("ddl-ec")(ids, use_cache=True)[CACHE]
    with pytest.raises(ValueError, match="the cache of a model with another residual scheme"):
        model(ids, cache=filled)


@torch.no_grad()
@pytest.mark.parametrize(("name", "vectors"), [("ddl-tc", 3), ("token-dv5-k3-ec2", 2)])
def test_token_compression_remembers_a_vector_for_each_earlier_tap(name, vectors):
    """Sums over the channels, in float32, in the place of the channels of the earlier tokens."""
    model = tiny_model(name, torch.bfloat16)
    cache = model(prompt(1, 6), use_cache=True)[CACHE]
    state = stream_layer(cache).conv_states[window_of(model.model.stream.expand) > 0]  # of the first connection
    assert state.numel() == vectors * model.config.hidden_size
    assert state.dtype == torch.float32


@torch.no_grad()
def test_the_cache_may_have_its_old_name_but_not_both_names():
    model, ids = lively("ddl-tc+kv3"), prompt(1, 6)
    for keyword in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        pieces = [model(piece, **{keyword: cache}).logits for piece in ids.split((4, 1, 1), 1)]
        assert_close(torch.cat(pieces, 1), model(ids, use_cache=False).logits)
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(ids, cache=cache, past_key_values=cache)
    with pytest.raises(ValueError, match="cache must be a transformers Cache, such as DynamicCache, got tuple"):
        model(ids, cache=(1, 2))


def test_an_unknown_keyword_is_refused():
    """A cache, a mask or labels under another name would be ignored, and the numbers would silently be wrong."""
    model, ids = tiny_model("ddl"), prompt(1, 4)
    for keyword in ("past", "cache_params", "padding_mask", "token_type_ids", "use_cash", "is_causal"):
        with pytest.raises(TypeError, match=f"takes no keyword argument '{keyword}'"):
            model(ids, **{keyword: ids})


def test_the_old_name_of_the_cache_is_deprecated_if_it_is_in_transformers(recwarn):
    model, ids = tiny_model("ddl-tc"), prompt(1, 4)
    model(ids, past_key_values=DynamicCache(config=model.config))
    said = [str(warning.message) for warning in recwarn if "`past_key_values` is deprecated" in str(warning.message)]
    assert len(said) == (CACHE == "cache")


def a_converted_llama(name):
    return residua.convert(llama(torch.float32), name, start="fresh").eval()


def test_a_converted_model_in_training_mode_generates_the_same():
    """A new model of transformers is in training mode."""
    model, ids = a_converted_llama("ddl-tc"), prompt(2, 4)
    expected = greedily(model, ids, 6)
    assert torch.equal(generate(model.train(), ids), expected)
    assert model(ids).get(CACHE) is None


@pytest.mark.slow
@pytest.mark.parametrize("make", [lively, a_converted_llama])
def test_continuous_batching_gives_the_tokens_of_single_prompts(make):
    """Prompts of several lengths, each as if it were alone."""
    model, prompts = make("hc").float(), [prompt(5, seed=1), prompt(3, seed=2)]
    texts = model.generate_batch(
        [ids.tolist() for ids in prompts],
        generation_config=GenerationConfig(**PLAIN),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=32),
        progress_bar=False,
    )
    expected = [greedily(model, ids[None], 6)[0, len(ids) :].tolist() for ids in prompts]
    assert [text.generated_tokens for text in texts.values()] == expected


@pytest.mark.parametrize("make", [lively, a_converted_llama])
def test_a_paged_cache_is_refused_for_a_scheme_that_reads_earlier_tokens(make):
    """Pages keep only keys and values, so the scheme would see each new token without the earlier ones."""
    with pytest.raises(ValueError, match="call generate, not generate_batch"):
        make("ddl-tc")(prompt(1, 4), cache=object(), write_index=[], use_cache=False)
    with pytest.raises(ValueError, match="or an engine such as vLLM"):
        make("ddl-tc")(prompt(1, 4), attention_instances={}, use_cache=False)
    with pytest.raises(ValueError, match="call generate, not generate_batch"):
        lively("residual+kv3")(prompt(1, 4), cache=object(), write_index=[], use_cache=False)


@torch.no_grad()
@pytest.mark.parametrize("make", [lively, a_converted_llama])
def test_an_attention_function_of_an_engine_gets_the_keywords_of_the_call(make, monkeypatch):
    model, ids, places, heard = make("hc"), prompt(1, 4), dict(enumerate("abc")), []

    def attend(module, query, key, value, mask, *, attention_instances, **options):
        assert options["position_ids"].tolist() == [[0, 1, 2, 3]]
        heard.append(attention_instances[module.layer_idx])
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "engine", attend)
    expected = model(ids, use_cache=False).logits
    model.config._attn_implementation = "engine"
    found = model(ids, use_cache=False, attention_instances=places, return_dict=False)[0]
    assert heard == [*places.values()][: model.config.num_hidden_layers]
    assert_close(found, expected)


@pytest.mark.parametrize("make", [lively, a_converted_llama])
def test_a_first_run_gives_no_deprecation_warning(make, recwarn, caplog):
    logging.getLogger("transformers").propagate = True
    model, ids = make("ddl-tc"), prompt(1, 4)
    model(ids, labels=ids).loss.backward()
    generate(model, ids)
    assert not [str(warning.message) for warning in recwarn if "deprecat" in str(warning.message)]
    assert "deprecat" not in caplog.text


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "pooled-householder"])
def test_a_cache_that_was_reset_takes_a_batch_of_another_size(name):
    model, ids = tiny_model(name), prompt(3, 7)
    expected = model(ids).logits
    cache = DynamicCache(config=model.config)
    for rows in (1, 3, 2, 2):
        for piece, start in ((ids[:rows, :5], 0), (ids[:rows, 5:], 5)):
            found = model(piece, **{CACHE: cache}).logits
            torch.testing.assert_close(found, expected[:rows, start : start + piece.shape[1]])
        cache.reset()


@torch.no_grad()
def test_rows_of_a_cache_are_chosen_by_numbers_or_by_a_mask():
    model, ids = tiny_model("ddl-tc"), prompt(3, 7)
    expected = model(ids).logits[1:, 5:]
    for chosen in (torch.tensor([1, 2]), torch.tensor([False, True, True]), [1, 2]):
        cache = DynamicCache(config=model.config)
        model(ids[:, :5], **{CACHE: cache})
        cache.batch_select_indices(chosen)
        torch.testing.assert_close(model(ids[1:, 5:], **{CACHE: cache}).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", ["residual", "ddl-tc"])
def test_a_mask_without_the_tokens_of_a_static_cache_is_one_line(name):
    model, ids = tiny_model(name), prompt(2, 9)
    cache = StaticCache(config=model.config, max_cache_len=12)
    model(ids[:, :5], attention_mask=torch.ones(2, 5), **{CACHE: cache})
    with pytest.raises(ValueError, match=r"^attention_mask must be \(batch, .*got \(2, 4\)"):
        model(ids[:, 5:], attention_mask=torch.ones(2, 4), **{CACHE: cache})


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "residual+tc", "pooled-householder"])
def test_a_cache_is_cropped_exactly_or_not_at_all(name):
    model, ids = tiny_model(name), prompt(2, 9)
    expected = model(ids).logits

    def filled(*pieces: int) -> DynamicCache:
        """A cache that is cropped by one token after each piece but the last."""
        cache = DynamicCache(config=model.config)
        model.model.make_room(cache)
        cache.activate_past_recording()
        for number, piece in enumerate(pieces):
            if number:
                cache.crop(-1)
            begin = cache.get_seq_length()
            model(ids[:, begin : begin + piece], **{CACHE: cache})
        return cache

    for pieces, removed in (((7,), 2), ((7,), 7), ((7, 3), 3), ((7, 3), 9), ((1, 1), 1)):
        cache = filled(*pieces)
        cache.crop(-removed)
        rest = model(ids[:, cache.get_seq_length() :], **{CACHE: cache}).logits
        assert_close(rest, expected[:, -rest.shape[1] :])
    with pytest.raises(ValueError, match=r"^cache must keep the tokens .* got 5 tokens to remove"):
        filled(7, 3).crop(-5)
    cache = filled(7, 3)
    cache.reset()
    model(ids[:, :2], **{CACHE: cache})
    cache.crop(-1)
    assert_close(model(ids[:, 1:], **{CACHE: cache}).logits, expected[:, 1:])
