"""Run a transformers model on small inputs, in every way in which a conversion must not change its outputs."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from residua.errors import InputError, extra, first_line, require
from residua.models.cache import CACHE
from residua.models.evaluating import evaluating

with extra("lab"):
    from transformers import PreTrainedModel

TOKENS = 8
"""The number of tokens in a row of the inputs."""

Situation = Callable[[], list[Tensor]]
"""A way to run a model, which returns its outputs."""


def probe(model: PreTrainedModel, inputs: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], list[Tensor]]:
    """Return the inputs of a model, by default token ids of its vocabulary, and its outputs in evaluation mode.

    Raises:
        InputError: the model does not run on the inputs, or needs other inputs than token ids and none are given.
    """
    inputs = small_inputs(model, inputs)
    try:
        with evaluating(model):
            return inputs, outputs(model, inputs)
    except Exception as error:  # a model that needs other inputs may raise any exception
        raise InputError(f"{type(model).__name__}: could not run it on a small input: {first_line(error)}") from error


def small_inputs(model: PreTrainedModel, inputs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the inputs of a model, by default token ids of its vocabulary.

    Raises:
        InputError: `inputs` is not a mapping, or the model needs other inputs than token ids and none are given.
    """
    if inputs is None:
        return _token_ids(model)
    expected = "a mapping of arguments of the model's forward pass"
    require(isinstance(inputs, Mapping), "inputs", expected, type(inputs).__name__)
    return {**inputs}


def situations(model: PreTrainedModel, inputs: Mapping[str, Any]) -> dict[str, Situation]:
    """Return the ways to run a model in which a conversion must change no bit, keyed by the words for messages.

    All ways use noisy copies of constant parameters.
    """
    changed = noisy_constants(model)
    run = partial(outputs, model, changed=changed)
    ways: dict[str, Situation] = {"on a small input": partial(run, inputs)}
    if "input_ids" in inputs:
        ways["on a longer input with padding"] = partial(_longer, model, inputs, changed)
        if "use_cache" in inputs:
            ways["token by token, with a cache"] = partial(_in_pieces, model, inputs, changed)
    else:
        floating = {name for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point()}
        other = {name: -2 * x if name in floating else x for name, x in inputs.items()}
        ways["on another input"] = partial(run, other)
    return ways


def noisy_constants(model: nn.Module) -> dict[str, Tensor]:
    """Return noisy copies of all constant parameters, by name.

    Constant parameters, such as equal gains or weights of 0, would hide errors in a rebuilt layer.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        name: x.detach() + 0.1 * torch.randn(x.shape, generator=generator).to(x)
        for name, x in model.named_parameters()
        if x.is_floating_point() and x.numel() > 1 and bool((x == x.flatten()[0]).all())
    }


def outputs(model: nn.Module, inputs: Mapping[str, Any], changed: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Return all floating-point tensors that a model returns. Raises TypeError if there are none.

    changed: values to use in place of parameters, by name.
    """
    result = _floats(functional_call(model, dict(changed or {}), kwargs=dict(inputs)))
    if not result:
        raise TypeError("it returns no tensor of floating-point numbers")
    return result


def change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest change of an output, relative to the largest output: 0 for equal bits. NaN equals NaN."""
    if [(x.shape, x.dtype) for x in before] != [(x.shape, x.dtype) for x in after]:
        return math.inf
    largest = 0.0
    for x, y in zip(before, after):
        x, y = x.double(), y.double()
        scale = x.abs().where(x.isfinite(), 0).max().clamp_min(1e-30)
        same = (x == y) | (x.isnan() & y.isnan())
        relative = float((x - y).abs().masked_fill(same, 0).max() / scale)
        largest = math.inf if math.isnan(relative) else max(largest, relative)
    return largest


def _longer(model: nn.Module, inputs: Mapping[str, Any], changed: Mapping[str, Tensor]) -> list[Tensor]:
    ids = inputs["input_ids"]
    longer = torch.cat([ids, ids.flip(1)[:, 2:]], 1).roll(1, 0)
    mask = torch.ones_like(longer)
    mask[0, :3] = 0
    return outputs(model, {**inputs, "input_ids": longer, "attention_mask": mask}, changed)


def _in_pieces(model: nn.Module, inputs: Mapping[str, Any], changed: Mapping[str, Tensor]) -> list[Tensor]:
    result: list[Tensor] = []
    past = None
    for ids in inputs["input_ids"].tensor_split([5, 6], dim=1):
        piece = {**inputs, "input_ids": ids, "use_cache": True, CACHE: past}
        out = functional_call(model, dict(changed), kwargs=piece)
        past = out[CACHE]
        result += _floats(out[0])
    return result


def _floats(output: Any) -> list[Tensor]:
    """Return the non-empty floating-point tensors in an output."""
    return [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point() and x.numel()]


def _token_ids(model: PreTrainedModel) -> dict[str, Any]:
    config: Any = model.config
    arguments = inspect.signature(model.forward).parameters

    def flag(*names: str) -> bool:
        return any(getattr(config, name, False) is True for name in names)

    needed = [model.main_input_name if model.main_input_name in arguments else next(iter(arguments), "")]
    # T5's encoder has the class of its decoder, but is no decoder.
    attends = flag("is_encoder_decoder", "add_cross_attention") and getattr(model, "is_decoder", True)
    if "encoder_hidden_states" in arguments and attends:
        needed.append("encoder_hidden_states")
    if needed != ["input_ids"]:
        example = ", ".join(f"{name!r}: ..." for name in needed)
        raise InputError(
            f"{type(model).__name__}: inputs must be given for a model that reads more than token ids, got none; give "
            f"a small batch that it runs on, such as inputs={{{example}}}"
        )
    sizes = [getattr(config.get_text_config(decoder=True), "vocab_size", None)]
    with suppress(NotImplementedError, AttributeError):  # raised by models with several towers
        embeddings: Any = model.get_input_embeddings()
        sizes.append(len(embeddings.weight))
    rows = min((size for size in sizes if isinstance(size, int)), default=2)
    ids = torch.randint(0, rows, (2, TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    caches = "use_cache" in arguments or flag("use_cache", "is_decoder")
    return {"input_ids": ids, "use_cache": False} if caches else {"input_ids": ids}
