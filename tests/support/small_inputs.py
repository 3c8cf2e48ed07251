"""Small images, videos, sounds and series for a model of transformers, made from its configuration."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residua.conversion.convert_model import convertible_stack
from residua.conversion.probe import probe
from residua.errors import InputError

FRAMES, SAMPLES = 64, 4800
"""Lengths where the configuration names no number: frames of features, samples of a sound."""


def inputs_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return inputs that `residua.convert` takes for a model: token ids, or the first others that it runs on.

    Raises:
        InputError: the model cannot be converted, or no layout of its main input fits; the reason is the first one's.
    """
    convertible_stack(model)
    try:
        return probe(model)[0]
    except InputError as error:
        if not any(reason in str(error) for reason in ("inputs must be given", "encoder_hidden_states")):
            raise
    reasons = []
    for layout in _layouts(model):
        try:
            return probe(model, layout)[0]
        except InputError as error:
            reasons.append(error)
    if reasons:
        raise reasons[0]
    raise InputError(f"{type(model).__name__}: could not run it on a small input: it reads {model.main_input_name}")


def _layouts(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield the inputs to try, likeliest first."""
    config: Any = model.config
    arguments = inspect.signature(model.forward).parameters
    weights = next(p for p in model.parameters() if p.is_floating_point())
    name = model.main_input_name if model.main_input_name in arguments else next(iter(arguments), "")
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weights.device, weights.dtype)

    if "encoder_hidden_states" in arguments:
        text = config.get_text_config(decoder=True)
        rows = min(text.vocab_size, len(model.get_input_embeddings().weight))
        width = _first(text, ("hidden_size", "d_model"), 0)
        states, ids = floats(2, 5, width), torch.randint(0, rows, (2, 8), generator=generator).to(weights.device)
        caches = {"use_cache": False} if "use_cache" in arguments or getattr(config, "use_cache", False) else {}
        yield {"input_ids": ids, **caches, "encoder_hidden_states": states}
    elif name in ("pixel_values", "pixel_values_videos", "hidden_states"):
        channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
        side = _first(config, ("image_size", "img_size"), 32)
        height, width = side if isinstance(side, tuple) else (side, side)
        frames = _first(config, ("num_frames", "frames_per_clip"), 0)
        if frames:
            yield {name: floats(1, frames, channels, height, width)}
        yield {name: floats(1, channels, height, width)}
        patch = _first(config, ("patch_size", "spatial_patch_size"), 16)
        patch, tall = patch if isinstance(patch, tuple) else (patch, patch)
        numbers = channels * patch * tall
        here = weights.device
        grid = torch.tensor([[1, 4, 4]], device=here)
        if "grid_thw" in arguments:
            yield {name: floats(16, numbers * _first(config, ("temporal_patch_size",), 1)), "grid_thw": grid}
        if "spatial_shapes" in arguments:
            mask = torch.ones(1, 16, dtype=torch.long, device=here)
            for masked in ("pixel_attention_mask", "attention_mask"):
                yield {name: floats(1, 16, numbers), masked: mask, "spatial_shapes": grid[:, 1:]}
        if "pixel_position_ids" in arguments:
            places = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None].to(here)
            yield {name: floats(1, 16, numbers), "pixel_position_ids": places}
    elif name in ("input_features", "input_values", "audio_mel"):
        bins = _first(config, ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel"), 80)
        positions = _first(config, ("max_source_positions",), 0)
        length = _first(config, ("max_length",), 0) or 2 * positions or FRAMES
        if name == "input_features":
            yield {name: floats(1, bins, length)}
        elif not _first(config, ("num_mel_bins",), 0):
            yield {name: floats(1, SAMPLES)}
            yield {name: floats(1, 1, SAMPLES)}
        yield {name: floats(1, length, bins)}
        present = torch.ones(1, length, dtype=torch.long, device=weights.device)
        for masked in ("attention_mask", "input_features_mask", "audio_mel_mask"):
            if masked in arguments:
                yield {name: floats(1, bins, length), masked: present}
                yield {name: floats(1, length, bins), masked: present}
    elif name == "past_values":
        length = _first(config, ("context_length",), FRAMES)
        yield {name: floats(1, length, _first(config, ("num_input_channels",), 1))}


def _first(config: Any, names: tuple[str, ...], default: int) -> Any:
    """Return the first of these sizes that a configuration has: an int, or a tuple (height, width)."""
    for name in names:
        found = getattr(config, name, None)
        if isinstance(found, Mapping):
            found = (found.get("height"), found.get("width"))
        if isinstance(found, (list, tuple)) and len(found) >= 2 and all(isinstance(x, int) for x in found[-2:]):
            return tuple(found[-2:])
        if isinstance(found, int) and not isinstance(found, bool):
            return found
    return default
