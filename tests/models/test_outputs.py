"""What the models take and return: states, attention weights, embeddings, logits, losses, in every dtype."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from residua.models.cache import CACHE
from residua.testing.contract import OnlyFloat64
from support.tiny_models import VOCAB, left_padded, prompt, tiny_model
from support.tolerances import assert_close
from support.variants import ALL, PRESETS

every_preset = pytest.mark.parametrize("name", PRESETS)


@torch.no_grad()
def test_a_plain_call_returns_the_logits_of_every_position():
    model, ids = tiny_model(), prompt(2, 5)
    out = model(ids)
    assert isinstance(out, CausalLMOutputWithPast)
    assert out.logits.shape == (2, 5, VOCAB)
    assert out.loss is None
    assert out[CACHE] is not None
    trunk = model.model(ids)
    assert isinstance(trunk, BaseModelOutputWithPast)
    assert trunk.last_hidden_state.shape == (2, 5, 16)


@torch.no_grad()
@every_preset
def test_states_and_hidden_states_are_returned(name):
    """States before the first and after every layer, as the scheme keeps them. Hidden states as every decoder of
    transformers returns them: embeddings, the scheme's readout after all layers but the last, the normalised end."""
    model, ids = tiny_model(name), prompt(2, 5)
    plain, out = model(ids), model(ids, output_hidden_states=True, output_states=True)
    assert torch.equal(plain.logits, out.logits)
    assert plain.states is plain.hidden_states is None
    stream, embedded = model.model.stream, model.model.embed_tokens(ids)
    opened = tree_leaves(stream.expand(embedded))
    assert all(map(torch.equal, tree_leaves(out.states[0]), opened))
    for layer, state in enumerate(out.states):
        assert sum(leaf[0, 0].numel() for leaf in tree_leaves(state)) == ALL[name].state_size(2 * layer, 16)
        assert all(leaf.shape[:2] == (2, 5) and leaf.shape[-1] == 16 for leaf in tree_leaves(state))
    end = model.model.norm(stream.collapse(out.states[2]))
    for hidden, expected in zip(out.hidden_states, [embedded, stream.collapse(out.states[1]), end], strict=True):
        assert torch.equal(hidden, expected)
    assert torch.equal(model.model(ids).last_hidden_state, end)
    assert torch.equal(model.lm_head(end), out.logits)


@torch.no_grad()
@every_preset
def test_hidden_states_are_right_while_decoding(name):
    """The readout after every layer looks back at its own earlier tokens, in padded rows too."""
    model = tiny_model(name)
    ids, mask = left_padded([prompt(6, seed=1), prompt(3, seed=2)])
    full = model(ids, attention_mask=mask, output_hidden_states=True, output_states=True)
    cache, pieces = None, []
    for end in range(1, 7):
        inputs = {"attention_mask": mask[:, :end], "cache": cache, "use_cache": True}
        out = model(ids[:, end - 1 : end], **inputs, output_hidden_states=True, output_states=True)
        cache = out[CACHE]
        pieces.append(out)
    for found in ("hidden_states", "states"):
        for layer, expected in enumerate(full[found]):
            for leaf, steps in zip(tree_leaves(expected), zip(*(tree_leaves(piece[found][layer]) for piece in pieces))):
                assert_close(torch.cat(steps, 1)[mask.bool()], leaf[mask.bool()])


@torch.no_grad()
def test_hidden_states_are_refused_for_a_cache_that_began_without_them():
    """A readout that looks back would lack the earlier tokens. Once begun, readouts continue without being
    requested."""
    model, ids = tiny_model("ddl-tc"), prompt(2, 6)
    cache = model(ids[:, :4], use_cache=True)[CACHE]
    with pytest.raises(ValueError, match=r"output_hidden_states must be True from the first token on"):
        model(ids[:, 4:], cache=cache, output_hidden_states=True)
    cache.reset()
    if cache.get_seq_length():  # transformers 5.17 does not empty a cache that grows
        cache = None
    full = model(ids, cache=cache, output_hidden_states=True).hidden_states
    cache = model(ids[:, :3], use_cache=True, output_hidden_states=True)[CACHE]
    model(ids[:, 3:5], cache=cache)
    last = model(ids[:, 5:], cache=cache, output_hidden_states=True).hidden_states
    assert_close(last[1], full[1][:, 5:])
    narrow = tiny_model("ddl-cc-ec")  # its readout does not look back
    cache = narrow(ids[:, :4], use_cache=True)[CACHE]
    last = narrow(ids[:, 4:], cache=cache, output_hidden_states=True).hidden_states
    assert_close(last[1], narrow(ids, output_hidden_states=True).hidden_states[1][:, 4:])


