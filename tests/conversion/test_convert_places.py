"""A converted model's weights on other devices, and what its backward pass keeps."""

from functools import cache, partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import residua
from residua.lab.cost.measured_memory import storages_kept
from support.converted_models import IDS, converted, llama
from support.lanes import some
from support.tolerances import assert_close

PLACES = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.layers.2": "disk",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("connection", ["residual", "hc", "mhc", "attnres-block", "ddl-tc"])
def test_weights_on_disk_and_offloaded_compute_the_same(connection, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    model, cpu = converted(connection, torch.float32).eval(), torch.device("cpu")
    model.save_pretrained(tmp_path / "saved")
    expected = model(IDS).logits
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1, "eos_token_id": None}
    text = model.generate(IDS, **options)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=PLACES, offload_folder=tmp_path / "offload"
    )
    automatic = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", device_map="auto", max_memory={"cpu": "20KB"}, offload_folder=tmp_path / "more"
    )
    accelerate.cpu_offload(model, execution_device=cpu)
    assert torch.equal(model(IDS).logits, expected)
    for other in (loaded, automatic, model):
        assert any(p.device.type == "meta" for p in other.parameters())
        assert_close(other(IDS).logits, expected)  # weights that are read from a file lie elsewhere in memory
        assert torch.equal(other.generate(IDS, **options), text)


LAYERS = 8


@cache
def kept(connection, dim):
    """Vectors of width dim, in float32, that one more token keeps in a layer of a Llama in training."""
    model = llama(torch.float32, hidden_size=dim, num_hidden_layers=LAYERS).train()
    if connection is not None:
        residua.convert(model, connection, start="fresh")
    sizes = [  # the difference leaves out what does not depend on the tokens
        storages_kept(partial(model, torch.zeros(1, n, dtype=torch.long), use_cache=False), model.parameters())
        for n in (16, 48)
    ]
    return (sizes[1] - sizes[0]) / (32 * dim * LAYERS * 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "connection",
    some(
        ["hc", "mhc", "jpmhc", "mhc-deepseek", "mhc-glm", "krom", "ihc", "edelta-stream", "altup"],
        {"mhc", "edelta-stream", "altup"}.__contains__,
    ),
)
def test_four_streams_keep_at_most_four_and_a_half_more_vectors_than_the_model(connection):
    """At width 1024: vectors, and numbers of gates and mappings, whose share falls with the width."""
    at_32, at_64 = (kept(connection, dim) - kept(None, dim) for dim in (32, 64))
    numbers = 64 * (at_32 - at_64)
    vectors = at_64 - numbers / 64
    assert 1 < vectors + numbers / 1024 <= 4.5


@pytest.mark.slow
def test_the_plain_residual_keeps_no_more_memory_than_the_model():
    assert kept("residual", 32) == pytest.approx(kept(None, 32), abs=0.01)
