"""Readouts at every boundary, what is written back there, and the logit lens."""

import copy

import pytest
import torch
from transformers import CohereConfig, GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, LlamaConfig, StableLmConfig

import residua
from residua.connections import PRESETS
from residua.errors import InputError
from residua.lab.data.tokenizer import byte_tokenizer
from residua.lab.experiment import OpenModel, trace_model
from residua.lab.inspection import boundaries, gate_quantiles, logit_lens, pieces, trace, warnings
from residua.lab.inspection.subject import Subject
from residua.models.cache import CACHE
from support.converted_models import IDS, converted, model_of
from support.tiny_models import VOCAB, prompt, tiny_model


def logits(model, ids=None):
    with torch.no_grad():
        return model(input_ids=prompt(1, 7) if ids is None else ids, use_cache=False).logits


@pytest.mark.parametrize("name", PRESETS)
def test_values_that_were_read_are_written_back_bit_for_bit(name):
    model = tiny_model(name)
    expected, shapes = logits(model), []
    with boundaries(model) as points:
        assert list(points) == ["embedding", "1 attention", "1 mlp", "2 attention", "2 mlp"]
        for point in points.values():
            point.register_forward_hook(lambda _, arguments, x: shapes.append(x.shape) or x.clone())
        assert torch.equal(logits(model), expected)
    assert shapes == 5 * [(1, 7, 16)]
    assert not hasattr(model, "boundaries")
    assert torch.equal(logits(model), expected)
    assert len(shapes) == 5


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_value_written_at_the_last_boundary_determines_the_logits(name):
    # At rank 2, the gate of an eighth of this width, no state gives this value; see the test of the refusal below.
    model, changed = tiny_model("gated-residual:gate_rank=320" if name == "gated-residual" else name), []
    with boundaries(model) as points:
        points["2 mlp"].register_forward_hook(
            lambda _, arguments, x: changed.append(x + 0.1 * x.roll(1, -1)) or changed[0]
        )
        patched = logits(model)
    with torch.no_grad():
        torch.testing.assert_close(patched, model.logits(model.model.norm(changed[0])), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_the_lens_at_the_last_boundary_gives_the_logits_of_the_model(name):
    model = tiny_model(name)
    lens, ids = logit_lens(model, prompt(7), top=3), prompt(7)
    chances = logits(model, ids[None])[0].float().log_softmax(-1)
    assert torch.equal(lens.probability[-1], chances.topk(3).values.exp())
    assert torch.equal(lens.tokens[-1], chances.topk(3).indices)
    assert torch.equal(lens.loss[-1, :-1], -chances[:-1].gather(-1, ids[1:, None])[:, 0])
    assert lens.loss.shape == (5, 7)
    assert lens.loss[:, -1].isnan().all()


def test_a_converted_llama_can_be_inspected_and_patched():
    model, changed = converted("hc").eval(), []
    expected = logits(model, IDS)
    with boundaries(model) as points:
        first, last = list(points)[1], list(points)[-1]
        handle = points[first].register_forward_hook(lambda _, arguments, x: x.clone())
        assert torch.equal(logits(model, IDS), expected)
        handle.remove()
        points[last].register_forward_hook(lambda _, arguments, x: changed.append(2 * x) or changed[0])
        patched = logits(model, IDS)
    with torch.no_grad():
        torch.testing.assert_close(patched, model.lm_head(model.model.norm(changed[0])), rtol=1e-9, atol=1e-9)
    assert torch.equal(logits(model, IDS), expected)
    chances = logits(model, IDS[:1])[0].float().log_softmax(-1)
    assert torch.equal(logit_lens(model, IDS[0]).probability[-1], chances.topk(5).values.exp())


PARALLEL = {
    "cohere": (CohereConfig, {}),
    "stablelm": (StableLmConfig, {"use_parallel_residual": True, "num_key_value_heads": 4}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "llama": (LlamaConfig, {}),
}


@pytest.mark.parametrize("family", PARALLEL)
def test_a_vector_is_added_once_at_the_end_of_a_layer(family):
    """This also holds if a layer adds attention and MLP one after the other. The plain model is the oracle."""
    kind, options = PARALLEL[family]
    plain = model_of(kind, intermediate_size=24, **options).eval()
    model, rows = residua.convert(copy.deepcopy(plain), "residual"), {}
    vector = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad(), boundaries(model) as points:
        for name, point in points.items():
            point.register_forward_hook(lambda _, arguments, x, name=name: rows.setdefault(name, []).append(x))
        end = [name for name in points if name.startswith("2 ")][-1]
        points[end].register_forward_hook(lambda _, arguments, x: x + vector)
        found = model(IDS, output_hidden_states=True)
    assert {name: len(seen) for name, seen in rows.items()} == dict.fromkeys(points, 1)
    layer = plain.base_model.layers[1]
    layer.register_forward_hook(lambda _, arguments, x: (x[0] + vector, *x[1:]) if isinstance(x, tuple) else x + vector)
    with torch.no_grad():
        expected = plain(IDS, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.hidden_states[2], expected.hidden_states[2], rtol=1e-9, atol=1e-9)
    lens = logit_lens(model, IDS[0])
    assert len(lens.names) == len(lens.loss) == 1 + len(Subject.of(model).sublayers)
    chances = logits(model, IDS[:1])[0].float().log_softmax(-1)
    assert torch.equal(lens.probability[-1], chances.topk(5).values.exp())


def test_the_change_of_the_state_is_the_smallest_possible():
    """Of the sum of streams: every stream gets the same part. Of a plain residual: the value itself."""
    states = {}
    for name in ("hc", "residual"):
        model = tiny_model(name)
        with boundaries(model) as points, torch.no_grad():
            before = model.model(input_ids=prompt(1, 7), output_states=True).states[-1]
            points["2 mlp"].register_forward_hook(lambda _, arguments, x: x + 1)
            states[name] = model.model(input_ids=prompt(1, 7), output_states=True).states[-1] - before
    torch.testing.assert_close(states["hc"], torch.full_like(states["hc"], 1 / states["hc"].shape[-2]))
    torch.testing.assert_close(states["residual"], torch.ones_like(states["residual"]))


def test_a_readout_that_looks_back_refuses_padded_packed_and_continued_rows():
    model = tiny_model("ddl-tc")
    begun = {CACHE: model(input_ids=prompt(1, 7), use_cache=True)[CACHE]}
    padded = {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 1]])}
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3]])}
    numbered = {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1, 1]])}
    added = {"attention_mask": torch.full((1, 1, 7, 7), -1e4).triu(1).index_fill(3, torch.tensor([0]), -1e4)}
    for keywords in (padded, packed, begun, numbered, added):
        with boundaries(model), pytest.raises(InputError, match=r"^boundaries needs "):
            model(input_ids=prompt(1, 7), **keywords)
    with boundaries(model):
        model(input_ids=prompt(1, 7), position_ids=torch.arange(7)[None], attention_mask=torch.ones(1, 7))
        model.generate(prompt(1, 7), max_new_tokens=1)


