"""Tokens see no later token and no padding; what is computed in pieces equals what is computed at once."""

from functools import partial

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import StaticCache

from residua.connections.parts.memory import window_of
from residua.models.cache import CACHE, StreamLayer
from residua.models.transformer import total_penalty
from support.tiny_models import left_padded, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import LOOKING_BACK, PRESETS

# One scheme for every kind of look back; the rest of the mechanism does not know the scheme.
KINDS = [
    "residual",
    "ddl",
    "ddl-tc",
    "ddl-ec",
    "ddl-cc-ec",
    "beta-conv-dv1",
    "token-dv5-k3-ec2",
    "token-dv3-k2-separate",
]
CACHES = [DynamicCache, partial(StaticCache, max_cache_len=16)]
# What other schemes add is in their streams, for which the contract has the same checks.
every_kind = pytest.mark.parametrize("name", KINDS)


@torch.no_grad()
@every_kind
def test_later_tokens_do_not_change_earlier_logits(name):
    """A changed token leaves all logits before it the same to the last bit."""
    model, ids = tiny_model(name), prompt(2, 8)
    changed = ids.clone()
    changed[:, 4] = (ids[:, 4] - 1) % 46 + 2
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(before[:, 4], after[:, 4])


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in PRESETS if name not in KINDS])
def test_token_by_token_equals_the_full_pass(name):
    """With every other preset. Prefixes of one, two, ... tokens are shorter than every kernel."""
    model, ids = tiny_model(name), prompt(2, 7)
    cache = DynamicCache(config=model.config)
    logits = [model(token, cache=cache).logits for token in ids.split(1, 1)]
    assert_close(torch.cat(logits, 1), model(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("cached", CACHES)
@pytest.mark.parametrize("split", [(1,) * 7, (1, 6), (5, 2), (3, 1, 3), (4, 1, 1, 1)])
@every_kind
def test_pieces_of_a_batch_equal_the_full_pass(name, split, cached):
    """Without a mask, and with padding on the left. The mask then covers the cache and the new tokens; positions go on
    from the real tokens."""
    model = tiny_model(name)
    for ids, mask in ((prompt(2, 7), None), left_padded([prompt(7, seed=1), prompt(3, seed=2)])):
        cache, pieces, end = cached(config=model.config), [], 0
        for piece in ids.split(split, 1):
            end += piece.shape[1]
            seen = None if mask is None else mask[:, :end]
            pieces.append(model(piece, attention_mask=seen, cache=cache).logits)
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
        assert_close(torch.cat(pieces, 1)[real], model(ids, attention_mask=mask).logits[real])


@torch.no_grad()
@pytest.mark.parametrize(("name", "implementation"), [*((name, "sdpa") for name in KINDS), ("ddl-ec", "eager")])
def test_padding_equals_no_padding(name, implementation):
    """A ragged batch, on either side; a bare forward pass, without position ids."""
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    prompts = [prompt(6, seed=1), prompt(4, seed=2), prompt(1, seed=3)]
    ids, mask = left_padded(prompts)
    left = model(ids, attention_mask=mask).logits
    right = model(ids.flip(1), attention_mask=mask.flip(1)).logits
    for i, tokens in enumerate(prompts):
        for found, alone in ((left[i, -len(tokens) :], tokens), (right[i, : len(tokens)], tokens.flip(0))):
            assert_close(found, model(alone[None]).logits[0])
    assert_close(model(ids, attention_mask=mask.bool()).logits[mask > 0], left[mask > 0])


@torch.no_grad()
@every_kind
def test_padding_between_tokens_equals_no_padding_or_is_refused(name):
    """Attention skips what the mask leaves out; a convolution over the tokens would count it."""
    model, ids = tiny_model(name), prompt(2, 6)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]])
    if name in LOOKING_BACK:
        for form in (mask, mask.bool()):
            with pytest.raises(ValueError, match="attention_mask must have padding only"):
                model(ids, attention_mask=form)
    else:
        alone = model(ids[:1, [0, 1, 4, 5]]).logits
        assert_close(model(ids, attention_mask=mask).logits[:1, [0, 1, 4, 5]], alone)


@torch.no_grad()
@pytest.mark.parametrize("cached", CACHES)
@every_kind
def test_a_second_turn_may_follow_a_row_that_ended_early(name, cached):
    """With a kept cache, padding at the end of the first turn stands between the tokens of that row."""
    model, ids, reply = tiny_model(name), prompt(2, 5), prompt(2, 2, seed=1)
    first = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    whole = torch.cat([first, torch.ones(2, 2)], 1).long()
    cache = cached(config=model.config)
    model(ids, attention_mask=first, cache=cache)
    if name in LOOKING_BACK:
        with pytest.raises(ValueError, match=r"got padding between them: .* begin with an empty cache"):
            model(reply, attention_mask=whole, cache=cache)
        text, options = torch.cat([ids, reply], 1), {"max_new_tokens": 2, "disable_compile": True}
        with pytest.raises(ValueError, match="got padding between them"):
            model.generate(text, attention_mask=whole, **{CACHE: cache}, **options)
    else:
        logits = model(reply, attention_mask=whole, cache=cache).logits
        assert_close(logits[:1], model(torch.cat([ids[:1, :3], reply[:1]], 1)).logits[:, 3:])
        assert_close(logits[1:], model(torch.cat([ids[1:], reply[1:]], 1)).logits[:, 5:])


