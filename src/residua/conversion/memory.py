"""The memory of a converted model whose scheme reads earlier tokens: one more layer at the end of the model's cache.

The trunk's layers see neither the padding of a batch nor, in training, the cache. A hook on the trunk finds both, and
passes the memories of all parts of the stream in a keyword argument that the trunk forwards to its layers.
"""

import inspect
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from residua.connections.parts.memory import positions_in
from residua.conversion.flow import (
    INPUTS,
    MEMORY,
    STREAM,
    ConvertedLayer,
    Flow,
    UnknownUse,
    layer_in,
    layer_streams,
    layers_in,
)
from residua.errors import InputError
from residua.models.cache import (
    CACHE,
    attention_mask_of,
    cache_for,
    cache_of,
    documents_of,
    expect_no_pages,
    expect_told_apart,
    memories,
    padding_of,
)

TEXT_AND_IMAGE_AXES = 4
"""The number of positions of a token in a model of texts and images: in the text, in time, height and width."""


def attach(model: nn.Module, stack: nn.ModuleList) -> None:
    """Register hooks: the trunk passes memories to its layers, and modules around the stack read out their outputs."""
    *outer, trunk = around(model, stack)
    trunk.register_forward_pre_hook(hand_memories, with_kwargs=True)
    for module in (*outer, trunk):
        module.register_forward_hook(read_out)
    for child in trunk.children() if layerdrop_of(trunk) else ():
        if child is not stack:
            child.register_forward_pre_hook(read_skipped)


def detach(model: nn.Module, stack: nn.ModuleList) -> None:
    """Undo `attach`."""
    *outer, trunk = around(model, stack)
    for module in (*outer, trunk, *trunk.children()):
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (hand_memories, read_out, read_skipped)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def around(model: nn.Module, stack: nn.ModuleList) -> list[nn.Module]:
    """Return the modules that contain a stack, from the model down to the trunk, of which the stack is a child."""
    return [module for module in model.modules() if module is not stack and stack in module.modules()]


