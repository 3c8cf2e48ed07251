"""What is read from a user's transformers model."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, MptConfig

from residua.conversion.probe import change, outputs
from residua.errors import InputError
from residua.lab.data.tokenizer import byte_tokenizer
from residua.lab.opening import context_of, prompt_tokens, read_model
from support.converted_models import converted, llama, save_base, whisper


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20, n_positions=33), 33),
        (MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=20, max_seq_len=34), 34),
        (BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=20), None),
    ],
)
def test_the_context_is_read_from_every_configuration_key_for_it(config, expected):
    assert context_of(AutoModelForCausalLM.from_config(config)) == expected


def test_the_context_is_that_of_a_llama_or_of_its_decoder_half():
    assert context_of(llama(max_position_embeddings=35)) == 35
    assert context_of(whisper()) == 16


def test_an_empty_output_cannot_be_compared():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x, x[:0]

    x = torch.ones(2, 3)
    (kept,) = outputs(Model(), {"x": x})
    assert change([kept], [x]) == 0


@pytest.mark.parametrize("kind", ["plain", "converted"])
def test_a_configuration_with_too_many_layers_is_refused(kind, tmp_path):
    """Building the model, or even the list of the kinds of its layers, would not end."""
    save_base(tmp_path) if kind == "plain" else converted("hc", torch.float32).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    settings = json.loads(file.read_text())
    (settings if kind == "plain" else settings["residua"]["base"])["num_hidden_layers"] = 10**30
    file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=f"num_hidden_layers must be at most 16384, got {10**30}"):
        read_model(tmp_path)


def test_a_prompt_whose_bytes_are_not_utf8_is_refused():
    with pytest.raises(InputError, match=r"^prompt must be Unicode text, in UTF-8, got 'caf\\udce9'"):
        prompt_tokens(byte_tokenizer(), b"caf\xe9".decode(errors="surrogateescape"))