def test_a_wrong_kind_of_model_or_shape_of_value_gives_a_one_line_error():
    with pytest.raises(InputError, match=r"^trace needs a model .*, got Linear"), boundaries(torch.nn.Linear(2, 2)):
        pass
    model = tiny_model("hc")
    with boundaries(model) as points:
        points["embedding"].register_forward_hook(lambda _, arguments, x: x[..., 0])
        with pytest.raises(InputError, match=r"must be \[1, 7, 16\], got \[1, 7\]"):
            logits(model)


@pytest.mark.slow
def test_a_value_that_no_state_gives_is_refused_in_one_line():
    """This readout ends in a norm, so its length has an upper end."""
    model = tiny_model("gated-residual")
    with boundaries(model) as points:
        points["2 mlp"].register_forward_hook(lambda _, arguments, x: 100 * x)
        with pytest.raises(InputError, match=r"^boundaries .* found no such state"):
            logits(model)


def test_the_trace_of_a_text_has_the_lens_after_every_sublayer(tmp_path):
    model, tokenizer = tiny_model("hc", vocab_size=257), byte_tokenizer()
    recorded = trace_model(OpenModel(model=model, tokenizer=tokenizer, folder=tmp_path), "a text of tokens")
    ids = recorded.values["token_ids"]
    torch.testing.assert_close(recorded.values["lens_loss"][-1], recorded.values["token_loss"], equal_nan=True)
    likeliest = logits(model, ids[None])[0].argmax(-1)
    assert recorded.facts["lens"][-1] == pieces(tokenizer, likeliest.tolist())
    assert len(recorded.facts["lens"]) == len(recorded.facts["sublayers"])
    assert not [warning for warning in warnings(recorded) if "not finite" in warning]


