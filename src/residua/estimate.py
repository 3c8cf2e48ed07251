"""What a run costs before anyone pays for it: parameters, FLOPs and bytes per token, memory per GPU, tokens/s and days.

Parameters and memory are counted on models without storage, operation by operation; they are exact for PyTorch's eager
mode. Speed is a model: arithmetic at a share of what the GPU is assumed to reach, and beside it, not overlapped, the
memory traffic of everything between the matrix products. No figure of a GPU here was measured.
"""

import math
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from residua.connections import DeepDelta, Residual, Scheme
from residua.errors import InputError
from residua.models import ResiduaConfig, ResiduaForCausalLM
from residua.training import RunConfig, TrainConfig
from residua.training.distributed import Ranks, Share, layers_of, recompute_layers

Kernels = Literal["fused", "separate"]
GIB = 2**30
ADAMW_BYTES = 28
"""Of one parameter in one step: weight, gradient and two moments are read, all but the gradient written, in float32."""


class GPU(NamedTuple):
    """One device: memory in bytes, and its ceilings: bfloat16 FLOP/s of matrix products, bytes/s of memory and link."""

    memory: float
    compute: float
    bandwidth: float
    link: float


# What large matrix products and copies are assumed to reach of a vendor's figures; no GPU was measured.
REACHED_COMPUTE, REACHED_BANDWIDTH = 0.8, 0.9


def _vendor(memory: float, teraflops: float, terabytes: float, link: float) -> GPU:
    return GPU(
        memory * GIB,
        teraflops * REACHED_COMPUTE * 1e12,
        terabytes * REACHED_BANDWIDTH * 1e12,
        link * 1e9,
    )


GPUS: Mapping[str, GPU] = {
    "h200": _vendor(139, 989, 4.8, 450),
    "h100": _vendor(79, 989, 3.35, 450),
    "b200": _vendor(179, 2250, 8.0, 900),
    "a100": _vendor(79, 312, 2.04, 300),
    "rtx4090": _vendor(23.5, 165, 1.01, 25),
}


class Used(NamedTuple):
    """Of a GPU's ceilings, what is used on the whole, and how the operations between the products are computed."""

    compute: float
    bandwidth: float
    kernels: Kernels


SCENARIOS: Mapping[str, Used] = {
    "ceiling": Used(1.0, 1.0, "fused"),
    "expected": Used(0.5, 0.8, "fused"),
    "unfused": Used(0.5, 0.8, "separate"),
}


def boundary_bytes(scheme: Scheme, *, state_bytes: int, kernels: Kernels = "fused") -> tuple[float, float]:
    """Bytes between two sublayers for one token and feature, forward and backward; times dim is for one token.

    A boundary writes the state, reads it for the next sublayer and normalises. With n rows of `state_bytes`, one pass
    over the state is P = n state_bytes; everything else is in bfloat16. Fused, in one kernel: 2 P + 4 forward (state in
    and out, k in, x out) and 3 P + 6 backward (2 P + 4 for the plain residual, which needs no state for its gradient);
    a convolution over tokens adds P / 8 + 2 and P / 8 + 4 (tokens read twice by neighbours, x_in); recomputing states
    from each m-th one adds m - 1 backward. Separate, one kernel for the write and one for read and norm: 3 P + 6 and
    6 P + 10.
    """
    passes = scheme.state_rows * state_bytes
    if isinstance(scheme, Residual):
        return 2 * passes + 4, 2 * passes + 4
    if kernels == "separate":
        return 3 * passes + 6, 6 * passes + 10
    forward, backward = 2.0 * passes + 4, 3.0 * passes + 6
    if isinstance(scheme, DeepDelta):
        if scheme.compress == "token":
            forward, backward = forward + passes / 8 + 2, backward + passes / 8 + 4
        if scheme.recompute == "replay" and scheme.value_channels > 1:
            backward += scheme.recompute_every - 1
    return forward, backward


