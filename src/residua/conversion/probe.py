"""Small inputs for a model of transformers, and the situations in which two forms of it must compute the same.

Inputs are made from the configuration: token ids, images, videos, sounds or their features, for the argument that a
model names as its main input. Where a kind of input has several layouts, the first that the model runs on is taken.
"""

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from residua.errors import InputError, extra, first_line
from residua.models.evaluating import evaluating
from residua.models.memory import CACHE

with extra("lab"):
    import numpy as np
    from transformers import PreTrainedModel

TOKENS, FRAMES, SAMPLES = 8, 64, 4800
"""Lengths of the inputs: token ids, frames of features where the configuration names no number, samples of a sound."""

Situation = Callable[[], list[Tensor]]
"""A way to run a model, which returns its outputs."""


def probe(model: PreTrainedModel) -> dict[str, Any]:
    """Return small inputs that a model runs on in evaluation mode.

    Raises:
        InputError: no layout of its main input fits; the message has the reason of the first.
    """
    reasons: list[Exception] = []
    for inputs in _layouts(model):
        try:
            with evaluating(model):
                outputs(model, inputs)
        except Exception as error:  # a model that needs other inputs raises anything
            reasons.append(error)
        else:
            return inputs
    reason = first_line(reasons[0]) if reasons else f"it reads {model.main_input_name}"
    raise InputError(f"{type(model).__name__}: could not run it on a small input: {reason}")


def situations(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Situation]:
    """Return the ways to run a model in which a conversion must change no bit, by what they are called in a message."""
    found: dict[str, Situation] = {"on a small input": partial(outputs, model, inputs)}
    if "input_ids" in inputs:
        ids = inputs["input_ids"]
        longer = torch.cat([ids, ids.flip(1)[:, 2:]], 1).roll(1, 0)
        mask = torch.ones_like(longer)
        mask[0, :3] = 0
        other = {**inputs, "input_ids": longer, "attention_mask": mask, "output_hidden_states": True}
        found["on a longer input with padding"] = partial(outputs, model, other)
        if "use_cache" in inputs:
            found["token by token, with a cache"] = partial(_in_pieces, model, inputs)
    else:
        floating = {name for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        other = {name: -2 * x if name in floating else x for name, x in inputs.items()}
        found["on another input, with hidden states"] = partial(outputs, model, {**other, "output_hidden_states": True})
    found["in training"] = partial(_in_training, model, inputs)
    return found


def outputs(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return all floating-point tensors that a model returns. Raises TypeError if there are none."""
    with torch.no_grad():
        found = list(_floats(model(**inputs)))
    if not found:
        raise TypeError("it returns no tensor of floating-point numbers")
    return found


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists hold the same numbers, bit for bit; NaN equals NaN."""
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and bool(same_numbers(x, y).all()) for x, y in zip(a, b)
    )


def same_numbers(x: Tensor, y: Tensor) -> Tensor:
    """Return where two tensors of one shape hold the same number; NaN equals NaN."""
    return (x == y) | (x.isnan() & y.isnan())


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Take away the hooks that transformers leaves on a model that was asked for hidden states.

    They cannot be pickled, and a model that nobody has asked yet has none.
    """
    flag = "_output_capturing_hooks_installed"
    free = [module for module in model.modules() if flag not in vars(module)]
    kept = {module: set(module._forward_hooks) for module in model.modules()}
    try:
        yield
    finally:
        marked = [module for module in free if flag in vars(module)]
        for module in marked:
            delattr(module, flag)
        for module, hooks in kept.items() if marked else ():
            for key in module._forward_hooks.keys() - hooks:
                del module._forward_hooks[key]


def _in_training(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    """Return the outputs in training mode, from one seed; statistics of batches are put back."""
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    drawn, drawn_by_numpy = random.getstate(), np.random.get_state()
    random.seed(0)
    np.random.seed(0)
    with evaluating(model):
        torch.manual_seed(0)
        model.train()
        try:
            return outputs(model, inputs)
        finally:
            random.setstate(drawn)
            np.random.set_state(drawn_by_numpy)
            with torch.no_grad():
                for buffer, before in buffers.items():
                    if buffer.shape == before.shape:
                        buffer.copy_(before)


def _in_pieces(model: nn.Module, inputs: Mapping[str, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    past = None
    for ids in inputs["input_ids"].split([5, 1, 2], dim=1):
        with torch.no_grad():
            out = model(**{**inputs, "input_ids": ids, "use_cache": True, CACHE: past})
        past = out[CACHE]
        found += _floats(out[0])
    return found


def _floats(found: Any) -> Iterator[Tensor]:
    """Yield the tensors of floating-point numbers in an output: a tensor, a sequence, a mapping or attributes."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield found
    elif isinstance(found, (list, tuple, Mapping)):
        for item in found.values() if isinstance(found, Mapping) else found:
            yield from _floats(item)


def _layouts(model: PreTrainedModel) -> Iterator[dict[str, Any]]:
    """Yield the inputs to try, likeliest first."""
    config: Any = model.config
    arguments = inspect.signature(model.forward).parameters
    weights = next(p for p in model.parameters() if p.is_floating_point())
    name = model.main_input_name if model.main_input_name in arguments else next(iter(arguments), "")
    generator = torch.Generator().manual_seed(0)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weights.device, weights.dtype)

    width = _first(config.get_text_config(decoder=True), ("hidden_size", "d_model"), 0)
    beside: dict[str, Any] = {}
    encoded = {"encoder_hidden_states": floats(2, 5, width)} if "encoder_hidden_states" in arguments else {}
    if encoded and _flag(config, "is_encoder_decoder", "add_cross_attention"):
        beside |= encoded
    if name == "input_ids":
        rows = _first(config.get_text_config(), ("vocab_size",), 2)
        with suppress(NotImplementedError, AttributeError):  # a model of several towers
            embeddings: Any = model.get_input_embeddings()
            rows = min(rows, len(embeddings.weight))
        ids = torch.randint(0, rows, (2, TOKENS), generator=generator)
        if "use_cache" in arguments or _flag(config, "use_cache", "is_decoder"):
            beside["use_cache"] = False
        yield {name: ids.to(weights.device), **beside}
        if encoded and not beside.keys() & encoded.keys():
            yield {name: ids.to(weights.device), **beside, **encoded}
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


def _flag(config: Any, *names: str) -> bool:
    return any(getattr(config, name, False) is True for name in names)