@pytest.mark.parametrize("name", ["residual", "gated-orthogonal", "gated-delta", "ddl", "hc", "attnres"])
def test_gradients_through_a_written_value_are_right_or_refused(name):
    model, ids = tiny_model(name), prompt(1, 7)
    weight = model.model.embed_tokens.weight
    change = 1e-5 * torch.randn_like(weight)

    def loss():
        return model(input_ids=ids, labels=ids).loss

    with boundaries(model) as points:
        points["1 mlp"].register_forward_hook(lambda _, arguments, x: 2 * x)
        if name in ("hc", "attnres"):
            with pytest.raises(InputError, match=r"only under torch\.no_grad\(\)"):
                loss()
            return
        loss().backward()
        with torch.no_grad():
            weight += change
            above = loss()
            weight -= 2 * change
            below = loss()
    torch.testing.assert_close((above - below) / 2, (weight.grad * change).sum(), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("make", [lambda: tiny_model("ddl-tc"), lambda: converted("hc").eval()])
def test_hooks_stay_while_the_model_is_traced_and_seen_through_the_lens(make):
    model, ids = make(), IDS[0]
    plain = logits(model, ids[None])
    with boundaries(model) as points:
        point = list(points.values())[2]
        point.register_forward_hook(lambda _, arguments, x: x + 0.5)
        patched = logits(model, ids[None])
        assert (patched - plain).abs().max() > 1e-3
        found, lens = trace(model, ids), logit_lens(model, ids)
        gate_quantiles(model, ids[None])
        assert torch.equal(logits(model, ids[None]), patched)
    chances = patched[0].float().log_softmax(-1)
    assert torch.equal(lens.probability[-1], chances.topk(5).values.exp())
    following = -chances[:-1].gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found.values["token_loss"][:-1], following, rtol=1e-5, atol=1e-5)
    assert not hasattr(model, "boundaries")
    assert torch.equal(logits(model, ids[None]), plain)


@pytest.mark.parametrize("measure", [trace, logit_lens])
def test_tokens_that_are_not_one_text_of_the_model_give_a_one_line_error(measure):
    model, ids = tiny_model("ddl-tc"), prompt(9)
    for wrong, message in [
        ([], "the number of tokens must be 1 to 64, the model's context, got 0"),
        (ids.repeat(8)[:65], "the number of tokens must be 1 to 64, the model's context, got 65"),
        (ids.repeat(2, 1), r"tokens must be the ids of one text, \(T\) or \(1, T\), got \[2, 9\]"),
        (ids.double(), "tokens must be the ids of a text, integers, got torch.float64"),
        ([1, VOCAB], rf"the smallest and largest token id must be from 0 to {VOCAB - 1}, got \[1, {VOCAB}\]"),
        ([-1, 1], r"the smallest and largest token id must be .*, got \[-1, 1\]"),
    ]:
        with pytest.raises(InputError, match=f"^{message}"):
            measure(model, wrong)
    as_tokenized, one = measure(model, ids[None]), measure(model, ids)
    for name in ("loss", "tokens") if measure is logit_lens else ("values",):
        torch.testing.assert_close(getattr(as_tokenized, name), getattr(one, name), equal_nan=True)
    with pytest.raises(InputError, match=r"^top must be 1 to .*, got 0"):
        logit_lens(model, ids, top=0)
    with pytest.raises(InputError, match=r"^the number of texts must be 9"):
        trace(model, ids, text=["a"])


def test_dropout_is_off_while_a_model_in_training_is_measured():
    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    torch.manual_seed(0)
    model, ids = residua.convert(GPT2LMHeadModel(config).eval(), "ihc"), prompt(9) % 50
    expected = trace(model, ids), logit_lens(model, ids)
    model.train()
    random = torch.get_rng_state()
    for _ in range(2):
        torch.testing.assert_close(trace(model, ids).values, expected[0].values, equal_nan=True)
        assert torch.equal(logit_lens(model, ids).probability, expected[1].probability)
    assert model.training
    assert torch.equal(torch.get_rng_state(), random)