def bytes_per_token(config: ResiduaConfig, *, state_bytes: int, kernels: Kernels = "fused") -> dict[str, float]:
    """Memory traffic of one token in a training step, forward and backward, beside that of the matrix products.

    connections  `boundary_bytes` for every sublayer
    sublayers    20 bytes a feature and layer for rotation and norm of queries and keys, 16 a feature of the SwiGLU
    logits       8 bytes for each
    """
    boundary = sum(boundary_bytes(config.scheme, state_bytes=state_bytes, kernels=kernels))
    width = config.num_attention_heads * config.head_dim
    return {
        "connections": boundary * config.hidden_size * 2 * config.num_hidden_layers,
        "sublayers": (20 * width + 16 * config.intermediate_size) * config.num_hidden_layers,
        "logits": 8.0 * config.vocab_size,
    }


def flops_per_token(config: ResiduaConfig, *, sequence_length: int) -> dict[str, float]:
    """Arithmetic of one token in a training step, forward and backward.

    matrices     6 for each weight of a linear map, the head among them
    attention    7 T d in each layer for a causal mask that skips what it hides: 2 forward, 5 backward
    connections  write, read and norm; below one percent
    """
    model = _on_meta(config)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    scheme, d, n = config.scheme, config.hidden_size, config.scheme.state_rows
    if isinstance(scheme, Residual):
        elementwise = 5 * d
    elif isinstance(scheme, DeepDelta):
        taps = scheme.compress_kernel if scheme.compress == "token" else 1
        elementwise = (4 * n + 3 + 2 * n * taps + 4) * d
    else:
        elementwise = (2 * n * n + 4 * n + 4) * d  # a mixing matrix, a read and a write
    return {
        "matrices": 6.0 * weights,
        "attention": 7.0 * sequence_length * config.num_attention_heads * config.head_dim * config.num_hidden_layers,
        "connections": 3.2 * elementwise * 2 * config.num_hidden_layers,
    }


def parameters(config: ResiduaConfig) -> dict[str, int]:
    """Parameters: those of the embedding, of the sublayers, of the scheme with its norms, and all of them."""
    model = _on_meta(config)
    parts = {"embedding": 0, "sublayers": 0, "connections": 0}
    for name, parameter in model.named_parameters():
        inside = "connections" if ".stream." in name or name == "model.norm.weight" else "sublayers"
        parts["embedding" if "embed_tokens" in name or "lm_head" in name else inside] += parameter.numel()
    return {**parts, "total": sum(parts.values())}


class Activations(NamedTuple):
    """Bytes that one micro-batch adds to weights and gradients in eager mode, at the moment when they are most.

    kept: by the forward pass for the backward pass; casts: bfloat16 copies of weights, made by autocast; logits: logits
    and what the loss keeps; temporary: what comes on top at the peak.
    """

    kept: int
    casts: int
    logits: int
    temporary: int

    @property
    def peak(self) -> int:
        return sum(self)


def activation_memory(
    config: ResiduaConfig,
    *,
    batch_size: int,
    sequence_length: int,
    autocast: bool,
    recompute: bool = False,
    fake: bool = True,
) -> Activations:
    """Count the storages alive during a forward and a backward pass, by running it on tensors without data.

    `recompute` keeps the inputs of layers alone. `fake=False` runs it on real tensors of the CPU, which must give the
    same.
    """
    with FakeTensorMode() if fake else nullcontext():
        return _run(config, batch_size, sequence_length, autocast, recompute)


