"""A connection may read one input each for queries, keys and values."""

import copy

import pytest
import torch

from support.tiny_models import prompt, tiny_model
from support.tolerances import assert_close


@torch.no_grad()
@pytest.mark.parametrize(("norm", "projection"), [("norm", "q_proj"), ("key_norm", "k_proj"), ("value_norm", "v_proj")])
def test_attention_takes_an_input_for_queries_keys_and_values(norm, projection):
    """The first sublayer reads the embedding through three norms: a gain of the other sign is a weight of the other."""
    model, ids = tiny_model("attnres-inkling-s3-e1"), prompt(2, 6)
    plain, before = copy.deepcopy(model), model(ids).logits
    getattr(model.model.stream.connections[0], norm).weight[0] *= -1
    getattr(plain.model.layers[0].attention, projection).weight[:, 0] *= -1
    assert_close(model(ids).logits, plain(ids).logits)
    assert (model(ids).logits - before).abs().max() > 1e-6
