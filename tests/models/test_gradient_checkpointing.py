"""Gradient checkpointing recomputes; it changes no number."""

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from residua.models.cache import CACHE
from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close
from support.variants import PRESETS

# The older name is on its way out; the test of the reentrant kind still uses it.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def gradients(model, ids, *, of_states: bool = False, **options) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    out = model(ids, labels=ids, output_states=of_states, **options)
    loss = out.loss + sum(leaf.square().mean() for leaf in tree_leaves(out.states[1])) if of_states else out.loss
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", [*PRESETS, "beta-conv-dv1", "phi-attention"])
def test_gradients_are_equal_to_the_last_bit(name):
    model, ids = tiny_model(name).train(), prompt(2, 6)
    expected, expected_of_states = (gradients(model, ids, of_states=of_states) for of_states in (False, True))
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert model.is_gradient_checkpointing
    for key, grad in gradients(model, ids).items():
        if name in ("lambdas", "siamese", "delta-attnres"):
            # A tensor that several layers read has its gradient summed layer by layer.
            assert_close(grad, expected[key])
        else:
            assert torch.equal(grad, expected[key]), key
    for key, grad in gradients(model, ids, of_states=True).items():
        assert_close(grad, expected_of_states[key])  # the state after a layer is read outside of the next one too


@pytest.mark.parametrize("name", ["residual", "ddl-ec"])
def test_reentrant_checkpointing_loses_no_gradient(name):
    """It follows only tensors that are arguments themselves, but a state may be a pytree of them."""
    model, ids = tiny_model(name).train(), prompt(2, 6)
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    for key, grad in gradients(model, ids).items():
        assert grad is not None, key
        assert torch.equal(grad, expected[key]), key


def test_layers_really_are_recomputed():
    model, ids = tiny_model("ddl-tc").train(), prompt(2, 6)
    calls = []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 1
    model.gradient_checkpointing_enable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 3
    model.gradient_checkpointing_disable()
    model(ids, labels=ids).loss.backward()
    assert len(calls) == 4


def test_no_cache_is_returned_while_checkpointing():
    model, ids = tiny_model("ddl-tc").train(), prompt(2, 6)
    model.gradient_checkpointing_enable()
    assert model(ids, use_cache=True).get(CACHE) is None
    assert model.eval()(ids)[CACHE] is not None, "evaluation is not affected"


@pytest.mark.parametrize("name", ["residual", "mhc", "ddl-tc"])
def test_a_model_in_training_generates_the_tokens_that_it_does_in_evaluation(name):
    model, ids = tiny_model(name), prompt(2, 6)
    expected = model.eval().generate(ids, max_new_tokens=6, do_sample=False)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.parametrize("name", ["ddl-tc", "pooled-householder"])
def test_a_cache_that_is_given_is_not_filled_twice(name):
    """A layer that is computed again would add its tokens to the running sums once more."""
    model, ids = tiny_model(name).train(), prompt(2, 6)
    expected = gradients(model, ids)
    model.gradient_checkpointing_enable()
    cache = DynamicCache(config=model.config)
    with pytest.warns(UserWarning, match="the cache stays empty"):
        found = gradients(model, ids, cache=cache)
    for key, grad in found.items():
        assert torch.equal(grad, expected[key]), key
    model.eval()(ids, cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="cache: training needs whole sequences"):
        model.train()(ids, cache=cache)
