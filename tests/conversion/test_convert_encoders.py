"""`residua.convert` on encoders of images, text and sound, and on the encoder and the decoder of encoder-decoders."""

import random

import numpy as np
import pytest
import torch
from transformers import (
    AutoModel,
    Gemma4TextConfig,
    GPT2Config,
    Qwen3VLVisionConfig,
    RobertaPreLayerNormConfig,
    T5Config,
    ViTConfig,
)

import residua
from residua.connections.schemes.residual import ResidualConnection
from residua.conversion.rebuild import stream_of
from residua.errors import InputError
from support.converted_models import ENCODED, SOUND, STARTS, WINDOWED, lively, model_of, whisper
from support.families import randomised
from support.tolerances import assert_close

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
PIXELS, FEATURES = {"pixel_values": IMAGE}, {"input_features": SOUND}
SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


def encoder(config, dtype=torch.float64):
    return randomised(lambda: AutoModel.from_config(config), scale=0.3).to(dtype)


def vit(dtype=torch.float64, **options):
    return encoder(ViTConfig(**SIZES, image_size=8, patch_size=4, **options), dtype)


@pytest.mark.parametrize("connection", ["residual", "hc", "mhc", "attnres", "attnres-block", "ihc", "denseformer"])
def test_a_vision_transformer_keeps_what_it_computes_and_learns(connection):
    model = vit()
    before = model(IMAGE, output_hidden_states=True)
    residua.convert(model, connection, inputs=PIXELS)
    after = model(IMAGE, output_hidden_states=True)
    bound = 1e-9 * before.last_hidden_state.abs().max()
    assert (after.last_hidden_state - before.last_hidden_state).abs().max() <= bound
    assert [x.shape for x in after.hidden_states] == [x.shape for x in before.hidden_states]
    after.last_hidden_state.square().mean().backward()
    assert all(p.grad is not None for p in stream_of(model).parameters())


def test_a_mean_over_the_sequence_that_would_include_padding_is_refused():
    text = encoder(RobertaPreLayerNormConfig(vocab_size=32, **SIZES))
    with pytest.raises(InputError, match="and padding; use context='token'"):
        residua.convert(text, "edelta:context=sequence", start="fresh")
    residua.convert(text, "edelta:context=token", start="fresh")


def test_a_scheme_that_reads_earlier_tokens_is_refused_by_an_encoder():
    new = encoder(RobertaPreLayerNormConfig(vocab_size=32, **SIZES))
    with torch.no_grad():  # as in many a new model: no token reaches another
        for layer in new.encoder.layer:
            for parameter in layer.attention.output.parameters():
                parameter.zero_()
    text = encoder(RobertaPreLayerNormConfig(vocab_size=32, **SIZES))
    for model, inputs in ((vit(), PIXELS), (text, None), (new, None)):
        with pytest.raises(InputError, match="reads in both directions"):
            residua.convert(model, WINDOWED, start="fresh", inputs=inputs)


def test_the_tokens_of_all_images_may_be_in_one_row():
    """Vision towers of language models see the images of a batch in this form."""
    config = Qwen3VLVisionConfig(
        **{"depth": 2, "hidden_size": 16, "num_heads": 2, "intermediate_size": 24, "out_hidden_size": 16},
        patch_size=2,
        num_position_embeddings=16,
        deepstack_visual_indexes=[],
    )
    model = encoder(config)
    patches = torch.randn(24, 24, dtype=torch.float64)
    grid = torch.tensor([[1, 4, 4], [1, 2, 4]])
    inputs = {"hidden_states": patches, "grid_thw": grid}
    before = model(**inputs).last_hidden_state
    residua.convert(model, "mhc", inputs=inputs)
    assert (model(patches, grid_thw=grid).last_hidden_state - before).abs().max() <= 1e-9 * before.abs().max()
    with pytest.raises(InputError, match="reads in both directions"):
        residua.convert(encoder(config), WINDOWED, start="fresh", inputs=inputs)


def test_the_encoder_and_decoder_of_whisper_are_converted_separately():
    model = whisper()
    with pytest.raises(InputError, match=r"residua\.convert\(model\.get_encoder"):
        residua.convert(model, "hc")
    options = {"max_new_tokens": 5, "do_sample": False}
    before = model(input_features=SOUND, decoder_input_ids=STARTS).logits
    text = model.generate(SOUND, **options)
    residua.convert(model.get_encoder(), "mhc", inputs=FEATURES)
    with pytest.raises(InputError, match=r"inputs=\{'input_ids': \.\.\., 'encoder_hidden_states': \.\.\.\}"):
        residua.convert(model.get_decoder(), "attnres")
    residua.convert(model.get_decoder(), "attnres", inputs=ENCODED)
    after = model(input_features=SOUND, decoder_input_ids=STARTS).logits
    assert (after - before).abs().max() <= 1e-9 * before.abs().max()
    assert torch.equal(model.generate(SOUND, **options), text)
    assert len(stream_of(model.get_decoder()).connections) == 3 * 2  # attention, attention to the encoder, MLP
    residua.unconvert(model.get_encoder(), inputs=FEATURES)
    residua.unconvert(model.get_decoder(), inputs=ENCODED)
    assert torch.equal(model(input_features=SOUND, decoder_input_ids=STARTS).logits, before)


