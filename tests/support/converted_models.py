"""Tiny Llamas and Whispers, and what `residua.convert` makes of them."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, WhisperConfig, WhisperForConditionalGeneration

import residua
from residua.connections import PRESETS
from residua.lab.data.tokenizer import byte_tokenizer
from support.families import randomised
from support.tiny_runs import prepare_texts

WINDOWED, PLAIN = "ddl-tc", "hc"
# No start of these preserves a model, or (mudd) no layer of transformers takes what they read.
CHANGING = {"altup", "attnres-inkling", "edelta", "mhc-glm", "mudd", "orthogonal", "pooled-householder"}
CHANGING |= {name for name in PRESETS if name.partition("-")[0] == "ddl"}
PRESERVING = [name for name in PRESETS if name not in CHANGING]
VOCAB = 48
SOUND = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
STARTS = torch.tensor([[1], [1]])
ENCODED = {
    "input_ids": torch.arange(16).view(2, 8),
    "encoder_hidden_states": torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
}
"""For the decoder of a Whisper."""
IDS = torch.randint(2, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))


def llama(dtype=torch.float64, **options):
    return model_of(LlamaConfig, dtype, num_key_value_heads=2, intermediate_size=24, **options)


def save_base(folder, **options):
    """Save a small Llama and its tokenizer of bytes in a folder; return the folder."""
    sizes = {"vocab_size": 257, "max_position_embeddings": 64, "num_hidden_layers": 2}
    llama(torch.float32, **(sizes | options)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def data_of_base(base, place):
    """Forty short texts as tokens of a base, prepared in a folder."""
    return prepare_texts(place, str(base))


def model_of(config_class, dtype=torch.float64, **options):
    sizes = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = config_class(**(sizes | options), bos_token_id=0, eos_token_id=0, pad_token_id=1)
    return randomised(lambda: AutoModelForCausalLM.from_config(config), scale=0.3).to(dtype)


def whisper():
    config = WhisperConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=12,
        max_target_positions=16,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "decoder_start_token_id"), 1),
        eos_token_id=None,
    )
    return randomised(lambda: WhisperForConditionalGeneration(config), scale=0.3).double()


def converted(connection, dtype=torch.float64, **options):
    """A converted Llama whose connections are not at their start."""
    return lively(llama(dtype, **options), connection)


def lively(model, connection, inputs=None):
    """Convert a model, or a part of one, to connections that are not at their start."""
    torch.manual_seed(1)
    residua.convert(model, connection, start="fresh", inputs=inputs)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".stream." in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model
