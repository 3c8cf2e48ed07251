"""What a run costs before anyone pays for it: parameters, FLOPs and bytes per token, memory per GPU, tokens/s and days.

Parameters and memory (`counts`, `memory`) are exact. Speed (`speed`) is a model.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from residua.checks import require
from residua.connections import Scheme
from residua.errors import InputError
from residua.estimate.counts import bytes_per_token, flops_per_token, parameters
from residua.estimate.memory import step_memory
from residua.estimate.speed import (
    GIB,
    GPUS,
    REACHED_BANDWIDTH,
    REACHED_COMPUTE,
    SCENARIOS,
    communication,
    step_seconds,
)
from residua.models import ResiduaConfig
from residua.training import RunConfig, TrainConfig
from residua.training.distributed import BatchShard, Ranks

__all__ = ["Estimate", "estimate"]


@dataclass(frozen=True)
class Estimate:
    """The result of `estimate`. Memory in bytes per GPU, under each way to keep the states of a scheme."""

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


def estimate(config: RunConfig, *, vocab_size: int, gpu: str = "h200", gpus: int = 1) -> Estimate:
    """Estimate a run; `vocab_size` counts where the configuration leaves it to the tokenizer.

    Raises:
        InputError: the GPU is not known, or this number of them cannot share a step.
    """
    require(gpu in GPUS, "--gpu", f"one of {', '.join(GPUS)}", gpu)
    require(gpus >= 1, "--gpus", "at least 1", gpus)
    device, train = GPUS[gpu], config.train
    try:
        share = BatchShard.of(train, Ranks(world_size=gpus))
    except InputError as error:  # it speaks of processes, which torchrun starts, one for each GPU
        raise InputError(f"--gpus: {str(error).removeprefix('torchrun: ')}") from error
    sharded = gpus > 1 and train.parallel == "fsdp"
    given = asdict(config.from_scratch)
    given["vocab_size"] = given["vocab_size"] or vocab_size
    model = ResiduaConfig(**given)
    state_bytes = 2 if model.state_dtype == "bfloat16" else 4

    counted = parameters(model)
    flops = flops_per_token(model, sequence_length=train.sequence_length)
    traffic = {fused: bytes_per_token(model, state_bytes=state_bytes, fused=fused) for fused in (True, False)}
    memory, largest = {}, {}
    for name, scheme in model.scheme.ways_to_keep().items():
        parts = step_memory(ResiduaConfig(**{**given, "connection": scheme}), train, share, gpus if sharded else 1)
        memory[name] = parts
        moving = parts["activations"] + parts["logits"] + parts["temporary"]
        room = device.memory - parts["total"] + moving
        largest[name] = max(0, math.floor(room / moving * share.rows_here))

    tokens_per_step = train.batch_size * train.gradient_accumulation * train.sequence_length
    sent = communication(counted["total"], train.gradient_accumulation // share.teams, gpus, sharded=sharded)
    speed = {
        name: tokens_per_step
        / step_seconds(
            device,
            scenario,
            tokens=tokens_per_step / gpus,
            flops=sum(flops.values()),
            traffic=sum(traffic[scenario.fused].values()),
            weights=counted["total"] / (gpus if sharded else 1),
            sent=sent,
        )
        for name, scenario in SCENARIOS.items()
    }
    tokens = tokens_per_step * train.steps
    return Estimate(
        parameters=counted,
        flops_per_token=flops,
        bytes_per_token=traffic[True],
        memory=memory,
        largest_batch_size=largest,
        gpu_memory=device.memory,
        tokens=tokens,
        tokens_per_second=speed,
        days={name: tokens / rate / 86400 for name, rate in speed.items()},
        assumptions=_assumptions(train, model, share, gpu, gpus, sharded, state_bytes),
    )


def _assumptions(
    train: TrainConfig, model: ResiduaConfig, share: BatchShard, gpu: str, gpus: int, sharded: bool, state_bytes: int
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
            f"{name}: {scenario.compute:.0%} of those FLOP/s, {scenario.bandwidth:.0%} of the bandwidth, "
            f"{'a fused kernel' if scenario.fused else 'separate kernels'} between sublayers"
            for name, scenario in SCENARIOS.items()
        ),
        "fused: one kernel writes, reads and normalises, whether it exists or not; residua has one only for "
        "Deep Delta Learning with value channels (implementation=triton); separate: one kernel writes, one reads and "
        "normalises; eager PyTorch moves more than either",
        "arithmetic is matrix products; arithmetic, memory traffic and communication are added, nothing overlaps; "
        "evaluation and saving are left out",
        "memory is counted for eager mode; the device's context, communication buffers and fragmentation (1 to 3 GiB) "
        "come on top",
    ]
    if train.compile:
        lines.append("train.compile: a compiled model keeps every state (none) but fewer activations of the sublayers")
    if train.activation_checkpointing:
        lines.append("train.activation_checkpointing: the speed leaves out the arithmetic of recomputing layers")
    if train.optimizer == "muon":
        lines.append("train.optimizer=muon: the speed leaves out the matrix products of its updates")
    if type(model.scheme).traffic is Scheme.traffic:
        lines.append("traffic between sublayers is modelled on Deep Delta Learning with a state of the same size")
    return tuple(lines)