@torch.no_grad()
@every_kind
def test_the_cache_has_a_state_for_every_look_back(name):
    model = tiny_model(name)
    cache = model(prompt(1, 3), use_cache=True)[CACHE]
    layers = cache.layers
    assert [keys is None for keys, *_ in cache] == [isinstance(layer, StreamLayer) for layer in layers]
    states = [layer.number_of_states for layer in layers if isinstance(layer, StreamLayer)]
    assert len(layers) == 2 + len(states)
    assert sum(states) == sum(window_of(part) > 0 for part in model.model.parts)


@torch.no_grad()
def test_positions_count_from_the_first_real_token():
    """With gains that differ within a rotated pair, scores of "post_rope" depend on absolute positions: shifts show."""
    model, ids = tiny_model("residual"), prompt(1, 5)
    shifted = model(ids, position_ids=torch.arange(5)[None] + 4).logits
    assert (shifted - model(ids).logits).abs().max() > 1e-3
    relative = tiny_model("residual", qk_norm="pre_rope")
    assert_close(relative(ids, position_ids=torch.arange(5)[None] + 4).logits, relative(ids).logits, factor=100)


ROWS = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
FORMS = {
    "255": (ROWS * 255).to(torch.uint8),
    "documents": ROWS * torch.tensor([1, 1, 1, 2, 2, -3]),
    "float": ROWS.double(),
    "added": (1.0 - ROWS) * torch.finfo(torch.float32).min,
}


@torch.no_grad()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["residual", "ddl-tc", "ddl-ec", "edelta"])
def test_masks_of_all_forms_are_equivalent(name, form):
    """What is not padding is a token, whatever its number: in positions, attention, convolutions and penalties."""
    model, ids = tiny_model(name), prompt(2, 6)
    for mode in (model.train(), model.eval()):
        expected, found = (mode(ids, attention_mask=mask, labels=ids) for mask in (ROWS, FORMS[form]))
        assert torch.equal(found.logits[ROWS > 0], expected.logits[ROWS > 0])
        assert torch.equal(found.loss, expected.loss)
    options = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, found = (model.generate(ids, attention_mask=mask, **options).logits for mask in (ROWS, FORMS[form]))
    assert all(map(torch.equal, found, expected))


def test_a_penalty_at_padding_does_not_count():
    padding, penalty = ROWS.bool(), torch.rand(2, 6)
    expected = total_penalty([penalty], padding)
    assert torch.equal(total_penalty([penalty.masked_fill(~padding, float("nan"))], padding), expected)
    assert_close(expected, penalty[padding].mean())


def of_attention(bias):
    """A mask of queries and keys to be added: causal, with padding, and a bias where attention may look."""
    sees = torch.ones(6, 6).tril().bool() & ROWS[:, None, None].bool()
    return torch.where(sees, bias, torch.finfo(torch.float64).min)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-ec", "pooled-householder"])
def test_a_bias_in_a_mask_hides_no_token(name):
    """Attention sees no bias that is one number for a query, and a scheme that looks back sees none at all."""
    model, ids = tiny_model(name), prompt(2, 6)
    tokens = ROWS > 0
    expected = model(ids, attention_mask=of_attention(torch.zeros(6, 6).double())).logits[tokens]
    for bias in (-0.25, 1e-9, 3.0, -99.0, -1000.0):
        assert_close(
            model(ids, attention_mask=of_attention(torch.full((6, 6), bias).double())).logits[tokens], expected
        )
    ramp = -0.5 * (torch.arange(6)[:, None] - torch.arange(6)).abs().double()  # ALiBi's
    model(ids, attention_mask=of_attention(ramp))
    for wrong in (torch.ones(2, 1, 6, 6).tril(), torch.ones(2, 1, 6, 6).tril().long(), torch.ones(2, 1, 5, 5)):
        with pytest.raises(ValueError, match="attention_mask"):
            model(ids, attention_mask=wrong)
    gap = torch.ones(1, 1, 6, 6).tril().bool()
    gap[..., 2:4, :], gap[..., 2:4], gap[..., 5, :] = False, False, False  # padding between tokens, and at the end
    with pytest.raises(ValueError, match="got padding between them"):
        model(ids[:1], attention_mask=gap)


@torch.no_grad()
@pytest.mark.parametrize("name", ["ddl-tc", "ddl-ec", "pooled-householder"])
def test_attention_need_not_see_every_token(name):
    """A window with sinks hides tokens from the last one that are no padding: the scheme reads them all the same."""
    model, ids, apart = tiny_model(name), prompt(2, 7), torch.arange(7)[:, None] - torch.arange(7)
    sees = (apart >= 0) & ((apart < 2) | (torch.arange(7) < 1)).expand(2, 1, 7, 7)
    wider = sees | (torch.arange(7) == 6)[:, None] & (apart >= 0)  # only the last token sees more
    assert_close(*(model(ids, attention_mask=mask).logits[:, :-1] for mask in (sees, wider)))
    assert model(ids, attention_mask=sees).logits.isfinite().all()


