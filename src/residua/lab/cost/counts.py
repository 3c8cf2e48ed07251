"""Parameters, and the arithmetic of one token, counted on models without storage."""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from residua.errors import InputError, extra, first_line
from residua.lab.opening import fill_no_cache, new_model
from residua.lab.training.base_model import freeze_base
from residua.models import ResiduaConfig

with extra("lab"):
    from transformers import PreTrainedConfig, PreTrainedModel


def on_meta(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Build the model on the meta device. options: passed to `from_config`."""
    with torch.device("meta"):
        return new_model(config, **options)


def step_on_meta(
    config: PreTrainedConfig, length: int, counting: AbstractContextManager[Any], *, frozen: bool = False
) -> None:
    """Run forward and backward over one sequence with eager attention, inside `counting`, which counts operations.

    frozen: whether only the connections are trained, as with `model.freeze_base`.

    Raises:
        InputError: an operation of a converted model cannot run on the meta device, as one that reads a value.
    """
    config = copy.deepcopy(config)  # transformers sets the attention in the configuration, and the run has its own
    fill_no_cache(config)
    model = on_meta(config, attn_implementation="eager").train()
    if frozen:
        freeze_base(model)
    ids = torch.zeros(1, length, dtype=torch.long, device="meta")
    try:
        with counting, _WithoutValues():
            model(input_ids=ids, labels=ids, shift_labels=ids).loss.backward()
    except Exception as error:  # the model's own code may raise any exception
        name, reason = type(model).__name__, first_line(error)
        remedy = "a study of it needs --no-costs, and has no --dry-run"
        raise InputError(f"the FLOPs of {name} cannot be counted: {reason}; {remedy}") from error


def parameters(config: PreTrainedConfig) -> dict[str, int]:
    """Count the parameters of the embedding, the sublayers, and the scheme with its norms, and their total."""
    parts = {"embedding": 0, "sublayers": 0, "connections": 0}
    for name, parameter in on_meta(config).named_parameters():
        other_part = "connections" if ".stream." in name or name == "model.norm.weight" else "sublayers"
        parts["embedding" if "embed_tokens" in name or "lm_head" in name else other_part] += parameter.numel()
    return {**parts, "total": sum(parts.values())}


def flops_per_token(config: ResiduaConfig, *, sequence_length: int) -> dict[str, float]:
    """Count the matrix products of one token in a training step, forward and backward, in FLOPs.

    The counts by name:

    matrices     linear maps of the sublayers and the head, as in the plain residual
    attention    7 T d in each layer, for T tokens and heads of total width d, if the kernel skips masked pairs:
                 2 forward, 5 backward
    connections  the maps that the scheme adds

    PyTorch's counter runs over one sequence on the meta device. `elementwise` counts all other arithmetic.
    """
    plain = ResiduaConfig(**{**config.to_dict(), "connection": "residual"})
    attention = CAUSAL * _heads(config, sequence_length)
    matrices = _eager_products(plain, sequence_length) - EAGER * _heads(plain, sequence_length)
    total = products_per_token(config, sequence_length=sequence_length)
    return {"matrices": matrices, "attention": attention, "connections": total - attention - matrices}


def products_per_token(config: PreTrainedConfig, *, sequence_length: int, frozen: bool = False) -> float:
    """Count the matrix products of one token as `flops_per_token` does, also for converted models.

    frozen: as in `step_on_meta`. In a converted model, layers may have heads of several widths, or no attention, so
    attention is the part of the count that grows with the tokens before it.
    """
    counted = _eager_products(config, sequence_length, frozen)
    if isinstance(config, ResiduaConfig):
        heads = _heads(config, sequence_length)
    else:
        other = sequence_length // 2 or 2
        growth = (counted - _eager_products(config, other, frozen)) / (sequence_length - other)
        heads = max(0.0, growth) * sequence_length / EAGER  # linear attention costs less per token in a full chunk
    return counted - EAGER * heads + CAUSAL * heads


# Products of attention in units of T d, forward + backward: 2 + 5 if the kernel skips masked pairs, 4 + 8 if eager.
CAUSAL, EAGER = 7.0, 12.0


def _heads(config: ResiduaConfig, length: int) -> float:
    """Return T d, summed over the layers."""
    return float(length * config.num_attention_heads * config.head_dim * config.num_hidden_layers)


def _eager_products(config: PreTrainedConfig, length: int, frozen: bool = False) -> float:
    """Count the FLOPs per token of all matrix products, with those of eager attention."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()
    step_on_meta(config, length, counter, frozen=frozen)
    return counter.get_total_flops() / length


class _NoModules(nullcontext):
    """Replaces torch's tracker of modules, whose hooks fail if a function computes gradients inside its backward."""

    parents = frozenset({"Global"})


class _WithoutValues(TorchDispatchMode):
    """Replaces two kinds of operations in transformers' models, which fail on the meta device.

    Some models ask first whether all tokens are of one document, or any is padding. The answers are yes and no.
    In a mixture of experts, each token is multiplied by the weights of its expert. One product with as many FLOPs takes
    the place of these products, because PyTorch's counter has no formula for them.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten._grouped_mm.default:
            left, right = args[:2]
            if right.dim() == 3:  # tokens by the weights of experts
                return left @ right[0]
            return left.new_empty(len(args[2]), *(left @ right).shape)  # a gradient for the weights of each expert
        result = func(*args, **(kwargs or {}))
        if func in (aten.all.default, aten.any.default):
            return torch.tensor(func is aten.all.default)
        return result


def elementwise(model: PreTrainedConfig, length: int, *, frozen: bool = False) -> float:
    """Count the arithmetic of one token in a training step outside matrix products, in FLOPs.

    frozen: as in `step_on_meta`.

    Every operation that is neither a product nor a view counts one for each element of its largest tensor. A rank-one
    write consists of such operations, so schemes that use it would look too cheap without them.
    """
    counted = _Elements()
    step_on_meta(model, length, counted, frozen=frozen)
    return counted.total / length


class _Elements(TorchDispatchMode):
    """Adds up the elements that operations work on, except matrix products and views."""

    PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")
    FREE = ("empty", "empty_like", "empty_strided", "detach", "t", "new_empty", "new_empty_strided", "_unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in self.PRODUCTS and name not in self.FREE and not func.is_view:
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.total += max((math.prod(tensor.shape) for tensor in tensors), default=0)
        return result