def hand_memories(trunk: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pass the layers of a trunk their memories before its forward pass, if the scheme reads earlier tokens.

    Raises:
        ValueError: there is padding between tokens; documents cannot be separated; the cache cannot hold a memory;
            checkpointing is reentrant; or layers are skipped at random in training.
    """
    stack, first = _stack_of(trunk)
    if trunk.training and getattr(first, STREAM).ends[0] is None:
        expect_every_layer(trunk)
    for module in (trunk, stack[0], first):
        expect_gradients(module)  # type: ignore[arg-type]
    if not getattr(first, STREAM).looks_back:
        return None
    parts = [part for layer in layers_in(stack) for part in getattr(layer, STREAM).parts]
    names = inspect.signature(trunk.forward).parameters
    call = {**dict(zip(names, args)), **kwargs}
    given = (call.get(name) for name in ("input_ids", *INPUTS))
    tokens: Any = next((each for each in given if each is not None), None)
    if tokens is None:  # which the model refuses
        return None
    config: Any = trunk.config
    expect_no_pages(call)
    mask = attention_mask_of(call.get("attention_mask"))
    if isinstance(mask, Tensor) and call["attention_mask"].is_floating_point() and mask.dim() == 2:
        call["attention_mask"] = mask.to(call["attention_mask"].dtype)  # 0 and 1, as the model expects
    documents = _documents(trunk, tokens, call, placed="position_ids" in names)
    expect_told_apart(parts, mask, documents)
    if trunk.training and call.get("use_cache") is None and "use_cache" in names:
        call["use_cache"] = False
    recomputed = any(map(is_recomputed, (trunk, *stack)))
    cache = cache_for(call, names, config, whole=recomputed or documents is not None)
    padding = padding_of(tokens, mask, cache, documents)
    num_layers = max(len(stack), config.get_text_config().num_hidden_layers)
    return (), {**call, MEMORY: dict(zip(parts, memories(parts, cache, padding, documents, num_layers=num_layers)))}


def _stack_of(trunk: nn.Module) -> tuple[Any, ConvertedLayer]:
    """Return the list of the layers of a trunk, and the first layer without its wrappers."""
    for child in trunk.children():
        layer = layer_in(child[0]) if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) else None
        if layer is not None:
            return child, layer
    raise UnknownUse(f"{type(trunk).__name__} must have its converted layers in a list, found none")


def _documents(trunk: Any, tokens: Tensor, call: dict[str, Any], *, placed: bool) -> Tensor | None:
    """Return the document of each token, (batch, seq), or None if no documents are packed.

    Positions within documents are added to `call` if it has no positions.

    placed: whether the trunk takes positions.
    """
    mask: Any = call.get("attention_mask")
    positions: Any = call.get("position_ids")
    cached = not trunk.training and (cache_of(call)[0] is not None or bool(call.get("use_cache")))
    has_text = isinstance(positions, Tensor) and positions.dim() == 3 and len(positions) == TEXT_AND_IMAGE_AXES
    documents = documents_of(tokens, mask, positions[0] if has_text else positions, call, cached=cached)
    if documents is None or mask is not None or not placed:
        return documents
    if not has_text and "mrope_section" in (getattr(trunk.config.get_text_config(), "rope_parameters", None) or {}):
        raise ValueError(
            f"position_ids must be ({TEXT_AND_IMAGE_AXES}, batch, seq) for packed documents in a model of texts and "
            f"images, got {None if positions is None else tuple(positions.shape)}; its attention separates documents "
            "by the first axis, the positions in the text"
        )
    if positions is None:
        call["position_ids"] = positions_in(documents)
    return documents


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a module is recomputed in the backward pass, by its own checkpointing or torch's wrapper."""
    with_cache = CACHE == "cache" and not torch.is_grad_enabled()  # before 5.24, layers then leave out the cache too
    own = module.training and bool(getattr(module, "gradient_checkpointing", False)) and not with_cache
    return own or (hasattr(module, "checkpoint_impl") and torch.is_grad_enabled())


def expect_gradients(module: nn.Module) -> None:
    """Raise ValueError for a module with reentrant checkpointing, through which a state gets no gradient."""
    options = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
    reentrant = getattr(module, "gradient_checkpointing", False) and options.get("use_reentrant")
    wrapper = getattr(module, "checkpoint_impl", None)  # set by torch's checkpoint_wrapper
    if module.training and (reentrant or getattr(wrapper, "name", "") == "REENTRANT"):
        raise ValueError(
            "gradient_checkpointing_enable must get use_reentrant=False for a converted model, got True: only the last "
            "layer would get a gradient; torch's checkpoint_wrapper needs CheckpointImpl.NO_REENTRANT"
        )


LAYERDROP = ("layerdrop", "speech_encoder_layerdrop")
"""The attributes of a trunk or its configuration with the probability of skipping a layer in training."""


def layerdrop_of(trunk: Any) -> dict[str, float]:
    """Return each probability with which a trunk skips a layer in training, by the attribute that holds it."""
    if "layerdrop" in vars(trunk):
        return {"layerdrop": trunk.layerdrop}
    config = getattr(trunk, "config", None)
    return {f"config.{name}": getattr(config, name) for name in LAYERDROP if getattr(config, name, None) is not None}


def expect_every_layer(trunk: Any) -> None:
    """Raise InputError for a trunk that skips layers at random in training. Called if the scheme needs every layer.

    Such a scheme has a state that grows with depth, or a learned expand in the first layer or collapse in the last.
    """
    for name, value in layerdrop_of(trunk).items():
        if value > 0:
            raise InputError(
                f"{name} must be 0 to train with this scheme, whose layers cannot be skipped, got {value}; set "
                f"{name} = 0 on the {type(trunk).__name__}"
            )


def read_skipped(module: nn.Module, args: Any) -> Any:
    """Read out a state that reaches a module after the stack because the last layers were skipped."""
    if any(isinstance(x, Flow) and x.end is not None for x in args):
        return tuple([x.read_out(x.end) if isinstance(x, Flow) else x for x in args])
    return None


def read_out(module: nn.Module, args: Any, output: Any) -> Any:
    """Read out every state in the output of a module around the layers, as a hook after its forward pass.

    Raises:
        ValueError: the scheme reads earlier tokens, so each of these readouts would need its own memory.
    """
    if isinstance(output, Flow):
        last = layer_streams(module)[-1]
        if last.looks_back:
            raise ValueError("output_hidden_states must be False, since this scheme reads earlier tokens in a readout")
        return output.read_out(last.collapse)
    if isinstance(output, (tuple, list)):
        items = [read_out(module, args, item) for item in output]
        return output if all(map(is_, items, output)) else type(output)(items)
    if isinstance(output, Mapping):
        for name, item in output.items():
            if (x := read_out(module, args, item)) is not item:
                output[name] = x  # type: ignore[index]
    return output