@torch.no_grad()
def test_selected_hidden_states_can_be_requested():
    model, ids = tiny_model("ddl-tc"), prompt(2, 5)
    full = model(ids, output_hidden_states=True).hidden_states
    for wanted, expected in ((1, [1]), (-1, [2]), ([0, -2, 7], [0, 1]), (0, [0])):
        found = model(ids, output_hidden_states=wanted).hidden_states
        assert [i for i, hidden in enumerate(found) if hidden is not None] == expected
        assert all(torch.equal(found[i], full[i]) for i in expected)
    assert model(ids, output_hidden_states=[]).hidden_states is None


@torch.no_grad()
def test_attention_weights_are_returned():
    model, ids = tiny_model("ddl-tc"), prompt(2, 5)
    expected = model(ids).logits
    assert model(ids, output_attentions=True).attentions == (), "sdpa computes none, and warns"
    model.set_attn_implementation("eager")
    out = model(ids, output_attentions=True)
    assert_close(out.logits, expected)
    assert [weights.shape for weights in out.attentions] == [(2, 2, 5, 5)] * 2
    for weights in out.attentions:
        assert_close(weights.sum(-1), torch.ones(2, 2, 5).double())
        assert (weights.triu(1) == 0).all()
    cache = model(ids[:, :4], use_cache=True)[CACHE]
    last = model(ids[:, 4:], cache=cache, output_attentions=True)
    assert_close(last.attentions[1], out.attentions[1][:, :, 4:])


@torch.no_grad()
def test_embeddings_can_replace_ids():
    model, ids = tiny_model("ddl-tc"), prompt(2, 5)
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(ids).logits)
    for wrong in ({}, {"input_ids": ids, "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
            model(**wrong)


@torch.no_grad()
def test_selected_logits_can_be_requested():
    model, ids = tiny_model("ddl-cc"), prompt(2, 5)
    full = model(ids).logits
    assert_close(model(ids, logits_to_keep=2).logits, full[:, -2:])
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 3])).logits, full[:, [0, 3]])
    assert torch.equal(model(ids, logits_to_keep=0).logits, full)