LENGTHS = (5, 1, 3)
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
SEQ_IDX = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))[None]
CU_SEQ_LENS = torch.tensor([0, 5, 6, 9], dtype=torch.int32)


@pytest.mark.parametrize("name", [*KINDS, "edelta-cumulative", "edelta-stream-cumulative"])
def test_packed_documents_equal_separate_documents(name):
    """The borders may be given by positions, by numbers or by lengths. Losses, gradients and hidden states are
    compared, too."""
    model, packed = tiny_model(name).train(), prompt(1, 9)

    def gradients(hidden):
        (hidden * torch.arange(1.0, 10.0)[None, :, None].sin()).sum().backward()
        found = [p.grad for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        return [grad for grad in found if grad is not None]

    alone = [model(ids, output_hidden_states=True) for ids in packed.split(LENGTHS, 1)]
    hidden = [torch.cat(states, 1) for states in zip(*(out.hidden_states for out in alone))]
    expected, logits = gradients(hidden[-1]), torch.cat([out.logits for out in alone], 1)
    for told in (
        {"position_ids": POSITIONS},
        {"seq_idx": SEQ_IDX},
        {"position_ids": POSITIONS, "seq_idx": SEQ_IDX, "cu_seq_lens_q": CU_SEQ_LENS, "cu_seq_lens_k": CU_SEQ_LENS},
    ):
        out = model(packed, output_hidden_states=True, **told)
        assert_close(out.logits, logits)
        for ours, theirs in zip(out.hidden_states, hidden, strict=True):
            assert_close(ours, theirs)
        for ours, theirs in zip(gradients(out.hidden_states[-1]), expected, strict=True):
            assert_close(ours, theirs)
    two = torch.cat([packed, packed.flip(1)])
    rows = model(two, seq_idx=torch.cat([SEQ_IDX, SEQ_IDX.flip(1)])).logits
    assert_close(rows[:1], logits)
    assert_close(model.eval()(packed, position_ids=POSITIONS).logits, logits)  # which keeps no cache


@torch.no_grad()
def test_documents_that_attention_would_mix_are_refused():
    model, ids = tiny_model("ddl-tc"), prompt(1, 9)
    block = (SEQ_IDX[:, :, None] == SEQ_IDX[:, None]).tril()[:, None]
    with pytest.raises(ValueError, match=r"use_cache must be False with packed documents \(position_ids\), got a cach"):
        model(ids, position_ids=POSITIONS, use_cache=True)
    with pytest.raises(ValueError, match=r"use_cache must be False with packed documents \(seq_idx\), got a cache"):
        model(ids, seq_idx=SEQ_IDX, cache=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match=r"attention_mask must be None with packed documents \(cu_seq_lens_q\)"):
        model(ids, cu_seq_lens_q=CU_SEQ_LENS, attention_mask=torch.ones(1, 9))
    for mask in (torch.ones(1, 9), SEQ_IDX + 1):
        with pytest.raises(ValueError, match=r"attention_mask must be None with packed documents \(position_ids\)"):
            tiny_model("residual")(ids, position_ids=POSITIONS, attention_mask=mask)
    padded = {
        "attention_mask": torch.tensor([[0] * 5 + [1] * 4]),
        "position_ids": torch.tensor([[7] * 5 + [0, 1, 2, 3]]),
    }
    assert_close(model(ids, **padded).logits[:, 5:], model(ids[:, 5:]).logits)
    with pytest.raises(ValueError, match=r"position_ids must have .*seq_idx"):
        model(ids, position_ids=torch.arange(9)[None], seq_idx=SEQ_IDX)
    with pytest.raises(ValueError, match=r"seq_idx must be \(1 or 1, 9\), got \(9,\)"):
        model(ids, seq_idx=SEQ_IDX[0])
    with pytest.raises(ValueError, match=r"position_ids must be \(1 or batch, seq\), got \(9,\)"):
        model(ids, position_ids=torch.arange(9))
    with pytest.raises(ValueError, match=r"got a mask that hides some; .* packed documents with seq_idx"):
        model(ids, attention_mask=block)
    named = model(ids, attention_mask=block, seq_idx=SEQ_IDX).logits
    assert_close(named, model(ids, position_ids=POSITIONS).logits)


@pytest.mark.parametrize("name", ["residual", "ddl-tc"])
def test_positions_count_from_the_first_token_under_a_mask_of_queries_and_keys_too(name):
    model, ids = tiny_model(name), prompt(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    tokens, causal = mask.bool(), torch.ones(9, 9, dtype=torch.bool).tril()
    square = causal & tokens[:, None, :, None] & tokens[:, None, None, :]
    with torch.no_grad():
        by_row, by_pair = (model(ids, attention_mask=given).logits for given in (mask, square))
        alone = model(ids[:1, 3:]).logits
    torch.testing.assert_close(by_pair[tokens], by_row[tokens])
    torch.testing.assert_close(by_pair[:1, 3:], alone)
