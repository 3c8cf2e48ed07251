"""The memory of a training step on one GPU, counted operation by operation: exact for PyTorch's eager mode."""

import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from residua.connections.parts.projection import LINEAR_MAPS
from residua.lab.cost.counts import on_meta
from residua.lab.training import TrainConfig, hidden_matrices
from residua.lab.training.distributed import BatchShard, recompute_layers
from residua.models import ResiduaConfig, ResiduaForCausalLM


class Activations(NamedTuple):
    """The bytes that one micro-batch needs in addition to weights and gradients, in eager mode, at the step's peak.

    kept: tensors that the forward pass keeps for the backward pass; casts: bfloat16 copies of weights, made by
    autocast; logits: logits and the tensors that the loss keeps; temporary: all other tensors at the peak.
    """

    kept: int
    casts: int
    logits: int
    temporary: int


def activation_memory(
    config: ResiduaConfig,
    *,
    batch_size: int,
    sequence_length: int,
    autocast: bool,
    recompute: bool = False,
    fake: bool = True,
) -> Activations:
    """Count the bytes alive during a forward and a backward pass, by running them on fake tensors.

    recompute: keep only the inputs of layers. fake: False runs on real CPU tensors, with the same result.
    """
    model = on_meta(config) if fake else ResiduaForCausalLM(config)  # fake tensors cannot compute initial values
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        if fake:
            model.to_empty(device="cpu").tie_weights()
        model.train()
        if recompute:
            recompute_layers(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # as in every micro-batch except the first
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
        live = _Live([ids, *model.parameters(), *(parameter.grad for parameter in model.parameters())])
        after_trunk: list[int] = []
        model.model.register_forward_hook(lambda *_: after_trunk.append(live.total))
        with live:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=ids, labels=ids, shift_labels=ids).loss
            after_forward = live.total
            loss.backward()
        head = 2 * model.lm_head.weight.numel() if autocast else 0
        lasting = [module for name, module in model.named_modules() if not (recompute and ".layers." in name)]
        maps = [module.weight.numel() for module in lasting if isinstance(module, LINEAR_MAPS)]
        casts = 2 * sum(maps) if autocast else 0
        logits = after_forward - after_trunk[0] - head
        return Activations(after_forward - logits - casts, casts, logits, live.peak - after_forward)


class _Live(TorchDispatchMode):
    """Track the storages that operations allocate: the sizes of the live storages, their sum, and its peak."""

    def __init__(self, excluded: list[Tensor]):
        super().__init__()
        self.excluded = {tensor.untyped_storage()._cdata for tensor in excluded}
        self.sizes: dict[int, int] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.excluded or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.total += storage.nbytes()
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key, 0)


def step_memory(model: ResiduaConfig, train: TrainConfig, share: BatchShard) -> dict[str, float]:
    """Count the bytes of each part of a training step on one GPU, and their total."""
    autocast = train.precision == "bfloat16"
    activations = activation_memory(
        model,
        batch_size=share.rows_here,
        sequence_length=train.sequence_length,
        autocast=autocast,
        recompute=train.activation_checkpointing,
    )
    meta = on_meta(model)
    count = meta.num_parameters()
    muon = sum(x.numel() for x in hidden_matrices(meta)) if train.optimizer == "muon" else 0  # Muon keeps one moment
    parts = {
        "weights": 4.0 * count,
        "gradients": 4.0 * count,
        "optimizer": 8.0 * count - 4 * muon,
        "copies": float(activations.casts),
        "activations": activations.kept,
        "logits": activations.logits,
        "temporary": activations.temporary,
    }
    return parts | {"total": sum(parts.values())}