def test_labels_are_shifted_inside_and_minus_100_is_ignored():
    """labels = input_ids trains the next token, as every trainer of transformers expects."""
    model, ids = tiny_model("ddl-tc"), prompt(2, 6)
    labels = ids.clone()
    labels[0, :3] = -100
    labels[1, 4:] = -100
    logits = model(ids).logits
    log_probs = logits.log_softmax(-1)
    pairs = [(b, t) for b in range(2) for t in range(5) if labels[b, t + 1] != -100]
    manual = -sum(log_probs[b, t, labels[b, t + 1]] for b, t in pairs) / len(pairs)
    shifted = F.pad(labels[:, 1:], (0, 1), value=-100)

    assert_close(model(ids, labels=labels).loss, manual)
    assert_close(model(ids, shift_labels=shifted).loss, manual)
    assert_close(model(ids, labels=labels, shift_labels=shifted).loss, manual)
    assert_close(model(ids, labels=labels, num_items_in_batch=7).loss, manual * len(pairs) / 7)
    assert_close(model(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss, manual * len(pairs) / 7)


def test_the_loss_is_at_least_float32():
    model, ids = tiny_model(dtype=torch.bfloat16), prompt(2, 6)
    out = model(ids, labels=ids)
    assert out.loss.dtype == torch.float32
    expected = F.cross_entropy(out.logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
    assert_close(out.loss, expected)


@pytest.mark.parametrize(
    ("name", "implementation"), [("ddl-tc", "eager"), *((name, "sdpa") for name in ("ddl-ec", "edelta", "mudd"))]
)
def test_a_float64_model_computes_in_float64_from_end_to_end(name, implementation):
    """Norms, gates, rotary tables, masks, logits and the loss, and back; what is in a stream is the contract's."""
    model, ids = tiny_model(name, mup=True, attention_output_gate=True), prompt(2, 5)
    model.set_attn_implementation(implementation)
    with OnlyFloat64():
        model(ids, labels=ids, use_cache=False).loss.backward()
    assert all(parameter.grad.dtype == torch.float64 for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize(("name", "dtype"), [("ddl-tc", torch.float16), *((name, torch.bfloat16) for name in PRESETS)])
def test_narrow_models_are_near_float64(name, dtype):
    """Logits come in the model's dtype and near those of float64, also from a padded batch and from the cache.
    Perturbed less than elsewhere: far from their start, nets of gates amplify what the embedding alone loses."""
    model = tiny_model(name, dtype, scale=0.1)
    exact = tiny_model(name)
    exact.load_state_dict(model.state_dict())
    ids, mask = left_padded([prompt(6, seed=1), prompt(3, seed=2)])
    real = mask.bool()
    logits = model(ids, attention_mask=mask).logits
    assert logits.dtype == dtype
    expected = exact(ids, attention_mask=mask).logits
    assert_close(logits[real], expected[real], factor=4)  # a dozen operations, each rounded once
    cache = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)[CACHE]
    last = model(ids[:, 5:], attention_mask=mask, cache=cache).logits
    assert_close(last, expected[:, 5:], factor=4)


@every_preset
def test_autocast_gives_float32_gradients(name):
    model, ids = tiny_model(name, torch.float32, scale=0.1).train(), prompt(2, 6)
    exact = model(ids, labels=ids).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    assert_close(loss, exact, dtype=torch.bfloat16)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [("ddl", {"attention_output_gate": True, "tie_word_embeddings": False}), ("edelta", {}), ("mudd", {})],
)
def test_every_parameter_matters_and_gets_a_gradient(name, options):
    """No parameter of the whole model is unused, more than rounding noise shows; those of a stream are the contract's.
    Perturbed: at the start the gate's last weights are zero and pass nothing to what lies before them."""
    model, ids = tiny_model(name, **options), prompt(2, 6)
    before = model(ids, labels=ids).loss
    before.backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{parameter_name} is not used"
        assert parameter.grad.abs().max() > 1e-8, f"{parameter_name} has no influence"
        with torch.no_grad():
            kept = parameter.clone()
            parameter.mul_(1.2).add_(0.05 * torch.arange(parameter.numel()).view_as(parameter) / parameter.numel())
            change = (model(ids, labels=ids).loss - before).abs()
            assert change > 1e-8, f"{parameter_name} does not change the loss"
            parameter.copy_(kept)


@torch.no_grad()
def test_training_mode_changes_nothing_but_the_cache():
    model, ids = tiny_model("ddl-ec"), prompt(2, 5)
    expected = model(ids).logits
    out = model.train()(ids)
    assert torch.equal(out.logits, expected)
    assert out.get(CACHE) is None
    assert model(ids, use_cache=True)[CACHE] is not None


@torch.no_grad()
def test_a_vocabulary_can_be_resized():
    """More rows for new tokens, head and embedding still one tensor; the old tokens keep their logits."""
    model, ids = tiny_model("ddl-ec"), prompt(2, 5)
    expected = model(ids).logits
    model.resize_token_embeddings(VOCAB + 6)
    assert model.config.vocab_size == VOCAB + 6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_close(model(ids).logits[..., :VOCAB], expected)
    assert model(ids).logits.shape[-1] == VOCAB + 6
    model.resize_token_embeddings(VOCAB - 6)
    assert model(ids.clamp_max(VOCAB - 7)).logits.shape[-1] == VOCAB - 6