def test_a_converted_decoder_remembers_the_earlier_tokens_that_it_reads():
    model = whisper()
    lively(model.get_decoder(), WINDOWED, ENCODED)
    ids = torch.randint(2, 32, (2, 6))
    options = {"max_new_tokens": 5, "do_sample": False, "decoder_input_ids": ids}
    cached, not_cached = (model.generate(SOUND, use_cache=use, **options) for use in (True, False))
    assert torch.equal(cached, not_cached)


def test_blocks_that_add_inside_their_modules_are_converted():
    """T5 adds within the modules of a layer, so the norms inside them read the residual."""
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
    model = encoder(T5Config(**sizes))
    encoder_half = residua.convert(model.get_encoder(), "residual")
    with pytest.raises(InputError, match="'encoder_hidden_states'"):
        residua.convert(model.get_decoder(), "residual")
    assert encoder_half.config.residua["layers"][0][0] == {
        "readers": ("layer.0.layer_norm",),
        "normed": True,
        "cast": False,
    }


@pytest.mark.parametrize("connection", ["residual", "hc", "attnres", "mhc"])
def test_a_residual_scaled_by_a_number_is_converted(connection):
    config = Gemma4TextConfig(
        **SIZES,
        vocab_size=32,
        num_key_value_heads=1,
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
    )
    model = encoder(config, torch.float32)  # its norms compute in float32
    for i, layer in enumerate(model.layers):
        layer.layer_scalar.fill_(0.5 + i)
    ids = torch.randint(0, 32, (2, 5))
    before = model(ids).last_hidden_state
    residua.convert(model, connection)
    assert_close(model(ids).last_hidden_state, before, factor=10)


def test_an_unsupported_use_only_in_training_is_refused_in_training():
    model = vit()
    layer = model.layers[1]
    extra = torch.nn.Linear(16, 16).double()

    class Extra(type(layer)):
        def forward(self, x, *args, **options):
            out = super().forward(x, *args, **options)
            return out + extra(x) if self.training else out

    layer.__class__ = Extra
    residua.convert(model, "residual", inputs=PIXELS)
    with pytest.raises(TypeError, match="passes its residual to linear"):
        model.train()(IMAGE)


def test_a_connection_that_does_not_write_is_found_even_if_weights_are_zero(monkeypatch):
    """Many new models start with sublayers that return zero, which would hide such a connection."""
    model = model_of(GPT2Config, n_inner=24)
    with torch.no_grad():
        for block in model.transformer.h:
            for parameter in (*block.attn.c_proj.parameters(), *block.mlp.c_proj.parameters()):
                parameter.zero_()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with monkeypatch.context() as patch:
        patch.setattr(ResidualConnection, "write", lambda self, y, carry: carry.residual)
        with pytest.raises(InputError, match="on a small input its outputs changed"):
            residua.convert(model, "residual")
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    residua.convert(model, "residual")


def test_outputs_without_a_number_are_refused():
    model = vit()
    with torch.no_grad():
        model.embeddings.cls_token.fill_(torch.nan)
        model.embeddings.position_embeddings.fill_(torch.nan)
    with pytest.raises(InputError, match="finite numbers for a small input"):
        residua.convert(model, "residual", inputs=PIXELS)


def test_inputs_other_than_token_ids_must_be_given():
    model = vit()
    with pytest.raises(InputError, match=r"inputs must be given .* such as inputs=\{'pixel_values': \.\.\.\}"):
        residua.convert(model, "hc")
    with pytest.raises(InputError, match=r"inputs must be a mapping .* got 'Tensor'"):
        residua.convert(model, "hc", inputs=IMAGE)
    with pytest.raises(InputError, match="could not run it on a small input"):
        residua.convert(model, "hc", inputs={"images": IMAGE})
    text = model_of(GPT2Config, n_inner=24)
    ids = torch.arange(12)[None]
    before = text(ids).logits
    assert torch.equal(residua.convert(text, "residual", inputs={"input_ids": ids})(ids).logits, before)


def test_a_probe_leaves_the_model_and_all_random_states_as_they_were():
    """No value of a parameter is written, no hook of transformers stays, and numbers are drawn from no global state."""
    model = vit(hidden_dropout_prob=0.5).train()
    model.layers[1].eval()
    modes = [module.training for module in model.modules()]
    versions = {name: x._version for name, x in (*model.named_parameters(), *model.named_buffers())}
    hooks = {name: len(module._forward_hooks) for name, module in model.named_modules()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    residua.unconvert(residua.convert(model, "residual", inputs=PIXELS), inputs=PIXELS)
    assert {name: x._version for name, x in (*model.named_parameters(), *model.named_buffers())} == versions
    assert {name: len(module._forward_hooks) for name, module in model.named_modules()} == hooks
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]
    assert [module.training for module in model.modules()] == modes
