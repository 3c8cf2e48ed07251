import copy

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from residua.errors import InputError
from residua.lab.data import byte_tokenizer
from residua.lab.evaluation.generate import complete

POSITIONS = 24


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model():
    """Any causal language model of transformers will do: what is tested is what surrounds its `generate`."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        tokens = {"vocab_size": 257, "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": 256}
        return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, initializer_range=0.5)).train()


def test_greedy_text_takes_the_most_probable_token_at_each_step(model, tokenizer):
    tokens = tokenizer.encode("abc")
    for _ in range(6):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits
        tokens.append(logits[0, -1].argmax().item())
    assert complete(model, tokenizer, "abc", max_new_tokens=6, greedy=True) == tokenizer.decode(tokens[3:])


@pytest.mark.parametrize(
    "own",
    [{"return_dict_in_generate": True}, {"num_beams": 3}, {"sequence_bias": 5}],
    ids=lambda own: next(iter(own)),
)
def test_the_generation_config_of_a_model_has_no_effect(own, model, tokenizer):
    expected = complete(model, tokenizer, "aaa", max_new_tokens=6, greedy=True)
    other = copy.deepcopy(model)
    other.generation_config = kept = GenerationConfig()
    vars(kept).update(own)
    assert complete(other, tokenizer, "aaa", max_new_tokens=6, greedy=True) == expected
    assert other.generation_config is kept


def always(model, token):
    """The model, but one token is always the most probable."""
    other = copy.deepcopy(model)

    def choose(head, args, logits):
        return F.one_hot(torch.full(logits.shape[:-1], token), logits.shape[-1]).to(logits)

    other.lm_head.register_forward_hook(choose)
    return other


def words(vocabulary):
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def test_a_tokenizer_with_gaps_that_drops_the_first_space_loses_no_text(model):
    """Llama 2 has such a tokenizer. A token behind a gap is written, end-of-text ends the text, and prompt and text are
    complete."""
    tokenizer, pieces = words({"<unk>": 0, "▁fox": 1, "▁hen": 9, "</s>": 12}), []
    texts = [
        complete(always(model, token), tokenizer, "fox", max_new_tokens=3, greedy=True, on_text=pieces.append)
        for token in (9, 12)
    ]
    assert texts == [" hen hen hen", ""]
    assert "".join(pieces) == texts[0]


@pytest.mark.parametrize("greedy", [True, False])
def test_a_model_whose_logits_are_not_finite_generates_no_text(greedy, model, tokenizer):
    diverged = copy.deepcopy(model)
    with torch.no_grad():
        diverged.lm_head.weight[7] = torch.nan
    with pytest.raises(InputError, match="got NaN "):
        complete(diverged, tokenizer, "abc", max_new_tokens=2, greedy=greedy)


def test_only_the_seed_decides_and_the_global_random_state_is_unchanged(model, tokenizer):
    before = torch.random.get_rng_state()
    first = complete(model, tokenizer, "abc", max_new_tokens=12, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert complete(model, tokenizer, "abc", max_new_tokens=12, seed=1) == first
    assert complete(model, tokenizer, "abc", max_new_tokens=12, seed=2) != first
    assert model.training


def test_the_printed_pieces_add_up_to_the_text(model, tokenizer):
    pieces = []
    text = complete(model, tokenizer, "", max_new_tokens=20, temperature=2.0, top_p=1.0, on_text=pieces.append)
    assert "".join(pieces) == text


@pytest.mark.parametrize("settings", [{"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-5, "top_p": 1.0}], ids=str)
def test_settings_that_leave_one_token_are_greedy(settings, model, tokenizer):
    greedy = complete(model, tokenizer, "xy", max_new_tokens=8, greedy=True)
    assert complete(model, tokenizer, "xy", max_new_tokens=8, **{"temperature": 5.0} | settings) == greedy


def test_without_a_number_of_tokens_the_context_is_filled_and_not_exceeded(model, tokenizer):
    text = complete(model, tokenizer, "a" * (POSITIONS - 2), greedy=True)
    assert 0 < len(text) <= 2  # a byte that is no letter of UTF-8 decodes to one replacement


def test_rows_beyond_the_tokenizer_are_never_sampled(model, tokenizer):
    """The embedding is often larger than the vocabulary; here a row without a token is by far the most probable."""
    larger = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "vocab_size": 320}))
    larger.lm_head.bias = torch.nn.Parameter(100 * torch.eye(320)[-1] + 50 * torch.eye(320)[tokenizer.encode("z")[0]])
    assert complete(larger, tokenizer, "a", max_new_tokens=4, greedy=True) == "zzzz"


def test_end_of_text_ends_generation_unless_it_comes_too_early(model, tokenizer):
    ending = LlamaForCausalLM(model.config)
    ending.lm_head.bias = torch.nn.Parameter(
        100 * torch.eye(257)[tokenizer.eos_token_id] + 50 * torch.eye(257)[tokenizer.encode("z")[0]]
    )
    assert complete(ending, tokenizer, "a", max_new_tokens=4, greedy=True) == ""
    assert complete(ending, tokenizer, "a", max_new_tokens=4, min_new_tokens=2, greedy=True) == "zz"


@pytest.mark.parametrize(("prompt", "setting"), [("a", {"max_new_tokens": POSITIONS}), ("a" * POSITIONS, {})])
def test_a_text_longer_than_the_context_is_refused(model, tokenizer, prompt, setting):
    with pytest.raises(InputError, match="24 positions"):
        complete(model, tokenizer, prompt, **setting)