def _run(config: ResiduaConfig, batch_size: int, sequence_length: int, autocast: bool, recompute: bool) -> Activations:
    model = ResiduaForCausalLM(config).train()
    if recompute:
        recompute_layers(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # as in every micro-batch but the first
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
    casts = 2 * sum(module.weight.numel() for module in lasting if isinstance(module, nn.Linear)) if autocast else 0
    logits = after_forward - after_trunk[0] - head
    return Activations(after_forward - logits - casts, casts, logits, live.peak - after_forward)


class _Live(TorchDispatchMode):
    """Follows the storages that operations make: their sizes while they are alive, the sum, and its peak."""

    def __init__(self, known: list[Tensor]):
        super().__init__()
        self.known = {tensor.untyped_storage()._cdata for tensor in known}
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
        if key in self.known or key in self.sizes:
            return
        self.sizes[key] = storage.nbytes()
        self.total += storage.nbytes()
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.total -= self.sizes.pop(key, 0)


@dataclass(frozen=True)
class Estimate:
    """The result of `estimate`. Memory in bytes per GPU, under each way to keep the states of a scheme that has one."""

    parameters: Mapping[str, int]
    flops_per_token: Mapping[str, float]
    bytes_per_token: Mapping[str, float]
    memory: Mapping[str, Mapping[str, float]]
    largest_batch_size: Mapping[str, int]
    gpu_memory: float
    tokens: int
    tokens_per_second: Mapping[str, float]
    days: Mapping[str, float]
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def estimate(config: RunConfig, *, vocab_size: int, gpu: str = "h200", gpus: int = 1) -> Estimate:
    """Estimate a run; `vocab_size` counts where the configuration leaves it to the tokenizer.

    Raises:
        InputError: the GPU is not known, or this number of them cannot share a step.
    """
    if gpu not in GPUS:
        raise InputError(f"--gpu: expected one of {', '.join(GPUS)}, got {gpu!r}")
    if gpus < 1:
        raise InputError(f"--gpus: expected at least 1, got {gpus}")
    device, train = GPUS[gpu], config.train
    try:
        share = Share.of(train, Ranks(world_size=gpus))
    except InputError as error:  # it speaks of processes, which torchrun starts, one for each GPU
        raise InputError(f"--gpus: {str(error).removeprefix('torchrun: ')}") from error
    sharded = gpus > 1 and train.parallel == "fsdp"
    given = asdict(config.model)
    given["vocab_size"] = given["vocab_size"] or vocab_size
    model = ResiduaConfig(**given)
    state_bytes = 2 if model.state_dtype == "bfloat16" else 4

    counted = parameters(model)
    flops = flops_per_token(model, sequence_length=train.sequence_length)
    traffic = {name: bytes_per_token(model, state_bytes=state_bytes, kernels=name) for name in ("fused", "separate")}
    memory, largest = {}, {}
    for name, scheme in _recompute_modes(model.scheme).items():
        chosen = ResiduaConfig(**{**given, "connection": scheme})
        parts = _memory(chosen, train, share, gpus if sharded else 1)
        memory[name] = parts | {"total": sum(parts.values())}
        moving = parts["activations"] + parts["logits"] + parts["temporary"]
        room = device.memory - memory[name]["total"] + moving
        largest[name] = max(0, math.floor(room / moving * share.rows_here))

    tokens_per_step = train.batch_size * train.gradient_accumulation * train.sequence_length
    sent = _communication(counted["total"], train.gradient_accumulation // share.teams, gpus, sharded)
    speed = {}
    for name, used in SCENARIOS.items():
        token = sum(flops.values()) / (device.compute * used.compute)
        token += sum(traffic[used.kernels].values()) / (device.bandwidth * used.bandwidth)
        held = counted["total"] / (gpus if sharded else 1)
        update = ADAMW_BYTES * held / (device.bandwidth * used.bandwidth)
        speed[name] = tokens_per_step / (token * tokens_per_step / gpus + update + sent / device.link)
    tokens = tokens_per_step * train.steps
    return Estimate(
        parameters=counted,
        flops_per_token=flops,
        bytes_per_token=traffic["fused"],
        memory=memory,
        largest_batch_size=largest,
        gpu_memory=device.memory,
        tokens=tokens,
        tokens_per_second=speed,
        days={name: tokens / rate / 86400 for name, rate in speed.items()},
        assumptions=_assumptions(train, model, share, gpu, gpus, sharded, state_bytes),
    )


def _on_meta(config: ResiduaConfig) -> ResiduaForCausalLM:
    with torch.device("meta"):
        return ResiduaForCausalLM(config)


def _recompute_modes(scheme: Scheme) -> dict[str, Scheme]:
    """The ways to keep the states of a scheme: its own first, then the other; one for a scheme without the choice."""
    if not isinstance(scheme, DeepDelta) or scheme.value_channels == 1:
        return {"all": scheme}
    other = "none" if scheme.recompute == "replay" else "replay"
    return {scheme.recompute: scheme, other: replace(scheme, recompute=other)}


def _memory(model: ResiduaConfig, train: TrainConfig, share: Share, shards: int) -> dict[str, float]:
    """Bytes of each part on one GPU; `shards` is 1 for whole models."""
    autocast = train.precision == "bfloat16"
    found = activation_memory(
        model,
        batch_size=share.rows_here,
        sequence_length=train.sequence_length,
        autocast=autocast,
        recompute=train.activation_checkpointing,
    )
    whole = _on_meta(model)
    count = sum(parameter.numel() for parameter in whole.parameters())
    gradients, copies = 4.0 * count / shards, float(found.casts)
    if shards > 1:
        # The root is whole in float32; of the layers, one in use and one on its way. Until the last micro-batch of a
        # step the gradients are whole too.
        inside = sum(parameter.numel() for layer in layers_of(whole) for parameter in layer.parameters())
        copies = 4 * (count - inside) + 2 * (2 if autocast else 4) * inside / model.num_hidden_layers
        if autocast:
            copies += 2 * whole.lm_head.weight.numel()
        if train.gradient_accumulation > share.teams:
            gradients += 4 * count
    return {
        "weights": 4 * count / shards,
        "gradients": gradients,
        "optimizer": 8 * count / shards,
        "copies": copies,
        "activations": found.kept,
        "logits": found.logits,
        "temporary": found.temporary,
    }


def _communication(count: int, micro_batches: int, gpus: int, sharded: bool) -> float:
    """Bytes that a GPU sends in one step, over a ring: gradients, and for shards the weights of every micro-batch."""
    ring = (gpus - 1) / gpus
    if not sharded:
        return 2 * ring * 4 * count
    return ring * 4 * count + micro_batches * 2 * ring * 2 * count


def _assumptions(
    train: TrainConfig, model: ResiduaConfig, share: Share, gpu: str, gpus: int, sharded: bool, state_bytes: int
) -> tuple[str, ...]:
    device = GPUS[gpu]
    low = train.precision == "bfloat16"
    lines = [
        f"vocabulary {model.vocab_size:,}; a step is {train.batch_size} x {train.gradient_accumulation} sequences of "
        f"{train.sequence_length}; {gpus} {gpu}, {'shards of a model' if sharded else 'a whole model on each'}, "
        f"{train.gradient_accumulation // share.teams} micro-batches of {share.rows_here} sequences a step",
        f"{gpu}: {device.compute / 1e12:.0f} TFLOP/s, {device.bandwidth / 1e12:.2f} TB/s, link "
        f"{device.link / 1e9:.0f} GB/s, {device.memory / GIB:.0f} GiB ({REACHED_COMPUTE:.0%} and "
        f"{REACHED_BANDWIDTH:.0%} of the vendor's figures for arithmetic and memory; no GPU was measured)",
        f"the residual state has {8 * state_bytes} bits; matrix products in "
        + ("bfloat16, weights in float32" if low else "float32, but timed as in bfloat16"),
        *(
            f"{scenario}: {used.compute:.0%} of those FLOP/s, {used.bandwidth:.0%} of the bandwidth, {used.kernels} "
            "kernels between sublayers"
            for scenario, used in SCENARIOS.items()
        ),
        "arithmetic, memory traffic and communication are added, nothing overlaps; evaluation and saving are left out",
        "memory is counted for eager mode; the device's context, communication buffers and fragmentation (1 to 3 GiB) "
        "come on top",
    ]
    if train.compile:
        lines.append("train.compile: a compiled model keeps every state (none) but fewer activations of the sublayers")
    if train.activation_checkpointing:
        lines.append("train.activation_checkpointing: the arithmetic of computing layers again is not in the speed")
    if not isinstance(model.scheme, (DeepDelta, Residual)):
        lines.append("traffic between sublayers is modelled on Deep Delta Learning with as many rows of state")
    return tuple(lines)
