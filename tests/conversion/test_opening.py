"""What is asked of a model of transformers that somebody brings."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, MptConfig

from residua.conversion.opening import context_of
from residua.conversion.probe import change, outputs
from support.converted_models import llama, whisper


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=20, n_positions=33), 33),
        (MptConfig(d_model=8, n_heads=2, n_layers=1, vocab_size=20, max_seq_len=34), 34),
        (BloomConfig(hidden_size=8, n_head=2, n_layer=1, vocab_size=20), None),
    ],
)
def test_the_context_of_a_model_whatever_its_configuration_calls_it(config, expected):
    assert context_of(AutoModelForCausalLM.from_config(config)) == expected


def test_the_context_of_a_llama_and_of_a_decoder_half():
    assert context_of(llama(max_position_embeddings=35)) == 35
    assert context_of(whisper()) == 16


def test_an_empty_output_is_no_number_to_compare():
    class Model(torch.nn.Module):
        def forward(self, x):
            return x, x[:0]

    x = torch.ones(2, 3)
    (kept,) = outputs(Model(), {"x": x})
    assert change([kept], [x]) == 0
