"""The residual state in a dtype of its own."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close
from support.variants import PRESETS


def state_dtypes(model, ids) -> set[torch.dtype]:
    states = model(ids, output_states=True).states
    return {leaf.dtype for leaf in tree_leaves(states)}


@pytest.mark.parametrize("name", PRESETS)
def test_the_state_keeps_its_dtype_from_end_to_end(name):
    """Under autocast the state would be float32 without being asked for: embeddings are, and sums are."""
    ids = prompt(2, 5)
    with torch.autocast("cpu", torch.bfloat16):
        assert state_dtypes(tiny_model(name, torch.float32), ids) == {torch.float32}
        assert state_dtypes(tiny_model(name, torch.float32, state_dtype="bfloat16"), ids) == {torch.bfloat16}
    assert state_dtypes(tiny_model(name, torch.float32, state_dtype="bfloat16"), ids) == {torch.bfloat16}
    assert state_dtypes(tiny_model(name, torch.bfloat16, state_dtype="float32"), ids) == {torch.float32}


@pytest.mark.parametrize("name", ["residual", "ddl", "ddl-ec"])
def test_only_the_state_is_rounded(name):
    """A float32 model with a bfloat16 state computes in float32 between the roundings of the state."""
    ids = prompt(2, 5)
    model, expected = tiny_model(name, torch.float32, state_dtype="bfloat16"), tiny_model(name, torch.float32)
    model.train()(ids, labels=ids).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    logits = model.eval()(ids).logits
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, expected(ids).logits)
    assert_close(logits, expected(ids).logits, dtype=torch.bfloat16, factor=3.0)  # eight roundings, amplified by norms


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edelta", "edelta-stream"])
@pytest.mark.parametrize("state", [None, "bfloat16"])
def test_models_with_weights_of_mixed_dtypes_train_and_generate(name, state):
    """Gates in float32 with narrow sublayers, the reverse, and every second parameter of the stream."""
    ids = prompt(1, 5)
    for choice in ("gates", "stream", "sublayers", "every second"):
        model = tiny_model(name, torch.float32, state_dtype=state)
        names = [key for key, _ in model.named_parameters()]
        stream = [key for key in names if ".stream." in key]
        wide = {
            "gates": {f"model.stream.{key}" for key in model.model.stream.float32_parameters()},
            "stream": set(stream),
            "sublayers": set(names) - set(stream),
            "every second": set(stream[::2]),
        }[choice]
        for key, parameter in model.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if key in wide else torch.bfloat16)
        model.generate(ids, max_new_tokens=2, do_sample=False)
        model.train()(ids, labels=ids).loss.backward()
        for key, parameter in model.named_parameters():
            assert parameter.grad is None or parameter.grad.isfinite().all(), (choice, key)
            assert parameter.grad is None or parameter.grad.dtype == parameter.dtype
