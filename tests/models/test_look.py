"""A third-party scheme, a softmax over the last tokens, gives the same numbers with a cache as without."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import residua
from residua.connections import registry
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.models.cache import CACHE
from support.looking import Look
from support.tiny_models import EOS, PAD, VOCAB, left_padded, prompt
from support.tolerances import assert_close
from support.variants import perturbed

SPLITS = [(1,) * 9, (2, 7), (4, 1, 1, 1, 1, 1), (6, 1, 1, 1), (3, 3, 3)]
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(params=["residua", "llama"])
def model(request, monkeypatch):
    for table in ("SCHEMES", "PRESETS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    residua.register("look", Look)
    torch.manual_seed(0)
    ends = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None, "max_position_embeddings": 64}
    if request.param == "residua":
        model = ResiduaForCausalLM(ResiduaConfig(**SIZES, **ends, connection="look", embedding_init_std=2.0))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **ends, intermediate_size=32))
        residua.convert(model, "look", start="fresh")
    return perturbed(model, scale=0.3).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("split", SPLITS)
def test_pieces_shorter_than_the_window_and_left_padding_change_no_number(model, split):
    ids, mask = left_padded([prompt(9, seed=1), prompt(6, seed=2)])
    alone = [model(ids[:1], use_cache=False).logits, model(ids[1:, 3:], use_cache=False).logits]
    cache, found, end = None, [], 0
    for length in split:
        begin, end = end, end + length
        given = {"attention_mask": mask[:, :end], "position_ids": (mask.cumsum(1) - 1).clamp_min(0)[:, begin:end]}
        out = model(ids[:, begin:end], **given, **{CACHE: cache}, use_cache=True)
        cache = out[CACHE]
        found.append(out.logits)
    found = torch.cat(found, 1)
    assert_close(found[:1], alone[0])
    assert_close(found[1:, 3:], alone[1])


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["greedy", "beams", "static"],
)
def test_generation_with_a_scheme_that_looks_back_equals_the_full_pass(model, options):
    """The batch has a prompt shorter than the window and a longer prompt."""
    ids, mask = left_padded([prompt(7, seed=1), prompt(2, seed=2)])
    plain = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6, "eos_token_id": -1, "pad_token_id": PAD}
    expected = {key: value for key, value in options.items() if key == "num_beams"}
    expected = model.generate(ids, **plain, **expected, use_cache=False)
    assert expected[:, ids.shape[1] :].unique().numel() > 2, "a text of few tokens would hide mistakes"
    assert torch.equal(model.generate(ids, **plain, **options), expected)
